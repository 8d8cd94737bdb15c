"""Put auditor and target on separate devices, in a custom loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.astra import DPO, ASTEnvironment, ASTProblem, Harness
from tests.astra.examples.gpt2_train import score, speak

logger = logging.getLogger("astra.example")
PROMPTS = ["the cat sat on a mat", "good day how are you"]


class AllocatedProblem(ASTProblem):
    """Models on given devices; log-probabilities meet on the target's device."""

    def __init__(self, model: str, moderator: Any, auditor_device: str, target_device: str) -> None:
        super().__init__(moderator)
        self.auditor = AutoModelForCausalLM.from_pretrained(model).to(auditor_device)
        self.target = AutoModelForCausalLM.from_pretrained(model).to(target_device)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokenizer.pad_token_id = self.tokenizer.eos_token_id

    def rollout_prompt_with_auditor(self, x: Sequence[str]) -> list[str]:
        return speak(self.auditor, self.tokenizer, x)

    def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
        return speak(self.target, self.tokenizer, x)

    def get_auditor_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        found = score(self.auditor, self.tokenizer, context, continuation)
        return found.to(self.target.device)

    def get_target_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return score(self.target, self.tokenizer, context, continuation)

    def get_baseline_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return self.get_target_logprobs(context, continuation)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.auditor.parameters()


def main(
    model: str, moderator: Any, auditor_device: str = "cpu", target_device: str = "cpu"
) -> list[int]:
    problem = AllocatedProblem(model, moderator, auditor_device, target_device)
    env = ASTEnvironment(problem, PROMPTS)
    solver = DPO(problem)
    optimizer = AdamW(problem.parameters(), lr=1e-3)
    harness = Harness(
        env,
        solver,
        num_episodes_per_experience=1,
        use_wandb=False,
        dataloader_kwargs={"batch_size": 1},
    )
    sizes = []
    for step in range(2):
        buffer = harness.experience()
        logger.info("step %d: %d batches", step, len(buffer))
        sizes.append(len(buffer))
        for index, batch in enumerate(buffer):
            loss, step_logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logger.info("step %d, batch %d: loss=%.4f", step, index, loss.item())
            step_logs["step"] = step
            harness.log_current_step(step_logs)
    return sizes
