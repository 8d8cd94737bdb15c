"""Tensors saved in parts are read by any number of processes, and damage is reported."""

from __future__ import annotations

from collections.abc import Callable
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


def save_and_load(folder: Path, store: str, is_saved: bool) -> list[bool]:
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
        work: Callable[[str], list[bool]] = lambda s, f=folder, i=is_saved: save_and_load(f, s, i)  # noqa: E731
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
    save_shards(tmp_path, whole_tensors())
    assert sizes_in(tmp_path)["odd"] == (3, 4)
    with pytest.raises(CheckpointError) as caught:
        load_shards(tmp_path, {"odd": torch.zeros(4, 4)})
    assert says(caught.value, "odd", "(4, 4)", "(3, 4)")
    with pytest.raises(CheckpointError) as caught:
        load_shards(tmp_path, {"even": torch.zeros(4)})
    assert says(caught.value, "even", "(4,)")
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError) as caught:
        load_shards(tmp_path, {"odd": torch.zeros(3, 4)})
    assert says(caught.value, str(tmp_path), "Restore the folder")
    with pytest.raises(CheckpointError) as caught:
        load_whole(tmp_path / "nowhere")
    assert says(caught.value, "nowhere", "Restore the folder")


def test_a_lost_part_is_seen(tmp_path: Path) -> None:
    whole = {"weight": torch.arange(12.0).reshape(4, 3)}

    def save(store: str) -> None:
        with open_team(CPU, store) as team:
            mesh = team.mesh(CPU)
            save_shards(
                tmp_path / "two", {"weight": distribute_tensor(whole["weight"], mesh, [Shard(0)])}
            )

    together(save, tmp_path)
    first, last = sorted((tmp_path / "two").iterdir())
    first.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_whole(tmp_path / "two")
    assert says(caught.value, "weight", "Restore the folder")
    last.unlink()
    with pytest.raises(CheckpointError, match="weight"):
        load_shards(tmp_path / "two", {"weight": torch.zeros(4, 3)})
