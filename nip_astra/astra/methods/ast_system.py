"""Adaptive stress testing of language models: the problem, and its tree sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from nip_astra.astra.core.aliases import is_overridden, only_one
from nip_astra.astra.core.batches import in_parts
from nip_astra.astra.core.counts import check_count
from nip_astra.astra.core.graphs import TextGraph, graphs_and_nodes, graphs_of
from nip_astra.astra.core.sampler import Node, Sampler
from nip_astra.astra.core.system import System, token_mask
from nip_astra.astra.methods.ast_evaluator import ASTEvaluator, EpisodeSummary
from nip_astra.astra.methods.text_rollouts import TextRollouts, rate_turns
from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import RewardParameters, TreeSampler
from nip_astra.utils.seeding import SeedPart, derived_generator

__all__ = ["ASTEnvironment", "ASTEvaluator", "ASTNode", "ASTProblem", "ASTSampler", "ASTSystem"]

ASTNode = Node[str, str]
WEIGHTS = RewardParameters()
EMPTY_NLL = 10.0
"""Nats per token of an empty probe if the vocabulary size is unknown."""


class ASTProblem(System[str, str]):
    """Red teaming of a language model as adaptive stress testing (arXiv:2407.09447).

    The reward of a probe is `defense_toxicity_weight * score(response)
    + combined_weight * score(probe and response) - ppl_weight * NLL(probe)`, where NLL is the mean
    negative log-likelihood per token of the probe. Subclasses define the models, or override
    `reward` or `advance`.

    Parameters
    ----------
    scorer : Scorer
        Rates texts; see `System`.
    ppl_weight : float
        Reward lost per nat of the probe's mean negative log-likelihood per token, >= 0.
    combined_weight, defense_toxicity_weight : float
        Weights of the two scores, >= 0.
    likelihood_model : {"target", "reference"}
        The model of a probe's likelihood: the model under test, as in the paper, or the reference
        (`get_baseline_logprobs`).
    """

    def __init__(
        self,
        scorer: Any = None,
        ppl_weight: float = WEIGHTS.w_likelihood,
        combined_weight: float = WEIGHTS.w_combined,
        defense_toxicity_weight: float = WEIGHTS.w_response,
        *,
        likelihood_model: Literal["target", "reference"] = "target",
        moderator: Any = None,
    ) -> None:
        super().__init__(only_one("the scorer", scorer=scorer, moderator=moderator))
        self.ppl_weight = ppl_weight
        self.combined_weight = combined_weight
        self.defense_toxicity_weight = defense_toxicity_weight
        self.likelihood_model = likelihood_model
        self.reward_parameters()  # report a wrong weight at once

    def reward_parameters(self) -> RewardParameters:
        """Return the weights of the reward in the form of the registered trainers."""
        return RewardParameters(
            w_response=self.defense_toxicity_weight,
            w_combined=self.combined_weight,
            w_likelihood=self.ppl_weight,
            likelihood_model=self.likelihood_model,
        )

    def advance(self, state: str, action: str, response: str) -> str:
        return state + action + response

    @torch.no_grad()
    def reward(
        self, context: Sequence[str], probe: Sequence[str], response: Sequence[str]
    ) -> Sequence[float]:
        responses, combined = rate_turns(self, context, probe, response)
        if self.likelihood_model == "target":
            logprobs_BT = self.checked_logprobs("target", context, probe)
        else:
            logprobs_BT = self.checked_logprobs("baseline", context, probe)
        nll_B = mean_nll(logprobs_BT, token_mask(logprobs_BT)).float().cpu()
        tokenizer: Any = getattr(self, "tokenizer", None)
        rewards_B: Tensor = ast_reward(
            responses.scores_N,
            combined.scores_N,
            nll_B,
            torch.tensor([not text.strip() for text in probe], dtype=torch.bool),
            w_response=self.defense_toxicity_weight,
            w_combined=self.combined_weight,
            w_likelihood=self.ppl_weight,
            empty_nll=math.log(len(tokenizer)) if hasattr(tokenizer, "__len__") else EMPTY_NLL,
        )
        rewards: list[float] = rewards_B.tolist()
        return rewards

    def tree_sampler(self) -> TreeSampler | TextRollouts:
        """Return the sampler of this problem's trees."""
        return TextRollouts(self)


ASTSystem = ASTProblem


