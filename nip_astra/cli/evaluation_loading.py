"""Load what an evaluation plays: attackers of runs and checkpoints, targets, scorers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.checkpoints.store import BEST, LATEST, MANIFEST, CheckpointStore
from nip_astra.cli.attacker_folders import Surroundings, attacker_of_folder, resolve_around
from nip_astra.cli.text_attackers import LoadedTexts, is_text_attacker, load_texts, place_of
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.storage import EVALUATIONS, weights_hash
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.language_models.base import as_learner
from nip_astra.language_models.services.retrying import CACHE_FILE
from nip_astra.parameters.content import resolve_reference
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import (
    ConversationAgent,
    Speaker,
    build_agent,
    build_target,
    load_language_model,
)
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN
from nip_astra.scenario_instance import ConversationInstance
from nip_astra.scenarios.ast_chat import without_other_target
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trust import on_behalf_of
from nip_astra.utils.devices import resolve_device

MODEL_DIR, ATTACKER_DIR, POLICY_DIR = "model", "attacker", "policy"
"""Folders with the attacker's weights, in a run and in a checkpoint, and with a policy's."""


@dataclass(frozen=True)
class LoadedAttacker:
    """An attacker with the scenario it was trained in.

    Attributes
    ----------
    label : str
        Run id, with the checkpoint where one was asked for.
    suffix : str
        What the attacker adds to the name of an evaluation; empty for the run's own result.
    instance : ConversationInstance
        Its sampler speaks through this attacker.
    section : Any
        Parameters of the scenario's kind.
    texts : LoadedTexts, optional
        Where the attacker gives texts only.
    """

    label: str
    suffix: str
    run: Path
    resolved: ResolvedExperiment
    instance: ConversationInstance
    section: Any
    weights: str | None
    texts: LoadedTexts | None = None

    @property
    def sampler(self) -> TreeSampler:
        """The sampler of the instance."""
        return self.instance.sampler


@dataclass(frozen=True)
class LoadedTarget:
    """A target, and what is known of its failures.

    Attributes
    ----------
    agent : Speaker or None
        None for the target of the attacker's own scenario.
    description : dict
        What the evaluation's configuration says of it.
    language_model : Any
        Parameters of its backend; what they refer to is looked for in `scenario_dir`.
    """

    label: str
    suffix: str
    agent: Speaker | None
    planted: Sequence[PlantedFailure] | None
    description: dict[str, Any]
    language_model: Any
    scenario_dir: Path | None


@dataclass(frozen=True)
class RunCode:
    """Whose code may run on behalf of runs: plug-ins that the user gave, or all that they name."""

    plugins: Sequence[str] = ()
    is_trusted: bool = False


def resolve_run(path: Path, code: RunCode, overrides: Sequence[str] = ()) -> ResolvedExperiment:
    """The experiment of a run directory.

    Raises
    ------
    ConfigurationError
        When nobody attacks a target in it: agents play an interaction protocol, or a policy
        learns a task.
    """
    directory = RunDirectory.open(path)
    resolved = resolve_experiment(
        parameter_file=directory.path / HYPER_PARAMETERS,
        overrides=overrides,
        plugins=code.plugins,
        is_trusted=code.is_trusted,
    )
    protocol = resolved.hyper_params.interaction_protocol
    if protocol is not None:
        raise ConfigurationError(
            f"the conversations of {path} were to be evaluated, scored or compared, but its agents "
            f"play the interaction protocol {protocol!r} and nobody attacks a target. To test its "
            f"agents again: nip-astra --set base_run.run={shlex.quote(str(path))} --set "
            "base_run.base_run_type=rerun_tests; to see it beside other runs: nip-astra report "
            f"{shlex.quote(str(path))} <run>"
        )
    if not hasattr(getattr(resolved.hyper_params, resolved.kind), "failure_threshold"):
        raise ConfigurationError(
            f"the conversations of {path} were to be evaluated, scored, compared or exported, but "
            f"its scenario of kind {resolved.kind!r} has no attacker that talks to a target. Give "
            f"a run of an ast_* trainer. To see this one: nip-astra report "
            f"{shlex.quote(str(path))}; policies on tasks are measured by nip-astra evaluate, and "
            "compared by nip-astra compare, apart from attackers."
        )
    return resolved


def section_of(resolved: ResolvedExperiment) -> Any:
    """The parameters of the scenario's kind, without what is known of another target."""
    section = getattr(resolved.hyper_params, resolved.kind)
    return without_other_target(section, resolved.scenario_dir)


