"""Alias of `ast_system`."""

from nip_astra.astra.methods.ast_system import (
    ASTEnvironment,
    ASTEvaluator,
    ASTNode,
    ASTProblem,
    ASTSampler,
    ASTSystem,
)

__all__ = ["ASTEnvironment", "ASTEvaluator", "ASTNode", "ASTProblem", "ASTSampler", "ASTSystem"]
