"""Resolve names, files and options to a validated experiment.

Values of later layers win: class defaults, the scenario, the trainer's preset, the base run, the
parameter file, options. Values that nothing in the run reads are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from nip_astra.errors import (
    ConfigurationError,
    NipAstraError,
    ParameterError,
    ParameterFault,
    PluginError,
    UnknownNameError,
    UnreadParameterError,
    show_value,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.content import (
    DEFAULT_SCENARIO,
    content_root,
    find_scenario,
    is_inside_content,
    preset_path,
    scenario_names,
    with_absolute_paths,
)
from nip_astra.parameters.conversion import convert, with_new_names
from nip_astra.parameters.files import (
    DEFAULT_SOURCE,
    SETTINGS_SECTION,
    VERSION_KEY,
    Layer,
    default_lists,
    flatten,
    merge_layers,
    parse_overrides,
    read_yaml_layers,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import (
    TYPE_KEY,
    PolymorphicParameters,
    SubParameters,
    texts_outside,
)
from nip_astra.parameters.trainers import BaseRunParameters
from nip_astra.plugins import load_plugin, loaded_plugins, module_of
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.scenarios.registry import SCENARIOS, Scenario
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trust import StoredSource, active_source, is_own, on_behalf_of

VERIFIERS = "verifiers"
"""Scenario with the tasksets of the verifiers library; `verifiers:NAME` selects one."""
PARAMETERS, RERUN_TESTS = "parameters", "rerun_tests"
_OF_THE_NEW_RUN = ("base_run", VERSION_KEY, "plugins")
"""Values that a run never takes from its base run."""
_CUSTOM_TRAINER = ("custom_trainer_module_path", "custom_trainer_class_name")
_OPEN = "???"
SHARED_GROUPS = tuple(
    name
    for name, info in HyperParameters.model_fields.items()
    if isinstance(info.annotation, type)
    and issubclass(info.annotation, SubParameters)
    and name != "base_run"  # which every run reads
)
"""Groups of the hyper-parameters that belong to no single component."""


@dataclass(frozen=True)
class ResolvedExperiment:
    """A validated experiment that is not built yet.

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
    overrides: Iterable[str] | Mapping[str, Any] = (),
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
    overrides : Iterable[str] or Mapping
        Assignments `a.b=c`, or values by path.
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
    arguments = {"trainer": trainer, "scenario": scenario, "seed": seed}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    assigned = parse_overrides(overrides)
    assigned = replace(assigned, values=with_absolute_paths(assigned.values))
    top += [Layer.literal("command line", arguments), assigned]
    resolution = _Resolution(parameter_file, top)
    plugins_given = _load(plugins, None)
    source = resolution.stored_source(plugins_given, is_trusted=is_trusted)
    if source is not None:
        resolution.load_code_of_the_user()
    with on_behalf_of(source):
        resolution.find_components(plugins)
        values = resolution.validate(is_plugin_given=bool(plugins))
        located = resolution.with_absolute_paths(values.hyper_params)
    if source is not None:
        source = replace(source, outside=resolution.outside(values))
    return ResolvedExperiment(
        located,
        values.sources,
        resolution.trainer_class,
        resolution.kind,
        resolution.scenario_dir,
        values.settings,
        source,
    )


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
    """Split a layer's scenario `verifiers:TASKSET` into scenario and taskset."""
    scenario, sign, taskset = str(layer.values.get("scenario") or "").partition(":")
    if scenario != VERIFIERS or not sign:
        return layer
    below = replace(layer, values={"task": {"task": {"taskset": taskset}}})
    above = replace(layer, values={**layer.values, "scenario": VERIFIERS})
    return replace(layer, values=_merged(below, above))


def _load(specs: Sequence[str], folder: Path | None) -> list[str]:
    """Import plug-ins; return the paths or modules that identify them."""
    return [load_plugin(spec, relative_to=folder).spec for spec in specs]


def _plugins_in(values: Mapping[str, Any]) -> list[str]:
    """Return the plug-ins of a file; a malformed list is reported later with other faults."""
    specs = values.get("plugins")
    is_valid = isinstance(specs, list) and all(isinstance(spec, str) for spec in specs)
    return list(specs) if is_valid and specs else []


