"""Sample trees of conversations between an attacker and a target, one level at a time.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.language_models.base import Generation, pad_left
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.ast_reward import ast_reward, mean_nll
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation import Turn
from nip_astra.scorers.base import Scorer
from nip_astra.utils.seeding import SeedPart, uniform_rows


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


@dataclass
class _Conversation:
    """A path of the tree: the turns as each model reads them."""

    path: str
    episode: int
    node: int
    attacker_turns: list[Turn]
    target_turns: list[Turn]


@dataclass
class _Columns:
    """What the nodes of a tree collect while it grows."""

    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    episode: list[int] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    probes: list[str] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    target_views: list[tuple[list[Turn], tuple[int, ...]]] = field(default_factory=list)


class ScoredNodes(NamedTuple):
    """Scores and reward of every node, float32 `[N]` each, but logprobs `[N, T]`."""

    reference_logprobs_NT: Tensor
    probe_nll_N: Tensor
    response_score_N: Tensor
    combined_score_N: Tensor
    reward_N: Tensor


class TreeSampler:
    """Play attacker against target and rate every node.

    Two generation calls a level, whatever the number of episodes and branches. Randomness depends
    on `key`, the episode and the place in its tree alone.
    """

    def __init__(
        self,
        attacker: ConversationAgent,
        target: ConversationAgent,
        reference: ConversationAgent,
        scorer: Scorer,
        reward: RewardParameters,
    ) -> None:
        self.attacker = attacker
        self.target = target
        self.reference = reference
        self.scorer = scorer
        self.reward = reward
        self._shares_tokens = attacker.shares_tokens_with(target)

    def with_attacker(self, attacker: ConversationAgent) -> TreeSampler:
        """Give a sampler that differs in the attacker only, for instance the reference."""
        return TreeSampler(attacker, self.target, self.reference, self.scorer, self.reward)

    def sample(
        self,
        prompts: Sequence[str],
        *,
        tree_width: int,
        tree_depth: int,
        key: tuple[SeedPart, ...],
        first_episode: int = 0,
    ) -> RolloutTree:
        """Grow one tree from each opening prompt.

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
        columns = _Columns()
        open_conversations = [
            self._open(episode, first_episode + episode, prompt)
            for episode, prompt in enumerate(prompts)
        ]
        for depth in range(tree_depth):
            open_conversations = self._grow(open_conversations, tree_width, depth, key, columns)
        probe_NT, mask_NT, logprobs_NT = self._stack(columns.generations)
        scored = self._score(columns, probe_NT, mask_NT)
        nodes = TensorDict(
            {
                "parent": torch.tensor(columns.parent),
                "depth": torch.tensor(columns.depth),
                "episode": torch.tensor(columns.episode),
                "probe": probe_NT,
                "probe_mask": mask_NT,
                "probe_logprobs": logprobs_NT,
                "reference_logprobs": scored.reference_logprobs_NT,
                "probe_nll": scored.probe_nll_N,
                "is_empty": torch.tensor([not probe for probe in columns.probes]),
                "response_score": scored.response_score_N,
                "combined_score": scored.combined_score_N,
                "reward": scored.reward_N,
            },
            batch_size=[len(columns.probes)],
        )
        return RolloutTree(
            nodes, tree_width, list(prompts), columns.probes, columns.responses, columns.contexts
        )

    def _open(self, episode: int, number: int, prompt: str) -> _Conversation:
        return _Conversation(
            path=str(number),
            episode=episode,
            node=-1,
            attacker_turns=[Turn(False, self.attacker.conversation_format.encode(prompt))],
            target_turns=[Turn(True, self.target.conversation_format.encode(prompt))],
        )

    def _grow(
        self,
        parents: list[_Conversation],
        tree_width: int,
        depth: int,
        key: tuple[SeedPart, ...],
        columns: _Columns,
    ) -> list[_Conversation]:
        """Add one probe and one response below every open conversation, all in one batch each."""
        contexts = self.attacker.contexts([parent.attacker_turns for parent in parents])
        children = [
            _Conversation(
                f"{parent.path}.{branch}",
                parent.episode,
                len(columns.probes) + index * tree_width + branch,
                parent.attacker_turns,
                parent.target_turns,
            )
            for index, parent in enumerate(parents)
            for branch in range(tree_width)
        ]
        probes = self._speak(self.attacker, contexts, tree_width, children, key)
        probe_ids = self.attacker.content_ids(probes)
        probe_texts = self.attacker.decode(probe_ids)
        for child, ids, text in zip(children, probe_ids, probe_texts, strict=True):
            target_ids = ids if self._shares_tokens else self._encode_for(self.target, text)
            columns.target_views.append((child.target_turns, target_ids))
            child.attacker_turns = [*child.attacker_turns, Turn(True, ids)]
            child.target_turns = [*child.target_turns, Turn(False, target_ids)]

        target_contexts = self.target.contexts([child.target_turns for child in children])
        responses = self._speak(self.target, target_contexts, 1, children, key)
        response_ids = self.target.content_ids(responses)
        response_texts = self.target.decode(response_ids)
        for child, ids, text in zip(children, response_ids, response_texts, strict=True):
            attacker_ids = ids if self._shares_tokens else self._encode_for(self.attacker, text)
            child.target_turns = [*child.target_turns, Turn(True, ids)]
            child.attacker_turns = [*child.attacker_turns, Turn(False, attacker_ids)]

        columns.parent += [parent.node for parent in parents for _ in range(tree_width)]
        columns.depth += [depth] * len(children)
        columns.episode += [child.episode for child in children]
        columns.contexts += contexts
        columns.probes += probe_texts
        columns.responses += response_texts
        columns.generations.append(probes)
        return children

    @staticmethod
    def _speak(
        agent: ConversationAgent,
        contexts: list[list[int]],
        rows_per_context: int,
        children: list[_Conversation],
        key: tuple[SeedPart, ...],
    ) -> Generation:
        keys = [(*key, agent.role, child.path) for child in children]
        uniforms = uniform_rows(keys, agent.sampling.max_new_tokens)
        return agent.speak(contexts, rows_per_context, uniforms)

    @staticmethod
    def _encode_for(agent: ConversationAgent, text: str) -> tuple[int, ...]:
        return agent.conversation_format.encode(text)

    @staticmethod
    def _stack(generations: list[Generation]) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.cat([generation.ids_BT for generation in generations]),
            torch.cat([generation.mask_BT for generation in generations]),
            torch.cat([generation.logprobs_BT for generation in generations]),
        )

    def _score(self, columns: _Columns, probe_NT: Tensor, mask_NT: Tensor) -> ScoredNodes:
        contexts = [
            context
            for context in columns.contexts
            for _ in range(len(columns.probes) // len(columns.contexts))
        ]
        with torch.no_grad():
            reference_NT = self.reference.language_model.logprobs(
                *pad_left(contexts, torch.device("cpu")), probe_NT, mask_NT
            ).cpu()
        if self.reward.likelihood_model == "reference":
            nll_N = mean_nll(reference_NT, mask_NT)
        else:
            nll_N = self._nll_under_target(columns)
        num_nodes = len(columns.probes)
        combined = [f"{p} {r}" for p, r in zip(columns.probes, columns.responses, strict=True)]
        scores = self.scorer.score([*columns.responses, *combined])
        response_N, combined_N = scores[:num_nodes], scores[num_nodes:]
        likelihood_agent = getattr(self, self.reward.likelihood_model)
        reward_N = ast_reward(
            response_N,
            combined_N,
            nll_N,
            torch.tensor([not probe for probe in columns.probes]),
            w_response=self.reward.w_response,
            w_combined=self.reward.w_combined,
            w_likelihood=self.reward.w_likelihood,
            empty_nll=math.log(len(likelihood_agent.language_model.tokenizer)),
        )
        return ScoredNodes(reference_NT, nll_N, response_N, combined_N, reward_N)

    def _nll_under_target(self, columns: _Columns) -> Tensor:
        """Mean NLL of each probe's words as the target reads them."""
        width = max(max(len(ids) for _, ids in columns.target_views), 1)
        room = self.target.language_model.context_window - width
        contexts = [
            self.target.conversation_format.fit(turns, num_tokens=room, before_other=True).ids
            for turns, _ in columns.target_views
        ]
        ids_NT = torch.zeros(len(contexts), width, dtype=torch.long)
        mask_NT = torch.zeros(len(contexts), width, dtype=torch.bool)
        for row, (_, ids) in enumerate(columns.target_views):
            ids_NT[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.long)
            mask_NT[row, : len(ids)] = True
        with torch.no_grad():
            logprobs_NT = self.target.language_model.logprobs(
                *pad_left(contexts, torch.device("cpu")), ids_NT, mask_NT
            )
        return mean_nll(logprobs_NT.cpu(), mask_NT)
