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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, TemplateError, nodes
from jinja2.sandbox import SandboxedEnvironment

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT, Moves, ProtocolHandler
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

DECISION_WORDS = {REJECT: "reject", ACCEPT: "accept"}
"""Words for decisions."""
_DECISION = re.compile(r"\bdecision\W{0,4}\s*:\W*(accept|reject)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer parsed by the protocol."""

    messages: dict[str, str] = field(default_factory=dict)
    """Text by channel; empty for a decision."""
    decision: int = CONTINUE
    """0 reject, 1 accept, 2 none."""
    fault: str = ""
    """Why the answer is invalid; empty if it is valid."""


def decision_text(decision: int) -> str:
    """Return a decision in the form read by `parse_answer`."""
    return f"Decision: {DECISION_WORDS[decision]}"


def channel_title(channel: str) -> str:
    """Return the name of a channel in prompts and answers."""
    return channel.removesuffix("_channel").replace("_", " ")


def parse_answer(
    text: str, channels: Sequence[str], *, may_decide: bool, must_decide: bool = False
) -> ParsedAnswer:
    """Parse an answer of a verifier.

    Parameters
    ----------
    channels : sequence of str
        Channels in which the agent may send; with several, each message needs its heading.
    may_decide, must_decide : bool
        Whether a decision counts, and whether it is required.
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
    """Parse an answer of an agent that does not decide; a decision in it is a quotation."""
    if not text.strip():
        return ParsedAnswer(fault="it is empty")
    if len(channels) == 1:
        return ParsedAnswer({channels[0]: text.strip()})
    messages = _split(text, channels)
    return ParsedAnswer(messages, fault="" if messages else "it names no channel to send in")


def _split(text: str, channels: Sequence[str]) -> dict[str, str]:
    """Return the text below each heading; text above the first is dropped."""
    by_title = {channel_title(channel).lower(): channel for channel in channels}
    longest_first = sorted(by_title, key=len, reverse=True)
    titles = "|".join(re.escape(title).replace(r"\ ", r"[ _]") for title in longest_first)
    heading = re.compile(rf"(?<!\w)to ({titles})[ \t*]*:", re.IGNORECASE)
    headings = list(heading.finditer(text))
    messages: dict[str, str] = {}
    ends = [match.start() for match in headings[1:]] + [len(text)]
    for match, end in zip(headings, ends, strict=False):
        message = text[match.end() : end].strip(" \t\n*#")
        channel = by_title[match[1].lower().replace("_", " ")]
        if message:
            parts = (messages.get(channel), message)
            messages[channel] = "\n".join(part for part in parts if part)
    return messages


PROMPTS_DIR = "prompts"
SUFFIX = ".jinja"
BLOCKS = ("system", "opening", "turn")
"""Parts of a template."""


class PromptTemplate:
    """The prompt of one agent."""

    def __init__(self, path: Path, template: Template) -> None:
        self.path = path
        self._template = template

    def render(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Render all `BLOCKS` with their variables; empty if the template lacks it."""
        try:
            context = self._template.new_context(dict(values))
            # Finds inherited blocks, and what is set or imported outside of blocks.
            list(self._template.root_render_func(context))
            return {
                name: "".join(context.blocks[name][0](context)).strip()
                if name in context.blocks
                else ""
                for name in BLOCKS
            }
        except Exception as error:  # expressions of the template raise errors of any type
            reason = str(error).rstrip(".")
            raise DataError(
                f"cannot render the prompt {self.path}: {reason}. It may use: "
                f"{', '.join(sorted(values))}."
            ) from error


def load_prompts(
    folder: Path, agents: Mapping[str, str], protocol: str
) -> dict[str, PromptTemplate]:
    """Load each agent's prompt, given its role (prover or verifier); reports all errors."""
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    prompts: dict[str, PromptTemplate] = {}
    faults = []
    for agent, role in agents.items():
        stems = dict.fromkeys([f"{agent}.{protocol}", agent, f"{role}.{protocol}", role])
        names = [f"{stem}{SUFFIX}" for stem in stems]
        name = next((name for name in names if (folder / name).is_file()), None)
        if name is None:
            faults.append(f"{agent} has no prompt; write one of {', '.join(names)}")
            continue
        try:
            template, blocks = environment.get_template(name), _blocks_of(environment, name)
        except (TemplateError, UnicodeDecodeError) as error:
            faults.append(f"{name} is not a valid template: {error}")
            continue
        unknown = sorted(blocks - set(BLOCKS))
        if unknown:
            faults.append(f"{name} has the block {unknown[0]!r}; known: {', '.join(BLOCKS)}")
        if not {"opening", "turn"} & blocks:
            faults.append(f"{name} has neither the block 'opening' nor 'turn'; add one")
        prompts[agent] = PromptTemplate(folder / name, template)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigurationError(f"invalid prompts in {folder}:\n{lines}")
    return prompts


def _blocks_of(environment: Environment, name: str) -> set[str]:
    """Return the names of a template's blocks, inherited ones included."""
    assert environment.loader is not None
    tree = environment.parse(environment.loader.get_source(environment, name)[0])
    parents = [one.template for one in tree.find_all(nodes.Extends)]
    return {block.name for block in tree.find_all(nodes.Block)}.union(
        *(_blocks_of(environment, one.value) for one in parents if isinstance(one, nodes.Const))
    )


GO_ON = "It is your turn."
"""Message to an agent if there is neither a prompt nor a message since its last one."""


class ChannelMessage(NamedTuple):
    """A message of one round."""

    agent: str
    channel: str
    text: str
    """The message without its heading."""


def row_of(data: NestedArrayDict, number: int) -> dict[str, Any]:
    """Return a datapoint as plain values, by column."""
    row = {str(name): array[number] for name, array in data.items()}
    return {name: one.item() if hasattr(one, "item") else one for name, one in row.items()}


@dataclass(frozen=True)
class TextEpisode:
    """The state of an episode."""

    datapoint_id: int
    """Row of the data."""
    datapoint: Mapping[str, Any]
    """The datapoint's columns as plain values."""
    seed: int
    """The episode's seed, on which the order of turns may depend."""
    has_decided: tuple[bool, ...]
    """Whether each agent has decided, from the protocol's last step."""
    round: int = 0
    """Number of completed rounds."""
    messages: tuple[tuple[ChannelMessage, ...], ...] = ()
    """Messages by round."""
    answers: tuple[Mapping[str, str], ...] = ()
    """Unparsed answers, by round and agent."""
    is_done: bool = False
    """Whether the episode has ended."""


class TurnOptions(NamedTuple):
    """An agent's options in a round."""

    agent: str
    channels: tuple[str, ...]
    """Channels in which it may send."""
    may_decide: bool
    """Whether its decision counts."""
    is_last: bool
    """Whether this is its last turn."""


class RoundOutcome(NamedTuple):
    """Result of a round."""

    episode: TextEpisode
    """The episode after the round."""
    rewards: tuple[float, ...]
    """Rewards by agent."""
    decision: int
    """The decision that counted; 2 for none."""
    is_out_of_rounds: bool
    """Whether the episode ended without a decision."""


class TextGame:
    """Rules of a protocol between chat models.

    Parameters
    ----------
    prompts, human_names, max_words : Mapping
        By agent: template, name in messages, and maximum number of words of an answer.
    has_random_stance : bool
        Whether a single prover argues for a random side, fixed for each datapoint, and is rewarded
        for that decision.
    hidden_columns : sequence of str
        Columns of the data that no prompt may show, besides the label `y`.
    """

    def __init__(
        self,
        protocol: ProtocolHandler,
        prompts: Mapping[str, PromptTemplate],
        *,
        human_names: Mapping[str, str],
        max_words: Mapping[str, int],
        has_random_stance: bool = False,
        hidden_columns: Sequence[str] = (),
    ) -> None:
        if protocol.needs_logits:
            raise ConfigurationError(
                f"the protocol {type(protocol).__name__} needs the logits of messages, which chat "
                "models lack. Set protocol_common.zero_knowledge=false, or choose another protocol."
            )
        if has_random_stance and (len(protocol.prover_names) != 1 or protocol.common.shared_reward):
            raise ConfigurationError(
                "randomize_prover_stance needs one prover and shared_reward=false; provers are "
                f"{', '.join(protocol.prover_names) or 'none'}, with protocol_common.shared_reward="
                f"{str(protocol.common.shared_reward).lower()}. Set randomize_prover_stance=false."
            )
        self.protocol = protocol
        self.prompts = prompts
        self.human_names = human_names
        self.max_words = max_words
        self.has_random_stance = has_random_stance
        self._hidden_columns = {"y", *hidden_columns}

    # ---- rules

    def start(self, datapoint_id: int, datapoint: Mapping[str, Any], seed: int) -> TextEpisode:
        """Return an episode before its first round."""
        nobody = (False,) * self.protocol.num_agents
        return TextEpisode(datapoint_id, datapoint, seed, nobody)

    def role(self, agent: str) -> str:
        """Return the agent's role, prover or verifier."""
        return "verifier" if agent in self.protocol.verifier_names else "prover"

    def stance(self, agent: str, datapoint: Mapping[str, Any]) -> int:
        """Return the decision that a prover argues for, or that a verifier should make."""
        if agent in self.protocol.verifier_names:
            return int(datapoint["y"])
        if self.has_random_stance:
            return random_stance(datapoint)
        return self.protocol.favoured_decisions.get(agent, ACCEPT)

    def turns(self, episode: TextEpisode) -> list[TurnOptions]:
        """Return the next round's turns, in the protocol's order; none for forced decisions."""
        if episode.is_done:
            return []
        round_R = torch.arange(episode.round, self.protocol.max_message_rounds)
        seed_R = torch.full_like(round_R, episode.seed)
        decided_RA = torch.tensor([episode.has_decided]).expand(len(round_R), -1)
        active_RAC = self.protocol.active_mask(round_R, seed_R, decided_RA)
        may_decide_RA = self.protocol.can_decide(round_R, seed_R, decided_RA)
        may_decide_A, active_AC = may_decide_RA[0].tolist(), active_RAC[0].tolist()
        has_later_A = active_RAC[1:].any(dim=2).any(dim=0).tolist()
        turns = []
        for place, agent in enumerate(self.protocol.agent_names):
            channels = tuple(compress(self.protocol.message_channel_names, active_AC[place]))
            is_forced = may_decide_A[place] and agent in self.protocol.forced_names
            if channels and not is_forced:
                is_last = not has_later_A[place]
                turns.append(TurnOptions(agent, channels, may_decide_A[place], is_last))
        return turns

    def read(self, turn: TurnOptions, text: str) -> ParsedAnswer:
        """Parse an answer."""
        if turn.agent not in self.protocol.verifier_names:
            return parse_messages(text, turn.channels)
        must_decide = turn.may_decide and turn.is_last
        return parse_answer(
            text, turn.channels, may_decide=turn.may_decide, must_decide=must_decide
        )

    def play(
        self, episode: TextEpisode, moves: Mapping[str, tuple[str, ParsedAnswer]]
    ) -> RoundOutcome:
        """Return the result of a round, from each active agent's answer, unparsed and parsed."""
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
        messages = tuple(
            ChannelMessage(agent, channel, text)
            for agent in protocol.agent_names
            if agent in moves
            for channel, text in moves[agent][1].messages.items()
        )
        decision = int(step.decision_E[0])
        after = replace(
            episode,
            round=episode.round + 1,
            messages=(*episode.messages, messages),
            answers=(*episode.answers, {agent: text for agent, (text, _) in moves.items()}),
            has_decided=tuple(step.agent_decided_EA[0].tolist()),
            is_done=bool(step.is_done[0]),
        )
        rewards = step.reward_EA[0].tolist()
        if self.has_random_stance:
            is_won = decision == random_stance(episode.datapoint)
            prover = protocol.agent_names.index(protocol.prover_names[0])
            rewards[prover] = protocol.common.prover_reward if is_won else 0.0
        return RoundOutcome(after, tuple(rewards), decision, bool(step.is_out_of_rounds_E[0]))

    # ---- prompts

    def messages(self, episode: TextEpisode, turn: TurnOptions) -> tuple[ChatMessage, ...]:
        """Return the conversation as seen by an agent, ending with a user message.

        Its unparsed answers are the assistant's; messages in channels that it sees are the user's.
        """
        agent = turn.agent
        prompt = self.prompts[agent].render(self.template_values(episode, turn))
        parts: list[tuple[str, str]] = [("user", prompt["opening"])]
        for number, sent in enumerate(episode.messages):
            if agent in episode.answers[number]:
                parts.append(("assistant", episode.answers[number][agent]))
            parts += [("user", line) for line in self._observed(agent, episode.seed, number, sent)]
        parts.append(("user", prompt["turn"]))
        system = [ChatMessage(role="system", content=prompt["system"])] if prompt["system"] else []
        return (*system, *_alternating(parts))

    def _observed(
        self, agent: str, seed: int, number: int, messages: Sequence[ChannelMessage]
    ) -> list[str]:
        """Return a round's messages to an agent, with channels in an order drawn by the seed."""
        seen = [
            self.protocol.message_channel_names[place]
            for place in self.protocol.visible_channels(agent)
        ]
        random.Random(derive_seed(seed, "channel order", agent, number)).shuffle(seen)
        lines = []
        for channel in seen:
            title = channel_title(channel)
            for message in messages:
                if message.agent == agent or message.channel != channel:
                    continue
                is_own = title.replace(" ", "_") == message.agent
                where = f" (to {title})" if len(seen) > 1 and not is_own else ""
                lines.append(f"{self.human_names[message.agent]}{where}: {message.text}")
        return lines

    def template_values(self, episode: TextEpisode, turn: TurnOptions) -> dict[str, Any]:
        """Return the variables of prompts in an agent's turn."""
        protocol, agent = self.protocol, turn.agent
        stance = self.stance(agent, episode.datapoint)
        turns_of_verifier = protocol.max_verifier_questions
        is_prover = self.role(agent) == "prover"
        shown = {
            name: value
            for name, value in episode.datapoint.items()
            if name not in self._hidden_columns
        }
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
    """Return the side of a single prover for a datapoint, independent of its label."""
    shown = [f"{name}={value}" for name, value in sorted(datapoint.items()) if name != "y"]
    return (REJECT, ACCEPT)[derive_seed("prover stance", *shown) % 2]


def _alternating(parts: Sequence[tuple[str, str]]) -> list[ChatMessage]:
    """Return messages that alternate between user and assistant, beginning with the user."""
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
