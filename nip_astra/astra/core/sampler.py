"""Conversation trees, and the interface of their samplers."""

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
    """A probe and its response.

    Attributes
    ----------
    context : StateT
        State before the probe.
    probe : ActionT
        The attacker's message; also called `attack`, `audit` and `challenge`.
    response : StateT
        The target's message.
    reward : float
        Reward of the probe; NaN without a verdict.
    children : Sequence[Node]
        Next probes.
    response_score, combined_score : float
        The scorer's rating of the response, and of probe and response; NaN without one.
    is_error : bool
        Whether the score is missing because the scorer failed.
    logprobs, reference_logprobs : Tensor or None
        `[T]`: log-probabilities of the probe's tokens under the sampling attacker, and under the
        reference, nats; None if not computed.
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
    """An episode: an opening prompt and the tree of conversations from it.

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
        """Yield the nodes along the first children, from the opening to a leaf."""
        level = self.children
        while level:
            yield level[0]
            level = level[0].children


class Sampler(ABC, Generic[StateT, ActionT]):
    """Samples episodes. Subclasses implement `rollout`.

    Attributes
    ----------
    system : System
        The sampled problem; also called `problem`.
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
        """Sample one training episode; equal seeds give equal graphs."""

    def eval_rollout(self, seed: Any = None) -> Graph[StateT, ActionT]:
        """Sample one evaluation episode, from a number or, in a subclass, from a prompt."""
        if seed is None or isinstance(seed, int):
            return self.rollout(seed)
        raise ConfigurationError(
            f"{type(self).__name__} cannot evaluate from {seed!r}, only from numbers. Define "
            "eval_rollout(seed) for prompts."
        )

    def final_reward(self, graph: Graph[StateT, ActionT]) -> float:
        """Return the reward of the last node along the first children; NaN if there is none."""
        rewards = [node.reward for node in graph.chain()]
        return float(rewards[-1]) if rewards else math.nan


Environment = Sampler
