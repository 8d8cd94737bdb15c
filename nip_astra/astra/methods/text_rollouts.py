"""Rollouts through a problem's own methods, level by level, in batches.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nip_astra.astra.core.batches import in_parts
from nip_astra.astra.core.graphs import GraphTree, TextGraph, TextNode, tree_of
from nip_astra.astra.core.sampler import Graph, Node
from nip_astra.astra.core.scorer import rater_of
from nip_astra.astra.core.system import System
from nip_astra.astra.core.texts import history_of
from nip_astra.rollouts.messages import Turn
from nip_astra.scorers.base import Exchange, Ratings
from nip_astra.utils.seeding import SeedPart, derive_seed

SPOKEN_TOKENS = 64
"""Assumed tokens of a probe and a response before they are generated."""


@contextmanager
def seeded(*key: SeedPart) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch within the block.

    A custom problem draws from them, so equal seeds give equal graphs. They are restored
    afterwards.
    """
    seed = derive_seed(*key)
    before = random.getstate(), np.random.get_state()
    # An unused GPU needs no seed, and reading its state would initialise it.
    uses_gpu = torch.cuda.is_available() and bool(torch.cuda.memory_allocated())
    devices = range(torch.cuda.device_count()) if uses_gpu else ()
    with torch.random.fork_rng(devices=list(devices)):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def rate_turns(
    system: System[str, str],
    contexts: Sequence[str],
    probes: Sequence[str],
    responses: Sequence[str],
) -> tuple[Ratings, Ratings]:
    """Rate every response, and every probe with its response; NaN without a scorer."""
    rater = rater_of_system(system)
    count = len(probes)
    if rater is None or not count:
        none = Ratings(torch.full((count,), torch.nan), torch.zeros(count, dtype=torch.bool))
        return none, none
    histories: list[tuple[Turn, ...]] = [() for _ in probes]
    if rater.reads_history:
        histories = [
            (*history_of(context), Turn("user", str(probe)))
            for context, probe in zip(contexts, probes, strict=True)
        ]
    exchanges = [Exchange(str(r), h) for r, h in zip(responses, histories, strict=True)]
    if rater.reads_history:
        # Who reads the conversation has seen the probe when it rates the response.
        both = rater.rate(exchanges)
        return both, both
    exchanges += [Exchange(f"{p} {r}") for p, r in zip(probes, responses, strict=True)]
    rated = rater.rate(exchanges)
    return (
        Ratings(rated.scores_N[:count], rated.is_error_N[:count]),
        Ratings(rated.scores_N[count:], rated.is_error_N[count:]),
    )


def rater_of_system(system: System[Any, Any]) -> Any:
    """Return the rater of a problem's texts, created once so that its cache persists."""
    known = getattr(system, "_rater", None)
    if known is None or known[0] is not system.scorer:
        known = (system.scorer, rater_of(system.scorer))
        system._rater = known  # type: ignore[attr-defined]  # remembered beside what it belongs to
    return known[1]


class TextRollouts:
    """Samples trees with a problem's methods: two calls per level for any number of branches, or
    more if `max_batch_bytes` of the problem requires.
    """

    def __init__(self, system: System[str, str]) -> None:
        self.system = system

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str],
        *,
        tree_width: int,
        tree_depth: int,
        key: tuple[SeedPart, ...],
        first_episode: int = 0,
    ) -> GraphTree:
        """Sample one tree per opening prompt; see `TreeSampler.sample`.

        A problem's random numbers depend on the number of texts per call, so unlike with
        `TreeSampler` the episodes of one call belong together.
        """
        graphs: list[TextGraph] = [Graph(prompt, []) for prompt in prompts]
        level: list[tuple[str, list[TextNode]]] = [
            (graph.context, graph.children)  # type: ignore[misc]  # the lists made above
            for graph in graphs
        ]
        with seeded(*key, "texts", first_episode):
            for _ in range(tree_depth):
                level = self._grow(level, tree_width)
        return tree_of(graphs)

    def _grow(
        self, level: list[tuple[str, list[TextNode]]], tree_width: int
    ) -> list[tuple[str, list[TextNode]]]:
        """Add probes and responses to every conversation, and return the next level."""
        rows = [place for place in level for _ in range(tree_width)]
        contexts = [context for context, _ in rows]
        if not contexts:
            return []
        return [
            below
            for part in in_parts(self.system, contexts, spoken=SPOKEN_TOKENS)
            for below in self._grow_part(contexts[part], [siblings for _, siblings in rows[part]])
        ]

    def _grow_part(
        self, contexts: list[str], siblings: Sequence[list[TextNode]]
    ) -> list[tuple[str, list[TextNode]]]:
        """Add one probe and response to each conversation, in one call of each method."""
        system = self.system
        probes = list(system._rollout_prompt_with_attacker_and_validate(contexts))
        messages = [system._target_input(c, p) for c, p in zip(contexts, probes, strict=True)]
        responses = list(system._rollout_prompt_with_target_and_validate(messages))
        rewards = system._reward_and_validate(contexts, probes, responses)
        response, combined = rate_turns(system, contexts, probes, responses)
        reference_BT, mask_BT = system.reference_values(contexts, probes)
        is_error_B = response.is_error_N | combined.is_error_N
        below = []
        for row, turn in enumerate(zip(contexts, probes, responses, rewards, strict=True)):
            children: list[TextNode] = []
            node = Node(
                *turn,
                children,
                response_score=float(response.scores_N[row]),
                combined_score=float(combined.scores_N[row]),
                is_error=bool(is_error_B[row]),
                reference_logprobs=reference_BT[row][mask_BT[row]].float().cpu(),
            )
            siblings[row].append(node)
            below.append((system._advance_and_validate(*turn[:3]), children))
        return below
