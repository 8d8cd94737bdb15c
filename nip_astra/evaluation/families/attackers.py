"""Load attackers and targets of conversations: of runs, checkpoints, model folders and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.errors import ConfigurationError, ModelLoadError, RunDirectoryError
from nip_astra.evaluation.families.base import (
    ATTACKER_DIR,
    CHAT_FILES,
    EvaluationRequest,
    is_text_attacker,
    model_dir_of,
    no_attacker,
    place_of,
    refuse_unread_overrides,
    resolve_stored,
    run_of,
    target_label,
    trained_of,
)
from nip_astra.evaluation.families.scorers import read_mapping
from nip_astra.evaluation.storage import text_hash, weights_hash
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.language_models.base import as_learner
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.language_models.sources import is_model_folder
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.types import TrainerType
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.rollouts.prompts import Prompt, columns_of
from nip_astra.scenario_base.agents import (
    ConversationAgent,
    Speaker,
    build_agent,
    build_target,
    load_language_model,
)
from nip_astra.scenario_base.chat_agent import (
    ChatAgent,
    ChatAttacker,
    ChatAttackerParameters,
    FixedProbes,
    TextAttacker,
)
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scenario_base.conversation.prompts import read_probes
from nip_astra.scenario_instance import ConversationInstance
from nip_astra.scenarios.ast_chat import without_other_target
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, MODEL_DIR, RunDirectory
from nip_astra.trust import StoredSource, is_signed, on_behalf_of, sign
from nip_astra.utils.devices import resolve_device

EXPERIMENT = "experiment.json"
"""File in the folder of an evaluation: the scenario of an attacker that is not a run."""


class LoadedTexts(NamedTuple):
    """An attacker that gives texts, its configuration, and its model's parameters, if any."""

    attacker: TextAttacker
    description: dict[str, Any]
    card: Any


@dataclass(frozen=True)
class LoadedAttacker:
    """An attacker with its scenario.

    Attributes
    ----------
    label, suffix : str
        Run id, with the checkpoint if one was given; and an addition to the evaluation's name,
        empty for the attacker at the end of its run.
    run : Path
        Folder that keeps its evaluations.
    instance : ConversationInstance
        Its sampler speaks through this attacker.
    section : Any
        Parameters of the scenario's kind.
    weights : str or None
        Digest of its weights.
    texts : LoadedTexts, optional
        If the attacker gives texts only.
    """

    label: str
    suffix: str
    run: Path
    resolved: ResolvedExperiment
    instance: ConversationInstance
    section: Any
    weights: str | None
    texts: LoadedTexts | None = None


@dataclass(frozen=True)
class LoadedTarget:
    """A target with its known failures.

    Attributes
    ----------
    agent, suffix : Speaker or None, str
        None and empty for the target of the attacker's own scenario.
    description : dict
        Its part of the evaluation's configuration.
    language_model : Any
        Parameters of its backend; references are resolved in `scenario_dir`.
    """

    label: str
    suffix: str
    agent: Speaker | None
    planted: Sequence[PlantedFailure] | None
    description: dict[str, Any]
    language_model: Any
    scenario_dir: Path | None


def resolve_run(
    path: Path, request: EvaluationRequest, overrides: Sequence[str] = ()
) -> ResolvedExperiment:
    """Resolve the experiment of a run with an attacker.

    Raises
    ------
    ConfigurationError
        When no attacker of the run talks to a target.
    """
    resolved = resolve_stored(path, request, overrides=overrides)
    if not hasattr(getattr(resolved.hyper_params, resolved.kind), "failure_threshold"):
        raise no_attacker(path)
    return resolved


def section_of(resolved: ResolvedExperiment) -> Any:
    """Return the parameters of the scenario's kind, without facts about another target."""
    section = getattr(resolved.hyper_params, resolved.kind)
    return without_other_target(section, resolved.scenario_dir)


# ---- attackers


