"""Problems built from Hugging Face models, and their trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

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


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
