"""Resolve names, files and options to a validated experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nip_astra.errors import (
    ConfigurationError,
    NipAstraError,
    ParameterError,
    ParameterFault,
    PluginError,
    UnknownNameError,
    show_value,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.content import (
    DEFAULT_SCENARIO,
    content_root,
    find_scenario,
    is_inside_content,
    preset_path,
    scenario_names,
    with_absolute_paths,
)
from nip_astra.parameters.conversion import with_new_names
from nip_astra.parameters.files import (
    DEFAULT_SOURCE,
    SETTINGS_SECTION,
    Layer,
    default_lists,
    flatten,
    merge_layers,
    parse_overrides,
    read_yaml_layers,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters, texts_outside
from nip_astra.plugins import load_plugin, module_of
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.resolving.base_runs import (
    RERUN_TESTS,
    BaseRun,
    check_rerun,
    read_base_run,
    with_absolute_path,
)
from nip_astra.resolving.unread_parameters import refuse_unread
from nip_astra.scenarios.registry import SCENARIOS, Scenario
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trust import StoredSource, active_source, is_own, on_behalf_of

VERIFIERS = "verifiers"
"""Scenario of the tasksets of the library verifiers; `verifiers:NAME` selects one."""
_OPEN = "???"


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
        The settings of the files; they hold unless a caller gives others.
    source : StoredSource or None
        The stored run from which parameters come; None if the user wrote all of them.
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
    """Load plug-ins, merge the parameter layers, and validate the result.

    Layers, the later wins: class defaults, the scenario's `scenario.yaml`, the trainer's preset
    (unless a parameter file is given), the base run, the parameter file, `hyper_params`, the other
    arguments.

    Parameters
    ----------
    parameter_file : str or Path, optional
        Replaces the preset `parameters/<trainer>/<scenario>.yaml`.
    overrides : Iterable[str]
        Assignments `a.b=c`.
    plugins : Sequence[str]
        Python files or modules to import first.
    hyper_params : HyperParameters or Mapping, optional
        Explicitly set values form a layer.
    is_trusted : bool
        Whether to load code named by a stored run that is not the user's own.

    Raises
    ------
    ConfigurationError
        If a name is unknown, a file is missing, or parameters are wrong; all faults of the
        parameters at once.
    UntrustedRunError
        If a stored run that is not the user's own names code to run, or has links out of its
        folder. Whatever else it names is refused where it is used.
    """
    top = [] if hyper_params is None else [_explicit_layer(hyper_params)]
    named = {"trainer": trainer, "scenario": scenario, "seed": seed}
    named = {name: value for name, value in named.items() if value is not None}
    assigned = parse_overrides(overrides)
    assigned = replace(assigned, values=with_absolute_paths(assigned.values))
    stack = _Stack.read(parameter_file, [*top, Layer.literal("command line", named), assigned])
    given = _load(plugins, None)
    source = _stored_source(stack, given, is_trusted=is_trusted)
    if source is not None:
        # The user's own code first, so that only code that the run names needs approval.
        user = _merged(*(one for one in (*stack.file, *stack.top) if one.stored_in is None))
        _load_named_code(user, stack.folder)
        if user.get("custom_trainer_module_path") is not None:
            _load([str(user["custom_trainer_module_path"])], stack.folder)
    with on_behalf_of(source):
        components = _find_components(stack, plugins)
        values = _validate(stack, components, is_plugin_given=bool(plugins))
        located = _with_absolute_paths(values.hyper_params, components, stack.folder)
    if source is not None:
        source = replace(source, outside=_outside(stack, values))
    return ResolvedExperiment(
        located,
        values.sources,
        components.trainer_class,
        components.kind,
        components.scenario_dir,
        values.settings,
        source,
    )


# ---- the layers


@dataclass
class _Stack:
    """Layers of parameters by origin, in the order in which the later wins.

    Attributes
    ----------
    base_run : BaseRun
        The run that gives the layer `base`.
    folder : Path or None
        The folder of the parameter file.
    """

    scenario: list[Layer]
    preset: list[Layer]
    base: Layer
    file: list[Layer]
    top: list[Layer]
    base_run: BaseRun
    folder: Path | None

    @classmethod
    def read(cls, parameter_file: str | Path | None, top: list[Layer]) -> _Stack:
        """Read the parameter file and the base run; scenario and preset follow later."""
        path = None if parameter_file is None else Path(parameter_file)
        file = [] if path is None else read_yaml_layers(path, source=str(path))
        file, top = ([_with_taskset(layer) for layer in layers] for layers in (file, top))
        base_run = read_base_run([*file, *top])
        base = base_run.layer(_merged(*file, *top))
        folder = None if path is None else path.resolve().parent
        return cls([], [], base, file, top, base_run, folder)

    def merged(self) -> dict[str, Any]:
        """The values of all layers together."""
        return _merged(*self.scenario, *self.preset, self.base, *self.file, *self.top)


def _merged(*layers: Layer) -> dict[str, Any]:
    return merge_layers(layers, resolve=False)[0]


def _explicit_layer(hyper_params: HyperParameters | Mapping[str, Any]) -> Layer:
    if isinstance(hyper_params, HyperParameters):
        hyper_params = hyper_params.given()
    if not isinstance(hyper_params, Mapping):
        raise ConfigurationError(
            f"an experiment cannot be made from {hyper_params!r} ({type(hyper_params).__name__}). "
            "Give HyperParameters(trainer=..., scenario=...), or the result of resolve_experiment."
        )
    return Layer.literal("hyper_params", with_new_names(hyper_params, source="hyper_params"))


def _with_taskset(layer: Layer) -> Layer:
    """A layer whose scenario `verifiers:TASKSET` is split into scenario and taskset."""
    scenario, sign, taskset = str(layer.values.get("scenario") or "").partition(":")
    if scenario != VERIFIERS or not sign:
        return layer
    below = replace(layer, values={"task": {"task": {"taskset": taskset}}})
    above = replace(layer, values={**layer.values, "scenario": VERIFIERS})
    return replace(layer, values=_merged(below, above))


# ---- the code that they name


def _load(specs: Sequence[str], folder: Path | None) -> list[str]:
    """Import plug-ins; returns the paths or modules that identify them."""
    return [load_plugin(spec, relative_to=folder).spec for spec in specs]


def _plugins_in(values: Mapping[str, Any]) -> list[str]:
    """The plug-ins of a file; a malformed list is reported with the other faults later."""
    specs = values.get("plugins")
    is_valid = isinstance(specs, list) and all(isinstance(spec, str) for spec in specs)
    return list(specs) if is_valid and specs else []


def _load_named_code(values: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Import the plug-ins that values name, and that of their scenario."""
    loaded = _load(_plugins_in(values), folder)
    if values.get("scenario") is not None:
        # It may register the trainer.
        _load_plugin_of(find_scenario(str(values["scenario"])))
    return loaded


