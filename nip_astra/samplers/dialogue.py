"""Grow trees of conversation level by level: two generation calls for all trees together.

Shape suffixes: `B` row, `N` node, `T` token, `C` context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.base import Generation, GenerationSession, pad_right
from nip_astra.language_models.scoring import require_finite
from nip_astra.rl_objectives.rewards import mean_nll
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import (
    NOT_ASKED,
    ChatAgent,
    ChatReply,
    TextAttacker,
    TextConversation,
)
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.utils.seeding import SeedPart, derive_seed, uniform_rows


class Speakers(NamedTuple):
    """The agents of a conversation.

    Attributes
    ----------
    reader : ConversationAgent
        Defines the tokens and the format in which probes are counted and read.
    share_tokens : bool
        Whether reader and target have one tokenizer.
    """

    attacker: ConversationAgent | TextAttacker
    target: Speaker
    reader: ConversationAgent
    share_tokens: bool


class TreeShape(NamedTuple):
    """Size of a tree, and the key of its randomness."""

    tree_width: int
    tree_depth: int
    key: tuple[SeedPart, ...]


@dataclass
class OpenConversation:
    """A path of the tree, as each model reads it.

    Attributes
    ----------
    target_turns : list[Turn]
        Empty if the target reads texts.
    texts : list[str]
        All turns, the opening first.
    failure : str or None
        Why the conversation ended early: a probe or response failed.
    is_refused : bool
        Whether the service marks the last response as a refusal.
    """

    path: str
    episode: int
    node: int
    attacker_turns: list[Turn]
    target_turns: list[Turn]
    texts: list[str]
    failure: str | None = None
    is_refused: bool = False


@dataclass
class TreeColumns:
    """Columns of a tree's nodes while it grows."""

    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    failures: list[str | None] = field(default_factory=list)
    are_refused: list[bool] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    target_nll: list[Tensor] = field(default_factory=list)
    read: dict[str, list[list[int]]] = field(default_factory=lambda: {"attacker": [], "target": []})

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to a part's seconds."""
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.seconds[part] = self.seconds.get(part, 0.0) + spent

    def add_level(
        self, parents: Sequence[OpenConversation], children: Sequence[OpenConversation], depth: int
    ) -> None:
        """Add a node for each child; every parent has as many."""
        width = len(children) // len(parents)
        self.parent += [parent.node for parent in parents for _ in range(width)]
        self.depth += [depth] * len(children)
        self.episode += [child.episode for child in children]
        self.responses += [child.texts[-1] for child in children]
        self.failures += [child.failure for child in children]
        self.are_refused += [child.is_refused for child in children]

    def note(self, role: str, contexts: Sequence[Sequence[int]], said: Generation) -> None:
        """Record the tokens that a model read: contexts, and turns but for their last token."""
        rows_per_context = len(said.ids_BT) // len(contexts)
        lengths = said.mask_BT.sum(dim=1).tolist()
        self.read[role] += [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(said.ids_BT.tolist(), lengths, strict=True))
        ]


