"""Baseline implementation of adaptive stress testing.

A reimplementation of the algorithm of ASTRA-RL (https://github.com/sisl/astra-rl): three separate
models in float32; depth-first trees, one group of siblings at a time; `generate` for the attacker,
`generate` for the target, and another pass of the target over conversation and probe for the
probe's log-probabilities, with the full vocabulary distribution at every position; two scorer calls
per group; then one optimizer step per preference pair, in which chosen and rejected go through the
policy and the reference sequentially.

It takes the faster alternative where there is a choice, so that the baseline is not weak: turns are
kept as tokens and not tokenised again, and frozen models have no gradients (they do in the
original).

Shape suffixes: `B` row, `C` context position, `L` position of context and continuation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.adapters import add_adapter
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.rl_objectives.rewards import ast_reward
from nip_astra.rollouts.messages import Turn
from nip_astra.samplers.trees import RewardParameters
from nip_astra.scenario_base.agents import ConversationAgentParameters
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from nip_astra.scorers.base import Scorer, build_scorer


@dataclass
class PlainModel:
    """A language model with its tokenizer, used only through `generate` and `forward`.

    All turns have the same length, so that the amount of work is deterministic.

    Attributes
    ----------
    suppressed_ids : tuple[int, ...]
        Tokens that are never generated.
    num_forwarded : int
        Positions that the model has read, padding included.
    """

    agent: ConversationAgentParameters
    scenario_dir: Path
    device: str = "cpu"
    suppressed_ids: tuple[int, ...] = ()
    num_forwarded: int = 0
    module: Any = field(init=False)

    def __post_init__(self) -> None:
        language_model: Any = self.agent.language_model
        source = resolve_model(language_model.model, self.scenario_dir)
        self.tokenizer: Any = load_tokenizer(*source)
        self.pad_id = self.tokenizer.eos_token_id
        self.chat = ChatFormat(self.tokenizer, system_prompt=self.agent.system_prompt)
        self.module = load_causal_lm(*source).to(self.device).eval()
        self.module.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, _: Any, arguments: tuple[Tensor, ...], __: Tensor) -> None:
        self.num_forwarded += arguments[0].numel()

    @torch.no_grad()
    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sample one turn after each context."""
        width = max(len(context) for context in contexts)
        ids_BC = torch.tensor([[self.pad_id] * (width - len(c)) + list(c) for c in contexts])
        mask_BC = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        agent = self.agent
        sampling = {name: getattr(agent, name) for name in ("temperature", "top_k", "top_p")}
        if agent.temperature == 0:
            sampling = {}
        generated_BL = self.module.generate(
            input_ids=ids_BC.to(self.device),
            attention_mask=mask_BC.to(self.device),
            min_new_tokens=agent.min_new_tokens,
            max_new_tokens=agent.max_new_tokens,
            do_sample=bool(sampling),
            pad_token_id=self.pad_id,
            suppress_tokens=list(self.suppressed_ids) or None,
            **sampling,
        )
        turns: list[list[int]] = generated_BL[:, width:].tolist()
        return turns

    def logprobs(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probabilities of continuation tokens, float32 `[B, L - 1]`, nats; 0 elsewhere."""
        rows = [[*c, *turn] for c, turn in zip(contexts, continuations, strict=True)]
        width = max(len(row) for row in rows)
        ids_BL = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in rows])
        mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        start_B1 = torch.tensor([[len(context)] for context in contexts])
        scored_BL = (torch.arange(width) >= start_B1) & mask_BL.bool()
        ids_BL, mask_BL, scored_BL = (x.to(self.device) for x in (ids_BL, mask_BL, scored_BL))
        logits = self.module(input_ids=ids_BL, attention_mask=mask_BL).logits
        # The position before a token predicts it.
        distribution = logits[:, :-1].log_softmax(dim=-1)
        logprobs_BL = distribution.gather(-1, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)
        masked_BL: torch.Tensor = logprobs_BL.masked_fill(~scored_BL[:, 1:], 0.0)
        return masked_BL

    def decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The text of turns."""
        decoded = self.tokenizer.batch_decode(list(turns), skip_special_tokens=True)
        return [text.strip() for text in decoded]


@dataclass
class PlainNode:
    """A probe with its response, and the subtree below it.

    Attributes
    ----------
    context : list[int]
        Tokens that the attacker read.
    nll : float
        Mean negative log-likelihood of the probe's tokens under the target, nats.
    """

    context: list[int]
    probe: list[int]
    probe_text: str
    response_text: str
    nll: float
    reward: float
    children: list[PlainNode]


class Pair(NamedTuple):
    """Tokens of two probes with the same context."""

    context: list[int]
    chosen: list[int]
    rejected: list[int]


class _Conversation(NamedTuple):
    """The turns so far, as read by each model."""

    attacker: list[Turn]
    target: list[Turn]


class PlainAst:
    """Baseline rollouts and updates, with three models and a scorer of its own."""

    def __init__(self, resolved: ResolvedExperiment, device: str = "cpu") -> None:
        parameters: Any = resolved.hyper_params
        section, scenario_dir = getattr(parameters, resolved.kind), resolved.scenario_dir
        self.attacker = PlainModel(section.attacker, scenario_dir, device)
        self.target = PlainModel(section.target, scenario_dir, device)
        # The reference reads what the attacker reads.
        self.reference = PlainModel(section.attacker, scenario_dir, device)
        if section.attacker.language_model.lora is not None:
            adapted = add_adapter(self.attacker.module, section.attacker.language_model.lora)
            self.attacker.module = adapted.to(device).eval()
        self.scorer: Scorer = build_scorer(
            section.scorer, device=torch.device("cpu"), scenario_dir=scenario_dir
        )
        self.reward: RewardParameters = section.reward
        self.beta = parameters.ast_dpo.beta
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=parameters.training.lr)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The attacker's trainable parameters."""
        return [p for p in self.attacker.module.parameters() if p.requires_grad]

    # ---- rollouts

    def play(self, prompts: Sequence[str], *, width: int, depth: int) -> list[list[PlainNode]]:
        """Grow the trees sequentially, and return the first nodes of each."""
        trees = []
        for prompt in prompts:
            start = _Conversation(
                [Turn("user", ids=self.attacker.chat.encode(prompt))],
                [Turn("assistant", ids=self.target.chat.encode(prompt))],
            )
            trees.append(self._grow(start, width, depth))
        return trees

    def _grow(self, conversation: _Conversation, width: int, depth: int) -> list[PlainNode]:
        if depth == 0:
            return []
        context = self.attacker.chat.context(conversation.attacker)
        probes = self.attacker.generate([context] * width)
        turns_B = [[*conversation.target, Turn("user", ids=tuple(probe))] for probe in probes]
        contexts_B = [self.target.chat.context(turns) for turns in turns_B]
        responses = self.target.generate(contexts_B)
        probe_texts, response_texts = self.attacker.decode(probes), self.target.decode(responses)
        nll_B = self._probe_nll(turns_B, contexts_B, probes)
        reward_B = self._reward(probe_texts, response_texts, nll_B)
        nodes = []
        for branch, (probe, response) in enumerate(zip(probes, responses, strict=True)):
            after = _Conversation(
                [
                    *conversation.attacker,
                    Turn("assistant", ids=tuple(probe)),
                    Turn("user", ids=tuple(response)),
                ],
                [*turns_B[branch], Turn("assistant", ids=tuple(response))],
            )
            nodes.append(
                PlainNode(
                    context,
                    probe,
                    probe_texts[branch],
                    response_texts[branch],
                    float(nll_B[branch]),
                    float(reward_B[branch]),
                    self._grow(after, width, depth - 1),
                )
            )
        return nodes

    def _probe_nll(
        self,
        turns_B: Sequence[Sequence[Turn]],
        contexts_B: Sequence[Sequence[int]],
        probes: Sequence[Sequence[int]],
    ) -> Tensor:
        """Mean negative log-likelihood of the probes under the target, nats per token."""
        # Exclude the probe and the tokens after it in the target's context.
        before = [
            context[: self.target.chat.last_turn_span(turns, context)[0]]
            for turns, context in zip(turns_B, contexts_B, strict=True)
        ]
        lengths_B = torch.tensor([len(probe) for probe in probes])
        with torch.no_grad():
            return -self.target.logprobs(before, probes).sum(dim=1).cpu() / lengths_B

    def _reward(
        self, probe_texts: Sequence[str], response_texts: Sequence[str], nll_B: Tensor
    ) -> Tensor:
        combined = [f"{p} {r}" for p, r in zip(probe_texts, response_texts, strict=True)]
        combined_B = self.scorer.score(combined)
        response_B = self.scorer.score(response_texts)
        return ast_reward(
            response_B,
            combined_B,
            nll_B,
            torch.tensor([not text for text in probe_texts]),
            empty_nll=math.log(len(self.target.tokenizer)),
            w_response=self.reward.w_response,
            w_combined=self.reward.w_combined,
            w_likelihood=self.reward.w_likelihood,
        )

    # ---- updates

    def pairs(self, trees: Sequence[Sequence[PlainNode]]) -> list[Pair]:
        """Pair the best with the worst node of each group of siblings."""
        pairs = []
        groups = list(trees)
        while groups:
            group = groups.pop(0)
            ranked = sorted(group, key=lambda node: -node.reward)
            if len(ranked) > 1:
                pairs.append(Pair(ranked[0].context, ranked[0].probe, ranked[-1].probe))
            groups += [node.children for node in group if node.children]
        return pairs

    def learn(self, pairs: Sequence[Pair]) -> None:
        """Take one optimizer step per pair."""
        for pair in pairs:
            self.step(pair)

    def step(self, pair: Pair) -> float:
        """Take one optimizer step on a pair, and return its loss."""
        loss = self.loss(pair)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def loss(self, pair: Pair) -> Tensor:
        """The DPO loss of one pair (arXiv:2305.18290, eq. 7), a scalar with gradient."""
        context = [pair.context]
        chosen = self.attacker.logprobs(context, [pair.chosen]).sum()
        rejected = self.attacker.logprobs(context, [pair.rejected]).sum()
        with torch.no_grad():
            reference_chosen = self.reference.logprobs(context, [pair.chosen]).sum()
            reference_rejected = self.reference.logprobs(context, [pair.rejected]).sum()
        margin = (chosen - rejected) - (reference_chosen - reference_rejected)
        # Decreases as the policy's margin of chosen over rejected exceeds the reference's.
        return -F.logsigmoid(self.beta * margin)
