"""Interaction protocols between chat models: prompts, answers and rounds.

Turns, visibility, ends and rewards are those of the protocol's declaration; a message is a text.

A decision is written `Decision: accept` or `Decision: reject`, anywhere, in any case. An agent that
may send in several channels heads each message with `To <channel>:`.

The prompt of an agent is the first of these files in the scenario's folder `prompts/`:

    <agent>.<protocol>.jinja   <agent>.jinja   <role>.<protocol>.jinja   <role>.jinja

The role is prover or verifier. A template has up to three blocks: `system`, the system message;
`opening`, the first user message; and `turn`, the end of the prompt in each of the agent's turns.
At least one of `opening` and `turn` is required.

Shape suffixes: `E` episode, `A` agent, `C` channel.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, Moves, ProtocolHandler
from nip_astra.utils.seeding import derive_seed

DECISION_WORDS = {REJECT: "reject", ACCEPT: "accept"}
"""How decisions are written."""
_DECISION = re.compile(r"\bdecision\W{0,4}\s*:\W*(accept|reject)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer means to the protocol."""

    messages: dict[str, str] = field(default_factory=dict)
    """Text by channel; empty where the agent decides."""
    decision: int = CONTINUE
    """0 reject, 1 accept, 2 none."""
    fault: str = ""
    """Why the answer cannot be used; empty where it can."""


def decision_text(decision: int) -> str:
    """A decision in the words that `parse_answer` reads."""
    return f"Decision: {DECISION_WORDS[decision]}"


def channel_title(channel: str) -> str:
    """What a channel is called where agents read and write."""
    return channel.removesuffix("_channel").replace("_", " ")


def parse_answer(
    text: str, channels: Sequence[str], *, may_decide: bool, must_decide: bool = False
) -> ParsedAnswer:
    """What an answer means.

    Parameters
    ----------
    channels : sequence of str
        Those in which the agent may send; with more than one, each message needs its heading.
    may_decide, must_decide : bool
        Whether a decision counts, and whether nothing else will do.
    """
    words = {match.lower() for match in _DECISION.findall(text)}
    if len(words) > 1:
        return ParsedAnswer(fault="it decides both ways")
    if words:
        if not may_decide:
            return ParsedAnswer(fault="it decides where it cannot")
        decided = words.pop()
        return ParsedAnswer(decision=ACCEPT if decided == DECISION_WORDS[ACCEPT] else REJECT)
    if must_decide:
        return ParsedAnswer(fault="it holds no decision, in the last turn")
    return parse_messages(text, channels)


def parse_messages(text: str, channels: Sequence[str]) -> ParsedAnswer:
    """What the answer of an agent means that does not decide: a decision in it is a quotation."""
    if not text.strip():
        return ParsedAnswer(fault="it is empty")
    if len(channels) == 1:
        return ParsedAnswer({channels[0]: text.strip()})
    messages = _split(text, channels)
    return ParsedAnswer(messages, fault="" if messages else "it names no channel to send in")


def _split(text: str, channels: Sequence[str]) -> dict[str, str]:
    """The text below each heading; what stands above the first is for nobody."""
    by_title = {channel_title(channel).lower(): channel for channel in channels}
    longest_first = sorted(by_title, key=len, reverse=True)
    titles = "|".join(re.escape(title).replace(r"\ ", r"[ _]") for title in longest_first)
    heading = re.compile(rf"(?<!\w)to ({titles})[ \t*]*:", re.IGNORECASE)
    found = list(heading.finditer(text))
    messages: dict[str, str] = {}
    ends = [match.start() for match in found[1:]] + [len(text)]
    for number, match in enumerate(found):
        said = text[match.end() : ends[number]].strip(" \t\n*#")
        channel = by_title[match[1].lower().replace("_", " ")]
        if said:
            messages[channel] = f"{messages[channel]}\n{said}" if channel in messages else said
    return messages


