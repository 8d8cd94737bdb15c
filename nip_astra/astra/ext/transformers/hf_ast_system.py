"""Alias of the Hugging Face problem and trainer (newer name)."""

from nip_astra.astra.ext.transformers.hf_problem import (
    HFASTProblem,
    HFASTSystem,
    HFEvaluationProblem,
    HFEvaluationSystem,
)
from nip_astra.astra.ext.transformers.hf_trainer import HFASTConfiguration, HFASTTrainer

__all__ = [
    "HFASTConfiguration",
    "HFASTProblem",
    "HFASTSystem",
    "HFASTTrainer",
    "HFEvaluationProblem",
    "HFEvaluationSystem",
]