def load_attacker(
    path: str, settings: ExperimentSettings, request: EvaluationRequest
) -> LoadedAttacker:
    """Build the scenario of a run, and give its attacker the weights that training left.

    `path` is a run directory or checkpoint, a folder with a model or adapter, a list of probes, or
    a YAML file of a chat model that attacks.

    Raises
    ------
    ConfigurationError
        When its scenario has no attacker, or it has no weights yet.
    RunDirectoryError
        When it is neither a run nor a model.
    """
    run, _ = run_of(path)
    is_run = (run / HYPER_PARAMETERS).is_file()
    if is_run and (request.scenario or request.parameters):
        raise ConfigurationError(
            f"{path} belongs to the run {run}, which has its own scenario. Leave out --scenario "
            "and --parameters; --set changes single parameters."
        )
    resolved = (
        resolve_run(run, request, request.overrides)
        if is_run
        else _resolve_around(Path(path), request)
    )
    refuse_unread_overrides(request.overrides, (f"{resolved.kind}.", "seed"), path)
    with on_behalf_of(resolved.source):
        instance = build_scenario_instance(
            resolved.hyper_params, settings, kind=resolved.kind, scenario_dir=resolved.scenario_dir
        )
    if not isinstance(instance, ConversationInstance):
        raise ConfigurationError(
            f"the scenario kind {resolved.kind!r} has no attacker that talks to a target. Give "
            "another --scenario, or a run of an ast_* trainer."
        )
    section, name = section_of(resolved), RunDirectory(run).run_id
    if is_text_attacker(path):
        texts = _load_texts(path, request.column, settings, resolved.scenario_dir)
        instance.sampler = instance.sampler.with_attacker(texts.attacker)
        place = place_of(path)
        return LoadedAttacker(place.name, "", place, resolved, instance, section, None, texts)
    label, suffix, source = name, "", None
    if request.untrained:
        agent = replace(instance.agents["reference"], role="attacker")
        label, suffix = f"{name} untrained", "untrained"
    elif not is_run:
        agent, source = _attacker_of_folder(run, instance, section, settings), run
    else:
        _, source, _ = trained_of(Path(path), request, model_dir_of)
        assert source is not None
        if source.name == MODEL_DIR:
            agent = _of_model_folder(instance, section, source, settings, resolved.scenario_dir)
        else:
            label, suffix = f"{name} {source.name}", source.name
            agent, source = instance.agents["attacker"], source / ATTACKER_DIR
            as_learner(agent.language_model, role="attacker", to="be restored").restore(source)
    instance.sampler = instance.sampler.with_attacker(agent)
    weights = None if source is None else weights_hash(source)
    return LoadedAttacker(label, suffix, run, resolved, instance, section, weights)


def _resolve_around(folder: Path, request: EvaluationRequest) -> ResolvedExperiment:
    """Resolve the scenario for an attacker that is not a run."""
    if not is_model_folder(folder) and not is_text_attacker(folder):
        raise RunDirectoryError(
            f"{folder} is neither a run nor a model. Give a run, a checkpoint such as "
            "RUN/checkpoints/latest, a folder with config.json or adapter_config.json, probes "
            "(.csv, .tsv, .jsonl, .json, .txt), or a chat model that attacks (.yaml)."
        )
    if request.scenario is None and request.parameters is None:
        raise RunDirectoryError(
            f"{folder} is not a run, so its target is unknown. Give --scenario NAME or "
            "--parameters FILE."
        )
    return _resolve_given(request)


def _resolve_given(request: EvaluationRequest) -> ResolvedExperiment:
    """Resolve the scenario and parameters of a request."""
    # No trainer is built; it only completes the parameters.
    trainer = None if request.parameters is not None else str(TrainerType.AST_DPO)
    return resolve_experiment(
        trainer=trainer,
        scenario=request.scenario,
        parameter_file=request.parameters,
        overrides=request.overrides,
        plugins=request.plugins,
        is_trusted=request.is_trusted,
    )


def record_experiment(folder: Path, attacker: LoadedAttacker, request: EvaluationRequest) -> None:
    """Store how the experiment around an attacker that is not a run was given.

    Its evaluation can then be rated again and exported without the options. Signed, since a
    scenario and plug-ins are code.
    """
    plugins = [
        str(Path(spec).resolve()) if Path(spec).exists() else spec for spec in request.plugins
    ]
    parameters = None if request.parameters is None else str(Path(request.parameters).resolve())
    experiment = {
        "scenario": str(attacker.resolved.scenario_dir.resolve()),
        "parameters": parameters,
        "overrides": list(request.overrides),
        "plugins": plugins,
    }
    signature = sign(_signed_text(experiment))
    RunDirectory(folder).write_json(EXPERIMENT, {"experiment": experiment, "signature": signature})


