"""Views of an experiment before it runs: parameters with origin and meaning, prompts, and costs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from nip_astra.built_ins import KINDS
from nip_astra.errors import ConfigurationError, NipAstraError, UnknownNameError, plural
from nip_astra.evaluation.run_results import frame_of
from nip_astra.evaluation.tables import Printable, plain_table
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.content import content_root, find_scenario, scenario_names
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters, schema_of_files
from nip_astra.parameters.parameters_base import TRL_OPTIONS, PolymorphicParameters, SubParameters
from nip_astra.plugins import load_plugin
from nip_astra.progress import showing
from nip_astra.registry import ALL_REGISTRIES, Registry, find_registry
from nip_astra.safe_text import to_json
from nip_astra.tracking.run_directory import to_yaml
from nip_astra.trust import on_behalf_of

if TYPE_CHECKING:
    import pandas as pd

    from nip_astra.resolving.resolution import ResolvedExperiment
    from nip_astra.scenario_base.text.game import TextEpisode, TextGame, TurnOptions

SCHEMA_FILE = "parameters/schema.json"
"""Path, in the package's content, of the schema of every shipped trainer and scenario."""


class Parameter(NamedTuple):
    """One parameter of an experiment.

    Attributes
    ----------
    source : str
        Where the value comes from.
    meaning : str
        Its documentation.
    is_read : bool
        Whether anything in the experiment reads it.
    """

    path: str
    value: Any
    source: str
    meaning: str
    is_read: bool


@dataclass(frozen=True)
class ExperimentView(Printable):
    """The resolved parameters of an experiment.

    Attributes
    ----------
    experiment : ResolvedExperiment
        To prepare or run it.
    parameters : list of Parameter
        All of them, in the order of a parameter file.
    """

    experiment: ResolvedExperiment
    parameters: list[Parameter]

    def to_yaml(self) -> str:
        """Return a complete parameter file."""
        return to_yaml(self.experiment.hyper_params.to_dict()).rstrip("\n")

    def to_frame(self) -> pd.DataFrame:
        """Return one row per parameter."""
        return frame_of(self.parameters, Parameter._fields)

    def described(self) -> list[Described]:
        """Return the parameters for `find_described`."""
        return [Described(one.path, _short(one.value), one.meaning) for one in self.parameters]

    def tables(self, *, explain: bool = False, show_all: bool = False) -> list[Any]:
        """Return tables for a terminal.

        Parameters
        ----------
        explain : bool
            Add the meaning of each.
        show_all : bool
            Include those that nothing in the experiment reads.
        """
        shown = [one for one in self.parameters if show_all or one.is_read]
        extra = ["description"] if explain else []
        table = plain_table(None, "parameter", "value", "from", *extra)
        for one in shown:
            cells = [one.path, _short(one.value), one.source, *([one.meaning] if explain else [])]
            table.add_row(*map(Text, cells))
        hidden = [one.path for one in self.parameters if not (show_all or one.is_read)]
        if not hidden:
            return [table]
        text = "not shown, since this experiment does not read them (--all shows them): "
        return [table, "", Text(text + ", ".join(_whole_groups(hidden, [s.path for s in shown])))]


def show(**experiment: Any) -> ExperimentView:
    """Return the parameters of an experiment, with their origin and meaning.

    Parameters
    ----------
    **experiment
        As for `resolve_experiment`: `trainer`, `scenario`, `parameter_file`, `overrides`, ...
    """
    from nip_astra.resolving.resolution import never_read, resolve_experiment

    resolved = resolve_experiment(**experiment)
    unread, meanings = never_read(resolved), dict(meanings_of(resolved.hyper_params))
    parameters = [
        Parameter(path, value, resolved.sources[path], meanings.get(path, ""), path not in unread)
        for path, value in flatten(resolved.hyper_params.to_dict())
    ]
    return ExperimentView(resolved, parameters)


@dataclass(frozen=True)
class DryRun(Printable):
    """Estimated time, memory and cost of a run.

    Attributes
    ----------
    estimate : dict
        Iterations, memory, hours, requests and costs, by name.
    device_price : float or None
        Price of one device and hour.
    """

    estimate: dict[str, Any]
    device_price: float | None = None

    def to_frame(self) -> pd.DataFrame:
        """Return one row per figure."""
        return frame_of([*self.estimate.items()], ("figure", "value"))

    def __str__(self) -> str:
        from io import StringIO

        from nip_astra.evaluation.tables import SafeConsole
        from nip_astra.report.terminal import print_dry_run

        stream = StringIO()
        console = SafeConsole(file=stream, width=120)
        print_dry_run(self.estimate, console, device_price=self.device_price)
        return stream.getvalue()


def dry_run(experiment: Any = None, settings: Any = None, **fields: Any) -> DryRun:
    """Build an experiment, run its smallest step, and estimate the whole run; write nothing.

    Parameters are those of `prepare_experiment`.
    """
    from nip_astra.run import prepare_experiment

    trainer = prepare_experiment(experiment, settings, **fields).trainer
    with showing("Smallest step", enabled=trainer.settings.progress):
        return DryRun(trainer.dry_run(), trainer.settings.device_price)


