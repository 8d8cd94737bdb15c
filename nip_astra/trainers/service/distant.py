"""Training services in other processes, from the parameters of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.http_training import (
    HttpTrainingOptions,
    HttpTrainingService,
)
from nip_astra.language_models.services.tinker_training import (
    TinkerOptions,
    TinkerTrainingService,
)
from nip_astra.language_models.services.training import TrainingService
from nip_astra.language_models.services.training_connection import TrainingConnection
from nip_astra.parameters.content import resolve_reference
from nip_astra.trainers.service.parameters import TrainServiceParameters
from nip_astra.utils.seeding import derive_seed

if TYPE_CHECKING:
    from nip_astra.trainers.service_base import ServiceTrainer


def build_distant_service(trainer: ServiceTrainer) -> TrainingService:
    """The service that the parameters of a trainer name.

    Raises
    ------
    ConfigurationError
        When the trainer needs what services do not give.
    ServiceError
        When the service cannot be reached, or has not the policy's model.
    """
    options: TrainServiceParameters = trainer.parameters.train_service
    if len(trainer.modules):
        raise ConfigurationError(
            f"the trainer {trainer.hyper_params.trainer!r} was to learn through the service "
            f"{options.backend!r}, but it also trains {', '.join(trainer.modules)} on the policy's "
            "hidden states, which services do not give. Set train_service.backend to local."
        )
    seed = derive_seed(trainer.hyper_params.seed, "adapter")
    if options.backend == "tinker":
        return TinkerTrainingService(
            trainer.policy,
            TinkerOptions(
                base_url=options.base_url,
                token_variable=options.token_variable,
                model=options.model or _model_of(trainer),
                optimizer=trainer.training.optimizer,
                weight_decay=trainer.training.weight_decay,
                seed=seed,
                patience_seconds=options.patience_seconds,
            ),
        )
    assert options.base_url is not None
    connection = TrainingConnection(
        options.base_url,
        token_variable=options.token_variable,
        patience_seconds=options.patience_seconds,
        operation_timeout=options.operation_timeout,
        max_answer_mib=options.max_answer_mib,
    )
    return HttpTrainingService(
        trainer.policy,
        connection,
        HttpTrainingOptions(
            model=options.model or _model_of(trainer),
            optimizer=trainer.training.optimizer,
            weight_decay=trainer.training.weight_decay,
            seed=seed,
            role=trainer.policy_role,
        ),
    )


def _model_of(trainer: ServiceTrainer) -> str:
    """The place that the policy was loaded from, as services find it."""
    source = getattr(trainer.policy, "source", None)
    if source is None:
        raise ConfigurationError(
            "a policy was to be trained at a service, but its parameters name no model. Set "
            "train_service.model to the name of the model there."
        )
    return str(resolve_reference(source, trainer.scenario_instance.scenario_dir))
