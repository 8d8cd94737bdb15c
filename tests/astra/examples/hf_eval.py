"""Evaluate a trained and saved tester."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nip_astra.astra import ASTSampler
from nip_astra.astra.datasets import CONVOKIT_REDDIT_TEST
from nip_astra.astra.ext.transformers.hf_ast_system import HFEvaluationSystem
from nip_astra.astra.methods.ast_system import ASTEvaluator

SHORT = {"max_new_tokens": 6}


def main(checkpoint: str, target: str, scorer: Any, metrics_file: Path) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    system = HFEvaluationSystem(
        tester_checkpoint=checkpoint,
        tester_base_model_id=None,  # the checkpoint includes a tokenizer
        target_model_id=target,
        device=device,
        scorer=scorer,
        attacker_options=SHORT,
        target_options=SHORT,
    )
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TEST, 1, 3)
    evaluator = ASTEvaluator(sampler, seeds=CONVOKIT_REDDIT_TEST)
    metrics = evaluator.evaluate(n_rollouts=2, progress=True)
    evaluator.write_json(metrics, metrics_file)
    return metrics
