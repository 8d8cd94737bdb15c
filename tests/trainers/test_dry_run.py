"""A plan counts every model that a process holds, and what several share once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.placement import PLACEMENT
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.dry_run import model_memory, state_per_weight
from tests.kit.resuming import short_experiment


class Holder:
    """Something with attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_what_several_share_counts_for_the_first() -> None:
    base, head = torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 5, bias=False)
    attacker = Holder(model=Holder(module=torch.nn.Sequential(base, head)))
    target = Holder(model=Holder(module=base))
    judge = Holder(nested=[Holder(network=torch.nn.Linear(3, 1).double())], itself=attacker)
    judge.again = judge
    found = model_memory({"attacker": attacker, "target": target, "judge": judge})
    assert found == {"attacker": 4 * 150, "judge": 8 * 4}


def test_laid_out_weights_and_freed_ones_count_as_what_they_take() -> None:
    module = torch.nn.Linear(10, 10, bias=False)
    laid_out = {"layer": [torch.zeros(20, 20)]}
    model = Holder(module=module, snapshot=Holder(weights=laid_out))
    assert model_memory({"x": model}) == {"x": 4 * 500}
    module.weight.data = torch.empty(0)
    assert model_memory({"x": model}) == {"x": 4 * 400}
    # Another view of what is counted takes nothing.
    model.row = laid_out["layer"][0][3]
    assert model_memory({"x": model}) == {"x": 4 * 400}


def memory_of(trainer: Any) -> dict[str, float]:
    return trainer.dry_run()[PLACEMENT][0].memory


def test_the_plan_of_an_attacker_has_target_reference_and_scorer(tmp_path: Path) -> None:
    trainer: Any = prepare_experiment(
        short_experiment("ast_dpo", tmp_path / "x"), progress=False
    ).trainer
    memory = memory_of(trainer)
    agents = trainer.scenario_instance.agents
    for role in ("attacker", "target", "reference"):
        own = 4 * agents[role].language_model.num_parameters()
        assert own <= memory[f"weights, {role}"] <= 2.5 * own
    scorer = sum(one.numel() * 4 for one in trainer.sampler.scorer._model.parameters())
    assert scorer <= memory["weights, scorer"] < 1.5 * scorer


def test_an_adapters_base_counts_once_for_attacker_and_reference(tmp_path: Path) -> None:
    lora = "ast_chat.attacker.language_model.lora={rank: 2}"
    trainer: Any = prepare_experiment(
        short_experiment("ast_dpo", tmp_path / "x", lora), progress=False
    ).trainer
    whole = model_memory({"attacker": trainer.scenario_instance.agents["attacker"]})
    both = model_memory(
        {role: trainer.scenario_instance.agents[role] for role in ("attacker", "reference")}
    )
    assert both["attacker"] == whole["attacker"]
    assert both.get("reference", 0.0) < 0.5 * whole["attacker"]


@pytest.mark.slow
def test_the_plan_of_a_task_has_the_reference_too() -> None:
    more = ["training.num_episodes_per_experience=2", "training.minibatch_size=4"]
    resolved = resolve_experiment(trainer="self_hosted_grpo", overrides=more)
    memory = memory_of(prepare_experiment(resolved, progress=False).trainer)
    assert memory["weights, policy"] > 0
    assert memory["weights, reference"] > 0


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
def test_an_optimizer_takes_what_it_keeps_of_each_weight(
    optimizer: Any, options: dict[str, Any], count: float
) -> None:
    weights = torch.nn.Linear(3, 2).parameters()
    assert state_per_weight(optimizer(weights, lr=0.1, **options)) == count
