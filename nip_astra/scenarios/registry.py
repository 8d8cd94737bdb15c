"""The base class and registry of scenario kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.registry import Registry
from nip_astra.scenario_base.protocol.datapoint_views import DatapointView
from nip_astra.scenario_instance import ScenarioInstance


class Scenario(ABC):
    """A kind of scenario. Its `Parameters` are the section of its name in the parameter file."""

    uses_protocol: ClassVar[bool] = False
    """Whether its agents follow the interaction protocol in the parameters."""
    parameter_groups: ClassVar[tuple[str, ...]] = ()
    """Parameter groups, or single parameters such as `rl.frames_per_batch`, that the kind reads
    besides its own section."""
    never_reads: ClassVar[tuple[str, ...]] = ()
    """Parameters that the kind does not use; setting them is an error."""
    trainer_types: ClassVar[tuple[str, ...]] = ("rl", "rl_central_critic", "solo_agent")
    """Supported `trainer_type`s of trainers; others are refused."""
    datapoint_kind: ClassVar[str | None] = None
    """`kind` in the description of its datapoints; None for none."""
    datapoint_view: ClassVar[type[DatapointView]] = DatapointView
    """View of datapoints in reports."""

    class Parameters(SubParameters):
        """Parameters of the kind; a subclass adds its own."""

    @classmethod
    def check_trainer_type(cls, trainer_type: str) -> None:
        """Raise for an unsupported `trainer_type`."""
        if trainer_type not in cls.trainer_types:
            raise UnknownNameError(
                "trainer type",
                trainer_type,
                cls.trainer_types,
                "A scenario kind lists the supported trainer types in trainer_types.",
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
            See `Trainer.trainer_type`.
        """


def parameters_of_agents(parameters: Any, protocol: ProtocolHandler) -> dict[str, Any]:
    """Return the parameters of each agent of a protocol, by name or from `default`.

    Raises
    ------
    UnknownNameError, ConfigurationError
        If the parameters name an unknown agent, or an agent has none.
    """
    sections = parameters.agents
    names = protocol.agent_names
    for name in sorted(set(sections) - {*names, DEFAULT_AGENT}):
        advice = f"Parameters of all agents belong in agents.{DEFAULT_AGENT}."
        raise UnknownNameError("agent", name, names, advice)
    default = sections.get(DEFAULT_AGENT)
    agents = {name: sections.get(name, default) for name in names}
    for name, agent in agents.items():
        if agent is None:
            present = ", ".join(sorted(sections)) or "none"
            raise ConfigurationError(
                f"no parameters for the agent {name!r}, only for {present}. Add agents.{name}, or "
                f"agents.{DEFAULT_AGENT} for all agents."
            )
    return agents


SCENARIOS: Registry[type[Scenario]] = Registry("scenario")


def register_scenario(name: str) -> Callable[[type[Scenario]], type[Scenario]]:
    """Register a `Scenario` subclass under the `kind` used in scenario.yaml; a decorator."""
    return SCENARIOS.register(name)