class TreeExpansion:
    """Grows the conversations of some trees together.

    Parameters
    ----------
    scores_likelihood : bool
        Whether the target scores each probe.

    Attributes
    ----------
    columns : TreeColumns
        The nodes so far.
    """

    def __init__(self, speakers: Speakers, shape: TreeShape, *, scores_likelihood: bool) -> None:
        self.attacker, self.target, self.reader, self._share_tokens = speakers
        self.shape = shape
        self.scores_likelihood = scores_likelihood
        self.columns = TreeColumns()
        # Agents that read texts have no session.
        self._attacker_session: GenerationSession | None = None
        if not isinstance(self.attacker, TextAttacker):
            self._attacker_session = self.attacker.token_sampler.open_session()
        self._target_session: GenerationSession | None = None
        if not isinstance(self.target, ChatAgent):
            self._target_session = self.target.token_sampler.open_session()

    def play(self, prompts: Sequence[str], first: int) -> None:
        """Grow one tree from each opening prompt, the first being that of episode `first`."""
        parents = [
            self._open(episode, first + episode, prompt) for episode, prompt in enumerate(prompts)
        ]
        for depth in range(self.shape.tree_depth):
            parents = self._grow(parents, depth)

    def _open(self, episode: int, number: int, prompt: str) -> OpenConversation:
        read_by_target = []
        if not isinstance(self.target, ChatAgent):
            read_by_target = [Turn(True, self.target.conversation_format.encode(prompt))]
        return OpenConversation(
            path=str(number),
            episode=episode,
            node=-1,
            attacker_turns=[Turn(False, self.reader.conversation_format.encode(prompt))],
            target_turns=read_by_target,
            texts=[prompt],
        )

    def _grow(self, parents: list[OpenConversation], depth: int) -> list[OpenConversation]:
        """Add probes and responses below every open conversation, in one batch each."""
        contexts = self.reader.contexts([parent.attacker_turns for parent in parents])
        children = self._children(parents)
        probes, texts = self._probe(contexts, children, depth)
        for child, ids, text in zip(children, self.reader.content_ids(probes), texts, strict=True):
            child.attacker_turns = [*child.attacker_turns, Turn(True, ids)]
            child.texts = [*child.texts, text]
        if isinstance(self.target, ChatAgent):
            with self.columns.timed("target"):
                generate_responses(self.target, self.reader, children, self.shape.key)
        else:
            assert self._target_session is not None
            self._generate_target_turns(self.target, self._target_session, children)
        self.columns.add_level(parents, children, depth)
        self.columns.contexts += contexts
        self.columns.probes += texts
        self.columns.generations.append(probes)
        return children

    def _children(self, parents: list[OpenConversation]) -> list[OpenConversation]:
        """A copy of every conversation for each of its probes."""
        width, start = self.shape.tree_width, len(self.columns.probes)
        return [
            OpenConversation(
                f"{parent.path}.{branch}",
                parent.episode,
                start + index * width + branch,
                parent.attacker_turns,
                parent.target_turns,
                parent.texts,
                None if parent.failure is None else NOT_ASKED,
            )
            for index, parent in enumerate(parents)
            for branch in range(width)
        ]

    # ---- the attacker's turns

    def _probe(
        self, contexts: list[list[int]], children: list[OpenConversation], depth: int
    ) -> tuple[Generation, list[str]]:
        """The probes of a level, as tokens and as texts."""
        if isinstance(self.attacker, TextAttacker):
            with self.columns.timed("attacker"):
                texts = generate_probes(self.attacker, children, self.shape.key)
            return tokenize_turns(self.reader, texts), texts
        session = self._attacker_session
        assert session is not None
        uniforms = self._uniforms(self.attacker, children)
        with self.columns.timed("attacker"):
            probes = self.attacker.speak(
                session, contexts, self.shape.tree_width, uniforms
            ).generation
        self._check_logprobs(self.attacker, probes.logprobs_BT, probes.mask_BT)
        self.columns.note("attacker", contexts, probes)
        if depth + 1 == self.shape.tree_depth:
            # Free its keys and values for those of the last responses.
            session.close()
        return probes, self.attacker.decode(self.attacker.content_ids(probes))

    # ---- the target's turns

    def _generate_target_turns(
        self,
        target: ConversationAgent,
        session: GenerationSession,
        children: list[OpenConversation],
    ) -> None:
        """Responses of a language model, in tokens."""
        for child in children:
            ids, text = child.attacker_turns[-1].ids, child.texts[-1]
            heard = ids if self._share_tokens else target.conversation_format.encode(text)
            child.target_turns = [*child.target_turns, Turn(False, heard)]
        responses = self._respond(target, session, children)
        response_ids = target.content_ids(responses)
        response_texts = target.decode(response_ids)
        for child, ids, text in zip(children, response_ids, response_texts, strict=True):
            speech = self.reader.conversation_format
            heard = ids if self._share_tokens else speech.encode(text)
            child.target_turns = [*child.target_turns, Turn(True, ids)]
            child.attacker_turns = [*child.attacker_turns, Turn(False, heard)]
            child.texts = [*child.texts, text if child.failure is None else ""]

    def _respond(
        self,
        target: ConversationAgent,
        session: GenerationSession,
        children: list[OpenConversation],
    ) -> Generation:
        """Responses, and from the same forward pass the likelihood of the probes."""
        conversations = [child.target_turns for child in children]
        contexts = target.contexts(conversations)
        spans = None
        if self.scores_likelihood:
            spans = [
                target.conversation_format.last_turn_span(turns, context)
                for turns, context in zip(conversations, contexts, strict=True)
            ]
        uniforms = self._uniforms(target, children)
        with self.columns.timed("target"):
            answered = target.speak(
                session, contexts, 1, uniforms, branching=self.shape.tree_width, spans=spans
            )
        if spans is not None and answered.span_logprobs_CT is not None:
            lengths_C = torch.tensor([stop - start for start, stop in spans])
            mask_CT = torch.arange(answered.span_logprobs_CT.shape[1]) < lengths_C[:, None]
            self._check_logprobs(target, answered.span_logprobs_CT, mask_CT)
            self.columns.target_nll.append(mean_nll(answered.span_logprobs_CT, mask_CT))
        said = answered.generation
        self._check_logprobs(target, said.logprobs_BT, said.mask_BT)
        self.columns.note("target", contexts, said)
        return said

    # ---- of both

    def _check_logprobs(
        self, agent: ConversationAgent, logprobs_BT: Tensor, mask_BT: Tensor
    ) -> None:
        check_logprobs(agent, logprobs_BT, mask_BT, self.shape)

    def _uniforms(self, agent: ConversationAgent, children: list[OpenConversation]) -> Tensor:
        """Random numbers of each child, which depend on its place in the tree only."""
        keys = [(*self.shape.key, agent.role, child.path) for child in children]
        return uniform_rows(keys, agent.sampling.max_new_tokens)


