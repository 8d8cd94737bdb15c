"""Between graphs, which are for reading and for algorithms, and the flat trees of the loop.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.astra.core.sampler import Graph, Node
from nip_astra.astra.core.texts import Conversation, Spoken
from nip_astra.rollouts.tree import RolloutTree

TextNode = Node[str, str]
TextGraph = Graph[str, str]


@dataclass
class GraphTree(RolloutTree):
    """A tree made of graphs, which it keeps.

    Where the log-probabilities of a probe are not known its row is NaN, under a mask of one token.

    Attributes
    ----------
    graphs : list[Graph]
        One an episode.
    graph_nodes : list[Node]
        The nodes in the tree's order.
    groups : list[list[int]]
        Node numbers by group of siblings.
    """

    graphs: list[Graph[Any, Any]] = field(default_factory=list)
    graph_nodes: list[Node[Any, Any]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)


def graphs_of(tree: RolloutTree) -> list[TextGraph]:
    """Return one graph per episode; texts keep their tokens."""
    return graphs_and_nodes(tree)[0]


def graphs_and_nodes(tree: RolloutTree) -> tuple[list[TextGraph], list[TextNode]]:
    """Return one graph per episode, and all nodes in the tree's order."""
    if isinstance(tree, GraphTree):
        return tree.graphs, tree.graph_nodes
    columns = {
        name: tree.nodes[name].tolist()
        for name in ("parent", "episode", "reward", "response_score", "combined_score", "is_error")
    }
    graphs: list[TextGraph] = [
        Graph(Conversation([prompt], _opening_ids(tree, episode)), [])
        for episode, prompt in enumerate(tree.prompts)
    ]
    nodes: list[TextNode] = []
    for number in range(tree.num_nodes):
        parent = columns["parent"][number]
        mask_T = tree.nodes["probe_mask"][number]
        before = graphs[columns["episode"][number]].context if parent < 0 else nodes[parent].context
        assert isinstance(before, Conversation)
        turns = before.turns
        if parent >= 0:
            turns = (*turns, nodes[parent].probe, nodes[parent].response)
        children: list[TextNode] = []
        node = Node(
            Conversation(turns, tree.context_of(number)),
            Spoken(
                tree.probes[number],
                tree.nodes["probe"][number][mask_T].tolist(),
                "attacker",
                (tree.num_reasoning_tokens[number] or 0) if tree.num_reasoning_tokens else 0,
            ),
            Spoken(tree.responses[number], speaker="target"),
            columns["reward"][number],
            children,
            response_score=columns["response_score"][number],
            combined_score=columns["combined_score"][number],
            is_error=columns["is_error"][number],
            logprobs=tree.nodes["probe_logprobs"][number][mask_T],
            reference_logprobs=tree.nodes["reference_logprobs"][number][mask_T],
        )
        nodes.append(node)
        above = graphs[columns["episode"][number]] if parent < 0 else nodes[parent]
        assert isinstance(above.children, list)
        above.children.append(node)
    return graphs, nodes


def _opening_ids(tree: RolloutTree, episode: int) -> list[int] | None:
    # The first groups of siblings are those of the openings, in order.
    return tree.contexts[episode] if episode < len(tree.contexts) else None


def tree_of(graphs: Sequence[Graph[Any, Any]]) -> GraphTree:
    """Return the flat tree of graphs: level by level, siblings together."""
    nodes: list[Node[Any, Any]] = []
    place: dict[str, list[int]] = {"parent": [], "depth": [], "episode": []}
    groups: list[list[int]] = []
    level = [(-1, episode, graph.children) for episode, graph in enumerate(graphs)]
    depth = 0
    while level:
        below = []
        for parent, episode, siblings in level:
            first = len(nodes)
            for node in siblings:
                below.append((len(nodes), episode, node.children))
                nodes.append(node)
            count = len(siblings)
            place["parent"] += [parent] * count
            place["depth"] += [depth] * count
            place["episode"] += [episode] * count
            groups += [list(range(first, first + count))] if count else []
        level, depth = below, depth + 1
    widths = {len(group) for group in groups}
    columns = {name: torch.tensor(values, dtype=torch.long) for name, values in place.items()}
    return GraphTree(
        TensorDict(columns | _columns(nodes), batch_size=[len(nodes)]),
        # Groups of unequal size have no common width; `groups` holds them then.
        widths.pop() if len(widths) == 1 else 1,
        [str(graph.context) for graph in graphs],
        [str(node.probe) for node in nodes],
        [str(node.response) for node in nodes],
        [[] for _ in nodes],
        graphs=list(graphs),
        graph_nodes=nodes,
        groups=groups,
    )


def _columns(nodes: Sequence[Node[Any, Any]]) -> dict[str, Tensor]:
    """Return the columns of a tree that come from the nodes themselves."""
    unknown = torch.full((1,), torch.nan)
    reference = [
        unknown if node.reference_logprobs is None else node.reference_logprobs for node in nodes
    ]
    logprobs = [
        torch.full_like(known, torch.nan) if node.logprobs is None else node.logprobs
        for node, known in zip(nodes, reference, strict=True)
    ]
    reference = [
        torch.full_like(own, torch.nan) if node.reference_logprobs is None else known
        for node, own, known in zip(nodes, logprobs, reference, strict=True)
    ]
    mask_NT = _padded([torch.ones(len(own), dtype=torch.bool) for own in logprobs])
    reference_NT = _padded(reference)
    length_N = mask_NT.sum(dim=1)
    return {
        # Equal numbers for equal texts, since the tokens are unknown.
        "probe": _identities([node.probe for node in nodes])[:, None] * mask_NT,
        "probe_mask": mask_NT,
        "probe_logprobs": _padded(logprobs),
        "reference_logprobs": reference_NT,
        "probe_nll": -reference_NT.sum(dim=1) / length_N.clamp(min=1),
        "is_empty": torch.tensor([not str(node.probe) for node in nodes], dtype=torch.bool),
        "response_score": torch.tensor([float(node.response_score) for node in nodes]),
        "combined_score": torch.tensor([float(node.combined_score) for node in nodes]),
        "is_error": torch.tensor([node.is_error for node in nodes], dtype=torch.bool),
        "reward": torch.tensor([float(node.reward) for node in nodes]),
    }


def _padded(rows: Sequence[Tensor]) -> Tensor:
    if not rows:
        return torch.zeros(0, 1, dtype=torch.bool)
    return pad_sequence([row.detach().cpu() for row in rows], batch_first=True)


def _identities(probes: Sequence[Any]) -> Tensor:
    def key(probe: Any) -> Any:
        return probe.ids if isinstance(probe, Spoken) and probe.ids else str(probe)

    numbers: dict[Any, int] = {}
    return torch.tensor(
        [numbers.setdefault(key(probe), len(numbers) + 1) for probe in probes], dtype=torch.long
    )
