"""nip's name types and constants."""

from __future__ import annotations

from typing import Literal, TypeAlias

ScenarioType: TypeAlias = Literal["graph_isomorphism", "image_classification", "code_validation"]
TrainerType: TypeAlias = Literal[
    "vanilla_ppo", "solo_agent", "spg", "reinforce", "pure_text_ei", "pure_text_malt"
]
InteractionProtocolType: TypeAlias = Literal[
    "nip", "adp", "debate", "merlin_arthur", "mnip", "solo_verifier", "multi_channel_test"
]
SpgVariantType: TypeAlias = Literal["spg", "pspg", "lola", "pola", "sos", "psos"]
IhvpVariantType: TypeAlias = Literal["conj_grad", "neumann", "nystrom"]
GuessType: TypeAlias = Literal["zero", "one", "y"]
TestSchemeType: TypeAlias = Literal["none", "all", "last", "first_and_last"]
PpoLossType: TypeAlias = Literal["clip", "kl_penalty"]
BinarificationMethodType: TypeAlias = Literal["select_two", "merge", "random"]
ActivationType: TypeAlias = Literal["relu", "tanh", "sigmoid"]
ImageBuildingBlockType: TypeAlias = Literal["conv2d", "residual_basic"]
MessageRegressionMethodType: TypeAlias = Literal["mlp", "cnn"]
BaseRunType: TypeAlias = Literal["none", "parameters", "rerun_tests"]

SEEDS = (8144, 820, 4173, 3992, 4506, 9876, 5074, 446, 5147, 9030)
HF_BUGGY_APPS_REPO = "lrhammond/buggy-apps"
CHECKPOINT_STATE_ARTIFACT_PREFIX = "state_"
CHECKPOINT_STATE_ARTIFACT_TYPE = "state"
ROLLOUTS_ARTIFACT_PREFIX = "full_rollouts_"
ROLLOUTS_ARTIFACT_TYPE = "full_rollouts"
