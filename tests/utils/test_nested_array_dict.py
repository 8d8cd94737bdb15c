"""Nested arrays of texts and numbers behave like a TensorDict, and survive saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import DataError
from nip_astra.utils.nested_array_dict import (
    TEXT,
    BoolArraySpec,
    CompositeSpec,
    FloatArraySpec,
    IntArraySpec,
    NestedArrayDict,
    StringArraySpec,
    concatenate_nested_array_dicts,
    stack_nested_array_dicts,
)

NUMBERS = np.arange(24).reshape(2, 3, 4)
TEXTS = np.array([["a", None, "ü\u2028"], ["", "e", "f"]], dtype=TEXT)


def example() -> NestedArrayDict:
    return NestedArrayDict(
        {
            "round": NUMBERS,
            ("agents", "message"): TEXTS,
            "agents": {"message": TEXTS, "reward": {"mean": NUMBERS[..., 0] / 3}},
            "done": NUMBERS[..., 0] > 6,
        },
        (2, 3),
    )


INDICES: list[Any] = [
    0,
    -1,
    (1, 2),
    slice(1, None),
    (slice(None), 1),
    (..., 0),
    (0, ...),
    [1, 0, 1],
    np.array([True, False]),
    np.array([[True, False, True], [False, False, True]]),
    (slice(None), None, 0),
]


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_an_index_selects_from_the_batch_as_in_a_tensordict(index: Any) -> None:
    ours = NestedArrayDict({"x": NUMBERS, "in": {"y": NUMBERS * 2.0}}, (2, 3))
    theirs = TensorDict(
        {"x": torch.tensor(NUMBERS), "in": {"y": torch.tensor(NUMBERS * 2.0)}}, (2, 3)
    )
    as_torch = torch.tensor(index) if isinstance(index, np.ndarray) else index
    selected, expected = ours[index], theirs[as_torch]
    assert selected.batch_size == tuple(expected.batch_size)
    for key in ("x", ("in", "y")):
        np.testing.assert_array_equal(selected[key], expected[key].numpy())


def test_texts_are_selected_with_the_numbers_beside_them() -> None:
    row = example()[0]
    assert row["agents", "message"].tolist() == TEXTS[0].tolist()
    assert row["agents"]["reward", "mean"].shape == (3,)
    assert [item["done"].tolist() for item in example()] == [[False, False, True], [True] * 3]
    with pytest.raises(IndexError):
        example()[0, 0, 0]
    with pytest.raises(KeyError, match="message"):
        example()["agents", "mesage"]


def test_keys_follow_the_order_of_setting_and_nested_keys_are_tuples() -> None:
    nested = example()
    assert list(nested.keys()) == ["round", "agents", "done"]
    leaves = ["round", ("agents", "message"), ("agents", "reward", "mean"), "done"]
    assert list(nested.keys(include_nested=True, leaves_only=True)) == leaves
    assert ("agents", "reward") in nested.keys(include_nested=True)
    assert ("agents", "message") in nested
    assert ("agents", "none") not in nested
    assert nested.get(("agents", "message", "deeper")) is None


def test_a_clone_shares_nothing_and_a_shallow_clone_its_arrays() -> None:
    original = example()
    deep, shallow = original.clone(), original.clone(recurse=False)
    deep["agents", "message"][0, 0] = "changed"
    shallow["new"] = NUMBERS
    shallow["agents", "new"] = NUMBERS
    assert original == example()
    shallow["round"][0, 0, 0] = 99
    assert original["round"][0, 0, 0] == 99


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_stacking_makes_a_batch_dimension(dim: int) -> None:
    stacked = stack_nested_array_dicts([example(), example().zeros_like()], dim)
    axis = dim if dim >= 0 else 2
    for key, numbers in (("round", NUMBERS), ("done", NUMBERS[..., 0] > 6)):
        np.testing.assert_array_equal(stacked[key], np.stack([numbers, numbers * 0], axis=axis))
    texts = np.stack([TEXTS, np.full((2, 3), None)], axis=axis)
    assert stacked["agents", "message"].tolist() == texts.tolist()
    assert stacked.batch_size == texts.shape


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenation_is_undone_by_slicing(dim: int) -> None:
    joined = concatenate_nested_array_dicts([example(), example()], dim)
    half = slice(example().batch_size[dim], None)
    assert joined[half if dim == 0 else (slice(None), half)] == example()
    longer = concatenate_nested_array_dicts([example(), example()[:1]])
    assert (longer.batch_size, longer[:2], longer[2]) == ((3, 3), example(), example()[0])


def test_mismatched_shapes_are_refused() -> None:
    others = (NestedArrayDict({"round": NUMBERS}, (2, 3)), example()[:, :1])
    for items in ([], *([example(), other] for other in others)):
        for join in (stack_nested_array_dicts, concatenate_nested_array_dicts):
            with pytest.raises(DataError):
                join(items)


@pytest.mark.parametrize(
    "value",
    [np.zeros((3, 2)), [[1, 2], [3]], [[object()] * 3] * 2, np.zeros((2, 3), dtype=np.complex64)],
    ids=["shape", "ragged", "objects", "complex"],
)
def test_values_of_other_shapes_and_types_are_refused(value: Any) -> None:
    with pytest.raises(DataError):
        NestedArrayDict({"x": value}, (2, 3))


def test_update_merges_nested_dictionaries_and_a_part_can_be_put_into_the_whole() -> None:
    other = TEXTS[:, ::-1]
    nested = example().update({"agents": {"retries": NUMBERS}, ("agents", "message"): other})
    assert set(nested["agents"].keys()) == {"message", "reward", "retries"}
    assert nested["agents", "message"].tolist() == other.tolist()
    nested = example()
    nested[0] = nested[1]
    assert nested[0] == example()[1]
    with pytest.raises(DataError, match="keys"):
        nested[0] = {"round": NUMBERS[1]}


def test_a_file_gives_back_the_same_or_is_refused(tmp_path: Path) -> None:
    original = example()
    original["agents", "reward", "mean"][0, 0] = np.nan
    original["empty"] = np.zeros((2, 3, 0))
    original.save(tmp_path / "rollouts.json")
    assert NestedArrayDict.load(tmp_path / "rollouts.json") == original
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.json"]
    for broken in ("", "{}", "[1]", '{"format": "other/1"}', '{"format": 3}'):
        (tmp_path / "rollouts.json").write_text(broken)
        with pytest.raises(DataError, match=r"rollouts\.json"):
            NestedArrayDict.load(tmp_path / "rollouts.json")


def test_specs_make_and_check_dictionaries() -> None:
    spec = CompositeSpec(
        {
            "round": IntArraySpec((2,), ("batch",)),
            "agents": {"message": StringArraySpec((2, 3), ("batch", "agent"))},
            "reward": FloatArraySpec((2,)),
            "done": BoolArraySpec((2,)),
        },
        (2,),
        ("batch",),
    )
    zero = spec.zero()
    spec.check(zero)
    assert zero["agents", "message"].tolist() == [[None] * 3] * 2
    assert spec["agents", "message"].dim_names == ("batch", "agent")
    lacking = NestedArrayDict({key: spec.zero()[key] for key in ("round", "agents", "reward")}, 2)
    zero["agents", "message"] = np.zeros((2, 3))
    for wrong, fact in ((zero, "message"), (lacking, "done")):
        with pytest.raises(DataError, match=fact):
            spec.check(wrong)
    with pytest.raises(DataError):
        CompositeSpec({"round": IntArraySpec((3,))}, (2,))
    with pytest.raises(DataError):
        IntArraySpec((3,), ("a", "b"))


def test_arrays_and_scalars_are_found_under_their_keys() -> None:
    keys = [("agents", "reward"), ("y",)]
    result = NestedArrayDict.from_arrays_and_scalars([np.eye(2), [0, 1]], keys, (2,))
    assert result == NestedArrayDict({"agents": {"reward": np.eye(2)}, "y": [0, 1]}, 2)
    assert NestedArrayDict.from_arrays_and_scalars([3], [("seed",)], ())["seed"] == 3
    with pytest.raises(DataError, match="2"):
        NestedArrayDict.from_arrays_and_scalars([np.eye(2), [0, 1]], keys[:1], (2,))
