"""What an AST run writes into results.json beside its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.language_models.services.patience import PatientChatModel
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
        **services_used(instance.services),
    }


def services_used(services: Mapping[str, PatientChatModel]) -> dict[str, Any]:
    """What chat models took, under `services`; nothing where none was asked."""
    if not services:
        return {}
    return {"services": {name: model.use.to_dict() for name, model in services.items()}}


def service_metrics(services: Mapping[str, PatientChatModel]) -> dict[str, float]:
    """What chat models have taken so far, to be logged."""
    found = {}
    for name, model in services.items():
        use, key = model.use, f"services/{name.replace(' ', '_')}"
        found[f"{key}_requests"] = float(use.num_requests)
        found[f"{key}_tokens"] = float(use.prompt_tokens + use.completion_tokens)
        found[f"{key}_refusals"] = float(use.num_refusals)
        found[f"{key}_failures"] = float(sum(use.failures.values()))
        if use.cost is not None:
            found[f"{key}_cost"] = use.cost
    return found
