"""Sample trees of conversations between an attacker and a target, one level at a time.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import Generation, as_sampler, pad_left
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.samplers.dialogue import Dialogue, Plan, Speakers, refuse_nan_of
from nip_astra.samplers.node_scores import RewardParameters, rate_nodes
from nip_astra.samplers.parts import (
    Played,
    are_played_by_actors,
    begin_parts,
    cut_rollout,
    play_parts,
)
from nip_astra.samplers.sizes import num_probes_of
from nip_astra.samplers.together import are_played_together, play_together
from nip_astra.samplers.tree_columns import TreeColumns
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scenario_base.text_attackers import TextAttacker
from nip_astra.scorers.base import Scorer
from nip_astra.utils.seeding import SeedPart

GLUE_TOKENS = 32
"""Allowance for what a chat template puts around a turn."""
_READ_PROBES = "tell how likely it finds probes"


class TreeSampler:
    """Play attacker against target and rate every node.

    Two generation calls a level, whatever the number of episodes and branches. Randomness depends
    on `key`, the episode and the place in its tree alone.

    Parameters
    ----------
    max_cache_bytes : int, optional
        Memory for the keys and values of both models. A rollout that would need more is played in
        more parts; an episode is never divided.
    num_parts : int
        Parts into which a rollout of small models on the CPU is cut, to be played at once.
    asks_reference : bool
        Whether the reference reads the probes; where it does not, its log-probabilities, and what
        follows from them, are NaN.
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
        # Whose tokens and format probes are counted and read in.
        self.reader = reference if isinstance(attacker, TextAttacker) else attacker
        self.target = target
        self.reference = reference
        self.scorer = scorer
        self.reward = reward
        self.max_cache_bytes = max_cache_bytes
        self.num_parts = num_parts
        self.asks_reference = asks_reference
        self._check_abilities()
        self._share_tokens = False
        if not isinstance(target, ChatAgent):
            self._share_tokens = self.reader.shares_tokens_with(target)

    def _check_abilities(self) -> None:
        """Refuse models that lack what their role takes, before anything is played."""
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
        """A sampler with another attacker, for instance the reference."""
        return TreeSampler(
            attacker,
            self.target,
            self.reference,
            self.scorer,
            self.reward,
            self.max_cache_bytes,
            num_parts=self.num_parts,
            asks_reference=asks_reference,
        )

    def cache_bytes(self, prompts: Sequence[str], *, tree_width: int, tree_depth: int) -> int:
        """Predict the most memory that the keys and values of one tree a prompt take.

        The longest prompt and turns of full length are assumed.
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
        """How many trees the memory for keys and values holds together; all where it has no bound.

        Raises
        ------
        ConfigurationError
            When it does not hold one, or there is no prompt.
        """
        if not prompts:
            raise ConfigurationError(
                "a rollout was to be played, but it was given no opening prompt, and each episode "
                "begins with one. Give at least one prompt."
            )
        limit = self.max_cache_bytes
        if limit is None:
            return len(prompts)
        needed = self.cache_bytes(prompts, tree_width=tree_width, tree_depth=tree_depth)
        per_tree = needed // len(prompts)
        if per_tree > limit:
            raise ConfigurationError(
                f"a tree of width {tree_width} and depth {tree_depth} was to be played, but its "
                f"keys and values may take {per_tree / 2**30:.3g} GiB and a rollout may take "
                f"{limit / 2**30:.3g}. Raise max_rollout_gib of the scenario, where there is the "
                "memory (max_cache_bytes of a sampler or problem of your own), or lower "
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
            Said by the target's side before the first probe.
        tree_width : int
            Probes tried at every point of a conversation.
        tree_depth : int
            Probes on a path from the opening to a leaf.
        key : tuple
            Names the randomness, for instance `(seed, "train", iteration)`.
        first_episode : int
            Number of the first prompt's episode within `key`, where episodes are played in parts.
        """
        plan = Plan(tree_width, tree_depth, key)
        tree = self._begin(prompts, plan, first_episode)()
        self.rate(tree)
        return tree

    def begin(
        self, prompts: Sequence[str], *, tree_width: int, tree_depth: int, key: tuple[SeedPart, ...]
    ) -> Callable[[], RolloutTree]:
        """Begin to grow trees with the weights of now; what it gives waits for them.

        Actors play them meanwhile; where there are none they are played here, before this returns.
        They are yet to be rated.
        """
        return self._begin(prompts, Plan(tree_width, tree_depth, key), 0)

    def _begin(
        self, prompts: Sequence[str], plan: Plan, first_episode: int
    ) -> Callable[[], RolloutTree]:
        size = {"tree_width": plan.tree_width, "tree_depth": plan.tree_depth}
        at_once = self.num_at_once(prompts, **size)
        num_nodes = len(prompts) * num_probes_of(plan.tree_width, plan.tree_depth)
        has_company = are_played_together(self)
        parts = cut_rollout(
            self._speakers,
            len(prompts),
            num_nodes,
            min(self.num_parts, at_once),
            is_played_together=has_company,
        )
        # All parts may be in memory together.
        most = max(at_once // len(parts), 1)
        pieces = [
            range(start, min(start + most, part.stop))
            for part in parts
            for start in range(part.start, part.stop, most)
        ]
        play = self.player(prompts, plan, first_episode)
        plays = [partial(play, piece) for piece in pieces]
        if are_played_by_actors(self._speakers):
            finish = begin_parts(plays, self._speakers)
            return lambda: put_together(finish())
        if len(pieces) == 1:
            tree = play(pieces[0])
        elif has_company:
            tree = put_together(play_together(self, prompts, plan, first_episode, pieces))
        else:
            tree = put_together(play_parts(plays, self._speakers, most_processes=len(parts)))
        return lambda: tree

    def player(
        self, prompts: Sequence[str], plan: Plan, first_episode: int
    ) -> Callable[[range], RolloutTree]:
        """What plays some of the episodes of a rollout; their trees are yet to be rated."""
        player = self._without_scorer()

        def play(part: range) -> RolloutTree:
            return player._play(prompts[part.start : part.stop], plan, first_episode + part.start)

        return play

    @property
    def _speakers(self) -> tuple[ConversationAgent | TextAttacker, Speaker, ConversationAgent]:
        return self.attacker, self.target, self.reference

    def _without_scorer(self) -> TreeSampler:
        """What plays and does not rate; a scorer may hold what stays in this process."""
        player = copy.copy(self)
        del player.scorer
        return player

    def _play(self, prompts: Sequence[str], plan: Plan, first: int) -> RolloutTree:
        """Grow the trees of episodes from number `first` on together; they are yet to be rated."""
        dialogue = Dialogue(
            Speakers(self.attacker, self.target, self.reader, self._share_tokens),
            plan,
            asks_likelihood=self.reward.likelihood_model == "target",
        )
        dialogue.play(prompts, first)
        columns = dialogue.columns
        probe_NT, mask_NT, logprobs_NT = self._stack(columns.generations)
        with torch.no_grad(), columns.timed("reference"):
            reference_NT = self._reference_logprobs(columns, probe_NT, mask_NT)
        if self.asks_reference:
            refuse_nan_of(self.reference, reference_NT, mask_NT, plan)
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
            plan.tree_width,
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
        """Add scores and rewards; the scorer is asked once, about all nodes."""
        started = time.perf_counter()
        response, combined = rate_nodes(self.scorer, tree)
        tree.seconds["scorer"] = time.perf_counter() - started
        nodes = tree.nodes
        likelihood_agent = getattr(self, self.reward.likelihood_model)
        # A score without weight must not make the reward unknown.
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


def put_together(everything: Sequence[Played[RolloutTree]]) -> RolloutTree:
    """One tree of what processes have played, in order.

    Its seconds are those of the process that took the longest.
    """
    tree = merge_trees([part for played in everything for part in played.parts])
    tree.seconds = {
        name: max(sum(part.seconds[name] for part in played.parts) for played in everything)
        for name in tree.seconds
    }
    return tree


def _check_likelihood(target: Speaker) -> None:
    """Refuse a target that cannot tell how likely it finds probes."""
    asked = "the likelihood of probes under the target"
    if isinstance(target, ChatAgent):
        raise ConfigurationError(
            f"{asked} {target.chat_model.name!r} was asked for, but a chat model does not tell how "
            "likely it finds what it reads. Set the reward's likelihood_model to reference."
        )
    if not target.language_model.can_score_contexts:
        raise ConfigurationError(
            f"{asked} was asked for, but target and attacker share a vLLM engine with a LoRA "
            "adapter, which cannot tell how likely it finds what it reads. Set the reward's "
            "likelihood_model to reference, or give the target an engine of its own: another "
            "max_model_len, or _type huggingface."
        )
