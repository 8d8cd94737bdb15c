"""Agents with neural networks: a body that reads a frame, and heads that act on it.

Shapes: B frames, R rounds, C channels, V channels that the agent sees, P positions, S symbols,
L linear symbols, D width of a representation.

An observation is a mapping of tensors with leading dimension B:

================================== ================ ==============================================
`round`, `seed`, `datapoint_id`    [B] long         round from 0, the episode's random number, row
`message_history`                  [B, R, C, P, S]  one-hot, summed over senders, 0 where none
`message`                          [B, C, P, S]     messages of the previous round
`linear_message_history`, `linear_message`          the same with L, if there are such symbols
`active_mask`, `can_decide`        [B, A, C], [B, A] bool: may send in a channel, may decide
`question_round`                   [B, C] long      round of the message to answer
`has_decided`, `decided`           [B, A], [B]      has decided; the decision (2: none)
`y`                                [B, 1] long      the label, hidden from policies
the dataset's columns              [B, ...]         for instance `adjacency` or `image`
================================== ================ ==============================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nip_astra.parameters.agents import AgentParameters
from nip_astra.utils.activations import ACTIVATIONS

MASKED = -1e9
"""Logit of a symbol that cannot be sent; finite, so that entropies have no 0 times infinity."""


@dataclass(frozen=True)
class MessageSpace:
    """The symbols of a message."""

    num_symbols: int
    """S, symbols of the scenario: nodes of both graphs, or parts of an image."""
    message_size: int = 1
    """P, symbols per message."""
    num_linear_symbols: int = 0
    """L, additional symbols without a meaning in the scenario; 0 for none."""


@dataclass(frozen=True)
class AgentShape:
    """Sizes that an agent's networks depend on."""

    name: str
    is_verifier: bool
    """Whether the agent is a verifier or acts as one (a simulator), not a prover."""
    has_decision: bool
    """Whether the agent needs logits over reject, accept and continue."""
    num_rounds: int
    """R, rounds of the longest conversation."""
    num_channels: int
    """C, channels of the protocol."""
    visible_channels: tuple[int, ...]
    """Indices of the V visible channels, in order."""
    message_space: MessageSpace
    d_representation: int
    """Width of the body's representation."""

    @property
    def num_visible(self) -> int:
        """Return V, the number of visible channels."""
        return len(self.visible_channels)


Observation = Mapping[str, Tensor]
"""A batch of frames; see the module's table."""
Representation = Mapping[str, Tensor]
"""Output of a body for the scenario's heads; tensors with leading dimension B."""
ImpossibleSymbols = Callable[[Observation, AgentShape], Tensor | None]
"""Returns a bool mask that broadcasts to [B, V, P, S], True for impossible symbols."""

MIN_STD = 1e-6
"""Entries of a history with a smaller standard deviation are not scaled."""


class PolicyOutput(NamedTuple):
    """Output of a policy head: unnormalised log-probabilities."""

    message_logits_BVPS: Tensor
    """Logits of symbols, `MASKED` where impossible."""
    decision_logits_B3: Tensor | None = None
    """Logits of reject, accept, continue; None for an agent without decisions."""
    linear_logits_BVPL: Tensor | None = None
    """Logits of linear symbols, if any."""


