"""Let attacker and target talk: a level of all trees at a time, two generation calls each.

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
from nip_astra.language_models.finite import refuse_nan
from nip_astra.rl_objectives.ast_reward import mean_nll
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import NOT_ASKED, ChatAgent, ChatReply
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scenario_base.text_attackers import TextAttacker, TextConversation
from nip_astra.utils.seeding import SeedPart, derive_seed, uniform_rows


class Speakers(NamedTuple):
    """Who talks.

    Attributes
    ----------
    reader : ConversationAgent
        Whose tokens and format probes are counted and read in.
    share_tokens : bool
        Whether the tokens of reader and target mean the same to both.
    """

    attacker: ConversationAgent | TextAttacker
    target: Speaker
    reader: ConversationAgent
    share_tokens: bool


class Plan(NamedTuple):
    """What is grown: the shape of a tree, and what names its randomness."""

    tree_width: int
    tree_depth: int
    key: tuple[SeedPart, ...]


@dataclass
class OpenConversation:
    """A path of the tree: the turns as each model reads them.

    Attributes
    ----------
    target_turns : list[Turn]
        Empty where the target reads texts.
    texts : list[str]
        What was said, the opening first.
    failure : str or None
        Why nothing more is said, since a probe or response failed; None while all is well.
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
    """What the nodes of a tree collect while it grows."""

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
        """Add the time that the block takes to a part's seconds."""
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
        """Keep what a model had to read: contexts, and all but the last token of each turn."""
        rows_per_context = len(said.ids_BT) // len(contexts)
        lengths = said.mask_BT.sum(dim=1).tolist()
        self.read[role] += [
            [*contexts[row // rows_per_context], *ids[: max(length - 1, 0)]]
            for row, (ids, length) in enumerate(zip(said.ids_BT.tolist(), lengths, strict=True))
        ]


class Dialogue:
    """The conversations of some trees, which grow together.

    Parameters
    ----------
    asks_likelihood : bool
        Whether the target tells how likely it finds each probe.

    Attributes
    ----------
    columns : TreeColumns
        What was said so far.
    """

    def __init__(self, speakers: Speakers, plan: Plan, *, asks_likelihood: bool) -> None:
        self.attacker, self.target, self.reader, self._share_tokens = speakers
        self.plan = plan
        self.asks_likelihood = asks_likelihood
        self.columns = TreeColumns()
        # Both models are in the middle of a rollout; who reads texts has no session.
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
        for depth in range(self.plan.tree_depth):
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
        """Add one probe and one response below every open conversation, all in one batch each."""
        contexts = self.reader.contexts([parent.attacker_turns for parent in parents])
        children = self._children(parents)
        probes, texts = self._probe(contexts, children, depth)
        for child, ids, text in zip(children, self.reader.content_ids(probes), texts, strict=True):
            child.attacker_turns = [*child.attacker_turns, Turn(True, ids)]
            child.texts = [*child.texts, text]
        if isinstance(self.target, ChatAgent):
            with self.columns.timed("target"):
                ask_target(self.target, self.reader, children, self.plan.key)
        else:
            assert self._target_session is not None
            self._let_target_speak(self.target, self._target_session, children)
        self.columns.add_level(parents, children, depth)
        self.columns.contexts += contexts
        self.columns.probes += texts
        self.columns.generations.append(probes)
        return children

    def _children(self, parents: list[OpenConversation]) -> list[OpenConversation]:
        """A copy of every conversation for each probe that is to be tried."""
        width, start = self.plan.tree_width, len(self.columns.probes)
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
                texts = ask_attacker(self.attacker, children, self.plan.key)
            return in_tokens_of(self.reader, texts), texts
        session = self._attacker_session
        assert session is not None
        uniforms = self._uniforms(self.attacker, children)
        with self.columns.timed("attacker"):
            probes = self.attacker.speak(
                session, contexts, self.plan.tree_width, uniforms
            ).generation
        self._refuse_nan(self.attacker, probes.logprobs_BT, probes.mask_BT)
        self.columns.note("attacker", contexts, probes)
        if depth + 1 == self.plan.tree_depth:
            # Its keys and values make room for those of the last responses.
            session.close()
        return probes, self.attacker.decode(self.attacker.content_ids(probes))

    # ---- the target's turns

    def _let_target_speak(
        self,
        target: ConversationAgent,
        session: GenerationSession,
        children: list[OpenConversation],
    ) -> None:
        """Let a language model answer, token by token."""
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
        """Let the target answer; what it thinks of the probes comes from the same pass."""
        conversations = [child.target_turns for child in children]
        contexts = target.contexts(conversations)
        spans = None
        if self.asks_likelihood:
            spans = [
                target.conversation_format.last_turn_span(turns, context)
                for turns, context in zip(conversations, contexts, strict=True)
            ]
        uniforms = self._uniforms(target, children)
        with self.columns.timed("target"):
            answered = target.speak(
                session, contexts, 1, uniforms, branching=self.plan.tree_width, spans=spans
            )
        if spans is not None and answered.span_logprobs_CT is not None:
            lengths_C = torch.tensor([stop - start for start, stop in spans])
            mask_CT = torch.arange(answered.span_logprobs_CT.shape[1]) < lengths_C[:, None]
            self._refuse_nan(target, answered.span_logprobs_CT, mask_CT)
            self.columns.target_nll.append(mean_nll(answered.span_logprobs_CT, mask_CT))
        said = answered.generation
        self._refuse_nan(target, said.logprobs_BT, said.mask_BT)
        self.columns.note("target", contexts, said)
        return said

    # ---- of both

    def _refuse_nan(self, agent: ConversationAgent, logprobs_BT: Tensor, mask_BT: Tensor) -> None:
        refuse_nan_of(agent, logprobs_BT, mask_BT, self.plan)

    def _uniforms(self, agent: ConversationAgent, children: list[OpenConversation]) -> Tensor:
        """Each child's random numbers, which depend on its place in the tree alone."""
        keys = [(*self.plan.key, agent.role, child.path) for child in children]
        return uniform_rows(keys, agent.sampling.max_new_tokens)


def refuse_nan_of(
    agent: ConversationAgent, logprobs_NT: Tensor, mask_NT: Tensor, plan: Plan
) -> None:
    """Refuse what an agent whose logits overflowed said, or thinks of what was said."""
    during = f"the rollout {' '.join(map(str, plan.key))}"
    refuse_nan(logprobs_NT, mask_NT, role=agent.role, model=agent.language_model, during=during)


def ask_attacker(
    attacker: TextAttacker, children: Sequence[OpenConversation], key: tuple[SeedPart, ...]
) -> list[str]:
    """Ask for all probes of a level at once; where one fails its conversation has ended."""
    asked = [child for child in children if child.failure is None]
    seeds = [derive_seed(*key, attacker.role, child.path) for child in asked]
    seen = [TextConversation(int(child.path.partition(".")[0]), child.texts) for child in asked]
    replies = dict(zip(map(id, asked), attacker.probe(seen, seeds), strict=True))
    for child in asked:
        failure = replies[id(child)].failure
        child.failure = None if failure is None else f"attacker {failure}"
    return [replies[id(child)].text if id(child) in replies else "" for child in children]


def ask_target(
    target: ChatAgent,
    reader: ConversationAgent,
    children: Sequence[OpenConversation],
    key: tuple[SeedPart, ...],
) -> None:
    """Ask a chat model for all responses of a level at once, and add them to the conversations.

    Where a response failed the conversation has ended: what is said after it has no response and
    no score, so that nothing is learnt from it.

    Parameters
    ----------
    reader : ConversationAgent
        In whose tokens the attacker's side reads.
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


def in_tokens_of(reader: ConversationAgent, texts: Sequence[str]) -> Generation:
    """Turns as a model would have had to say them; the probabilities of who did are NaN.

    A turn is cut where it would fill half of the model's window.
    """
    longest = reader.language_model.context_window // 2
    rows = [reader.say(text)[:longest] for text in texts]
    ids_BT, mask_BT = pad_right(rows, torch.device("cpu"))
    return Generation(ids_BT, mask_BT, torch.zeros(ids_BT.shape).masked_fill(mask_BT, math.nan))
