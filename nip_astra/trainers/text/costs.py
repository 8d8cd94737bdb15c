"""What a run of chat models has asked of its services so far."""

from __future__ import annotations

from collections.abc import Mapping

from nip_astra.language_models.services.patience import PatientChatModel
from nip_astra.scenario_base.agents import PureTextSharedModelGroup
from nip_astra.trainers.service_use import total_cost
from nip_astra.trainers.text.analysis import JUDGE, RolloutAnalyses


def open_services(
    groups: Mapping[str, PureTextSharedModelGroup], analyses: RolloutAnalyses | None
) -> dict[str, PatientChatModel]:
    """The models of groups that are open, and the judge; each tells what all before it took."""
    asked = {name: group.models()[-1:] for name, group in groups.items()}
    if analyses is not None:
        asked[JUDGE] = [analyses.model]
    return {
        name: model
        for name, models in asked.items()
        for model in models
        if isinstance(model, PatientChatModel)
    }


def told_costs(
    counts: Mapping[str, int], services: Mapping[str, PatientChatModel]
) -> dict[str, str]:
    """Counts and, where prices are known, money, for the progress bar."""
    cost = total_cost(services)
    told = {name: str(count) for name, count in counts.items()}
    return told if cost is None else told | {"cost": f"{cost:.4g}"}


def cost_metrics(
    counts: Mapping[str, int], services: Mapping[str, PatientChatModel]
) -> dict[str, float]:
    """The same as metrics."""
    cost = total_cost(services)
    found = {f"cost/{name}": float(count) for name, count in counts.items()}
    return found if cost is None else found | {"cost/money": cost}
