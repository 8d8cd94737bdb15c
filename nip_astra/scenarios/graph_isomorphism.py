"""Graph isomorphism: provers and verifiers send nodes of two graphs that may be the same."""

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
from nip_astra.scenario_base.protocol.message_space import AgentShape
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentPolicyHead,
    AgentValueHead,
    Observation,
    SoloAgentHead,
)
from nip_astra.scenarios.graphs.agent_parameters import GraphIsomorphismAgentParameters
from nip_astra.scenarios.graphs.bodies import GraphBody
from nip_astra.scenarios.graphs.drawing import GraphsView
from nip_astra.scenarios.graphs.generation import SPLITS, GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.heads import (
    GraphPolicyHead,
    GraphSoloHead,
    GraphValueHead,
    impossible_symbols,
)
from nip_astra.scenarios.graphs.native.network import computed_by
from nip_astra.scenarios.graphs.pairs_file import as_dataset, load_pairs
from nip_astra.scenarios.graphs.wl import BEYOND_WL, ISOMORPHIC, MAX_WL_ROUNDS
from nip_astra.scenarios.registry import register_scenario
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario


@register_scenario(ScenarioType.GRAPH_ISOMORPHISM)
class GraphIsomorphismScenario(TensorDictScenario):
    """Are two graphs isomorphic? A message is a node of one of them."""

    kind = str(ScenarioType.GRAPH_ISOMORPHISM)
    datapoint_kind = "graphs"
    datapoint_view = GraphsView

    class Parameters(TensorDictScenario.Parameters):
        """Who plays, and about which pairs of graphs."""

        agents: Mapping[str, GraphIsomorphismAgentParameters] = Field(
            default={"default": GraphIsomorphismAgentParameters()}
        )
        """Agents by name; what stands under `default` holds for all that do not say otherwise."""
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
        return _generated(pairs.model_dump_json())

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
        return GraphValueHead(agent, shape)

    @classmethod
    def build_solo_head(
        cls, parameters: Parameters, agent: GraphIsomorphismAgentParameters, shape: AgentShape
    ) -> SoloAgentHead:
        return GraphSoloHead(agent, shape)

    @classmethod
    def layers_on(cls, device: torch.device) -> str:
        return computed_by() if device.type == "cpu" else super().layers_on(device)

    @classmethod
    def impossible_symbols(cls, observation: Observation, shape: AgentShape) -> Tensor:
        return impossible_symbols(observation, shape)

    @classmethod
    def describe_datapoint(cls, parameters: Parameters, row: TensorDictBase) -> dict[str, Any]:
        """Both graphs by their edges, and how hard they are to tell apart."""
        graphs = [
            {"num_nodes": int(mask_n.sum()), "edges": adjacency_nn.triu(1).nonzero().tolist()}
            for adjacency_nn, mask_n in zip(row["adjacency"], row["node_mask"], strict=True)
        ]
        score = int(row["wl_score"])
        notes = {
            ISOMORPHIC: "",
            BEYOND_WL: f"{MAX_WL_ROUNDS} rounds of refinement do not tell the graphs apart",
        }
        return super().describe_datapoint(parameters, row) | {
            "kind": cls.datapoint_kind,
            "graphs": graphs,
            "nodes_per_graph": row["node_mask"].shape[-1],
            "wl_score": score,
            "note": notes.get(score, f"refinement tells the graphs apart in round {score}"),
        }


@lru_cache(maxsize=4)
def _generated(parameters: str) -> Datasets:
    """Make both sets; the same ones are not made twice in a process."""
    pairs = GraphPairParameters.model_validate_json(parameters)
    train, test = (as_dataset(generate_pairs(pairs, split)).lock_() for split in SPLITS)
    return Datasets(train, test)
