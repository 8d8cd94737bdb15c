"""Trajectories: interactions of a policy with its environment, as tokens.

Shape suffixes: `T` token of the trajectory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.rl_objectives.advantages import (
    AdvantageParameters,
    GroupAdvantages,
    codes_of,
    zero_variance_groups,
)

FIELDS = (
    *("tokens", "loss_mask", "logprobs", "reward"),
    *("run_id", "group_id", "advantage"),
)
"""Fields of every trajectory; all others are extras."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one side.

    `logprobs` are those with which the policy sampled, nats; None for tokens of the prompt, a tool
    or the environment, which are not trained.
    """

    ids: Sequence[int]
    logprobs: Sequence[float] | None = None


class Trajectory:
    """Tokens of one rollout, which of them are the policy's, and the reward.

    Attribute, item and `get` access are one: `trajectory.reward`, `trajectory["reward"]` and
    `trajectory.get("reward")`, of extras too. Setting an unknown name adds an extra.

    Attributes
    ----------
    tokens : Tensor
        int64 `[T]`.
    loss_mask : Tensor
        bool `[T]`; True on tokens of the policy.
    logprobs : Tensor or None
        float32 `[T]`, nats: log p of token t given those before it under the policy that sampled,
        at the place of token t; 0 where the mask is False.
    reward : float or None
    run_id, group_id : str, int or None
        The run of an agent, which may have several trajectories, and the group of runs whose
        rewards are compared. None: a unique one.
    advantage : float, Tensor or None
        One number, or `[T]`.
    extras : dict
        Everything else.
    extra_fields : MutableMapping
        NexRL's view of all but tokens, loss_mask and reward; it can be given and written.
        `token_advantages`, one for each token of the policy, become `advantage`.

    Raises
    ------
    DataError
        If masks, log-probabilities and tokens differ in length.
    """

    tokens: Tensor
    loss_mask: Tensor
    logprobs: Tensor | None
    reward: float | None
    run_id: str | int | None
    group_id: str | int | None
    advantage: float | Tensor | None
    extras: dict[str, Any]

    def __init__(
        self,
        tokens: Tensor | Sequence[int],
        loss_mask: Tensor | Sequence[int] | Sequence[bool],
        *,
        logprobs: Tensor | Sequence[float] | None = None,
        reward: float | None = None,
        run_id: str | int | None = None,
        group_id: str | int | None = None,
        advantage: float | Tensor | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> None:
        self.__dict__.update(
            extras=extras,
            tokens=_vector(tokens, torch.int64),
            loss_mask=_vector(loss_mask, torch.bool),
            logprobs=None if logprobs is None else _vector(logprobs, torch.float32),
            reward=None if reward is None else float(reward),
            run_id=run_id,
            group_id=group_id,
            advantage=readable(advantage) if isinstance(advantage, np.ndarray) else advantage,
        )
        if extra_fields:
            self.extra_fields.update(extra_fields)
        num_tokens = self.tokens.shape[0]
        token_fields = {"loss_mask": self.loss_mask, "logprobs": self.logprobs}
        wrong = [
            f"{name} has {value.shape[0]}"
            for name, value in token_fields.items()
            if value is not None and value.shape[0] != num_tokens
        ]
        if wrong:
            raise DataError(
                f"a trajectory has {num_tokens} tokens, but {', '.join(wrong)}. Give one entry per "
                "token, False and 0.0 for tokens not of the policy."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Trajectories built together are views of shared token tensors.
        fields = self.__dict__
        return fields | {n: x.clone() for n, x in fields.items() if isinstance(x, Tensor)}

    @classmethod
    def from_spans(cls, spans: Sequence[TokenSpan], **fields: Any) -> Trajectory:
        """Build the trajectory of turns in order; turns without log-probabilities are masked."""
        (trajectory,) = cls.all_from_spans([spans], [fields])
        return trajectory

    @classmethod
    def all_from_spans(
        cls, spans: Sequence[Sequence[TokenSpan]], fields: Sequence[Mapping[str, Any]]
    ) -> list[Trajectory]:
        """Build a trajectory from each list of turns with its fields; see `from_spans`."""
        turns = [span for trajectory_spans in spans for span in trajectory_spans]
        counts = [len(span.ids) for span in turns]
        is_of_policy = np.array([span.logprobs is not None for span in turns], np.bool_)
        mask = is_of_policy.repeat(counts)
        logprobs = np.zeros(len(mask), np.float32)
        policy_logprobs = [x for span in turns if span.logprobs is not None for x in span.logprobs]
        if len(policy_logprobs) != mask.sum():
            raise DataError(
                f"turns of the policy have {mask.sum()} tokens, but {len(policy_logprobs)} "
                "log-probabilities. Give one for each token."
            )
        logprobs[mask] = policy_logprobs
        tokens = np.array([token for span in turns for token in span.ids], np.int64)
        sizes = [sum(len(span.ids) for span in trajectory_spans) for trajectory_spans in spans]
        # Views of tensors of all trajectories: one array is built, not one for each.
        columns = (torch.split(torch.from_numpy(x), sizes) for x in (tokens, mask, logprobs))
        return [
            cls(tokens_T, mask_T, logprobs=logprobs_T, **trajectory_fields)
            for tokens_T, mask_T, logprobs_T, trajectory_fields in zip(
                *columns, fields, strict=True
            )
        ]

    # ---- access by attribute, item and `get`

    def __getattr__(self, name: str) -> Any:
        # Called only where there is no field of the name.
        extras = self.__dict__.get("extras", {})
        if name in extras:
            return extras[name]
        raise AttributeError(
            f"a trajectory has no field {name!r}. It has "
            f"{', '.join(self.__dict__.keys() - {'extras'} | extras.keys())}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS or name == "extras":
            if name == "advantage" and isinstance(value, np.ndarray):
                value = readable(value)
            if name == "logprobs" and value is not None:
                value = _vector(value, torch.float32)
            object.__setattr__(self, name, value)
        elif name == "extra_fields":
            self.extra_fields.update(value)
        elif name == "token_advantages":
            self.advantage = self._at_own_tokens(value)
        else:
            self.extras[name] = value

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in FIELDS or name in self.extras

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field or extra, or the default if it is missing or None."""
        if name not in self:
            return default
        value = self[name]
        return default if value is None else value

    def keys(self) -> Iterator[str]:
        """Yield the names of all fields and extras."""
        return iter((*FIELDS, *self.extras))

    @property
    def extra_fields(self) -> MutableMapping[str, Any]:
        """NexRL's view of all but tokens, loss_mask and reward."""
        return _ExtraFields(self)

    def _at_own_tokens(self, values: Sequence[float] | Tensor) -> Tensor:
        """Scatter values of the policy's tokens to `[T]`, 0 elsewhere."""
        advantages = torch.as_tensor(values, dtype=torch.float32)
        if advantages.shape != (self.num_response_tokens,):
            raise DataError(
                f"token_advantages has shape {list(advantages.shape)}, but "
                f"{self.num_response_tokens} of {len(self)} tokens are the policy's. Give one "
                "value for each of these."
            )
        return torch.zeros(len(self)).masked_scatter(self.loss_mask, advantages)

    # ---- sizes

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __repr__(self) -> str:
        return (
            f"Trajectory({len(self)} tokens, {self.num_response_tokens} of the policy, "
            f"reward={self.reward}, group_id={self.group_id!r}, run_id={self.run_id!r})"
        )

    @property
    def num_response_tokens(self) -> int:
        """Number of the policy's tokens."""
        return int(self.loss_mask.sum())

    def to_plain(self) -> dict[str, Any]:
        """Return fields and extras by name."""
        return {name: self[name] for name in self.keys()}

    def truncated(self, max_tokens: int) -> Trajectory:
        """Return the first tokens, with token fields truncated accordingly."""
        fields = self.to_plain()
        for name, value in fields.items():
            if isinstance(value, Tensor | np.ndarray) and value.shape[:1] == self.tokens.shape:
                fields[name] = value[:max_tokens]
        return Trajectory(**fields)


