"""Sampling of conversation trees between an attacker and a target, one level at a time.

Shape suffixes: `B` row, `N` node, `T` token, `C` context.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.distributed.team import Team
from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    as_sampler,
    pad_left,
    pad_right,
    require_finite,
)
from nip_astra.language_models.services.reasons import CUT, FAILED_ATTACKER, SKIPPED, is_error
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import REWARD_TERMS, RewardTerm
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.batch import cat_widened
from nip_astra.rollouts.messages import Turn, calls_of_plain, plain_calls
from nip_astra.rollouts.prompts import columns_of
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.samplers.executor import PartCall, WorkerResult, choose_executor, cut_rollout
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import (
    ChatAgent,
    ChatReply,
    TextAttacker,
    TextConversation,
)
from nip_astra.scorers.base import Exchange, Ratings, Scorer
from nip_astra.utils.seeding import SeedPart, derive_seed, uniform_rows

Value = TypeVar("Value")

GLUE_TOKENS = 32
"""Allowance for a chat template's tokens around a turn."""
_READ_PROBES = "score probes"
MAX_PROBES = 1_000_000
"""Limit per iteration, beyond which records, scores and samples take some GiB."""
RewardTermParameters = polymorphic(REWARD_TERMS.get, RewardTerm.Parameters)


class RewardParameters(SubParameters):
    """Weights of the reward of a node (arXiv:2407.09447, section 3.2)."""

    w_response: float = Field(default=1.0, ge=0)
    """Weight of the response's score. Larger seeks failures more."""
    w_combined: float = Field(default=0.5, ge=0)
    """Weight of the score of probe and response together."""
    w_likelihood: float = Field(default=0.1, ge=0)
    """Reward lost per nat of the probe's mean negative log-likelihood per token. Larger keeps
    probes closer to ordinary conversation."""
    likelihood_model: Literal["target", "reference"] = "reference"
    """Model of a probe's likelihood: the target, as in the paper, or the reference, which is the
    attacker before training and represents ordinary conversation."""
    terms: list[RewardTermParameters] = []  # type: ignore[valid-type]
    """Additional reward terms in training, for instance for novelty; evaluations exclude them,
    since they depend on earlier findings."""


class TreeShape(NamedTuple):
    """Size of a tree, and the key of its randomness."""

    tree_width: int
    tree_depth: int
    key: tuple[SeedPart, ...]


