"""Rollout trees: conversations that branch at every turn, stored flat.

Shape suffixes: `N` node, `E` episode, `T` token, `G` sibling, `P` parent (group of siblings).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rollouts.batch import widened
from nip_astra.rollouts.prompts import RECORD_KEY, columns_of

RECORDED = (
    *("parent", "depth", "episode", "response_score", "combined_score", "is_error"),
    *("reward", "probe_nll"),
)
"""Node columns that a record contains."""

_PLAIN = (
    *("tree_width", "probes", "responses", "contexts", "num_unique_tokens", "seconds"),
    *("response_failures", "probe_reasonings", "response_reasonings", "num_reasoning_tokens"),
    "response_calls",
)
"""Fields of a tree with plain values."""


@dataclass
class RolloutTree:
    """All episodes of one rollout; a node is one probe with its response.

    Nodes are ordered by depth, then episode, then branch, so the `tree_width` children of a
    conversation are consecutive and every level is one block.

    Attributes
    ----------
    nodes : TensorDict
        Batch size `[N]`, no gradients, on the CPU:

        - `parent` int64: index of the parent node, -1 at depth 0;
        - `depth`, `episode` int64: counted from 0;
        - `probe` int64 `[N, T]`, `probe_mask` bool `[N, T]`: the attacker's tokens, its end token
          included, right-padded with 0;
        - `probe_logprobs` float32 `[N, T]`: log-probabilities under the attacker that sampled,
        nats,
          0 on padding;
        - `reference_logprobs` float32 `[N, T]`: the same under the reference; NaN if not scored;
        - `probe_nll` float32: mean negative log-likelihood per probe token under the likelihood
          model, nats;
        - `is_empty` bool: the probe has no text;
        - `response_score`, `combined_score` float32: NaN without a verdict;
        - `is_error` bool: there is no verdict because the scorer failed;
        - `is_refused` bool, for chat models: the service marks the response as a refusal, or
          withholds it;
        - `reward` float32, NaN where a score that it needs is;
        - `reward/<term>` float32: the part of a reward term;
        - `credit` float32, set by a trainer: reward including what follows from the node;
        - `drawn_logprobs`, `drawn_reference_logprobs`, `importance_weight` float32 `[N, T]`, set by
          `trainers.ast.behaviour`.
    tree_width : int
        Children of every conversation.
    prompts : list[str]
        Opening prompt of each episode.
    probes, responses : list[str]
        Text of each node.
    contexts : list[list[int]]
        Attacker's context tokens before the probe; one list per group of siblings.
    num_unique_tokens : dict[str, int]
        By role, the fewest tokens that the model could have read.
    seconds : dict[str, float]
        Time of attacker, target, reference and scorer.
    response_failures : list[str | None]
        Why a node has no response; empty if every node has one.
    probe_reasonings, response_reasonings : list[str | None]
        Reasoning of the attacker and of the target in each node, which are part of no text; None
        without a thought, empty if no model has reasoned.
    num_reasoning_tokens : list[int | None]
        Number of the first tokens of each probe that are reasoning, with its markers; empty if the
        attacker has not reasoned.
    response_calls : list[list | None]
        Calls of tools in each response, each as name and arguments; None without any, empty if no
        response has any.
    more_of_samples : list[dict[str, Tensor]]
        Further columns of each node's training sample, of any length, set by a trainer.
    staleness : int
        Iterations by which the sampling weights lag behind.
    """

    nodes: TensorDict
    tree_width: int
    prompts: list[str]
    probes: list[str]
    responses: list[str]
    contexts: list[list[int]] = field(repr=False)
    num_unique_tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    response_failures: list[str | None] = field(default_factory=list, repr=False)
    probe_reasonings: list[str | None] = field(default_factory=list, repr=False)
    response_reasonings: list[str | None] = field(default_factory=list, repr=False)
    num_reasoning_tokens: list[int | None] = field(default_factory=list, repr=False)
    response_calls: list[list[list[Any]] | None] = field(default_factory=list, repr=False)
    more_of_samples: list[dict[str, Tensor]] = field(default_factory=list, repr=False)
    staleness: int = 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which is the number of target queries."""
        return len(self.probes)

    @property
    def num_episodes(self) -> int:
        """Number of opening prompts, each with its own tree."""
        return len(self.prompts)

    def sibling_groups(self) -> Tensor:
        """Return node indices by group of siblings, int64 `[P, G]`."""
        return torch.arange(self.num_nodes).view(-1, self.tree_width)

    def context_of(self, node: int) -> list[int]:
        """Return the attacker's context tokens before a node's probe."""
        return self.contexts[node // self.tree_width]

    def failures_of_nodes(self) -> list[str | None]:
        """Return why each node has no response; None if it has one."""
        return self.response_failures or self.blanks()

    def blanks(self) -> list[Any]:
        """Return a list without a value of any node."""
        return [None] * self.num_nodes

    def replies(self) -> Iterator[tuple[str, str | None, bool]]:
        """Yield each node's response, why there is none, and whether it is marked as a refusal.

        A response of calls alone is shown by these: it is not empty.
        """
        nodes = self.nodes
        calls = self.response_calls or self.blanks()
        responses = []
        for text, node_calls in zip(self.responses, calls, strict=True):
            if not text and node_calls:
                text = str(node_calls)
            responses.append(text or "")
        refused = nodes["is_refused"].tolist() if "is_refused" in nodes else [False] * len(nodes)
        return zip(responses, self.failures_of_nodes(), refused, strict=True)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint: everything except the prompts."""
        nodes = self.nodes
        return {
            "nodes": {name: nodes[name] for name in nodes.keys()},  # noqa: SIM118 - no mapping
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], prompts: Sequence[str]) -> RolloutTree:
        """Restore the output of `to_plain` for a tree with these opening prompts."""
        nodes = TensorDict(plain["nodes"], batch_size=[len(plain["probes"])])
        # Earlier versions stored neither reasoning nor calls.
        fields = {name: plain[name] for name in _PLAIN if name in plain}
        return cls(nodes, prompts=list(prompts), **fields)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat record per node; a context is found by following `parent`."""
        nodes = self.nodes
        names = [str(name) for name in nodes.keys()]  # noqa: SIM118 - iteration gives rows
        terms = sorted(name for name in names if name.startswith("reward/"))
        columns = {name: nodes[name].tolist() for name in (*RECORDED, *terms)}
        columns["probe_logprob"] = nodes["probe_logprobs"].sum(dim=1).tolist()
        columns["reference_logprob"] = nodes["reference_logprobs"].sum(dim=1).tolist()
        columns["probe_num_tokens"] = nodes["probe_mask"].sum(dim=1).tolist()
        if "is_refused" in nodes:
            columns["is_refused"] = nodes["is_refused"].tolist()
        failed = any(self.response_failures)
        reasonings = {
            "probe_reasoning": self.probe_reasonings,
            "response_reasoning": self.response_reasonings,
        }
        has_reasonings = any(reasonings.values())
        has_calls = any(self.response_calls)
        has_columns = any(map(columns_of, self.prompts))
        for node in range(self.num_nodes):
            prompt = self.prompts[columns["episode"][node]]
            yield {
                "node": node,
                "prompt": str(prompt),
                **({RECORD_KEY: dict(columns_of(prompt))} if has_columns else {}),
                "probe": self.probes[node],
                "response": self.responses[node],
                **({"response_failure": self.response_failures[node]} if failed else {}),
                **(
                    {name: texts[node] if texts else None for name, texts in reasonings.items()}
                    if has_reasonings
                    else {}
                ),
                **({"response_calls": self.response_calls[node] or []} if has_calls else {}),
                **{name: column[node] for name, column in columns.items()},
            }


def merge_trees(parts: Sequence[RolloutTree]) -> RolloutTree:
    """Merge the episodes of all parts into one tree, in order, as if sampled together."""
    first_nodes = list(accumulate((part.num_nodes for part in parts), initial=0))
    first_episodes = list(accumulate((part.num_episodes for part in parts), initial=0))
    shifted = []
    width_of_probes = max(part.nodes["probe"].shape[1] for part in parts)
    for part, node, episode in zip(parts, first_nodes, first_episodes, strict=False):
        nodes = part.nodes.clone()
        for name, values in part.nodes.items():
            if values.ndim == 2:
                nodes[name] = widened(values, width_of_probes)
        nodes["parent"] = torch.where(nodes["parent"] >= 0, nodes["parent"] + node, -1)
        nodes["episode"] = nodes["episode"] + episode
        shifted.append(nodes)
    joined: Any = torch.cat(shifted)
    # By level; within a level the parts follow one another, as their episodes do.
    order = joined["depth"].argsort(stable=True)
    new_index = torch.empty_like(order)
    new_index[order] = torch.arange(len(order))
    merged = joined[order]
    old_parent = merged["parent"]
    new_parent = new_index[old_parent.clamp(min=0)]
    # The first nodes of episodes have no parent.
    merged["parent"] = torch.where(old_parent >= 0, new_parent, -1)
    width = parts[0].tree_width
    indices = order.tolist()

    def in_order(values: list[Any]) -> list[Any]:
        return [values[index] for index in indices]

    def join(name: str) -> list[Any]:
        """Return a list that a part without such values leaves empty."""
        lists = [getattr(part, name) for part in parts]
        if not any(lists):
            return []
        pairs = zip(parts, lists, strict=True)
        return in_order([value for part, values in pairs for value in values or part.blanks()])

    counts: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for part in parts:
        for role, count in part.num_unique_tokens.items():
            counts[role] = counts.get(role, 0) + count
        for name, spent in part.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + spent
    contexts = [context for part in parts for context in part.contexts]
    return RolloutTree(
        merged,
        width,
        [prompt for part in parts for prompt in part.prompts],
        in_order([probe for part in parts for probe in part.probes]),
        in_order([response for part in parts for response in part.responses]),
        [contexts[index // width] for index in indices[::width]],
        counts,
        seconds,
        join("response_failures"),
        join("probe_reasonings"),
        join("response_reasonings"),
        join("num_reasoning_tokens"),
        join("response_calls"),
    )
