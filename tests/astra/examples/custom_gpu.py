"""Put auditor and target on separate devices, in a custom loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import AdamW

from nip_astra.astra import DPO, ASTEnvironment, Harness
from tests.astra.examples.gpt2_train import GPT2System

logger = logging.getLogger("astra.example")
PROMPTS = ["the cat sat on a mat", "good day how are you"]


class AllocatedProblem(GPT2System):
    """Models on given devices; log-probabilities meet on the target's device."""

    def __init__(self, model: str, moderator: Any, auditor_device: str, target_device: str) -> None:
        super().__init__(model, moderator, auditor_device)
        self.target.to(target_device)

    def get_tester_logprobs(self, context: Sequence[str], continuation: Sequence[str]) -> Tensor:
        return super().get_tester_logprobs(context, continuation).to(self.target.device)


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
