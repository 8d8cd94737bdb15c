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

from nip_astra.deadlines import limit_hooks
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
    decision_words = {match.lower() for match in _DECISION.findall(text)}
    if len(decision_words) > 1:
        return ParsedAnswer(fault="it decides both ways")
    if decision_words:
        if not may_decide:
            return ParsedAnswer(fault="it decides where it cannot")
        is_accepted = DECISION_WORDS[ACCEPT] in decision_words
        return ParsedAnswer(decision=ACCEPT if is_accepted else REJECT)
    if must_decide:
        return ParsedAnswer(fault="it holds no decision, in the last turn")
    return parse_messages(text, channels)


def parse_messages(text: str, channels: Sequence[str]) -> ParsedAnswer:
    """Parse an answer of an agent that does not decide; a decision in it is a quotation."""
    if not text.strip():
        return ParsedAnswer(fault="it is empty")
    if len(channels) == 1:
        return ParsedAnswer({channels[0]: text.strip()})
    messages = _split_by_headings(text, channels)
    if not messages:
        return ParsedAnswer(fault="it names no channel to send in")
    return ParsedAnswer(messages)


def _split_by_headings(text: str, channels: Sequence[str]) -> dict[str, str]:
    """Return the text below each heading; text above the first is dropped."""
    channel_by_title = {channel_title(channel).lower(): channel for channel in channels}
    # The longest first, since a title may begin with another.
    titles = sorted(channel_by_title, key=len, reverse=True)
    patterns = [re.escape(title).replace(r"\ ", r"[ _]") for title in titles]
    heading = re.compile(rf"(?<!\w)to ({'|'.join(patterns)})[ \t*]*:", re.IGNORECASE)
    headings = list(heading.finditer(text))
    stops = [match.start() for match in headings[1:]] + [len(text)]
    messages: dict[str, str] = {}
    for match, stop in zip(headings, stops, strict=False):
        message = text[match.end() : stop].strip(" \t\n*#")
        if not message:
            continue
        channel = channel_by_title[match[1].lower().replace("_", " ")]
        if channel in messages:
            messages[channel] += f"\n{message}"
        else:
            messages[channel] = message
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
            rendered = dict.fromkeys(BLOCKS, "")
            for name in BLOCKS:
                if name in context.blocks:
                    # The first is the one that overrides the inherited ones.
                    render_block = context.blocks[name][0]
                    rendered[name] = "".join(render_block(context)).strip()
            return rendered
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
        # From the most specific to the most general; an agent may have the name of its role.
        stems = dict.fromkeys([f"{agent}.{protocol}", agent, f"{role}.{protocol}", role])
        candidates = [f"{stem}{SUFFIX}" for stem in stems]
        name = next((name for name in candidates if (folder / name).is_file()), None)
        if name is None:
            faults.append(f"{agent} has no prompt; write one of {', '.join(candidates)}")
            continue
        try:
            template = environment.get_template(name)
            blocks = _find_blocks(environment, name)
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


def _find_blocks(environment: Environment, name: str) -> set[str]:
    """Return the names of a template's blocks, inherited ones included."""
    assert environment.loader is not None
    source, *_ = environment.loader.get_source(environment, name)
    tree = environment.parse(source)
    blocks = {block.name for block in tree.find_all(nodes.Block)}
    for extends in tree.find_all(nodes.Extends):
        # Any other parent is known only when the template is rendered.
        if isinstance(extends.template, nodes.Const):
            blocks |= _find_blocks(environment, extends.template.value)
    return blocks


GO_ON = "It is your turn."
"""Message to an agent if there is neither a prompt nor a message since its last one."""


class ChannelMessage(NamedTuple):
    """A message of one round."""

    agent: str
    channel: str
    text: str
    """The message without its heading."""


