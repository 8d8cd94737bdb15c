"""Problems made of Hugging Face models, and their trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.astra.ext.transformers.hf_problem import HFASTProblem as HFASTProblem
    from nip_astra.astra.ext.transformers.hf_problem import HFASTSystem as HFASTSystem
    from nip_astra.astra.ext.transformers.hf_problem import (
        HFEvaluationProblem as HFEvaluationProblem,
    )
    from nip_astra.astra.ext.transformers.hf_problem import HFEvaluationSystem as HFEvaluationSystem
    from nip_astra.astra.ext.transformers.hf_trainer import HFASTConfiguration as HFASTConfiguration
    from nip_astra.astra.ext.transformers.hf_trainer import HFASTTrainer as HFASTTrainer

_HOMES = {
    "HFASTConfiguration": "hf_trainer",
    "HFASTProblem": "hf_problem",
    "HFASTSystem": "hf_problem",
    "HFASTTrainer": "hf_trainer",
    "HFEvaluationProblem": "hf_problem",
    "HFEvaluationSystem": "hf_problem",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
