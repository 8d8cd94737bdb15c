"""Pairs are written and read unchanged, also published ones; anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from nip_astra.errors import DataError
from nip_astra.scenarios.graphs.generation import GraphPairParameters, GraphPairs, generate_pairs
from nip_astra.scenarios.graphs.pair_files import (
    as_dataset,
    load_pairs,
    padded_to,
    read_published_pairs,
    save_pairs,
)
from tests.kit.harmful import Harmful
from tests.scenarios.graph_isomorphism.published import as_published, write_published

PARAMETERS = GraphPairParameters(num_train=40, num_test=6, sizes=[5, 7])


@pytest.fixture(scope="module")
def both() -> tuple[GraphPairs, GraphPairs]:
    return generate_pairs(PARAMETERS, "train"), generate_pairs(PARAMETERS, "test")


@pytest.fixture(scope="module")
def pairs(both: tuple[GraphPairs, GraphPairs]) -> GraphPairs:
    return both[0]


@pytest.fixture
def file(tmp_path: Path, both: tuple[GraphPairs, GraphPairs]) -> Path:
    save_pairs(tmp_path / "pairs.safetensors", train=both[0], test=both[1])
    return tmp_path / "pairs.safetensors"


def test_pairs_are_read_as_they_were_written(
    file: Path, both: tuple[GraphPairs, GraphPairs]
) -> None:
    for read, written in zip(load_pairs(file), both, strict=True):
        for item, other in zip(read, written, strict=True):
            np.testing.assert_array_equal(item, other, strict=True)


def test_a_dataset_has_the_observations_of_agents(pairs: GraphPairs) -> None:
    dataset = as_dataset(pairs)
    assert dataset.batch_size == (40,)
    assert dataset["adjacency"].shape == (40, 2, 7, 7)
    assert dataset["adjacency"].dtype == torch.float32
    assert dataset["node_mask"].sum(-1).tolist() == [[size, size] for size in pairs.num_nodes]
    assert torch.equal(dataset["y"][:, 0] == 1, dataset["wl_score"] == -1)


def test_files_that_are_missing_foreign_or_cannot_be_written_are_reported(
    tmp_path: Path, both: tuple[GraphPairs, GraphPairs]
) -> None:
    (tmp_path / "text").write_text("no tensors")
    for name, fact in (("nothing.safetensors", r"nothing\.safetensors"), ("text", "save_pairs")):
        with pytest.raises(DataError, match=fact):
            load_pairs(tmp_path / name)
    with pytest.raises(DataError, match=r"none/pairs\.safetensors"):
        save_pairs(tmp_path / "none" / "pairs.safetensors", train=both[0], test=both[1])


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
        ("test.adjacency", lambda value: functional.pad(value, (0, 1, 0, 1)), "padded"),
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


# ---- published pairs


def test_pairs_come_back_as_they_were_published(pairs: GraphPairs, tmp_path: Path) -> None:
    read, num_rescored = read_published_pairs(write_published(tmp_path / "data.pt", pairs))
    for result, expected in zip(read, pairs, strict=True):
        np.testing.assert_array_equal(result, expected)
    assert num_rescored == 0


def test_last_graphs_may_have_no_edges_and_no_slice(tmp_path: Path) -> None:
    empty = GraphPairs(np.zeros((2, 2, 3, 3), dtype=bool), np.array([3, 2]), np.array([-1, -1]))
    empty.adjacency[0, :, 0, 1] = empty.adjacency[0, :, 1, 0] = True
    slices = {f"slices_{which}": torch.tensor([0, 2]) for which in "ab"}
    read, _ = read_published_pairs(write_published(tmp_path / "data.pt", empty, **slices))
    np.testing.assert_array_equal(read.adjacency, empty.adjacency)


def test_another_score_is_put_right_and_another_label_is_refused(
    pairs: GraphPairs, tmp_path: Path
) -> None:
    scores = torch.from_numpy(pairs.wl_score).int()
    other = torch.where(scores == 1, 2, scores)
    assert (other != scores).any()
    path = write_published(tmp_path / "data.pt", pairs, wl_scores=other)
    read, num_rescored = read_published_pairs(path)
    np.testing.assert_array_equal(read.wl_score, pairs.wl_score)
    assert num_rescored == int((other != scores).sum())
    path = write_published(tmp_path / "data.pt", pairs, wl_scores=scores.where(scores != 1, -1))
    with pytest.raises(DataError, match="wrong labels"):
        read_published_pairs(path)


def test_code_in_a_file_is_not_run(pairs: GraphPairs, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    path = write_published(tmp_path / "data.pt", pairs, notes=Harmful(touched))
    with pytest.raises(DataError, match="only tensors"):
        read_published_pairs(path)
    assert not touched.exists()
    torch.load(path, weights_only=False)
    assert touched.exists(), "the file is harmful where it is read otherwise"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"notes": "text"}, "str"),
        ({"notes": torch.nn.Parameter(torch.zeros(1))}, "Parameter"),
        ({"notes": torch.zeros(2, 2).to_sparse()}, "dense"),
        ({"slices_a": None}, "'slices_a'"),
        ({"sizes_b": torch.ones(40)}, "'sizes_b'"),
        ({"sizes_a": torch.ones(39, dtype=torch.int64)}, "39 sizes"),
        ({"sizes_a": torch.full((40,), 7)}, "different numbers of nodes"),
        *(({"sizes_a": torch.full((40,), size)}, "1 to 64") for size in (1 << 40, 0)),
        ({"wl_scores": torch.zeros(0, dtype=torch.int64)}, "0 scores"),
        *(({"slices_a": torch.zeros(n, dtype=torch.int64)}, "slices_a") for n in (41, 0, 60)),
        ({"edge_index_a": torch.zeros(2, 3, 4, dtype=torch.int64)}, "'edge_index_a'"),
    ],
)
def test_files_without_such_data_are_reported(
    other: dict[str, Any], problem: str, pairs: GraphPairs, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        read_published_pairs(write_published(tmp_path / "data.pt", pairs, **other))


def test_a_file_of_another_kind_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    torch.save([torch.zeros(1)], path)
    for content in (path.read_bytes(), b"", b"text", b"PK\x03\x04", None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=r"data\.pt"):
            read_published_pairs(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda edges: edges + 5, "out of range"),
        (lambda edges: edges - 1, "out of range"),
        (lambda edges: edges[:1].repeat(2, 1), "loops"),
        (lambda edges: edges.sort(dim=0).values, "symmetric"),
    ],
)
def test_impossible_edges_are_reported(
    change: Any, problem: str, pairs: GraphPairs, tmp_path: Path
) -> None:
    edges = change(as_published(pairs)["edge_index_b"])
    with pytest.raises(DataError, match=problem):
        read_published_pairs(write_published(tmp_path / "data.pt", pairs, edge_index_b=edges))


def test_padding_leaves_graphs_as_they_are(pairs: GraphPairs) -> None:
    padded = padded_to(pairs, 9)
    assert padded.adjacency.shape[2:] == (9, 9)
    np.testing.assert_array_equal(padded.adjacency[:, :, :7, :7], pairs.adjacency)
    assert not padded.adjacency[:, :, 7:].any()
