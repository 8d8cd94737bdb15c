"""Training samples as small dictionaries of tensors, and batches of them.

Shape suffixes: `B` row, `T` token of the trajectory, `R` token after the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import DataError
from nip_astra.rl_objectives.advantages import codes_of
from nip_astra.rollouts.batch import Batch

Sample = dict[str, Tensor]
"""One training sample: CPU tensors of 0 or 1 dimensions, with equal names in all samples."""

LEFT_PADDED = frozenset({"context"})
"""Sequences that end where a continuation begins."""


def collate(samples: Sequence[Sample]) -> TensorDict:
    """Collate samples: numbers are stacked, sequences padded, each with its mask.

    A sequence `x` becomes `x` `[B, T]`, padded with 0 on the right (`context`: on the left), and
    `x_mask` `[B, T]` bool.
    """
    table = _table_of(samples)
    if table is not None:
        return table.collate([cast(_RowSample, sample).row for sample in samples])
    _check(samples)
    batch: dict[str, Tensor] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if first.ndim == 0:
            batch[name] = torch.stack(values)
            continue
        side = "left" if name in LEFT_PADDED else "right"
        masks = [torch.ones(len(value), dtype=torch.bool) for value in values]
        batch[name] = pad_sequence(values, batch_first=True, padding_side=side)
        batch[f"{name}_mask"] = pad_sequence(masks, batch_first=True, padding_side=side)
    return TensorDict(batch, batch_size=[len(samples)])


def _check(samples: Sequence[Sample]) -> None:
    first = samples[0]
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise DataError(
                f"a sample is {str(sample)[:60]!r} ({type(sample).__name__}). Samples are dicts of "
                "tensors."
            )
        if sample.keys() != first.keys():
            raise DataError(
                f"samples of one batch have the names {sorted(first)} and {sorted(sample)}. Give "
                "all of them the same."
            )
        for name, value in sample.items():
            if not isinstance(value, Tensor) or value.ndim != first[name].ndim:
                kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise DataError(
                    f"{name!r} of a sample is {kind}. Give a number or a sequence as a tensor, "
                    "the same in all samples."
                )


# ---- of trajectories

Score = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`LanguageModel.logprobs` or `TrainingService.compute_logprobs`."""

ROWS_AT_ONCE = 64
IS_EXCLUDED = "is_excluded"
"""Row field: not 0 for rows whose tokens are not trained, but which count as rows in means."""
SEPARATE = ("input_ids", "attention_mask", "position_ids", "loss_mask")
"""Batch fields that a sample stores in another form."""


def score_batch(batch: Batch, score: Score) -> Tensor:
    """Return each token's log-probability given the preceding tokens, float32 `[B, T]`, no
    gradient.

    0 for the first token of a row and on padding, which must be on the right.
    """
    parts = []
    for part in batch.split(ROWS_AT_ONCE):
        ids_BT, mask_BT = part.data["input_ids"], part.data["attention_mask"]
        with torch.no_grad():
            found_BR = score(ids_BT[:, :1], mask_BT[:, :1], ids_BT[:, 1:], mask_BT[:, 1:])
        parts.append(torch.nn.functional.pad(found_BR.float().cpu(), (1, 0)))
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def samples_of(batch: Batch) -> list[Sample]:
    """Return a sample per row: `context` before the policy's first token, then `response`.

    `is_trained` marks the policy's tokens. The sample also has every other field of tokens, for the
    response, and of rows; `advantages` is per token, and `episode` numbers the groups. Fields of
    tokens may lack the first column, as those of NexRL's `responses` do. Rows of weight 0 and rows
    without a token of the policy are left out.
    """
    if len(batch) == 0:
        return []
    data = batch.data
    trained_BT, mask_BT = data["loss_mask"] & data["attention_mask"], data["attention_mask"]
    data = data.copy()
    for name, value in data.items():
        if value.ndim == 2 and value.shape == trained_BT[:, 1:].shape:
            data[name] = torch.nn.functional.pad(value, (1, 0))
    advantages = data["advantages"].float() if "advantages" in data else None
    if advantages is not None and advantages.ndim == 1:
        advantages = advantages.unsqueeze(1).expand(mask_BT.shape)
    fields = {n: v for n, v in data.items() if n not in (*SEPARATE, "advantages")}
    if advantages is not None:
        fields["advantages"] = advantages
    per_token = {n: v for n, v in fields.items() if v.shape[:2] == mask_BT.shape}
    per_row = {n: v for n, v in fields.items() if n not in per_token}
    is_used = trained_BT.any(dim=1) & (data["row_weights"] > 0)
    columns = {
        "context": data["input_ids"],
        "response": data["input_ids"],
        "is_trained": trained_BT,
        "episode": codes_of(batch.metadata.get("group_ids") or [None] * len(batch)),
        **per_token,
        **{name: value for name, value in per_row.items() if value.ndim == 1},
    }
    starts = trained_BT.to(torch.uint8).argmax(dim=1).clamp(min=1)
    table = _Table(columns, starts, mask_BT.sum(dim=1))
    return [_RowSample(table, row) for row in is_used.nonzero().squeeze(1).tolist()]


