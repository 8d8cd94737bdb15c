"""Tensors saved in parts are read by any number of processes, and damage is reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nip_astra.checkpoints.shards import load_shards, load_whole, save_shards, sizes_in
from nip_astra.distributed.team import open_team
from nip_astra.errors import CheckpointError
from tests.distributed.processes import together
from tests.kit.messages import says

CPU = torch.device("cpu")


def whole_tensors() -> dict[str, Tensor]:
    return {
        # Of three rows, one process has two; of a single row, one process has none.
        "odd": torch.arange(12.0).reshape(3, 4),
        "one": torch.full((1, 2), 7.0),
        "narrow": torch.arange(5, dtype=torch.bfloat16),
    }


def save_and_load(folder: Path, is_saved: bool, store: str) -> list[bool]:
    with open_team(CPU, store) as team:
        mesh = team.mesh(CPU)
        parts = {
            name: distribute_tensor(item, mesh, [Shard(0)])
            for name, item in whole_tensors().items()
        }
        if is_saved:
            save_shards(folder, parts)
        read = {name: torch.zeros_like(item) for name, item in parts.items()}
        load_shards(folder, read)
        assert all(isinstance(item, DTensor) for item in read.values())
        return [torch.equal(read[name].to_local(), parts[name].to_local()) for name in parts]


def test_one_process_reads_checkpoints_of_two_and_two_of_one(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    save_shards(one, whole_tensors())
    for folder, is_saved in ((two, True), (one, False)):
        work = partial(save_and_load, folder, is_saved)
        assert together(work, tmp_path) == [[True] * 3] * 2
    assert len(list(two.iterdir())) == 2
    for folder in (one, two):
        assert {path.suffix for path in folder.iterdir()} == {".safetensors"}
        result = load_whole(folder)
        assert result.keys() == whole_tensors().keys()
        for name, tensor in whole_tensors().items():
            assert result[name].dtype == tensor.dtype
            assert torch.equal(result[name], tensor)


def test_missing_broken_and_misshapen_tensors_are_reported(tmp_path: Path) -> None:
    def fault(name: str, *shape: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_shards(tmp_path, {name: torch.zeros(shape)})
        return str(caught.value)

    save_shards(tmp_path, whole_tensors())
    assert sizes_in(tmp_path)["odd"] == (3, 4)
    assert says(fault("odd", 4, 4), "odd", "(4, 4)", "(3, 4)")
    assert says(fault("even", 4), "even", "(4,)")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:200])
    assert says(fault("odd", 3, 4), tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        load_whole(tmp_path / "nowhere")


def test_a_lost_part_is_seen(tmp_path: Path) -> None:
    two = tmp_path / "two"
    together(partial(save_and_load, two, True), tmp_path)
    first, last = sorted(two.iterdir())
    first.unlink()
    with pytest.raises(CheckpointError, match=r"odd|narrow"):
        load_whole(two)
    last.unlink()
    with pytest.raises(CheckpointError, match="odd"):
        load_shards(two, {"odd": torch.zeros(3, 4)})
