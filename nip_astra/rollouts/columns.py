"""The columns that a batch is made of, from trajectories; no loop over tokens.

Shape suffixes: `B` row (trajectory), `T` token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rollouts.padding import length_mask, pad_rows
from nip_astra.rollouts.trajectory import Trajectory


def columns_of(trajectories: Sequence[Trajectory]) -> tuple[TensorDict, dict[str, list[Any]]]:
    """Tensors with a row a trajectory, padded on the right, and lists of what is no tensor."""
    rows: dict[str, list[Any]] = {
        "group_ids": _ids(trajectories, "group_id"),
        "run_ids": _ids(trajectories, "run_id"),
    }
    lengths_B = torch.tensor([len(one) for one in trajectories], dtype=torch.int64)
    mask_BT = length_mask(lengths_B)
    nan = float("nan")
    columns = {
        "input_ids": pad_rows([one.tokens for one in trajectories], mask_BT).to(torch.int64),
        "attention_mask": mask_BT,
        # Padding is on the right, so that nothing need be counted.
        "position_ids": torch.minimum(
            torch.arange(mask_BT.shape[1]), (lengths_B - 1).clamp(min=0).unsqueeze(1)
        ),
        "loss_mask": pad_rows([one.loss_mask for one in trajectories], mask_BT).to(torch.bool),
        "rewards": torch.tensor([nan if o.reward is None else o.reward for o in trajectories]),
        "row_weights": torch.ones(len(trajectories)),
    }
    logprobs = [one.logprobs for one in trajectories]
    if all(one is not None for one in logprobs):
        columns["logprobs"] = pad_rows([x for x in logprobs if x is not None], mask_BT).float()
    if trajectories and all(one.advantage is not None for one in trajectories):
        columns["advantages"] = _advantages(trajectories, mask_BT)
    names = dict.fromkeys(name for one in trajectories for name in one.extras)
    for name in names:
        values = [one.extras.get(name) for one in trajectories]
        column = _column(values, trajectories, mask_BT)
        if isinstance(column, Tensor):
            columns[name] = column
        else:
            rows[name] = column
    return TensorDict(columns, batch_size=[len(trajectories)]), rows


def _ids(trajectories: Sequence[Trajectory], name: str) -> list[Any]:
    """The ids, with one of its own for each trajectory that has none."""
    found = [one[name] for one in trajectories]
    return [f"own-{index}" if one is None else one for index, one in enumerate(found)]


def _advantages(trajectories: Sequence[Trajectory], mask_BT: Tensor) -> Tensor:
    """`[B]`, or `[B, T]` where any trajectory has one a token."""
    values = [one.advantage for one in trajectories]
    tensors = [torch.as_tensor(value, dtype=torch.float32) for value in values]
    if all(one.ndim == 0 for one in tensors):
        return torch.stack(tensors)
    rows = [x.expand(len(o)) for x, o in zip(tensors, trajectories, strict=True)]
    return pad_rows(rows, mask_BT)


def _column(
    values: list[Any], trajectories: Sequence[Trajectory], mask_BT: Tensor
) -> Tensor | list[Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return torch.tensor(values)
    if all(
        isinstance(value, Tensor) and value.shape == one.tokens.shape
        for value, one in zip(values, trajectories, strict=True)
    ):
        return pad_rows(values, mask_BT)
    if all(isinstance(value, Tensor) and value.ndim == 0 for value in values):
        return torch.stack(values)
    return values
