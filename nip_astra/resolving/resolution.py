"""From names, files and options to a validated experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, NipAstraError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.content import (
    DEFAULT_SCENARIO,
    find_scenario,
    is_inside_content,
    preset_path,
    scenario_names,
    with_absolute_paths,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.loading import (
    SETTINGS_SECTION,
    Layer,
    ResolvedParameters,
    flatten,
    literal_layer,
    merge_layers,
    parse_overrides,
    read_yaml_layers,
    resolve_parameters,
)
from nip_astra.parameters.merging import Merger
from nip_astra.parameters.parameters_base import SubParameters, texts_outside
from nip_astra.plugins import load_plugin
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.resolving.base_runs import (
    RERUN_TESTS,
    BaseRun,
    check_rerun,
    located,
    only,
    read_base_run,
)
from nip_astra.resolving.named_classes import (
    check_that_it_trains_on,
    find_kind,
    find_trainer,
    load_all,
    load_code,
    load_plugins,
    plugin_specs,
    read_scenario,
)
from nip_astra.resolving.unread_parameters import check_that_all_are_read
from nip_astra.scenarios.registry import Scenario
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trust import StoredSource, is_own, on_behalf_of


@dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment that has been validated and not yet built.

    Attributes
    ----------
    hyper_params : HyperParameters
        Complete, with the sections of the trainer and of the scenario's kind.
    sources : dict[str, str]
        Where each value came from, by dotted path.
    trainer_class : type[Trainer]
        The registered trainer.
    kind : str
        The scenario's kind.
    scenario_dir : Path
        The scenario's folder.
    settings : ExperimentSettings
        What the files say under `settings`; they hold where nothing else is asked for.
    source : StoredSource or None
        The stored run from which parameters come; None where the user wrote all of them.
    """

    hyper_params: HyperParameters
    sources: dict[str, str]
    trainer_class: type[Trainer]
    kind: str
    scenario_dir: Path
    settings: ExperimentSettings = field(default_factory=ExperimentSettings)
    source: StoredSource | None = None


def resolve_experiment(
    *,
    trainer: str | None = None,
    scenario: str | None = None,
    parameter_file: str | Path | None = None,
    overrides: Iterable[str] = (),
    seed: int | None = None,
    plugins: Sequence[str] = (),
    hyper_params: HyperParameters | Mapping[str, Any] | None = None,
    is_trusted: bool = False,
) -> ResolvedExperiment:
    """Load plug-ins, stack the parameter layers, and validate the whole.

    Layers, the later wins: class defaults, the scenario's `scenario.yaml`, the trainer's preset
    (unless a parameter file is given), the base run, the parameter file, `hyper_params`, the other
    arguments.

    Parameters
    ----------
    parameter_file : str or Path, optional
        In place of the preset `parameters/<trainer>/<scenario>.yaml`.
    overrides : Iterable[str]
        Assignments `a.b=c`.
    plugins : Sequence[str]
        Python files or modules to import first.
    hyper_params : HyperParameters or Mapping, optional
        What was given explicitly forms a layer of its own.
    is_trusted : bool
        Whether code that a stored run names is loaded although the run is not the user's own.

    Raises
    ------
    ConfigurationError
        When a name is unknown, a file is missing, or parameters are wrong; all faults of the
        parameters at once.
    UntrustedRunError
        When a stored run that is not the user's own names code to run, or has links out of its
        folder. What else it names is refused where it is used.
    """
    top = [] if hyper_params is None else [_layer_of(hyper_params)]
    given_by_set = parse_overrides(overrides)
    given_by_set = replace(given_by_set, values=with_absolute_paths(given_by_set.values))
    top += [_named_layer(trainer, scenario, seed), given_by_set]
    stack = _Stack.of(parameter_file, top)
    given = load_all(plugins, None)
    source = _source_of(stack, given, is_trusted=is_trusted)
    if source is not None:
        # What the user names is loaded first, so that only what the run names is asked for.
        load_code(stack.named_by_the_user(), stack.folder)
    with on_behalf_of(source):
        components = _find_components(stack, plugins)
        resolved = _validate(stack, components, is_plugin_given=bool(plugins))
        located = _located(resolved.hyper_params, components, stack.folder)
    if source is not None:
        source = replace(source, outside=_outside(stack, resolved))
    return ResolvedExperiment(
        located,
        resolved.sources,
        components.trainer_class,
        components.kind,
        components.scenario_dir,
        resolved.settings,
        source,
    )


