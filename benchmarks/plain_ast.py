"""Adaptive stress testing in the plain way, to measure against.

It does what ASTRA-RL (https://github.com/sisl/astra-rl) does, written anew: three separate models
in float32; each tree depth first, one group of siblings at a time; `generate` for the attacker,
`generate` for the target, and one more pass of the target over conversation and probe for the
probe's log-probabilities, with the distribution over the vocabulary at every position; two calls of
the scorer a group; then one optimizer step a preference pair, for which chosen and rejected go
through the policy and the reference one after the other.

Where two ways are open, the faster is taken, so that nothing is gained by a weak opponent: what was
said is kept as tokens and not tokenised again, and no gradients are kept for models that do not
learn (the original keeps them).

Shape suffixes: `B` row, `C` context position, `L` position of context and continuation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import Stopwatch, WorkCount, count_work
from torch import Tensor

from nip_astra.rl_objectives.ast_reward import ast_reward
from nip_astra.scenario_base.conversation.tokens import ConversationFormat, Turn
from nip_astra.scorers.base import Scorer


class Sampling(NamedTuple):
    """How turns are drawn; all are of one length, so that work does not depend on luck."""

    num_tokens: int
    temperature: float
    top_k: int
    top_p: float


@dataclass
class PlainModel:
    """A language model with its tokenizer, used through `generate` and `forward` alone.

    Attributes
    ----------
    suppressed_ids : tuple[int, ...]
        Tokens never said.
    work : WorkCount
        What has gone through the model.
    """

    module: Any
    tokenizer: Any
    conversation_format: ConversationFormat
    sampling: Sampling
    suppressed_ids: tuple[int, ...] = ()
    work: WorkCount = field(init=False)

    def __post_init__(self) -> None:
        self.module.eval()
        self.work = count_work(self.module)
        self.pad_id = self.tokenizer.eos_token_id

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @torch.no_grad()
    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sample one turn after each context."""
        width = max(len(context) for context in contexts)
        ids_BC = torch.tensor([[self.pad_id] * (width - len(c)) + list(c) for c in contexts])
        mask_BC = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        num_tokens, *how = self.sampling
        drawing = dict(zip(("temperature", "top_k", "top_p"), how, strict=True))
        if self.sampling.temperature == 0:
            drawing = {}
        said_BL = self.module.generate(
            input_ids=ids_BC.to(self.device),
            attention_mask=mask_BC.to(self.device),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=bool(drawing),
            pad_token_id=self.pad_id,
            suppress_tokens=list(self.suppressed_ids) or None,
            **drawing,
        )
        said: list[list[int]] = said_BL[:, width:].tolist()
        return said

    def logprobs(
        self, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probabilities of continuation tokens, float32 `[B, L - 1]` nats, 0 elsewhere."""
        both = [[*c, *said] for c, said in zip(contexts, continuations, strict=True)]
        width = max(len(row) for row in both)
        ids_BL = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in both])
        mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in both])
        position_L = torch.arange(width)
        start_B1 = torch.tensor([[len(context)] for context in contexts])
        scored_BL = (position_L >= start_B1) & mask_BL.bool()
        ids_BL = ids_BL.to(self.device)
        logits = self.module(input_ids=ids_BL, attention_mask=mask_BL.to(self.device)).logits
        # The position before a token predicts it.
        distribution = logits[:, :-1].log_softmax(dim=-1)
        logprobs_BL = distribution.gather(-1, ids_BL[:, 1:].unsqueeze(-1)).squeeze(-1)
        return logprobs_BL.masked_fill(~scored_BL[:, 1:].to(self.device), 0.0)

    def decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The text of turns."""
        decoded = self.tokenizer.batch_decode(list(turns), skip_special_tokens=True)
        return [text.strip() for text in decoded]


@dataclass
class PlainNode:
    """One probe with the response to it, and what followed.

    Attributes
    ----------
    context : list[int]
        What the attacker read.
    nll : float
        Mean negative log-likelihood of the probe's tokens under the target, nats.
    """

    context: list[int]
    probe: list[int]
    probe_text: str
    response: list[int]
    response_text: str
    nll: float
    reward: float
    children: list[PlainNode]


class Pair(NamedTuple):
    """Two probes after one context; tokens."""

    context: list[int]
    chosen: list[int]
    rejected: list[int]


class _Conversation(NamedTuple):
    """The turns so far, as each model reads them."""

    attacker: list[Turn]
    target: list[Turn]


@dataclass
class PlainAst:
    """Plays and learns in the plain way.

    Attributes
    ----------
    weights : Mapping[str, float]
        Of a node's reward; see `nip_astra.rl_objectives.ast_reward`.
    beta : float
        Inverse temperature of DPO.
    """

    attacker: PlainModel
    target: PlainModel
    reference: PlainModel
    scorer: Scorer
    weights: Mapping[str, float]
    lr: float
    beta: float
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the attacker learns."""
        return [p for p in self.attacker.module.parameters() if p.requires_grad]

    def forwarded(self) -> dict[str, int]:
        """Positions that each model has read so far, by role."""
        roles = {"attacker": self.attacker, "target": self.target, "reference": self.reference}
        return {role: model.work.forwarded for role, model in roles.items()}

    # ---- playing

    def play(self, prompts: Sequence[str], *, width: int, depth: int) -> list[list[PlainNode]]:
        """Grow one tree after the other, and give the first nodes of each."""
        trees = []
        with self.watch.phase("rollout"):
            for prompt in prompts:
                start = _Conversation(
                    [Turn(False, self.attacker.conversation_format.encode(prompt))],
                    [Turn(True, self.target.conversation_format.encode(prompt))],
                )
                trees.append(self._grow(start, width, depth))
        return trees

    def _grow(self, conversation: _Conversation, width: int, depth: int) -> list[PlainNode]:
        if depth == 0:
            return []
        context = self.attacker.conversation_format.context(conversation.attacker)
        with self.watch.phase("attacker generate"):
            probes = self.attacker.generate([context] * width)
        asked = [[*conversation.target, Turn(False, tuple(probe))] for probe in probes]
        read = [self.target.conversation_format.context(turns) for turns in asked]
        with self.watch.phase("target generate"):
            responses = self.target.generate(read)
        probe_texts, response_texts = self.attacker.decode(probes), self.target.decode(responses)
        nll_B = self._probe_nll(asked, read, probes)
        reward_B = self._reward(probe_texts, response_texts, nll_B)
        nodes = []
        for branch, (probe, response) in enumerate(zip(probes, responses, strict=True)):
            after = _Conversation(
                [
                    *conversation.attacker,
                    Turn(True, tuple(probe)),
                    Turn(False, tuple(response)),
                ],
                [*asked[branch], Turn(True, tuple(response))],
            )
            nodes.append(
                PlainNode(
                    context,
                    probe,
                    probe_texts[branch],
                    response,
                    response_texts[branch],
                    float(nll_B[branch]),
                    float(reward_B[branch]),
                    self._grow(after, width, depth - 1),
                )
            )
        return nodes

    def _probe_nll(
        self,
        asked: Sequence[Sequence[Turn]],
        read: Sequence[Sequence[int]],
        probes: Sequence[Sequence[int]],
    ) -> Tensor:
        """The probes' mean negative log-likelihood under the target, nats a token."""
        before = []
        for turns, context in zip(asked, read, strict=True):
            # What follows the probe in the target's context is no part of the condition.
            start, _ = self.target.conversation_format.last_turn_span(turns, context)
            before.append(context[:start])
        with self.watch.phase("target log-probabilities"), torch.no_grad():
            logprobs_BL = self.target.logprobs(before, probes)
        lengths_B = torch.tensor([len(probe) for probe in probes])
        return -logprobs_BL.detach().sum(dim=1).cpu() / lengths_B

    def _reward(
        self, probe_texts: Sequence[str], response_texts: Sequence[str], nll_B: Tensor
    ) -> Tensor:
        combined = [f"{p} {r}" for p, r in zip(probe_texts, response_texts, strict=True)]
        with self.watch.phase("scorer"):
            combined_B = self.scorer.score(combined)
            response_B = self.scorer.score(response_texts)
        return ast_reward(
            response_B,
            combined_B,
            nll_B,
            torch.tensor([not text for text in probe_texts]),
            empty_nll=math.log(len(self.target.tokenizer)),
            **self.weights,
        )

    # ---- learning

    def pairs(self, trees: Sequence[Sequence[PlainNode]]) -> list[Pair]:
        """Pair the best with the worst of each group of siblings."""
        found = []
        groups = list(trees)
        while groups:
            group = groups.pop(0)
            ranked = sorted(group, key=lambda node: -node.reward)
            if len(ranked) > 1:
                found.append(Pair(ranked[0].context, ranked[0].probe, ranked[-1].probe))
            groups += [node.children for node in group if node.children]
        return found

    def learn(self, pairs: Sequence[Pair]) -> int:
        """Take one optimizer step a pair, and give their number."""
        with self.watch.phase("update"):
            for pair in pairs:
                self.step(pair)
        return len(pairs)

    def step(self, pair: Pair) -> float:
        """Take one optimizer step on one pair and give its loss."""
        with self.watch.phase("loss forward"):
            loss = self.loss(pair)
        with self.watch.phase("backward"):
            torch.autograd.backward(loss)
        with self.watch.phase("optimizer"):
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
        # Falls as the chosen probe gains on the rejected one beyond what the reference gives it.
        return -F.logsigmoid(self.beta * margin)
