"""How several processes train one language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nip_astra.distributed.team import Team
from nip_astra.errors import ConfigurationError, LostProcessError
from nip_astra.language_models.services.data_parallel import DataParallelService
from nip_astra.language_models.services.training import LocalTrainingService, TrainingService

if TYPE_CHECKING:
    from nip_astra.trainers.language_model_base import LanguageModelTrainer

T = TypeVar("T")


def divided(service: TrainingService, team: Team) -> TrainingService:
    """A service by which this process and the others of a team learn together.

    Raises
    ------
    ConfigurationError
        When the weights are not in this process.
    """
    if team.size == 1:
        return service
    if type(service) is not LocalTrainingService:
        raise ConfigurationError(
            f"{team.size} processes were to train the policy together, but it learns by "
            f"{type(service).__name__}, and only a model that they hold themselves can be divided "
            "among them. Start the run without torchrun."
        )
    return DataParallelService(service, team)


def lead(trainer: LanguageModelTrainer, work: Callable[[], T]) -> T | None:
    """Have the leader alone play or measure, and all processes know how far the run is.

    What they have to know is what a checkpoint holds between two optimizer steps: the state of the
    run, and what the trainer remembers. All else stays with the leader.

    Returns
    -------
    T or None
        What the work gave, in the leader; None in the others.
    """
    team = trainer.team
    try:
        result = team.lead(work, trainer.handlers())
    except LostProcessError:
        # Nothing was learnt since the last step.
        trainer._save_checkpoint()
        raise
    if team.size > 1:
        state = trainer.state.to_dict() if team.is_leader else {}
        told = team.from_leader({"run": state, "trainer": trainer.trainer_state()})
        if not team.is_leader:
            trainer.state = trainer.State.from_dict(told["run"])
            trainer.load_trainer_state(told["trainer"])
    return result
