"""A plan counts every model that a process holds, and shared memory once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.placement import PLACEMENT
from nip_astra.run import prepare_experiment
from nip_astra.trainers.dry_run import model_memory, state_per_weight
from tests.kit.resuming import SHORT_TRAINERS, short_experiment
from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer


class Holder:
    """An object with attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_shared_memory_counts_for_the_first_owner() -> None:
    base, head = torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 5, bias=False)
    attacker = Holder(model=Holder(module=torch.nn.Sequential(base, head)))
    target = Holder(model=Holder(module=base))
    judge = Holder(nested=[Holder(network=torch.nn.Linear(3, 1).double())], itself=attacker)
    judge.again = judge
    memory = model_memory({"attacker": attacker, "target": target, "judge": judge})
    assert memory == {"attacker": 4 * 150, "judge": 8 * 4}


def test_snapshots_count_and_freed_weights_and_views_do_not() -> None:
    module = torch.nn.Linear(10, 10, bias=False)
    snapshot = {"layer": [torch.zeros(20, 20)]}
    model = Holder(module=module, snapshot=Holder(weights=snapshot))
    assert model_memory({"x": model}) == {"x": 4 * 500}
    module.weight.data = torch.empty(0)
    model.row = snapshot["layer"][0][3]
    assert model_memory({"x": model}) == {"x": 4 * 400}


def trainer_of(name: str, folder: Path, *overrides: str) -> Any:
    resolved = short_experiment(name, folder / "x", *overrides, num_iterations=3)
    return prepare_experiment(resolved, progress=False).trainer


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("name", SHORT_TRAINERS)
def test_a_dry_run_estimates_the_whole(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path)
    learned = [weight.clone() for weight in getattr(trainer, "learned", ())]
    estimate = trainer.dry_run()
    assert estimate["num_iterations"] == 3
    assert estimate["num_parameters"] > 0
    assert 0 < estimate["predicted_peak_gib"] < 24
    assert 0 < estimate["seconds_per_minibatch"] < 3600 * estimate["estimated_training_hours"]
    if not learned:
        return
    assert all(map(torch.equal, learned, trainer.learned)), "no step is taken"
    assert math.isfinite(estimate["loss"])
    assert (estimate["generated_tokens"] > 0) == (name != "remote_api_cross_entropy")
    num_episodes = trainer.training.num_episodes_per_experience
    rollouts = 3 * num_episodes * estimate["seconds_per_episode"]
    assert estimate["estimated_training_hours"] * 3600 > rollouts
    (plan, *_) = estimate[PLACEMENT]
    assert plan.hours > rollouts / 3600
    assert all(plan.memory[f"weights, {role}"] > 0 for role in trainer.scenario_instance.agents)


def test_agents_of_protocols_count_frames_and_memory() -> None:
    with toy_kind():
        estimate = toy_trainer().dry_run()
    assert estimate["num_frames"] == 3 * 96
    assert estimate["seconds_per_episode"] > 0
    memory = estimate[PLACEMENT][0].memory
    assert {"weights, prover", "weights, verifier"} <= set(memory)
    assert memory["optimizer"] == pytest.approx(2 * memory["gradients"], rel=0.01)


def test_a_prediction_scales_the_step_and_not_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([2 * 2**30, 3 * 2**30])
    monkeypatch.setattr("nip_astra.trainers.dry_run.peak_memory_bytes", lambda: next(peaks))
    sizes = ("training.minibatch_size=3", "training.num_episodes_per_experience=3")
    trainer = trainer_of("ast_dpo", tmp_path, *sizes)
    monkeypatch.setattr(trainer, "flatten", lambda tree: type(trainer).flatten(trainer, tree)[:1])
    # One GiB for the rollout, and three pairs where the measured trial took one.
    assert trainer.dry_run()["predicted_peak_gib"] == pytest.approx(1 + 1 + 3)


def test_the_plan_of_an_attacker_has_target_reference_and_scorer(tmp_path: Path) -> None:
    trainer = trainer_of("ast_dpo", tmp_path)
    estimate = trainer.dry_run()
    assert 0 < estimate["predicted_rollout_gib"] < estimate["predicted_peak_gib"]
    memory = estimate[PLACEMENT][0].memory
    for role, agent in trainer.scenario_instance.agents.items():
        own = 4 * agent.language_model.num_parameters()
        assert own <= memory[f"weights, {role}"] <= 2.5 * own
    scorer = sum(4 * weight.numel() for weight in trainer.sampler.scorer._model.parameters())
    assert scorer <= memory["weights, scorer"] < 1.5 * scorer


def test_the_base_of_an_adapter_counts_once_for_attacker_and_reference(tmp_path: Path) -> None:
    trainer = trainer_of("ast_dpo", tmp_path, "ast_chat.attacker.language_model.lora={rank: 2}")
    agents = trainer.scenario_instance.agents
    memory = model_memory({role: agents[role] for role in ("attacker", "reference")})
    assert memory.get("reference", 0.0) < 0.5 * memory["attacker"]


@pytest.mark.parametrize(
    ("optimizer", "options", "count"),
    [
        (torch.optim.SGD, {}, 0.0),
        (torch.optim.SGD, {"momentum": 0.9}, 1.0),
        (torch.optim.RMSprop, {}, 1.0),
        (torch.optim.AdamW, {}, 2.0),
        (torch.optim.AdamW, {"amsgrad": True}, 3.0),
    ],
)
def test_an_optimizer_takes_the_memory_of_its_state_per_weight(
    optimizer: Any, options: dict[str, Any], count: float
) -> None:
    weights = torch.nn.Linear(3, 2).parameters()
    assert state_per_weight(optimizer(weights, lr=0.1, **options)) == count
