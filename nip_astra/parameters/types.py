"""Built-in names by type. Registered names need no entry here."""

from __future__ import annotations

from enum import StrEnum


class TrainerType(StrEnum):
    """Trainers."""

    AST_DPO = "ast_dpo"
    """Online DPO of an attacker over conversation trees."""
    AST_IPO = "ast_ipo"
    """Online IPO of an attacker: preference by a fixed margin."""
    AST_SIMPO = "ast_simpo"
    """Online simple preference optimisation of an attacker."""
    AST_PPO = "ast_ppo"
    """Token-level PPO of an attacker with a value head."""
    AST_GRPO = "ast_grpo"
    """Group-relative policy optimisation of an attacker; siblings are the group."""
    AST_REINFORCE = "ast_reinforce"
    """REINFORCE of an attacker, mixed with a divergence from the reference."""
    AST_SFT = "ast_sft"
    """Supervised training of an attacker on given or best-so-far probes."""
    VANILLA_PPO = "vanilla_ppo"
    """Independent PPO of provers and verifiers."""
    MAPPO = "mappo"
    """PPO of provers and verifiers with a critic that observes all agents' observations."""
    REINFORCE = "reinforce"
    """REINFORCE of provers and verifiers, with reward to go or with advantages."""
    SPG = "spg"
    """Stackelberg policy gradient of provers and verifiers, with variants such as LOLA."""
    SOLO_AGENT = "solo_agent"
    """Supervised training of each agent alone, to predict the label without interaction."""
    SELF_HOSTED_GRPO = "self_hosted_grpo"
    """GRPO of a language model on the problems of a task."""
    SELF_HOSTED_OPD = "self_hosted_opd"
    """On-policy distillation: a language model learns from a teacher on its own samples."""
    REMOTE_API_GRPO = "remote_api_grpo"
    """GRPO on trajectories, with a loss of the training service."""
    REMOTE_API_OPD = "remote_api_opd"
    """On-policy distillation on trajectories, with a loss of the training service."""
    REMOTE_API_CROSS_ENTROPY = "remote_api_cross_entropy"
    """Supervised training on a task's solutions by the training service."""
    PURE_TEXT_EI = "pure_text_ei"
    """Expert iteration of chat models that act as provers and verifiers."""
    PURE_TEXT_MALT = "pure_text_malt"
    """Preference training of chat-model provers and verifiers on trees of their answers."""


class ScenarioType(StrEnum):
    """Scenario types."""

    AST_CHAT = "ast_chat"
    """An attacker and a frozen target converse; a scorer rates the target's responses."""
    GRAPH_ISOMORPHISM = "graph_isomorphism"
    """Provers and verifiers send nodes of two graphs; the verifier decides isomorphism."""
    IMAGE_CLASSIFICATION = "image_classification"
    """Provers and verifiers point at parts of an image; the verifier predicts its class."""
    CODE_VALIDATION = "code_validation"
    """Chat models, provers and a verifier, discuss whether a program is correct."""
    SECRET_WORD = "secret_word"
    """Chat models, provers who know a word and a verifier who needs it, discuss a claim."""
    TASK = "task"
    """A policy answers the problems of a task in messages and is rewarded."""


class TaskType(StrEnum):
    """Tasks of a policy that answers in messages."""

    ARITHMETIC = "arithmetic"
    """Sums, differences and products of whole numbers."""
    COUNTDOWN = "countdown"
    """Make a target number from given numbers."""
    GUESS_NUMBER = "guess_number"
    """Find a hidden number in several turns, with the feedback "higher" or "lower"."""
    PIG_LATIN = "pig_latin"
    """Translate words into Pig Latin."""
    VERIFIERS = "verifiers"
    """Tasks of a taskset of the library verifiers."""
    GYMNASIUM = "gymnasium"
    """Episodes of a text environment with Gymnasium's interface."""
    OPENENV = "openenv"
    """Episodes of an environment of OpenEnv, at an address or in this process."""
    DATASET = "dataset"
    """Problems of a file or data set, rated by their answers or by a scorer."""


