"""Parameters of the agents that read pairs of graphs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nip_astra.parameters.agents import HeadParameters, LrFactors
from nip_astra.parameters.conditions import where_above


class GraphIsomorphismAgentParameters(HeadParameters):
    """An agent whose body is a graph network and a transformer."""

    activation_function: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation between layers; tanh is the fastest where they are compiled; `doctor` tells."""
    num_gnn_layers: int = Field(default=5, ge=1)
    """Rounds of message passing; the agent tells no pair apart that takes more rounds of
    Weisfeiler-Lehman refinement."""
    d_gnn: int = Field(default=16, ge=1)
    """Width of a node between layers. Larger keeps more colours apart."""
    d_gin_mlp: int = Field(default=64, ge=1)
    """Width of the hidden layer within each layer of message passing."""
    num_transformer_layers: int = Field(default=1, ge=1)
    """Layers of attention between the graphs. Larger compares them more thoroughly."""
    num_heads: int = Field(default=4, ge=1)
    """Heads of attention; they divide d_transformer."""
    d_transformer: int = Field(default=16, ge=1)
    """Width of a token."""
    d_transformer_mlp: int = Field(default=64, ge=1)
    """Width of the hidden layer within each layer of attention."""
    d_node_selector: Annotated[int, where_above("num_node_selector_layers", 1)] = Field(
        default=16, ge=1
    )
    """Width of the hidden layers that choose a node."""
    num_node_selector_layers: int = Field(default=2, ge=1)
    """Linear layers that choose a node."""
    use_pair_invariant_pooling: bool = True
    """Whether the two graphs become their mean and difference, so that their order is unseen."""
    gnn_lr_factor: LrFactors = LrFactors()
    """Learning rate of the graph network, as a multiple of the body's."""

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.d_transformer % self.num_heads:
            raise ValueError(f"num_heads must divide d_transformer, which is {self.d_transformer}")
        return self
