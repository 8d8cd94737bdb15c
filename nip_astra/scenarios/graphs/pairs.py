"""Attention between the nodes of two graphs and the graphs themselves.

Nodes of one graph do not attend to one another, but to those of the other graph and to the two
graphs; the graphs attend to all.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, D width, K keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MASKED_KEY = -1e9
"""What is added to the score of a key that is padding."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens, [G, T, D], from tokens, keys, [G, K, D], and what is added to scores, [G, K, 1]."""


class Pairs(NamedTuple):
    """Tokens that attend to one another.

    Attributes
    ----------
    graphs_B2D, nodes_BSD : Tensor
        Of the graphs and of their nodes.
    is_node_B2n : Tensor
        bool; False at padding, which comes last.
    """

    graphs_B2D: Tensor
    nodes_BSD: Tensor
    is_node_B2n: Tensor


class Reading(Protocol):
    """What comes of pairs in a layer; each method computes no more than it gives."""

    def graphs(self) -> Tensor:
        """The tokens of the graphs, [B, 2, D]."""

    def nodes(self) -> Tensor:
        """The tokens of the nodes, [B, S, D]."""

    def nodes_of(self, graph_B: Tensor) -> Tensor:
        """The tokens of the nodes of one graph a frame, [B, n, D], from its number, 0 or 1."""


class PairReading:
    """Reads pairs by a layer that takes any tokens and keys.

    What tokens of padding are is not said: nobody may read them.
    """

    def __init__(self, pairs: Pairs, attend: Attend) -> None:
        self.pairs, self.attend = pairs, attend
        first, second = pairs.nodes_BSD.chunk(2, dim=1)
        # The first half is what the first graph's nodes read, the second half the second's.
        self._keys_BKD = torch.cat([second, pairs.graphs_B2D, first, pairs.graphs_B2D], dim=1)

    def graphs(self) -> Tensor:
        return self.attend(self.pairs.graphs_B2D, self._keys_BKD, self._masks[0])

    def nodes(self) -> Tensor:
        return self.attend(*self._by_graph()).view_as(self.pairs.nodes_BSD)

    def nodes_of(self, graph_B: Tensor) -> Tensor:
        rows_B = 2 * torch.arange(len(graph_B), device=graph_B.device) + graph_B
        return self.attend(*(values.index_select(0, rows_B) for values in self._by_graph()))

    def _by_graph(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each graph's nodes, keys and mask."""
        num_frames, num_keys, d = self._keys_BKD.shape
        return (
            self.pairs.nodes_BSD.reshape(2 * num_frames, -1, d),
            self._keys_BKD.view(2 * num_frames, num_keys // 2, d),
            self._masks[1],
        )

    @cached_property
    def _masks(self) -> tuple[Tensor, Tensor]:
        """What is added to the scores of the graphs' keys, [B, K, 1], and of the nodes'.

        Graphs read each of themselves once.
        """
        graphs_B2D, _, is_node_B2n = self.pairs
        num_frames, _, n = is_node_B2n.shape
        graph_mask = graphs_B2D.new_zeros(num_frames, 2, n + 2)
        graph_mask[:, :, :n].masked_fill_(~is_node_B2n.flip(1), MASKED_KEY)
        node_mask = graph_mask.view(2 * num_frames, n + 2, 1).clone()
        graph_mask[:, 1, n:] = MASKED_KEY
        return graph_mask.view(num_frames, -1, 1), node_mask
