"""nip's parameter classes, with its names and defaults, and their conversion to ours.

`OUR_NAMES` has our names of nip's fields. Fields without a counterpart are refused if they differ
from nip's default (`REFUSED`), or have no effect (`IGNORED`). As in nip, values that nothing in the
run reads are accepted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, UnreadParameterError, show_value
from nip_astra.parameters.hyper_parameters import HyperParameters as OurHyperParameters
from nip_astra.parameters.parameters_base import SubParameters as OurSubParameters
from nip_astra.parameters.update_schedule import UpdateSchedule
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.protocols.zero_knowledge import ADVERSARIAL_VERIFIER, SIMULATOR
from nip_astra.scenarios.images.pretrained import PRETRAINED_MODELS
from nip_astra.trainers.registry import TRAINERS

logger = logging.getLogger(__name__)

_AGENT: dict[str, Any] = {
    "agent_lr_factor": None,
    "body_lr_factor": None,
    "update_schedule": None,
    "use_manual_architecture": False,
    "normalize_message_history": False,
    "load_checkpoint_and_parameters": False,
    "checkpoint_entity": "",
    "checkpoint_project": "",
    "checkpoint_run_id": None,
    "checkpoint_version": "latest",
    "use_orthogonal_initialisation": True,
    "orthogonal_initialisation_gain": 1.0,
}
_HEADS: dict[str, Any] = {
    "d_decider": 16,
    "num_decider_layers": 2,
    "include_round_in_decider": True,
    "d_linear_message_selector": 16,
    "num_linear_message_selector_layers": 2,
    "d_value": 16,
    "num_value_layers": 2,
    "include_round_in_value": True,
}
_ROUNDS = {"max_message_rounds": 8, "min_message_rounds": 1}
_TWO_PROVERS = {"sequential": False, "prover0_first": True, "randomize_channel_order": True}
_TEXT_AGENT = {
    **_AGENT,
    "model_provider": "OpenAI",
    "model_name": "gpt-4o-mini-2024-07-18",
    "use_dummy_api": False,
    "shared_model_group": None,
    "temperature": None,
    "top_p": None,
    "fine_tune_from_scratch": True,
    "freeze_agent": False,
    "max_response_words": 150,
    "max_tokens_per_message": None,
    "num_invalid_generation_retries": 20,
    "vllm_openai_base_url": "http://localhost:8000/v1",
    "repetition_penalty": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "LrFactors": {"actor": 1.0, "critic": 1.0},
    "AgentParameters": _AGENT,
    "RandomAgentParameters": _AGENT,
    "GraphIsomorphismAgentParameters": {
        **_AGENT,
        "activation_function": "tanh",
        "num_gnn_layers": 5,
        "d_gnn": 16,
        "d_gin_mlp": 64,
        "gnn_output_digits": None,
        "use_dual_gnn": True,
        "num_heads": 4,
        "num_transformer_layers": 4,
        "d_transformer": 16,
        "d_transformer_mlp": 64,
        "transformer_dropout": 0.0,
        "d_node_selector": 16,
        "num_node_selector_layers": 2,
        **_HEADS,
        "use_batch_norm": True,
        "noise_sigma": 0.0,
        "use_pair_invariant_pooling": True,
        "gnn_lr_factor": None,
    },
    "ImageClassificationAgentParameters": {
        **_AGENT,
        "activation_function": "tanh",
        "building_block_type": "conv2d",
        "num_blocks_per_group": 2,
        "kernel_size": 3,
        "stride": 1,
        "pretrained_embeddings_model": None,
        "pretrained_embedding_channels": 64,
        "d_latent_pixel_selector": 16,
        "num_latent_pixel_selector_layers": 2,
        **_HEADS,
    },
    "PureTextAgentParameters": _TEXT_AGENT,
    "CodeValidationAgentParameters": _TEXT_AGENT,
    "RlTrainerParameters": {
        "frames_per_batch": 1000,
        "rollouts_per_iteration": None,
        "steps_per_env_per_iteration": None,
        "num_iterations": 1000,
        "num_epochs": 4,
        "minibatch_size": 64,
        "lr": 0.003,
        "anneal_lr": False,
        "max_grad_norm": 1.0,
        "loss_critic_type": "smooth_l1",
        "clip_value": False,
        "normalize_observations": True,
        "num_normalization_steps": 1000,
        "gamma": 0.9,
        "lmbda": 0.95,
        "body_lr_factor": None,
        "use_shared_body": True,
        "num_test_iterations": 10,
    },
    "CommonPpoParameters": {
        "loss_type": "clip",
        "clip_epsilon": 0.2,
        "kl_target": 0.01,
        "kl_beta": 1.0,
        "kl_decrement": 0.5,
        "kl_increment": 2.0,
        "critic_coef": 1.0,
        "entropy_eps": 0.001,
        "normalize_advantage": True,
    },
    "VanillaPpoParameters": {},
    "SpgParameters": {
        "variant": "psos",
        "stackelberg_sequence": None,
        "additional_lola_term": True,
        "sos_scaling_factor": 0.5,
        "sos_threshold_factor": 0.1,
        "ihvp_variant": "nystrom",
        "ihvp_num_iterations": 5,
        "ihvp_rank": 5,
        "ihvp_rho": 0.1,
    },
    "ReinforceParameters": {"use_advantage_and_critic": False},
    "SoloAgentParameters": {
        "num_epochs": 100,
        "batch_size": 256,
        "learning_rate": 0.001,
        "body_lr_factor_override": False,
    },
    "TextRlParameters": {
        "fine_tune_on_all_previous_rollouts": False,
        "verifier_guess_replacement_proportion": 0.0,
        "verifier_guess_replacement_annealing": "none",
        "verifier_guess_replacement_annealing_rate": 0.1,
        "save_transcripts": True,
        "transcript_format": "yaml",
        "test_scheme": "none",
        "test_on_whole_dataset": True,
    },
    "PureTextEiParameters": {
        "rollout_selection_method": "threshold",
        "reward_threshold": 0.9,
        "weighting_sample_size_factor": 0.5,
        "weighting_minimum": None,
        "weighting_use_replacement": True,
        "weighting_epsilon": 0.01,
    },
    "PureTextMaltParameters": {"num_responses_per_timestep": 2},
    "ImageClassificationParameters": {"num_block_groups": 1, "initial_num_channels": 16},
    "CodeValidationParameters": {
        "apps_difficulty": "interview",
        "apps_solution_number": 0,
        "apps_exclude_flagged": True,
    },
    "DatasetParameters": {
        "binarification_method": "merge",
        "selected_classes": None,
        "binarification_seed": None,
        "make_balanced": True,
        "max_train_size": None,
    },
    "CommonProtocolParameters": {
        "verifier_first": True,
        "randomize_prover_stance": False,
        "prover_reward": 1.0,
        "verifier_reward": 1.0,
        "verifier_incorrect_penalty": -1.0,
        "verifier_terminated_penalty": -1.0,
        "verifier_no_guess_reward": 0.0,
        "shared_reward": False,
        "force_guess": None,
        "zero_knowledge": False,
    },
    "NipProtocolParameters": _ROUNDS,
    "DebateProtocolParameters": _ROUNDS | _TWO_PROVERS,
    "MnipProtocolParameters": _ROUNDS | _TWO_PROVERS,
    "ZkProtocolParameters": {
        "simulator_reward_coefficient": 1.0,
        "aux_prover_reward_coefficient": 1.0,
    },
    "MessageRegressionParameters": {
        "enabled": False,
        "agents": None,
        "regression_method": "mlp",
        "test_size": 0.2,
        "reset_on_fit": True,
        "mlp_num_layers": 2,
        "mlp_hidden_size": 64,
        "mlp_activation": "relu",
        "mlp_num_epochs": 10,
        "mlp_batch_size": 512,
        "mlp_learning_rate": 0.001,
    },
    "BaseRunParameters": {
        "base_run_type": "none",
        "run_id": None,
        "wandb_project": "",
        "wandb_entity": "",
        "rerun_tests_force_test_during_training_state": True,
    },
}
"""nip's parameter classes, their fields in order, and nip's defaults."""
GROUPS = {
    "rl": "RlTrainerParameters",
    "ppo": "CommonPpoParameters",
    "vanilla_ppo": "VanillaPpoParameters",
    "spg": "SpgParameters",
    "reinforce": "ReinforceParameters",
    "solo_agent": "SoloAgentParameters",
    "text_rl": "TextRlParameters",
    "pure_text_ei": "PureTextEiParameters",
    "pure_text_malt": "PureTextMaltParameters",
    "image_classification": "ImageClassificationParameters",
    "code_validation": "CodeValidationParameters",
    "dataset_options": "DatasetParameters",
    "protocol_common": "CommonProtocolParameters",
    "nip_protocol": "NipProtocolParameters",
    "debate_protocol": "DebateProtocolParameters",
    "mnip_protocol": "MnipProtocolParameters",
    "zk_protocol": "ZkProtocolParameters",
    "message_regression": "MessageRegressionParameters",
    "base_run": "BaseRunParameters",
}
"""Groups of nip's hyper-parameters, and their classes."""
AGENT_CLASSES = {
    "graph_isomorphism": "GraphIsomorphismAgentParameters",
    "image_classification": "ImageClassificationAgentParameters",
    "code_validation": "CodeValidationAgentParameters",
}
"""Classes of agents by scenario."""
OUR_NAMES = {
    "ppo.entropy_eps": "ppo.entropy_weight",
    "solo_agent.batch_size": "solo_agent.minibatch_size",
    "solo_agent.learning_rate": "solo_agent.lr",
    "text_rl.fine_tune_on_all_previous_rollouts": "pure_text_ei.fine_tune_on_all_previous_rollouts",
    "protocol_common.randomize_prover_stance": "code_validation.randomize_prover_stance",
    "nip_protocol": "nip",
    "debate_protocol": "debate",
    "mnip_protocol": "mnip",
    "pretrain_agents": "rl.pretrain_agents",
}
"""Parameters, or groups of them, with another name here."""
REFUSED = ("use_manual_architecture",)
IGNORED = (
    *("functionalize_modules", "test_size", "text_rl.save_transcripts"),
    *("text_rl.transcript_format", "code_validation.apps_solution_number"),
    *("code_validation.apps_exclude_flagged", "randomize_channel_order"),
)
"""Parameters that change no result here, or only the selection of datapoints."""
ONLY_HERE = {
    "rl": {"grad_clipping": "joint", "pretrain_decisions": False},
    "reinforce": {"entropy_weight": 0.0},
    "solo_agent": {"anneal_lr": False},
    "text_rl": {
        "num_fine_tune_epochs": None,
        "fine_tune_minibatch_size": None,
        "fine_tune_lr_multiplier": None,
        "min_fine_tune_examples": 10,
    },
}
"""Parameters that nip lacks, with the values that reproduce nip."""
LEVELS = {"introductory": [1], "interview": [2], "competition": [3]}
NUM_PAIRS = {"test": 100, "er1000": 1000}
"""Number of training pairs of graphs, by nip's dataset; 10,000 for the others."""
SELECTED_CLASSES = {"cifar10": [3, 5]}
"""Default classes of `select_two`; 0 and 1 for other datasets."""
BLOCKS = {"conv2d": "conv", "residual_basic": "residual"}
SCHEDULES = {cls.__name__: cls for cls in UpdateSchedule.__subclasses__()}
OPENROUTER = "https://openrouter.ai/api/v1"
DUMMY_ANSWERS = ["Decision: reject", "Decision: accept", *("Please explain that further.",) * 3]
"""Answers of `use_dummy_api`: a decision in two of five, as in nip."""