class _Table(NamedTuple):
    """Token fields, `[B, T]`, and row fields, `[B]`, of which samples are views."""

    columns: dict[str, Tensor]
    start_B: Tensor
    length_B: Tensor

    def sample(self, row: int) -> Sample:
        """Return one row: the context up to its start, the other tokens from there on."""
        start, end = int(self.start_B[row]), int(self.length_B[row])
        sample = {}
        for name, values in self.columns.items():
            if values.ndim == 1:
                sample[name] = values[row]
            else:
                positions = slice(start) if name == "context" else slice(start, end)
                sample[name] = values[row, positions]
        return sample

    def collate(self, rows: Sequence[int]) -> TensorDict:
        """Return the result of `collate` without a loop over rows."""
        row_B1 = torch.tensor(rows).unsqueeze(1)
        start_B1 = self.start_B[row_B1]
        num_B1 = self.length_B[row_B1] - start_B1
        context_BT = torch.arange(int(start_B1.max())).expand(len(rows), -1)
        context_BT = context_BT - (context_BT.shape[1] - start_B1)
        response_BT = torch.arange(int(num_B1.max())).expand(len(rows), -1)
        # The row position of each batch position, and whether it is valid.
        context = context_BT.clamp(min=0), context_BT >= 0
        last = next(iter(self.columns.values())).shape[1] - 1
        response = (response_BT + start_B1).clamp(max=last), response_BT < num_B1
        batch = {}
        for name, value in self.columns.items():
            if value.ndim == 1:
                batch[name] = value[row_B1.squeeze(1)]
                continue
            position_BT, mask_BT = context if name in LEFT_PADDED else response
            value_BT = value[row_B1, position_BT]
            value_BT[~mask_BT] = 0
            batch |= {name: value_BT, f"{name}_mask": mask_BT.clone()}
        return TensorDict(batch, batch_size=[len(rows)])


class _RowSample(dict[str, Tensor]):
    """A sample that is created from its table on first access."""

    def __init__(self, table: _Table, row: int) -> None:
        super().__init__()
        self.table: _Table | None = table
        self.row = row
        self.is_made = False

    def make(self, *, is_changed: bool) -> None:
        """Fill the dict; a changed sample is detached from its row."""
        if not self.is_made and self.table is not None:
            self.is_made = True
            dict.update(self, self.table.sample(self.row))
        if is_changed:
            self.table = None

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (dict(self),)


def _making(name: str, *, is_changed: bool) -> Callable[..., Any]:
    method = getattr(dict, name)

    @functools.wraps(method)
    def call(self: _RowSample, *args: Any, **kwargs: Any) -> Any:
        self.make(is_changed=is_changed)
        return method(self, *args, **kwargs)

    return call


for _name in (
    *("__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "copy", "get", "items", "keys", "values"),
):
    setattr(_RowSample, _name, _making(_name, is_changed=False))
for _name in (
    *("__delitem__", "__ior__", "__setitem__", "clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(_RowSample, _name, _making(_name, is_changed=True))


def _table_of(samples: Sequence[Sample]) -> _Table | None:
    """Return the table of which all samples are rows; None if there is none."""
    table: _Table | None = None
    for sample in samples:
        # A sample that was changed has left its table.
        if not isinstance(sample, _RowSample) or sample.table is None:
            return None
        if table is not None and sample.table is not table:
            return None
        table = sample.table
    return table


def collate_trajectories(samples: Sequence[Sample]) -> TensorDict:
    """Collate samples, adding `trained_mask`, the tokens to train.

    Responses of excluded rows (`IS_EXCLUDED`) are not scored either, unless there is no other row:
    the loss of these, 0, needs a gradient.
    """
    batch = collate(samples)
    batch["trained_mask"] = batch["is_trained"] & batch["response_mask"]
    if IS_EXCLUDED in batch.keys():  # noqa: SIM118 - `in` of a TensorDict asks for values
        is_learned_B1 = (batch[IS_EXCLUDED] == 0).unsqueeze(1)
        batch["trained_mask"] &= is_learned_B1
        if is_learned_B1.any():
            batch["response_mask"] &= is_learned_B1
    return batch
