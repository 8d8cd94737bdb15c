"""Adaptive stress testing of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports

if TYPE_CHECKING:
    from nip_astra.astra.methods.ast_evaluator import ASTEvaluator as ASTEvaluator
    from nip_astra.astra.methods.ast_system import ASTEnvironment as ASTEnvironment
    from nip_astra.astra.methods.ast_system import ASTNode as ASTNode
    from nip_astra.astra.methods.ast_system import ASTProblem as ASTProblem
    from nip_astra.astra.methods.ast_system import ASTSampler as ASTSampler
    from nip_astra.astra.methods.ast_system import ASTSystem as ASTSystem

_HOMES = {
    "ASTEnvironment": "ast_system",
    "ASTEvaluator": "ast_evaluator",
    "ASTNode": "ast_system",
    "ASTProblem": "ast_system",
    "ASTSampler": "ast_system",
    "ASTSystem": "ast_system",
}

__all__ = [*_HOMES]


# Imported on first use: torch and transformers take seconds.
__getattr__, __dir__ = lazy_exports(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
