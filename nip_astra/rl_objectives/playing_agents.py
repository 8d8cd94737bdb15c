"""What an objective sees of agents that play a protocol: their frames, and their policies in them.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

Frames = Mapping[Any, Tensor]
"""Tensors of frames, [B, ...], by the names that they have in a TensorDict: `frames["round"]`,
`frames["agents", "advantage"]`. To look one up costs a fraction of what it costs there."""


def frames_of(batch: TensorDictBase) -> Frames:
    """The tensors of a TensorDict [B] as a plain mapping."""
    return dict(batch.items(include_nested=True, leaves_only=True))


class SomeFrames(Mapping[Any, Tensor]):
    """Some rows of frames, by number or a slice; taken when a tensor is first asked for."""

    def __init__(self, frames: Frames, rows: Tensor | slice) -> None:
        self._frames = frames
        self._rows = rows
        self._taken: dict[Any, Tensor] = {}

    def __getitem__(self, key: Any) -> Tensor:
        found = self._taken.get(key)
        if found is None:
            whole, rows = self._frames[key], self._rows
            found = whole[rows] if isinstance(rows, slice) else whole.index_select(0, rows)
            self._taken[key] = found
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)


class Evaluation(Protocol):
    """How a policy sees moves that were made; see `scenario_base.agent_actions`."""

    logprobs_B: Tensor
    entropies_B: Tensor


class PlayingAgents(Protocol):
    """The agents of a protocol, as `scenario_base.combined.CombinedAgents` gives them."""

    names: tuple[str, ...]
    needs_logits: bool

    def __getitem__(self, name: str) -> Any:
        """One agent."""

    def policy(self, name: str, frames: Any) -> Any:
        """The logits of an agent's moves."""

    def evaluate(self, name: str, frames: Any, output: Any = None) -> Any:
        """An `Evaluation` of the moves that an agent made."""

    def values(self, name: str, frames: Any) -> Tensor:
        """An agent's values, [B]."""

    def policy_and_values(self, name: str, frames: Any) -> tuple[Any, Tensor]:
        """Both, from one pass of the body that they share."""

    def is_acting(self, name: str, frames: Any) -> Tensor:
        """The frames in which an agent may move, [B] bool."""

    def number(self, name: str) -> int:
        """An agent's place in the dimension A."""

    def logit_reward(self, name: str, output: Any, frames: Any) -> Tensor | None:
        """What an agent's logits earn whatever is drawn from them, [B] with grad, or None."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""


class PolicyView(NamedTuple):
    """An agent's policy on those frames of a minibatch in which it acts.

    Attributes
    ----------
    frames : Frames
        The frames.
    evaluation : Evaluation
        Of the moves made in them, with grad.
    is_acting_B : Tensor or None
        bool, frames that count; None for all. On the CPU the others are left out; elsewhere they
        are kept and masked, because to pick frames a host waits for its device.
    number : int
        The agent's place in the dimension A.
    output : PolicyOutput
        The logits that the evaluation is of.
    """

    frames: Frames
    evaluation: Evaluation
    is_acting_B: Tensor | None
    number: int
    output: Any

    def of_agent(self, key: str) -> Tensor:
        """The agent's part of `("agents", key)` of shape [B, A] or [B, A, 1], as [B]."""
        values_B: Tensor = self.frames["agents", key][:, self.number]
        return values_B.squeeze(-1) if values_B.ndim == 2 else values_B

    def mean(self, values_B: Tensor) -> Tensor:
        """The mean over the frames that count, 0 where there is none."""
        if self.is_acting_B is None:
            return values_B.mean()
        kept_B = self.is_acting_B.to(values_B.dtype)
        return (values_B * kept_B).sum() / kept_B.sum().clamp(min=1)

    def figures(self, *values_B: Tensor) -> tuple[Tensor, ...]:
        """Means to be logged, without grad; NaN where the agent acts in no frame."""
        values_XB = torch.stack([values.detach() for values in values_B])
        if self.is_acting_B is None:
            return values_XB.mean(1).unbind()
        kept_B = self.is_acting_B.to(values_XB.dtype)
        return ((values_XB * kept_B).sum(1) / kept_B.sum()).unbind()