PROMPTS_DIR = "prompts"
SUFFIX = ".jinja"
BLOCKS = ("system", "opening", "turn")
"""Parts of a template."""


class PromptTemplate:
    """What one agent is told.

    Attributes
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path, template: Template) -> None:
        self.path = path
        self._template = template

    def render(self, block: str, values: Mapping[str, Any]) -> str:
        """A block with its variables filled in; empty where the template has no such block."""
        if block not in self._template.blocks:
            return ""
        try:
            context = self._template.new_context(dict(values))
            return "".join(self._template.blocks[block](context)).strip()
        except TemplateError as error:
            raise DataError(
                f"the block {block!r} of the prompt {self.path} was to be filled in, but: {error}. "
                f"It may use: {', '.join(sorted(values))}."
            ) from error


def file_names(agent: str, role: str, protocol: str) -> list[str]:
    """The files that an agent's prompt may stand in, the first that is there counts."""
    names = dict.fromkeys([f"{agent}.{protocol}", agent, f"{role}.{protocol}", role])
    return [f"{name}{SUFFIX}" for name in names]


def load_prompts(
    folder: Path, agents: Mapping[str, str], protocol: str
) -> dict[str, PromptTemplate]:
    """The prompt of each agent.

    Parameters
    ----------
    folder : Path
        The scenario's `prompts`.
    agents : Mapping of str
        Role, prover or verifier, by agent.
    """
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    found: dict[str, PromptTemplate] = {}
    faults = []
    for agent, role in agents.items():
        names = file_names(agent, role, protocol)
        name = next((name for name in names if (folder / name).is_file()), None)
        if name is None:
            faults.append(f"{agent} has no prompt; write one of {', '.join(names)}")
            continue
        try:
            template = environment.get_template(name)
        except TemplateError as error:
            faults.append(f"{name} is no template: {error}; mend it")
            continue
        faults += [f"{name} {fault}" for fault in _faults_of(template)]
        found[agent] = PromptTemplate(folder / name, template)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigurationError(f"prompts were to be read from {folder}, but:\n{lines}")
    return found


def _faults_of(template: Template) -> Iterator[str]:
    unknown = sorted(set(template.blocks) - set(BLOCKS))
    if unknown:
        yield f"has the block {unknown[0]!r}; known blocks: {', '.join(BLOCKS)}"
    if not {"opening", "turn"} & set(template.blocks):
        yield "has neither the block 'opening' nor 'turn', so its agent is asked nothing; add one"


GO_ON = "It is your turn."
"""What an agent reads where its prompt and the others say nothing since its own last message."""


class ChannelMessage(NamedTuple):
    """A message of one round."""

    agent: str
    channel: str
    text: str
    """What was sent, without its heading."""


@dataclass(frozen=True)
class TextEpisode:
    """How far an episode has come."""

    datapoint_id: int
    """Row of the data."""
    datapoint: Mapping[str, Any]
    """What it holds, as plain values."""
    seed: int
    """Of the episode; the order of play may depend on it."""
    has_decided: tuple[bool, ...]
    """By agent; what the protocol's step before gave."""
    round: int = 0
    """Rounds played."""
    said: tuple[tuple[ChannelMessage, ...], ...] = ()
    """Messages by round."""
    answers: tuple[Mapping[str, str], ...] = ()
    """Answers as they were given, by round and agent."""
    is_done: bool = False
    """Whether the episode has ended."""


class TurnOptions(NamedTuple):
    """What an agent may do in a round."""

    agent: str
    channels: tuple[str, ...]
    """Where it may send."""
    may_decide: bool
    """Whether its decision counts."""
    is_last: bool
    """Whether it has no further turn."""


class RoundOutcome(NamedTuple):
    """What a round came to."""

    episode: TextEpisode
    """After the round."""
    rewards: tuple[float, ...]
    """By agent."""
    decision: int
    """That counted; 2 where none did."""
    is_out_of_rounds: bool
    """Whether the episode ended without a decision."""


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
