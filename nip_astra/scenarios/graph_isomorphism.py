"""Graph isomorphism: are two graphs the same? A message is a node of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.types import ScenarioType
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentPolicyHead,
    AgentShape,
    AgentValueHead,
    Observation,
    SoloAgentHead,
)
from nip_astra.scenarios.graphs.agents import (
    GRAPHS,
    GraphBody,
    GraphIsomorphismAgentParameters,
    GraphPolicyHead,
    impossible_symbols,
)
from nip_astra.scenarios.graphs.drawing import GraphsView
from nip_astra.scenarios.graphs.generation import SPLITS, GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.native_layers import computed_by
from nip_astra.scenarios.graphs.pair_files import as_dataset, load_pairs
from nip_astra.scenarios.graphs.wl import BEYOND_WL, ISOMORPHIC, MAX_WL_ROUNDS
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from nip_astra.scenarios.registry import register_scenario
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario


@register_scenario(ScenarioType.GRAPH_ISOMORPHISM)
class GraphIsomorphismScenario(TensorDictScenario):
    """Are two graphs isomorphic? A message is a node of one of them."""

    kind = str(ScenarioType.GRAPH_ISOMORPHISM)
    datapoint_kind = "graphs"
    datapoint_view = GraphsView

    class Parameters(TensorDictScenario.Parameters):
        """Agents and pairs of graphs."""

        agents: Mapping[str, GraphIsomorphismAgentParameters] = Field(
            default={"default": GraphIsomorphismAgentParameters()}
        )
        """Agents by name; those of `default` apply to all others."""
        dataset: GraphPairParameters = GraphPairParameters()
        """Pairs of graphs."""

    @classmethod
    def build_datasets(
        cls, parameters: Parameters, *, seed: int, scenario_dir: Path | None
    ) -> Datasets:
        pairs = parameters.dataset
        if pairs.file is not None:
            train, test = load_pairs(resolve_reference(pairs.file, scenario_dir))
            return Datasets(as_dataset(train), as_dataset(test))
        return _generate_datasets(pairs.model_dump_json())

    @classmethod
    def num_symbols(cls, parameters: Parameters, dataset: TensorDict) -> int:
        return 2 * int(dataset["adjacency"].shape[-1])

    @classmethod
    def build_body(
        cls,
        parameters: Parameters,
        agent: GraphIsomorphismAgentParameters,
        shape: AgentShape,
        dataset: TensorDict,
    ) -> AgentBody:
        return GraphBody(agent, shape)

    @classmethod
    def build_policy_head(
        cls, parameters: Parameters, agent: GraphIsomorphismAgentParameters, shape: AgentShape
    ) -> AgentPolicyHead:
        return GraphPolicyHead(agent, shape, cls.impossible_symbols)

    @classmethod
    def build_value_head(
        cls, parameters: Parameters, agent: GraphIsomorphismAgentParameters, shape: AgentShape
    ) -> AgentValueHead:
        return SummaryValueHead(agent, shape, GRAPHS, 2 * shape.d_representation)

    @classmethod
    def build_solo_head(
        cls, parameters: Parameters, agent: GraphIsomorphismAgentParameters, shape: AgentShape
    ) -> SoloAgentHead:
        return SummarySoloHead(agent, GRAPHS, 2 * shape.d_representation)

    @classmethod
    def layers_on(cls, device: torch.device) -> str:
        return computed_by() if device.type == "cpu" else super().layers_on(device)

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor:
        return impossible_symbols(observation, shape)

    @classmethod
    def describe_datapoint(cls, parameters: Parameters, row: TensorDictBase) -> dict[str, Any]:
        """Return the edges of both graphs, and the refinement round that distinguishes them."""
        graphs = []
        for adjacency_nn, mask_n in zip(row["adjacency"], row["node_mask"], strict=True):
            # Each edge once: the adjacency is symmetric.
            edges = adjacency_nn.triu(1).nonzero().tolist()
            graphs.append({"num_nodes": int(mask_n.sum()), "edges": edges})
        score = int(row["wl_score"])
        if score == ISOMORPHIC:
            note = ""
        elif score == BEYOND_WL:
            note = f"{MAX_WL_ROUNDS} rounds of refinement do not distinguish the graphs"
        else:
            note = f"refinement distinguishes the graphs in round {score}"
        description = super().describe_datapoint(parameters, row)
        description["kind"] = cls.datapoint_kind
        description["graphs"] = graphs
        description["nodes_per_graph"] = row["node_mask"].shape[-1]
        description["wl_score"] = score
        description["note"] = note
        return description


@lru_cache(maxsize=4)
def _generate_datasets(parameters: str) -> Datasets:
    """Generate both sets, once per process; the parameters as JSON, a hashable value."""
    pairs = GraphPairParameters.model_validate_json(parameters)
    # Locked, since every caller gets the same ones.
    train, test = (as_dataset(generate_pairs(pairs, split)).lock_() for split in SPLITS)
    return Datasets(train, test)
