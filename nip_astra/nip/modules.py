"""The table of nip's modules and names and ours; see `lazy.lazy_modules`."""

from __future__ import annotations

PACKAGE = "nip_astra.nip"


def _at(module: str, names: str) -> dict[str, str]:
    """Return the table of names defined by one of our modules."""
    return dict.fromkeys(names.split(), module)


_SCHEDULES = {
    **_at(
        "nip_astra.parameters.update_schedule",
        "ConstantUpdateSchedule ContiguousPeriodicUpdateSchedule AlternatingPeriodicUpdateSchedule",
    ),
    "AgentUpdateSchedule": "nip_astra.parameters.update_schedule:UpdateSchedule",
}
_AGENTS = _at(
    f"{PACKAGE}.hyper_params",
    "LrFactors AgentParameters RandomAgentParameters AgentsParameters "
    "GraphIsomorphismAgentParameters ImageClassificationAgentParameters PureTextAgentParameters "
    "CodeValidationAgentParameters",
)
_TRAINERS = _at(
    f"{PACKAGE}.hyper_params",
    "RlTrainerParameters CommonPpoParameters VanillaPpoParameters SpgParameters "
    "ReinforceParameters SoloAgentParameters TextRlParameters PureTextEiParameters "
    "PureTextMaltParameters",
)
_PROTOCOLS = _at(
    f"{PACKAGE}.hyper_params",
    "CommonProtocolParameters NipProtocolParameters DebateProtocolParameters "
    "MnipProtocolParameters ZkProtocolParameters",
)
_SCENARIOS = _at(
    f"{PACKAGE}.hyper_params", "ImageClassificationParameters CodeValidationParameters"
)
_DATASET = _at(f"{PACKAGE}.hyper_params", "DatasetParameters")
_REGRESSION = _at(f"{PACKAGE}.hyper_params", "MessageRegressionParameters")
_BASE_RUN = _at(f"{PACKAGE}.hyper_params", "BaseRunParameters")
_TYPES = _at(
    f"{PACKAGE}.types",
    "ScenarioType SpgVariantType IhvpVariantType GuessType TrainerType TestSchemeType "
    "PpoLossType BinarificationMethodType ActivationType InteractionProtocolType "
    "ImageBuildingBlockType MessageRegressionMethodType BaseRunType",
)
_GROUPS = {
    **(_AGENTS | _TRAINERS | _PROTOCOLS | _SCENARIOS | _DATASET | _REGRESSION | _BASE_RUN),
    **(_SCHEDULES | _TYPES),
    **_at(f"{PACKAGE}.hyper_params", "HyperParameters SubParameters register_parameter_class"),
}
_SETTINGS = _at(f"{PACKAGE}.running", "ExperimentSettings")
_RUN = _at(f"{PACKAGE}.running", "run_experiment prepare_experiment PreparedExperimentInfo")
_FACTORY = _at(f"{PACKAGE}.running", "build_scenario_instance")
_INSTANCE = {"ScenarioInstance": f"{PACKAGE}.components:ScenarioInstanceView"}
_TRAINER_BASE = {
    **_at("nip_astra.trainers.trainer_base", "IterationContext"),
    **_at(f"{PACKAGE}.tensors", "Trainer TensorDictTrainer attach_progress_bar"),
}
_REGISTRY = {
    **_at("nip_astra.trainers.registry", "register_trainer"),
    "TRAINER_REGISTRY": "nip_astra.trainers.registry:TRAINERS",
}
_TENSORS = _at(f"{PACKAGE}.tensors", "TensorDictRlTrainer")
_TEXTS = _at(f"{PACKAGE}.texts", "PureTextRlTrainer")
_EI = _at(f"{PACKAGE}.texts", "PureTextEiTrainer")
_MALT = _at(f"{PACKAGE}.texts", "PureTextMaltTrainer")
_ANALYSERS = _at(f"{PACKAGE}.texts", "ROLLOUT_ANALYSERS")
_OURS = {
    name: _at(f"{PACKAGE}.tensors", cls)
    for name, cls in (
        ("vanilla_ppo", "VanillaPpoTrainer"),
        ("reinforce", "ReinforceTrainer"),
        ("spg", "SpgTrainer"),
        ("solo_agent", "SoloAgentTrainer"),
    )
}
_TEXT_AGENTS = _at(f"{PACKAGE}.texts", "PureTextSharedModelGroup PureTextCombinedWhole")
_ENVIRONMENT = {
    **_at(f"{PACKAGE}.texts", "PureTextEnvironment"),
    **_at(f"{PACKAGE}.components", "TensorDictEnvironment"),
    "Environment": f"{PACKAGE}.components:TensorDictEnvironment",
    "PromptMessage": "nip_astra.language_models.services.chat:ChatMessage",
}
_PARTS = {
    **_at(
        f"{PACKAGE}.components",
        "AgentBody AgentPolicyHead AgentValueHead SoloAgentHead CombinedBody CombinedPolicyHead "
        "CombinedValueHead",
    ),
    "Agent": f"{PACKAGE}.components:AgentView",
    "AgentPart": f"{PACKAGE}.components:TensorDictAgentPart",
    "TensorDictAgentPartMixin": f"{PACKAGE}.components:TensorDictAgentPart",
    "PureTextWholeAgent": "nip_astra.scenario_base.text.models:TextAgent",
}
_GRAPHS = {
    "GraphIsomorphismDataset": f"{PACKAGE}.running:Dataset",
    "GraphIsomorphismEnvironment": f"{PACKAGE}.running:Environment",
}
_IMAGES = {
    "ImageClassificationDataset": f"{PACKAGE}.running:Dataset",
    "ImageClassificationEnvironment": f"{PACKAGE}.running:Environment",
}
_GRAPH_GENERATION = _at(f"{PACKAGE}.tools", "generate_gi_dataset GraphIsomorphicDatasetConfig")
_TIMING = _at(
    f"{PACKAGE}.tools",
    "Timeable register_timeable list_timeables time_timeable time_all_timeables",
)
_RUN_TIMEABLES = {
    **_at(
        f"{PACKAGE}.tools", "GraphIsomorphismPpoRunTimeable GraphIsomorphismSoloAgentRunTimeable"
    ),
    "RunTimeable": f"{PACKAGE}.tools:Timeable",
}
_DATA = {
    **_at(f"{PACKAGE}.components", "TensorDictDataLoader"),
    "Dataset": "tensordict:TensorDict",
    "TensorDictDataset": "tensordict:TensorDict",
    "NestedArrayDictDataset": "nip_astra.utils.nested_array_dict:NestedArrayDict",
}
_PROTOCOL_BASE = _at(
    "nip_astra.protocols.protocol_base",
    "ProtocolHandler DeterministicSingleVerifierProtocolHandler",
)
_PROTOCOL_REGISTRY = {
    **_at("nip_astra.protocols.registry", "register_protocol_handler"),
    **_at(f"{PACKAGE}.running", "build_protocol_handler"),
    "PROTOCOL_HANDLER_REGISTRY": "nip_astra.protocols.registry:PROTOCOL_HANDLERS",
}
_PROTOCOLS_OF_LIBRARY = _at(
    "nip_astra.protocols.library",
    "NipProtocol AdpProtocol DebateProtocol MerlinArthurProtocol MnipProtocol SoloVerifierProtocol "
    "MultiChannelTestProtocol",
)
_TEXT_PROTOCOLS = {
    "CodeValidationProtocolHandler": "nip_astra.protocols.protocol_base:ProtocolHandler",
    **{
        f"{name}CodeValidationProtocol": f"nip_astra.protocols.library:{name}Protocol"
        for name in ("Adp", "Debate", "MerlinArthur", "Mnip", "Nip", "SoloVerifier")
    },
}
_ZERO_KNOWLEDGE = _at("nip_astra.protocols.zero_knowledge", "ZeroKnowledgeProtocol")
_MATHS = _at(
    f"{PACKAGE}.maths",
    "mean_for_unique_keys aggregate_mean_grouped_by_class logit_entropy set_seed "
    "compute_nystrom_ihvp compute_sos_update",
)
MODULES: dict[str, dict[str, str]] = {
    "": _GROUPS | _RUN | _SETTINGS | _at("nip_astra.version", "__version__"),
    "code_validation": {
        **_at(f"{PACKAGE}.hyper_params", "CodeValidationAgentParameters"),
        "CodeValidationProtocolHandler": "nip_astra.protocols.protocol_base:ProtocolHandler",
    },
    "code_validation.dataset_generation": _at(f"{PACKAGE}.running", "_get_openrouter_response"),
    "code_validation.protocols": _TEXT_PROTOCOLS,
    "code_validation.rollout_analysis": _ANALYSERS,
    "constants": _at(
        f"{PACKAGE}.types",
        "CHECKPOINT_STATE_ARTIFACT_PREFIX CHECKPOINT_STATE_ARTIFACT_TYPE ROLLOUTS_ARTIFACT_PREFIX "
        "ROLLOUTS_ARTIFACT_TYPE HF_BUGGY_APPS_REPO SEEDS",
    )
    | _at(f"{PACKAGE}.tools", "GI_DATA_DIR"),
    "experiment_settings": _SETTINGS,
    "factory": _FACTORY,
    "graph_isomorphism": _GRAPHS,
    "graph_isomorphism.data": _GRAPHS,
    "graph_isomorphism.dataset_generation": _GRAPH_GENERATION,
    "graph_isomorphism.environment": _GRAPHS,
    "image_classification": {
        **_IMAGES,
        **_at(f"{PACKAGE}.tools", "DATASET_WRAPPER_CLASSES"),
    },
    "image_classification.data": {
        **_IMAGES,
        **_at(f"{PACKAGE}.tools", "DATASET_WRAPPER_CLASSES"),
    },
    "image_classification.environment": _IMAGES,
    "parameters": _GROUPS,
    "parameters.agents": _AGENTS,
    "parameters.base_run": _BASE_RUN,
    "parameters.dataset": _DATASET,
    "parameters.message_regression": _REGRESSION,
    "parameters.parameters_base": _at(
        f"{PACKAGE}.hyper_params", "SubParameters register_parameter_class"
    ),
    "parameters.protocol": _PROTOCOLS,
    "parameters.scenario": _SCENARIOS,
    "parameters.trainers": _TRAINERS,
    "parameters.types": _TYPES,
    "parameters.update_schedule": _SCHEDULES,
    "protocols": _PROTOCOL_BASE | _PROTOCOL_REGISTRY | _PROTOCOLS_OF_LIBRARY | _ZERO_KNOWLEDGE,
    "protocols.main_protocols": _PROTOCOLS_OF_LIBRARY,
    "protocols.protocol_base": _PROTOCOL_BASE,
    "protocols.registry": _PROTOCOL_REGISTRY,
    "protocols.zero_knowledge": _ZERO_KNOWLEDGE,
    "rl_objectives": {
        **_at("nip_astra.rl_objectives.objective", "Objective"),
        **_at(
            f"{PACKAGE}.tensors",
            "ClipPPOLossImproved KLPENPPOLossImproved ReinforceLossImproved SpgLoss",
        ),
    },
    "run": _RUN,
    "scenario_base": _ANALYSERS | _ENVIRONMENT | _TEXT_AGENTS | _DATA | _PARTS,
    "scenario_base.agents": _TEXT_AGENTS | _PARTS,
    "scenario_base.data": _DATA,
    "scenario_base.environment": _ENVIRONMENT,
    "scenario_base.rollout_analysis": _ANALYSERS,
    "scenario_instance": _INSTANCE,
    "trainers": {
        **(_SETTINGS | _INSTANCE | _at(f"{PACKAGE}.hyper_params", "HyperParameters")),
        **(_TRAINER_BASE | _REGISTRY | _TENSORS | _TEXTS | _EI | _MALT),
        **{name: home for names in _OURS.values() for name, home in names.items()},
        **_at(f"{PACKAGE}.texts", "build_trainer get_trainer_class"),
    },
    "trainers.ei_pure_text": _EI,
    "trainers.malt_pure_text": _MALT,
    "trainers.registry": _REGISTRY,
    "trainers.rl_pure_text_base": _TEXTS,
    "trainers.rl_tensordict_base": _TENSORS,
    "trainers.trainer_base": _TRAINER_BASE,
    **{f"trainers.{name}": names for name, names in _OURS.items()},
    "stat_logger": _at(f"{PACKAGE}.views", "StatLogger"),
    "timing": {**_TIMING, "RunTimeable": f"{PACKAGE}.tools:Timeable"},
    "timing.run": _RUN_TIMEABLES,
    "timing.timeables": _TIMING | _at(f"{PACKAGE}.tools", "TIMEABLES"),
    "utils": {},
    "utils.bugfix": _at(f"{PACKAGE}.tensors", "Reward2GoTransform"),
    "utils.env": _at(
        f"{PACKAGE}.running",
        "get_env_var env_var_default_factory load_env_once EnvironmentVariableDoesNotExistError",
    ),
    "utils.experiments": _at(
        f"{PACKAGE}.running",
        "ExperimentFunctionArguments HyperparameterExperiment SequentialHyperparameterExperiment "
        "MultiprocessHyperparameterExperiment",
    ),
    "utils.maths": _MATHS,
    "utils.output": _at(f"{PACKAGE}.tools", "DummyTqdm"),
    "utils.nested_array_dict": {
        **_at(
            "nip_astra.utils.nested_array_dict",
            "NestedArrayDict stack_nested_array_dicts concatenate_nested_array_dicts",
        ),
        **_at(
            "nip_astra.utils.nested_array_dict",
            "IntArraySpec FloatArraySpec BoolArraySpec StringArraySpec CompositeSpec",
        ),
    },
}
"""For each module of nip's, its names and their locations; after a colon, our name. The empty
module name is the package itself."""
