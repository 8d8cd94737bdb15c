"""Sample trees of conversations between an attacker and a target, one level at a time.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.distributed.team import Team
from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import Generation, as_sampler, pad_left
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.reward_terms.base import REWARD_TERMS, RewardTerm
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.prompts import columns_of
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.samplers.dialogue import (
    Speakers,
    TreeColumns,
    TreeExpansion,
    TreeShape,
    check_logprobs,
)
from nip_astra.samplers.executor import PartCall, WorkerResult, choose_executor, cut_rollout
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import NOT_ASKED, ChatAgent, TextAttacker
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scorers.base import Exchange, Message, Ratings, Scorer
from nip_astra.utils.seeding import SeedPart

GLUE_TOKENS = 32
"""Allowance for what a chat template puts around a turn."""
_READ_PROBES = "score probes"
MAX_PROBES = 1_000_000
"""Limit per iteration: records, scores and samples of as many take some GiB."""
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
    """Under which model a probe's likelihood is taken: the target, as in the paper, or the
    reference, which is the attacker before training, that is, ordinary conversation."""
    terms: list[RewardTermParameters] = []  # type: ignore[valid-type]
    """What training adds to the reward, for instance for novelty; evaluations leave it out, since
    it depends on what was found before."""


class TreeSampler:
    """Samples conversations of attacker and target and rates every node.

    Two generation calls per level, whatever the number of episodes and branches. Randomness depends
    on `key`, the episode and the place in its tree only.

    Parameters
    ----------
    max_cache_bytes : int, optional
        Memory for the keys and values of both models. A rollout that needs more is run in more
        parts; an episode is never divided.
    num_parts : int
        Parts into which a rollout of small models on the CPU is split, to run at once.
    asks_reference : bool
        Whether the reference scores the probes; otherwise its log-probabilities and all figures
        that need them are NaN.

    Attributes
    ----------
    team : Team or None
        Processes whose trainers have an equal sampler; they run parts while `team.can_request`.
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
        if reward.likelihood_model == "target":
            _check_likelihood(target)
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
        """Refuse models that lack an ability of their role."""
        for agent in (self.attacker, self.target):
            if isinstance(agent, ConversationAgent):
                as_sampler(agent.language_model, role=agent.role)
        if self.asks_reference:
            self.reference.token_scorer(to=_READ_PROBES)
        if self.reward.likelihood_model == "target" and isinstance(self.target, ConversationAgent):
            self.target.token_scorer(to="be the reward's likelihood_model")

    def with_attacker(
        self, attacker: ConversationAgent | TextAttacker, *, asks_reference: bool = True
    ) -> TreeSampler:
        """A copy with another attacker, for instance the reference."""
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
        """Largest memory of the keys and values of one tree per prompt, bytes.

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
            speech = agent.conversation_format
            opening = max(
                (
                    len(agent.contexts([[Turn(agent.role == "target", speech.encode(p))]])[0])
                    for p in prompts
                ),
                default=0,
            )
            num_nodes = sum(tree_width**level for level in range(1, tree_depth + 1))
            num_tokens = opening + num_nodes * (both + GLUE_TOKENS)
            total += len(prompts) * num_tokens * agent.language_model.cache_bytes_per_token
        return total

    def num_at_once(self, prompts: Sequence[str], *, tree_width: int, tree_depth: int) -> int:
        """Number of trees that fit `max_cache_bytes`; all without a limit.

        Raises
        ------
        ConfigurationError
            When not one fits, or there is no prompt.
        """
        if not prompts:
            raise ConfigurationError("a rollout has no opening prompt. Give at least one.")
        limit = self.max_cache_bytes
        if limit is None:
            return len(prompts)
        needed = self.cache_bytes(prompts, tree_width=tree_width, tree_depth=tree_depth)
        per_tree = needed // len(prompts)
        if per_tree > limit:
            raise ConfigurationError(
                f"the keys and values of a tree of width {tree_width} and depth {tree_depth} need "
                f"{per_tree / 2**30:.3g} GiB, above the {limit / 2**30:.3g} of a rollout. Raise "
                "max_rollout_gib of the scenario (max_cache_bytes of a sampler), or lower "
                "tree_width, tree_depth or max_new_tokens."
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
        """Grow one tree from each opening prompt, and rate it.

        Parameters
        ----------
        prompts : Sequence[str]
            Turns of the target's side before the first probe.
        tree_width : int
            Probes at every point of a conversation.
        tree_depth : int
            Probes on a path from the opening to a leaf.
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
        """Start trees with the current weights; the returned function waits for them.

        Actors run them; without actors they run here before this returns. They are not rated.
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
        """A call that samples some episodes of a rollout; its tree is not rated yet."""
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
        """The call that another process of the team requests."""
        attacker = self.reference if request["attacker"] == "reference" else self.attacker
        sampler = self.with_attacker(attacker, asks_reference=request["asks_reference"])
        width, depth, key = request["shape"]
        shape = TreeShape(width, depth, tuple(key))
        return sampler._part_call(request["prompts"], shape, request["first_episode"])

    def _play(self, prompts: Sequence[str], shape: TreeShape, first: int) -> RolloutTree:
        """Grow the trees of episodes from number `first` on; they are not rated."""
        dialogue = TreeExpansion(
            Speakers(self.attacker, self.target, self.reader, self._share_tokens),
            shape,
            scores_likelihood=self.reward.likelihood_model == "target",
        )
        dialogue.play(prompts, first)
        columns = dialogue.columns
        probe_NT, mask_NT, logprobs_NT = self._stack(columns.generations)
        with torch.no_grad(), columns.timed("reference"):
            reference_NT = self._reference_logprobs(columns, probe_NT, mask_NT)
        if self.asks_reference:
            check_logprobs(self.reference, reference_NT, mask_NT, shape)
        if self.reward.likelihood_model == "reference":
            nll_N = mean_nll(reference_NT, mask_NT)
        else:
            nll_N = torch.cat(columns.target_nll)
        nodes = TensorDict(
            {
                "parent": torch.tensor(columns.parent),
                "depth": torch.tensor(columns.depth),
                "episode": torch.tensor(columns.episode),
                "probe": probe_NT,
                "probe_mask": mask_NT,
                "probe_logprobs": logprobs_NT,
                "reference_logprobs": reference_NT,
                "probe_nll": nll_N,
                "is_empty": torch.tensor([not probe for probe in columns.probes]),
            },
            batch_size=[len(columns.probes)],
        )
        if isinstance(self.target, ChatAgent):
            nodes["is_refused"] = torch.tensor(columns.are_refused)
        return RolloutTree(
            nodes,
            shape.tree_width,
            list(prompts),
            columns.probes,
            columns.responses,
            columns.contexts,
            num_unique_tokens={
                role: build_trie(sequences).num_tokens
                for role, sequences in columns.read.items()
                if sequences
            },
            seconds=columns.seconds,
            response_failures=columns.failures if any(columns.failures) else [],
        )

    @staticmethod
    def _stack(generations: list[Generation]) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.cat([generation.ids_BT for generation in generations]),
            torch.cat([generation.mask_BT for generation in generations]),
            torch.cat([generation.logprobs_BT for generation in generations]),
        )

    def _reference_logprobs(
        self, columns: TreeColumns, probe_NT: Tensor, mask_NT: Tensor
    ) -> Tensor:
        if not self.asks_reference:
            return torch.full(probe_NT.shape, math.nan)
        contexts = [
            context
            for context in columns.contexts
            for _ in range(len(columns.probes) // len(columns.contexts))
        ]
        scorer = self.reference.token_scorer(to=_READ_PROBES)
        return scorer.logprobs(*pad_left(contexts, torch.device("cpu")), probe_NT, mask_NT).cpu()

    def rate(self, tree: RolloutTree) -> None:
        """Add scores and rewards, with one call of the scorer for all nodes."""
        started = time.perf_counter()
        response, combined = rate_nodes(self.scorer, tree)
        tree.seconds["scorer"] = time.perf_counter() - started
        nodes = tree.nodes
        likelihood_agent = getattr(self, self.reward.likelihood_model)
        # A score of weight 0 must not make the reward NaN.
        unused = self.reward.w_combined == 0
        nodes["response_score"] = response.scores_N
        nodes["combined_score"] = combined.scores_N
        nodes["is_error"] = response.is_error_N | combined.is_error_N
        nodes["reward"] = ast_reward(
            response.scores_N,
            torch.zeros_like(combined.scores_N) if unused else combined.scores_N,
            nodes["probe_nll"],
            nodes["is_empty"],
            w_response=self.reward.w_response,
            w_combined=self.reward.w_combined,
            w_likelihood=self.reward.w_likelihood,
            empty_nll=math.log(len(likelihood_agent.language_model.tokenizer)),
        )


def put_together(results: Sequence[WorkerResult[RolloutTree]]) -> RolloutTree:
    """One tree of the parts that processes ran, in order.

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


