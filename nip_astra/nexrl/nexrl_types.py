"""NexRL's trajectories and batches, converted from and to ours.

Shape suffixes: `B` row (trajectory), `T` token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.rollouts import batch as batches
from nip_astra.rollouts import trajectory as trajectories_here

ModelTag: TypeAlias = str
"""Name of a policy among several."""

REQUIRED = ("tokens", "loss_mask", "reward", "is_val")
"""Fields of every trajectory; all others are in `extra_fields`."""


class NexRLRole(Enum):
    """Parts of an experiment, with those of NexRL's earlier versions."""

    ROLLOUT_WORKER = "rollout_worker"
    TRAINER = "trainer"
    TRAJECTORY_POOL = "trajectory_pool"
    WEIGHT_SYNC_CONTROLLER = "weight_sync_controller"
    DATA_LOADER = "data_loader"
    VALIDATE_DATALOADER = "validate_dataloader"
    VALIDATOR = "validator"
    TRAIN_WORKER = "train_worker"
    ALGORITHM_PROCESSOR = "algorithm_processor"


class Trajectory:
    """Tokens of one rollout as lists, with the fields of `extra_fields` as items and attributes.

    Parameters
    ----------
    tokens : list of int
        Prompt and answers.
    loss_mask : list of int
        1 on tokens of the policy.
    reward : float or None
    is_val : bool
        Whether it is of an evaluation; it is not kept by `to_core`.
    extra_fields : dict
        Everything else: `logprobs` (one per token, or without the first), `run_id`, `group_id`,
        `advantage` or `token_advantages` (one per token of the policy).
    """

    tokens: list[int]
    loss_mask: list[int]
    reward: float | None
    is_val: bool
    extra_fields: dict[str, Any]

    def __init__(
        self,
        tokens: list[int],
        loss_mask: list[int],
        reward: float | None = None,
        is_val: bool = False,
        extra_fields: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.__dict__.update(
            tokens=tokens,
            loss_mask=loss_mask,
            reward=reward,
            is_val=is_val,
            extra_fields={**(extra_fields or {}), **fields},
        )

    # ---- conversion

    @classmethod
    def from_core(cls, trajectory: trajectories_here.Trajectory) -> Trajectory:
        """Return our trajectory as NexRL's."""
        extra_fields = dict(trajectory.extra_fields)
        if trajectory.logprobs is not None:
            extra_fields["logprobs"] = trajectory.logprobs.tolist()
        return cls(
            trajectory.tokens.tolist(),
            trajectory.loss_mask.to(torch.int64).tolist(),
            trajectory.reward,
            extra_fields=extra_fields,
        )

    def to_core(self) -> trajectories_here.Trajectory:
        """Return NexRL's trajectory as ours."""
        extra_fields = dict(self.extra_fields)
        logprobs = extra_fields.get("logprobs")
        if logprobs is not None and len(logprobs) == len(self.tokens) - 1:
            # Aligned to the predicted tokens, of which the first is none.
            extra_fields["logprobs"] = [0.0, *map(float, logprobs)]
        return trajectories_here.Trajectory(
            self.tokens, self.loss_mask, reward=self.reward, extra_fields=extra_fields
        )

    # ---- access by attribute and item

    def __getattr__(self, name: str) -> Any:
        # Called only where there is no field of the name.
        extra_fields = self.__dict__.get("extra_fields", {})
        if name in extra_fields:
            return extra_fields[name]
        raise AttributeError(
            f"a trajectory has no field {name!r}. It has {', '.join([*REQUIRED, *extra_fields])}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*REQUIRED, "extra_fields"):
            self.__dict__[name] = value
        else:
            self.extra_fields[name] = value

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in REQUIRED or name in self.extra_fields

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is none."""
        if name not in self:
            return default
        return self[name]

    def keys(self) -> list[str]:
        """Return the names of all fields."""
        return [*REQUIRED, *self.extra_fields]

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values of all fields."""
        return [(name, self[name]) for name in self.keys()]

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and self.items() == other.items()

    __hash__ = None  # type: ignore[assignment]  # as of every class with mutable fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"Trajectory({fields})"


AnyTrajectory: TypeAlias = Trajectory | trajectories_here.Trajectory


def as_core(trajectory: AnyTrajectory) -> trajectories_here.Trajectory:
    """Return either kind of trajectory as ours."""
    return trajectory.to_core() if isinstance(trajectory, Trajectory) else trajectory


class Batch(batches.Batch):
    """Our batch with NexRL's methods; `values["tokens"]` are the rows without padding, as lists."""

    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
        {**batches.DERIVED, "tokens": lambda batch: batch.unpadded("input_ids")}
    )

    def unpadded(self, name: str) -> list[list[Any]]:
        """Return a field of tokens without the padding of each row."""
        mask_BT = self.data[batches.TOKEN_FIELD]
        rows = zip(self.data[name], mask_BT, strict=True)
        return [values_T[mask_T].tolist() for values_T, mask_T in rows]

    # ---- making

    @classmethod
    def from_core(cls, batch: batches.Batch) -> Self:
        """Return our batch as NexRL's, over the same tensors; NexRL's is returned as it is."""
        if isinstance(batch, cls):
            return batch
        return cls(batch.data, rows=dict(batch.rows), facts=dict(batch.facts))

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Sequence[AnyTrajectory],
        model_tag: ModelTag | None = None,
        **facts: Any,
    ) -> Self:
        """Pad trajectories of either kind on the right to the longest."""
        rows = [as_core(trajectory) for trajectory in trajectories]
        first = rows[0].extra_fields if rows else {}
        batch = super().from_trajectories(rows, **facts)
        # As in NexRL, the whole batch has the temperature of its first row.
        batch.metadata["model_tag"] = model_tag or first.get("model_tag", "default")
        batch.metadata["temperature"] = first.get("temperature", 1.0)
        return batch

    def to_trajectories(self) -> list[Any]:
        """Return the rows without padding, as NexRL's trajectories."""
        return [Trajectory.from_core(trajectory) for trajectory in super().to_trajectories()]

    def copy(self) -> Self:
        """Return a batch with the same tensors, whose fields can be set apart."""
        return self._with(self.data.copy())

    def reorder(self, perm: Sequence[int] | Tensor) -> Self:
        """Return all rows in another order."""
        order = torch.as_tensor(perm).tolist()
        if sorted(order) != list(range(len(self))):
            raise DataError(
                f"{order} is no order of {len(self)} rows. Give each of their indices once."
            )
        return self.select(order)

    def trim_for_backend(self, required_tensor_keys: Sequence[str]) -> Self:
        """Return the batch with these tensors only; others and missing ones are left out."""
        trimmed = type(self)(self.data.select(), facts=dict(self.facts))
        for name in ("row_weights", *required_tensor_keys):
            if isinstance(self.values.get(name), Tensor):
                trimmed.values[name] = self.values[name]
        return trimmed

    # ---- as dictionaries

    def to_dict(self) -> dict[str, Any]:
        """Return values and metadata by name."""
        return {**self.values, **self.metadata, "batch_size": len(self)}

    def to_nextrainer_batch(self) -> dict[str, Any]:
        """Return tensors, arrays of other values per row, and facts of the whole batch."""
        arrays = {name: np.asarray(values, dtype=object) for name, values in self.rows.items()}
        return {
            "batch": dict(self.data.items()),
            "non_tensor_batch": arrays,
            "meta_info": {**self.facts, "batch_size": len(self)},
        }

    @classmethod
    def from_nextrainer_batch(cls, fields: Mapping[str, Any]) -> Self:
        """Return the batch of `to_nextrainer_batch`, without its values that are no tensors."""
        return cls(fields["batch"], fields.get("meta_info"))

    # ---- padding

    def pad_to_world_size(self, world_size: int) -> Self:
        """Add rows of weight 0 to this batch until their number is a multiple; return the batch."""
        padded = self.pad_to_multiple(world_size)
        self.data, self.rows = padded.data, padded.rows
        return self

    # NexRL calls these on the class, with the batch as `data`, which may be ours.
    def remove_redundant_left_padding(data, pad_token_id: int, **options: Any) -> Any:  # type: ignore[override]  # noqa: N805
        """Remove columns on the left that are padding in all rows; see `_stripped`."""
        return Batch.from_core(data)._stripped(pad_token_id, right=False, **options)

    def remove_redundant_right_padding(data, pad_token_id: int, **options: Any) -> Any:  # type: ignore[override]  # noqa: N805
        """Remove columns on the right that are padding in all rows; see `_stripped`."""
        return Batch.from_core(data)._stripped(pad_token_id, left=False, **options)

    def _stripped(
        self,
        pad_token_id: int | None,
        *,
        fields: Sequence[str] | None = None,
        anchor_field: str = "input_ids",
        max_strip_threshold: int = -1,
        **sides: bool,
    ) -> Self:
        """Strip padding by `attention_mask`, or without one by the ids of the anchor field.

        At most `max_strip_threshold` columns, if it is not negative. Without ids nothing changes.
        """
        anchor = self.values.get(anchor_field)
        if not isinstance(anchor, Tensor) or anchor.ndim != 2:
            return self
        has_mask = batches.TOKEN_FIELD in self.values
        batch = self.copy()
        if not has_mask:
            batch.data[batches.TOKEN_FIELD] = anchor != pad_token_id
        stripped = batch.strip(
            fields=[name for name in fields or () if name in batch.values],
            anchor_field=anchor_field,
            pad_token_id=pad_token_id,
            max_columns=None if max_strip_threshold < 0 else max_strip_threshold,
            **sides,
        )
        if not has_mask:
            del stripped.data[batches.TOKEN_FIELD]
        return stripped