class InteractionProtocolType(StrEnum):
    """Interaction protocols."""

    NIP = "nip"
    """A verifier asks and a prover answers, alternately."""
    ADP = "adp"
    """A prover sends one message and the verifier decides."""
    DEBATE = "debate"
    """Two provers argue for opposite answers and read each other's messages."""
    MERLIN_ARTHUR = "merlin_arthur"
    """One of two provers, chosen at random, sends one message and the verifier decides."""
    MNIP = "mnip"
    """Two provers who do not see each other's channel answer a verifier."""
    SOLO_VERIFIER = "solo_verifier"
    """The verifier decides alone."""
    MULTI_CHANNEL_TEST = "multi_channel_test"
    """Three provers and a verifier on three channels, to test general protocols."""


class MessageRegressorType(StrEnum):
    """Regressors that predict labels from messages."""

    MLP = "mlp"
    """A small network."""
    LINEAR = "linear"
    """Logistic regression."""


class LanguageModelType(StrEnum):
    """Language-model backends."""

    HUGGINGFACE = "huggingface"
    """A causal language model of transformers in this process."""
    VLLM = "vllm"
    """The same, but vLLM samples from it; needs a GPU."""
    REMOTE = "remote"
    """A tokenizer only; a training service has the weights."""


class ChatModelType(StrEnum):
    """Backends of chat models."""

    OPENAI = "openai"
    """A model behind an OpenAI-compatible service."""
    LOCAL = "local"
    """A language model in this process."""
    SCRIPTED = "scripted"
    """Prepared answers."""
    PYTHON = "python"
    """A user's function."""
    HTTP = "http"
    """A model behind any HTTP service, by a template of its requests."""


class TrainingServiceType(StrEnum):
    """Services that train the policy of a language-model trainer."""

    LOCAL = "local"
    """In this process, on the settings' device."""
    HTTP = "http"
    """A service started by `nip-astra serve --train`."""
    TINKER = "tinker"
    """Tinker, or a service started by `nip-astra serve --tinker`."""


class ScorerType(StrEnum):
    """Scorers."""

    CLASSIFIER = "classifier"
    """One label's probability under a Hugging Face sequence classifier."""
    DETOXIFY = "detoxify"
    """A category of one of the Detoxify models."""
    DISCLOSURE = "disclosure"
    """The share of a secret's words that a response discloses."""
    JUDGE = "judge"
    """A chat model behind an OpenAI-compatible service, with a rubric."""
    LLAMA_GUARD = "llama_guard"
    """Probability of "unsafe" under a chat model of the Llama Guard type; reads conversations."""
    PROFANITY = "profanity"
    """The linear offensiveness classifier of alt-profanity-check."""
    PYTHON = "python"
    """A custom function."""
    TOXBLOCK = "toxblock"
    """The small toxicity classifier that tox-block ships."""
    WEIGHTED = "weighted"
    """The weighted mean of several scorers."""


class RewardTermType(StrEnum):
    """Terms that training adds to a probe's reward."""

    COSINE_NOVELTY = "cosine_novelty"
    """Distance of a probe to all previous findings, by embeddings."""
    ENTROPY_BONUS = "entropy_bonus"
    """Uncertainty of the attacker about the probe that it sampled."""
    FAILURE_RARITY = "failure_rarity"
    """Rarity of failures like a probe's among those found so far."""
    FAILURE_SHARING = "failure_sharing"
    """Rarity of a probe's kind among the rollout's other failures."""
    GIBBERISH_PENALTY = "gibberish_penalty"
    """Penalty on probes that are too unlikely under the reference."""
    SCORER_TERM = "scorer_term"
    """A scorer's value for the probe itself."""
    SELF_BLEU_NOVELTY = "self_bleu_novelty"
    """Distance of a probe to all previous findings, by n-grams."""
    WORD_RARITY = "word_rarity"
    """Rarity of the rarest word of a probe among the probes so far."""


class PretrainedModelType(StrEnum):
    """Pretrained models that give agents features of an image beside its pixels."""

    HUGGINGFACE = "huggingface"
    """An image model of transformers."""
    PCA = "pca"
    """Principal components of patches of the training images."""


class RolloutAnalyserType(StrEnum):
    """Questions about the agents' text messages, answered by a judge."""

    PROVER_ROLE_CONFORMANCE = "prover_role_conformance"
    """Whether a prover argues for its side and keeps to its role."""
    DIRECT_QUOTATION = "direct_quotation"
    """Whether a prover quotes the datapoint word for word."""
    ACCURATE_QUOTATION = "accurate_quotation"
    """Whether a prover's quotations occur in the datapoint."""
    FOLLOW_UP = "follow_up"
    """Whether a verifier follows up on the answers it got."""
