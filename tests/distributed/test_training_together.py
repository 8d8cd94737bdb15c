"""Several processes learn the same as one, and a run continues in any number of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from nip_astra.checkpoints.shards import load_whole
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.distributed.sharding import local_tensor
from nip_astra.distributed.team import ProcessTeam, open_team
from nip_astra.errors import ConfigurationError, LostProcessError, StopRequested
from nip_astra.evaluation.api import export
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models import huggingface
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.trainer_base import Trainer
from tests.distributed.processes import together
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.tiny import CPU

LORA = "ast_chat.attacker.language_model.lora={rank: 2}"

pytestmark = pytest.mark.usefixtures("no_plugins_left")


def learn(
    resolved: ResolvedExperiment,
    store: str | None,
    sharding: str = "none",
    *,
    in_float64: bool = True,
    scores_by_module: bool = False,
    inspect: Callable[[Any], dict[str, Any]] = lambda trainer: {},
    **settings: Any,
) -> dict[str, Any]:
    """Train in this process or as one of several, without writing files.

    Returns the weights (if sharded, the leader's, which are complete), the log, the number of
    optimizer steps, how many numbers of weights and optimizer state this process holds, and the
    result of `inspect`.
    """
    with pytest.MonkeyPatch.context() as patch, open_team(CPU, store) as team:
        if in_float64:
            load = huggingface.load_model
            patch.setattr(huggingface, "load_model", lambda *source: load(*source).double())
            patch.setattr(huggingface, "computing_dtype", lambda *_, **__: torch.float64)
        # An adapter's initial weights are drawn from torch's own generator.
        torch.manual_seed(3)
        given = ExperimentSettings(progress=False, sharding=sharding, **settings)
        trainer: Any = prepare_experiment(resolved, given, team=team).trainer
        logged: list[dict[str, float]] = []
        trainer.tracker.log_metrics = lambda metrics, step: logged.append(dict(metrics))
        is_of_agents = isinstance(trainer, TensorDictRlTrainer)
        if is_of_agents:
            _learn_in_float64(trainer)
        elif scores_by_module:
            # In both arms: its logits are float32, and another pass rounds differently.
            for agent in trainer.scenario_instance.agents.values():
                _module_model(agent.language_model).scores_by_module = True
        trainer.train()
        module = trainer.agents if is_of_agents else _module_model(trainer.policy).module
        is_whole = sharding == "none" or team.is_leader
        learned = trainer.optimizers.weights if is_of_agents else trainer.learned
        states = [
            value
            for optimizer in (trainer.optimizers.optimizers.values() if is_of_agents else ())
            for state in optimizer.state.values()
            for value in state.values()
            if value.ndim
        ]
        read = getattr(getattr(trainer, "service", None), "reader", module)
        return {
            "weights": {name: one.detach().clone() for name, one in module.named_parameters()}
            if is_whole
            else {},
            "logged": logged,
            "num_steps": trainer.state.num_optimizer_steps,
            "held": _size(learned),
            "remembered": _size(states),
            "read": _size(list(read.parameters())),
            "num_divided": sum(isinstance(one, DTensor) for one in module.parameters()),
            **inspect(trainer),
        }


def _module_model(model: Any) -> Any:
    """The model with a module, which scores for a model of vLLM."""
    return getattr(model, "scorer", model)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() for one in map(local_tensor, tensors))


def _learn_in_float64(trainer: TensorDictRlTrainer) -> None:
    """Have agents learn in float64 from rollouts of float32 agents, without tests."""
    collect = trainer.collect

    def collect_in_float32() -> Any:
        exact = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
        trainer.agents.float()
        batch = collect()
        trainer.agents.double().load_state_dict(exact)
        return batch.apply(lambda one: one.double() if one.dtype == torch.float32 else one)

    trainer.collect = collect_in_float32  # type: ignore[method-assign]
    trainer._test = lambda *_, **__: {}  # type: ignore[method-assign]
    trainer.agents.double()


def check_equal(one: Mapping[str, Any], *others: Mapping[str, Any]) -> None:
    leader, *_ = others
    assert {some["num_steps"] for some in others} == {one["num_steps"]}
    assert one["num_steps"] > 1
    assert gap_of(one["weights"], leader["weights"]) < 1e-6
    num_compared = 0
    for mine, theirs in zip(one["logged"], leader["logged"], strict=True):
        for name, value in mine.items():
            if name.endswith(("loss", "loss_policy", "loss_value", "grad_norm")):
                assert theirs[name] == pytest.approx(value, abs=1e-6), name
                num_compared += 1
    assert num_compared


def gap_of(some: Mapping[str, Tensor] | Path, others: Mapping[str, Tensor] | Path) -> float:
    """Return the largest difference of weights, given by name or by their run."""
    mine, theirs = (weights_of(x) if isinstance(x, Path) else x for x in (some, others))
    assert mine.keys() == theirs.keys()
    gaps = [(mine[n] - theirs[n]).abs().max().item() for n in mine if mine[n].numel()]
    return max(gaps)


def weights_of(run: Path) -> dict[str, Tensor]:
    result = {}
    for file in sorted(run.glob("model/*.safetensors")):
        result |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
    return result


def run(resolved: ResolvedExperiment, path: Path, *, stops: bool = False, **settings: Any) -> None:
    """Run an experiment, to the end or to the first checkpoint."""
    save = Trainer._save_checkpoint

    def save_and_stop(self: Trainer, **options: Any) -> None:
        save(self, **options)
        if stops and self.state.iteration == 1:
            raise KeyboardInterrupt

    options = {"progress": False, "checkpoint_period": 1} | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
        try:
            run_experiment(resolved, runs_dir=str(path.parent), run_id=path.name, **options)
        except (Exception, KeyboardInterrupt):
            if not stops:
                raise


def case(trainer: str, *overrides: str, sharding: str = "none", is_slow: bool = False) -> Any:
    name = "-".join([trainer, *(["lora"] if LORA in overrides else []), sharding])
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(trainer, overrides, sharding, marks=marks, id=name)


@pytest.mark.parametrize(
    ("trainer", "overrides", "sharding"),
    [
        case("ast_dpo"),
        # Three batches a step, the last of them smaller: some are distributed, one is cut.
        case(
            *("ast_dpo", LORA),
            *("training.minibatch_size=1", "training.gradient_accumulation_steps=3"),
        ),
        case("self_hosted_grpo"),
        case("ast_ppo"),
        case("vanilla_ppo"),
        case("mappo", is_slow=True),
        case("reinforce", is_slow=True),
        case("vanilla_ppo", sharding="fsdp"),
        case("mappo", sharding="fsdp", is_slow=True),
        case("reinforce", sharding="fsdp", is_slow=True),
    ],
)
def test_two_processes_learn_the_same_as_one(
    trainer: str, overrides: tuple[str, ...], sharding: str, tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", *overrides, num_iterations=2)
    check_learning(resolved, sharding, tmp_path)


@pytest.mark.slow
def test_networks_with_written_derivatives_are_divided_too(tmp_path: Path) -> None:
    overrides = (
        *("rl.num_iterations=2", "rl.frames_per_batch=48", "rl.minibatch_size=24"),
        *("rl.num_test_iterations=1", "rl.pretrain_agents=false"),
        "graph_isomorphism.dataset.num_train=64",
        "graph_isomorphism.dataset.num_test=16",
    )
    resolved = resolve_experiment(trainer="vanilla_ppo", overrides=overrides)
    check_learning(resolved, "fsdp", tmp_path)


def check_learning(resolved: ResolvedExperiment, sharding: str, folder: Path) -> None:
    one = learn(resolved, None)
    leader, other = together(lambda store: learn(resolved, store, sharding), folder)
    check_equal(one, leader, other)
    assert not other["logged"]
    if sharding == "none":
        assert gap_of(leader["weights"], other["weights"]) == 0
        return
    # Each holds about half of the trained weights, and of the optimizer's state.
    assert leader["held"] + other["held"] == one["held"]
    assert leader["remembered"] + other["remembered"] == one["remembered"] > 0
    assert leader["held"] < 0.65 * one["held"]
    # The leader plays with whole agents.
    assert leader["num_divided"] == 0
    assert other["num_divided"] > 0


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def short_run(name: str, folder: Path) -> ResolvedExperiment:
    trainer, _, lora = name.partition("-")
    given = (LORA,) if lora else ()
    return short_experiment(trainer, folder / "scenario", *given, num_iterations=2)


@pytest.mark.parametrize(
    ("name", "sharding", "counts"),
    [
        ("ast_dpo", "none", ((1, 2),)),
        slow("ast_dpo", "none", ((2, 1),)),
        slow("vanilla_ppo", "none", ((2, 1), (1, 2))),
        ("vanilla_ppo", "fsdp", ((2, 1),)),
        slow("vanilla_ppo", "fsdp", ((1, 2),)),
        ("ast_dpo", "fsdp", ((2, 1),)),
        slow("ast_dpo", "fsdp", ((1, 2), (2, 2))),
        slow("ast_dpo-lora", "fsdp", ((2, 1), (1, 2), (2, 2))),
    ],
)
def test_a_run_goes_on_in_any_number_of_processes(
    name: str, sharding: str, counts: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    resolved = short_run(name, tmp_path)

    def by(count: int, work: Callable[..., None], *given: Any, **settings: Any) -> None:
        if count == 1:
            work(*given, **settings, process_store=None)
            return
        settings["sharding"] = sharding
        together(lambda store: work(*given, **settings, process_store=store), tmp_path)

    for before, after in counts:
        whole, stopped = tmp_path / f"by_{after}", tmp_path / f"{before}_then_{after}"
        if not whole.exists():
            by(after, run, resolved, whole)
        by(before, run, resolved, stopped, stops=True)
        (checkpoint,) = (stopped / "checkpoints").glob("step_*")
        parts = [*checkpoint.glob("attacker/shards/*"), *checkpoint.glob("optimizer_shards/*")]
        is_in_parts = before == 2 and sharding == "fsdp" and name != "vanilla_ppo"
        assert len(parts) == 4 * is_in_parts
        by(after, resume_experiment, stopped, progress=False)
        assert len(metrics_of(stopped)) == len(metrics_of(whole))
        # float32: the sum over processes is rounded differently, and a single process reads trees
        # of tokens where sharded weights read rows.
        assert gap_of(whole, stopped) <= (0 if before == after else 1e-4)
        if name.endswith("lora") and after == 2:
            check_parts_of_adapter(stopped, tmp_path / f"joined_{before}")


def check_parts_of_adapter(path: Path, joined: Path) -> None:
    """A checkpoint has only the adapter, which is merged for others."""
    latest = CheckpointStore(path / "checkpoints").latest()
    assert latest is not None
    parts = load_whole(latest / "attacker" / "shards")
    assert {name.split(".")[-2] for name in parts} == {"lora_A", "lora_B"}
    export(path, "huggingface", joined)
    weights = load_causal_lm(str(joined), None).state_dict()
    # The run has left the model with the adapter merged.
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight)


def signalled(
    given: Callable[[str], None], owner: type, method: str, number: int, signals: dict[int, int]
) -> Callable[[str], str]:
    """A run whose processes get signals by rank at a call of a method; returns its end."""
    original, calls = getattr(owner, method), iter(range(999))

    def with_signal(self: Any, *arguments: Any) -> Any:
        rank = getattr(self, "team", self).rank
        if rank in signals and next(calls) == number:
            os.kill(os.getpid(), signals[rank])
        return original(self, *arguments)

    def play(store: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, with_signal)
            try:
                given(store)
            except LostProcessError as error:
                return str(error)
            except StopRequested as error:
                return error.signal_name
        return ""

    return play


@pytest.mark.parametrize(
    ("trainer", "sharding", "owner", "method", "number"),
    [
        # In the middle of an iteration that follows another.
        ("ast_dpo", "none", ProcessTeam, "all_reduce", 6),
        slow("vanilla_ppo", "none", ProcessTeam, "all_reduce", 6),
        slow("vanilla_ppo", "fsdp", ProcessTeam, "all_reduce", 60),
        ("ast_dpo", "fsdp", ShardedService, "_backward_own_rows", 5),
        # While it saves.
        slow("ast_dpo", "fsdp", ShardedService, "_save_parts", 1),
    ],
)
def test_a_run_of_which_one_process_is_killed_can_be_resumed(
    trainer: str, sharding: str, owner: type, method: str, number: int, tmp_path: Path
) -> None:
    """Sharded weights are lost with a process: the run continues from its last checkpoint."""
    resolved, whole, path = short_run(trainer, tmp_path), tmp_path / "whole", tmp_path / "killed"
    run(resolved, whole)
    how = {"sharding": sharding, "checkpoint_period": int(sharding != "none")}
    given = lambda store: run(resolved, path, process_store=store, **how)  # noqa: E731
    killed = signalled(given, owner, method, number, {1: signal.SIGKILL})
    message, _ = together(killed, tmp_path, killed=[1])
    *_, checkpoint = sorted((path / "checkpoints").glob("step_*"))
    assert says(message, "2 processes", "has ended", f"saved in {checkpoint.name}", "resume")
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    assert not (path / "results.json").exists()
    resume_experiment(path, progress=False)
    assert gap_of(whole, path) < 1e-4
    steps = [[row["step"] for row in metrics_of(one)] for one in (whole, path)]
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_a_divided_run_that_is_stopped_saves_within_the_iteration(tmp_path: Path) -> None:
    resolved, path = short_run("ast_dpo", tmp_path), tmp_path / "stopped"
    run(resolved, tmp_path / "whole")
    given = lambda store: run(resolved, path, process_store=store, sharding="fsdp")  # noqa: E731
    stopped = signalled(given, ShardedService, "_backward_own_rows", 1, {0: signal.SIGTERM})
    assert together(stopped, tmp_path) == ["SIGTERM", "SIGTERM"]
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert len([*checkpoint.glob("attacker/shards/*")]) == 2
    resume_experiment(path, progress=False)
    assert gap_of(tmp_path / "whole", path) < 1e-4


def refusal(store: str, resolved: ResolvedExperiment, *, is_shared: bool) -> str:
    settings = ExperimentSettings(progress=False, sharding="fsdp" if is_shared else "none")
    with open_team(CPU, store) as team:
        try:
            trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
            trainer.optimizers.are_disjoint = False
            trainer._shard_agents()
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("trainer", "is_shared", "words"),
    [
        ("spg", False, ("2 processes", "agent_losses", "without torchrun", "vanilla_ppo")),
        ("solo_agent", False, ("2 processes", "'solo_agent'")),
        # Agents that share weights.
        ("vanilla_ppo", True, ("(sharding=fsdp)", "share weights", "sharding=none")),
    ],
)
def test_what_cannot_be_divided_is_refused(
    trainer: str, is_shared: bool, words: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario")
    refused = partial(refusal, resolved=resolved, is_shared=is_shared)
    for message in together(refused, tmp_path):
        assert says(message, *words)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_torchrun_trains_and_one_process_writes(
    sharding: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    sets = [part for one in ("training.num_iterations=2", *FAST) for part in ("--set", one)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(ROOT / "run.py"), "--trainer", "ast_dpo", *sets),
            *("--scenario", str(tiny_scenario), "--runs-dir", str(tmp_path), "--run-id", "two"),
            *("--settings", f"sharding={sharding}"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert len(metrics_of(tmp_path / "two")) == 2
    # The table and the paths appear there once.
    assert done.stdout.count("held-out episodes before and after training") == 1
    assert done.stdout.count("results.json") == 1
