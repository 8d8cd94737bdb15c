"""How several processes train one language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nip_astra.errors import ConfigurationError, LostProcessError
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.data_parallel import DataParallelService
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService

if TYPE_CHECKING:
    from nip_astra.trainers.language_model_base import LanguageModelTrainer

T = TypeVar("T")


def divided(trainer: LanguageModelTrainer, service: TrainingService) -> TrainingService:
    """A service by which this process and the others of a team learn, as the settings ask.

    Raises
    ------
    ConfigurationError
        When the weights are not in this process, or cannot be divided or recomputed as asked.
    """
    team = trainer.team
    if trainer.settings.gradient_checkpointing:
        _recompute_layers(trainer.policy, service)
    if team.size == 1:
        return service
    if type(service) is not LocalTrainingService:
        raise ConfigurationError(
            f"{team.size} processes were to train the policy together, but it learns by "
            f"{type(service).__name__}, and only a model that they hold themselves can be divided "
            "among them. Start the run without torchrun."
        )
    if trainer.settings.sharding == "none":
        return DataParallelService(service, team)
    check_can_be_sharded(trainer)
    models = {id(one): one for one in _models_of(trainer)}
    for model in models.values():
        # All that is compared with what the policy learns from goes the same way as that.
        model.scores_by_module = True
    return ShardedService(service, team)


def _recompute_layers(policy: LanguageModel, service: TrainingService) -> None:
    """Have what learns compute its layers again in the backward pass, or refuse by name."""
    # vLLM samples; a model beside it learns.
    learner = _learner_of(policy)
    is_here = isinstance(service, LocalTrainingService)
    if not is_here or not isinstance(learner, HuggingFaceLanguageModel):
        held = type(policy if is_here else service).__name__
        raise ConfigurationError(
            "layers were to be computed again in the backward pass (gradient_checkpointing), but "
            f"the policy learns by {held}, whose layers are not known here. Set "
            "gradient_checkpointing to false."
        )
    learner.recompute_layers()


def _learner_of(model: LanguageModel | None) -> LanguageModel | None:
    """What holds the weights that are read here: the model, or what is beside an engine."""
    return getattr(model, "scorer", model)


def _models_of(trainer: LanguageModelTrainer) -> list[HuggingFaceLanguageModel]:
    agents = trainer.scenario_instance.agents.values()
    models = [trainer.policy, *(getattr(agent, "language_model", None) for agent in agents)]
    learners = [_learner_of(one) for one in models]
    return [one for one in learners if isinstance(one, HuggingFaceLanguageModel)]


def check_can_be_sharded(trainer: LanguageModelTrainer) -> None:
    """Refuse a policy whose layers nobody here can read one by one.

    Raises
    ------
    ConfigurationError
        When it is of a backend of another kind.
    """
    if isinstance(_learner_of(trainer.policy), HuggingFaceLanguageModel):
        return
    raise ConfigurationError(
        "the policy was to be divided among the processes (sharding=fsdp), but its backend is "
        f"{type(trainer.policy).__name__}, and only models of huggingface, beside vllm too, are "
        "read layer by layer. Set sharding to none, so that each process holds the policy, or its "
        "_type to huggingface."
    )


def bytes_read(policy: LanguageModel) -> float:
    """How many bytes a pass through what learns of a policy reads, base weights included."""
    learner = _learner_of(policy)
    module = getattr(learner, "module", None)
    weights = [] if module is None else module.parameters()
    return float(sum(weight.numel() * weight.element_size() for weight in weights))


def save_together(trainer: LanguageModelTrainer) -> None:
    """Save a checkpoint while all processes are at the same place."""
    lead(trainer, trainer._save_checkpoint)


def save_without_others(trainer: LanguageModelTrainer) -> None:
    """Save what there is when another process has ended.

    What that one held of divided weights is lost; then the last checkpoint stands.
    """
    if not isinstance(trainer.service, ShardedService):
        trainer._save_checkpoint()


def lead(trainer: LanguageModelTrainer, work: Callable[[], T]) -> T | None:
    """Have the leader alone play or measure, and all processes know how far the run is.

    What they have to know is what a checkpoint holds between two optimizer steps: the state of the
    run, and what the trainer remembers. All else stays with the leader.

    Returns
    -------
    T or None
        What the work gave, in the leader; None in the others.
    """
    team, service = trainer.team, trainer.service
    handlers = trainer.handlers()
    try:
        if isinstance(service, ShardedService):
            service.gather()
            handlers = handlers | service.handlers()
        result = team.lead(work, handlers)
    except LostProcessError:
        # Nothing was learnt since the last step.
        save_without_others(trainer)
        raise
    if team.size > 1:
        state = trainer.state.to_dict() if team.is_leader else {}
        told = team.from_leader({"run": state, "trainer": trainer.trainer_state()})
        if not team.is_leader:
            trainer.state = trainer.State.from_dict(told["run"])
            trainer.load_trainer_state(told["trainer"])
    return result