def _load_plugin_of(scenario_dir: Path) -> None:
    plugin = scenario_dir / "plugin.py"
    if plugin.is_file():
        load_plugin(plugin)


def _stored_source(stack: _Stack, given: Sequence[str], *, is_trusted: bool) -> StoredSource | None:
    """The stored run from which parameters come; of several, all must be the user's own."""
    runs: dict[Path | None, str] = {
        one.stored_in: str(one.stored_in) for one in stack.file if one.stored_in is not None
    }
    if stack.base_run.values:
        runs[stack.base_run.file] = stack.base_run.source
    if not runs:
        return None
    foreign = [place for file, place in runs.items() if file is None or not is_own(file)]
    for file in runs:
        if file is not None and file.name == HYPER_PARAMETERS:
            RunDirectory(file.parent).check_links()
    place = foreign[0] if foreign else next(iter(runs.values()))
    named = [*_plugins_in(stack.merged()), *stack.base_run.plugins]
    # A plug-in that the run itself names is not a copy of another one with its file name.
    copies = tuple(spec for spec in given if spec not in named)
    return StoredSource(place, is_trusted or not foreign, copies)


@dataclass(frozen=True)
class _Components:
    """The classes that the layers name, and the plug-ins that were loaded, by path."""

    trainer: str
    trainer_class: type[Trainer]
    scenario: str
    scenario_dir: Path
    scenario_class: type[Scenario]
    kind: str
    protocol: Any
    plugins: list[str]


