"""The base of scenarios whose agents are chat models that play an interaction protocol in words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import model_validator

from nip_astra.errors import ConfigurationError, DataError, nearest_names
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.conditions import where
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.scenario_base.protocol.datapoint_views import DatapointView
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
from nip_astra.scenarios.registry import Scenario
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.nested_array_dict import NestedArrayDict

PURE_TEXT = "pure_text"
"""What trainers of chat models ask to be built, their `trainer_type`."""


class TextDatasets(NamedTuple):
    """Datapoints to train and to test on."""

    train: NestedArrayDict
    test: NestedArrayDict
    """Batch size [N], with `y` [N], 0 or 1, and columns [N] that prompts may use."""


@dataclass(kw_only=True)
class PureTextScenarioInstance(ScenarioInstance):
    """What a scenario in words built from its parameters."""

    protocol_handler: ProtocolHandler
    """The interaction protocol that the agents play."""
    game: TextGame
    """The rules, with the prompts."""
    train_data: NestedArrayDict
    test_data: NestedArrayDict
    """Datapoints."""
    shared_model_groups: Mapping[str, PureTextSharedModelGroup]
    """By name; each agent is in one."""
    loop: BackgroundLoop
    """In which services are spoken to."""
    groupings: tuple[str, ...] = ()
    """Columns of the data by which accuracy is told apart."""
    analysis: AnalysisParameters | None = None
    """What a judge is asked about rollouts."""
    hidden_columns: tuple[str, ...] = ()
    """Columns of the data that nobody is told."""

    @property
    def cast(self) -> Cast:
        """Who plays, for rollout analysers."""
        return Cast(self.game.protocol, self.game.human_names, self.hidden_columns)

    @property
    def num_parameters(self) -> int:
        """0: the models are services, which compute with threads of their own."""
        return 0


class TextView(DatapointView):
    """Texts and the verdict that is right."""

    def label(self, label: int) -> str:
        """What is to be told of the texts."""
        return {0: "false", 1: "true"}.get(label, super().label(label))


class PureTextScenario(Scenario):
    """Chat models play a protocol in words about a datapoint with a label.

    A kind gives the datasets; its prompts stand in the scenario's folder `prompts`.
    """

    uses_protocol: ClassVar[bool] = True
    datapoint_kind: ClassVar[str | None] = "text"
    datapoint_view: ClassVar[type[DatapointView]] = TextView
    parameter_groups: ClassVar[tuple[str, ...]] = ("protocol_common",)
    trainer_types: ClassVar[tuple[str, ...]] = (PURE_TEXT,)
    never_reads: ClassVar[tuple[str, ...]] = ("protocol_common.zero_knowledge", "zk_protocol")
    kind: ClassVar[str]
    """The name under which the kind is registered; a kind sets it."""
    groupings: ClassVar[tuple[str, ...]] = ()
    """Columns of the data by which accuracy is told apart."""
    hidden_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data that nobody is to be told, since they give the label away."""

    class Parameters(SubParameters):
        """Who plays; a kind adds its data."""

        agents: Mapping[str, TextAgentParameters] = {}
        """Agents by name; what stands under `default` holds for all that do not say otherwise."""
        randomize_prover_stance: Annotated[bool, where("protocol_common.shared_reward", False)] = (
            False
        )
        """Whether a lone prover argues for accept or reject by chance, fixed for each datapoint,
        and is paid for that decision; false lets it always argue for accept."""
        analysis: AnalysisParameters | None = None
        """Questions about what agents said that a judge answers after each test; null asks none.
        Stored rollouts are judged at any later time by `nip-astra analyse`."""

        @model_validator(mode="before")
        @classmethod
        def _fill_in_defaults(cls, values: Any) -> Any:
            agents = values.get("agents") if isinstance(values, Mapping) else None
            default = agents.get(DEFAULT_AGENT) if isinstance(agents, Mapping) else None
            if not isinstance(agents, Mapping) or not isinstance(default, Mapping):
                return values
            filled = {
                name: {**default, **own} if isinstance(own, Mapping) else own
                for name, own in agents.items()
            }
            return {**values, "agents": filled}

    @classmethod
    @abstractmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        """Make or read the datapoints."""

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
        agents = cls._build_agents(parameters, protocol)
        game = cls.build_game(hyper_params, parameters, protocol, scenario_dir)
        datasets = cls.build_datasets(parameters, seed=hyper_params.seed, scenario_dir=scenario_dir)
        for split, data in zip(TextDatasets._fields, datasets, strict=True):
            _check_data(data, split)
        loop = BackgroundLoop()
        groups = {}
        for name, members in group_agents(list(agents.values())).items():
            models = open_text_models(
                members[0].parameters.model,
                label=name,
                scenario_dir=scenario_dir,
                settings=settings,
                load_from_run=members[0].parameters.load_from_run,
                checkpoint_version=members[0].parameters.checkpoint_version,
                agent=members[0].name,
            )
            groups[name] = PureTextSharedModelGroup(
                name, members, open_model=models.open_model, service=models.service, loop=loop
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
    def _build_agents(cls, parameters: Any, protocol: ProtocolHandler) -> dict[str, TextAgent]:
        given = parameters.agents
        unknown = sorted(set(given) - {*protocol.agent_names, DEFAULT_AGENT})
        if unknown:
            near = nearest_names(unknown[0], protocol.agent_names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"parameters were given for the agent {unknown[0]!r}, but the protocol has the "
                f"agents {', '.join(protocol.agent_names)}.{hint} Name one of them, or put what "
                f"holds for all under agents.{DEFAULT_AGENT}."
            )
        agents = {}
        for number, name in enumerate(protocol.agent_names):
            own = given.get(name, given.get(DEFAULT_AGENT))
            if own is None:
                raise ConfigurationError(
                    f"no parameters for the agent {name!r}, only for "
                    f"{', '.join(sorted(given)) or 'none'}. Add agents.{name}, or "
                    f"agents.{DEFAULT_AGENT} for all agents."
                )
            is_verifier = name in protocol.verifier_names
            agents[name] = TextAgent(name, number, is_verifier=is_verifier, parameters=own)
        return agents

    @classmethod
    def build_game(
        cls,
        hyper_params: HyperParameters,
        parameters: Any,
        protocol: ProtocolHandler,
        scenario_dir: Path | None,
    ) -> TextGame:
        """The rules, with the prompts of the scenario's folder."""
        names = protocol.agent_names
        cast = cast_of(parameters, protocol)
        roles: dict[str, str] = {name: cast.role(name) for name in names}
        folder = (scenario_dir or Path()) / PROMPTS_DIR
        own = parameters_of_agents(parameters, protocol)
        return TextGame(
            protocol,
            load_prompts(folder, roles, str(hyper_params.interaction_protocol)),
            human_names=cast.human_names,
            max_words={name: own[name].max_response_words for name in names},
            has_random_stance=parameters.randomize_prover_stance,
        )


def parameters_of_agents(
    parameters: Any, protocol: ProtocolHandler
) -> dict[str, TextAgentParameters]:
    """The parameters of each agent of a protocol, where all have some."""
    given = parameters.agents
    return {name: given.get(name) or given[DEFAULT_AGENT] for name in protocol.agent_names}


def cast_of(
    parameters: Any, protocol: ProtocolHandler, hidden_columns: tuple[str, ...] = ()
) -> Cast:
    """Who plays, by the parameters of a scenario in words."""
    own = parameters_of_agents(parameters, protocol)
    names = {name: one.human_name or name for name, one in own.items()}
    return Cast(protocol, names, hidden_columns)


def _check_data(data: NestedArrayDict, split: str) -> None:
    """Refuse data without datapoints, or with labels other than 0 and 1."""
    labels = data.get("y")
    if labels is None or labels.shape != data.batch_size or len(data.batch_size) != 1:
        raise DataError(
            f"the {split} data of the scenario was to have a label y for each datapoint, but it is "
            f"{data!r}. Give a NestedArrayDict of batch size [N] with y [N]."
        )
    if not len(data) or not set(labels.tolist()) <= {0, 1}:
        raise DataError(
            f"the {split} data of the scenario has {len(data)} datapoints with the labels "
            f"{sorted(set(labels.tolist()))[:5]}. Give at least one datapoint, with labels 0 and 1."
        )


def row_of(data: NestedArrayDict, number: int) -> dict[str, Any]:
    """A datapoint as plain values, by column."""
    return {
        str(name): array[number].item() if hasattr(array[number], "item") else array[number]
        for name, array in data.items()
    }