class SubParameters:
    """Base of nip's parameter classes; each is a dataclass with positional fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are
        }

    def get(self, address: str) -> Any:
        """Return the value at a dotted path."""
        value: Any = self
        for name in address.split("."):
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        return value

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any], ignore_extra_keys: bool = False) -> Any:
        """Restore the result of `to_dict`, of the class that its `_type` names, or of this one."""
        name = str(params_dict.get("_type", cls.__name__))
        return _object(name, _known(name, params_dict) if ignore_extra_keys else params_dict)

    @classmethod
    def construct_test_params(cls) -> SubParameters:
        """Return the smallest valid parameters: scripted chat models, small networks."""
        small = {name: 1 for name in DEFAULTS[cls.__name__] if name.startswith("num_")}
        chat = {"use_dummy_api": True} if "use_dummy_api" in DEFAULTS[cls.__name__] else {}
        return cls(**(chat or small))


_BASES = {
    "RandomAgentParameters": "AgentParameters",
    "GraphIsomorphismAgentParameters": "AgentParameters",
    "ImageClassificationAgentParameters": "AgentParameters",
    "PureTextAgentParameters": "AgentParameters",
    "CodeValidationAgentParameters": "PureTextAgentParameters",
}
"""Classes of `DEFAULTS` with another base than `SubParameters`."""


def _class_of(
    name: str, fields: Mapping[str, Any], known: Mapping[str, type[SubParameters]]
) -> type[SubParameters]:
    made: Any = dataclasses.make_dataclass(
        name,
        [(field, Any, dataclasses.field(default=default)) for field, default in fields.items()],
        bases=(known[_BASES[name]] if name in _BASES else SubParameters,),
        namespace={"__doc__": f"nip's `{name}`, with nip's defaults.", "__module__": __name__},
    )
    return made  # type: ignore[no-any-return]  # as `make_dataclass` is declared


_CLASSES: dict[str, type[SubParameters]] = {}
for _name, _fields in DEFAULTS.items():
    _CLASSES[_name] = _class_of(_name, _fields, _CLASSES)
globals().update(_CLASSES)


def register_parameter_class(cls: type[SubParameters]) -> type[SubParameters]:
    """Register a dataclass of parameters, so that `from_dict` restores it; a decorator.

    Raises
    ------
    ConfigurationError
        For a class that is no dataclass.
    """
    if not dataclasses.is_dataclass(cls):
        raise ConfigurationError(
            f"{cls.__name__} is no dataclass. Put @dataclass below @register_parameter_class."
        )
    DEFAULTS[cls.__name__] = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
    }
    _CLASSES[cls.__name__] = cls
    return cls


class AgentsParameters(dict[str, Any]):
    """Parameters of agents by name; `_default` applies to all without an entry."""

    def __missing__(self, name: str) -> Any:
        if "_default" in self:
            return self["_default"]
        raise KeyError(name)


@dataclasses.dataclass
class HyperParameters(SubParameters):
    """nip's hyper-parameters: groups are objects or mappings; None means nip's defaults.

    Raises
    ------
    ConfigurationError
        For a value without a counterpart here; other faults are raised when it runs.
    """

    scenario: str
    trainer: str
    dataset: str
    interaction_protocol: str = "nip"
    seed: int = 6198
    functionalize_modules: bool = False
    pretrain_agents: bool = False
    test_size: float = 0.2
    d_representation: int = 16
    message_size: int = 1
    include_linear_message_space: bool = False
    d_linear_message_space: int = 2
    agents: Any = None
    rl: Any = None
    ppo: Any = None
    vanilla_ppo: Any = None
    spg: Any = None
    reinforce: Any = None
    solo_agent: Any = None
    text_rl: Any = None
    pure_text_ei: Any = None
    pure_text_malt: Any = None
    image_classification: Any = None
    code_validation: Any = None
    dataset_options: Any = None
    protocol_common: Any = None
    nip_protocol: Any = None
    debate_protocol: Any = None
    mnip_protocol: Any = None
    zk_protocol: Any = None
    message_regression: Any = None
    base_run: Any = None

    def __post_init__(self) -> None:
        for group, name in GROUPS.items():
            setattr(self, group, _object(name, getattr(self, group) or {}))
        of_agents = AGENT_CLASSES.get(self.scenario, "RandomAgentParameters")
        self.agents = AgentsParameters(
            {
                name: _object(_kind_of_agent(one, of_agents), one)
                for name, one in (self.agents or {"_default": {}}).items()
            }
        )
        refused = [
            f"agents.{name}.{field}"
            for name, agent in self.agents.items()
            for field in REFUSED
            if getattr(agent, field)
        ]
        if refused:
            raise ConfigurationError(
                f"{', '.join(refused)}: there are no hand-made networks here. Leave it out."
            )

    @classmethod
    def from_dict(cls, params_dict: Mapping[str, Any], ignore_extra_keys: bool = False) -> Any:
        """Restore the result of `to_dict`, ours or nip's; for our runs, return our parameters.

        Raises
        ------
        ConfigurationError
            For a key that is not a parameter, unless `ignore_extra_keys`.
        """
        if "package_version" in params_dict:
            return OurHyperParameters.from_dict(params_dict)
        values = {name: one for name, one in params_dict.items() if not name.startswith("_")}
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown and not ignore_extra_keys:
            raise ConfigurationError(
                f"{', '.join(unknown)}: no parameter of nip's. Known: {', '.join(sorted(known))}."
            )
        agents = dict(values.get("agents") or {})
        agents.pop("agents_update_repr", None)
        if ignore_extra_keys:
            for group in values.keys() & GROUPS:
                values[group] = _known(GROUPS[group], values[group])
            of_agents = AGENT_CLASSES.get(str(values.get("scenario")), "RandomAgentParameters")
            agents = {
                name: _known(_kind_of_agent(one, of_agents), one) for name, one in agents.items()
            }
        values["agents"] = agents or None
        return cls(**{name: one for name, one in values.items() if name in known})


_MARKS = ("_type", "is_random")
"""Keys of a mapping that select the class."""


def _object(name: str, given: Any) -> Any:
    """Create an object of one of nip's classes from a mapping; return an object unchanged."""
    if not isinstance(given, Mapping):
        return given
    values = {key: value for key, value in given.items() if key not in _MARKS}
    unknown = sorted(set(values) - set(DEFAULTS[name]))
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)}: no parameter of nip's {name}. Known: "
            f"{', '.join(DEFAULTS[name]) or 'none'}."
        )
    return _CLASSES[name](**values)