@dataclass
class _Stack:
    """Layers of parameters, in the order in which the later wins, but the defaults of classes.

    Attributes
    ----------
    base_run : BaseRun
        What the layer `base` is of.
    folder : Path or None
        That of the parameter file.
    """

    scenario: list[Layer]
    preset: list[Layer]
    base: Layer
    file: list[Layer]
    top: list[Layer]
    base_run: BaseRun
    folder: Path | None

    @classmethod
    def of(cls, parameter_file: str | Path | None, top: list[Layer]) -> _Stack:
        """Read the parameter file and the base run; scenario and preset are not known yet."""
        path = None if parameter_file is None else Path(parameter_file)
        file = [] if path is None else read_yaml_layers(path, source=str(path))
        file, top = ([_with_taskset(layer) for layer in layers] for layers in (file, top))
        base_run = read_base_run([*file, *top])
        base = base_run.layer(_merged(*file, *top))
        folder = None if path is None else path.resolve().parent
        return cls([], [], base, file, top, base_run, folder)

    @property
    def layers(self) -> list[Layer]:
        """All layers."""
        return [*self.scenario, *self.preset, self.base, *self.file, *self.top]

    def named(self) -> dict[str, Any]:
        """What all layers say together."""
        return _merged(*self.layers)

    def named_by_the_user(self) -> dict[str, Any]:
        """What the layers say that come from no run."""
        return _merged(*(one for one in (*self.file, *self.top) if one.stored_in is None))


@dataclass(frozen=True)
class _Components:
    """What the layers name, loaded.

    Attributes
    ----------
    plugins : list[str]
        Plug-ins that were loaded, by their paths.
    """

    trainer: str
    trainer_class: type[Trainer]
    scenario: str
    scenario_dir: Path
    scenario_class: type[Scenario]
    kind: str
    protocol: Any
    plugins: list[str]


def _find_components(stack: _Stack, plugins: Sequence[str]) -> _Components:
    """Load plug-ins and find what is named; preset and scenario are put into the stack."""
    loaded = load_plugins([*plugins, *stack.base_run.plugins], stack.named(), stack.folder)
    trainer, trainer_class = find_trainer(stack.named(), stack.folder)
    preset = None if stack.file else preset_path(trainer, stack.named().get("scenario"))
    if preset is not None:
        are_plugins_named = "plugins" in stack.named()
        stack.preset = read_yaml_layers(preset, source=f"preset {preset.stem}")
        if not are_plugins_named:
            loaded += load_all(plugin_specs(stack.named()), preset.parent)
    scenario = str(stack.named().get("scenario") or DEFAULT_SCENARIO)
    scenario_dir = find_scenario(scenario)
    stack.scenario, kind = read_scenario(scenario_dir)
    scenario_class = find_kind(kind, scenario_dir)
    check_that_it_trains_on(trainer, trainer_class, scenario, kind)
    stack.base = stack.base_run.layer_about(stack.base, scenario_dir, scenario_class, kind)
    protocol = stack.named().get("interaction_protocol")
    return _Components(
        trainer, trainer_class, scenario, scenario_dir, scenario_class, kind, protocol, loaded
    )


