"""Published pairs of graphs are read unchanged, and only tensors are unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import DataError
from nip_astra.scenarios.graphs.generation import GraphPairParameters, GraphPairs, generate_pairs
from nip_astra.scenarios.graphs.pair_files import padded_to, read_published_pairs
from tests.kit.harmful import Harmful
from tests.scenarios.graph_isomorphism.published import as_published, write_published


@pytest.fixture(scope="module")
def pairs() -> GraphPairs:
    return generate_pairs(GraphPairParameters(num_train=40, sizes=[5, 7]), "train")


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
        ({"sizes_a": torch.full((40,), 1 << 40)}, "1 to 64"),
        ({"sizes_a": torch.zeros(40, dtype=torch.int64)}, "1 to 64"),
        ({"wl_scores": torch.zeros(0, dtype=torch.int64)}, "0 scores"),
        ({"slices_a": torch.zeros(41, dtype=torch.int64)}, "slices_a"),
        ({"slices_a": torch.zeros(0, dtype=torch.int64)}, "slices_a"),
        ({"slices_a": torch.zeros(60, dtype=torch.int64)}, "slices_a"),
        ({"edge_index_a": torch.zeros(2, 3, 4, dtype=torch.int64)}, "'edge_index_a'"),
    ],
)
def test_files_without_such_data_are_reported(
    other: dict[str, Any], problem: str, pairs: GraphPairs, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        read_published_pairs(write_published(tmp_path / "data.pt", pairs, **other))


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


@pytest.mark.parametrize("content", [None, b"", b"text", b"PK\x03\x04", "list"])
def test_a_file_of_another_kind_is_reported(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    if content == "list":
        torch.save([torch.zeros(1)], path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.pt"):
        read_published_pairs(path)


def test_padding_leaves_graphs_as_they_are(pairs: GraphPairs) -> None:
    padded = padded_to(pairs, 9)
    assert padded.adjacency.shape[2:] == (9, 9)
    np.testing.assert_array_equal(padded.adjacency[:, :, :7, :7], pairs.adjacency)
    assert not padded.adjacency[:, :, 7:].any()