def _known(name: str, given: Any) -> Any:
    """Return a mapping without keys that are not parameters of a class."""
    if not isinstance(given, Mapping):
        return given
    return {key: one for key, one in given.items() if key in DEFAULTS[name] or key in _MARKS}


def _kind_of_agent(given: Any, of_agents: str) -> str:
    if isinstance(given, Mapping) and (
        given.get("is_random") or given.get("_type") == "RandomAgentParameters"
    ):
        return "RandomAgentParameters"
    return of_agents


def _plain(value: Any) -> Any:
    if isinstance(value, SubParameters):
        return {"_type": type(value).__name__, **value.to_dict()}
    if isinstance(value, OurSubParameters):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# ---- conversion


def ours(hyper_params: HyperParameters | OurHyperParameters) -> OurHyperParameters:
    """Convert to our complete hyper-parameters; ours are returned unchanged.

    Raises
    ------
    ParameterError
        With every fault except unread values, which nip accepts.
    """
    if isinstance(hyper_params, OurHyperParameters):
        return hyper_params
    values = _values(hyper_params)
    while True:
        try:
            return OurHyperParameters(**values)
        except UnreadParameterError as error:
            unread = [fault.path for fault in error.faults]
            logger.info("nothing reads %s", ", ".join(unread))
            for path in unread:
                _remove(values, path.split("."))


