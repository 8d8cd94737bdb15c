"""Pairs are written and read unchanged; anything else is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nip_astra.errors import DataError
from nip_astra.scenarios.graphs.generation import GraphPairParameters, GraphPairs, generate_pairs
from nip_astra.scenarios.graphs.pair_files import as_dataset, load_pairs, save_pairs

PARAMETERS = GraphPairParameters(num_train=12, num_test=6, sizes=[7, 8])


@pytest.fixture(scope="module")
def pairs() -> tuple[GraphPairs, GraphPairs]:
    return generate_pairs(PARAMETERS, "train"), generate_pairs(PARAMETERS, "test")


@pytest.fixture
def file(tmp_path: Path, pairs: tuple[GraphPairs, GraphPairs]) -> Path:
    save_pairs(tmp_path / "pairs.safetensors", train=pairs[0], test=pairs[1])
    return tmp_path / "pairs.safetensors"


def test_pairs_are_read_as_they_were_written(
    file: Path, pairs: tuple[GraphPairs, GraphPairs]
) -> None:
    for read, written in zip(load_pairs(file), pairs, strict=True):
        for item, other in zip(read, written, strict=True):
            assert np.array_equal(item, other)
            assert item.dtype == other.dtype


def test_a_dataset_has_the_observations_of_agents(pairs: tuple[GraphPairs, GraphPairs]) -> None:
    dataset = as_dataset(pairs[0])
    assert dataset.batch_size == (12,)
    assert dataset["adjacency"].shape == (12, 2, 8, 8)
    assert dataset["adjacency"].dtype == torch.float32
    assert dataset["node_mask"].sum(-1).tolist() == [[size, size] for size in pairs[0].num_nodes]
    assert torch.equal(dataset["y"][:, 0] == 1, dataset["wl_score"] == -1)


def test_files_that_are_missing_foreign_or_cannot_be_written_are_reported(
    tmp_path: Path, pairs: tuple[GraphPairs, GraphPairs]
) -> None:
    (tmp_path / "text").write_text("no tensors")
    for name, fact in (("nothing.safetensors", r"nothing\.safetensors"), ("text", "save_pairs")):
        with pytest.raises(DataError, match=fact):
            load_pairs(tmp_path / name)
    with pytest.raises(DataError, match=r"none/pairs\.safetensors"):
        save_pairs(tmp_path / "none" / "pairs.safetensors", train=pairs[0], test=pairs[1])


@pytest.mark.parametrize(
    ("name", "change", "fact"),
    [
        ("test.wl_score", lambda _: None, "test.wl_score"),
        ("train.adjacency", lambda value: value.float(), "train.adjacency must be bool"),
        ("train.adjacency", lambda value: value[:, :1], "[pairs, 2, nodes, nodes]"),
        ("train.num_nodes", lambda value: value.int(), "train.num_nodes must be int64"),
        ("train.wl_score", lambda value: value[1:], "train.wl_score must be int64"),
        ("train.adjacency", lambda value: ~value, "train.adjacency"),
        ("train.num_nodes", lambda value: value - 4, "train.adjacency"),
        ("train.adjacency", lambda value: value.triu(), "train.adjacency is not symmetric"),
        ("test.wl_score", lambda value: value * 0, "scores other than -1 and 1 to 6"),
        (
            "test.adjacency",
            lambda value: torch.nn.functional.pad(value, (0, 1, 0, 1)),
            "padded",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(
    file: Path, name: str, change: object, fact: str
) -> None:
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, file)
    with pytest.raises(DataError) as caught:
        load_pairs(file)
    assert fact in str(caught.value)
