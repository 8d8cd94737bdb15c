"""Adaptive stress testing of language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    # Imported on first use: torch and transformers take seconds.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
