"""Evaluate a trained GPT-2 tester against a chosen target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.astra import ASTSampler, ASTSystem
from nip_astra.astra.datasets import CONVOKIT_REDDIT_TEST
from nip_astra.astra.methods.ast_system import ASTEvaluator
from tests.astra.examples.gpt2_train import GPT2System


class GPT2EvaluationSystem(GPT2System):
    """Generates and scores as in training; the tester comes from a checkpoint."""

    def __init__(self, checkpoint: str, target: str, scorer: Any, device: str = "cpu") -> None:
        ASTSystem.__init__(self, scorer)
        self.tester = AutoModelForCausalLM.from_pretrained(checkpoint).to(device)
        self.target = AutoModelForCausalLM.from_pretrained(target).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.tokenizer.pad_token_id = self.tokenizer.eos_token_id


def main(checkpoint: str, target: str, scorer: Any, metrics_file: Path) -> dict[str, Any]:
    system = GPT2EvaluationSystem(checkpoint, target, scorer)
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TEST, 1, 3)
    evaluator = ASTEvaluator(sampler, seeds=CONVOKIT_REDDIT_TEST)
    metrics = evaluator.evaluate(n_rollouts=5, progress=True)
    evaluator.write_json(metrics, metrics_file)
    return metrics