def _find_components(stack: _Stack, plugins: Sequence[str]) -> _Components:
    """Load plug-ins and find the named classes; adds preset and scenario to the stack."""
    loaded = _load([*plugins, *stack.base_run.plugins], None)
    values = stack.merged()
    loaded += _load_named_code(values, stack.folder)
    trainer, trainer_class = _find_trainer(values, stack.folder)
    preset = None if stack.file else preset_path(trainer, values.get("scenario"))
    if preset is not None:
        stack.preset = read_yaml_layers(preset, source=f"preset {preset.stem}")
        if "plugins" not in values:
            loaded += _load(_plugins_in(stack.merged()), preset.parent)
    scenario = str(stack.merged().get("scenario") or DEFAULT_SCENARIO)
    scenario_dir = find_scenario(scenario)
    stack.scenario, kind = _read_scenario(scenario_dir)
    scenario_class = _find_kind(kind, scenario_dir)
    _check_that_it_trains_on(trainer, trainer_class, scenario, kind)
    stack.base = stack.base_run.layer_about(stack.base, scenario_dir, scenario_class, kind)
    protocol = stack.merged().get("interaction_protocol")
    return _Components(
        trainer, trainer_class, scenario, scenario_dir, scenario_class, kind, protocol, loaded
    )


def _find_trainer(values: Mapping[str, Any], folder: Path | None) -> tuple[str, type[Trainer]]:
    """The trainer's name and its class, from the registry or from a file."""
    if values.get("trainer") is None:
        raise ConfigurationError(
            f"no trainer is given. Choose one with --trainer: {', '.join(TRAINERS.names())}."
        )
    name = str(values["trainer"])
    path = values.get("custom_trainer_module_path")
    class_name = values.get("custom_trainer_class_name")
    if path is None and class_name is None:
        return name, TRAINERS.get(name)
    if path is None or class_name is None:
        raise ConfigurationError(
            "a custom trainer needs both custom_trainer_module_path and "
            "custom_trainer_class_name. Give both, or neither."
        )
    module = module_of(load_plugin(str(path), relative_to=folder))
    found = getattr(module, str(class_name), None)
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise PluginError(
            f"{path} has no trainer class {class_name!r}. Set custom_trainer_class_name to a "
            "subclass of nip_astra's Trainer."
        )
    return name, found


def _read_scenario(scenario_dir: Path) -> tuple[list[Layer], str]:
    """The scenario's layers and its kind; its plugin.py is loaded first."""
    _load_plugin_of(scenario_dir)
    path = scenario_dir / "scenario.yaml"
    layers = read_yaml_layers(path, source="scenario.yaml")
    source = active_source()
    is_shipped = scenario_dir.parent == content_root() / "scenarios"
    if source is not None and not source.is_trusted and not is_shipped:
        layers = [Layer.literal(layer.source, layer.values) for layer in layers]
    kind = _merged(*layers).get("kind")
    if kind is None:
        raise ConfigurationError(
            f"{path} has no `kind`. Add one of: {', '.join(SCENARIOS.names())}."
        )
    return [layer.without(["kind"]) for layer in layers], str(kind)


def _find_kind(kind: str, scenario_dir: Path) -> type[Scenario]:
    if kind not in SCENARIOS.names():
        raise UnknownNameError(
            "scenario kind",
            kind,
            SCENARIOS.names(),
            f"It is set in {scenario_dir / 'scenario.yaml'}; a plugin.py beside that file can "
            "register a kind.",
        )
    return SCENARIOS.get(kind)


def _check_that_it_trains_on(
    trainer: str, trainer_class: type[Trainer], scenario: str, kind: str
) -> None:
    trainer_type = trainer_class.trainer_type
    kinds = list(trainer_class.scenario_kinds) or [
        name for name in SCENARIOS.names() if trainer_type in SCENARIOS.get(name).trainer_types
    ]
    if kind in kinds or not kinds:
        SCENARIOS.get(kind).check_trainer_type(trainer_type)
        return
    if not trainer_class.scenario_kinds:
        # A trainer that names no kinds plays protocols.
        kinds = [name for name in kinds if SCENARIOS.get(name).uses_protocol] or kinds
    shipped = [name for name in scenario_names() if _read_scenario(find_scenario(name))[1] in kinds]
    raise ConfigurationError(
        f"the trainer {trainer!r} cannot train on the scenario {scenario!r} of kind {kind!r}, only "
        f"on {', '.join(kinds)}. Choose another --trainer or --scenario"
        + (f": {', '.join(shipped)}." if shipped else ".")
    )