def _values(given: HyperParameters) -> dict[str, Any]:
    values: dict[str, Any] = {
        "scenario": given.scenario,
        "trainer": given.trainer,
        "seed": given.seed,
        "interaction_protocol": given.interaction_protocol,
        "rl": {"pretrain_agents": given.pretrain_agents},
    }
    is_text = given.scenario == "code_validation"
    protocol = given.interaction_protocol
    own = {given.trainer, given.scenario, "rl", "ppo", "text_rl", "protocol_common", "zk_protocol"}
    own |= {protocol, *TRAINERS.get(given.trainer).sections_of_others}
    for group in GROUPS:
        if group in _BY_HAND or (group == "rl" and is_text):
            continue
        for name, value in vars(getattr(given, group)).items():
            path = f"{group}.{name}"
            if path in IGNORED or name in IGNORED:
                continue
            place = OUR_NAMES.get(path, f"{OUR_NAMES.get(group, group)}.{name}")
            if place.partition(".")[0] in own:
                _put(values, place, value)
    if "ppo" in values:
        clip = values["ppo"].pop("clip_epsilon")
        values["ppo"] |= {"clip_low": clip, "clip_high": clip}
    for group, constants in ONLY_HERE.items():
        if group in own and not (group == "rl" and is_text):
            values.setdefault(group, {}).update(constants)
    section = values.setdefault(given.scenario, {})
    section["agents"] = {name: _agent(one, given) for name, one in _agents(given).items()}
    for hand in (_of_text if is_text else _of_tensors, _of_message_regression, _of_base_run):
        hand(given, values)
    if "spg" in own and given.spg.stackelberg_sequence is not None:
        values["spg"]["stackelberg_sequence"] = [
            list(one) for one in given.spg.stackelberg_sequence
        ]
    if given.spg.ihvp_variant == "conj_grad" and "spg" in values:
        values["spg"]["ihvp_variant"] = "conjugate_gradient"
    return values