def run_of(path: str | Path) -> tuple[Path, Path | None]:
    """The run of a run directory or checkpoint, and the checkpoint.

    `checkpoints/latest` and `checkpoints/best` are the checkpoints that they point to; a run's
    `model`, and a checkpoint's `attacker` or `policy`, mean the whole run or checkpoint.
    """
    found = Path(path)
    if (found.parent / HYPER_PARAMETERS).is_file() and found.name == MODEL_DIR:
        return found.parent, None
    if (found.parent / MANIFEST).is_file() and found.name in (ATTACKER_DIR, POLICY_DIR):
        found = found.parent
    store = CheckpointStore(found.parent)
    checkpoint: Path | None = found
    if found.name in (LATEST, BEST) and not found.is_dir():
        checkpoint = store.latest() if found.name == LATEST else store.best()
    if checkpoint is not None and (checkpoint / MANIFEST).is_file():
        # Resolved, since a link has not the name of its checkpoint.
        return checkpoint.resolve().parent.parent, checkpoint.resolve()
    return found, None


def refuse_unread_overrides(overrides: Sequence[str], readable: tuple[str, ...], path: str) -> None:
    """Refuse assignments to parameters that an evaluation does not read.

    Parameters
    ----------
    readable : tuple of str
        Groups that are read, each with its dot, and single parameters.

    Raises
    ------
    ConfigurationError
        Before anything is played.
    """
    for one in overrides:
        name = one.partition("=")[0].strip()
        if not any(f"{name}.".startswith(f"{group.removesuffix('.')}.") for group in readable):
            known = " and ".join(
                f"{group}*" if group.endswith(".") else group for group in readable
            )
            raise ConfigurationError(
                f"--set {one} was given to evaluate {path}, but nothing is trained: only {known} "
                "are read. Leave it out."
            )


def load_attacker(
    path: str,
    settings: ExperimentSettings,
    *,
    code: RunCode,
    overrides: Sequence[str] = (),
    is_untrained: bool = False,
    surroundings: Surroundings = Surroundings(),  # noqa: B008 - frozen
    column: str = DEFAULT_COLUMN,
) -> LoadedAttacker:
    """Build the scenario of a run, and give its attacker the weights that training left.

    Parameters
    ----------
    path : str
        A run directory, or a checkpoint in one; see `run_of`. Or a folder with a model or adapter,
        a list of probes, or a YAML file that says which chat model attacks.
    surroundings : Surroundings
        The scenario of such a folder.
    column : str
        That holds the probes, where the attacker is a list of them.
    is_untrained : bool
        Give the attacker as it was before training, the reference.

    Raises
    ------
    ConfigurationError
        When it is no run, its scenario has no attacker, or it has no weights yet.
    """
    run, checkpoint = run_of(path)
    is_run = (run / HYPER_PARAMETERS).is_file()
    if is_run and surroundings.are_given:
        raise ConfigurationError(
            f"{path} was to be evaluated in a scenario of one's own, but it is of the run {run}, "
            "which says its scenario. Leave out --scenario and --parameters; single parameters are "
            "changed by --set."
        )
    resolved = (
        resolve_run(run, code, overrides)
        if is_run
        else resolve_around(run, surroundings, overrides, code.plugins, is_trusted=code.is_trusted)
    )
    refuse_unread_overrides(overrides, (f"{resolved.kind}.", "seed"), path)
    instance = _scenario_of(run, resolved, settings)
    section = section_of(resolved)
    name = RunDirectory(run).run_id
    if is_text_attacker(path):
        texts = load_texts(path, column, settings, resolved.scenario_dir)
        instance.sampler = instance.sampler.with_attacker(texts.attacker)
        place = place_of(path)
        return LoadedAttacker(place.name, "", place, resolved, instance, section, None, texts)
    if is_untrained:
        agent = replace(instance.agents["reference"], role="attacker")
        weighted = _Weighted(agent, f"{name} untrained", "untrained", None)
    elif not is_run:
        weighted = _Weighted(attacker_of_folder(run, instance, section, settings), name, "", run)
    elif checkpoint is None and (run / MODEL_DIR).is_dir():
        folder = run / MODEL_DIR
        agent = _of_model_folder(instance, section, folder, settings, resolved.scenario_dir)
        weighted = _Weighted(agent, name, "", folder)
    else:
        weighted = _of_checkpoint(instance, checkpoint or _newest_checkpoint(run), name)
    instance.sampler = instance.sampler.with_attacker(weighted.agent)
    weights = weights_hash(weighted.source) if weighted.source is not None else None
    label, suffix = weighted.label, weighted.suffix
    return LoadedAttacker(label, suffix, run, resolved, instance, section, weights)


