"""Train by PPO in a custom loop, with a value head on the attacker's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from nip_astra.astra import PPO, ASTEnvironment, Harness, ValueFunctionProblem
from tests.astra.examples.gpt2_train import GPT2System, read_pairs

PROMPTS = ["the cat sat on a mat", "good day how are you"]


class PPOProblem(GPT2System, ValueFunctionProblem):
    """A GPT-2 attacker with a value head, and a target."""

    def __init__(self, model: str, moderator: Any, device: str = "cpu") -> None:
        super().__init__(model, moderator, device)
        size = self.tester.config.n_embd
        self.vf = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, 1)).to(device)

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        device = self.tester.device
        ids, is_read, is_scored = read_pairs(self.tokenizer, context, continuation, device)
        read = self.tester(input_ids=ids, attention_mask=is_read, output_hidden_states=True)
        values = self.vf(read.hidden_states[-1]).squeeze(-1)
        # At the positions of the log-probabilities: before each token of the continuation.
        return values[:, :-1].masked_fill(~is_scored[:, 1:], 0.0)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from super().parameters()
        yield from self.vf.parameters()


def main(problem: PPOProblem, num_steps: int = 2) -> list[dict[str, Any]]:
    env = ASTEnvironment(problem, PROMPTS)
    solver = PPO(problem)
    optimizer = AdamW(problem.parameters(), lr=1e-3)
    harness = Harness(
        env,
        solver,
        num_episodes_per_experience=2,
        use_wandb=False,
        dataloader_kwargs={"batch_size": 4},
    )
    found = []
    for step in range(num_steps):
        buffer = harness.experience()
        for batch in buffer:
            loss, step_logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step_logs["step"] = step
            harness.log_current_step(step_logs)
            found.append(step_logs)
    torch.cuda.empty_cache()
    return found
