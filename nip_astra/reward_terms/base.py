"""What a reward term is: a number for each probe of a training rollout, larger where better.

Each iteration a trainer asks every term for its `values`, adds `weight * value` to the rewards,
and then lets the term `observe` the rollout. What a term remembers goes into checkpoints:

    terms = build_reward_terms(parameters.reward.terms, device=device, scenario_dir=folder)
    nodes = RatedProbes(...)                      # the rollout, all nodes
    for name, term in terms.items():
        added_N = term.added(nodes)               # weight * values, logged as reward/<name>
        reward_N = reward_N + added_N             # stays NaN where a score is missing
    for term in terms.values():
        term.observe(nodes)                       # after all terms were asked
    saved = {name: term.state() for name, term in terms.items()}
    terms[name].load_state(saved[name])           # a fresh term goes on bit for bit

A term of one's own subclasses `RewardTerm`, implements `_values`, and is registered with
`nip_astra.reward_terms.base.register_reward_term`.

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

from nip_astra.errors import RewardTermError
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.parameters.types import RewardTermType
from nip_astra.scorers.base import Scorer


@dataclass(frozen=True)
class RatedProbes:
    """What a term sees of a rollout: every node, siblings next to each other.

    Attributes
    ----------
    prompts : list[str]
        The opening prompt of each node's episode.
    probes, responses : list[str]
        Texts of each node.
    probe_mask_NT : Tensor
        bool; True on the tokens that the attacker sampled, its end token included.
    probe_logprobs_NT : Tensor
        float32; their log-probabilities under the attacker as it was, nats, no grad: of the
        distribution that is learnt (`trainers.behaviour`).
    reference_logprobs_NT : Tensor
        float32; those under the reference, at temperature 1 and with nothing cut off.
    response_score_N : Tensor
        float32; NaN where the scorer gave no verdict.
    tree_width : int
        Siblings in a group.
    """

    prompts: list[str]
    probes: list[str]
    responses: list[str]
    probe_mask_NT: Tensor
    probe_logprobs_NT: Tensor
    reference_logprobs_NT: Tensor
    response_score_N: Tensor
    tree_width: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.probes)

    @property
    def is_empty(self) -> Tensor:
        """Where a probe has no text, bool `[N]`."""
        return torch.tensor([not probe.strip() for probe in self.probes], dtype=torch.bool)


class RewardTerm(ABC):
    """A number for each probe; a subclass implements `_values`, checks are done here.

    A term with a memory implements `observe`, `state` and `load_state` too. A term must not reward
    a probe without text above others: saying nothing is the easiest thing to learn.
    """

    scorers: Sequence[Scorer] = ()
    """Scorers that it asks, whose services are told what they may spend."""

    class Parameters(PolymorphicParameters):
        """Parameters of every reward term; a subclass adds its own."""

        type_name: ClassVar[str] = ""

        weight: float = Field(default=1.0)
        """What a value is multiplied with before it is added to the reward. Larger makes the term
        matter more beside the scorer's 0 to 1; negative turns it round."""
        scaled_by_score: bool = False
        """Whether the value is multiplied by the response's score, 0 where there is no verdict, so
        that the term matters as far as the target failed: what is new and works, not what is
        new."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        self.parameters = parameters
        self.device = device
        self.scenario_dir = scenario_dir

    @abstractmethod
    def _values(self, nodes: RatedProbes) -> Tensor:
        """A finite number for each node, `[N]`; hook. There is at least one node."""

    def observe(self, nodes: RatedProbes) -> None:  # noqa: B027 - most terms have no memory
        """Remember a rollout, after all terms were asked about it; hook."""

    def state(self) -> dict[str, Any]:
        """What the term remembers: text, numbers, tensors, lists and dicts of them; hook."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - as above
        """Take what `state` gave; hook."""

    def values(self, nodes: RatedProbes) -> Tensor:
        """Each node's value, float32 `[N]` on the CPU, finite, no grad; larger is better.

        Raises
        ------
        RewardTermError
            When the hook gives another shape, or a number that is not finite.
        """
        if nodes.num_nodes == 0:
            return torch.zeros(0)
        with torch.no_grad():
            values_N = self._values(nodes).detach().to("cpu", torch.float32)
        if values_N.shape != (nodes.num_nodes,):
            raise RewardTermError(
                f"the reward term {self._name!r} was asked for {nodes.num_nodes} values and gave a "
                f"tensor of shape {list(values_N.shape)}. It must give one number a node, in order."
            )
        is_finite_N = values_N.isfinite()
        if not is_finite_N.all():
            node = int((~is_finite_N).nonzero()[0])
            raise RewardTermError(
                f"the reward term {self._name!r} gave {values_N[node].item()} for the probe "
                f"{nodes.probes[node][:60]!r}. A value is a finite number; mend the term, then "
                "resume the run."
            )
        return values_N

    def added(self, nodes: RatedProbes) -> Tensor:
        """What the term adds to each node's reward, weight times value, float32 `[N]`."""
        weight: float = self.parameters.weight
        added_N = weight * self.values(nodes)
        if self.parameters.scaled_by_score:
            added_N = added_N * nodes.response_score_N.nan_to_num(nan=0.0)
        return added_N

    @property
    def _name(self) -> str:
        return self.parameters.type_name or type(self).__name__


REWARD_TERMS: ComponentRegistry[type[RewardTerm]] = ComponentRegistry(
    "reward_term",
    package="nip_astra.reward_terms",
    members=RewardTermType,
    modules={
        RewardTermType.COSINE_NOVELTY: "novelty",
        RewardTermType.SELF_BLEU_NOVELTY: "novelty",
        RewardTermType.FAILURE_RARITY: "failure_kinds",
        RewardTermType.FAILURE_SHARING: "failure_kinds",
        RewardTermType.ENTROPY_BONUS: "likelihood_terms",
        RewardTermType.GIBBERISH_PENALTY: "likelihood_terms",
    },
)


def register_reward_term(name: str) -> Callable[[type[RewardTerm]], type[RewardTerm]]:
    """Register a `RewardTerm` subclass under the `_type` by which parameter files name it."""
    return REWARD_TERMS.register(name)


def build_reward_term(
    parameters: Any, *, device: torch.device, scenario_dir: Path | None
) -> RewardTerm:
    """The reward term that the parameters describe."""
    cls = REWARD_TERMS.get(parameters.type_name)
    return cls(parameters, device=device, scenario_dir=scenario_dir)


def build_reward_terms(
    parameters: Sequence[Any], *, device: torch.device, scenario_dir: Path | None
) -> dict[str, RewardTerm]:
    """The reward terms of a list by name, in order.

    A term is named after its kind; the second of a kind is `<kind>_2`, and so on.
    """
    terms: dict[str, RewardTerm] = {}
    for one in parameters:
        name, number = one.type_name, 1
        while name in terms:
            number += 1
            name = f"{one.type_name}_{number}"
        terms[name] = build_reward_term(one, device=device, scenario_dir=scenario_dir)
    return terms
