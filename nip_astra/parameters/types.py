"""The names of what ships, by kind. Names of your own need no entry here."""

from __future__ import annotations

from enum import StrEnum


class TrainerType(StrEnum):
    """Trainers."""

    AST_DPO = "ast_dpo"
    """Online DPO of an attacker over trees of conversation."""
    AST_IPO = "ast_ipo"
    """Online IPO of an attacker: preference by a fixed margin."""
    AST_PPO = "ast_ppo"
    """Token-level PPO of an attacker with a value head."""
    AST_GRPO = "ast_grpo"
    """Group-relative policy optimisation of an attacker; siblings are the group."""
    AST_REINFORCE = "ast_reinforce"
    """REINFORCE of an attacker, mixed with a divergence from the reference."""
    AST_SFT = "ast_sft"
    """Supervised training of an attacker on given or best-so-far probes."""


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
    DETOXIFY = "detoxify"
    """A category of one of the Detoxify models."""
    JUDGE = "judge"
    """A chat model behind an OpenAI-compatible service, with a rubric."""
    LLAMA_GUARD = "llama_guard"
    """Probability of "unsafe" under a chat model of the Llama Guard type; reads conversations."""
    PROFANITY = "profanity"
    """The linear offensiveness classifier of alt-profanity-check."""
    PYTHON = "python"
    """A function of your own."""
    TOXBLOCK = "toxblock"
    """The small toxicity classifier that tox-block ships."""
    WEIGHTED = "weighted"
    """The weighted mean of several scorers."""


class RewardTermType(StrEnum):
    """Terms that training adds to the reward of a probe."""

    COSINE_NOVELTY = "cosine_novelty"
    """How unlike everything found so far a probe is, by embeddings."""
    ENTROPY_BONUS = "entropy_bonus"
    """How little the attacker was set on the probe that it sampled."""
    GIBBERISH_PENALTY = "gibberish_penalty"
    """A charge for probes that the reference finds too unlikely."""
    SCORER_TERM = "scorer_term"
    """What a scorer says of the probe itself."""
    SELF_BLEU_NOVELTY = "self_bleu_novelty"
    """How unlike everything found so far a probe is, by n-grams."""