_BY_HAND = ("vanilla_ppo", "dataset_options", "code_validation", "message_regression", "base_run")
"""Groups that are converted by separate functions."""


def _agents(given: HyperParameters) -> dict[str, Any]:
    """Return nip's parameters of agents by name: a scenario's file may set those of one agent."""
    agents = dict(given.agents)
    if "_default" not in agents:
        return agents
    default = agents.pop("_default")
    names = PROTOCOL_HANDLERS.get(given.interaction_protocol).agent_names
    # A class with names that depend on its parameters has a property.
    known: tuple[str, ...] = names if isinstance(names, tuple) else ()
    if given.protocol_common.zero_knowledge:
        known = (*known, ADVERSARIAL_VERIFIER, SIMULATOR)
    return {"default": default, **dict.fromkeys(known, default), **agents}


def _of_tensors(given: HyperParameters, values: dict[str, Any]) -> None:
    """Convert networks, data, and the parts of `rl` that differ here."""
    section, rl, data = values[given.scenario], values["rl"], given.dataset_options
    for name in ("d_representation", "message_size", "include_linear_message_space"):
        section[name] = getattr(given, name)
    section["d_linear_message_space"] = given.d_linear_message_space
    values.pop("text_rl", None)
    rl.pop("body_lr_factor")
    if rl["clip_value"] is True:
        rl["clip_value"] = given.ppo.clip_epsilon
    rl["clip_value"] = rl["clip_value"] or None
    if rl["frames_per_batch"] is None or rl["rollouts_per_iteration"] is not None:
        del rl["frames_per_batch"]
    if given.trainer == "solo_agent":
        values["solo_agent"]["test_share"] = given.test_size
        del values["rl"]
    if given.scenario == "graph_isomorphism":
        num_pairs = NUM_PAIRS.get(given.dataset, 10_000)
        num_train = min(num_pairs, data.max_train_size or num_pairs)
        section["dataset"] = {"num_train": num_train, "num_test": min(num_pairs, 1000)}
        return
    chosen = data.selected_classes or SELECTED_CLASSES.get(given.dataset, [0, 1])
    section["dataset"] = {
        "name": "tiny" if given.dataset == "test" else given.dataset,
        "binarification_method": data.binarification_method,
        "binarification_seed": data.binarification_seed or 0,
        "selected_classes": list(chosen) if data.binarification_method == "select_two" else None,
        "make_balanced": data.make_balanced,
        "max_train_size": data.max_train_size,
    }