class Described(NamedTuple):
    """A parameter, setting, command or command-line option, and its description."""

    name: str
    value: str
    meaning: str

    def relevance(self, words: Sequence[str]) -> float:
        """Return how well it matches lower-case words; 0 unless it has all of them."""
        of_name, of_last = _words_of(self.name), _words_of(re.split("[. ]", self.name)[-1])
        meaning = self.meaning.lower()
        total = 0.0
        for word in words:
            stem = word.removesuffix("s")
            places = (
                (5, word in of_last),
                (4, any(stem in one for one in of_last)),
                (2, any(stem in one for one in of_name)),
                (1, any(one.startswith(stem) for one in _words_of(meaning))),
            )
            points = next((points for points, is_there in places if is_there), 0)
            if not points:
                return 0.0
            total += points
        phrase = " ".join(words)
        total += 2 * (phrase in meaning) + meaning.startswith(phrase) + 2 * (of_last == list(words))
        is_general = self.name.startswith(("training.", "--settings"))
        return total + 3 * is_general - len(of_name) / 2


def _words_of(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def find_described(text: str, described: Iterable[Described]) -> list[Described]:
    """Return those with all words of a text, the most relevant first."""
    words = _words_of(text)
    ours = TRL_OPTIONS.get("_".join(words))
    ranked = {
        one: math.inf if one.name == ours else one.relevance(words) for one in described if words
    }
    return sorted((one for one in ranked if ranked[one] > 0), key=lambda one: -ranked[one])


def every_parameter() -> list[Described]:
    """Return the parameters and settings of every trainer and scenario, from the shipped schema."""
    found: dict[str, Described] = {}
    described = json.loads((content_root() / SCHEMA_FILE).read_text(encoding="utf-8"))
    definitions = described["definitions"]

    def walk(group: Mapping[str, Any], prefix: str, above: tuple[str, ...]) -> None:
        reference = group.get("$ref", "").rpartition("/")[2]
        if reference in above:
            return
        if reference:
            group, above = definitions[reference], (*above, reference)
        for one in (*group.get("anyOf", ()), *([group["items"]] if "items" in group else ())):
            walk(one, prefix, above)
        for name, one in group.get("properties", {}).items():
            value = _short(one["default"]) if "default" in one else ""
            meaning = one.get("description", "")
            is_setting = prefix.startswith("settings.")
            shown = f"--settings {name}" if is_setting else f"{prefix}{name}"
            found.setdefault(shown, Described(shown, value, meaning))
            walk(one, f"{prefix}{name}.", above)

    walk(described, "", ("Reference",))
    return list(found.values())


def every_setting() -> list[Described]:
    """Return the settings of a run, which do not change its results."""
    start = "--settings "
    found = [one for one in every_parameter() if one.name.startswith(start)]
    return [one._replace(name=one.name.removeprefix(start)) for one in found]


def described_table(described: Iterable[Described]) -> Table:
    """Return names, values and descriptions as a table for a terminal."""
    table = plain_table(None, "name", "value", "description")
    for one in described:
        table.add_row(*map(Text, one))
    return table


def _whole_groups(hidden: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Group hidden parameters; those of partly shown groups stay single."""
    in_part = {path.rpartition(".")[0] for path in shown}
    groups = {path: path.rpartition(".")[0] or path for path in hidden}
    return list(dict.fromkeys(path if at in in_part else at for path, at in groups.items()))


def meanings_of(group: SubParameters, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path, meaning and condition of each parameter of a group."""
    for name, field in type(group).model_fields.items():
        path, value = f"{prefix}{name}", getattr(group, name)
        conditions = [one for one in field.metadata if isinstance(one, ReadWhere)]
        where = "".join(f" Read where {one.path} {one.words}." for one in conditions)
        yield path, " ".join((field.description or "").split()) + where
        parts = {path: value}
        if isinstance(value, Mapping):
            parts = {f"{path}.{key}": one for key, one in value.items()}
        for part, one in parts.items():
            if isinstance(one, SubParameters):
                yield from meanings_of(one, f"{part}.")
    if isinstance(group, PolymorphicParameters):
        yield f"{prefix}_type", _first_line(type(group).__doc__)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _short(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def schema(**experiment: Any) -> dict[str, Any]:
    """Return the JSON Schema of all parameter files, or of those of a trainer and scenario."""
    from nip_astra.protocols.registry import PROTOCOL_HANDLERS
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.trainers.registry import TRAINERS

    is_open = experiment.get("trainer") is None and experiment.get("scenario") is None
    if is_open:
        for spec in experiment.get("plugins", ()):
            load_plugin(spec)
        model = HyperParameters.with_sections(every_section())
    else:
        model = type(resolve_experiment(**experiment).hyper_params)
    known = {
        "trainer": TRAINERS.names(),
        "scenario": scenario_names(),
        "interaction_protocol": PROTOCOL_HANDLERS.names(),
    }
    return schema_of_files(model, known, is_open=is_open)


def every_section() -> dict[str, type[SubParameters]]:
    """Return the sections of every registered trainer, scenario kind and protocol."""
    from nip_astra.protocols.registry import PROTOCOL_HANDLERS
    from nip_astra.scenarios.registry import SCENARIOS
    from nip_astra.trainers.registry import TRAINERS

    sections: dict[str, type[SubParameters]] = {}
    for registry in (PROTOCOL_HANDLERS, SCENARIOS, TRAINERS):
        sections |= {name: registry.get(name).Parameters for name in registry.names()}
    return sections


def prompts_of(**experiment: Any) -> str:
    """Return each agent's template, and the messages of its first turn.

    Raises
    ------
    ConfigurationError
        When the agents of the scenario are not chat models.
    """
    from nip_astra.protocols.registry import build_protocol_handler
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.scenario_base.text.game import read_row
    from nip_astra.scenarios.pure_text_base import PureTextScenario
    from nip_astra.scenarios.registry import SCENARIOS

    resolved = resolve_experiment(**experiment)
    scenario = SCENARIOS.get(resolved.kind)
    if not issubclass(scenario, PureTextScenario):
        raise ConfigurationError(
            f"the agents of scenario kind {resolved.kind!r} have no prompts. Leave out --prompts, "
            "or give a scenario of chat models, for instance --scenario secret_word."
        )
    hyper_params = resolved.hyper_params
    section = getattr(hyper_params, resolved.kind)
    if resolved.source is not None:
        resolved.source.check_outside()
    with on_behalf_of(resolved.source):
        protocol = build_protocol_handler(hyper_params)
        game = scenario.build_game(hyper_params, section, protocol, resolved.scenario_dir)
        datasets = scenario.build_datasets(
            section, seed=hyper_params.seed, scenario_dir=resolved.scenario_dir
        )
    start = game.start(0, read_row(datasets.train, 0), 0)
    lines = []
    for agent in protocol.agent_names:
        template = game.prompts[agent]
        lines += [f"=== {agent}: {template.path}", ""]
        lines.append(template.path.read_text(encoding="utf-8"))
        found = first_turn(game, start, agent)
        if found is None:
            lines += [f"--- {agent} has no turn in an episode of this seed", ""]
            continue
        episode, turn = found
        lines += [f"--- what {agent} reads in its first turn, in round {episode.round}", ""]
        lines += [f"[{one['role']}] {one['content']}" for one in game.messages(episode, turn)]
        lines.append("")
    return "\n".join(lines)


def first_turn(
    game: TextGame, start: TextEpisode, agent: str
) -> tuple[TextEpisode, TurnOptions] | None:
    """Return the first turn of an agent, without earlier messages; None if it has none."""
    for number in range(game.protocol.max_message_rounds):
        episode = replace(start, round=number, messages=((),) * number, answers=({},) * number)
        for turn in game.turns(episode):
            if turn.agent == agent:
                return episode, turn
    return None


@dataclass(frozen=True)
class Entry:
    """A registered name with its origin and description."""

    kind: str
    name: str
    origin: str
    purpose: str


def registered(kind: str | None = None, plugins: Sequence[str] = ()) -> list[Entry]:
    """Return the names of one kind, or of every kind, including scenarios.

    What ships is read from the table of built-ins, so that nothing heavy is imported.

    Raises
    ------
    UnknownNameError
        When there is no such kind.
    """
    for spec in plugins:
        load_plugin(spec)
    # Plug-ins may add registries.
    kinds = sorted({*KINDS, *ALL_REGISTRIES})
    if kind is not None:
        kind_by_word = {plural(name): name for name in kinds} | {name: name for name in kinds}
        word = kind.replace("-", "_")
        if word not in kind_by_word:
            plurals = [plural(name) for name in kinds]
            raise UnknownNameError("kind", kind, plurals, "Without one, all are listed.")
        kinds = [kind_by_word[word]]
    entries: list[Entry] = []
    for name in kinds:
        entries += _entries_of_kind(name)
        if name == "scenario":
            entries += [
                Entry("scenarios", scenario, "", _first_paragraph(scenario))
                for scenario in scenario_names()
            ]
    return entries


def _entries_of_kind(kind: str) -> list[Entry]:
    title = "scenario kinds" if kind == "scenario" else plural(kind.replace("_", " "))
    has_entry_points = bool(metadata.entry_points(group=f"nip_astra.{plural(kind)}"))
    if kind not in ALL_REGISTRIES and not has_entry_points:
        # Only what ships: the registry's module, which may import torch, is not needed.
        built_ins = sorted(KINDS[kind].built_ins().items())
        return [Entry(title, name, "built-in", built_in.summary) for name, built_in in built_ins]
    registry = find_registry(kind)
    return [
        Entry(title, name, registry.origin(name), _summarise(registry, name))
        for name in registry.names()
    ]


def _summarise(registry: Registry[Any], name: str) -> str:
    """Return a component's summary, or why it cannot be read; one fault hides no others."""
    try:
        return registry.summary(name)
    except NipAstraError as error:
        return f"cannot be used: {error}"


def _first_paragraph(scenario: str) -> str:
    readme = find_scenario(scenario) / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith("#")]
    return " ".join(blocks[0].split()) if blocks else ""