def _validate(
    stack: _Stack, components: _Components, *, is_plugin_given: bool
) -> ResolvedParameters:
    """The validated parameters; what nothing reads is refused."""
    trainer_class, kind = components.trainer_class, components.kind
    scenario_class, protocol = components.scenario_class, components.protocol
    model = HyperParameters.with_sections(
        {components.trainer: trainer_class.Parameters, kind: scenario_class.Parameters}
        | {name: TRAINERS.get(name).Parameters for name in trainer_class.sections_of_others}
        | protocol_section(protocol, scenario_class, kind)
    )
    names = {"trainer": components.trainer, "scenario": components.scenario}
    resolved = resolve_parameters(
        [
            literal_layer("default", names),
            *(about_protocol(layer, protocol, kind) for layer in (*stack.scenario, *stack.preset)),
            only(stack.base, model.model_fields),
            *stack.file,
            *stack.top,
            *(
                [literal_layer("--plugin", {"plugins": components.plugins})]
                if is_plugin_given
                else []
            ),
        ],
        model,
    )
    if resolved.hyper_params.base_run.base_run_type == RERUN_TESTS:
        check_rerun(stack.base_run, [*stack.file, *stack.top], trainer_class)
    check_that_all_are_read(
        stack.preset,
        stack.base,
        [*stack.file, *stack.top],
        resolved.hyper_params,
        trainer_class,
        scenario_class,
        kind,
    )
    return resolved


def _source_of(stack: _Stack, given: Sequence[str], *, is_trusted: bool) -> StoredSource | None:
    """The stored run from which parameters come; of several, all must be the user's own."""
    found: dict[Path | None, str] = {
        one.stored_in: str(one.stored_in) for one in stack.file if one.stored_in is not None
    }
    if stack.base_run.values:
        found[stack.base_run.file] = stack.base_run.source
    if not found:
        return None
    strange = [place for file, place in found.items() if file is None or not is_own(file)]
    for file in found:
        if file is not None and file.name == HYPER_PARAMETERS:
            RunDirectory(file.parent).check_links()
    place = strange[0] if strange else next(iter(found.values()))
    named = [*plugin_specs(stack.named()), *stack.base_run.plugins]
    # What the run names itself is no copy of another of the same file name.
    copies = tuple(spec for spec in given if spec not in named)
    return StoredSource(place, is_trusted or not strange, copies)


def _outside(stack: _Stack, resolved: ResolvedParameters) -> dict[str, str]:
    """What the stored runs name outside of their folders, by dotted path.

    Left out are values that a shipped scenario has as well, and files inside it.
    """
    # A file of another name is the user's, as what `show --yaml` prints.
    stored = [one for one in stack.file if one.stored_in and one.stored_in.name == HYPER_PARAMETERS]
    stored += [stack.base] if stack.base_run.values else []
    sources = {one.source for one in stored}
    is_shipped = resolved.hyper_params.scenario in scenario_names()
    shipped = dict(flatten(_merged(*stack.scenario))) if is_shipped else {}
    found = {}
    for path, value in texts_outside(resolved.hyper_params):
        at = path
        while at not in resolved.sources and "." in at:
            at = at.rpartition(".")[0]  # an element of a list has the list's source
        is_theirs = resolved.sources.get(at) in sources and value != shipped.get(path)
        is_content = path == "scenario" or is_inside_content(value)
        if is_theirs and not (is_shipped and is_content):
            found[path] = value
    settings = _merged(*stored).get(SETTINGS_SECTION, {})
    outside = resolved.settings.outside()
    return found | {f"{SETTINGS_SECTION}.{one}": outside[one] for one in settings if one in outside}


TASKSETS = "verifiers"
"""Scenario of the tasksets of the library verifiers, and what they are named by: verifiers:NAME."""


def _with_taskset(layer: Layer) -> Layer:
    """A layer whose scenario is `verifiers:TASKSET` with scenario and taskset apart."""
    scenario, sign, taskset = str(layer.values.get("scenario") or "").partition(":")
    if scenario != TASKSETS or not sign:
        return layer
    merger = Merger()
    merger.add({"task": {"task": {"taskset": taskset}}}, layer.source)
    merger.add({**layer.values, "scenario": TASKSETS}, layer.source)
    return Layer(layer.source, merger.values, layer.stored_in)