# ---- validation


@dataclass(frozen=True)
class ResolvedParameters:
    """Validated parameters, the source of each value by dotted path, and the files' settings."""

    hyper_params: HyperParameters
    sources: dict[str, str]
    settings: ExperimentSettings


def _validate(
    stack: _Stack, components: _Components, *, is_plugin_given: bool
) -> ResolvedParameters:
    """The validated parameters; those that nothing reads are refused."""
    trainer_class, kind = components.trainer_class, components.kind
    scenario_class, protocol = components.scenario_class, components.protocol
    model = HyperParameters.with_sections(
        {components.trainer: trainer_class.Parameters, kind: scenario_class.Parameters}
        | {name: TRAINERS.get(name).Parameters for name in trainer_class.sections_of_others}
        | _protocol_section(protocol, scenario_class, kind)
    )
    names = {"trainer": components.trainer, "scenario": components.scenario}
    layers = [
        Layer.literal(DEFAULT_SOURCE, names),
        *(_about_protocol(layer, protocol, kind) for layer in (*stack.scenario, *stack.preset)),
        stack.base.only(model.model_fields),
        *stack.file,
        *stack.top,
    ]
    if is_plugin_given:
        layers.append(Layer.literal("--plugin", {"plugins": components.plugins}))
    resolved = validate_layers(layers, model)
    given = [*stack.file, *stack.top]
    if resolved.hyper_params.base_run.base_run_type == RERUN_TESTS:
        check_rerun(stack.base_run, given, trainer_class)
    refuse_unread(
        stack.preset, stack.base, given, resolved.hyper_params, trainer_class, scenario_class, kind
    )
    return resolved


def validate_layers(layers: Sequence[Layer], model: type[HyperParameters]) -> ResolvedParameters:
    """Merge the layers and validate the result.

    Raises
    ------
    ParameterError
        With every fault, each with its dotted path, value and source.
    """
    values, sources = merge_layers([default_lists(_merged(*layers), model), *layers])
    hint = "Give it with --set {}=VALUE."
    faults = [
        ParameterFault(
            path,
            repr(_OPEN),
            "is left open by its file and must be given",
            hint.format(path),
            sources.get(path, ""),
        )
        for path, value in flatten(values)
        if value == _OPEN
    ]
    left_open = {fault.path for fault in faults}
    settings, hyper_params = ExperimentSettings(), None
    try:
        settings = _read_settings(values.pop(SETTINGS_SECTION, {}), sources)
    except ParameterError as error:
        faults += error.faults
    try:
        hyper_params = model.from_dict(values, sources=sources)
    except ParameterError as error:
        faults += [fault for fault in error.faults if fault.path not in left_open]
    if faults or hyper_params is None:
        raise ParameterError(faults)
    every_path = [path for path, _ in flatten(hyper_params.to_dict())]
    sources = {path: sources.get(path, DEFAULT_SOURCE) for path in every_path}
    return ResolvedParameters(hyper_params, sources, settings)


def _read_settings(given: Any, sources: Mapping[str, str]) -> ExperimentSettings:
    head = f"{SETTINGS_SECTION}."
    if not isinstance(given, Mapping):
        source = sources.get(SETTINGS_SECTION, "")
        fault = ParameterFault(
            SETTINGS_SECTION, show_value(given), "must be a group of settings", "", source
        )
        raise ParameterError([fault])
    own = {path.removeprefix(head): source for path, source in sources.items()}
    try:
        return ExperimentSettings.from_dict(given, sources=own)
    except ParameterError as error:
        faults = [fault._replace(path=head + fault.path) for fault in error.faults]
        raise ParameterError(faults) from None