class AgentBody(nn.Module, ABC):
    """Network that reads a frame. Subclasses implement `forward`.

    `history` and `linear_history` are the messages in the visible channels, standardised by
    `set_statistics`.
    """

    has_hidden_state: bool = False
    """Whether training draws random numbers (dropout) or changes buffers (batch normalisation),
    so that processes would diverge; then one process computes all losses."""
    history_mean: Tensor
    history_scale: Tensor
    linear_mean: Tensor
    linear_scale: Tensor
    visible: Tensor

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.shape = shape
        space = shape.message_space
        shape_RVP = (shape.num_rounds, shape.num_visible, space.message_size)
        shape_RVPS = (*shape_RVP, space.num_symbols)
        shape_RVPL = (*shape_RVP, space.num_linear_symbols)
        # Not saved: it follows from the shape.
        self.register_buffer("visible", torch.tensor(shape.visible_channels), persistent=False)
        # Saved with the weights, which are trained on standardised histories.
        self.register_buffer("history_mean", torch.zeros(shape_RVPS))
        self.register_buffer("history_scale", torch.ones(shape_RVPS))
        self.register_buffer("linear_mean", torch.zeros(shape_RVPL))
        self.register_buffer("linear_scale", torch.ones(shape_RVPL))
        self._sees_all = shape.num_visible == shape.num_channels

    @abstractmethod
    def forward(self, observation: Observation) -> dict[str, Tensor]:
        """Compute the representation for the scenario's heads."""

    def after_initialisation(self) -> None:
        """Hook, called once after all weights are initialised."""

    def history(self, observation: Observation) -> Tensor:
        """Return the visible messages so far, [B, R, V, P, S]."""
        visible_BRVPS = self._select_visible(observation["message_history"], 2)
        return (visible_BRVPS - self.history_mean) * self.history_scale

    def linear_history(self, observation: Observation) -> Tensor:
        """Return the visible linear messages so far, [B, R, V, P, L]."""
        visible_BRVPL = self._select_visible(observation["linear_message_history"], 2)
        return (visible_BRVPL - self.linear_mean) * self.linear_scale

    def last_message(self, observation: Observation) -> Tensor:
        """Return the visible messages of the previous round, not standardised, [B, V, P, S]."""
        return self._select_visible(observation["message"], 1)

    def set_statistics(self, histories: Tensor, linear_histories: Tensor | None = None) -> None:
        """Standardise histories to mean 0 and standard deviation 1.

        Parameters
        ----------
        histories : Tensor
            Sample of `message_history`, [B, R, C, P, S].
        linear_histories : Tensor, optional
            Sample of `linear_message_history`.
        """
        visible_BRVPS = self._select_visible(histories, 2)
        _standardise(self.history_mean, self.history_scale, visible_BRVPS)
        if linear_histories is not None:
            visible_BRVPL = self._select_visible(linear_histories, 2)
            _standardise(self.linear_mean, self.linear_scale, visible_BRVPL)

    def _select_visible(self, messages: Tensor, dim: int) -> Tensor:
        """Return the visible channels of messages, whose channels are the dimension `dim`."""
        return messages if self._sees_all else messages.index_select(dim, self.visible)


def _standardise(mean: Tensor, scale: Tensor, sample: Tensor) -> None:
    """Write the mean and the inverse standard deviation of a sample; 1 where it is constant."""
    std = sample.std(dim=0)
    is_constant = std < MIN_STD
    mean.copy_(sample.mean(dim=0))
    scale.copy_(torch.where(is_constant, torch.ones_like(std), 1 / std.clamp(min=MIN_STD)))