def check_logprobs(
    agent: ConversationAgent, logprobs_NT: Tensor, mask_NT: Tensor, shape: TreeShape
) -> None:
    """Refuse log-probabilities of an agent whose logits overflowed."""
    during = f"the rollout {' '.join(map(str, shape.key))}"
    require_finite(logprobs_NT, mask_NT, role=agent.role, model=agent.language_model, during=during)


def generate_probes(
    attacker: TextAttacker, children: Sequence[OpenConversation], key: tuple[SeedPart, ...]
) -> list[str]:
    """Probes of a level from a text attacker; a failure ends its conversation."""
    asked = [child for child in children if child.failure is None]
    seeds = [derive_seed(*key, attacker.role, child.path) for child in asked]
    seen = [TextConversation(int(child.path.partition(".")[0]), child.texts) for child in asked]
    replies = dict(zip(map(id, asked), attacker.probe(seen, seeds), strict=True))
    for child in asked:
        failure = replies[id(child)].failure
        child.failure = None if failure is None else f"attacker {failure}"
    return [replies[id(child)].text if id(child) in replies else "" for child in children]


def generate_responses(
    target: ChatAgent,
    reader: ConversationAgent,
    children: Sequence[OpenConversation],
    key: tuple[SeedPart, ...],
) -> None:
    """Add the responses of a chat model to the conversations of a level.

    A failure ends its conversation: later probes have no response and no score, and nothing is
    learned from them.

    Parameters
    ----------
    reader : ConversationAgent
        Defines the tokens in which the attacker reads.
    """
    asked = [child for child in children if child.failure is None]
    seeds = [derive_seed(*key, target.role, child.path) for child in asked]
    replies = target.reply([child.texts for child in asked], seeds)
    said = dict(zip(map(id, asked), replies, strict=True))
    for child in children:
        reply = said.get(id(child), ChatReply("", child.failure))
        child.failure, child.is_refused = reply.failure, reply.is_refused
        ids = reader.conversation_format.encode(reply.text)
        child.attacker_turns = [*child.attacker_turns, Turn(False, ids)]
        child.texts = [*child.texts, reply.text]


def tokenize_turns(reader: ConversationAgent, texts: Sequence[str]) -> Generation:
    """Turns in a model's tokens, with log-probabilities of NaN.

    A turn is cut at half of the model's context window.
    """
    longest = reader.language_model.context_window // 2
    rows = [reader.say(text)[:longest] for text in texts]
    ids_BT, mask_BT = pad_right(rows, torch.device("cpu"))
    return Generation(ids_BT, mask_BT, torch.zeros(ids_BT.shape).masked_fill(mask_BT, math.nan))