def _protocol_section(
    protocol: Any, scenario_class: type[Scenario], kind: str
) -> dict[str, type[SubParameters]]:
    """The section of the interaction protocol, if the scenario's agents play one."""
    if not scenario_class.uses_protocol:
        if protocol is not None:
            raise ConfigurationError(
                f"interaction_protocol {protocol!r} has no use: agents of a scenario of kind "
                f"{kind!r} play none. Leave it out, or choose another --scenario."
            )
        return {}
    if not isinstance(protocol, str):
        raise ConfigurationError(
            f"a scenario of kind {kind!r} needs an interaction_protocol, got {protocol!r}. Choose "
            f"one of: {', '.join(PROTOCOL_HANDLERS.names())}."
        )
    return {protocol: PROTOCOL_HANDLERS.get(protocol).Parameters}


def _about_protocol(layer: Layer, protocol: Any, kind: str) -> Layer:
    """A scenario's or preset's layer without sections and agents of other protocols."""
    layer = layer.without(set(PROTOCOL_HANDLERS.names()) - {protocol})
    section = layer.values.get(kind)
    if not isinstance(section, Mapping) or not isinstance(section.get("agents"), Mapping):
        return layer
    if not (own := _agents_of(protocol)):
        return layer
    # A name that belongs to no protocol stays, to be reported as a fault.
    of_others = set().union(*map(_agents_of, PROTOCOL_HANDLERS.names())) - own
    agents = {name: value for name, value in section["agents"].items() if name not in of_others}
    return replace(layer, values={**layer.values, kind: {**section, "agents": agents}})


def _agents_of(protocol: str) -> set[str]:
    """The agents of a protocol's class; none if they depend on its parameters."""
    try:
        names = getattr(PROTOCOL_HANDLERS.get(protocol), "agent_names", None)
    except NipAstraError:
        return set()  # A package that cannot be imported is reported when its protocol is used.
    return set(names) if isinstance(names, tuple) else set()


# ---- paths


def _with_absolute_paths(
    hyper_params: HyperParameters, components: _Components, folder: Path | None
) -> HyperParameters:
    """The parameters with absolute paths, so that they mean the same in any folder."""
    changes: dict[str, Any] = {}
    if components.plugins:
        changes["plugins"] = list(dict.fromkeys(components.plugins))
    if hyper_params.custom_trainer_module_path is not None:
        [changes["custom_trainer_module_path"]] = _load(
            [hyper_params.custom_trainer_module_path], folder
        )
    if hyper_params.scenario not in scenario_names():
        changes["scenario"] = str(components.scenario_dir)
    if hyper_params.base_run.run is not None:
        changes["base_run"] = with_absolute_path(hyper_params.base_run)
    section = getattr(hyper_params, components.kind)
    agents = getattr(section, "agents", None)
    if isinstance(agents, Mapping):
        moved = {
            name: agent.model_copy(update={"load_from_run": str(Path(run).resolve())})
            for name, agent in agents.items()
            if (run := getattr(agent, "load_from_run", None)) is not None and Path(run).is_dir()
        }
        if moved:
            changes[components.kind] = section.model_copy(update={"agents": {**agents, **moved}})
    return hyper_params.model_copy(update=changes)


def _outside(stack: _Stack, resolved: ResolvedParameters) -> dict[str, str]:
    """Values of the stored runs that point outside of their folders, by dotted path.

    Left out are values that a shipped scenario has as well, and files inside it.
    """
    # A file of another name is the user's, for instance the output of `show --yaml`.
    stored = [one for one in stack.file if one.stored_in and one.stored_in.name == HYPER_PARAMETERS]
    stored += [stack.base] if stack.base_run.values else []
    sources = {one.source for one in stored}
    is_shipped = resolved.hyper_params.scenario in scenario_names()
    shipped = dict(flatten(_merged(*stack.scenario))) if is_shipped else {}
    outside = {}
    for path, value in texts_outside(resolved.hyper_params):
        at = path
        while at not in resolved.sources and "." in at:
            at = at.rpartition(".")[0]  # An element of a list has the list's source.
        is_theirs = resolved.sources.get(at) in sources and value != shipped.get(path)
        is_content = path == "scenario" or is_inside_content(value)
        if is_theirs and not (is_shipped and is_content):
            outside[path] = value
    chosen = resolved.settings.outside()
    theirs = _merged(*stored).get(SETTINGS_SECTION, {})
    return outside | {f"{SETTINGS_SECTION}.{one}": chosen[one] for one in theirs if one in chosen}
