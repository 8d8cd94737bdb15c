"""What an optimizer remembers, written whole or in parts and read in any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nip_astra.checkpoints.shards import load_shards, sizes_in
from nip_astra.errors import CheckpointError

OPTIMIZER = "optimizer"
"""Name, in a folder of `LocalTrainingService.save_state`, of the optimizer's files."""
OPTIMIZER_SHARDS = "optimizer_shards"
"""Name, beside them, of the folder of what each process has of it."""
Place = Callable[[Tensor, Tensor], Tensor]
"""What a process holds of a tensor, as it holds a weight."""


def taken_apart(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state: the tensors that are divided, by weight and name, and all else."""
    state = optimizer.state_dict()
    divided: dict[str, Tensor] = {}
    rest: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        rest[number] = {}
        for name, value in values.items():
            if isinstance(value, DTensor):
                divided[f"{number}.{name}"] = value
            else:
                rest[number][name] = value
    return divided, {"state": rest, "param_groups": state["param_groups"]}


def put_together(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    shards: Path,
    place: Place = lambda whole, like: whole,
) -> None:
    """Have an optimizer remember what `taken_apart` gave, or what was never divided.

    Parameters
    ----------
    shards : Path
        Folder of the tensors that were divided; none where it is not there.
    place : Callable
        Divides what was whole.

    Raises
    ------
    CheckpointError
        When it is of another optimizer, or broken.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    found = {
        number: {
            name: place(value, weights[number]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    if shards.is_dir():
        into: dict[str, Tensor] = {}
        for name in sizes_in(shards):
            number, _, key = name.partition(".")
            if not number.isdecimal() or int(number) >= len(weights):
                raise CheckpointError(
                    f"the optimizer in {shards} was to be read, but it is of another one: it has "
                    f"{name}, and there are {len(weights)} weights. Resume with the parameters "
                    "that wrote it."
                )
            into[name] = torch.zeros_like(weights[int(number)], requires_grad=False)
            found.setdefault(int(number), {})[key] = into[name]
        load_shards(shards, into)
    optimizer.load_state_dict({"state": found, "param_groups": state["param_groups"]})
