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
        agents: list[ConversationAgent] = []
        if isinstance(self.attacker, ConversationAgent):
            agents.append(self.attacker)
        if isinstance(self.target, ChatAgent):
            target_tokens = self.target.max_tokens
        else:
            target_tokens = self.target.sampling.max_new_tokens
            agents.append(self.target)
        probe_tokens = self.reader.sampling.max_new_tokens
        # Both models read the whole conversation.
        tokens_per_node = probe_tokens + target_tokens + GLUE_TOKENS
        num_nodes = count_probes(tree_width, tree_depth)
        total = 0
        for agent in agents:
            # The longest prompt has the longest context: what is around it is the same for all.
            longest = max(agent.conversation_format.encode_all(prompts), key=len, default=None)
            num_opening_tokens = 0
            if longest is not None:
                (context,) = agent.contexts([agent.opening_turns(longest)])
                num_opening_tokens = len(context)
            tokens_per_tree = num_opening_tokens + num_nodes * tokens_per_node
            bytes_per_token = agent.language_model.cache_bytes_per_token
            total += len(prompts) * tokens_per_tree * bytes_per_token
        return total

    def num_at_once(self, prompts: Sequence[str], *, tree_width: int, tree_depth: int) -> int:
        """Return the number of trees that fit `max_cache_bytes`; all without a limit."""
        if not prompts:
            raise ConfigurationError("a rollout has no opening prompt. Give at least one.")
        limit = self.max_cache_bytes
        if limit is None:
            return len(prompts)
        needed = self.cache_bytes(prompts, tree_width=tree_width, tree_depth=tree_depth)
        bytes_per_tree = needed // len(prompts)
        if bytes_per_tree > limit:
            raise ConfigurationError(
                f"a tree of width {tree_width} and depth {tree_depth} needs "
                f"{bytes_per_tree / 2**30:.3g} GiB of keys and values, above {limit / 2**30:.3g}. "
                "Raise max_rollout_gib, or lower tree_width, tree_depth or max_new_tokens."
            )
        return limit // max(bytes_per_tree, 1)

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
        at_once = self.num_at_once(
            prompts, tree_width=shape.tree_width, tree_depth=shape.tree_depth
        )
        team = self.team if self._can_use_team() else None
        parts = cut_rollout(
            self._agents,
            num_episodes=len(prompts),
            num_nodes=len(prompts) * count_probes(shape.tree_width, shape.tree_depth),
            num_parts=min(self.num_parts, at_once),
            is_team=team is not None,
        )
        # All parts may be in memory together.
        max_episodes = max(at_once // len(parts), 1)
        calls = []
        for part in parts:
            for start in range(part.start, part.stop, max_episodes):
                stop = min(start + max_episodes, part.stop)
                calls.append(self._part_call(prompts[start:stop], shape, first_episode + start))
        executor = choose_executor(calls, team=team, max_processes=len(parts))
        finish = executor.begin(calls)
        return lambda: merge_results(finish())

    def _can_use_team(self) -> bool:
        """Return whether the team's processes can sample parts of this sampler's rollouts."""
        if type(self) is not TreeSampler or self.team is None or not self.team.can_request:
            return False
        return all(
            type(agent) is ConversationAgent and agent.language_model.is_in_this_process
            for agent in self._agents
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

    def _play(self, prompts: Sequence[str], shape: TreeShape, first_episode: int) -> RolloutTree:
        """Sample the trees of episodes from a number on, without rating them."""
        growth = _TreeGrowth(self, shape)
        growth.play(prompts, first_episode)
        # Probes of a chat model are as wide as the longest of their level.
        levels = growth.generations
        probe_NT = cat_widened([level.ids_BT for level in levels])
        mask_NT = cat_widened([level.mask_BT for level in levels])
        logprobs_NT = cat_widened([level.logprobs_BT for level in levels])
        reference_NT = torch.full(probe_NT.shape, math.nan)
        if self.asks_reference:
            scorer = self.reference.token_scorer(to=_READ_PROBES)
            contexts = [context for context in growth.contexts for _ in range(shape.tree_width)]
            context_NC, context_mask_NC = pad_left(contexts, torch.device("cpu"))
            with torch.no_grad(), growth.timed("reference"):
                reference_NT = scorer.logprobs(context_NC, context_mask_NC, probe_NT, mask_NT).cpu()
            _check_logprobs(self.reference, reference_NT, mask_NT, shape)
        probes = growth.probes
        if self.reward.likelihood_model == "reference":
            nll_N = mean_nll(reference_NT, _mask_texts(mask_NT, probes))
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
                "is_empty": torch.tensor([not probe.text for probe in probes]),
            },
            batch_size=[len(probes)],
        )
        if isinstance(self.target, ChatAgent):
            nodes["is_refused"] = torch.tensor(growth.are_refused)
        num_unique_tokens = {}
        for role, sequences in growth.read.items():
            if sequences:
                num_unique_tokens[role] = build_trie(sequences).num_tokens
        return RolloutTree(
            nodes,
            shape.tree_width,
            list(prompts),
            [probe.text for probe in probes],
            growth.responses,
            growth.contexts,
            num_unique_tokens=num_unique_tokens,
            seconds=growth.seconds,
            response_failures=growth.failures if any(growth.failures) else [],
            probe_reasonings=_empty_if_all_missing([probe.reasoning for probe in probes]),
            response_reasonings=_empty_if_all_missing(growth.reasonings),
            response_calls=_empty_if_all_missing(growth.calls),
            num_reasoning_tokens=_empty_if_all_missing(
                [probe.num_reasoning_ids or None for probe in probes]
            ),
        )

    def rate(self, tree: RolloutTree) -> None:
        """Add scores and rewards, with one call of the scorer for all nodes."""
        started = time.perf_counter()
        response, combined = rate_nodes(self.scorer, tree)
        tree.seconds["scorer"] = time.perf_counter() - started
        nodes = tree.nodes
        nodes["response_score"] = response.scores_N
        nodes["combined_score"] = combined.scores_N
        nodes["is_error"] = response.is_error_N | combined.is_error_N
        likelihood_agent = self.reference
        if self.reward.likelihood_model == "target":
            assert isinstance(self.target, ConversationAgent), "checked"
            likelihood_agent = self.target
        # A probe without tokens counts as one that is drawn uniformly from the vocabulary.
        vocab_size = len(likelihood_agent.language_model.tokenizer)
        reward_N = ast_reward(
            response.scores_N,
            combined.scores_N,
            nodes["probe_nll"],
            nodes["is_empty"],
            w_response=self.reward.w_response,
            w_combined=self.reward.w_combined,
            w_likelihood=self.reward.w_likelihood,
            empty_nll=math.log(vocab_size),
        )
        # Nothing is learned from a failed conversation, not even how likely its probes are.
        is_failed_N = torch.tensor([failure is not None for failure in tree.failures_of_nodes()])
        nodes["reward"] = reward_N.masked_fill(is_failed_N, math.nan)