def _load_named_code(values: Mapping[str, Any], folder: Path | None) -> list[str]:
    """Import the plug-ins named by values, and that of their scenario."""
    loaded = _load(_plugins_in(values), folder)
    if values.get("scenario") is not None:
        # It may register the trainer.
        _load_plugin_of(find_scenario(str(values["scenario"])))
    return loaded


def _load_plugin_of(scenario_dir: Path) -> None:
    plugin = scenario_dir / "plugin.py"
    if plugin.is_file():
        load_plugin(plugin)


class _Resolution:
    """Layers of parameters by origin, and the components that they name."""

    trainer: str
    trainer_class: type[Trainer]
    scenario_name: str
    scenario_dir: Path
    scenario_class: type[Scenario]
    kind: str
    protocol: Any
    plugins: list[str]

    def __init__(self, parameter_file: str | Path | None, top: list[Layer]) -> None:
        path = None if parameter_file is None else Path(parameter_file)
        file = [] if path is None else read_yaml_layers(path, source=str(path))
        self.folder = None if path is None else path.resolve().parent
        self.file, self.top = ([_with_taskset(layer) for layer in layers] for layers in (file, top))
        self.base_run = _read_base_run([*self.file, *self.top])
        self.base = self.base_run.layer(_merged(*self.file, *self.top))
        self.scenario: list[Layer] = []
        self.preset: list[Layer] = []

    def merged(self) -> dict[str, Any]:
        """Return the merged values of all layers."""
        return _merged(*self.scenario, *self.preset, self.base, *self.file, *self.top)

    def stored_source(self, given: Sequence[str], *, is_trusted: bool) -> StoredSource | None:
        """Return the stored run that parameters come from; several must all be the user's own."""
        runs: dict[Path | None, str] = {
            layer.stored_in: str(layer.stored_in)
            for layer in self.file
            if layer.stored_in is not None
        }
        if self.base_run.values:
            runs[self.base_run.file] = self.base_run.source
        if not runs:
            return None
        foreign = [run for file, run in runs.items() if file is None or not is_own(file)]
        for file in runs:
            if file is not None and file.name == HYPER_PARAMETERS:
                RunDirectory(file.parent).check_links()
        run_name = foreign[0] if foreign else next(iter(runs.values()))
        plugins_named = [*_plugins_in(self.merged()), *self.base_run.plugins]
        # A plug-in that the run itself names is not a copy of another one with its file name.
        copies = tuple(spec for spec in given if spec not in plugins_named)
        return StoredSource(run_name, is_trusted or not foreign, copies)

    def load_code_of_the_user(self) -> None:
        """Load the user's own code first: only code named by a stored run needs approval."""
        values = _merged(*(layer for layer in (*self.file, *self.top) if layer.stored_in is None))
        _load_named_code(values, self.folder)
        if values.get("custom_trainer_module_path") is not None:
            _load([str(values["custom_trainer_module_path"])], self.folder)

    def find_components(self, plugins: Sequence[str]) -> None:
        """Load plug-ins, find the named classes, and add the preset's and scenario's layers."""
        self.plugins = _load([*plugins, *self.base_run.plugins], None)
        values = self.merged()
        self.plugins += _load_named_code(values, self.folder)
        self.trainer, self.trainer_class = _find_trainer(values, self.folder)
        preset = None if self.file else preset_path(self.trainer, values.get("scenario"))
        if preset is not None:
            self.preset = read_yaml_layers(preset, source=f"preset {preset.stem}")
            if "plugins" not in values:
                self.plugins += _load(_plugins_in(self.merged()), preset.parent)
        self.scenario_name = str(self.merged().get("scenario") or DEFAULT_SCENARIO)
        self.scenario_dir = find_scenario(self.scenario_name)
        self.scenario, self.kind = _read_scenario(self.scenario_dir)
        if self.kind not in SCENARIOS.names():
            raise UnknownNameError(
                "scenario kind",
                self.kind,
                SCENARIOS.names(),
                f"It is set in {self.scenario_dir / 'scenario.yaml'}; a plugin.py beside that file "
                "can register a kind.",
            )
        self.scenario_class = SCENARIOS.get(self.kind)
        self._check_that_it_trains_on_the_scenario()
        self.base = self.base.without(
            self.base_run.about_another(self.scenario_dir, self.scenario_class, self.kind)
        )
        self.protocol = self.merged().get("interaction_protocol")

    def _check_that_it_trains_on_the_scenario(self) -> None:
        trainer_type = self.trainer_class.trainer_type
        kinds = list(self.trainer_class.scenario_kinds)
        fits = trainer_type in self.scenario_class.trainer_types
        if kinds:
            fits = self.kind in kinds
        elif not fits:  # Otherwise other kinds need not be imported.
            classes = {name: SCENARIOS.get(name) for name in SCENARIOS.names()}
            kinds = [name for name in classes if trainer_type in classes[name].trainer_types]
            # A trainer that names no kinds plays protocols.
            kinds = [name for name in kinds if classes[name].uses_protocol] or kinds
        if fits or not kinds:
            self.scenario_class.check_trainer_type(trainer_type)
            return
        shipped = [
            name for name in scenario_names() if _read_scenario(find_scenario(name))[1] in kinds
        ]
        raise ConfigurationError(
            f"the trainer {self.trainer!r} cannot train on the scenario {self.scenario_name!r} of "
            f"kind {self.kind!r}, only on {', '.join(kinds)}. Choose another --trainer or "
            f"--scenario{': ' if shipped else ''}{', '.join(shipped)}."
        )

    def validate(self, *, is_plugin_given: bool) -> ResolvedParameters:
        """Return the validated parameters; values that nothing reads are refused."""
        model = HyperParameters.with_sections(
            {self.trainer: self.trainer_class.Parameters, self.kind: self.scenario_class.Parameters}
            | {
                name: TRAINERS.get(name).Parameters
                for name in self.trainer_class.sections_of_others
            }
            | self._protocol_section()
        )
        names = {"trainer": self.trainer, "scenario": self.scenario_name}
        layers = [
            Layer.literal(DEFAULT_SOURCE, names),
            *map(self._about_protocol, (*self.scenario, *self.preset)),
            self.base.only(model.model_fields),
            *self.file,
            *self.top,
        ]
        if is_plugin_given:
            layers.append(Layer.literal("--plugin", {"plugins": self.plugins}))
        resolved = validate_layers(layers, model)
        given_layers = [*self.file, *self.top]
        if resolved.hyper_params.base_run.base_run_type == RERUN_TESTS:
            _check_rerun(self.base_run, given_layers, self.trainer_class)
        order = {
            path: number
            for number, layer in enumerate([*self.preset, self.base, *given_layers])
            for path, _ in flatten(layer.values)
        }
        readers = _Readers(
            resolved.hyper_params, self.trainer_class, self.scenario_class, self.kind, order
        )
        checked = [
            replace(layer, values=_without(layer.values, self.base.values)) for layer in self.preset
        ]
        readers.refuse_unread(
            [*checked, *(layer for layer in given_layers if not layer.is_complete)]
        )
        return resolved

    def _protocol_section(self) -> dict[str, type[SubParameters]]:
        """Return the section of the interaction protocol, if the scenario's agents use one."""
        if not self.scenario_class.uses_protocol:
            if self.protocol is not None:
                raise ConfigurationError(
                    f"interaction_protocol {self.protocol!r} has no use: agents of a scenario of "
                    f"kind {self.kind!r} play none. Leave it out, or choose another --scenario."
                )
            return {}
        if not isinstance(self.protocol, str):
            raise ConfigurationError(
                f"a scenario of kind {self.kind!r} needs an interaction_protocol, got "
                f"{self.protocol!r}. Choose one of: {', '.join(PROTOCOL_HANDLERS.names())}."
            )
        return {self.protocol: PROTOCOL_HANDLERS.get(self.protocol).Parameters}

    def _about_protocol(self, layer: Layer) -> Layer:
        """Remove sections and agents of other protocols from a scenario's or preset's layer."""
        layer = layer.without(set(PROTOCOL_HANDLERS.names()) - {self.protocol})
        section = layer.values.get(self.kind)
        if not isinstance(section, Mapping) or not isinstance(section.get("agents"), Mapping):
            return layer
        if not (own_agents := _agents_of(self.protocol)):
            return layer
        # A name that belongs to no protocol stays, to be reported as a fault.
        of_others = set().union(*map(_agents_of, PROTOCOL_HANDLERS.names())) - own_agents
        agents = {name: value for name, value in section["agents"].items() if name not in of_others}
        values = {**layer.values, self.kind: {**section, "agents": agents}}
        return replace(layer, values=values)

    def with_absolute_paths(self, hyper_params: HyperParameters) -> HyperParameters:
        """Return the parameters with absolute paths, valid in any working directory."""
        changes: dict[str, Any] = {}
        if self.plugins:
            changes["plugins"] = list(dict.fromkeys(self.plugins))
        if hyper_params.custom_trainer_module_path is not None:
            [changes["custom_trainer_module_path"]] = _load(
                [hyper_params.custom_trainer_module_path], self.folder
            )
        if hyper_params.scenario not in scenario_names():
            changes["scenario"] = str(self.scenario_dir)
        run = hyper_params.base_run.run
        if run is not None and not run.startswith(wandb_runs.SCHEME):
            path = str(Path(run).expanduser().resolve())
            changes["base_run"] = hyper_params.base_run.model_copy(update={"run": path})
        section = getattr(hyper_params, self.kind)
        agents = getattr(section, "agents", None)
        if isinstance(agents, Mapping):
            moved = {
                name: agent.model_copy(update={"load_from_run": str(Path(run).resolve())})
                for name, agent in agents.items()
                if (run := getattr(agent, "load_from_run", None)) is not None and Path(run).is_dir()
            }
            if moved:
                changes[self.kind] = section.model_copy(update={"agents": {**agents, **moved}})
        return hyper_params.model_copy(update=changes)

    def outside(self, resolved: ResolvedParameters) -> dict[str, str]:
        """Return values of stored runs that point outside of their folders, by dotted path.

        Excluded are values that a shipped scenario also has, and files inside it.
        """
        # A file of another name is the user's, for instance the output of `show --yaml`.
        stored = [
            layer
            for layer in self.file
            if layer.stored_in and layer.stored_in.name == HYPER_PARAMETERS
        ]
        stored += [self.base] if self.base_run.values else []
        sources = {layer.source for layer in stored}
        is_shipped = resolved.hyper_params.scenario in scenario_names()
        shipped = dict(flatten(_merged(*self.scenario))) if is_shipped else {}
        outside = {}
        for path, value in texts_outside(resolved.hyper_params):
            # An element of a list has the list's source.
            source = _nearest(path, resolved.sources, None)
            is_theirs = source in sources and value != shipped.get(path)
            is_content = path == "scenario" or is_inside_content(value)
            if is_theirs and not (is_shipped and is_content):
                outside[path] = value
        settings_outside = resolved.settings.outside()
        theirs = _merged(*stored).get(SETTINGS_SECTION, {})
        settings = {
            f"{SETTINGS_SECTION}.{name}": settings_outside[name]
            for name in theirs
            if name in settings_outside
        }
        return outside | settings