class AgentPolicyHead(nn.Module, ABC):
    """Distribution over moves. Subclasses implement `logits`.

    Parameters
    ----------
    impossible : Callable, optional
        Impossible symbols; their logits become `MASKED`.
    """

    def __init__(self, shape: AgentShape, impossible: ImpossibleSymbols | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.impossible = impossible

    @abstractmethod
    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        """Return logits of all symbols, possible or not."""

    def decide_as(self, solo_head: SoloAgentHead) -> None:
        """Hook: initialise decisions from the agent's trained solo head, after pretraining.

        Does nothing here, so that initial decisions are random.
        """

    def forward(self, representation: Representation, observation: Observation) -> PolicyOutput:
        output = self.logits(representation, observation)
        mask = self.impossible(observation, self.shape) if self.impossible else None
        if mask is None:
            return output
        return output._replace(
            message_logits_BVPS=output.message_logits_BVPS.masked_fill(mask, MASKED)
        )


class RandomPolicyHead(AgentPolicyHead):
    """Uniform over possible moves; reads no representation."""

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        space, num_frames = self.shape.message_space, len(observation["round"])
        shape_BVP = (num_frames, self.shape.num_visible, space.message_size)
        device = observation["round"].device
        decision_logits_B3 = linear_logits_BVPL = None
        if self.shape.has_decision:
            decision_logits_B3 = torch.zeros(num_frames, 3, device=device)
        if space.num_linear_symbols:
            linear_logits_BVPL = torch.zeros(*shape_BVP, space.num_linear_symbols, device=device)
        message_logits_BVPS = torch.zeros(*shape_BVP, space.num_symbols, device=device)
        return PolicyOutput(message_logits_BVPS, decision_logits_B3, linear_logits_BVPL)


class AgentValueHead(nn.Module, ABC):
    """Predicts the expected reward."""

    @abstractmethod
    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        """Return values, [B]."""


class SoloAgentHead(nn.Module, ABC):
    """Predicts the label without a conversation."""

    @abstractmethod
    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        """Return logits of the labels 0 and 1, [B, 2]."""


class Agent(nn.Module):
    """An agent's modules; None for those that the trainer does not need.

    `policy_body` and `value_body` may be the same object; `solo_head` reads the policy's body.
    """

    def __init__(
        self,
        name: str,
        parameters: AgentParameters,
        shape: AgentShape,
        *,
        policy_body: AgentBody | None = None,
        value_body: AgentBody | None = None,
        policy_head: AgentPolicyHead | None = None,
        value_head: AgentValueHead | None = None,
        solo_head: SoloAgentHead | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.parameters_of_agent = parameters
        self.shape = shape
        self.policy_body = policy_body
        self.value_body = value_body
        self.policy_head = policy_head
        self.value_head = value_head
        self.solo_head = solo_head

    @property
    def is_random(self) -> bool:
        """Whether the agent acts at random and does not learn."""
        return self.parameters_of_agent.is_random

    @property
    def shares_body(self) -> bool:
        """Whether policy and value function share a body."""
        return self.policy_body is not None and self.policy_body is self.value_body

    @property
    def bodies(self) -> list[AgentBody]:
        """Return the agent's bodies, each once."""
        bodies = [body for body in (self.policy_body, self.value_body) if body is not None]
        return bodies[:1] if self.shares_body else bodies

    def policy(self, observation: Observation) -> PolicyOutput:
        """Return the logits of the agent's moves in every frame."""
        assert self.policy_head is not None
        # A random agent has no body.
        representation = {} if self.policy_body is None else self.policy_body(observation)
        output: PolicyOutput = self.policy_head(representation, observation)
        return output

    def policy_and_value(self, observation: Observation) -> tuple[PolicyOutput, Tensor]:
        """Return both, from one pass of the shared body."""
        assert self.policy_body is not None
        assert self.policy_head is not None
        assert self.value_head is not None
        representation = self.policy_body(observation)
        output: PolicyOutput = self.policy_head(representation, observation)
        values_B: Tensor = self.value_head(representation, observation)
        return output, values_B

    def value(self, observation: Observation) -> Tensor:
        """Return the agent's values, [B]; 0 for an agent without a value function."""
        if self.value_head is None or self.value_body is None:
            return torch.zeros(len(observation["round"]), device=observation["round"].device)
        values_B: Tensor = self.value_head(self.value_body(observation), observation)
        return values_B

    def solo(self, observation: Observation) -> Tensor:
        """Return the logits of the labels, [B, 2]."""
        assert self.solo_head is not None
        assert self.policy_body is not None
        logits_B2: Tensor = self.solo_head(self.policy_body(observation), observation)
        return logits_B2


def round_one_hot(observation: Observation, shape: AgentShape) -> Tensor:
    """Return the one-hot index of the round, [B, R]."""
    rounds_B = observation["round"].clamp(max=shape.num_rounds - 1)
    return nn.functional.one_hot(rounds_B, shape.num_rounds).float()


def mlp(d_in: int, d_hidden: int, num_layers: int, d_out: int, activation: str) -> nn.Sequential:
    """Build a network of `num_layers` linear layers with activations between them."""
    sizes = [d_in, *[d_hidden] * (num_layers - 1), d_out]
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        if layers:
            layers.append(ACTIVATIONS[activation]())
        layers.append(nn.Linear(size, next_size))
    return nn.Sequential(*layers)


@torch.no_grad()
def start_from(network: nn.Sequential, source_network: nn.Sequential) -> None:
    """Copy an `mlp` into a larger one; further inputs are ignored, and further outputs are 0."""
    targets = [layer for layer in network if isinstance(layer, nn.Linear)]
    sources = [layer for layer in source_network if isinstance(layer, nn.Linear)]
    for target, source in zip(targets, sources, strict=True):
        nn.init.zeros_(target.weight)
        nn.init.zeros_(target.bias)
        num_outputs, num_inputs = source.weight.shape
        target.weight[:num_outputs, :num_inputs] = source.weight
        target.bias[:num_outputs] = source.bias


def initialise_orthogonally(module: nn.Module, gain: float) -> None:
    """Initialise matrices and filters orthogonally and biases to 0; others are unchanged."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(part.weight, gain=gain)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


CENTRAL_CRITIC = "rl_central_critic"
"""The `trainer_type` of trainers with centralised value functions."""


class LabelledValueHead(AgentValueHead):
    """Predicts the expected reward given the label, with one head of the scenario per label."""

    def __init__(self, build: Callable[[], AgentValueHead]) -> None:
        super().__init__()
        self.heads = nn.ModuleList([build(), build()])

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        values_BY = torch.stack([head(representation, observation) for head in self.heads], dim=-1)
        values_B: Tensor = values_BY.gather(-1, observation["y"]).squeeze(-1)
        return values_B
