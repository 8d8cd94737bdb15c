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

from nip_astra.scenarios.graphs.derivatives import Rounded


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

    def unsaid(self, node_ED: Tensor) -> Network:
        """The same as it is before anything is said, for tokens that are added to others.

        Parameters
        ----------
        node_ED : Tensor
            Of these tokens.
        """
        return self._replace(
            said_BFS=self.said_BFS[:, :0],
            last_BLS=self.last_BLS[:, :0],
            input_DF=self.input_DF[:, -1:],
            node_ED=node_ED,
            bias_E=torch.zeros_like(self.bias_E),
            message_EL=self.message_EL[:, :0],
        )

    def apply(
        self, passing: Callable[[Tensor, Tensor], Tensor], *, digits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """A token of each node, [B, S, E], and the sums of each graph's nodes, [B, 2, D].

        What the tokens of padding are is not said: nobody may read them.

        Parameters
        ----------
        passing : Callable
            Gives nodes after all layers, [G, n, D], from those before, and the adjacency with
            every node a neighbour of itself, [G, n, n].
        digits : int, optional
            Decimal places to which those after all layers are rounded.
        """
        num_frames, num_said, num_nodes = self.said_BFS.shape
        nodes = functional.linear(
            self.said_BFS.transpose(1, 2), self.input_DF[:, :num_said], self.input_DF[:, num_said]
        )
        adjacency_Gnn = self.adjacency_B2nn.flatten(0, 1)
        # Every node is a neighbour of itself: epsilon is 0.
        closed_Gnn = adjacency_Gnn + torch.eye(num_nodes // 2, device=adjacency_Gnn.device)
        nodes_GnD = passing(nodes.reshape(2 * num_frames, num_nodes // 2, -1), closed_Gnn)
        if digits is not None:
            nodes_GnD = Rounded.apply(nodes_GnD, digits)  # type: ignore[no-untyped-call]  # torch's
        is_node_Gn1 = self.is_node_B2n.flatten(0, 1)[..., None].to(nodes_GnD.dtype)
        sums_B2D = (nodes_GnD * is_node_Gn1).sum(1).view(num_frames, 2, -1)
        nodes_BSD = nodes_GnD.view(num_frames, num_nodes, -1)
        tokens_BSE = functional.linear(nodes_BSD, self.node_ED, self.bias_E)
        # Few places: a product of two vectors each, faster than one of matrices this narrow.
        said_last = zip(self.last_BLS.unbind(1), self.message_EL.unbind(1), strict=True)
        for said_BS, weight_E in said_last:
            tokens_BSE = torch.addcmul(tokens_BSE, said_BS[..., None], weight_E)
        return tokens_BSE, sums_B2D