def protocol_section(
    protocol: Any, scenario_class: type[Scenario], kind: str
) -> dict[str, type[SubParameters]]:
    """The section of the interaction protocol, if the scenario's agents play one."""
    if not scenario_class.uses_protocol:
        if protocol is not None:
            raise ConfigurationError(
                f"interaction_protocol {protocol!r} was asked for, but agents of a scenario of the "
                f"kind {kind!r} play none. Leave it out, or choose another --scenario."
            )
        return {}
    if not isinstance(protocol, str):
        raise ConfigurationError(
            f"a scenario of the kind {kind!r} needs an interaction protocol, but "
            f"interaction_protocol is {protocol!r}. Choose one of: "
            f"{', '.join(PROTOCOL_HANDLERS.names())}."
        )
    return {protocol: PROTOCOL_HANDLERS.get(protocol).Parameters}


def about_protocol(layer: Layer, protocol: Any, kind: str) -> Layer:
    """A scenario's or preset's layer without protocols that are not played, and their agents.

    A name that no protocol has stays, to be told as a fault.
    """
    layer = only(layer, set(layer.values) - (set(PROTOCOL_HANDLERS.names()) - {protocol}))
    given = layer.values.get(kind)
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    agents = section.get("agents")
    if not isinstance(agents, Mapping) or not (own := _agents_of(protocol)):
        return layer
    of_others = set().union(*map(_agents_of, PROTOCOL_HANDLERS.names())) - own
    left = {name: value for name, value in agents.items() if name not in of_others}
    return Layer(layer.source, {**layer.values, kind: {**section, "agents": left}})


def _agents_of(protocol: str) -> set[str]:
    """The agents of a protocol's class; none where they depend on its parameters."""
    try:
        names = getattr(PROTOCOL_HANDLERS.get(protocol), "agent_names", None)
    except NipAstraError:
        return set()  # a package that cannot be imported is told when its protocol is asked for
    return set(names) if isinstance(names, tuple) else set()


def _merged(*layers: Layer) -> dict[str, Any]:
    return merge_layers(layers, resolve=False)[0]


def _located(
    hyper_params: HyperParameters, components: _Components, folder: Path | None
) -> HyperParameters:
    """The parameters with absolute paths, so that they mean the same in any folder."""
    changes: dict[str, Any] = {}
    if components.plugins:
        changes["plugins"] = list(dict.fromkeys(components.plugins))
    if hyper_params.custom_trainer_module_path is not None:
        plugin = load_plugin(hyper_params.custom_trainer_module_path, relative_to=folder)
        changes["custom_trainer_module_path"] = plugin.spec
    if hyper_params.scenario not in scenario_names():
        changes["scenario"] = str(components.scenario_dir)
    if hyper_params.base_run.run is not None:
        changes["base_run"] = located(hyper_params.base_run)
    agents = _located_agents(getattr(hyper_params, components.kind))
    if agents is not None:
        changes[components.kind] = agents
    return hyper_params.model_copy(update=changes)


def _located_agents(section: SubParameters) -> SubParameters | None:
    """A section whose agents start from runs by absolute paths; None where none does."""
    agents = getattr(section, "agents", None)
    if not isinstance(agents, Mapping):
        return None
    moved = {
        name: agent.model_copy(update={"load_from_run": str(Path(agent.load_from_run).resolve())})
        for name, agent in agents.items()
        if getattr(agent, "load_from_run", None) is not None and Path(agent.load_from_run).is_dir()
    }
    return section.model_copy(update={"agents": {**agents, **moved}}) if moved else None


def _layer_of(hyper_params: HyperParameters | Mapping[str, Any]) -> Layer:
    if isinstance(hyper_params, HyperParameters):
        hyper_params = hyper_params.given()
    if not isinstance(hyper_params, Mapping):
        raise ConfigurationError(
            f"an experiment was to be made of {hyper_params!r}, but that is "
            f"{type(hyper_params).__name__}. Give HyperParameters(trainer=..., scenario=...), or "
            "what resolve_experiment(trainer=..., parameter_file=...) gives."
        )
    return literal_layer("hyper_params", hyper_params)


def _named_layer(trainer: str | None, scenario: str | None, seed: int | None) -> Layer:
    given = {"trainer": trainer, "scenario": scenario, "seed": seed}
    return literal_layer(
        "command line", {name: value for name, value in given.items() if value is not None}
    )
