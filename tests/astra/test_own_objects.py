"""Programs as a newcomer writes them: only the classes that the guides name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nip_astra.astra import (
    DPO,
    IPO,
    PPO,
    ASTEvaluator,
    ASTSampler,
    Graph,
    Harness,
    HFASTSystem,
    Node,
    Sampler,
    Scorer,
    Trainer,
    TrainingConfiguration,
    ValueFunctionSystem,
)
from tests.astra.conftest import Models
from tests.astra.toys import SHORT, Finds
from tests.kit.learning import Learning

WORDS = ["hello", "good", "day", "silly", "cat", "mat"]
Messages = list[dict[str, str]]


class Counts(Scorer):
    """An array or a tensor, as models return."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def score(self, x: Sequence[str]) -> Any:
        return self.kind([float("silly" in text) for text in x])


class OverMessages(ValueFunctionSystem[Messages, str]):
    """States are lists of chat messages."""

    def __init__(self, scorer: Any) -> None:
        super().__init__(scorer)
        self.logits = torch.nn.Parameter(torch.zeros(len(WORDS)))
        self.v = torch.nn.Linear(1, 1)

    def rollout_prompt_with_tester(self, x: Sequence[Messages]) -> list[str]:
        chosen = torch.multinomial(self.logits.softmax(0), len(x), replacement=True)
        return [WORDS[i] for i in chosen]

    def rollout_prompt_with_target(self, x: Sequence[Messages]) -> Any:
        return np.array([f"{state[-1]['content']} !" for state in x])

    def get_tester_logprobs(self, context: Any, continuation: Sequence[str]) -> Tensor:
        ids = torch.tensor([WORDS.index(text) for text in continuation])
        return self.logits.log_softmax(0)[ids][:, None]

    def get_target_logprobs(self, context: Any, continuation: Sequence[str]) -> Tensor:
        return torch.full((len(context), 1), -1.8)

    get_baseline_logprobs = get_target_logprobs

    def value(self, context: Sequence[Messages], continuation: Sequence[str]) -> Tensor:
        values: Tensor = self.v(torch.tensor([[float(len(state))] for state in context]))
        return values

    def advance(self, state: Messages, action: str, response: str) -> Messages:
        turn = {"role": "user", "content": action}, {"role": "assistant", "content": response}
        return [*state, *turn]

    def reward(self, context: Any, probe: Any, response: Sequence[str]) -> Any:
        return torch.as_tensor(self.scorer.score(response))

    def parameters(self) -> Any:
        return [self.logits, *self.v.parameters()]


class MessageSampler(Sampler[Messages, str]):
    """Trees of lists of messages, of width three and depth two."""

    def rollout(self, seed: int | None = None) -> Graph[Messages, str]:
        opening = [{"role": "assistant", "content": "hi"}]
        return Graph(opening, self.grow(opening, 2))

    def grow(self, state: Messages, depth: int) -> list[Node[Messages, str]]:
        if depth == 0:
            return []
        system = self.system
        probes = system.rollout_prompt_with_attacker([state] * 3)
        states = [[*state, {"role": "user", "content": probe}] for probe in probes]
        responses = system.rollout_prompt_with_target(states)
        rewards = system.reward([state] * 3, probes, responses)
        return [
            Node(state, p, r, float(w), self.grow(system.advance(state, p, r), depth - 1))
            for p, r, w in zip(probes, responses, rewards, strict=True)
        ]


@pytest.mark.parametrize(
    ("kind", "algorithm"), [(np.array, DPO), (torch.tensor, IPO), (torch.tensor, PPO)]
)
def test_states_may_be_lists_of_messages_and_scores_arrays(
    learning: Learning, kind: Any, algorithm: Any
) -> None:
    problem = OverMessages(Counts(kind))
    config = TrainingConfiguration(training_steps=12, lr=0.1, batch_size=16, seed=learning.seed)
    Trainer(config, MessageSampler(problem), algorithm(problem)).train()
    probability = float(problem.logits.detach().softmax(0)[WORDS.index("silly")])
    learning.check(probability, threshold=0.5, best=1.0)
    summary = ASTEvaluator(MessageSampler(problem)).evaluate(2, progress=False)["summary"]
    assert summary["n_rollouts"] == 2


class BlackBox(HFASTSystem):
    """The target is a function, and the state puts spaces between texts."""

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        return ["" if "cat" in text else f"you said {text.split()[-1]}" for text in x]

    def advance(self, state: str, action: str, response: str) -> str:
        return state + " " + action + " " + response

    def reward(self, context: Any, challenge: Any, response: Any) -> list[float]:
        logprobs = self._get_baseline_logprobs_and_validate(context, challenge).sum(-1)
        scores = self.scorer.score(response)
        return [s + 0.01 * float(p) for s, p in zip(scores, logprobs, strict=True)]


def test_a_target_behind_a_function_is_attacked_with_an_adapter(
    models: Models, tmp_path: Any
) -> None:
    # The adapter's first weights are drawn from the global generator.
    torch.manual_seed(0)
    lora = {**SHORT, "language_model": {"lora": {"rank": 2}}}
    system = BlackBox(models.attacker, models.target, None, Finds("you"), attacker_options=lora)
    sampler = ASTSampler(system, ["hello", "good day"], 2, 3)
    (*_, last) = sampler.rollout(3).chain()
    assert len(last.context.turns) == 5, "a silent target has turns as well"
    harness = Harness(sampler, IPO(system, beta=0.05), 2, dataloader_kwargs={"batch_size": 2})
    optimizer = torch.optim.AdamW(system.parameters(), lr=3e-3)
    buffer = harness.experience()
    losses = []
    for _ in range(3):
        for batch in buffer:
            loss, _ = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert len(losses) == 3 * len(buffer) > 0
    assert sum(losses[-len(buffer) :]) < sum(losses[: len(buffer)])