def resolve_recorded(folder: Path, request: EvaluationRequest) -> ResolvedExperiment:
    """Resolve the experiment that `record_experiment` stored in the folder of an evaluation.

    Raises
    ------
    ConfigurationError
        When none is stored, as by earlier versions.
    UntrustedRunError
        When it is not signed by this user, and not approved.
    """
    if not (folder / EXPERIMENT).is_file():
        raise ConfigurationError(
            f"{folder} does not record the scenario of its attacker. Repeat `evaluate` with the "
            "same options to add it."
        )
    stored = RunDirectory(folder).read_json(EXPERIMENT)
    experiment = stored["experiment"]
    is_own = is_signed(_signed_text(experiment), stored.get("signature"))
    source = StoredSource(str(folder), request.is_trusted or is_own)
    source.check(f"the scenario {experiment['scenario']!r}", "loaded")
    restored = replace(
        request,
        scenario=experiment["scenario"],
        parameters=experiment["parameters"],
        overrides=experiment["overrides"],
        plugins=[*experiment["plugins"], *request.plugins],
    )
    return _resolve_given(restored)


def _signed_text(experiment: Mapping[str, Any]) -> bytes:
    return json.dumps(experiment, sort_keys=True).encode()


def _load_texts(
    spec: str, column: str, settings: ExperimentSettings, scenario_dir: Path | None
) -> LoadedTexts:
    """Load fixed probes, or a chat model that attacks."""
    if Path(spec).suffix not in CHAT_FILES:
        probes = read_probes(spec, None, column)
        rows = [f"{probe}\t{columns_of(probe)}" for probe in probes]
        described = {"probes": {"number": len(probes), "sha256": text_hash(rows)}}
        return LoadedTexts(FixedProbes(probes), described, None)
    values = read_mapping(spec, "an attacker with chat_model and system_prompt")
    parameters = ChatAttackerParameters.from_dict(values)
    agent = ChatAgent(
        "attacker",
        open_chat_model(
            parameters.chat_model, settings, scenario_dir=scenario_dir, label="attacker"
        ),
        max_tokens=parameters.max_new_tokens,
        temperature=parameters.temperature,
        system_prompt=parameters.system_prompt,
    )
    return LoadedTexts(ChatAttacker(agent), parameters.to_dict(), parameters.chat_model)


def openings_of(attacker: TextAttacker, openings: Sequence[str]) -> Sequence[str]:
    """Return an attacker's opening prompts; fixed probes add the columns of their rows."""
    if not isinstance(attacker, FixedProbes):
        return openings
    prompts = []
    for number, probe in enumerate(attacker.probes):
        opening = openings[number % len(openings)]
        prompts.append(Prompt(opening, (*columns_of(opening), *columns_of(probe))))
    return prompts


def num_turns_of(attacker: TextAttacker | None, wanted: int | None, own: int) -> int:
    """Return the number of turns of an episode; fixed probes have one."""
    if not isinstance(attacker, FixedProbes):
        return wanted or own
    if wanted not in (None, 1):
        raise ConfigurationError(
            f"num_turns (--num-turns) is {wanted}, but fixed probes have one turn each. Leave it "
            "out, or give an attacker that answers."
        )
    return 1


def _model_in(
    folder: Path, parameters: Any, settings: ExperimentSettings, scenario_dir: Path | None
) -> Any:
    """Load the model in a folder with an attacker's backend."""
    changes = {"model": str(folder.resolve()), "lora": None}
    known = {k: v for k, v in changes.items() if k in type(parameters).model_fields}
    return load_language_model(
        parameters.model_copy(update=known),
        device=resolve_device(settings.device),
        scenario_dir=scenario_dir,
        trainable=False,
    )


def _attacker_of_folder(
    folder: Path, instance: ConversationInstance, section: Any, settings: ExperimentSettings
) -> ConversationAgent:
    """Return the attacker whose model is in a folder, with the scenario's own format."""
    parameters = section.attacker.language_model
    if "model" not in type(parameters).model_fields:
        raise ConfigurationError(
            f"the model in {folder} cannot attack here: the backend of the scenario's attacker "
            "loads no model. Give another --scenario."
        )
    model = _model_in(folder, parameters, settings, instance.scenario_dir)
    reference: Any = instance.agents["reference"].language_model
    if model.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise ModelLoadError(
            f"the model in {folder} has another vocabulary than the scenario's attacker, "
            f"{parameters.model!r}, which measures its probes. Give a model of the same family, or "
            "--set ast_chat.attacker.language_model.model=..."
        )
    return build_agent("attacker", section.attacker, model)