def _scenario_of(
    run: Path, resolved: ResolvedExperiment, settings: ExperimentSettings
) -> ConversationInstance:
    """The scenario, in which an attacker talks to a target."""
    with on_behalf_of(resolved.source):
        instance = build_scenario_instance(
            resolved.hyper_params, settings, kind=resolved.kind, scenario_dir=resolved.scenario_dir
        )
    if not isinstance(instance, ConversationInstance):
        raise ConfigurationError(
            f"{run} was to be evaluated, but its scenario of kind {resolved.kind!r} has no "
            "attacker that talks to a target. Give a run of an ast_* trainer."
        )
    return instance


def with_service_files(settings: ExperimentSettings, run: Path) -> ExperimentSettings:
    """Settings by which chat models remember what the run was answered, and count anew."""
    remembered = settings.service_cache or str(run / CACHE_FILE)
    places = {"run_directory": RunDirectory(run / EVALUATIONS), "service_cache": remembered}
    return settings.model_copy(update=places)


def target_label(section: Any) -> str:
    """What a scenario's own target is called."""
    return Path(str(getattr(model_of(section.target), "model", "target"))).name


def model_of(agent: Any) -> Any:
    """The parameters of an agent's model: of a backend with weights, or of a chat model."""
    return getattr(agent, "chat_model", None) or agent.language_model


def load_target(
    spec: str | None, attacker: LoadedAttacker, settings: ExperimentSettings, code: RunCode
) -> LoadedTarget:
    """A target: None for the scenario's own, a run for that run's, else a model.

    A model gets the format and sampling of the scenario's own target.
    """
    parameters, planted = attacker.section.target, None
    scenario_dir = attacker.resolved.scenario_dir
    if spec is None:
        return LoadedTarget(
            label=target_label(attacker.section),
            suffix="",
            agent=None,
            planted=None,
            description=_described(parameters, scenario_dir),
            language_model=model_of(parameters),
            scenario_dir=scenario_dir,
        )
    if (Path(spec) / HYPER_PARAMETERS).is_file():
        resolved = resolve_run(Path(spec), code)
        section = section_of(resolved)
        parameters, scenario_dir = section.target, resolved.scenario_dir
        planted, label = section.planted_failures, RunDirectory(Path(spec)).run_id
    else:
        own = model_of(parameters)
        if "model" not in type(own).model_fields:
            raise ConfigurationError(
                f"the target {spec!r} was asked for as a model, but the backend of the run's own "
                "target takes none. Give a run whose target you want."
            )
        field = "language_model" if own is parameters.language_model else "chat_model"
        model = own.model_copy(update={"model": spec})
        parameters = parameters.model_copy(update={field: model})
        planted, label = [], Path(spec.rstrip("/")).name
    return LoadedTarget(
        label=label,
        suffix=label,
        agent=build_target(parameters, None, settings, scenario_dir=scenario_dir),
        planted=planted,
        description=_described(parameters, scenario_dir),
        language_model=model_of(parameters),
        scenario_dir=scenario_dir,
    )