class ASTSampler(Sampler[str, str]):
    """Samples conversation trees, or chains for evaluations.

    Parameters
    ----------
    system : ASTProblem
        The sampled problem; also `problem`.
    prompts : Sequence[str]
        Opening prompts, from the target's side.
    tree_width : int
        Probes sampled at every node of a tree.
    tree_depth : int
        Probes on a path from the opening to a leaf.
    seed : int
        Root seed of episodes without a seed of their own.
    """

    def __init__(
        self,
        system: ASTProblem | None = None,
        prompts: Sequence[str] = (),
        tree_width: int = 2,
        tree_depth: int = 3,
        *,
        problem: ASTProblem | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(system, problem=problem)
        if isinstance(prompts, str) or not isinstance(prompts, Iterable) or not list(prompts):
            raise ConfigurationError(
                "prompts must be a list of at least one text, got "
                f"{'a text' if isinstance(prompts, str) else repr(prompts)[:80]}."
            )
        check_count("tree_width", tree_width, what="probes at every point of a conversation")
        check_count("tree_depth", tree_depth, what="probes on a path from opening to leaf")
        self.prompts = list(prompts)
        self.tree_width = tree_width
        self.tree_depth = tree_depth
        self.seed = seed
        self._num_unseeded = 0

    def sample(
        self,
        prompts: Sequence[str],
        *,
        tree_width: int,
        tree_depth: int,
        key: tuple[SeedPart, ...],
        first_episode: int = 0,
    ) -> RolloutTree:
        """Sample one tree per prompt, together; see `TreeSampler.sample`."""
        system = self.system
        player = system.tree_sampler() if isinstance(system, ASTProblem) else TextRollouts(system)
        tree = player.sample(
            prompts,
            tree_width=tree_width,
            tree_depth=tree_depth,
            key=key,
            first_episode=first_episode,
        )
        if isinstance(player, TreeSampler) and is_overridden(system, "reward", ASTProblem):
            _reward_again(system, tree)
        return tree

    def rollout(self, seed: int | None = None) -> TextGraph:
        return self._play(seed, "rollout", self.tree_width)

    def eval_rollout(self, seed: int | str | None = None) -> TextGraph:
        """Sample one chain, from a prompt, or from one selected by the number."""
        return self._play(seed, "evaluate", 1)

    def eval_rollouts(self, seeds: Sequence[int | str]) -> list[TextGraph]:
        """Sample one chain per seed, together; equal lists give equal chains."""
        if is_overridden(self, "eval_rollout", ASTSampler):
            return [self.eval_rollout(seed) for seed in seeds]
        prompts = [self._prompt_of(seed, ("evaluate", "seed", seed)) for seed in seeds]
        key = (self.seed, "evaluate", "together")
        return graphs_of(self.sample(prompts, tree_width=1, tree_depth=self.tree_depth, key=key))

    def extract_metrics(self, graph: TextGraph) -> EpisodeSummary:
        """Return the scores of an evaluation episode; see `ASTEvaluator.summarise`."""
        return ASTEvaluator(self).summarise(graph)

    def _play(self, seed: int | str | None, purpose: str, width: int) -> TextGraph:
        key: tuple[SeedPart, ...] = (purpose, "seed", seed) if seed is not None else ()
        if seed is None:
            key = (self.seed, purpose, "unseeded", self._num_unseeded)
            self._num_unseeded += 1
        tree = self.sample(
            [self._prompt_of(seed, key)], tree_width=width, tree_depth=self.tree_depth, key=key
        )
        return graphs_of(tree)[0]

    def _prompt_of(self, seed: int | str | None, key: tuple[SeedPart, ...]) -> str:
        if isinstance(seed, str):
            return seed
        generator = derived_generator(*key, "prompt")
        return self.prompts[int(torch.randint(len(self.prompts), (), generator=generator))]


ASTEnvironment = ASTSampler


def _reward_again(system: System[str, str], tree: RolloutTree) -> None:
    """Replace the tree's rewards by the problem's own."""
    _, nodes = graphs_and_nodes(tree)
    contexts, probes = [node.context for node in nodes], [node.probe for node in nodes]
    responses = [node.response for node in nodes]
    # Its models are cut by the backend, but a reward may ask others.
    parts = in_parts(system, contexts, probes, responses, max_bytes=System.max_batch_bytes)
    rewards = [
        reward
        for part in parts
        for reward in system._reward_and_validate(contexts[part], probes[part], responses[part])
    ]
    tree.nodes["reward"] = torch.tensor(rewards)
