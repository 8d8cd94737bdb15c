"""What `show --prompts` does; imported when it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nip_astra.cli.terminal import say
from nip_astra.errors import ConfigurationError
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.safe_text import safe_text
from nip_astra.scenario_base.text.game import TextEpisode, TextGame, Turn
from nip_astra.scenarios.pure_text_base import PureTextScenario, row_of
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trust import on_behalf_of


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