class _Weighted(NamedTuple):
    """An attacker with its weights, what it is called, and where they lie."""

    agent: ConversationAgent
    label: str
    suffix: str
    source: Path | None


def _of_checkpoint(instance: ConversationInstance, checkpoint: Path, name: str) -> _Weighted:
    """The scenario's own attacker with the weights of a checkpoint."""
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    agent, source = instance.agents["attacker"], checkpoint / ATTACKER_DIR
    as_learner(agent.language_model, role="attacker", to="be restored").restore(source)
    return _Weighted(agent, f"{name} {checkpoint.name}", checkpoint.name, source)


def _of_model_folder(
    instance: ConversationInstance,
    section: Any,
    folder: Path,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
) -> ConversationAgent:
    """The attacker that `save_pretrained` wrote."""
    agent: ConversationAgent = instance.agents["attacker"]
    parameters = section.attacker.language_model
    if getattr(parameters, "lora", None) is None and (folder / "model.safetensors").is_file():
        as_learner(agent.language_model, role="attacker", to="be restored").restore(folder)
        return agent
    # An adapter was merged into the weights, or they are in several files.
    changes = {"model": str(folder.resolve()), "lora": None}
    known = {k: v for k, v in changes.items() if k in type(parameters).model_fields}
    model = load_language_model(
        parameters.model_copy(update=known),
        device=resolve_device(settings.device),
        scenario_dir=scenario_dir,
        trainable=False,
    )
    return build_agent("attacker", section.attacker, model)


def _newest_checkpoint(run: Path) -> Path:
    found = CheckpointStore(run / "checkpoints").latest()
    if found is None:
        raise ConfigurationError(
            f"{run} was to be evaluated, but it has neither model/ nor a checkpoint: nothing was "
            "trained yet. Give --untrained for the attacker before training, or resume the run."
        )
    return found


def section_about(
    description: Mapping[str, Any] | None, section: Any, scenario_dir: Path | None
) -> Any:
    """The section without its labelled responses, where they are of another target.

    Parameters
    ----------
    description : Mapping, optional
        What an evaluation's configuration says of its target; None for the section's own.
    """
    if description is None or section.evaluation.labelled_responses is None:
        return section
    own = _described(section.target, scenario_dir)
    if _identity(own) == _identity(description):
        return section
    evaluation = section.evaluation.model_copy(update={"labelled_responses": None})
    return section.model_copy(update={"evaluation": evaluation})


def _identity(description: Mapping[str, Any]) -> Any:
    """What tells a target's model from others: the digest of its weights, or its name."""
    model = description.get("language_model") or description.get("chat_model") or {}
    return description.get("weights") or model.get("model")


def _described(parameters: Any, scenario_dir: Path | None) -> dict[str, Any]:
    """An agent's parameters with the digest of the weights that they name."""
    if getattr(parameters, "chat_model", None) is not None:
        # How fast it is asked and what it costs changes no answer.
        found = parameters.to_dict()
        kept = {k: v for k, v in found["chat_model"].items() if k not in ("limits", "prices")}
        return {**found, "chat_model": kept, "weights": None}
    reference = getattr(parameters.language_model, "model", None)
    source = resolve_reference(reference, scenario_dir) if reference is not None else None
    digest = weights_hash(source) if isinstance(source, Path) and source.exists() else None
    return {**parameters.to_dict(), "weights": digest}
