"""A protocol in words: what each agent is asked in its turn, and what a round leads to.

Turns, visibility, ends and rewards are those of the protocol's declaration, which tensor games read
as well; here a message is a text.

Shape suffixes: `E` episode, `A` agent, `C` channel.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, Moves, ProtocolHandler
from nip_astra.scenario_base.text.parsing import (
    DECISION_WORDS,
    ParsedAnswer,
    channel_title,
    parse_answer,
    parse_messages,
)
from nip_astra.scenario_base.text.templates import PromptTemplate
from nip_astra.utils.seeding import derive_seed

GO_ON = "It is your turn."
"""What an agent reads where its prompt and the others say nothing since its own last message."""


class ChannelMessage(NamedTuple):
    """A message of one round.

    Attributes
    ----------
    text : str
        What was sent, without its heading.
    """

    agent: str
    channel: str
    text: str


@dataclass(frozen=True)
class TextEpisode:
    """How far an episode has come.

    Attributes
    ----------
    datapoint_id : int
        Row of the data.
    datapoint : Mapping
        What it holds, as plain values.
    seed : int
        Of the episode; the order of play may depend on it.
    round : int
        Rounds played.
    said : tuple of tuple of ChannelMessage
        Messages by round.
    answers : tuple of dict of str
        Answers as they were given, by round and agent.
    has_decided : tuple of bool
        By agent; what the protocol's step before gave.
    is_done : bool
        Whether the episode has ended.
    """

    datapoint_id: int
    datapoint: Mapping[str, Any]
    seed: int
    has_decided: tuple[bool, ...]
    round: int = 0
    said: tuple[tuple[ChannelMessage, ...], ...] = ()
    answers: tuple[Mapping[str, str], ...] = ()
    is_done: bool = False


class TurnOptions(NamedTuple):
    """What an agent may do in a round.

    Attributes
    ----------
    channels : tuple of str
        Where it may send.
    may_decide : bool
        Whether its decision counts.
    is_last : bool
        Whether it has no further turn.
    """

    agent: str
    channels: tuple[str, ...]
    may_decide: bool
    is_last: bool


class RoundOutcome(NamedTuple):
    """What a round came to.

    Attributes
    ----------
    episode : TextEpisode
        After the round.
    rewards : tuple of float
        By agent.
    decision : int
        That counted; 2 where none did.
    is_out_of_rounds : bool
        Whether the episode ended without a decision.
    """

    episode: TextEpisode
    rewards: tuple[float, ...]
    decision: int
    is_out_of_rounds: bool


class TextGame:
    """The rules of one protocol in words.

    Parameters
    ----------
    protocol : ProtocolHandler
        Its declaration.
    prompts : Mapping of PromptTemplate
        By agent.
    human_names : Mapping of str
        What agents are called, by agent.
    max_words : Mapping of int
        Words that an answer should stay within, by agent.
    has_random_stance : bool
        Whether a lone prover argues for a side that its datapoint decides by chance, and is
        rewarded for that decision.

    Raises
    ------
    ConfigurationError
        When the protocol cannot be played in words.
    """

    def __init__(
        self,
        protocol: ProtocolHandler,
        prompts: Mapping[str, PromptTemplate],
        *,
        human_names: Mapping[str, str],
        max_words: Mapping[str, int],
        has_random_stance: bool = False,
    ) -> None:
        if protocol.needs_logits:
            raise ConfigurationError(
                f"the protocol {type(protocol).__name__} was to be played in words, but its "
                "rewards rest on the probabilities of messages, which words have not. Set "
                "protocol_common.zero_knowledge=false, or choose another protocol."
            )
        if has_random_stance and (len(protocol.prover_names) != 1 or protocol.common.shared_reward):
            raise ConfigurationError(
                "randomize_prover_stance was asked for, but that is for protocols with one prover "
                f"that has a reward of its own, and here the provers are "
                f"{', '.join(protocol.prover_names) or 'none'}, with protocol_common.shared_reward="
                f"{str(protocol.common.shared_reward).lower()}. Set randomize_prover_stance=false."
            )
        self.protocol = protocol
        self.prompts = prompts
        self.human_names = human_names
        self.max_words = max_words
        self.has_random_stance = has_random_stance

    # ---- rules

    def start(self, datapoint_id: int, datapoint: Mapping[str, Any], seed: int) -> TextEpisode:
        """An episode about a datapoint, before its first round."""
        nobody = (False,) * self.protocol.num_agents
        return TextEpisode(datapoint_id, datapoint, seed, nobody)

    def role(self, agent: str) -> str:
        """What an agent is: "prover" or "verifier"."""
        return "verifier" if agent in self.protocol.verifier_names else "prover"

    def stance(self, agent: str, datapoint: Mapping[str, Any]) -> int:
        """The decision that a prover argues for; that a verifier should make, for a verifier."""
        if agent in self.protocol.verifier_names:
            return int(datapoint["y"])
        if self.has_random_stance:
            return random_stance(datapoint)
        return self.protocol.favoured_decisions.get(agent, ACCEPT)

    def turns(self, episode: TextEpisode) -> list[TurnOptions]:
        """Who may do what in the next round, in the protocol's order; nobody at the end.

        Nobody is asked for a decision that the parameters force.
        """
        if episode.is_done:
            return []
        active_AC, may_decide_A = self._allowed(episode, episode.round)
        later = range(episode.round + 1, self.protocol.max_message_rounds)
        later_active = [self._allowed(episode, number)[0] for number in later]
        found = []
        for place, agent in enumerate(self.protocol.agent_names):
            channels = self._channels(active_AC[place])
            is_forced = may_decide_A[place] and agent in self.protocol.forced_names
            if channels and not is_forced:
                is_last = not any(any(one[place]) for one in later_active)
                found.append(TurnOptions(agent, channels, may_decide_A[place], is_last))
        return found

    def read(self, turn: TurnOptions, text: str) -> ParsedAnswer:
        """What an answer means in a turn."""
        if turn.agent not in self.protocol.verifier_names:
            return parse_messages(text, turn.channels)
        must_decide = turn.may_decide and turn.is_last
        return parse_answer(
            text, turn.channels, may_decide=turn.may_decide, must_decide=must_decide
        )

    def play(
        self, episode: TextEpisode, moves: Mapping[str, tuple[str, ParsedAnswer]]
    ) -> RoundOutcome:
        """What the answers of a round lead to.

        Parameters
        ----------
        moves : Mapping
            For each agent that had a turn, its answer as it was given and what it means.
        """
        protocol = self.protocol
        decisions = [
            moves[agent][1].decision if agent in moves else CONTINUE
            for agent in protocol.agent_names
        ]
        label = int(episode.datapoint["y"])
        step = protocol.step(
            torch.tensor([episode.round]),
            torch.tensor([episode.seed]),
            torch.tensor([label]),
            torch.tensor([episode.has_decided]),
            Moves(torch.tensor([decisions])),
        )
        said = tuple(
            ChannelMessage(agent, channel, text)
            for agent in protocol.agent_names
            if agent in moves
            for channel, text in moves[agent][1].messages.items()
        )
        decision = int(step.decision_E[0])
        after = replace(
            episode,
            round=episode.round + 1,
            said=(*episode.said, said),
            answers=(*episode.answers, {agent: text for agent, (text, _) in moves.items()}),
            has_decided=tuple(step.agent_decided_EA[0].tolist()),
            is_done=bool(step.is_done[0]),
        )
        rewards = self._rewards(step.reward_EA[0].tolist(), decision, episode.datapoint)
        return RoundOutcome(after, rewards, decision, bool(step.is_out_of_rounds_E[0]))

    def _rewards(
        self, rewards: Sequence[float], decision: int, datapoint: Mapping[str, Any]
    ) -> tuple[float, ...]:
        if not self.has_random_stance:
            return tuple(rewards)
        place = self.protocol.agent_names.index(self.protocol.prover_names[0])
        is_won = decision == random_stance(datapoint)
        won = self.protocol.common.prover_reward if is_won else 0.0
        return (*rewards[:place], won, *rewards[place + 1 :])

    def _allowed(self, episode: TextEpisode, number: int) -> tuple[list[list[bool]], list[bool]]:
        """Who may send where, and whose decision counts, in a round."""
        at = torch.tensor([number]), torch.tensor([episode.seed])
        decided_EA = torch.tensor([episode.has_decided])
        active_EAC = self.protocol.active_mask(*at, decided_EA)
        return active_EAC[0].tolist(), self.protocol.can_decide(*at, decided_EA)[0].tolist()

    def _channels(self, active_C: Sequence[bool]) -> tuple[str, ...]:
        names = self.protocol.message_channel_names
        return tuple(name for name, is_active in zip(names, active_C, strict=True) if is_active)

    # ---- what an agent reads

    def messages(self, episode: TextEpisode, turn: TurnOptions) -> tuple[ChatMessage, ...]:
        """What an agent is asked: the conversation as it sees it, ending with a user's message.

        Its own answers are the assistant's, as it gave them; what others said in channels that it
        sees is the user's.
        """
        agent = turn.agent
        values = self.template_values(episode, turn)
        prompt = self.prompts[agent]
        system = prompt.render("system", values)
        parts: list[tuple[str, str]] = [("user", prompt.render("opening", values))]
        for number, said in enumerate(episode.said):
            if agent in episode.answers[number]:
                # The turn that it had is over: what followed it is the next thing to answer.
                parts.append(("assistant", episode.answers[number][agent]))
            parts += [("user", line) for line in self._observed(agent, episode.seed, number, said)]
        parts.append(("user", prompt.render("turn", values)))
        messages = [ChatMessage(role="system", content=system)] if system else []
        return (*messages, *_alternating(parts))

    def _observed(
        self, agent: str, seed: int, number: int, said: Sequence[ChannelMessage]
    ) -> list[str]:
        """What an agent hears of a round, channels in an order that the episode's seed decides."""
        seen = [
            self.protocol.message_channel_names[place]
            for place in self.protocol.visible_channels(agent)
        ]
        order = list(seen)
        random.Random(derive_seed(seed, "channel order", agent, number)).shuffle(order)
        heard = [one for one in said if one.agent != agent and one.channel in seen]
        heard.sort(key=lambda one: order.index(one.channel))
        several = len(seen) > 1
        return [self._line(one, with_channel=several) for one in heard]

    def _line(self, one: ChannelMessage, *, with_channel: bool) -> str:
        name, title = self.human_names[one.agent], channel_title(one.channel)
        is_own = title.replace(" ", "_") == one.agent
        where = f" (to {title})" if with_channel and not is_own else ""
        return f"{name}{where}: {one.text}"

    def template_values(self, episode: TextEpisode, turn: TurnOptions) -> dict[str, Any]:
        """What prompts may use in an agent's turn; `datapoint` has the columns of the data."""
        protocol, agent = self.protocol, turn.agent
        stance = self.stance(agent, episode.datapoint)
        turns_of_verifier = protocol.max_verifier_questions
        is_prover = self.role(agent) == "prover"
        shown = {name: value for name, value in episode.datapoint.items() if name != "y"}
        return {
            "agent": agent,
            "name": self.human_names[agent],
            "names": {other: self.human_names[other] for other in protocol.agent_names},
            "provers": [self.human_names[other] for other in protocol.prover_names],
            "datapoint": shown,
            "stance": DECISION_WORDS[stance] if is_prover else "",
            "channels": [channel_title(channel) for channel in turn.channels],
            "max_questions": turns_of_verifier - 1,
            "max_words": self.max_words[agent],
            "round": episode.round,
            "may_decide": turn.may_decide,
            "is_last_turn": turn.is_last,
        }


def random_stance(datapoint: Mapping[str, Any]) -> int:
    """The side that a datapoint gives to a lone prover; says nothing about its label."""
    shown = [f"{name}={value}" for name, value in sorted(datapoint.items()) if name != "y"]
    return (REJECT, ACCEPT)[derive_seed("prover stance", *shown) % 2]


def _alternating(parts: Sequence[tuple[str, str]]) -> list[ChatMessage]:
    """Messages of user and assistant in turn, as chat templates demand; the first is a user's."""
    messages: list[ChatMessage] = []
    for role, text in parts:
        if role == "user" and messages and messages[-1]["role"] == "user":
            if text:
                joined = "\n\n".join(filter(None, [messages[-1]["content"], text]))
                messages[-1] = ChatMessage(role="user", content=joined)
        elif role == "user":
            messages.append(ChatMessage(role="user", content=text))
        else:
            if messages and messages[-1]["role"] == "assistant":
                messages.append(ChatMessage(role="user", content=GO_ON))
            messages.append(ChatMessage(role="assistant", content=text))
    return [
        ChatMessage(role=one["role"], content=one["content"] or GO_ON)
        if one["role"] == "user"
        else one
        for one in messages
    ]