class TreeSampler:
    """Samples conversations of attacker and target and rates every node.

    Two generation calls per level, whatever the number of episodes and branches. Randomness depends
    on `key`, the episode and the place in its tree only.

    Parameters
    ----------
    max_cache_bytes : int, optional
        Memory for the keys and values of both models. A larger rollout is run in more parts; an
        episode is never divided.
    num_parts : int
        Parts into which a rollout of small models on the CPU is split, to run at once.
    asks_reference : bool
        Whether the reference scores the probes; otherwise figures that need it are NaN.
    """

    def __init__(
        self,
        attacker: ConversationAgent | TextAttacker,
        target: Speaker,
        reference: ConversationAgent,
        scorer: Scorer,
        reward: RewardParameters,
        max_cache_bytes: int | None = None,
        *,
        num_parts: int = 1,
        asks_reference: bool = True,
    ) -> None:
        self.attacker = attacker
        # Defines the tokens and the format in which probes are counted and read.
        self.reader = reference if isinstance(attacker, TextAttacker) else attacker
        self.target = target
        self.reference = reference
        self.scorer = scorer
        self.reward = reward
        self.max_cache_bytes = max_cache_bytes
        self.num_parts = num_parts
        self.asks_reference = asks_reference
        self.team: Team | None = None
        self._check_abilities()
        self._share_tokens = False
        if not isinstance(target, ChatAgent):
            self._share_tokens = self.reader.shares_tokens_with(target)

    def _check_abilities(self) -> None:
        """Raise for models that lack an ability of their role."""
        for agent in (self.attacker, self.target):
            if isinstance(agent, ConversationAgent):
                as_sampler(agent.language_model, role=agent.role)
        if self.asks_reference:
            self.reference.token_scorer(to=_READ_PROBES)
        if self.reward.likelihood_model != "target":
            return
        if isinstance(self.target, ChatAgent):
            raise ConfigurationError(
                f"the chat model {self.target.chat_model.name!r} gives no likelihood of probes. "
                "Set the reward's likelihood_model to reference."
            )
        if not self.target.language_model.can_score_contexts:
            raise ConfigurationError(
                "a vLLM engine shared by attacker and target gives no likelihood of probes. Set "
                "the reward's likelihood_model to reference, or the target's _type to huggingface."
            )
        self.target.token_scorer(to="be the reward's likelihood_model")

    def with_attacker(
        self, attacker: ConversationAgent | TextAttacker, *, asks_reference: bool = True
    ) -> TreeSampler:
        """Return a copy with another attacker, for instance the reference."""
        sampler = TreeSampler(
            attacker,
            self.target,
            self.reference,
            self.scorer,
            self.reward,
            self.max_cache_bytes,
            num_parts=self.num_parts,
            asks_reference=asks_reference,
        )
        if attacker is self.attacker or attacker is self.reference:
            # The other processes have no other attackers.
            sampler.team = self.team
        return sampler

    def cache_bytes(self, prompts: Sequence[str], *, tree_width: int, tree_depth: int) -> int:
        """Return the maximum memory of the keys and values of one tree per prompt, bytes.

        Assumes the longest prompt and turns of full length.
        """
        total = 0
        both = self.reader.sampling.max_new_tokens
        agents = [] if isinstance(self.attacker, TextAttacker) else [self.attacker]
        if isinstance(self.target, ChatAgent):
            both += self.target.max_tokens
        else:
            both += self.target.sampling.max_new_tokens
            agents.append(self.target)
        for agent in agents:
            # The longest prompt has the longest context: what is around it is the same for all.
            longest = max(agent.conversation_format.encode_all(prompts), key=len, default=None)
            opening = 0
            if longest is not None:
                (context,) = agent.contexts([agent.opening_turns(longest)])
                opening = len(context)
            num_tokens = opening + num_probes_of(tree_width, tree_depth) * (both + GLUE_TOKENS)
            total += len(prompts) * num_tokens * agent.language_model.cache_bytes_per_token
        return total

    def num_at_once(self, prompts: Sequence[str], *, tree_width: int, tree_depth: int) -> int:
        """Return the number of trees that fit `max_cache_bytes`; all without a limit."""
        if not prompts:
            raise ConfigurationError("a rollout has no opening prompt. Give at least one.")
        limit = self.max_cache_bytes
        if limit is None:
            return len(prompts)
        needed = self.cache_bytes(prompts, tree_width=tree_width, tree_depth=tree_depth)
        per_tree = needed // len(prompts)
        if per_tree > limit:
            raise ConfigurationError(
                f"a tree of width {tree_width} and depth {tree_depth} needs "
                f"{per_tree / 2**30:.3g} GiB of keys and values, above {limit / 2**30:.3g}. Raise "
                "max_rollout_gib, or lower tree_width, tree_depth or max_new_tokens."
            )
        return limit // max(per_tree, 1)

    def sample(
        self,
        prompts: Sequence[str],
        *,
        tree_width: int,
        tree_depth: int,
        key: tuple[SeedPart, ...],
        first_episode: int = 0,
    ) -> RolloutTree:
        """Sample one tree from each opening prompt, and rate it.

        Parameters
        ----------
        tree_width, tree_depth : int
            Probes at every point of a conversation, and on a path from the opening to a leaf.
        key : tuple
            Names the randomness, for instance `(seed, "train", iteration)`.
        first_episode : int
            Number of the first prompt's episode within `key`.
        """
        shape = TreeShape(tree_width, tree_depth, key)
        tree = self._begin(prompts, shape, first_episode)()
        self.rate(tree)
        return tree

    def begin(
        self, prompts: Sequence[str], *, tree_width: int, tree_depth: int, key: tuple[SeedPart, ...]
    ) -> Callable[[], RolloutTree]:
        """Start trees with the current weights; return a function that waits for them.

        Actors run them; without actors they are run before this returns. They are not rated.
        """
        return self._begin(prompts, TreeShape(tree_width, tree_depth, key), 0)

    def _begin(
        self, prompts: Sequence[str], shape: TreeShape, first_episode: int
    ) -> Callable[[], RolloutTree]:
        size = {"tree_width": shape.tree_width, "tree_depth": shape.tree_depth}
        at_once = self.num_at_once(prompts, **size)
        num_nodes = len(prompts) * num_probes_of(shape.tree_width, shape.tree_depth)
        team = self.team if self._can_use_team() else None
        parts = cut_rollout(
            self._agents,
            len(prompts),
            num_nodes,
            min(self.num_parts, at_once),
            is_team=team is not None,
        )
        # All parts may be in memory together.
        most = max(at_once // len(parts), 1)
        pieces = [
            range(start, min(start + most, part.stop))
            for part in parts
            for start in range(part.start, part.stop, most)
        ]
        calls = [
            self._part_call(prompts[piece.start : piece.stop], shape, first_episode + piece.start)
            for piece in pieces
        ]
        executor = choose_executor(calls, team=team, max_processes=len(parts))
        finish = executor.begin(calls)
        return lambda: put_together(finish())

    def _can_use_team(self) -> bool:
        return (
            type(self) is TreeSampler
            and self.team is not None
            and self.team.can_request
            and all(
                type(agent) is ConversationAgent and agent.language_model.is_in_this_process
                for agent in self._agents
            )
        )

    @property
    def _agents(self) -> tuple[ConversationAgent | TextAttacker, Speaker, ConversationAgent]:
        return self.attacker, self.target, self.reference

    def _part_call(
        self, prompts: Sequence[str], shape: TreeShape, first_episode: int
    ) -> PartCall[RolloutTree]:
        """Return a call that samples some episodes of a rollout; its tree is not rated yet."""
        sampler = copy.copy(self)
        # Neither can be sent to another process.
        del sampler.scorer, sampler.team
        return PartCall(
            partial(sampler._play, prompts, shape, first_episode),
            self._agents,
            request={
                "attacker": "reference" if self.attacker is self.reference else "attacker",
                "asks_reference": self.asks_reference,
                "prompts": [str(prompt) for prompt in prompts],
                "shape": [shape.tree_width, shape.tree_depth, list(shape.key)],
                "first_episode": first_episode,
            },
            to_plain=RolloutTree.to_plain,
            from_plain=lambda plain: RolloutTree.from_plain(plain, prompts),
        )

    def requested_part(self, request: Mapping[str, Any]) -> PartCall[RolloutTree]:
        """Return the call that another process of the team requests."""
        attacker = self.reference if request["attacker"] == "reference" else self.attacker
        sampler = self.with_attacker(attacker, asks_reference=request["asks_reference"])
        width, depth, key = request["shape"]
        shape = TreeShape(width, depth, tuple(key))
        return sampler._part_call(request["prompts"], shape, request["first_episode"])

    def _play(self, prompts: Sequence[str], shape: TreeShape, first: int) -> RolloutTree:
        """Sample the trees of episodes from number `first` on, without rating them."""
        growth = _TreeGrowth(self, shape)
        growth.play(prompts, first)
        # Probes of a chat model are as wide as the longest of their level.
        levels = growth.generations
        probe_NT = cat_widened([one.ids_BT for one in levels])
        mask_NT = cat_widened([one.mask_BT for one in levels])
        logprobs_NT = cat_widened([one.logprobs_BT for one in levels])
        reference_NT = torch.full(probe_NT.shape, math.nan)
        if self.asks_reference:
            scorer = self.reference.token_scorer(to=_READ_PROBES)
            contexts = [context for context in growth.contexts for _ in range(shape.tree_width)]
            padded = pad_left(contexts, torch.device("cpu"))
            with torch.no_grad(), growth.timed("reference"):
                reference_NT = scorer.logprobs(*padded, probe_NT, mask_NT).cpu()
            _check_logprobs(self.reference, reference_NT, mask_NT, shape)
        if self.reward.likelihood_model == "reference":
            nll_N = mean_nll(reference_NT, _mask_texts(mask_NT, growth.probes))
        else:
            nll_N = torch.cat(growth.target_nll)
        nodes = TensorDict(
            {
                "parent": torch.tensor(growth.parent),
                "depth": torch.tensor(growth.depth),
                "episode": torch.tensor(growth.episode),
                "probe": probe_NT,
                "probe_mask": mask_NT,
                "probe_logprobs": logprobs_NT,
                "reference_logprobs": reference_NT,
                "probe_nll": nll_N,
                "is_empty": torch.tensor([not probe.text for probe in growth.probes]),
            },
            batch_size=[len(growth.probes)],
        )
        if isinstance(self.target, ChatAgent):
            nodes["is_refused"] = torch.tensor(growth.are_refused)
        return RolloutTree(
            nodes,
            shape.tree_width,
            list(prompts),
            [probe.text for probe in growth.probes],
            growth.responses,
            growth.contexts,
            num_unique_tokens={
                role: build_trie(sequences).num_tokens
                for role, sequences in growth.read.items()
                if sequences
            },
            seconds=growth.seconds,
            response_failures=growth.failures if any(growth.failures) else [],
            probe_reasonings=_if_any([probe.reasoning for probe in growth.probes]),
            response_reasonings=_if_any(growth.reasonings),
            response_calls=_if_any(growth.calls),
            num_reasoning_tokens=_if_any(
                [probe.num_reasoning_ids or None for probe in growth.probes]
            ),
        )

    def rate(self, tree: RolloutTree) -> None:
        """Add scores and rewards, with one call of the scorer for all nodes."""
        started = time.perf_counter()
        response, combined = rate_nodes(self.scorer, tree)
        tree.seconds["scorer"] = time.perf_counter() - started
        nodes = tree.nodes
        likelihood_agent = getattr(self, self.reward.likelihood_model)
        nodes["response_score"] = response.scores_N
        nodes["combined_score"] = combined.scores_N
        nodes["is_error"] = response.is_error_N | combined.is_error_N
        reward_N = ast_reward(
            response.scores_N,
            combined.scores_N,
            nodes["probe_nll"],
            nodes["is_empty"],
            w_response=self.reward.w_response,
            w_combined=self.reward.w_combined,
            w_likelihood=self.reward.w_likelihood,
            empty_nll=math.log(len(likelihood_agent.language_model.tokenizer)),
        )
        # Nothing is learned from a failed conversation, not even how likely its probes are.
        is_failed_N = torch.tensor([one is not None for one in tree.failures_of_nodes()])
        nodes["reward"] = reward_N.masked_fill(is_failed_N, math.nan)


def _mask_texts(mask_NT: Tensor, probes: Sequence[Turn]) -> Tensor:
    """Return the mask of the tokens that the target reads: without the probe's reasoning."""
    num_reasoning_N = torch.tensor([probe.num_reasoning_ids for probe in probes])
    return mask_NT & (torch.arange(mask_NT.shape[1]) >= num_reasoning_N[:, None])


def _if_any(values: list[Value | None]) -> list[Value | None]:
    """Return the list; empty without any value."""
    return values if any(value is not None for value in values) else []


# ---- growing a tree


@dataclass
class _OpenConversation:
    """A path of the tree, as read by each model; `target_turns` is empty if it reads texts.

    `failure` is the reason why the conversation ended early; `reasoning` and `calls` are those of
    its last response.
    """

    path: str
    episode: int
    node: int
    attacker_turns: list[Turn]
    target_turns: list[Turn]
    texts: list[str]
    failure: str | None = None
    is_refused: bool = False
    reasoning: str | None = None
    calls: list[list[Any]] | None = None


class _TreeGrowth:
    """Grows trees level by level, two generation calls for all of them; collects node columns."""

    def __init__(self, sampler: TreeSampler, shape: TreeShape) -> None:
        self.attacker, self.target, self.reader = sampler.attacker, sampler.target, sampler.reader
        self.shape = shape
        self._share_tokens = sampler._share_tokens
        self._scores_likelihood = sampler.reward.likelihood_model == "target"
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.episode: list[int] = []
        self.contexts: list[list[int]] = []
        self.probes: list[Turn] = []
        self.responses: list[str] = []
        self.reasonings: list[str | None] = []
        self.calls: list[list[list[Any]] | None] = []
        self.failures: list[str | None] = []
        self.are_refused: list[bool] = []
        self.generations: list[Generation] = []
        self.target_nll: list[Tensor] = []
        self.read: dict[str, list[list[int]]] = {"attacker": [], "target": []}
        self.seconds: dict[str, float] = {}
        # Agents that read texts have no session.
        self._attacker_session: GenerationSession | None = None
        if not isinstance(self.attacker, TextAttacker):
            self._attacker_session = self.attacker.token_sampler.open_session()
        self._target_session: GenerationSession | None = None
        if not isinstance(self.target, ChatAgent):
            self._target_session = self.target.token_sampler.open_session()

    def play(self, prompts: Sequence[str], first: int) -> None:
        """Grow one tree from each opening prompt, the first being that of episode `first`."""
        read = self.reader.conversation_format.encode_all(prompts)
        openings: list[list[Turn]] = [[] for _ in prompts]
        if not isinstance(self.target, ChatAgent):
            openings = [
                [Turn("assistant", prompt, ids=ids)]
                for prompt, ids in zip(
                    prompts, self.target.conversation_format.encode_all(prompts), strict=True
                )
            ]
        parents = [
            _OpenConversation(
                path=str(first + episode),
                episode=episode,
                node=-1,
                attacker_turns=[Turn("user", prompt, ids=read[episode])],
                target_turns=openings[episode],
                texts=[prompt],
            )
            for episode, prompt in enumerate(prompts)
        ]
        for depth in range(self.shape.tree_depth):
            parents = self._grow(parents, depth)
        if self._attacker_session is not None:
            assert isinstance(self.attacker, ConversationAgent)
            with self.timed("attacker"):
                self.generations = self._attacker_session.settle(self.generations)
            for one in self.generations:
                _check_logprobs(self.attacker, one.logprobs_BT, one.mask_BT, self.shape)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to a part's seconds."""
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.seconds[part] = self.seconds.get(part, 0.0) + spent

    def _grow(self, parents: list[_OpenConversation], depth: int) -> list[_OpenConversation]:
        """Add probes and responses to every open conversation, in one batch each."""
        contexts = self.reader.contexts([parent.attacker_turns for parent in parents])
        width, start = self.shape.tree_width, len(self.probes)
        children = [
            _OpenConversation(
                f"{parent.path}.{branch}",
                parent.episode,
                start + index * width + branch,
                parent.attacker_turns,
                parent.target_turns,
                parent.texts,
                None if parent.failure is None else SKIPPED,
            )
            for index, parent in enumerate(parents)
            for branch in range(width)
        ]
        probes, turns = self._probe(contexts, children, depth)
        for child, probe in zip(children, turns, strict=True):
            child.attacker_turns = [*child.attacker_turns, probe]
            child.texts = [*child.texts, probe.text]
            if probe.is_missing and child.failure is None:
                child.failure = f"{FAILED_ATTACKER}{CUT}"
        if isinstance(self.target, ChatAgent):
            with self.timed("target"):
                self._reply_in_text(self.target, children)
        else:
            self._reply_in_tokens(self.target, children)
        self.parent += [parent.node for parent in parents for _ in range(width)]
        self.depth += [depth] * len(children)
        self.episode += [child.episode for child in children]
        self.responses += [child.texts[-1] for child in children]
        self.reasonings += [child.reasoning for child in children]
        self.calls += [child.calls for child in children]
        self.failures += [child.failure for child in children]
        self.are_refused += [child.is_refused for child in children]
        self.contexts += contexts
        self.probes += turns
        self.generations.append(probes)
        return children

    def _probe(
        self, contexts: list[list[int]], children: list[_OpenConversation], depth: int
    ) -> tuple[Generation, list[Turn]]:
        """Return the probes of a level, as sampled and as turns."""
        if isinstance(self.attacker, TextAttacker):
            with self.timed("attacker"):
                replies = self._text_probes(self.attacker, children)
            probes = self._tokenized([reply.text for reply in replies])
            turns = self.reader.read_turns(probes)
            return probes, [
                replace(turn, text=reply.text, reasoning=reply.reasoning, is_missing=False)
                for reply, turn in zip(replies, turns, strict=True)
            ]
        session = self._attacker_session
        assert session is not None
        uniforms = self._uniforms(self.attacker, children)
        with self.timed("attacker"):
            sampling = self.attacker.sampling
            probes = session.generate(
                contexts, self.shape.tree_width, uniforms, sampling
            ).generation
        _check_logprobs(self.attacker, probes.logprobs_BT, probes.mask_BT, self.shape)
        self._note("attacker", contexts, probes)
        if depth + 1 == self.shape.tree_depth:
            # Free its keys and values for those of the last responses.
            session.close()
        return probes, self.attacker.read_turns(probes)

    def _text_probes(
        self, attacker: TextAttacker, children: Sequence[_OpenConversation]
    ) -> list[ChatReply]:
        """Return probes of a text attacker; a failure ends its conversation."""
        is_open = [child for child in children if child.failure is None]
        seeds = [derive_seed(*self.shape.key, attacker.role, child.path) for child in is_open]
        read = [
            TextConversation(int(child.path.partition(".")[0]), child.texts) for child in is_open
        ]
        replies = dict(zip(map(id, is_open), attacker.probe(read, seeds), strict=True))
        for child in is_open:
            failure = replies[id(child)].failure
            child.failure = None if failure is None else f"{FAILED_ATTACKER}{failure}"
        return [replies.get(id(child), ChatReply("", SKIPPED)) for child in children]

    def _tokenized(self, texts: Sequence[str]) -> Generation:
        """Return turns in the reader's tokens, at most half its window, with NaN logprobs."""
        longest = self.reader.language_model.context_window // 2
        rows = [self.reader.encode_turn(text)[:longest] for text in texts]
        ids_BT, mask_BT = pad_right(rows, torch.device("cpu"))
        return Generation(ids_BT, mask_BT, torch.zeros(ids_BT.shape).masked_fill(mask_BT, math.nan))

    def _reply_in_text(self, target: ChatAgent, children: Sequence[_OpenConversation]) -> None:
        """Add a chat model's responses; after a failure nothing is requested or learned from."""
        is_open = [child for child in children if child.failure is None]
        seeds = [derive_seed(*self.shape.key, target.role, child.path) for child in is_open]
        replies = target.reply([child.texts for child in is_open], seeds)
        by_child = dict(zip(map(id, is_open), replies, strict=True))
        for child in children:
            reply = by_child.get(id(child), ChatReply("", child.failure))
            child.failure, child.is_refused = reply.failure, reply.is_refused
            ids = self.reader.heard_ids(reply.text)
            child.attacker_turns = [*child.attacker_turns, Turn("user", reply.text, ids=ids)]
            child.texts = [*child.texts, reply.text]
            child.reasoning, child.calls = reply.reasoning, plain_calls(reply.calls)

    def _reply_in_tokens(
        self, target: ConversationAgent, children: Sequence[_OpenConversation]
    ) -> None:
        """Add a language model's responses."""
        for child in children:
            ids, text = child.attacker_turns[-1].ids_without_reasoning, child.texts[-1]
            read = target.heard_ids(text, ids if self._share_tokens else None)
            child.target_turns = [*child.target_turns, Turn("user", text, ids=read)]
        responses = target.read_turns(self._respond(target, children))
        for child, response in zip(children, responses, strict=True):
            text, ids = response.text, response.ids_without_reasoning
            read = self.reader.heard_ids(text, ids if self._share_tokens else None)
            child.target_turns = [*child.target_turns, response]
            child.attacker_turns = [*child.attacker_turns, Turn("user", text, ids=read)]
            if child.failure is None:
                child.reasoning, child.calls = response.reasoning, plain_calls(response.calls)
                child.failure = CUT if response.is_missing else None
            child.texts = [*child.texts, text if child.failure is None else ""]

    def _respond(
        self,
        target: ConversationAgent,
        children: Sequence[_OpenConversation],
    ) -> Generation:
        """Return responses, and from the same forward pass the likelihood of the probes."""
        assert self._target_session is not None
        conversations = [child.target_turns for child in children]
        contexts = target.contexts(conversations)
        spans = None
        if self._scores_likelihood:
            spans = [
                target.conversation_format.last_turn_span(turns, context)
                for turns, context in zip(conversations, contexts, strict=True)
            ]
        uniforms = self._uniforms(target, children)
        with self.timed("target"):
            answered = self._target_session.generate(
                contexts,
                1,
                uniforms,
                target.sampling,
                branching=self.shape.tree_width,
                spans=spans,
            )
        if spans is not None and answered.span_logprobs_CT is not None:
            lengths_C = torch.tensor([stop - start for start, stop in spans])
            mask_CT = torch.arange(answered.span_logprobs_CT.shape[1]) < lengths_C[:, None]
            _check_logprobs(target, answered.span_logprobs_CT, mask_CT, self.shape)
            self.target_nll.append(mean_nll(answered.span_logprobs_CT, mask_CT))
        replies = answered.generation
        _check_logprobs(target, replies.logprobs_BT, replies.mask_BT, self.shape)
        self._note("target", contexts, replies)
        return replies

    def _uniforms(self, agent: ConversationAgent, children: Sequence[_OpenConversation]) -> Tensor:
        """Return random numbers for each child, which depend only on its position in the tree."""
        keys = [(*self.shape.key, agent.role, child.path) for child in children]
        return uniform_rows(keys, agent.sampling.max_new_tokens)

    def _note(self, role: str, contexts: Sequence[Sequence[int]], generation: Generation) -> None:
        """Record the tokens that a model read: contexts, and turns except their last token."""
        rows_per_context = len(generation.ids_BT) // len(contexts)
        lengths = generation.mask_BT.sum(dim=1).tolist()
        ids = generation.ids_BT.tolist()
        self.read[role] += [
            [*contexts[row // rows_per_context], *ids_T[: max(length - 1, 0)]]
            for row, (ids_T, length) in enumerate(zip(ids, lengths, strict=True))
        ]


def _check_logprobs(
    agent: ConversationAgent, logprobs_NT: Tensor, mask_NT: Tensor, shape: TreeShape
) -> None:
    """Raise for log-probabilities of an agent whose logits overflowed."""
    during = f"the rollout {' '.join(map(str, shape.key))}"
    require_finite(logprobs_NT, mask_NT, role=agent.role, model=agent.language_model, during=during)


# ---- parts, checks and ratings


def put_together(results: Sequence[WorkerResult[RolloutTree]]) -> RolloutTree:
    """Merge the parts run by several processes into one tree, in order.

    Its seconds are those of the slowest process.
    """
    parts = [part for result in results for part in result.parts]
    if len(parts) == 1:
        return parts[0]
    tree = merge_trees(parts)
    tree.seconds = {
        name: max(sum(part.seconds[name] for part in result.parts) for result in results)
        for name in tree.seconds
    }
    return tree


def rate_nodes(scorer: Scorer, tree: RolloutTree) -> tuple[Ratings, Ratings]:
    """Rate every response, and every probe and response together, in one call.

    The score of a failed response is NaN, and an error if a service failed; scores after it are
    NaN.
    """
    failures = tree.failures_of_nodes()
    there = [node for node, failure in enumerate(failures) if failure is None]
    exchanges, has_both = _exchanges(scorer, tree, there)
    rated = scorer.rate(exchanges) if exchanges else Ratings(torch.zeros(0), torch.zeros(0) > 0)
    is_error_N = torch.tensor([is_error(failure) for failure in failures])
    if len(there) == len(failures) and has_both:
        return rated, rated
    found = []
    for number in range(1 if has_both else 2):
        part = slice(number * len(there), (number + 1) * len(there))
        scores_N = torch.full((len(failures),), math.nan)
        errors_N = is_error_N.clone()
        scores_N[there], errors_N[there] = rated.scores_N[part], rated.is_error_N[part]
        found.append(Ratings(scores_N, errors_N))
    return found[0], found[-1]


def _exchanges(scorer: Scorer, tree: RolloutTree, there: list[int]) -> tuple[list[Exchange], bool]:
    """Return the exchanges of some nodes: responses, then both together unless they are equal."""
    reasonings = tree.response_reasonings or tree.blanks()
    calls = tree.response_calls or tree.blanks()
    if not scorer.reads_history:
        responses = [Exchange(tree.responses[node], reasoning=reasonings[node]) for node in there]
        both = [
            Exchange(f"{tree.probes[node]} {tree.responses[node]}", reasoning=reasonings[node])
            for node in there
        ]
        return [*responses, *both], False
    # A scorer that reads the conversation sees the probe when it rates the response.
    histories: list[tuple[Turn, ...]] = []
    places = zip(tree.nodes["parent"].tolist(), tree.nodes["episode"].tolist(), strict=True)
    for (parent, episode), probe in zip(places, tree.probes, strict=True):
        if parent < 0:
            before: tuple[Turn, ...] = (Turn("assistant", tree.prompts[episode]),)
        else:
            answer = Turn("assistant", tree.responses[parent], calls=calls_of_plain(calls[parent]))
            before = (*histories[parent], answer)
        histories.append((*before, Turn("user", probe)))
    episodes = tree.nodes["episode"].tolist()
    return [
        Exchange(
            tree.responses[node],
            histories[node],
            columns=columns_of(tree.prompts[episodes[node]]),
            reasoning=reasonings[node],
            calls=calls_of_plain(calls[node]),
        )
        for node in there
    ], True


def num_probes_of(tree_width: int, tree_depth: int) -> int:
    """Return the number of probes of a tree, or a number above `MAX_PROBES` if there are more."""
    total, level = 0, 1
    for _ in range(min(tree_depth, MAX_PROBES + 1)):
        level *= tree_width
        total += level
        if total > MAX_PROBES:
            break
    return total
