"""What an AST run writes into results.json beside its evaluations."""

from __future__ import annotations

from typing import Any

from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.scenario_base.conversation.planted_failures import Discovery
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.trainers.ast.state import AstState


def training_summary(
    state: AstState, found: Discovery, instance: ScenarioInstance, training: TrainingConfiguration
) -> dict[str, Any]:
    """What training took and found, as plain values."""
    return {
        "before": state.before,
        "training": {
            "iterations": state.iteration,
            "stopped_early": state.iteration < training.training_steps,
            "optimizer_steps": state.num_optimizer_steps,
            "target_queries": found.num_queries,
            "plants_found": found.num_found if found.planted else None,
            "plants": dict(found.first_query),
            "best_dev": None
            if state.best_dev_value is None
            else {"metric": training.dev_metric, "value": state.best_dev_value},
        },
        "planted_failures": [
            {"name": plant.name, "description": plant.description, "rarity": plant.rarity}
            for plant in found.planted
        ],
        "truncated_contexts": {
            role: agent.num_truncated_contexts for role, agent in instance.agents.items()
        },
    }
