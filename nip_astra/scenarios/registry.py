"""The registry of scenario kinds, and what a kind must give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from nip_astra.errors import UnknownNameError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import ScenarioType
from nip_astra.registry import Registry
from nip_astra.scenario_base.protocol.datapoint_views import DatapointView
from nip_astra.scenario_instance import ScenarioInstance


class Scenario(ABC):
    """A kind of scenario. Its `Parameters` are the section of the parameter file of its name."""

    uses_protocol: ClassVar[bool] = False
    """Whether its agents play the interaction protocol that the parameters name."""
    parameter_groups: ClassVar[tuple[str, ...]] = ()
    """Groups of the hyper-parameters, or single ones such as `rl.frames_per_batch`, that the kind
    reads beside its own section."""
    never_reads: ClassVar[tuple[str, ...]] = ()
    """Parameters that the kind takes and has no use for; values given to them are refused."""
    trainer_types: ClassVar[tuple[str, ...]] = ("rl", "rl_central_critic", "solo_agent")
    """What trainers may ask to be built, by their `trainer_type`; any other is refused."""
    datapoint_kind: ClassVar[str | None] = None
    """What its datapoints say they are, in `kind` of what describes them; None for nothing."""
    datapoint_view: ClassVar[type[DatapointView]] = DatapointView
    """How a report shows datapoints of that kind."""

    class Parameters(SubParameters):
        """Parameters of the kind; a subclass adds its own."""

    @classmethod
    def check_trainer_type(cls, trainer_type: str) -> None:
        """Refuse a `trainer_type` for which the kind builds nothing.

        Raises
        ------
        UnknownNameError
            Naming those for which it does.
        """
        if trainer_type not in cls.trainer_types:
            raise UnknownNameError(
                "trainer type",
                trainer_type,
                cls.trainer_types,
                "It is the class attribute trainer_type of the trainer; a scenario kind of your "
                "own may build for others, which it names in trainer_types.",
            )

    @classmethod
    @abstractmethod
    def build(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        settings: ExperimentSettings,
        *,
        scenario_dir: Path | None,
        trainer_type: str,
    ) -> ScenarioInstance:
        """Load and build every component.

        Parameters
        ----------
        parameters : Scenario.Parameters
            The section of this kind.
        trainer_type : str
            What the trainer needs built; see `Trainer.trainer_type`.
        """


SCENARIOS: Registry[type[Scenario]] = Registry(
    "scenario", package="nip_astra.scenarios", members=ScenarioType
)


def register_scenario(name: str) -> Callable[[type[Scenario]], type[Scenario]]:
    """Register a `Scenario` subclass under the `kind` by which scenario.yaml names it."""
    return SCENARIOS.register(name)