def _check_likelihood(target: Speaker) -> None:
    """Refuse a target that cannot score probes."""
    if isinstance(target, ChatAgent):
        raise ConfigurationError(
            f"the chat model {target.chat_model.name!r} gives no likelihood of probes. Set the "
            "reward's likelihood_model to reference."
        )
    if not target.language_model.can_score_contexts:
        raise ConfigurationError(
            "a vLLM engine with a LoRA adapter that target and attacker share gives no likelihood "
            "of probes. Set the reward's likelihood_model to reference, or give the target another "
            "max_model_len or _type huggingface."
        )


def rate_nodes(scorer: Scorer, tree: RolloutTree) -> tuple[Ratings, Ratings]:
    """Rate every response, and every probe and response together, in one call.

    The score of a failed response is NaN and an error; scores after it are NaN.
    """
    failures = tree.failures_of_nodes()
    there = [node for node, failure in enumerate(failures) if failure is None]
    exchanges, has_both = _exchanges(scorer, tree, there)
    rated = scorer.rate(exchanges) if exchanges else Ratings(torch.zeros(0), torch.zeros(0) > 0)
    is_error_N = torch.tensor([failure not in (None, NOT_ASKED) for failure in failures])
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
    """The exchanges of some nodes: responses, then both together unless they are the same."""
    if not scorer.reads_history:
        responses = [Exchange(tree.responses[node]) for node in there]
        both = [Exchange(f"{tree.probes[node]} {tree.responses[node]}") for node in there]
        return [*responses, *both], False
    # A scorer that reads the conversation sees the probe when it rates the response.
    histories: list[tuple[Message, ...]] = []
    places = zip(tree.nodes["parent"].tolist(), tree.nodes["episode"].tolist(), strict=True)
    for (parent, episode), probe in zip(places, tree.probes, strict=True):
        if parent < 0:
            before: tuple[Message, ...] = (Message("assistant", tree.prompts[episode]),)
        else:
            before = (*histories[parent], Message("assistant", tree.responses[parent]))
        histories.append((*before, Message("user", probe)))
    episodes = tree.nodes["episode"].tolist()
    return [
        Exchange(
            tree.responses[node],
            histories[node],
            columns=columns_of(tree.prompts[episodes[node]]),
        )
        for node in there
    ], True


def num_probes_of(tree_width: int, tree_depth: int) -> int:
    """Probes of a tree, or a number above `MAX_PROBES` if there are more."""
    total, level = 0, 1
    for _ in range(min(tree_depth, MAX_PROBES + 1)):
        level *= tree_width
        total += level
        if total > MAX_PROBES:
            break
    return total
