"""Tests of nested state on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.checkpoints.tensors import DUMPS, StageDumps, compare_dumps, load_state, save_state
from nip_astra.errors import CheckpointError
from tests.kit.messages import says


def there_and_back(path: Path, state: Any) -> Any:
    save_state(path / "state", state)
    return load_state(path / "state")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        (),
        {"a": [1, 2.5, None, True, "text", (3, [4])]},
        {0: {"step": 1}, 1: {}},
        {None: 1, "x": 2, 2.5: 3},
        {"$tensor": "no tensor", "$dict": {"$float": ()}},
        {"big": 2**130, "small": 5e-324, "third": 1 / 3, "negative zero": -0.0},
        {"text": "snow ☃ \n ${x}", "": 0},
        [math.inf, -math.inf],
    ],
    ids=str,
)
def test_plain_values_come_back_equal_and_of_the_same_type(tmp_path: Path, value: Any) -> None:
    assert repr(there_and_back(tmp_path, value)) == repr(value)
    assert math.isnan(there_and_back(tmp_path, {"x": math.nan})["x"])


def test_tensors_of_any_type_and_shape_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    dtypes = "float64 float32 float16 bfloat16 int64 uint8"
    state = [
        {"context": base[0], "mask": base[0] > 1, "score": torch.tensor(0.25)},
        {"context": base.T[1], "same": base.T[1], "empty": torch.empty(0, 3)},
        {"generator": torch.Generator().manual_seed(7).get_state()},
        {name: (base.sqrt() * 50).to(getattr(torch, name)) for name in dtypes.split()},
    ]
    back = there_and_back(tmp_path, state)
    # Nothing is pickled.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.safetensors"]
    assert [list(one) for one in back] == [list(one) for one in state]
    torch.testing.assert_close(back, state, atol=0, rtol=0)


def test_a_value_that_cannot_be_saved_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.run\.1\.model .*object"):
        save_state(tmp_path / "state", {"run": [1, {"model": object()}]})
    with pytest.raises(CheckpointError, match=r"state\.x "):
        save_state(tmp_path / "state", {"x": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\x00nonsense"])
def test_a_missing_or_broken_file_is_named(
    tmp_path: Path, suffix: str, content: bytes | None
) -> None:
    save_state(tmp_path / "state", {"x": torch.ones(2)})
    file = (tmp_path / "state").with_suffix(suffix)
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointError, match="state"):
        load_state(tmp_path / "state")


def dumped(folder: Path, *, loss: float = 1.0, ids: tuple[int, ...] = (1, 2, 3)) -> Path:
    dumps = StageDumps(folder / DUMPS, period=2)
    for iteration in (0, 1, 2):
        dumps.write(iteration, "tokens", {"ids": torch.tensor(ids), "names": ["a", "b"]})
        dumps.write(iteration, "loss", {"loss": loss})
    return folder


def test_every_so_many_iterations_are_dumped_in_order(tmp_path: Path) -> None:
    files = sorted(str(file.relative_to(tmp_path)) for file in dumped(tmp_path).rglob("*.json"))
    stages = ("000-tokens", "001-loss")
    assert files == [f"dumps/iteration_00000{n}/{stage}.json" for n in (1, 3) for stage in stages]
    StageDumps(tmp_path / "none", period=0).write(0, "tokens", {})
    assert not (tmp_path / "none").exists()


def test_the_first_stage_that_differs_comes_first(tmp_path: Path) -> None:
    one = dumped(tmp_path / "a")
    same = compare_dumps(one, dumped(tmp_path / "same") / DUMPS)
    assert (same.num_stages, same.differences) == (4, [])
    other = dumped(tmp_path / "b", loss=1.5, ids=(1, 2, 4))
    first, second, *_ = compare_dumps(one, other).differences
    assert first.stage == "iteration_000001/000-tokens"
    assert first.field == "ids"
    assert says(first.description, "1 of 3", "[2]", "3 and 4")
    assert second.field == "loss"
    assert says(second.description, "1.0", "1.5")
    # A tolerance lets rounding pass.
    rounded = dumped(tmp_path / "c", loss=1.0 + 1e-7)
    assert compare_dumps(one, rounded).differences
    assert not compare_dumps(one, rounded, tolerance=1e-6).differences
    # Entries of only one dump are reported.
    (other / DUMPS / "iteration_000003" / "001-loss.json").unlink()
    assert says([d.description for d in compare_dumps(one, other).differences], one)
    shorter = dumped(tmp_path / "shorter", ids=(1, 2))
    differences = compare_dumps(one, shorter).differences
    assert says([d.description for d in differences], "[3] of int64", "[2] of int64")
    with pytest.raises(CheckpointError, match="dump_period=1"):
        compare_dumps(one, tmp_path)