def _of_text(given: HyperParameters, values: dict[str, Any]) -> None:
    """Convert `rl` and `code_validation` of a text trainer."""
    rl, rollouts = given.rl, given.rl.rollouts_per_iteration
    if rollouts is None:
        rounds = getattr(given, f"{given.interaction_protocol}_protocol", None)
        rollouts = rl.frames_per_batch // (rounds.max_message_rounds if rounds else 2)
    values["text_rl"] |= {"num_iterations": rl.num_iterations, "rollouts_per_iteration": rollouts}
    if given.dataset != "test":
        difficulty = given.code_validation.apps_difficulty
        # An unknown one is reported by the check of our parameters.
        values["code_validation"]["levels"] = LEVELS.get(difficulty, difficulty)
    for name in ("rl", "ppo", "zk_protocol"):
        values.pop(name, None)


def _of_message_regression(given: HyperParameters, values: dict[str, Any]) -> None:
    requested, groups = given.message_regression, TRAINERS.get(given.trainer).parameter_groups
    if not requested.enabled or (groups is not None and "message_regression" not in groups):
        return
    values["message_regression"] = {
        "agents": requested.agents,
        "reset_on_fit": requested.reset_on_fit,
        "test_share": requested.test_size,
        "regressor": {
            "_type": requested.regression_method,
            "num_layers": requested.mlp_num_layers,
            "d_hidden": requested.mlp_hidden_size,
            "activation": requested.mlp_activation,
            "num_epochs": requested.mlp_num_epochs,
            "minibatch_size": requested.mlp_batch_size,
            "lr": requested.mlp_learning_rate,
        },
    }