def _of_model_folder(
    instance: ConversationInstance,
    section: Any,
    folder: Path,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
) -> ConversationAgent:
    """Return the attacker saved by `save_pretrained`."""
    agent: ConversationAgent = instance.agents["attacker"]
    parameters = section.attacker.language_model
    if getattr(parameters, "lora", None) is None and (folder / "model.safetensors").is_file():
        as_learner(agent.language_model, role="attacker", to="be restored").restore(folder)
        return agent
    # An adapter was merged into the weights, or they are in several files.
    model = _model_in(folder, parameters, settings, scenario_dir)
    return build_agent("attacker", section.attacker, model)


# ---- targets


def _model_of(agent: Any) -> Any:
    """Return the parameters of an agent's model: a backend with weights, or a chat model."""
    return getattr(agent, "chat_model", None) or agent.language_model


def load_target(
    spec: str | None,
    attacker: LoadedAttacker,
    settings: ExperimentSettings,
    request: EvaluationRequest,
) -> LoadedTarget:
    """Load a target: None for the scenario's own, a run for that run's, else a model.

    A model gets the format and sampling of the scenario's own target.
    """
    parameters, scenario_dir = attacker.section.target, attacker.resolved.scenario_dir
    planted: Sequence[PlantedFailure] | None = None
    label, suffix, agent = target_label(attacker.section.target.to_dict()), "", None
    if spec is not None and (Path(spec) / HYPER_PARAMETERS).is_file():
        resolved = resolve_run(Path(spec), request)
        section = section_of(resolved)
        parameters, scenario_dir = section.target, resolved.scenario_dir
        planted, label = section.planted_failures, RunDirectory(Path(spec)).run_id
    elif spec is not None:
        own = _model_of(parameters)
        if "model" not in type(own).model_fields:
            raise ConfigurationError(
                f"the target {spec!r} cannot replace the run's own, whose backend takes no model. "
                "Give a run with that target."
            )
        field = "language_model" if own is parameters.language_model else "chat_model"
        parameters = parameters.model_copy(update={field: own.model_copy(update={"model": spec})})
        planted, label = [], Path(spec.rstrip("/")).name
    if spec is not None:
        suffix, agent = label, build_target(parameters, None, settings, scenario_dir=scenario_dir)
    return LoadedTarget(
        label=label,
        suffix=suffix,
        agent=agent,
        planted=planted,
        description=_described(parameters, scenario_dir),
        language_model=_model_of(parameters),
        scenario_dir=scenario_dir,
    )


def section_about(
    description: Mapping[str, Any] | None, section: Any, scenario_dir: Path | None
) -> Any:
    """Return the section, without its labelled responses if they are of another target.

    `description` is the target in an evaluation's configuration; None for the section's own.
    """
    if description is None or section.evaluation.labelled_responses is None:
        return section
    own = _described(section.target, scenario_dir)
    if _identity(own) == _identity(description):
        return section
    evaluation = section.evaluation.model_copy(update={"labelled_responses": None})
    return section.model_copy(update={"evaluation": evaluation})


def _identity(description: Mapping[str, Any]) -> Any:
    """Return the digest of a target's weights, or its model's name."""
    model = description.get("language_model") or description.get("chat_model") or {}
    return description.get("weights") or model.get("model")


def _described(parameters: Any, scenario_dir: Path | None) -> dict[str, Any]:
    """Return an agent's parameters with the digest of the weights they name."""
    if getattr(parameters, "chat_model", None) is not None:
        # Limits and prices change no answer.
        found = parameters.to_dict()
        kept = {k: v for k, v in found["chat_model"].items() if k not in ("limits", "prices")}
        return {**found, "chat_model": kept, "weights": None}
    reference = getattr(parameters.language_model, "model", None)
    source = resolve_reference(reference, scenario_dir) if reference is not None else None
    digest = weights_hash(source) if isinstance(source, Path) and source.exists() else None
    return {**parameters.to_dict(), "weights": digest}
