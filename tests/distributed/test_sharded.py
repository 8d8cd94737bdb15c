"""Weights that are divided among processes learn what whole ones do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.distributed.team import Team, open_team
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models import huggingface
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.language_model.processes import check_can_be_sharded
from tests.command_line import plugins_forgotten_after
from tests.distributed.processes import together
from tests.messages import says
from tests.resuming import short_experiment

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_plugins_left() -> Iterator[None]:
    with plugins_forgotten_after():
        yield


def learn(resolved: ResolvedExperiment, store: str | None, sharding: str) -> dict[str, Any]:
    """Train in float64, and give the leader's whole weights and what was logged."""
    patch, load = pytest.MonkeyPatch(), huggingface.load_model
    patch.setattr(huggingface, "load_model", lambda *source: load(*source).double())
    patch.setattr(huggingface, "computing_dtype", lambda *_, **__: torch.float64)
    whole: list[Any] = []
    divide = ShardedService.__init__

    def noted(self: ShardedService, local: LocalTrainingService, team: Team) -> None:
        whole.append(weakref.ref(local.learned[0]))
        divide(self, local, team)

    patch.setattr(ShardedService, "__init__", noted)
    with open_team(CPU, store) as team:
        settings = ExperimentSettings(progress=False, team=team, sharding=sharding)
        trainer: Any = prepare_experiment(resolved, settings).trainer
        is_sharded = isinstance(trainer.service, ShardedService)
        for agent in trainer.scenario_instance.agents.values():
            # In both arms: its logits are float32, and another pass rounds them otherwise.
            agent.language_model.scores_by_module = True
        logged: list[dict[str, float]] = []
        trainer.tracker.log_metrics = lambda metrics, step: logged.append(dict(metrics))
        trainer.train()
        module = trainer.policy.module
        assert next(module.parameters()).dtype == torch.float64
        patch.undo()
        gc.collect()
        return {
            "weights": {name: one.detach().clone() for name, one in module.named_parameters()}
            if team.is_leader
            else {},
            "sizes": [one.numel() for one in map(_held, trainer.learned)],
            "keeps_whole": [one() is not None for one in whole],
            "logged": logged,
            "num_steps": trainer.state.num_optimizer_steps,
            "is_sharded": is_sharded,
        }


def _held(weight: Tensor) -> Tensor:
    return getattr(weight, "_local_tensor", weight)


def gap_of(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        ("ast_dpo", ("training.max_grad_norm=0.05",)),
        # Three batches a step, of one row: two are dealt out, of one another process reads a row.
        pytest.param(
            "ast_dpo",
            ("training.minibatch_size=1", "training.gradient_accumulation_steps=3"),
            marks=pytest.mark.slow,
        ),
        # With a value head, which every process holds whole.
        pytest.param("ast_ppo", (), marks=pytest.mark.slow),
        ("self_hosted_grpo", ()),
    ],
    ids=["ast_dpo", "ast_dpo_accumulated", "ast_ppo", "self_hosted_grpo"],
)
def test_divided_weights_learn_what_whole_ones_do(
    trainer: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    resolved = short_experiment(trainer, tmp_path / "scenario", *overrides, num_iterations=2)
    whole, _ = together(lambda store: learn(resolved, store, "none"), tmp_path)
    leader, other = together(lambda store: learn(resolved, store, "fsdp"), tmp_path)
    assert (whole["is_sharded"], leader["is_sharded"], other["is_sharded"]) == (False, True, True)
    assert whole["num_steps"] == leader["num_steps"] == other["num_steps"] > 1
    assert gap_of(whole["weights"], leader["weights"]) < 1e-6
    compared = 0
    for mine, theirs in zip(whole["logged"], leader["logged"], strict=True):
        for name, value in mine.items():
            if name.endswith(("loss", "loss_policy", "loss_value", "grad_norm")):
                assert theirs[name] == pytest.approx(value, abs=1e-6), name
                compared += 1
    assert compared
    # The leader's own model; elsewhere whole weights are gone.
    assert leader["keeps_whole"] == [True]
    assert other["keeps_whole"] == [False]
    # Each holds about half of what learns.
    assert sum(leader["sizes"]) < 0.65 * sum(whole["sizes"])


@pytest.mark.parametrize(
    ("trainer", "overrides", "words"),
    [
        ("ast_dpo", ("ast_chat.attacker.language_model.lora={rank: 2}",), ("LoRA", "are few")),
        ("self_hosted_grpo", ("self_hosted_grpo.max_staleness=1",), ("max_staleness",)),
        ("self_hosted_grpo", ("dump_period=1",), ("dump_period", "whole weights")),
    ],
)
def test_what_cannot_be_divided_is_refused(
    trainer: str, overrides: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    settings = {"progress": False, "sharding": "fsdp"}
    if overrides == ("dump_period=1",):
        settings["dump_period"], overrides = 1, ()
    resolved = short_experiment(trainer, tmp_path / "scenario", *overrides)
    prepared: Any = prepare_experiment(resolved, **settings).trainer
    # What one process holds whole, several could not divide.
    with pytest.raises(ConfigurationError) as caught:
        check_can_be_sharded(prepared)
    assert says(caught.value, "(sharding=fsdp)", *words, "Set sharding to none")


def test_agents_of_protocols_are_held_whole(tmp_path: Path) -> None:
    resolved = short_experiment("vanilla_ppo", tmp_path / "scenario")
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, progress=False, sharding="fsdp")
    assert says(caught.value, "sharding=fsdp were given", "'vanilla_ppo' learns", "Leave them out")


@pytest.mark.slow
def test_divided_weights_learn_rounded_and_recomputed_as_whole_ones_do(tmp_path: Path) -> None:
    """Layers travel in bfloat16, and are computed again going back."""
    given = ("ast_chat.attacker.language_model.dtype=bfloat16",)
    resolved = short_experiment("ast_dpo", tmp_path / "scenario", *given, num_iterations=2)

    def learned(store: str | None, **how: Any) -> dict[str, Any]:
        with open_team(CPU, store) as team:
            settings = ExperimentSettings(progress=False, team=team, **how)
            trainer: Any = prepare_experiment(resolved, settings).trainer
            for agent in trainer.scenario_instance.agents.values():
                agent.language_model.scores_by_module = True
            logged: list[float] = []
            trainer.tracker.log_metrics = lambda metrics, step: logged.append(metrics["loss"])
            trainer.train()
            weights = dict(trainer.policy.module.named_parameters()) if team.is_leader else {}
            found = {name: one.detach().clone() for name, one in weights.items()}
            return {"weights": found, "logged": logged, "dtype": str(trainer.policy.dtype)}

    whole = learned(None)
    how = {"sharding": "fsdp", "gradient_checkpointing": True}
    leader, _ = together(lambda store: learned(store, **how), tmp_path)
    plain, _ = together(lambda store: learned(store, sharding="fsdp"), tmp_path)
    assert leader["dtype"] == "torch.bfloat16"
    # What is computed again is the same to the bit.
    assert gap_of(leader["weights"], plain["weights"]) == 0
    # Norms travel rounded, and Adam makes steps of gradients however small.
    assert leader["logged"][0] == pytest.approx(whole["logged"][0], abs=2e-3)
    assert leader["logged"][1] == pytest.approx(whole["logged"][1], abs=3e-2)
