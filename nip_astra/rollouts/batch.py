"""Batches of trajectories as padded tensors.

Shape suffixes: `B` row (trajectory), `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import DataError
from nip_astra.rollouts.trajectory import Trajectory, readable

SAME_FIELDS = {
    "reward": "rewards",
    "log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "reference_logprobs",
    "ref_log_probs": "reference_logprobs",
    "scoring_attention_mask": "loss_mask",
    "group_id": "group_ids",
    "run_id": "run_ids",
}
"""NexRL's field names, for reading and writing."""

DERIVED: Mapping[str, Callable[[Batch], Any]] = MappingProxyType(
    {
        "prompts": lambda batch: batch.data["input_ids"][:, :1],
        "responses": lambda batch: batch.data["input_ids"][:, 1:],
        "batch_size": len,
    }
)
"""NexRL's fields, derived unless stored: prompts are the first token, responses the rest."""

TOKEN_FIELD = "attention_mask"
"""The field that defines the width of a batch and its padding."""


class Batch:
    """Padded trajectories, one per row.

    `values` is a view of tensors and `metadata` of all else: lists with an entry per row
    (`group_ids`, `run_ids`, texts) and facts of the whole batch. Either finds the fields of the
    other. A list or array of numbers becomes a tensor.

    Fields made from trajectories: `input_ids`, `position_ids` (int64), `attention_mask`,
    `loss_mask` (bool) and `logprobs` of the policy that sampled, `[B, T]`; `rewards` and
    `row_weights`, `[B]`; extras.

    Parameters
    ----------
    values : TensorDict or Mapping
        The tensors, or as in NexRL fields by name. Then masks may be numeric, and `row_weights`
        default to 1.
    metadata : Mapping, optional
        Further fields by name.
    rows : dict[str, list]
        Lists with an entry per row.
    facts : dict
        Values of the whole batch.

    Attributes
    ----------
    data : TensorDict
        The tensors, batch size `[B]`.

    Raises
    ------
    DataError
        If the number of rows is unknown.
    """

    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = DERIVED
    """Fields that are computed from the batch unless stored."""

    def __init__(
        self,
        values: TensorDict | Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        rows: dict[str, list[Any]] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.rows: dict[str, list[Any]] = rows or {}
        self.facts: dict[str, Any] = facts or {}
        if isinstance(values, TensorDictBase):
            self.data: TensorDict = values
            self.metadata.update(metadata or {})
            return
        fields = {**values, **(metadata or {})}
        self.data = TensorDict({}, batch_size=[_num_rows(fields)])
        self.values["row_weights"] = torch.ones(len(self))
        for name, value in fields.items():
            if name != "batch_size":
                self.values[name] = value
        for name, dtype in _DTYPES.items():
            if name in self.data.keys():  # noqa: SIM118 - `in` of a TensorDict asks for values
                self.data[name] = self.data[name].to(dtype)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], **facts: Any) -> Self:
        """Pad trajectories on the right to the longest; `facts` are metadata of the whole batch.

        Extras that are numbers in all trajectories become `[B]`, tensors of a trajectory's length
        `[B, T]`, and others lists. A missing reward becomes NaN; a group or run id of None is
        unique.
        """
        data, rows = _columns_of(trajectories)
        return cls(data, rows=rows, facts=dict(facts))

    def to_trajectories(self) -> list[Trajectory]:
        """Return the rows without padding, and without those added by `pad_to_multiple`."""
        mask_BT = self.data[TOKEN_FIELD]
        names = {"input_ids", TOKEN_FIELD, "position_ids", "rewards", "row_weights", "advantages"}
        per_token = [name for name in self._token_fields() if name not in names]
        per_row = [n for n in self.data.keys() if n not in {*names, *per_token}]  # noqa: SIM118
        # Without rewards all are NaN, which no trajectory has.
        rewards_B = self.values.get("rewards", self.data["row_weights"] * torch.nan)
        trajectories = []
        for row in self.data["row_weights"].nonzero().squeeze(1).tolist():
            mask_T = mask_BT[row]
            fields = {name: self.data[name][row][mask_T] for name in per_token}
            fields |= {name: self.data[name][row] for name in per_row}
            fields |= {_SINGULAR.get(name, name): self.rows[name][row] for name in self.rows}
            if "advantages" in self.data:
                advantage = self.data["advantages"][row]
                fields["advantage"] = advantage[mask_T] if advantage.ndim else float(advantage)
            tokens = self.data["input_ids"][row][mask_T]
            reward = float(rewards_B[row])
            reward_or_none = None if math.isnan(reward) else reward
            trajectories.append(Trajectory(tokens, reward=reward_or_none, **fields))
        return trajectories

    # ---- views

    @property
    def values(self) -> BatchView:
        """The tensors by name."""
        return BatchView(self, "values")

    @property
    def metadata(self) -> BatchView:
        """The values that are not tensors, by name."""
        return BatchView(self, "metadata")

    def __len__(self) -> int:
        return int(self.data.batch_size[0])

    @property
    def width(self) -> int:
        """Tokens per row, including padding."""
        return int(self.values[TOKEN_FIELD].shape[1])

    def __repr__(self) -> str:
        names = ", ".join([*sorted(self.data.keys()), *self.rows, *self.facts])
        width = f" of {self.width} tokens" if TOKEN_FIELD in self.values else ""
        return f"Batch({len(self)} rows{width}: {names})"

    def _token_fields(self) -> list[str]:
        wide = self.data[TOKEN_FIELD].shape
        return [name for name, value in self.data.items() if value.shape[:2] == wide]

    def _with(self, data: TensorDict, rows: dict[str, list[Any]] | None = None) -> Self:
        rows = dict(self.rows if rows is None else rows)
        return type(self)(data, rows=rows, facts=dict(self.facts))

    # ---- padding

    def remove_redundant_left_padding(self, **options: Any) -> Self:
        """Remove columns on the left that are padding in all rows; see `strip`."""
        return self.strip(right=False, **options)

    def remove_redundant_right_padding(self, **options: Any) -> Self:
        """Remove columns on the right that are padding in all rows; see `strip`."""
        return self.strip(left=False, **options)

    def strip(
        self,
        *,
        left: bool = True,
        right: bool = True,
        fields: Sequence[str] | None = None,
        anchor_field: str = "input_ids",
        pad_token_id: int | None = None,
        max_columns: int | None = None,
    ) -> Self:
        """Remove columns that are padding in all rows, by `attention_mask`.

        `fields` and the `anchor_field` of token ids must exist per token; all other fields of
        tokens are cut too, at most `max_columns` on each side. The remaining padding of the anchor
        field becomes `pad_token_id`, if given.
        """
        per_token = self._token_fields()
        names = [SAME_FIELDS.get(name, name) for name in (*(fields or ()), anchor_field)]
        wrong = [name for name in names if name not in (*per_token, *self.derived)]
        if wrong:
            raise DataError(
                f"no fields of tokens: {', '.join(map(repr, wrong))}. Available: "
                f"{', '.join(sorted(per_token))}."
            )
        start, end = used_columns(self.data[TOKEN_FIELD])
        if max_columns is not None:
            start = min(start, max_columns)
            end = max(end, self.width - max_columns)
        columns = slice(start if left else 0, end if right else self.width)
        data = self.data.copy()
        for name, value in self.data.items():
            if name in per_token:
                data[name] = value[:, columns]
            elif value.ndim > 1 and value.shape[1] == self.width - 1:  # as NexRL's responses are
                data[name] = value[:, columns.start : columns.stop - 1]
        if pad_token_id is not None:
            data[anchor_field] = data[anchor_field].masked_fill(~data[TOKEN_FIELD], pad_token_id)
        return self._with(data)

    def pad_to_multiple(self, multiple: int) -> Self:
        """Add rows of weight 0 until the number of rows is a multiple.

        Each has one token, which no loss counts: `row_weights` is 0 and `loss_mask` False.
        """
        missing = -len(self) % multiple
        if missing == 0:
            return self
        data = TensorDict(
            {name: value.new_zeros(missing, *value.shape[1:]) for name, value in self.data.items()},
            batch_size=[missing],
        )
        if TOKEN_FIELD in data.keys():  # noqa: SIM118 - `in` of a TensorDict asks for values
            data[TOKEN_FIELD][:, :1] = True
        rows = {name: column + [None] * missing for name, column in self.rows.items()}
        return self._with(torch.cat([self.data, data]), rows)

    # ---- rows

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Return the rows given by indices, in order, or by a bool mask."""
        index = torch.as_tensor(rows)
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.to(torch.int64)
        row_numbers = index.tolist()
        lists = {name: [column[i] for i in row_numbers] for name, column in self.rows.items()}
        return self._with(self.data[index], lists)

    def split(self, size: int) -> list[Self]:
        """Split into consecutive parts of at most `size` rows."""
        return [
            self.select(range(start, min(start + size, len(self))))
            for start in range(0, len(self), size)
        ]

    def shuffle(self, generator: torch.Generator) -> Self:
        """Return the rows in random order."""
        return self.select(torch.randperm(len(self), generator=generator))

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """Concatenate rows of batches, padded on the right to the widest; facts of the first."""
        if not batches:
            raise DataError("cannot concatenate no batches. Give at least one.")
        first, width = batches[0], max(batch.width for batch in batches)
        names = {(*sorted(batch.data.keys()), *sorted(batch.rows)) for batch in batches}
        if len(names) > 1:
            first_names, second_names, *_ = names
            differing = set(first_names) ^ set(second_names)
            raise DataError(
                f"cannot concatenate batches: {', '.join(sorted(differing))} are not in all of "
                "them. Give all the same fields."
            )
        wide = []
        for batch in batches:
            data = batch.data.copy()
            for name in batch._token_fields():
                data[name] = widened(data[name], width)
            wide.append(data)
        rows = {name: [x for batch in batches for x in batch.rows[name]] for name in first.rows}
        return first._with(torch.cat(wide), rows)

    # ---- files

    def to_plain(self) -> dict[str, Any]:
        """Return tensors, rows and facts by name, as `save` writes them."""
        return {"data": dict(self.data.items()), "rows": self.rows, "facts": self.facts}

    def save(self, path: Path) -> None:
        """Write `<path>.safetensors` and `<path>.json`; nothing is pickled."""
        save_state(path, self.to_plain())

    @classmethod
    def load(cls, path: Path) -> Batch:
        """Load a batch written by `save`."""
        state = load_state(path)
        num_rows = len(state["data"][TOKEN_FIELD])
        data = TensorDict(state["data"], batch_size=[num_rows])
        return cls(data, rows=state["rows"], facts=state["facts"])


class BatchView(MutableMapping[str, Any]):
    """The tensors, or all other fields, of a batch by name; either finds the fields of the other.

    See `SAME_FIELDS` for synonyms.
    """

    def __init__(self, batch: Batch, half: str) -> None:
        self._batch, self._half = batch, half

    def __getitem__(self, name: str) -> Any:
        name = SAME_FIELDS.get(name, name)
        for half in (self._batch.data, self._batch.rows, self._batch.facts):
            if name in half.keys():  # noqa: SIM118 - `in` of a TensorDict asks for values
                return half[name]
        derived = self._batch.derived
        if name == "batch_size" or (name in derived and "input_ids" in self._batch.values):
            return derived[name](self._batch)
        raise KeyError(
            f"a batch has no field {name!r}. It has "
            f"{', '.join([*self._batch.values, *self._batch.metadata])}."
        )

    def __setitem__(self, name: str, value: Any) -> None:
        name = SAME_FIELDS.get(name, name)
        batch = self._batch
        if name in _SINGULAR and isinstance(value, Tensor | np.ndarray):
            value = value.tolist()
        tensor = None if name in _SINGULAR else _as_tensor(value)
        for half in (batch.data, batch.rows, batch.facts):
            if name in half.keys():  # noqa: SIM118 - as above
                del half[name]
        if tensor is not None and tensor.shape[:1] == (len(batch),):
            batch.data[name] = tensor
        elif isinstance(value, list) and tensor is None and len(value) == len(batch):
            batch.rows[name] = value
        else:
            batch.facts[name] = value if tensor is None else tensor

    def __delitem__(self, name: str) -> None:
        name = SAME_FIELDS.get(name, name)
        self[name]
        for half in (self._batch.data, self._batch.rows, self._batch.facts):
            if name in half.keys():  # noqa: SIM118 - as above
                del half[name]

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        batch = self._batch
        names = batch.data.keys() if self._half == "values" else (*batch.rows, *batch.facts)
        return iter([str(name) for name in names])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{self._half}: {', '.join(self)}"


_SINGULAR = {"group_ids": "group_id", "run_ids": "run_id"}


_DTYPES = {"input_ids": torch.int64, TOKEN_FIELD: torch.bool, "loss_mask": torch.bool}


def _num_rows(fields: Mapping[str, Any]) -> int:
    if "batch_size" in fields:
        return int(fields["batch_size"])
    for value in fields.values():
        if isinstance(value, Tensor | np.ndarray | list) and np.shape(value):
            return len(value)
    raise DataError(
        "the number of rows of a batch is unknown. Give a field with an entry per row, or "
        "metadata['batch_size']."
    )


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, or a tensor of numbers in a list or array; else None."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        is_floating = value.dtype.kind == "f"
        return torch.tensor(
            readable(value), dtype=torch.get_default_dtype() if is_floating else None
        )
    if not isinstance(value, list | tuple):
        return None
    if all(isinstance(entry, Tensor) and entry.ndim == 0 for entry in value) and value:
        return torch.stack(list(value))
    if all(isinstance(entry, Real) and not isinstance(entry, bool) for entry in value):
        numbers = [number.item() if isinstance(number, np.generic) else number for number in value]
        return torch.tensor(numbers, dtype=None if value else torch.float32)
    return None


def padding_data(batch: Batch, *, pad_token_id: int, multiple: int = 1) -> Batch:
    """Strip redundant padding, set the rest to `pad_token_id`, and add rows of weight 0.

    The number of rows becomes a multiple of `multiple`.
    """
    batch = batch.strip(pad_token_id=pad_token_id)
    batch.values["position_ids"] = compute_position_id_with_mask(batch.data[TOKEN_FIELD])
    return batch.pad_to_multiple(multiple)


def _columns_of(trajectories: Sequence[Trajectory]) -> tuple[TensorDict, dict[str, list[Any]]]:
    rows: dict[str, list[Any]] = {
        "group_ids": [trajectory.group_id for trajectory in trajectories],
        "run_ids": [trajectory.run_id for trajectory in trajectories],
    }
    lengths = [len(trajectory) for trajectory in trajectories]
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    mask_BT = length_mask(lengths_B)
    token_rows = [trajectory.tokens for trajectory in trajectories]
    loss_masks = [trajectory.loss_mask for trajectory in trajectories]
    rewards = [
        math.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories
    ]
    columns = {
        "input_ids": pad_rows(token_rows, mask_BT).to(torch.int64),
        "attention_mask": mask_BT,
        # Padding is on the right, so positions need no counting.
        "position_ids": torch.minimum(
            torch.arange(mask_BT.shape[1]), (lengths_B - 1).clamp(min=0).unsqueeze(1)
        ),
        "loss_mask": pad_rows(loss_masks, mask_BT).to(torch.bool),
        "rewards": torch.tensor(rewards),
        "row_weights": torch.ones(len(trajectories)),
    }
    logprobs = [
        trajectory.logprobs for trajectory in trajectories if trajectory.logprobs is not None
    ]
    if len(logprobs) == len(trajectories):
        columns["logprobs"] = pad_rows(logprobs, mask_BT).float()
    if trajectories and all(trajectory.advantage is not None for trajectory in trajectories):
        columns["advantages"] = _advantages(trajectories, mask_BT)
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.extras)
    for name in names:
        values = [trajectory.extras.get(name) for trajectory in trajectories]
        column = _column(values, trajectories, mask_BT)
        if isinstance(column, Tensor):
            columns[name] = column
        else:
            rows[name] = column
    return TensorDict(columns, batch_size=[len(trajectories)]), rows


def _advantages(trajectories: Sequence[Trajectory], mask_BT: Tensor) -> Tensor:
    """Return advantages `[B]`, or `[B, T]` if any trajectory has one per token."""
    advantages = [
        torch.as_tensor(trajectory.advantage, dtype=torch.float32) for trajectory in trajectories
    ]
    if all(advantage.ndim == 0 for advantage in advantages):
        return torch.stack(advantages)
    rows = [
        advantage.expand(len(trajectory))
        for advantage, trajectory in zip(advantages, trajectories, strict=True)
    ]
    return pad_rows(rows, mask_BT)


def _column(
    values: list[Any], trajectories: Sequence[Trajectory], mask_BT: Tensor
) -> Tensor | list[Any]:
    # The types alone are compared first, which is several times faster.
    are_plain = {*map(type, values)} <= {int, float}
    if are_plain or all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
        return torch.tensor(values)
    if all(
        isinstance(value, Tensor) and value.shape == trajectory.tokens.shape
        for value, trajectory in zip(values, trajectories, strict=True)
    ):
        return pad_rows(values, mask_BT)
    if all(isinstance(value, Tensor) and value.ndim == 0 for value in values):
        return torch.stack(values)
    return values


# ---- padding, identified by masks, never by ids


def length_mask(lengths: Sequence[int] | Tensor) -> Tensor:
    """Return a bool mask `[B, T]`, True on the first `lengths[b]` positions of row b."""
    lengths_B = torch.as_tensor(lengths, dtype=torch.int64)
    width = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(width, device=lengths_B.device) < lengths_B.unsqueeze(1)


def pad_rows(rows: Sequence[Tensor], mask_BT: Tensor) -> Tensor:
    """Pad rows of different lengths on the right into one tensor, without a loop over rows.

    `mask_BT` is `length_mask` of their lengths.
    """
    flat = torch.cat(list(rows)) if rows else torch.zeros(0)
    return flat.new_zeros(mask_BT.shape).masked_scatter_(mask_BT, flat)


def compute_position_id_with_mask(attention_mask_BT: Tensor) -> Tensor:
    """Return each token's position in its row, int64 `[B, T]` from 0; 0 on left padding."""
    return (attention_mask_BT.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


def used_columns(mask_BT: Tensor) -> tuple[int, int]:
    """Return the first column with a token in any row, and the end of the last; (0, 0) if none."""
    used = mask_BT.any(dim=0).nonzero().squeeze(1)
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def cat_widened(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of `[B, T]` tensors, padded with zeros on the right to the widest."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([widened(part, width) for part in parts])


def widened(values: Tensor, width: int) -> Tensor:
    """Pad values `[B, T, ...]` with zeros on the right to a width."""
    missing = width - values.shape[1]
    if missing <= 0:
        return values
    return torch.cat([values, values.new_zeros(values.shape[0], missing, *values.shape[2:])], dim=1)
