"""The loop shared by trainers of agents in a protocol."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import LossModule

from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.evaluation.storage import read_rows
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.rl_objectives import Objective
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.objective import Frames, frames_of
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer
from tests.kit.experiments import RecordingTracker, run_in
from tests.kit.resuming import short_experiment
from tests.kit.toy_protocol_scenario import KIND, toy_kind, toy_trainer

pytestmark = pytest.mark.usefixtures("toy_protocol")

AGENTS = ("prover", "verifier")


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.agents.state_dict().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def parts_changed(trainer: Any) -> set[str]:
    """Train, and return the parts of agents that changed."""
    before = weights_of(trainer)
    trainer.train()
    names = changed(before, weights_of(trainer))
    return {".".join(name.removeprefix("agents.").split(".")[:2]) for name in names}


class Likely(Objective):
    """Makes every move likelier, by a loss of each agent."""

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        view = self.policy_view(name, batch)
        return {"loss_likely": -view.mean(view.evaluation.logprobs_B)}


class LikelyTogether(Objective):
    """The same by a `forward` of its own, which returns the losses of all agents together."""

    def forward(self, batch: TensorDict) -> TensorDict:
        assert ("next", "agents", "reward") in batch.keys(True)
        logprobs = [self.agents.evaluate(name, frames_of(batch)).logprobs_B for name in AGENTS]
        likely = -torch.stack(logprobs).mean()
        return TensorDict({"loss_likely": likely, "likelihood": likely.exp().detach()})


class ScaledValues(LossModule):
    """A module of TorchRL that has weights of its own, and no notion of agents."""

    def __init__(self, agents: Any) -> None:
        super().__init__()
        self.agents = agents
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, tensordict: TensorDict) -> TensorDict:
        values = torch.stack([self.agents.values(name, tensordict) for name in AGENTS])
        return TensorDict({"loss_value": (values * self.scale - 1).square().mean()})


def trainer_with(loss_module: type[LossModule], **more: Any) -> Any:
    """A trainer with a single method."""

    class Mine(TensorDictRlTrainer):
        def _get_loss_module_and_gae(self) -> tuple[LossModule, None]:
            return loss_module(self.agents), None

    return toy_trainer("my_trainer", trainer_class=Mine, **more)


@pytest.mark.parametrize(
    ("loss_module", "parts", "logged"),
    [
        (Likely, ("policy_body", "policy_head"), "prover/loss_likely"),
        (LikelyTogether, ("policy_body", "policy_head"), "likelihood"),
        (ScaledValues, ("value_body", "value_head"), "loss_value"),
    ],
)
def test_a_trainer_is_one_method_that_returns_any_loss_module(
    loss_module: type[LossModule], parts: tuple[str, ...], logged: str
) -> None:
    trainer = trainer_with(loss_module)
    assert parts_changed(trainer) == {f"{agent}.{part}" for agent in AGENTS for part in parts}
    own = [weight for name, weight in trainer.loss_module.named_parameters() if name == "scale"]
    assert [float(weight.detach()) != 1 for weight in own] == [True] * (logged == "loss_value")
    assert logged in trainer.state.last
    assert 0 <= trainer.results["after"]["mean_accuracy"] <= 1
    frozen = {"verifier": {"update_schedule": {"_type": "constant", "is_on": False}}}
    trainer = trainer_with(loss_module, **{KIND: {"agents": frozen}})
    assert {part.partition(".")[0] for part in parts_changed(trainer)} == {"prover"}


def test_a_loss_module_without_the_second_value_is_refused_with_the_pair_to_return() -> None:
    class Alone(TensorDictRlTrainer):
        def _get_loss_module_and_gae(self) -> Any:
            return Likely(self.agents)

    with pytest.raises(ConfigurationError, match=r"Alone returned Likely.*gae"):
        toy_trainer("my_trainer", trainer_class=Alone)


def test_the_gae_is_made_from_the_loss_module_as_in_the_guide() -> None:
    trainer = toy_trainer()
    loss_module, gae = trainer._get_loss_module_and_gae()
    assert gae is loss_module.value_estimator
    assert trainer.collect()["agents", "advantage"].shape == (32, 3, 2, 1)


def test_a_forward_of_its_own_wins_over_losses_that_are_inherited() -> None:
    class Doubled(IppoObjective):
        num_calls = 0

        def forward(self, batch: TensorDict) -> TensorDict:
            type(self).num_calls += 1
            losses: TensorDict = super().forward(batch)
            return losses

    class Doubling(VanillaPpoTrainer):
        def _get_loss_module_and_gae(self) -> Any:
            loss_module = Doubled(self.agents, self.hyper_params.ppo, self.rl)
            loss_module.make_value_estimator(gamma=self.rl.gamma, lmbda=self.rl.lmbda)
            return loss_module, loss_module.value_estimator

    plain, own = toy_trainer(), toy_trainer("vanilla_ppo", trainer_class=Doubling)
    assert own.loss_module.has_own_forward()
    assert not own.loss_module.has_parts()
    assert not plain.loss_module.has_own_forward()
    assert plain.loss_module.has_parts()
    for trainer in (plain, own):
        trainer.train()
    assert Doubled.num_calls == own.state.num_optimizer_steps > 0
    torch.testing.assert_close(weights_of(plain), weights_of(own))


def test_an_objective_without_losses_is_refused_when_it_is_made() -> None:
    class Empty(Objective):
        """Has no losses."""

    with pytest.raises(ConfigurationError, match=r"Empty.*agent_losses.*forward"):
        Empty(toy_trainer().agents)


def test_rollouts_may_be_counted_in_place_of_frames() -> None:
    trainer = toy_trainer(rl={"rollouts_per_iteration": 5, "steps_per_env_per_iteration": 4})
    assert trainer.collect().batch_size == (5, 4)
    assert trainer.frames_per_iteration == 20
    trainer.train()
    training = trainer.results["training"]
    assert training["num_frames"] == 20 * training["num_iterations"]


def test_a_scenario_without_a_protocol_is_refused() -> None:
    trainer = toy_trainer()
    with pytest.raises(ConfigurationError, match="agents that play a protocol"):
        VanillaPpoTrainer(trainer.hyper_params, ScenarioInstance(kind="plain"))


# ---- before and after


def test_histories_are_normalised_by_random_play_unless_an_agent_reads_them_as_they_are() -> None:
    sizes = {"frames_per_batch": 900, "num_normalization_steps": 900}
    trainer = toy_trainer(
        rl={"normalize_observations": True, **sizes},
        toy_protocol={"agents": {"verifier": {"normalize_message_history": False}}},
    )
    with ExitStack() as stack:
        trainer._build_train_context(stack)
        trainer._prepare()
    history = trainer.agents["prover"].policy_body.history(trainer.collect().flatten())[:, 0]
    assert float(history.mean()) == pytest.approx(0.0, abs=0.15)
    assert float(history.std()) == pytest.approx(1.0, abs=0.15)
    for body in trainer.agents["prover"].bodies:
        assert 0.1 < float(body.history_mean[0].sum()) < 1
        assert float(body.history_mean[2].sum()) == 0, "the last round is never looked back on"
    assert not any(body.history_mean.any() for body in trainer.agents["verifier"].bodies)


def test_statistics_are_logged_by_agent_and_for_all() -> None:
    trainer = toy_trainer()
    trainer.tracker = RecordingTracker()
    trainer.train()
    row, *_, last = trainer.tracker.rows
    of_loss = ["kl", "clip_fraction", "ratio_outside_clip", "ess"]
    of_agent = (
        *("mean_step_reward", "mean_episode_reward", "worst_episode_reward", "mean_advantage"),
        *("mean_value", "mean_value_target", "residual_critic_variance", "grad_norm", "lr"),
        *("mean_message_entropy", "std_message_entropy"),
        *("mean_max_message_prob", "std_max_message_prob"),
    )
    of_all = ("mean_episode_length", "mean_accuracy", "std_accuracy", "share_undecided")
    of_all += ("worst_datapoint_accuracy",)
    assert {f"prover/{name}" for name in (*of_agent, *of_loss)} | {*of_all, *of_loss} <= row.keys()
    assert "verifier/mean_decision_entropy" in row
    assert "prover/mean_decision_entropy" not in row, "a prover decides nothing"
    assert {"test_mean_accuracy", "verifier/test_mean_episode_reward"} <= last.keys()
    assert trainer.results["kind"] == "interaction_proof"
    assert trainer.results["agents"] == list(AGENTS)


def test_the_tests_before_and_after_are_about_the_same_conversations() -> None:
    schedule = {"update_schedule": {"_type": "constant", "is_on": False}}
    trainer = toy_trainer(toy_protocol={"agents": {"default": schedule}})
    trainer.train()
    assert trainer.results["before"] == trainer.results["after"]


def test_tests_play_the_same_datapoints_however_long_episodes_last() -> None:
    trainer = toy_trainer(
        nip={"max_message_rounds": 6}, toy_protocol={"num_datapoints": 96}, rl={"lr": 0.1}
    )

    def first_frames() -> list[TensorDict]:
        batches = trainer.test_batches(trainer.test_environment, (0, "test"), range(3))
        return [batch[:, 0] for _, batch in batches]

    before = first_frames()
    # Each batch continues with the datapoint after the previous batch's last.
    numbers = torch.cat([frames["datapoint_id"] for frames in before]).flatten()
    trainer.test_environment.restart()
    assert numbers.equal(trainer.test_environment.fresh(len(numbers))["datapoint_id"].flatten())
    trainer.train()
    for frames, later in zip(before, first_frames(), strict=True):
        assert frames["datapoint_id"].equal(later["datapoint_id"])
        assert frames["seed"].equal(later["seed"])


def test_optimizers_of_other_agents_are_refused() -> None:
    optimizers = toy_trainer().optimizers
    state = optimizers.state_dict()
    state["judge"] = state.pop("verifier")
    with pytest.raises(CheckpointError, match="'judge'"):
        optimizers.load_state_dict(state)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = RunDirectory.create(tmp_path_factory.mktemp("runs"), "first")
    directory.write_yaml("hyper_parameters.yaml", {})
    with toy_kind():
        toy_trainer(settings=ExperimentSettings(progress=False, run_directory=directory)).train()
    return directory.path


@pytest.fixture
def first(finished: Path, tmp_path: Path) -> Path:
    """The directory of a finished run named `first`."""
    return Path(shutil.copytree(finished, tmp_path / "first"))


def trainer_beside(first: Path, prover: dict[str, Any], **more: Any) -> Any:
    """A trainer whose prover starts from another run, by the given parameters."""
    settings = ExperimentSettings(progress=False, runs_dir=str(first.parent))
    agents = {"agents": {"prover": {"load_from_run": "first"} | prover}}
    return toy_trainer(seed=7, settings=settings, toy_protocol=agents, **more)


def has_weights(agent: Agent, stored: Path) -> bool:
    own = agent.state_dict()
    return all(torch.equal(own[name], value) for name, value in load_file(stored).items())


# ---- runs, and agents that start from others


@pytest.mark.parametrize("trainer", ["vanilla_ppo", "solo_agent"])
def test_a_run_hands_its_agents_and_checkpoints_to_the_tracker(
    trainer: str, tmp_path: Path
) -> None:
    run = RunDirectory.create(tmp_path, "one")
    settings = ExperimentSettings(progress=False, run_directory=run)
    built = toy_trainer(settings=settings, trainer=trainer)
    built.tracker = RecordingTracker()
    built.train()
    assert built.tracker.artifacts == [
        ("checkpoint-one", "checkpoint", ("latest",)),
        ("agents-one", "model", ()),
    ]
    assert run.read_json("results.json")["model_dir"] == str(run.path / "model")


def test_a_run_from_files_keeps_its_episodes_and_warns_on_resume_if_layers_are_computed_differently(
    tmp_path: Path,
) -> None:
    resolved = short_experiment("vanilla_ppo", tmp_path / "toy", num_iterations=3)
    run = RunDirectory.open(run_in(tmp_path / "runs", resolved))
    results = run.read_json("results.json")
    assert results["training"]["num_iterations"] == 3
    for table in ("before", "train", "evaluation"):
        assert (run.rollouts_dir / f"{table}.jsonl").stat().st_size > 0
    rows, after = read_rows(run.rollouts_dir / "evaluation_outcomes.jsonl"), results["after"]
    assert len(rows) == after["num_episodes"]
    assert sum(row["is_correct"] for row in rows) / len(rows) == pytest.approx(
        after["mean_accuracy"]
    )
    environment = run.read_json("environment.json")
    assert environment["layers"] == "torch"
    assert environment["processor"]
    for layers, is_warned in (("torch", False), ("compiled: toy.c 12", True)):
        run.write_json("environment.json", environment | {"layers": layers})
        (run.path / "results.json").unlink()
        (run.path / "log.txt").unlink()
        assert resume_experiment(run.path, progress=False).results["after"] == after
        log = (run.path / "log.txt").read_text()
        assert (f"layers was '{layers}' and is 'torch'" in log) is is_warned
        assert run.read_json("environment.json")["layers"] == layers


def test_an_agent_starts_from_the_final_weights_or_a_checkpoint_of_another_run(first: Path) -> None:
    (checkpoint,) = (first / "checkpoints").glob("step_*")
    at_end, stored = first / "model" / "prover.safetensors", checkpoint / "agents"
    save_file({name: value + 1 for name, value in load_file(at_end).items()}, at_end)
    agents = trainer_beside(first, {}).agents
    assert has_weights(agents["prover"], at_end)
    assert not has_weights(agents["verifier"], first / "model" / "verifier.safetensors")
    agents = trainer_beside(first, {"checkpoint_version": checkpoint.name}).agents
    assert has_weights(agents["prover"], stored / "prover.safetensors")
    with pytest.raises(CheckpointError, match=rf"step_99.*{checkpoint.name}"):
        trainer_beside(first, {"checkpoint_version": "step_99"})
    (stored / "prover.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError):
        trainer_beside(first, {"checkpoint_version": checkpoint.name})


def test_agents_start_from_those_of_a_run_on_w_and_b(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def download(reference: str, folder: Path, version: str) -> None:
        requests.append((reference, version))
        shutil.copytree(first / "model", folder)

    monkeypatch.setattr(wandb_runs, "download_model", download)
    run = "wandb://us/proofs/one"
    chosen = {"load_from_run": run, "checkpoint_version": "v3"}
    agents = dict.fromkeys(("prover", "verifier"), chosen)
    trainer = toy_trainer(seed=7, toy_protocol={"agents": agents})
    assert requests == [(run, "v3")]
    for name in agents:
        assert has_weights(trainer.agents[name], first / "model" / f"{name}.safetensors")


def test_a_loaded_agent_is_neither_pretrained_nor_given_other_statistics(first: Path) -> None:
    trainer = trainer_beside(
        first,
        {"agent_lr_factor": {"actor": 0, "critic": 0}},
        rl={"pretrain_agents": True, "normalize_observations": True, "num_iterations": 1},
        solo_agent={"num_epochs": 1},
    )
    untrained = trainer.agents["verifier"].policy_body.history_mean.clone()
    trainer.train()
    assert has_weights(trainer.agents["prover"], first / "model" / "prover.safetensors")
    assert not torch.equal(trainer.agents["verifier"].policy_body.history_mean, untrained)


def test_an_agent_that_does_not_fit_is_refused(first: Path) -> None:
    with pytest.raises(CheckpointError, match=r"net\.0\.weight has shape \[16, 12\] there"):
        trainer_beside(first, {"d_hidden": 8})
    file = first / "model" / "prover.safetensors"
    weights = {k: v for k, v in load_file(file).items() if not k.startswith("value_body")}
    save_file({**weights, "solo_head.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"trained alone.* set rl\.pretrain_agents=true"):
        trainer_beside(first, {})
    for file in first.rglob("prover.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has saved verifier"):
        trainer_beside(first, {"load_from_run": str(first)})