def _of_base_run(given: HyperParameters, values: dict[str, Any]) -> None:
    requested = given.base_run
    if requested.base_run_type != "none":
        run = run_of(requested.run_id, requested.wandb_entity, requested.wandb_project)
        values["base_run"] = {"base_run_type": requested.base_run_type, "run": run}


def run_of(run_id: str, entity: str, project: str) -> str:
    """Return the location of a run of nip's: its directory here, or else on W&B."""
    directory = Path("runs") / run_id
    return str(directory) if directory.is_dir() else f"wandb://{entity}/{project}/{run_id}"


def _agent(agent: Any, given: HyperParameters) -> dict[str, Any]:
    """Convert an agent's parameters."""
    fields = {name: value for name, value in vars(agent).items() if name not in REFUSED}
    starts_from_run = fields.pop("load_checkpoint_and_parameters")
    run_id = fields.pop("checkpoint_run_id")
    run = fields.pop("checkpoint_entity"), fields.pop("checkpoint_project")
    version = fields.pop("checkpoint_version")
    if "model_name" in fields:
        return _text_agent(fields)
    if starts_from_run:
        fields |= {"load_from_run": run_of(run_id, *run), "checkpoint_version": version}
    if type(agent).__name__ == "RandomAgentParameters":
        return {"is_random": True}
    fields["body_lr_factor"] = (
        fields["body_lr_factor"] or given.rl.body_lr_factor or {"actor": 1.0, "critic": 1.0}
    )
    if not fields["normalize_message_history"]:
        # Equals nip's rl.normalize_observations; its own option has no effect there.
        del fields["normalize_message_history"]
    for name in ("agent_lr_factor", "body_lr_factor", "gnn_lr_factor", "update_schedule"):
        if fields.get(name) is None:
            fields.pop(name, None)
        else:
            fields[name] = _ours_of(fields[name])
    if "building_block_type" in fields:
        block = fields["building_block_type"]
        fields["building_block_type"] = BLOCKS.get(block, block)
        fields["pretrained_embeddings_model"] = _embeddings(agent, given.dataset)
    return fields


