"""Dumps of stages, and the first one at which two runs differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.checkpoints.tensors import DUMPS, StageDumps, compare_dumps
from nip_astra.errors import CheckpointError


def dumped(folder: Path, *, loss: float = 1.0, ids: tuple[int, ...] = (1, 2, 3)) -> Path:
    dumps = StageDumps(folder / DUMPS, period=2)
    for iteration in (0, 1, 2):
        dumps.write(iteration, "tokens", {"ids": torch.tensor(ids), "names": ["a", "b"]})
        dumps.write(iteration, "loss", {"loss": loss})
    return folder


def test_every_so_many_iterations_are_dumped_in_order(tmp_path: Path) -> None:
    dumped(tmp_path)
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json"))
    assert files == [
        f"dumps/iteration_00000{n}/{stage}.json"
        for n in (1, 3)
        for stage in ("000-tokens", "001-loss")
    ]
    StageDumps(tmp_path / "none", period=0).write(0, "tokens", {})
    assert not (tmp_path / "none").exists()


def test_equal_dumps_do_not_differ(tmp_path: Path) -> None:
    found = compare_dumps(dumped(tmp_path / "a"), dumped(tmp_path / "b") / DUMPS)
    assert (found.num_stages, found.differences) == (4, [])


def test_the_first_stage_that_differs_comes_first(tmp_path: Path) -> None:
    one = dumped(tmp_path / "a")
    other = dumped(tmp_path / "b", loss=1.5, ids=(1, 2, 4))
    first, second, *_ = compare_dumps(one, other).differences
    assert first.stage == "iteration_000001/000-tokens"
    assert first.field == "ids"
    for fact in ("1 of 3", "[2]", "3 and 4"):
        assert fact in first.description
    assert (second.field, second.description) == ("loss", "is 1.0 and 1.5")


def test_a_tolerance_lets_rounding_pass(tmp_path: Path) -> None:
    one, other = dumped(tmp_path / "a"), dumped(tmp_path / "b", loss=1.0 + 1e-7)
    assert compare_dumps(one, other).differences
    assert not compare_dumps(one, other, tolerance=1e-6).differences


def test_what_one_has_alone_is_told(tmp_path: Path) -> None:
    one, other = dumped(tmp_path / "a"), dumped(tmp_path / "b", ids=(1, 2))
    (other / DUMPS / "iteration_000003" / "001-loss.json").unlink()
    text = "\n".join(d.description for d in compare_dumps(one, other).differences)
    assert "[3] of int64" in text
    assert "[2] of int64" in text
    assert str(one) in text


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dump_period=1"):
        compare_dumps(dumped(tmp_path / "a"), tmp_path)
