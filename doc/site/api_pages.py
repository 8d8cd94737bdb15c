"""The pages of the API: what plug-ins and notebooks import, and the bases behind it."""

from __future__ import annotations

from collections.abc import Iterator

FOLDER = "reference/api"
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Running an experiment": (
        "nip_astra.run",
        "nip_astra.resolving.resolution",
        "nip_astra.factory",
        "nip_astra.scenario_instance",
        "nip_astra.experiment_settings",
        "nip_astra.evaluation.run_results",
        "nip_astra.errors",
    ),
    "Parameters": (
        "nip_astra.parameters.hyper_parameters",
        "nip_astra.parameters.parameters_base",
        "nip_astra.parameters.conditions",
        "nip_astra.parameters.conversion",
        "nip_astra.parameters.types",
    ),
    "Registries and plug-ins": ("nip_astra.registry", "nip_astra.plugins"),
    "Trainers": (
        "nip_astra.trainers.registry",
        "nip_astra.trainers.trainer_base",
        "nip_astra.trainers.language_model_base",
        "nip_astra.trainers.ast.base",
        "nip_astra.trainers.service.base",
        "nip_astra.trainers.rl_pure_text_base",
        "nip_astra.trainers.rl_tensordict_base",
        "nip_astra.trainers.solo_agent",
        "nip_astra.progress",
    ),
    "Scenarios and protocols": (
        "nip_astra.scenarios.registry",
        "nip_astra.scenarios.tensordict_base",
        "nip_astra.scenario_base.protocol.datapoint_views",
        "nip_astra.protocols.protocol_base",
        "nip_astra.protocols.registry",
    ),
    "Language models": (
        "nip_astra.language_models.base",
        "nip_astra.language_models.base",
        "nip_astra.language_models.services.chat",
        "nip_astra.language_models.services.fine_tuning",
        "nip_astra.language_models.services.training",
    ),
    "Tasks": (
        "nip_astra.scenario_base.tasks.base",
        "nip_astra.scenario_base.tasks.base",
        "nip_astra.rollouts.trajectory",
        "nip_astra.rollouts.batch",
    ),
    "Scorers and reward terms": (
        "nip_astra.scorers.base",
        "nip_astra.scorers.base",
        "nip_astra.reward_terms.base",
        "nip_astra.reward_terms.base",
        "nip_astra.message_regressors.base",
        "nip_astra.message_regressors.base",
    ),
    "Rollouts and samplers": (
        "nip_astra.rollouts.tree",
        "nip_astra.rollouts.samples",
        "nip_astra.samplers.trees",
        "nip_astra.samplers.episodes",
    ),
    "Objectives": (
        "nip_astra.rl_objectives.objective",
        "nip_astra.rl_objectives.reductions",
        "nip_astra.rl_objectives.preference",
        "nip_astra.rl_objectives.policy_losses",
        "nip_astra.rl_objectives.advantages",
        "nip_astra.rl_objectives.kl",
        "nip_astra.rl_objectives.values",
    ),
}
"""Modules by chapter."""


def api_pages() -> Iterator[tuple[str, str, str]]:
    """Title, path and text of each page; mkdocstrings fills it from docstrings."""
    for title, modules in CHAPTERS.items():
        parts = "\n\n".join(f"## `{module}`\n\n::: {module}" for module in modules)
        path = f"{FOLDER}/{title.lower().replace(' ', '-')}.md"
        yield title, path, f"# {title}\n\n{parts}\n"
