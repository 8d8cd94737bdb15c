"""Train by PPO in a custom loop, with a value head on the attacker's hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoTokenizer, GPT2LMHeadModel

from nip_astra.astra import PPO, ASTEnvironment, ASTProblem, Harness, ValueFunctionProblem
from tests.astra.examples.gpt2_train import read_pairs, score, speak

PROMPTS = ["the cat sat on a mat", "good day how are you"]


class PPOProblem(ASTProblem, ValueFunctionProblem):
    """An attacker with a value head, and a target."""

    def __init__(self, model: str, moderator: Any, device: str = "cpu") -> None:
        super().__init__(moderator)
        self.device = device
        self.attacker = GPT2LMHeadModel.from_pretrained(model).to(device)
        self.target = GPT2LMHeadModel.from_pretrained(model).to(device)
        size = self.attacker.config.n_embd
        self.vf = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, 1)).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def rollout_prompt_with_attacker(self, x: Sequence[str]) -> list[str]:
        return speak(self.attacker, self.tokenizer, x)

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        return speak(self.target, self.tokenizer, x)

    def get_attacker_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return score(self.attacker, self.tokenizer, context, continuation)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return score(self.target, self.tokenizer, context, continuation)

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self.get_target_logprobs(context, continuation)

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        ids, is_read, is_scored = read_pairs(self.tokenizer, context, continuation, self.device)
        read = self.attacker(input_ids=ids, attention_mask=is_read, output_hidden_states=True)
        values = self.vf(read.hidden_states[-1]).squeeze(-1)
        # At the positions of the log-probabilities: before each token of the continuation.
        return values[:, :-1].masked_fill(~is_scored[:, 1:], 0.0)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.attacker.parameters()
        yield from self.vf.parameters()


class AsItWas(PPOProblem):
    """The original value function: masked a position too far, and its head never trained."""

    def value(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        ids, is_read, is_scored = read_pairs(self.tokenizer, context, continuation, self.device)
        read = self.attacker(input_ids=ids, attention_mask=is_read, output_hidden_states=True)
        values = self.vf(read.hidden_states[-1])
        return values.masked_fill(~is_scored.unsqueeze(-1), 0.0)[:, :-1]

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.attacker.parameters()


class HeadForgotten(PPOProblem):
    """The values are aligned, but no optimizer has the head."""

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.attacker.parameters()


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
