"""NexRL's modules: for each of their names, where it is defined here.

A name under a path of NexRL has NexRL's meaning; the guide `coming-from-nexrl` lists differences.
"""

from __future__ import annotations

TYPES = "nip_astra.nexrl.nexrl_types"
FUNCTIONS = "nip_astra.nexrl.functions"
TRAINERS = "nip_astra.nexrl.trainers"
SERVICES = "nip_astra.nexrl.services"
EVALUATORS = "nip_astra.nexrl.evaluators"


def _from(home: str, *names: str, **renamed: str) -> dict[str, str]:
    """Return homes in one module; renamed ones as `theirs="ours"`."""
    homes = dict.fromkeys(names, home)
    return homes | {name: f"{home}:{here}" for name, here in renamed.items()}


_TRAINERS = {
    "BaseTrainer": "base_trainer",
    "RemoteApiCrossEntropyTrainer": "remote_api_cross_entropy_trainer",
    "RemoteApiGrpoTrainer": "remote_api_grpo_trainer",
    "RemoteApiOpdTrainer": "remote_api_opd_trainer",
    "RemoteApiTrainer": "remote_api_trainer",
    "SelfHostedGrpoTrainer": "self_hosted_grpo_trainer",
    "SelfHostedOpdTrainer": "self_hosted_opd_trainer",
    "SelfHostedTrainer": "self_hosted_trainer",
}
"""Module of each trainer below `trainer`."""
_EVALUATORS = _from(
    EVALUATORS,
    *("BaseEvaluationTarget", "EvaluationRunResult", "Evaluator", "NexAUEvaluationTarget"),
)

MODULES: dict[str, dict[str, str]] = {
    "": _from(TYPES, "Batch", "ModelTag", "Trajectory") | _from(SERVICES, "NexRLModule"),
    "activity_tracker": _from(SERVICES, "ActivityTrackerProxy"),
    "algorithm": {},
    "algorithm.core_algos": _from(
        FUNCTIONS,
        "AdaptiveKLController",
        "FixedKLController",
        "compute_grpo_advantage_for_trajectories",
        "compute_grpo_outcome_advantage",
        "masked_mean",
        "masked_whiten",
        kl_penalty="compute_kl_penalty",
    ),
    "base_module": _from(SERVICES, "NexRLModule"),
    "executor": _from(FUNCTIONS, "execute"),
    "rollout_worker": _EVALUATORS,
    "rollout_worker.base_nexau_rollout_worker": _EVALUATORS,
    "train_service_client": _from(SERVICES, "TrainServiceClient"),
    "trainer": _from(TRAINERS, *_TRAINERS),
    **{f"trainer.{module}": _from(TRAINERS, name) for name, module in _TRAINERS.items()},
    "trainer.teacher_client": _from(SERVICES, "TeacherClient"),
    "utils": {},
    "utils.config_utils": _from(
        FUNCTIONS,
        "get_actor_train_service_config",
        "get_train_service_config_by_role",
        "insert_config",
        "use_tinker",
        "use_weaver",
    ),
    "utils.data_dumper": _from(SERVICES, "DataDumper"),
    "utils.finetune_service_utils": _from(FUNCTIONS, "convert_trajectories_to_datums"),
    "utils.logging_utils": _from(
        FUNCTIONS, "log_grpo_metrics", "log_rollout_metrics", "set_logging_basic_config"
    ),
    "utils.torch_functional": _from(FUNCTIONS, "pad_sequence_to_length", "padding_data")
    | {"compute_position_id_with_mask": "nip_astra.rollouts.batch"},
}
