"""What a graph network does before and after its layers.

Shapes: B frames, S = 2 n nodes of both graphs (padded), G = 2 B graphs, D width, E width of a
token, F and L places (of all that was said, and of what was said last).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Network(NamedTuple):
    """What a graph network reads, and its weights but for those of its layers.

    Attributes
    ----------
    said_BFS : Tensor
        What was said about each node, a number at each place.
    adjacency_B2nn : Tensor
        1 where two nodes of a graph are joined, a node not with itself.
    is_node_B2n : Tensor
        bool; False at padding, which comes last.
    last_BLS : Tensor
        What was said last.
    input_DF : Tensor
        The last of its columns, beyond those for `said`, is added to every node.
    node_ED, bias_E, message_EL : Tensor
        Of tokens: for the nodes after all layers, for each, and for what was said last.
    """

    said_BFS: Tensor
    adjacency_B2nn: Tensor
    is_node_B2n: Tensor
    last_BLS: Tensor
    input_DF: Tensor
    node_ED: Tensor
    bias_E: Tensor
    message_EL: Tensor

    def apply(self, passing: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Give a token of each node, [B, S, E], and the sums of each graph's nodes, [B, 2, D].

        What the tokens of padding are is not said: nobody may read them.

        Parameters
        ----------
        passing : Callable
            Gives nodes after all layers, [G, n, D], from those before, and the adjacency with
            every node a neighbour of itself, [G, n, n].
        """
        num_frames, num_said, num_nodes = self.said_BFS.shape
        nodes = functional.linear(
            self.said_BFS.transpose(1, 2), self.input_DF[:, :num_said], self.input_DF[:, num_said]
        )
        adjacency_Gnn = self.adjacency_B2nn.flatten(0, 1)
        # Every node is a neighbour of itself: epsilon is 0.
        closed_Gnn = adjacency_Gnn + torch.eye(num_nodes // 2, device=adjacency_Gnn.device)
        nodes_GnD = passing(nodes.reshape(2 * num_frames, num_nodes // 2, -1), closed_Gnn)
        is_node_Gn1 = self.is_node_B2n.flatten(0, 1)[..., None].to(nodes_GnD.dtype)
        sums_B2D = (nodes_GnD * is_node_Gn1).sum(1).view(num_frames, 2, -1)
        nodes_BSD = nodes_GnD.view(num_frames, num_nodes, -1)
        tokens_BSE = functional.linear(nodes_BSD, self.node_ED, self.bias_E)
        # Few places: a product of two vectors each, faster than one of matrices this narrow.
        said_last = zip(self.last_BLS.unbind(1), self.message_EL.unbind(1), strict=True)
        for said_BS, weight_E in said_last:
            tokens_BSE = torch.addcmul(tokens_BSE, said_BS[..., None], weight_E)
        return tokens_BSE, sums_B2D