def read_row(data: NestedArrayDict, number: int) -> dict[str, Any]:
    """Return a datapoint as plain values, by column."""
    row: dict[str, Any] = {}
    for name, column in data.items():
        cell = column[number]
        row[str(name)] = cell.item() if hasattr(cell, "item") else cell
    return row


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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        limit_hooks(cls, ("start", "stance", "turns", "read", "play", "messages"))

    # ---- rules

    def start(self, datapoint_id: int, datapoint: Mapping[str, Any], seed: int) -> TextEpisode:
        """Return an episode before its first round."""
        has_decided = (False,) * self.protocol.num_agents
        return TextEpisode(datapoint_id, datapoint, seed, has_decided)

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
        protocol = self.protocol
        # The rounds that are left, to know which turn is an agent's last.
        round_R = torch.arange(episode.round, protocol.max_message_rounds)
        seed_R = torch.full_like(round_R, episode.seed)
        decided_RA = torch.tensor([episode.has_decided]).expand(len(round_R), -1)
        active_RAC = protocol.active_mask(round_R, seed_R, decided_RA)
        may_decide_RA = protocol.can_decide(round_R, seed_R, decided_RA)
        active_AC = active_RAC[0].tolist()
        may_decide_A = may_decide_RA[0].tolist()
        has_later_turn_A = active_RAC[1:].any(dim=2).any(dim=0).tolist()
        turns = []
        for index, agent in enumerate(protocol.agent_names):
            channels = tuple(compress(protocol.message_channel_names, active_AC[index]))
            may_decide = may_decide_A[index]
            is_forced = may_decide and agent in protocol.forced_names
            if channels and not is_forced:
                is_last = not has_later_turn_A[index]
                turns.append(TurnOptions(agent, channels, may_decide, is_last))
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
        decisions = []
        messages = []
        for agent in protocol.agent_names:
            if agent not in moves:
                decisions.append(CONTINUE)
                continue
            _, parsed = moves[agent]
            decisions.append(parsed.decision)
            for channel, text in parsed.messages.items():
                messages.append(ChannelMessage(agent, channel, text))
        label = int(episode.datapoint["y"])
        step = protocol.step(
            torch.tensor([episode.round]),
            torch.tensor([episode.seed]),
            torch.tensor([label]),
            torch.tensor([episode.has_decided]),
            Moves(torch.tensor([decisions])),
        )
        decision = int(step.decision_E[0])
        answers = {agent: answer for agent, (answer, _) in moves.items()}
        next_episode = replace(
            episode,
            round=episode.round + 1,
            messages=(*episode.messages, tuple(messages)),
            answers=(*episode.answers, answers),
            has_decided=tuple(step.agent_decided_EA[0].tolist()),
            is_done=bool(step.is_done[0]),
        )
        rewards = step.reward_EA[0].tolist()
        if self.has_random_stance:
            is_won = decision == random_stance(episode.datapoint)
            prover = protocol.agent_names.index(protocol.prover_names[0])
            rewards[prover] = protocol.common.prover_reward if is_won else 0.0
        is_out_of_rounds = bool(step.is_out_of_rounds_E[0])
        return RoundOutcome(next_episode, tuple(rewards), decision, is_out_of_rounds)

    # ---- prompts

    def messages(self, episode: TextEpisode, turn: TurnOptions) -> tuple[ChatMessage, ...]:
        """Return the conversation as seen by an agent, ending with a user message.

        Its unparsed answers are the assistant's; messages in channels that it sees are the user's.
        """
        agent = turn.agent
        prompt = self.prompts[agent].render(self.template_values(episode, turn))
        parts: list[tuple[str, str]] = [("user", prompt["opening"])]
        for number, (messages, answers) in enumerate(
            zip(episode.messages, episode.answers, strict=True)
        ):
            if agent in answers:
                parts.append(("assistant", answers[agent]))
            for line in self._observed_lines(agent, episode.seed, number, messages):
                parts.append(("user", line))
        parts.append(("user", prompt["turn"]))
        conversation = _join_alternating(parts)
        if prompt["system"]:
            conversation.insert(0, ChatMessage(role="system", content=prompt["system"]))
        return tuple(conversation)

    def _observed_lines(
        self, agent: str, seed: int, number: int, messages: Sequence[ChannelMessage]
    ) -> list[str]:
        """Return a round's messages to an agent, with channels in an order drawn by the seed."""
        channel_names = self.protocol.message_channel_names
        channels = [channel_names[index] for index in self.protocol.visible_channels(agent)]
        random.Random(derive_seed(seed, "channel order", agent, number)).shuffle(channels)
        lines = []
        for channel in channels:
            title = channel_title(channel)
            for message in messages:
                if message.agent == agent or message.channel != channel:
                    continue
                # The channel of an agent's own name needs no mention.
                is_named_after_sender = title.replace(" ", "_") == message.agent
                recipient = ""
                if len(channels) > 1 and not is_named_after_sender:
                    recipient = f" (to {title})"
                lines.append(f"{self.human_names[message.agent]}{recipient}: {message.text}")
        return lines

    def template_values(self, episode: TextEpisode, turn: TurnOptions) -> dict[str, Any]:
        """Return the variables of prompts in an agent's turn."""
        protocol, agent = self.protocol, turn.agent
        stance = ""
        if self.role(agent) == "prover":
            stance = DECISION_WORDS[self.stance(agent, episode.datapoint)]
        visible_columns = {}
        for name, value in episode.datapoint.items():
            if name not in self._hidden_columns:
                visible_columns[name] = value
        return {
            "agent": agent,
            "name": self.human_names[agent],
            "names": {name: self.human_names[name] for name in protocol.agent_names},
            "provers": [self.human_names[name] for name in protocol.prover_names],
            "datapoint": visible_columns,
            "stance": stance,
            "channels": [channel_title(channel) for channel in turn.channels],
            # The last of the verifier's turns is its decision.
            "max_questions": protocol.max_verifier_questions - 1,
            "max_words": self.max_words[agent],
            "round": episode.round,
            "may_decide": turn.may_decide,
            "is_last_turn": turn.is_last,
        }


def random_stance(datapoint: Mapping[str, Any]) -> int:
    """Return the side of a single prover for a datapoint, independent of its label."""
    columns = [f"{name}={value}" for name, value in sorted(datapoint.items()) if name != "y"]
    is_accepting = derive_seed("prover stance", *columns) % 2 == 1
    return ACCEPT if is_accepting else REJECT


def _join_alternating(parts: Sequence[tuple[str, str]]) -> list[ChatMessage]:
    """Return messages that alternate between user and assistant, beginning with the user.

    Many chat templates require this.
    """
    messages: list[ChatMessage] = []
    for role, text in parts:
        last_role = messages[-1]["role"] if messages else None
        if role == "assistant":
            if last_role == "assistant":
                messages.append(ChatMessage(role="user", content=GO_ON))
            messages.append(ChatMessage(role="assistant", content=text))
        elif last_role == "user":
            paragraphs = [messages[-1]["content"], text]
            content = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
            messages[-1] = ChatMessage(role="user", content=content)
        else:
            messages.append(ChatMessage(role="user", content=text))
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"]:
            messages[index] = ChatMessage(role="user", content=GO_ON)
    return messages