def _embeddings(agent: Any, dataset: str) -> dict[str, Any] | None:
    name = agent.pretrained_embeddings_model
    if name is None or name in PRETRAINED_MODELS.names():
        return None if name is None else {"_type": name}
    is_place = "/" in name or Path(name).exists()
    return {"_type": "huggingface", "model": name if is_place else f"SamAdamDay/{name}_{dataset}"}


def _chat_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the model and its service.

    Raises
    ------
    ConfigurationError
        For an unknown `model_provider`.
    """
    name, provider = fields["model_name"], fields["model_provider"]
    if fields["use_dummy_api"]:
        return {"_type": "scripted", "model": name, "answers": DUMMY_ANSWERS}
    services: dict[str, dict[str, Any]] = {
        "OpenAI": {"api_key_variable": "OPENAI_API_KEY"},
        # It requires no key.
        "vLLM-OpenAI": {"base_url": fields["vllm_openai_base_url"]},
        "OpenRouter": {"base_url": OPENROUTER, "api_key_variable": "OPENROUTER_API_KEY"},
    }
    if provider not in services:
        raise ConfigurationError(
            f"model_provider={provider!r} is unknown. Known: {', '.join(services)}."
        )
    model = {"_type": "openai", "model": name, **services[provider]}
    penalty = fields["repetition_penalty"]
    return model if penalty is None else {**model, "extra_body": {"repetition_penalty": penalty}}


def _text_agent(fields: Mapping[str, Any]) -> dict[str, Any]:
    is_dummy = fields["use_dummy_api"]
    model = _chat_model(fields)
    requested = {"temperature": fields["temperature"], "top_p": fields["top_p"]}
    max_tokens = fields["max_tokens_per_message"]
    return {
        "model": model,
        "shared_model_group": fields["shared_model_group"],
        # A scripted model cannot be trained.
        "freeze_agent": is_dummy or fields["freeze_agent"],
        "fine_tune_from_scratch": not is_dummy and fields["fine_tune_from_scratch"],
        "max_response_words": fields["max_response_words"],
        "max_tokens": int(1.5 * fields["max_response_words"]) if max_tokens is None else max_tokens,
        "num_invalid_generation_retries": fields["num_invalid_generation_retries"],
        **{name: value for name, value in requested.items() if value is not None},
    }


def _ours_of(value: Any) -> Any:
    """Convert learning-rate factors and update schedules, also if stored by us or by nip."""
    if isinstance(value, SubParameters):
        return dict(vars(value))
    if not isinstance(value, Mapping):
        return value
    # A copy: scripts share mappings among agents and grids.
    values = dict(value)
    kind = values.pop("_type", None)
    if kind in (None, "LrFactors"):
        return values
    schedule = SCHEDULES.get(kind)
    return dict(value) if schedule is None else schedule(**values.get(kind, {}))


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *groups, name = path.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[name] = value


def _remove(values: dict[str, Any], names: list[str]) -> None:
    """Remove a value; values of lists or from files cannot be removed."""
    first, *rest = names
    if first not in values or (rest and not isinstance(values[first], dict)):
        raise ConfigurationError(
            f"nothing reads {'.'.join(names)}, set to {show_value(values)} by no parameter of "
            "nip's. Give the trainer a separate preset."
        )
    if rest:
        _remove(values[first], rest)
    else:
        del values[first]