def _mask_texts(mask_NT: Tensor, probes: Sequence[Turn]) -> Tensor:
    """Return the mask of the tokens that the target reads: without the probe's reasoning."""
    num_reasoning_N = torch.tensor([probe.num_reasoning_ids for probe in probes])
    return mask_NT & (torch.arange(mask_NT.shape[1]) >= num_reasoning_N[:, None])


def _empty_if_all_missing(column: list[Value | None]) -> list[Value | None]:
    """Return a column; empty without any value."""
    return column if any(value is not None for value in column) else []


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
        self.attacker = sampler.attacker
        self.target = sampler.target
        self.reader = sampler.reader
        self.shape = shape
        self._share_tokens = sampler._share_tokens
        self._scores_likelihood = sampler.reward.likelihood_model == "target"
        # Columns of the tree, one value per node.
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.episode: list[int] = []
        self.probes: list[Turn] = []
        self.responses: list[str] = []
        self.reasonings: list[str | None] = []
        self.calls: list[list[list[Any]] | None] = []
        self.failures: list[str | None] = []
        self.are_refused: list[bool] = []
        # One context per parent, one batch per level.
        self.contexts: list[list[int]] = []
        self.generations: list[Generation] = []
        self.target_nll: list[Tensor] = []
        self.read: dict[str, list[list[int]]] = {"attacker": [], "target": []}
        """Token sequences that each model has read, for the count of unique ones."""
        self.seconds: dict[str, float] = {}
        # Agents that read texts have no session.
        self._attacker_session: GenerationSession | None = None
        if not isinstance(self.attacker, TextAttacker):
            self._attacker_session = self.attacker.token_sampler.open_session()
        self._target_session: GenerationSession | None = None
        if not isinstance(self.target, ChatAgent):
            self._target_session = self.target.token_sampler.open_session()

    def play(self, prompts: Sequence[str], first_episode: int) -> None:
        """Grow one tree from each opening prompt, numbered from `first_episode` on."""
        reader_ids = self.reader.conversation_format.encode_all(prompts)
        target_openings: list[list[Turn]] = [[] for _ in prompts]
        if not isinstance(self.target, ChatAgent):
            target_ids = self.target.conversation_format.encode_all(prompts)
            for opening, prompt, ids in zip(target_openings, prompts, target_ids, strict=True):
                # The target speaks first, so that its next message is a response.
                opening.append(Turn("assistant", prompt, ids=ids))
        parents = []
        for episode, prompt in enumerate(prompts):
            parents.append(
                _OpenConversation(
                    path=str(first_episode + episode),
                    episode=episode,
                    node=-1,
                    attacker_turns=[Turn("user", prompt, ids=reader_ids[episode])],
                    target_turns=target_openings[episode],
                    texts=[prompt],
                )
            )
        for depth in range(self.shape.tree_depth):
            parents = self._grow(parents, depth)
        if self._attacker_session is not None:
            assert isinstance(self.attacker, ConversationAgent)
            with self.timed("attacker"):
                self.generations = self._attacker_session.settle(self.generations)
            for level in self.generations:
                _check_logprobs(self.attacker, level.logprobs_BT, level.mask_BT, self.shape)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to a part's seconds."""
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self.seconds[part] = self.seconds.get(part, 0.0) + elapsed

    def _grow(self, parents: list[_OpenConversation], depth: int) -> list[_OpenConversation]:
        """Add probes and responses to every open conversation, in one batch each."""
        contexts = self.reader.contexts([parent.attacker_turns for parent in parents])
        children = self._branch(parents)
        generation, probes = self._probe(contexts, children, depth)
        for child, probe in zip(children, probes, strict=True):
            child.attacker_turns = [*child.attacker_turns, probe]
            child.texts = [*child.texts, probe.text]
            if probe.is_missing and child.failure is None:
                child.failure = f"{FAILED_ATTACKER}{CUT}"
        if isinstance(self.target, ChatAgent):
            with self.timed("target"):
                self._reply_in_text(self.target, children)
        else:
            self._reply_in_tokens(self.target, children)
        width = self.shape.tree_width
        self.parent += [parent.node for parent in parents for _ in range(width)]
        self.depth += [depth] * len(children)
        self.episode += [child.episode for child in children]
        self.responses += [child.texts[-1] for child in children]
        self.reasonings += [child.reasoning for child in children]
        self.calls += [child.calls for child in children]
        self.failures += [child.failure for child in children]
        self.are_refused += [child.is_refused for child in children]
        self.contexts += contexts
        self.probes += probes
        self.generations.append(generation)
        return children

    def _branch(self, parents: Sequence[_OpenConversation]) -> list[_OpenConversation]:
        """Return the children of some conversations, without probes and responses yet."""
        children: list[_OpenConversation] = []
        first_node = len(self.probes)
        for parent in parents:
            # Nothing is requested for a conversation that has failed.
            failure = None if parent.failure is None else SKIPPED
            for branch in range(self.shape.tree_width):
                children.append(
                    _OpenConversation(
                        path=f"{parent.path}.{branch}",
                        episode=parent.episode,
                        node=first_node + len(children),
                        # Replaced, never extended in place: siblings share them.
                        attacker_turns=parent.attacker_turns,
                        target_turns=parent.target_turns,
                        texts=parent.texts,
                        failure=failure,
                    )
                )
        return children

    def _probe(
        self, contexts: list[list[int]], children: list[_OpenConversation], depth: int
    ) -> tuple[Generation, list[Turn]]:
        """Return the probes of a level, as sampled and as turns."""
        if isinstance(self.attacker, TextAttacker):
            with self.timed("attacker"):
                replies = self._request_probes(self.attacker, children)
            generation = self._encode_probes([reply.text for reply in replies])
            turns = []
            for reply, turn in zip(replies, self.reader.read_turns(generation), strict=True):
                # The text as it was received: its tokens may be cut, or decode to another one.
                turns.append(
                    replace(turn, text=reply.text, reasoning=reply.reasoning, is_missing=False)
                )
            return generation, turns
        session = self._attacker_session
        assert session is not None
        uniforms_BT = self._draw_uniforms(self.attacker, children)
        with self.timed("attacker"):
            generation = session.generate(
                contexts, self.shape.tree_width, uniforms_BT, self.attacker.sampling
            ).generation
        _check_logprobs(self.attacker, generation.logprobs_BT, generation.mask_BT, self.shape)
        self._record_read("attacker", contexts, generation)
        if depth + 1 == self.shape.tree_depth:
            # Free its keys and values for those of the last responses.
            session.close()
        return generation, self.attacker.read_turns(generation)

    def _request_probes(
        self, attacker: TextAttacker, children: Sequence[_OpenConversation]
    ) -> list[ChatReply]:
        """Return probes of a text attacker; a failure ends its conversation."""
        open_children = [child for child in children if child.failure is None]
        seeds = []
        conversations = []
        for child in open_children:
            seeds.append(derive_seed(*self.shape.key, attacker.role, child.path))
            episode = int(child.path.partition(".")[0])
            conversations.append(TextConversation(episode, child.texts))
        reply_by_node: dict[int, ChatReply] = {}
        replies = attacker.probe(conversations, seeds)
        for child, reply in zip(open_children, replies, strict=True):
            reply_by_node[child.node] = reply
            if reply.failure is not None:
                child.failure = f"{FAILED_ATTACKER}{reply.failure}"
        return [reply_by_node.get(child.node, ChatReply("", SKIPPED)) for child in children]

    def _encode_probes(self, texts: Sequence[str]) -> Generation:
        """Return turns in the reader's tokens, at most half its window, with NaN logprobs."""
        max_tokens = self.reader.language_model.context_window // 2
        rows = [self.reader.encode_turn(text)[:max_tokens] for text in texts]
        ids_BT, mask_BT = pad_right(rows, torch.device("cpu"))
        logprobs_BT = torch.zeros(ids_BT.shape).masked_fill(mask_BT, math.nan)
        return Generation(ids_BT, mask_BT, logprobs_BT)

    def _reply_in_text(self, target: ChatAgent, children: Sequence[_OpenConversation]) -> None:
        """Add a chat model's responses; after a failure nothing is requested or learned from."""
        open_children = [child for child in children if child.failure is None]
        seeds = [derive_seed(*self.shape.key, target.role, child.path) for child in open_children]
        replies = target.reply([child.texts for child in open_children], seeds)
        reply_by_node = {
            child.node: reply for child, reply in zip(open_children, replies, strict=True)
        }
        for child in children:
            reply = reply_by_node.get(child.node, ChatReply("", child.failure))
            child.failure = reply.failure
            child.is_refused = reply.is_refused
            ids = self.reader.heard_ids(reply.text)
            child.attacker_turns = [*child.attacker_turns, Turn("user", reply.text, ids=ids)]
            child.texts = [*child.texts, reply.text]
            child.reasoning = reply.reasoning
            child.calls = plain_calls(reply.calls)

    def _reply_in_tokens(
        self, target: ConversationAgent, children: Sequence[_OpenConversation]
    ) -> None:
        """Add a language model's responses."""
        for child in children:
            probe = child.attacker_turns[-1]
            text = child.texts[-1]
            # Shared tokens are passed on: encoding the text again could give others.
            shared_ids = probe.ids_without_reasoning if self._share_tokens else None
            ids = target.heard_ids(text, shared_ids)
            child.target_turns = [*child.target_turns, Turn("user", text, ids=ids)]
        responses = target.read_turns(self._respond(target, children))
        for child, response in zip(children, responses, strict=True):
            text = response.text
            shared_ids = response.ids_without_reasoning if self._share_tokens else None
            ids = self.reader.heard_ids(text, shared_ids)
            child.target_turns = [*child.target_turns, response]
            child.attacker_turns = [*child.attacker_turns, Turn("user", text, ids=ids)]
            if child.failure is None:
                child.reasoning = response.reasoning
                child.calls = plain_calls(response.calls)
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
        uniforms_BT = self._draw_uniforms(target, children)
        with self.timed("target"):
            turns = self._target_session.generate(
                contexts,
                1,
                uniforms_BT,
                target.sampling,
                branching=self.shape.tree_width,
                spans=spans,
            )
        span_logprobs_CT = turns.span_logprobs_CT
        if spans is not None and span_logprobs_CT is not None:
            lengths_C = torch.tensor([stop - start for start, stop in spans])
            mask_CT = torch.arange(span_logprobs_CT.shape[1]) < lengths_C[:, None]
            _check_logprobs(target, span_logprobs_CT, mask_CT, self.shape)
            self.target_nll.append(mean_nll(span_logprobs_CT, mask_CT))
        generation = turns.generation
        _check_logprobs(target, generation.logprobs_BT, generation.mask_BT, self.shape)
        self._record_read("target", contexts, generation)
        return generation

    def _draw_uniforms(
        self, agent: ConversationAgent, children: Sequence[_OpenConversation]
    ) -> Tensor:
        """Return random numbers for each child, which depend only on its position in the tree."""
        keys = [(*self.shape.key, agent.role, child.path) for child in children]
        return uniform_rows(keys, agent.sampling.max_new_tokens)

    def _record_read(
        self, role: str, contexts: Sequence[Sequence[int]], generation: Generation
    ) -> None:
        """Record the tokens that a model read: contexts, and turns except their last token."""
        rows_per_context = len(generation.ids_BT) // len(contexts)
        lengths = generation.mask_BT.sum(dim=1).tolist()
        for row, ids in enumerate(generation.ids_BT.tolist()):
            context = contexts[row // rows_per_context]
            num_read = max(lengths[row] - 1, 0)
            self.read[role].append([*context, *ids[:num_read]])


def _check_logprobs(
    agent: ConversationAgent, logprobs_NT: Tensor, mask_NT: Tensor, shape: TreeShape
) -> None:
    """Raise for log-probabilities of an agent whose logits overflowed."""
    during = f"the rollout {' '.join(map(str, shape.key))}"
    require_finite(logprobs_NT, mask_NT, role=agent.role, model=agent.language_model, during=during)


# ---- parts, checks and ratings


def merge_results(results: Sequence[WorkerResult[RolloutTree]]) -> RolloutTree:
    """Merge the parts run by several processes into one tree, in order.

    Its seconds are those of the slowest process.
    """
    parts = [part for result in results for part in result.parts]
    if len(parts) == 1:
        return parts[0]
    tree = merge_trees(parts)
    seconds = {}
    for name in tree.seconds:
        by_process = [sum(part.seconds[name] for part in result.parts) for result in results]
        seconds[name] = max(by_process)
    tree.seconds = seconds
    return tree


def rate_nodes(scorer: Scorer, tree: RolloutTree) -> tuple[Ratings, Ratings]:
    """Rate every response, and every probe and response together, in one call.

    The score of a failed response is NaN, and an error if a service failed; scores after it are
    NaN.
    """
    failures = tree.failures_of_nodes()
    ratable = [node for node, failure in enumerate(failures) if failure is None]
    exchanges, are_both_equal = _build_exchanges(scorer, tree, ratable)
    if exchanges:
        ratings = scorer.rate(exchanges)
    else:
        ratings = Ratings(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    is_error_N = torch.tensor([is_error(failure) for failure in failures])

    def spread(part: slice) -> Ratings:
        """Return the ratings of some exchanges, one per ratable node, at all nodes."""
        scores_N = torch.full((len(failures),), math.nan)
        errors_N = is_error_N.clone()
        scores_N[ratable] = ratings.scores_N[part]
        errors_N[ratable] = ratings.is_error_N[part]
        return Ratings(scores_N, errors_N)

    num_ratable = len(ratable)
    if not are_both_equal:
        return spread(slice(0, num_ratable)), spread(slice(num_ratable, None))
    if num_ratable < len(failures):
        ratings = spread(slice(0, num_ratable))
    return ratings, ratings


def _build_exchanges(
    scorer: Scorer, tree: RolloutTree, nodes: Sequence[int]
) -> tuple[list[Exchange], bool]:
    """Return the exchanges of some nodes, and whether one exchange serves both scores.

    Otherwise all responses come first, then all probes and responses together.
    """
    reasonings = tree.response_reasonings or tree.blanks()
    calls = tree.response_calls or tree.blanks()
    if not scorer.reads_history:
        responses = []
        combined = []
        for node in nodes:
            text = tree.responses[node]
            responses.append(Exchange(text, reasoning=reasonings[node]))
            both_texts = f"{tree.probes[node]} {text}"
            combined.append(Exchange(both_texts, reasoning=reasonings[node]))
        return responses + combined, False
    # A scorer that reads the conversation sees the probe when it rates the response.
    parents = tree.nodes["parent"].tolist()
    episodes = tree.nodes["episode"].tolist()
    histories: list[tuple[Turn, ...]] = []
    for parent, episode, probe in zip(parents, episodes, tree.probes, strict=True):
        if parent < 0:
            before: tuple[Turn, ...] = (Turn("assistant", tree.prompts[episode]),)
        else:
            # Parents precede their children.
            response_calls = calls_of_plain(calls[parent])
            response = Turn("assistant", tree.responses[parent], calls=response_calls)
            before = (*histories[parent], response)
        histories.append((*before, Turn("user", probe)))
    exchanges = []
    for node in nodes:
        exchanges.append(
            Exchange(
                tree.responses[node],
                histories[node],
                columns=columns_of(tree.prompts[episodes[node]]),
                reasoning=reasonings[node],
                calls=calls_of_plain(calls[node]),
            )
        )
    return exchanges, True


def count_probes(tree_width: int, tree_depth: int) -> int:
    """Return the number of probes of a tree, or a number above `MAX_PROBES` if there are more."""
    num_probes = 0
    level_size = 1
    for _ in range(min(tree_depth, MAX_PROBES + 1)):
        level_size *= tree_width
        num_probes += level_size
        if num_probes > MAX_PROBES:
            break
    return num_probes
