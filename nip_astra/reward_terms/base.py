"""Reward terms: a number for each probe of a training rollout; larger is better.

Each iteration a trainer adds every term's `added` to the rewards (NaN without a score), then lets
all terms `observe` the rollout. A term's state is part of checkpoints. A custom term subclasses
`RewardTerm`, implements `_values`, and is registered with `register_reward_term`.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.deadlines import within_deadline
from nip_astra.errors import RewardTermError
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.scorers.base import Scorer


@dataclass(frozen=True)
class RatedProbes:
    """A rollout as passed to a term: all nodes, siblings adjacent."""

    prompts: list[str]
    """Opening prompt of each node's episode."""
    probes: list[str]
    responses: list[str]
    """Texts of each node."""
    probe_mask_NT: Tensor
    """bool; True on the tokens that the attacker sampled, its end token included."""
    probe_logprobs_NT: Tensor
    """float32, no grad; their log-probabilities under the sampling attacker, nats, of the
    distribution that is trained (`trainers.ast.behaviour`)."""
    reference_logprobs_NT: Tensor
    """float32; those under the reference, at temperature 1 without truncation."""
    response_score_N: Tensor
    """float32; NaN without a verdict."""
    tree_width: int
    """Siblings in a group."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.probes)

    @property
    def is_empty(self) -> Tensor:
        """Return whether each probe is without text, bool `[N]`."""
        return torch.tensor([not probe.strip() for probe in self.probes], dtype=torch.bool)


class RewardTerm(ABC):
    """A number for each probe. Subclasses implement `_values`; checks are done here.

    A stateful term also implements `observe`, `state` and `load_state`. A term must not reward a
    probe without text above others, because the empty probe is the easiest to learn.
    """

    scorers: Sequence[Scorer] = ()
    """Scorers that the term calls; their services get the run's budget."""

    class Parameters(PolymorphicParameters):
        """Parameters of every reward term; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        weight: float = Field(default=1.0)
        """Factor of the value in the reward. Larger makes the term matter more beside the score
        of 0 to 1; negative inverts it."""
        scaled_by_score: bool = False
        """Whether the value is multiplied by the response's score (0 without a verdict), so that
        novelty alone, without a failure, earns nothing."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.scenario_dir = scenario_dir

    @abstractmethod
    def _values(self, nodes: RatedProbes) -> Tensor:
        """Hook: return a finite number for each node, `[N]`; there is at least one node."""

    def observe(self, nodes: RatedProbes) -> None:  # noqa: B027 - most terms have no memory
        """Hook: update the state with a rollout, after all terms' values are computed."""

    def state(self) -> dict[str, Any]:
        """Hook: return the term's state, of text, numbers, tensors, lists and dicts."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - as above
        """Hook: restore the result of `state`."""

    def values(self, nodes: RatedProbes) -> Tensor:
        """Return values of the nodes, float32 `[N]` on the CPU, finite, no grad; larger is better.

        Raises `RewardTermError` if the hook returns another shape, or a value that is not finite.
        """
        if nodes.num_nodes == 0:
            return torch.zeros(0)
        with torch.no_grad(), within_deadline(f"the reward term {self._name!r}"):
            values_N = self._values(nodes).detach().to("cpu", torch.float32)
        if values_N.shape != (nodes.num_nodes,):
            raise RewardTermError(
                f"the reward term {self._name!r} returned shape {list(values_N.shape)} for "
                f"{nodes.num_nodes} nodes. Return one number per node, in order."
            )
        is_finite_N = values_N.isfinite()
        if not is_finite_N.all():
            node = int((~is_finite_N).nonzero()[0])
            raise RewardTermError(
                f"the reward term {self._name!r} returned {values_N[node].item()} for the probe "
                f"{nodes.probes[node][:60]!r}. Return finite numbers, then resume the run."
            )
        return values_N

    def added(self, nodes: RatedProbes) -> Tensor:
        """Return the term's part of each node's reward, weight times value, float32 `[N]`."""
        weight: float = self.parameters.weight
        added_N = weight * self.values(nodes)
        if self.parameters.scaled_by_score:
            added_N = added_N * nodes.response_score_N.nan_to_num(nan=0.0)
        return added_N

    @property
    def _name(self) -> str:
        return self.parameters.type_name or type(self).__name__


REWARD_TERMS: ComponentRegistry[type[RewardTerm]] = ComponentRegistry("reward_term")


def register_reward_term(name: str) -> Callable[[type[RewardTerm]], type[RewardTerm]]:
    """Register a `RewardTerm` subclass under its `_type` in parameter files; a decorator."""
    return REWARD_TERMS.register(name)


def build_reward_terms(
    parameters: Sequence[Any], *, device: torch.device, scenario_dir: Path | None
) -> dict[str, RewardTerm]:
    """Build the reward terms of a list, by name, in order.

    A term is named after its kind; the second of a kind is `<kind>_2`, and so on.
    """
    terms: dict[str, RewardTerm] = {}
    for term_parameters in parameters:
        kind = term_parameters.type_name
        name, number = kind, 1
        while name in terms:
            number += 1
            name = f"{kind}_{number}"
        term_class = REWARD_TERMS.get(kind)
        terms[name] = term_class(term_parameters, device=device, scenario_dir=scenario_dir)
    return terms
