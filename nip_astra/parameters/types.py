"""The names of what ships, by kind. Names of your own need no entry here."""

from __future__ import annotations

from enum import StrEnum


class TrainerType(StrEnum):
    """Trainers."""

    AST_DPO = "ast_dpo"
    """Online DPO of an attacker over trees of conversation."""


class ScenarioType(StrEnum):
    """Kinds of scenario."""

    AST_CHAT = "ast_chat"
    """An attacker and a frozen target converse; a scorer rates the target's responses."""


class LanguageModelType(StrEnum):
    """Language-model backends."""

    HUGGINGFACE = "huggingface"
    """A causal language model of transformers in this process."""


class ScorerType(StrEnum):
    """Scorers."""

    CLASSIFIER = "classifier"
    """One label's probability under a Hugging Face sequence classifier."""
    PROFANITY = "profanity"
    """The linear offensiveness classifier of alt-profanity-check."""
