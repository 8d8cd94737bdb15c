"""What the commands `show` and `schema` do; imported when they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.content import scenario_names
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.parameters.schema import schema_of_files
from nip_astra.plugins import load_plugin
from nip_astra.protocols.registry import PROTOCOL_HANDLERS, build_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resolving.unread_parameters import never_read
from nip_astra.safe_text import safe_text, to_json
from nip_astra.scenario_base.text.game import TextEpisode, TextGame, Turn
from nip_astra.scenarios.pure_text_base import PureTextScenario, row_of
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.tracking.run_directory import to_yaml
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trust import on_behalf_of


def show(
    experiment: dict[str, Any], *, as_yaml: bool, is_explained: bool, are_all_shown: bool
) -> None:
    """Print the resolved parameters.

    Parameters
    ----------
    is_explained : bool
        Whether what each means is printed beside it.
    are_all_shown : bool
        Whether those are printed as well that nothing in the experiment reads.
    """
    resolved = resolve_experiment(**experiment)
    hyper_params = resolved.hyper_params
    values = hyper_params.to_dict()
    if as_yaml:
        say(to_yaml(values).rstrip("\n"))
        return
    scenario_class = SCENARIOS.get(resolved.kind)
    paths = dict(flatten(values))
    hidden = (
        []
        if are_all_shown
        else never_read(paths, hyper_params, resolved.trainer_class, scenario_class, resolved.kind)
    )
    meanings = dict(meanings_of(hyper_params)) if is_explained else {}
    columns = ("parameter", "value", "from", *(["what it is"] if is_explained else []))
    table = plain_table(None, *columns)
    for path, value in paths.items():
        if path not in hidden:
            cells = [path, _short(value), resolved.sources.get(path, "")]
            cells += [meanings.get(path, "")] if is_explained else []
            table.add_row(*map(Text, cells))
    console = open_console()
    console.print(table)
    if hidden:
        text = "not shown, since this experiment does not read them (--all shows them): "
        text += ", ".join(_whole_groups(hidden, [path for path in paths if path not in hidden]))
        console.print("", Text(text), sep="\n")


def _whole_groups(hidden: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Hidden parameters by their groups; those of groups that are shown in part by themselves."""
    in_part = {path.rpartition(".")[0] for path in shown}
    groups = {path: path.rpartition(".")[0] or path for path in hidden}
    return list(dict.fromkeys(path if at in in_part else at for path, at in groups.items()))


def meanings_of(group: SubParameters, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What each parameter of a group means, and where it is read, by its dotted path."""
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


def schema(experiment: dict[str, Any]) -> None:
    """Print the JSON Schema of all parameter files, or of those of a trainer and scenario."""
    is_open = experiment["trainer"] is None and experiment["scenario"] is None
    if is_open:
        for spec in experiment["plugins"]:
            load_plugin(spec)
        model = HyperParameters.with_sections(_every_section())
    else:
        model = type(resolve_experiment(**experiment).hyper_params)
    known = {
        "trainer": TRAINERS.names(),
        "scenario": scenario_names(),
        "interaction_protocol": PROTOCOL_HANDLERS.names(),
    }
    printed = schema_of_files(model, known, is_open=is_open)
    say(to_json(printed, indent=1))


def _every_section() -> dict[str, type[SubParameters]]:
    """The sections of every trainer, kind of scenario and protocol that has a name."""
    sections: dict[str, type[SubParameters]] = {}
    for registry in (PROTOCOL_HANDLERS, SCENARIOS, TRAINERS):
        sections |= {name: registry.get(name).Parameters for name in registry.names()}
    return sections


def show_prompts(experiment: dict[str, Any]) -> None:
    """Print each agent's template, and what the agent reads in its first turn.

    Raises
    ------
    ConfigurationError
        When the agents of the scenario do not speak in words.
    """
    resolved = resolve_experiment(**experiment)
    scenario = SCENARIOS.get(resolved.kind)
    if not issubclass(scenario, PureTextScenario):
        raise ConfigurationError(
            f"prompts were to be shown, but the scenario is of the kind {resolved.kind!r}, whose "
            "agents do not play a protocol in words. Leave --prompts out, or give a scenario of "
            "chat models, for instance --scenario secret_word."
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
    start = game.start(0, row_of(datasets.train, 0), 0)
    for agent in protocol.agent_names:
        template = game.prompts[agent]
        say(safe_text(f"=== {agent}: {template.path}\n"))
        say(safe_text(template.path.read_text(encoding="utf-8")))
        found = first_turn(game, start, agent)
        if found is None:
            say(f"--- {agent} has no turn in an episode of this seed\n")
            continue
        episode, turn = found
        say(f"--- what {agent} reads in its first turn, in round {episode.round}")
        for message in game.messages(episode, turn):
            say(safe_text(f"[{message['role']}] {message['content']}"))
        say("")


def first_turn(game: TextGame, start: TextEpisode, agent: str) -> tuple[TextEpisode, Turn] | None:
    """The first turn of an agent, where nobody has said anything before; None where it has none."""
    for number in range(game.protocol.max_message_rounds):
        episode = replace(start, round=number, said=((),) * number, answers=({},) * number)
        for turn in game.turns(episode):
            if turn.agent == agent:
                return episode, turn
    return None
