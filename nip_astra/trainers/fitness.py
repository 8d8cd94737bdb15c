"""Checks of trainers against the settings of a run."""

from __future__ import annotations

from collections.abc import Container

from nip_astra.distributed.team import Team
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.utils.actors import refuse_actors_without_device


def refuse_idle_actors(
    trainer_class: type[Trainer], settings: ExperimentSettings, team: Team
) -> None:
    """Refuse actors that a trainer would not play on, or that could not hold its models."""
    if not settings.num_actors:
        return
    refuse_actors_without_device(settings)
    in_a_team = team.size > 1
    if in_a_team or not trainer_class.plays_on_actors:
        reason = (
            "several processes train this run and play their own"
            if in_a_team
            else f"the trainer {trainer_class.__name__} plays no rollouts that they could"
        )
        raise ConfigurationError(
            f"num_actors={settings.num_actors}, but {reason}. Trainers of language models (ast_*, "
            "self_hosted_*, ...) in one process play on actors; leave num_actors 0 for others."
        )


def refuse_idle_settings(
    settings: ExperimentSettings, team: Team, given: Container[str] | None = None
) -> None:
    """Refuse settings that nothing in this run reads.

    `given` are the names that were given now, where others are those of a stored run; None for all.
    """
    if settings.run_directory is not None:
        raise ConfigurationError("a run makes its own run_directory. Set runs_dir and run_id.")
    for is_met, need, names in (
        (team.size > 1, "several processes", ("sharding", "process_store")),
        (settings.num_actors, "num_actors above 0", ("ray_address", "actor_cpus", "actor_gpus")),
    ):
        idle = [
            f"{name}={getattr(settings, name)}"
            for name in names
            if not is_met
            and (given is None or name in given)
            and getattr(settings, name) != ExperimentSettings.model_fields[name].default
        ]
        if idle:
            raise ConfigurationError(
                f"the settings {', '.join(idle)} need {need}, and nothing here reads them. Leave "
                "them out."
            )


def refuse_unfinished(trainer_class: type[Trainer]) -> None:
    """Refuse a class that does not define the abstract methods of its base class."""
    missing = sorted(getattr(trainer_class, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(
            f"the trainer {trainer_class.__name__} lacks {', '.join(missing)}. Define what its "
            "base class requires."
        )


def refuse_half_built(trainer: Trainer) -> None:
    """Refuse a trainer whose own constructor leaves out that of its base class."""
    if "state" not in vars(trainer):
        name = type(trainer).__name__
        raise ConfigurationError(
            f"__init__ of the trainer {name} does not call that of its base class. Begin it with "
            "super().__init__(hyper_params, scenario_instance, settings)."
        )