def _find_trainer(values: Mapping[str, Any], folder: Path | None) -> tuple[str, type[Trainer]]:
    """Return the trainer's name and its class, from the registry or from a file."""
    if values.get("trainer") is None:
        raise ConfigurationError(
            f"no trainer is given. Choose one with --trainer: {', '.join(TRAINERS.names())}."
        )
    name = str(values["trainer"])
    path, class_name = (values.get(key) for key in _CUSTOM_TRAINER)
    if path is None and class_name is None:
        try:
            return name, TRAINERS.get(name)
        except UnknownNameError as error:
            files = ", ".join(Path(plugin.spec).name for plugin in loaded_plugins()[-3:])
            if not files:
                raise
            advice = f"The plug-ins {files} register no trainer of this name."
            raise UnknownNameError(error.kind, name, error.known, advice) from error
    if path is None or class_name is None:
        raise ConfigurationError(
            "a custom trainer needs both custom_trainer_module_path and "
            "custom_trainer_class_name. Give both, or neither."
        )
    module = module_of(load_plugin(str(path), relative_to=folder))
    trainer_class = getattr(module, str(class_name), None)
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise PluginError(
            f"{path} has no trainer class {class_name!r}. Set custom_trainer_class_name to a "
            "subclass of nip_astra's Trainer."
        )
    return name, trainer_class


