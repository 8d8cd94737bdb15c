"""The base of scenarios whose agents are chat models that follow an interaction protocol."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import model_validator

from nip_astra.errors import DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.scenario_base.protocol.datapoint_views import DatapointView, TextView
from nip_astra.scenario_base.text.analysers import AnalysisParameters, Cast
from nip_astra.scenario_base.text.game import PROMPTS_DIR, TextGame, load_prompts
from nip_astra.scenario_base.text.models import (
    PureTextSharedModelGroup,
    TextAgent,
    TextAgentParameters,
    group_agents,
    open_text_models,
)
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.registry import Scenario, parameters_of_agents
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.nested_array_dict import NestedArrayDict

PURE_TEXT = "pure_text"
"""The `trainer_type` of trainers of chat models."""


class TextDatasets(NamedTuple):
    """Training and test datapoints.

    Batch size [N], with `y` [N], 0 or 1, and columns [N] that prompts may use.
    """

    train: NestedArrayDict
    test: NestedArrayDict


@dataclass(kw_only=True)
class PureTextScenarioInstance(ScenarioInstance):
    """The built components of a text protocol."""

    protocol_handler: ProtocolHandler
    game: TextGame
    """The rules and prompts."""
    train_data: NestedArrayDict
    test_data: NestedArrayDict
    shared_model_groups: Mapping[str, PureTextSharedModelGroup]
    """Groups of agents by name; each agent belongs to one."""
    loop: BackgroundLoop
    """Runs requests to services."""
    groupings: tuple[str, ...] = ()
    """Columns of the data by which accuracy is also reported."""
    analysis: AnalysisParameters | None = None
    """Questions about rollouts for a judge."""
    hidden_columns: tuple[str, ...] = ()
    """Columns of the data that are never shown."""

    @property
    def cast(self) -> Cast:
        """Agents and their names, for rollout analysers."""
        return Cast(self.game.protocol, self.game.human_names, self.hidden_columns)

    @property
    def num_parameters(self) -> int:
        """0: the models are services, with their own threads."""
        return 0


class PureTextScenario(Scenario):
    """Chat models follow a protocol about a datapoint with a label.

    A kind provides the datasets; prompts are in the scenario's folder `prompts`.
    """

    uses_protocol: ClassVar[bool] = True
    datapoint_kind: ClassVar[str | None] = "text"
    datapoint_view: ClassVar[type[DatapointView]] = TextView
    parameter_groups: ClassVar[tuple[str, ...]] = ("protocol_common",)
    trainer_types: ClassVar[tuple[str, ...]] = (PURE_TEXT,)
    never_reads: ClassVar[tuple[str, ...]] = ("protocol_common.zero_knowledge", "zk_protocol")
    kind: ClassVar[str]
    """The registered name of the kind."""
    groupings: ClassVar[tuple[str, ...]] = ()
    """Columns of the data by which accuracy is also reported."""
    hidden_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data that reveal the label and are never shown."""

    class Parameters(SubParameters):
        """Agents; a kind adds its data."""

        agents: Mapping[str, TextAgentParameters] = {}
        """Agents by name; those of `default` apply to all others."""
        randomize_prover_stance: Annotated[bool, where("protocol_common.shared_reward", False)] = (
            False
        )
        """Whether a single prover argues for a random decision, fixed for each datapoint, and is
        rewarded for it; false: always for accept."""
        analysis: AnalysisParameters | None = None
        """Questions about messages that a judge answers after each test; null for none.
        `nip-astra analyse` judges stored rollouts."""

        @model_validator(mode="before")
        @classmethod
        def _fill_in_defaults(cls, values: Any) -> Any:
            agents = values.get("agents") if isinstance(values, Mapping) else None
            default = agents.get(DEFAULT_AGENT) if isinstance(agents, Mapping) else None
            if not isinstance(agents, Mapping) or not isinstance(default, Mapping):
                return values
            filled = {
                name: {**default, **agent} if isinstance(agent, Mapping) else agent
                for name, agent in agents.items()
            }
            return {**values, "agents": filled}

    @classmethod
    @abstractmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        """Generate or read the datapoints."""

    @classmethod
    def build(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        settings: ExperimentSettings,
        *,
        scenario_dir: Path | None,
        trainer_type: str,
    ) -> PureTextScenarioInstance:
        protocol = build_protocol_handler(hyper_params)
        agents: dict[str, TextAgent] = {}
        for name, agent_parameters in parameters_of_agents(parameters, protocol).items():
            is_verifier = name in protocol.verifier_names
            agents[name] = TextAgent(
                name, len(agents), is_verifier=is_verifier, parameters=agent_parameters
            )
        game = cls.build_game(hyper_params, parameters, protocol, scenario_dir)
        datasets = cls.build_datasets(parameters, seed=hyper_params.seed, scenario_dir=scenario_dir)
        for split, dataset in zip(TextDatasets._fields, datasets, strict=True):
            _check_dataset(dataset, split)
        loop = BackgroundLoop()
        groups = {}
        for name, members in group_agents(list(agents.values())).items():
            open_model, service = open_text_models(
                members[0], label=name, scenario_dir=scenario_dir, settings=settings
            )
            groups[name] = PureTextSharedModelGroup(
                name, members, open_model=open_model, service=service, loop=loop
            )
        return PureTextScenarioInstance(
            kind=cls.kind,
            agents=agents,
            protocol_handler=protocol,
            scenario_dir=scenario_dir,
            game=game,
            train_data=datasets.train,
            test_data=datasets.test,
            shared_model_groups=groups,
            loop=loop,
            groupings=cls.groupings,
            analysis=parameters.analysis,
            hidden_columns=cls.hidden_columns,
        )

    @classmethod
    def build_game(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        protocol: ProtocolHandler,
        scenario_dir: Path | None,
    ) -> TextGame:
        """Build the rules and prompts."""
        names = protocol.agent_names
        cast = cast_of(parameters, protocol)
        roles: dict[str, str] = {name: cast.role(name) for name in names}
        folder = (scenario_dir or Path()) / PROMPTS_DIR
        prompts = load_prompts(folder, roles, str(hyper_params.interaction_protocol))
        agent_parameters = parameters_of_agents(parameters, protocol)
        max_words = {name: agent_parameters[name].max_response_words for name in names}
        return TextGame(
            protocol,
            prompts,
            human_names=cast.human_names,
            max_words=max_words,
            has_random_stance=parameters.randomize_prover_stance,
            hidden_columns=cls.hidden_columns,
        )


def cast_of(
    parameters: Any, protocol: ProtocolHandler, hidden_columns: tuple[str, ...] = ()
) -> Cast:
    """Return agents and their names, from a scenario's parameters."""
    agents = parameters_of_agents(parameters, protocol)
    human_names = {name: agent.human_name or name for name, agent in agents.items()}
    return Cast(protocol, human_names, hidden_columns)


def _check_dataset(dataset: NestedArrayDict, split: str) -> None:
    """Raise for data without datapoints, or with labels other than 0 and 1."""
    labels = dataset.get("y")
    is_row_per_label = labels is not None and labels.shape == dataset.batch_size
    if not is_row_per_label or len(dataset.batch_size) != 1:
        raise DataError(
            f"the {split} data must be a NestedArrayDict of batch size [N] with labels y [N], got "
            f"{dataset!r}."
        )
    distinct_labels = set(labels.tolist())
    if len(dataset) == 0 or not distinct_labels <= {0, 1}:
        raise DataError(
            f"the {split} data has {len(dataset)} datapoints with the labels "
            f"{sorted(distinct_labels)[:5]}. Give at least one, with labels 0 and 1."
        )
