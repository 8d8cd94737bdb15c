"""Parameters of the agents that read pairs of graphs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nip_astra.parameters.agents import HeadParameters, LrFactors
from nip_astra.parameters.conditions import where_above


class GraphIsomorphismAgentParameters(HeadParameters):
    """An agent whose body is a graph network and a transformer."""

    activation_function: Literal["tanh", "relu", "gelu", "sigmoid"] = "tanh"
    """Activation between layers; tanh is the fastest where they are compiled; `doctor` tells."""
    num_gnn_layers: int = Field(default=5, ge=1, le=1000)
    """Rounds of message passing; the agent tells no pair apart that takes more rounds of
    Weisfeiler-Lehman refinement."""
    d_gnn: int = Field(default=16, ge=1, le=1_000_000)
    """Width of a node between layers. Larger keeps more colours apart."""
    d_gin_mlp: int = Field(default=64, ge=1, le=1_000_000)
    """Width of the hidden layer within each layer of message passing."""
    gnn_output_digits: int | None = Field(default=None, ge=0)
    """Decimal places to which what comes of the graph network is rounded, so that equal graphs
    give equal numbers whatever the order of their nodes; null rounds nothing. Derivatives are those
    without rounding. Not compiled."""
    use_dual_gnn: bool = False
    """Whether the graph network, with the same weights, reads the graphs a second time as if
    nothing had been said, beside what was; takes up to twice as long."""
    num_transformer_layers: int = Field(default=1, ge=1, le=1000)
    """Layers of attention between the graphs. Larger compares them more thoroughly."""
    num_heads: int = Field(default=4, ge=1)
    """Heads of attention; they divide d_transformer."""
    d_transformer: int = Field(default=16, ge=1, le=1_000_000)
    """Width of a token."""
    d_transformer_mlp: int = Field(default=64, ge=1, le=1_000_000)
    """Width of the hidden layer within each layer of attention."""
    transformer_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the numbers in attention and perceptrons that are left out while the agent learns,
    not in play. Larger learns less by heart. The agent that learns is then not quite the one that
    played, which PPO's ratios show; not compiled while learning, and by one process."""
    d_node_selector: Annotated[int, where_above("num_node_selector_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers that choose a node."""
    num_node_selector_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers that choose a node."""
    use_pair_invariant_pooling: bool = True
    """Whether the two graphs become their mean and difference, so that their order is unseen."""
    use_batch_norm: bool = False
    """Whether the sums over each graph's nodes are normalised: by the minibatch while the agent
    learns, which one process does, and by running means in play."""
    noise_sigma: float = Field(default=0.0, ge=0)
    """Deviation of noise on these sums while the agent learns, as a share of each; the same for
    both graphs. Larger learns less by heart; learning is by one process."""
    gnn_lr_factor: LrFactors = LrFactors()
    """Learning rate of the graph network, as a multiple of the body's."""

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.d_transformer % self.num_heads:
            raise ValueError(f"num_heads must divide d_transformer, which is {self.d_transformer}")
        return self
