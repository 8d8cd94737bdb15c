"""The training service of a run whose processes learn one language model together."""

from __future__ import annotations

from collections.abc import Iterable

from nip_astra.distributed.team import Team
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.sharded import DataParallelService, ShardedService
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService


def distribute(
    service: TrainingService,
    policy: LanguageModel,
    others: Iterable[object],
    team: Team,
    settings: ExperimentSettings,
) -> TrainingService:
    """The service by which all processes of a team learn a policy, as the settings say.

    Parameters
    ----------
    others : Iterable
        Models of other agents, whose log-probabilities are compared with the policy's.

    Raises
    ------
    ConfigurationError
        When the weights are not in this process, or cannot be sharded or recomputed.
    """
    if settings.gradient_checkpointing:
        _recompute_layers(policy, service)
    if team.size == 1:
        return service
    if type(service) is not LocalTrainingService:
        raise ConfigurationError(
            f"{team.size} processes cannot train a policy that learns by {type(service).__name__}: "
            "each must hold its weights. Start the run without torchrun."
        )
    if settings.sharding == "none":
        return DataParallelService(service, team)
    check_can_be_sharded(policy)
    learners = [_learner_of(one) for one in (policy, *others)]
    for model in {id(one): one for one in learners}.values():
        if isinstance(model, HuggingFaceLanguageModel):
            # Compared log-probabilities need the same forward pass as the sharded one.
            model.scores_by_module = True
    return ShardedService(service, team)


def _recompute_layers(policy: LanguageModel, service: TrainingService) -> None:
    """Recompute the layers of the learning model in the backward pass."""
    learner = _learner_of(policy)
    is_here = isinstance(service, LocalTrainingService)
    if not is_here or not isinstance(learner, HuggingFaceLanguageModel):
        held = type(policy if is_here else service).__name__
        raise ConfigurationError(
            f"gradient_checkpointing needs a policy with known layers, not {held}. Set it to false."
        )
    learner.recompute_layers()


def _learner_of(model: object) -> object:
    """The holder of the weights: the model, or the one beside a sampling engine."""
    return getattr(model, "scorer", model)


def check_can_be_sharded(policy: LanguageModel) -> None:
    """Refuse a policy whose layers cannot be gathered one by one.

    Raises
    ------
    ConfigurationError
        For any backend but huggingface, alone or beside vllm.
    """
    if not isinstance(_learner_of(policy), HuggingFaceLanguageModel):
        raise ConfigurationError(
            f"sharding=fsdp needs a policy of _type huggingface or vllm, not "
            f"{type(policy).__name__}. Set sharding to none, or another _type."
        )


def bytes_read(policy: LanguageModel) -> float:
    """Bytes of weights that a pass through the learning model reads, base weights included."""
    learner = _learner_of(policy)
    module = getattr(learner, "module", None)
    weights = [] if module is None else module.parameters()
    return float(sum(weight.numel() * weight.element_size() for weight in weights))
