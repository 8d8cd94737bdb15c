"""Several processes learn what one would, and a run goes on in any number of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.distributed.team import open_team
from nip_astra.errors import LostProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.types import TrainerType
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment, resume_experiment, run_experiment
from nip_astra.trainers.trainer_base import Trainer
from tests.distributed.processes import together
from tests.kit.messages import says
from tests.kit.resuming import short_experiment

AGENTS = ("vanilla_ppo", "mappo", "reinforce")
CPU = torch.device("cpu")
LORA = ("ast_chat.attacker.language_model.lora={rank: 2}",)


pytestmark = pytest.mark.usefixtures("no_plugins_left")


def learn(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """Train in float64, in this process or as one of several, and write nothing."""
    with open_team(CPU, store) as team:
        settings = ExperimentSettings(progress=False)
        # An adapter's first weights are drawn from torch's own generator.
        torch.manual_seed(3)
        trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
        losses: list[dict[str, float]] = []
        if resolved.hyper_params.trainer in AGENTS:
            weights = in_float64(trainer)
        else:
            model = trainer.policy
            model.module.double()
            model.dtype = torch.float64
            model._snapshot = model._new_snapshot()
            weights = dict(model.module.named_parameters())
        trainer.tracker.log_metrics = lambda metrics, step: losses.append(dict(metrics))
        trainer.train()
        return {
            "weights": {name: weight.detach().clone() for name, weight in weights.items()},
            "losses": losses,
            "num_steps": trainer.state.num_optimizer_steps,
        }


def in_float64(trainer: Any) -> dict[str, Tensor]:
    """Have agents learn in float64 from what agents of float32 have played."""
    collect = trainer.collect

    def collect_in_float32() -> Any:
        exact = {name: value.clone() for name, value in trainer.agents.state_dict().items()}
        trainer.agents.float()
        batch = collect()
        trainer.agents.double().load_state_dict(exact)
        return batch.apply(lambda one: one.double() if one.dtype == torch.float32 else one)

    trainer.collect = collect_in_float32
    trainer.agents.double()
    return dict(trainer.agents.named_parameters())


def gap_of(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys()
    gaps = [(some[n] - others[n]).abs().max().item() for n in some if some[n].numel()]
    return max(gaps)


def check_equal(one: dict[str, Any], leader: dict[str, Any], other: dict[str, Any]) -> None:
    """Losses and weights are those of one process, and equal in all."""
    assert one["num_steps"] == leader["num_steps"] == other["num_steps"] > 1
    assert gap_of(leader["weights"], other["weights"]) == 0
    assert gap_of(one["weights"], leader["weights"]) < 1e-6
    assert len(one["losses"]) == len(leader["losses"])
    assert not other["losses"]
    num_compared = 0
    for mine, theirs in zip(one["losses"], leader["losses"], strict=True):
        for name, value in mine.items():
            if name.endswith(("loss", "loss_policy", "loss_value", "grad_norm")):
                assert theirs[name] == pytest.approx(value, abs=1e-6), name
                num_compared += 1
    assert num_compared


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        ("ast_dpo", ()),
        # Three batches a step, of which the last is smaller: some are dealt out, one is cut.
        (
            "ast_dpo",
            (*LORA, "training.minibatch_size=1", "training.gradient_accumulation_steps=3"),
        ),
        ("self_hosted_grpo", ()),
        ("ast_ppo", ()),
        ("vanilla_ppo", ()),
        pytest.param("mappo", (), marks=pytest.mark.slow),
        pytest.param("reinforce", (), marks=pytest.mark.slow),
    ],
    ids=[
        *("ast_dpo", "ast_dpo_lora", "self_hosted_grpo", "ast_ppo"),
        *("vanilla_ppo", "mappo", "reinforce"),
    ],
)
def test_two_processes_learn_what_one_does(
    trainer: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", *overrides, num_iterations=2)
    check_equal(learn(resolved, None), *together(lambda s: learn(resolved, s), tmp_path))


def weights_of(run: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = {}
    for file in sorted(run.glob("model/*.safetensors")):
        found |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
    return found


@pytest.mark.parametrize(
    "trainer", ["ast_dpo", pytest.param("vanilla_ppo", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_in_another_number_of_processes(trainer: str, tmp_path: Path) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", num_iterations=2)
    settings = {"runs_dir": str(tmp_path), "progress": False, "checkpoint_period": 1}
    run_experiment(resolved, run_id="whole", **settings)

    def stopped_after_one(store: str | None, run_id: str) -> None:
        patch = pytest.MonkeyPatch()
        finish = Trainer._save_checkpoint

        def stop(self: Trainer, **options: Any) -> None:
            finish(self, **options)
            if self.state.iteration == 1:
                raise KeyboardInterrupt

        patch.setattr(Trainer, "_save_checkpoint", stop)
        try:
            run_experiment(resolved, run_id=run_id, process_store=store, **settings)
        except (Exception, KeyboardInterrupt):
            pass
        finally:
            patch.undo()

    def resumed(store: str | None, run_id: str) -> None:
        resume_experiment(tmp_path / run_id, progress=False, process_store=store)

    together(lambda store: stopped_after_one(store, "two_then_one"), tmp_path)
    resumed(None, "two_then_one")
    stopped_after_one(None, "one_then_two")
    together(lambda store: resumed(store, "one_then_two"), tmp_path)
    whole = weights_of(tmp_path / "whole")
    for run_id in ("two_then_one", "one_then_two"):
        assert len((tmp_path / run_id / "metrics.jsonl").read_text().splitlines()) == len(
            (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
        )
        # float32: what the processes add up is rounded otherwise.
        assert gap_of(whole, weights_of(tmp_path / run_id)) < 1e-4


@pytest.mark.parametrize(
    "trainer", ["ast_dpo", pytest.param("vanilla_ppo", marks=pytest.mark.slow)]
)
def test_a_run_of_which_one_process_is_killed_can_be_resumed(trainer: str, tmp_path: Path) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", num_iterations=3)
    settings = {"runs_dir": str(tmp_path), "progress": False, "checkpoint_period": 0}
    run_experiment(resolved, run_id="whole", **settings)

    def killed(store: str) -> str:
        exchanges = iter(range(10_000))

        def end_of_one(team: Any, *_: Any) -> None:
            # In the middle of an iteration that follows another.
            if team.rank == 1 and next(exchanges) == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        patch = pytest.MonkeyPatch()
        from nip_astra.distributed.team import ProcessTeam

        all_reduce = ProcessTeam.all_reduce
        patch.setattr(
            ProcessTeam, "all_reduce", lambda t, tensors: (end_of_one(t), all_reduce(t, tensors))[1]
        )
        try:
            run_experiment(resolved, run_id="killed", process_store=store, **settings)
        except LostProcessError as error:
            return str(error)
        finally:
            patch.undo()
        return ""

    message, _ = together(killed, tmp_path, killed=[1])
    assert says(message, "2 processes", "has ended", "saved in step_", "resume")
    run = tmp_path / "killed"
    assert not (run / "results.json").exists()
    assert list((run / "checkpoints").glob("step_*"))
    resume_experiment(run, progress=False)
    assert gap_of(weights_of(tmp_path / "whole"), weights_of(run)) < 1e-4
    recorded = [(tmp_path / n / "metrics.jsonl").read_text() for n in ("whole", "killed")]
    steps = [[json.loads(line)["step"] for line in text.splitlines()] for text in recorded]
    assert steps[0] == steps[1]


def refusals(resolved: ResolvedExperiment, store: str) -> str:
    with open_team(CPU, store) as team:
        try:
            prepare_experiment(resolved, ExperimentSettings(progress=False), team=team)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        (TrainerType.SPG, ("2 processes", "agent_losses", "without torchrun", "vanilla_ppo")),
        (TrainerType.SOLO_AGENT, ("2 processes", "'solo_agent'")),
    ],
)
def test_what_cannot_be_divided_is_refused(
    trainer: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario")
    for message in together(lambda store: refusals(resolved, store), tmp_path):
        assert says(message, "ConfigurationError", *words)