def _read_scenario(scenario_dir: Path) -> tuple[list[Layer], str]:
    """Return the scenario's layers and its kind; load its plugin.py first."""
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


def _agents_of(protocol: str) -> set[str]:
    """Return the agents of a protocol's class; none if they depend on its parameters."""
    try:
        names = getattr(PROTOCOL_HANDLERS.get(protocol), "agent_names", None)
    except NipAstraError:
        return set()  # A package that cannot be imported is reported when its protocol is used.
    return set(names) if isinstance(names, tuple) else set()


# ---- validation


class ResolvedParameters(NamedTuple):
    """Validated parameters, the source of each value by dotted path, and the files' settings."""

    hyper_params: HyperParameters
    sources: dict[str, str]
    settings: ExperimentSettings


def validate_layers(layers: Sequence[Layer], model: type[HyperParameters]) -> ResolvedParameters:
    """Merge the layers and validate the result; raise all faults at once."""
    values, sources = merge_layers([default_lists(_merged(*layers), model), *layers])
    faults = [
        ParameterFault(
            path,
            repr(_OPEN),
            "is left open by its file and must be given",
            f"Give it with --set {path}=VALUE.",
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
    if not isinstance(given, Mapping):
        source = sources.get(SETTINGS_SECTION, "")
        problem = "must be a group of settings"
        raise ParameterError(
            [ParameterFault(SETTINGS_SECTION, show_value(given), problem, "", source)]
        )
    head = f"{SETTINGS_SECTION}."
    own_sources = {path.removeprefix(head): source for path, source in sources.items()}
    try:
        return ExperimentSettings.from_dict(given, sources=own_sources)
    except ParameterError as error:
        faults = [fault._replace(path=head + fault.path) for fault in error.faults]
        raise ParameterError(faults) from None


# ---- values that nothing reads


def never_read(experiment: ResolvedExperiment) -> set[str]:
    """Return the paths of parameters that nothing reads, or whose whole group is unused.

    A single parameter whose condition does not hold is not included: it is shown as unused.
    """
    hyper_params, trainer_class = experiment.hyper_params, experiment.trainer_class
    if trainer_class.parameter_groups is None:
        return set()
    scenario_class = SCENARIOS.get(experiment.kind)
    readers = _Readers(hyper_params, trainer_class, scenario_class, experiment.kind, {})
    unmet = {}
    for name, info in type(hyper_params).model_fields.items():
        conditions = [condition for condition in info.metadata if isinstance(condition, ReadWhere)]
        conditions += [
            condition for path, condition in trainer_class.reads_where.items() if path == name
        ]
        unmet[name] = _first_unmet(conditions, [("", hyper_params)])
    leaves = (
        _Leaf(path, None, False, unmet.get(path.partition(".")[0])) for path in experiment.sources
    )
    return {leaf.path for leaf in leaves if readers.reason_against(leaf)}


class _Condition(NamedTuple):
    """A condition, with the full path and the value of the parameter that it depends on."""

    where: ReadWhere
    path: str
    value: Any


class _Leaf(NamedTuple):
    """A given value, and its first unmet condition."""

    path: str
    value: Any
    is_default: bool
    unmet: _Condition | None


_Scope = tuple[str, SubParameters]
"""A group of parameters, preceded by its path with a trailing dot, empty for the root."""


@dataclass(frozen=True)
class _Readers:
    """The components that read parameters, and the index of the last layer that set each path."""

    hyper_params: HyperParameters
    trainer_class: type[Trainer]
    scenario_class: type[Scenario]
    kind: str
    order: Mapping[str, int]

    def refuse_unread(self, layers: Sequence[Layer]) -> None:
        """Refuse values of these layers that neither trainer nor scenario nor protocol reads.

        These are values in shared groups that none of them uses, and parameters whose condition
        (`nip_astra.parameters.conditions`) does not hold. Defaults are accepted, and so is a value
        whose condition fails because of a later layer, for instance a command-line option.
        """
        if self.trainer_class.parameter_groups is None:
            return
        given, sources = merge_layers(layers, resolve=False)
        faults = [
            ParameterFault(
                leaf.path,
                repr(leaf.value),
                reason[0],
                reason[1] or f"Leave it out. {_trainers_that_read(leaf.path)}",
                next(iter(_below(leaf.path, sources)), _nearest(leaf.path, sources, "")),
            )
            for leaf in _walk(self.hyper_params, given, (), self.trainer_class.reads_where)
            if not leaf.is_default and (reason := self.reason_against(leaf))
        ]
        if faults:
            raise UnreadParameterError(faults)

    def reason_against(self, leaf: _Leaf) -> tuple[str, str] | None:
        """Return the problem with an unread value and the advice, "" to list other trainers."""
        trainer, protocol = self.hyper_params.trainer, self.hyper_params.interaction_protocol
        groups = self.trainer_class.parameter_groups or ()
        of_scenario = self.scenario_class.parameter_groups
        is_shared = leaf.path.partition(".")[0] in SHARED_GROUPS
        if is_shared and not _is_in(leaf.path, (*groups, *of_scenario)):
            problem = (
                f"is read neither by the trainer {trainer!r} ({_groups_read(groups)}) nor by "
                f"scenarios of the kind {self.kind!r} ({_groups_read(of_scenario)})"
            )
            return problem, ""
        if _is_in(leaf.path, self.trainer_class.never_reads):
            return f"is not read by the trainer {trainer!r}", "Leave it out."
        if _is_in(leaf.path, self.scenario_class.never_reads):
            return f"is not read by scenarios of the kind {self.kind!r}", "Leave it out."
        has_protocol = protocol is not None and self.scenario_class.uses_protocol
        if has_protocol and _is_in(leaf.path, PROTOCOL_HANDLERS.get(str(protocol)).never_reads):
            if self._is_later("interaction_protocol", leaf.path):
                return None
            return f"is not read by the protocol {protocol!r}", "Leave it out."
        if leaf.unmet is None or self._is_later(leaf.unmet.path, leaf.path):
            return None
        where, path, value = leaf.unmet
        shown = value if isinstance(value, str) else show_value(value)
        problem = f"is read only where {path} {where.words}, and it is {shown}"
        return problem, f"Leave it out, or change {path}."

    def _is_later(self, path: str, other: str) -> bool:
        # The entries of a mapping may be given one by one.
        own_index = max(_below(other, self.order), default=_nearest(other, self.order, -1))
        return bool(_nearest(path, self.order, -1) > own_index)


def _without(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose paths are not in others."""
    left = {}
    for name, value in values.items():
        other_value = others.get(name)
        if isinstance(value, Mapping) and isinstance(other_value, Mapping):
            left[name] = _without(value, other_value)
        elif name not in others:
            left[name] = value
    return left


def _walk(
    group: SubParameters,
    given: Mapping[str, Any],
    around: tuple[_Scope, ...],
    conditions: Mapping[str, ReadWhere],
    *,
    prefix: str = "",
    unmet: _Condition | None = None,
) -> Iterator[_Leaf]:
    """Yield every given value of a group and of the groups within it.

    Parameters
    ----------
    around : tuple[_Scope, ...]
        Enclosing groups, the outermost first.
    conditions : Mapping[str, ReadWhere]
        The trainer's, by full path.
    unmet : _Condition, optional
        A failed condition of the whole group.
    """
    scopes = (*around, (prefix, group))
    for name, info in type(group).model_fields.items():
        if name not in given:
            continue
        path, value = f"{prefix}{name}", getattr(group, name)
        own_conditions = [
            condition for condition in info.metadata if isinstance(condition, ReadWhere)
        ]
        of_group = type(group).read_where
        own_conditions += [of_group] if of_group is not None and of_group.path != name else []
        failed = unmet or _first_unmet(own_conditions, scopes)
        if path in conditions:
            failed = failed or _first_unmet([conditions[path]], scopes[:1])
        inner = list(_groups_in(value, given[name], path))
        default = info.get_default(call_default_factory=True)
        for where, part, part_given in inner:
            yield from _walk(part, part_given, scopes, conditions, prefix=f"{where}.", unmet=failed)
            if isinstance(part, PolymorphicParameters) and TYPE_KEY in part_given:
                yield _Leaf(f"{where}.{TYPE_KEY}", part.type_name, part == default, failed)
        if not inner:
            yield _Leaf(path, value, default is not PydanticUndefined and value == default, failed)


def _first_unmet(conditions: Sequence[ReadWhere], scopes: Sequence[_Scope]) -> _Condition | None:
    for where in conditions:
        first = where.path.partition(".")[0]
        for prefix, group in reversed(scopes):
            if first in type(group).model_fields:
                value = group.get(where.path)
                if not where.is_met(value):
                    return _Condition(where, prefix + where.path, value)
                break
    return None


def _groups_in(
    value: Any, given: Any, path: str
) -> Iterator[tuple[str, SubParameters, Mapping[str, Any]]]:
    """Yield the groups in a value, each with its path and its given values."""
    if isinstance(value, SubParameters) and isinstance(given, Mapping):
        yield path, value, given
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        # Values of `default` may be read by an agent that overrides the others.
        names = set(given) - ({DEFAULT_AGENT} if len(value) > 1 else set())
        for name in sorted(names & set(value)):
            yield from _groups_in(value[name], given[name], f"{path}.{name}")
    elif isinstance(value, list) and isinstance(given, list | Mapping):
        # A mapping changes single elements.
        elements = given if isinstance(given, Mapping) else dict(enumerate(given))
        for number, one_given in elements.items():
            yield from _groups_in(value[int(number)], one_given, f"{path}.{number}")


def _is_in(path: str, groups: Sequence[str]) -> bool:
    return any(fnmatchcase(path, group) or fnmatchcase(path, f"{group}.*") for group in groups)


def _nearest(path: str, by_path: Mapping[str, Any], default: Any) -> Any:
    """Return the entry of a parameter, or of the nearest group or list around it."""
    while path:
        if path in by_path:
            return by_path[path]
        path = path.rpartition(".")[0]
    return default


def _below(path: str, by_path: Mapping[str, Any]) -> list[Any]:
    """Return the entries of the parameters within a group."""
    return [entry for other, entry in by_path.items() if other.startswith(f"{path}.")]


def _groups_read(groups: Sequence[str]) -> str:
    return f"which reads {', '.join(groups)}" if groups else "which reads no shared group"


def _trainers_that_read(path: str) -> str:
    readers = []
    for name in TRAINERS.names():
        try:
            groups = TRAINERS.get(name).parameter_groups
        except NipAstraError:
            continue  # A package that cannot be imported is reported when its trainer is used.
        if groups is None or _is_in(path, groups):
            readers.append(name)
    return f"Trainers that read it: {', '.join(readers)}." if readers else "No trainer reads it."


# ---- runs on which other runs build


@dataclass(frozen=True)
class _BaseRun:
    """A run on which another one is based; without values there is none.

    Attributes
    ----------
    values : dict
        Its parameters, as the installed version reads them.
    file : Path or None
        Its parameter file; None for a run on W&B.
    """

    run_id: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    @property
    def source(self) -> str:
        """Source of the parameters taken from it."""
        return f"base run {self.run_id}"

    @property
    def plugins(self) -> list[str]:
        """Plug-ins loaded by it."""
        return [str(spec) for spec in self.values.get("plugins") or []]

    def layer(self, given: Mapping[str, Any]) -> Layer:
        """Return its parameters, without its custom trainer if the new run names another."""
        trainer = self.values.get("trainer")
        is_other = given.get("trainer", trainer) != trainer
        left_out = (*_OF_THE_NEW_RUN, *(_CUSTOM_TRAINER if is_other else ()))
        return Layer.literal(self.source, self.values).without(left_out)

    def about_another(
        self, scenario_dir: Path, scenario_class: type[Scenario], kind: str
    ) -> set[str]:
        """Return its values that do not apply to the new run's scenario."""
        is_same = _is_scenario(self.values.get("scenario"), scenario_dir)
        protocol = set() if scenario_class.uses_protocol else {"interaction_protocol"}
        return protocol if is_same else {kind, *protocol}


def _read_base_run(layers: Sequence[Layer]) -> _BaseRun:
    """Read the base run named by the layers; a complete file's own base run is not read again."""
    values, sources = merge_layers(
        [layer for layer in layers if not layer.is_complete], resolve=False
    )
    given = values.get("base_run")
    if not isinstance(given, Mapping):
        return _BaseRun()  # A malformed group is reported later, with all other faults.
    try:
        parameters = BaseRunParameters.from_dict(given)
    except ParameterError as error:
        paths = [f"base_run.{fault.path}".rstrip(".") for fault in error.faults]
        raise ParameterError(
            [
                fault._replace(path=path, source=sources.get(path, ""))
                for path, fault in zip(paths, error.faults, strict=True)
            ]
        ) from None
    if parameters.run is None:
        return _BaseRun()
    if parameters.run.startswith(wandb_runs.SCHEME):
        run_id = wandb_runs.parse_reference(parameters.run).run_id
        stored, file = wandb_runs.read_config(parameters.run), None
    else:
        directory = RunDirectory.open(Path(parameters.run).expanduser())
        run_id, stored = directory.run_id, directory.read_yaml(HYPER_PARAMETERS)
        file = directory.path / HYPER_PARAMETERS
    return _BaseRun(run_id, convert(stored, source=f"the parameters of {parameters.run}"), file)


def _check_rerun(base: _BaseRun, layers: Sequence[Layer], trainer_class: type[Trainer]) -> None:
    """Refuse values of a rerun of tests that differ from the base run's.

    The base run has no values if a complete layer holds them.
    """
    if trainer_class.rerun_tests is Trainer.rerun_tests:
        raise ConfigurationError(
            f"base_run.base_run_type {RERUN_TESTS!r} is not available for {trainer_class.__name__}."
            f" Use `nip-astra evaluate RUN`, or base_run.base_run_type={PARAMETERS} to train again."
        )
    before = dict(
        flatten(base.values or _merged(*(layer for layer in layers if layer.is_complete)))
    )
    given, sources = merge_layers(
        [layer for layer in layers if not layer.is_complete], resolve=False
    )
    faults = [
        ParameterFault(
            path,
            repr(value),
            f"differs from the base run's {before.get(path)!r}, which is tested again unchanged",
            f"Leave it out, or set base_run.base_run_type={PARAMETERS} to train again.",
            sources.get(path, ""),
        )
        for path, value in flatten(given)
        if not _is_in(path, (*_OF_THE_NEW_RUN, "rl.num_test_iterations"))
        and not _is_same(path, value, before.get(path))
    ]
    if faults:
        raise ParameterError(faults)


def fetch_base_run(parameters: BaseRunParameters, folder: Path) -> Path:
    """Return the base run's directory; for a run on W&B, download its trained agents."""
    run = str(parameters.run)
    if not run.startswith(wandb_runs.SCHEME):
        return Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    RunDirectory(folder).write_yaml(HYPER_PARAMETERS, wandb_runs.read_config(run))
    wandb_runs.download_model(run, folder / "model")
    return folder


def _is_same(path: str, value: Any, before: Any) -> bool:
    if path == "scenario" and isinstance(value, str) and isinstance(before, str):
        try:
            return _is_scenario(before, find_scenario(value))
        except UnknownNameError:
            return False
    return bool(value == before)


def _is_scenario(name: Any, folder: Path) -> bool:
    """Return whether a base run's scenario is the one in a folder."""
    try:
        return find_scenario(str(name)) == folder
    except UnknownNameError:
        return False  # It has moved.