class _ExtraFields(MutableMapping[str, Any]):
    """A trajectory's fields except those that NexRL requires, by name."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return self._trajectory[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._trajectory[name] = value

    def __delitem__(self, name: str) -> None:
        self[name]
        if name in FIELDS:
            self._trajectory[name] = None
        else:
            del self._trajectory.extras[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        trajectory = self._trajectory
        names = [
            name
            for name in FIELDS
            if name not in ("tokens", "loss_mask", "reward") and trajectory[name] is not None
        ]
        return [*names, *trajectory.extras]


def readable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array, copied if it is a reversed view, which torch cannot read."""
    return array.copy("C") if min(array.strides, default=0) < 0 else array


def _vector(values: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(values, Tensor):
        is_plain = values.dtype == dtype and not values.requires_grad
        return values if is_plain else values.detach().to(dtype)
    # NumPy reads a list several times faster than torch does, and converts a short one faster.
    return torch.from_numpy(np.array(values).astype(_NUMPY[dtype], copy=False))


_NUMPY = {torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}


# ---- advantages, compared within a group


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    use_run_ids: bool = True,
    logger: logging.Logger | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Set `advantage` of each trajectory, and return them; see `group_advantages`.

    Parameters
    ----------
    trajectories : Sequence[Trajectory]
        A trajectory without a group or reward gets 0.
    use_run_ids : bool
        Whether the trajectories of a run count as one.
    options : Any
        Of `AdvantageParameters`: `baseline`, `scale`, `std_epsilon`, `advantage`.
    logger : Logger, optional
        Reports how many groups have no signal.
    """
    parameters = AdvantageParameters.from_dict(options)
    compared = advantages_of(trajectories, parameters, use_run_ids=use_run_ids)
    for trajectory, advantage in zip(trajectories, compared.advantages_N.tolist(), strict=True):
        trajectory.advantage = advantage
    if logger is not None:
        flat = compared.is_zero_variance_P
        logger.info("%d of %d groups have rewards without a signal", int(flat.sum()), len(flat))
    return list(trajectories)


def advantages_of(
    trajectories: Sequence[Trajectory],
    parameters: AdvantageParameters | None = None,
    *,
    use_run_ids: bool = True,
) -> GroupAdvantages:
    """Return the advantages, with statistics of the groups in order of first appearance."""
    parameters = parameters or AdvantageParameters()
    return parameters.advantages(*_compared(trajectories, use_run_ids=use_run_ids))


def zero_variance_of(trajectories: Sequence[Trajectory], *, use_run_ids: bool = True) -> list[bool]:
    """Return which groups, in order of first appearance, have equal rewards in all runs."""
    return zero_variance_groups(*_compared(trajectories, use_run_ids=use_run_ids)).tolist()


def _compared(
    trajectories: Sequence[Trajectory], *, use_run_ids: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rewards, and numbers of groups and runs; missing ids are unique."""
    rewards = [
        math.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories
    ]
    groups = codes_of([trajectory.group_id for trajectory in trajectories])
    runs = codes_of([trajectory.run_id for trajectory in trajectories]) if use_run_ids else None
    return torch.tensor(rewards, dtype=torch.float64), groups, runs
