"""Conversations that branch, and what plays them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self

from torch import Tensor

from nip_astra.astra.core.aliases import one_problem
from nip_astra.astra.core.common import ActionT, StateT
from nip_astra.astra.core.system import System
from nip_astra.errors import ConfigurationError


@dataclass
class Node(Generic[StateT, ActionT]):
    """A probe with the response to it.

    Attributes
    ----------
    context : StateT
        State before the probe.
    probe : ActionT
        What the attacker said; also called `attack`, `audit` and `challenge`.
    response : StateT
        What the target said to it.
    reward : float
        What the probe earned; NaN where there is no verdict.
    children : Sequence[Node]
        What followed.
    response_score, combined_score : float
        The scorer's rating of the response, and of probe and response; NaN where there is none.
    is_error : bool
        Whether there is none because the scorer failed.
    logprobs, reference_logprobs : Tensor or None
        `[T]`: log-probabilities of the probe's tokens under the attacker that said it, and under
        the reference, nats; None where they were not computed.
    """

    context: StateT
    probe: ActionT
    response: StateT
    reward: float
    children: Sequence[Self] = ()
    response_score: float = field(default=math.nan, kw_only=True)
    combined_score: float = field(default=math.nan, kw_only=True)
    is_error: bool = field(default=False, kw_only=True)
    logprobs: Tensor | None = field(default=None, kw_only=True, repr=False, compare=False)
    reference_logprobs: Tensor | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def attack(self) -> ActionT:
        """Another name of `probe`."""
        return self.probe

    audit = challenge = attack


@dataclass
class Graph(Generic[StateT, ActionT]):
    """An episode: an opening prompt and the tree of what was said to it.

    Attributes
    ----------
    context : StateT
        The opening prompt.
    children : Sequence[Node]
        The first probes.
    """

    context: StateT
    children: Sequence[Node[StateT, ActionT]]

    def chain(self) -> Iterator[Node[StateT, ActionT]]:
        """The nodes along the first children, from the opening to a leaf."""
        level = self.children
        while level:
            yield level[0]
            level = level[0].children


class Sampler(ABC, Generic[StateT, ActionT]):
    """Plays episodes. A subclass gives `rollout`.

    Attributes
    ----------
    system : System
        What is played; also called `problem`.
    """

    def __init__(
        self,
        system: System[StateT, ActionT] | None = None,
        *,
        problem: System[StateT, ActionT] | None = None,
    ) -> None:
        self.system: System[StateT, ActionT] = one_problem(self, system, problem)

    @property
    def problem(self) -> System[StateT, ActionT]:
        """Another name of `system`."""
        return self.system

    @abstractmethod
    def rollout(self, seed: int | None = None) -> Graph[StateT, ActionT]:
        """Play one training episode; the same seed gives the same graph, 0 like any other."""

    def eval_rollout(self, seed: Any = None) -> Graph[StateT, ActionT]:
        """Play one episode for an evaluation, from a number or, in a subclass, from a prompt."""
        if seed is None or isinstance(seed, int):
            return self.rollout(seed)
        raise ConfigurationError(
            f"an evaluation was to start from {seed!r}, but {type(self).__name__} plays from "
            "numbers only. Define eval_rollout(seed), which takes a prompt."
        )

    def final_reward(self, graph: Graph[StateT, ActionT]) -> float:
        """The reward of the last node along the first children; NaN where there is none."""
        rewards = [node.reward for node in graph.chain()]
        return float(rewards[-1]) if rewards else math.nan


Environment = Sampler
