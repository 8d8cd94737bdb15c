"""tox-block's network equals a sum by hand, and its weights distinguish rude from kind texts."""

from __future__ import annotations

import importlib.util
import math
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from nip_astra.errors import ModelLoadError
from nip_astra.scorers import toxblock
from nip_astra.scorers.toxblock import Category, ToxBlockModel, ToxBlockScorer
from tests.kit.harmful import Harmful
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu


def build(**parameters: Any) -> ToxBlockScorer:
    pytest.importorskip("h5py")
    if importlib.util.find_spec("tox_block") is None:
        pytest.skip("needs the package tox-block (pip install --no-deps tox-block)")
    return scorer_on_cpu(ToxBlockScorer, **parameters)


def small_weights(num_units: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {
        "embeddings": (7, 2),
        **{f"{s}_kernel": (2, 4 * num_units) for s in ("forward", "backward")},
        **{f"{s}_recurrent_kernel": (num_units, 4 * num_units) for s in ("forward", "backward")},
        **{f"{s}_bias": (4 * num_units,) for s in ("forward", "backward")},
        "dense_kernel": (2 * num_units, 4),
        "dense_bias": (4,),
        "dense_1_kernel": (4, 6),
        "dense_1_bias": (6,),
    }
    return {name: 2 * torch.randn(shape) for name, shape in shapes.items()}


def by_hand(weights: dict[str, torch.Tensor], ids: list[int]) -> list[float]:
    """The network in plain numbers, one at a time."""
    w = {name: value.tolist() for name, value in weights.items()}
    highest: list[float] = []
    for side, order in (("forward", ids), ("backward", ids[::-1])):
        size = len(w[f"{side}_bias"]) // 4
        state, cell, most = [0.0] * size, [0.0] * size, [-math.inf] * size
        for word in order:
            total = [
                w[f"{side}_bias"][g]
                + sum(x * w[f"{side}_kernel"][k][g] for k, x in enumerate(w["embeddings"][word]))
                + sum(h * w[f"{side}_recurrent_kernel"][k][g] for k, h in enumerate(state))
                for g in range(4 * size)
            ]

            def gate(value: float) -> float:
                return min(1.0, max(0.0, 0.2 * value + 0.5))

            cell = [
                gate(total[size + u]) * cell[u] + gate(total[u]) * math.tanh(total[2 * size + u])
                for u in range(size)
            ]
            state = [gate(total[3 * size + u]) * math.tanh(cell[u]) for u in range(size)]
            most = [max(m, s) for m, s in zip(most, state, strict=True)]
        highest += most

    def layer(values: list[float], name: str) -> list[float]:
        return [
            bias + sum(x * w[f"{name}_kernel"][k][j] for k, x in enumerate(values))
            for j, bias in enumerate(w[f"{name}_bias"])
        ]

    hidden = [max(0.0, value) for value in layer(highest, "dense")]
    return [1 / (1 + math.exp(-value)) for value in layer(hidden, "dense_1")]


def test_the_network_equals_the_sum_by_hand() -> None:
    weights = small_weights()
    rows = [[0, 0, 1, 2, 3], [4, 5, 6, 1, 1]]
    given = ToxBlockModel(weights)(torch.tensor(rows))
    expected = torch.tensor([by_hand(weights, row) for row in rows])
    assert torch.allclose(given, expected, atol=1e-5)
    assert given.unique().numel() > 6


# Computed with Keras from the published model file, for all six outputs.
OF_KERAS = {
    "you are a stupid idiot": [0.996, 0.054, 0.857, 0.003, 0.960, 0.013],
    "you are silly": [0.831, 0.006, 0.110, 0.002, 0.522, 0.010],
    "what a lovely day": [0.003, 0.000, 0.001, 0.000, 0.001, 0.000],
}


@pytest.mark.parametrize(("place", "category"), enumerate(get_args(Category)))
def test_each_category_equals_that_of_keras_in_any_batch(place: int, category: str) -> None:
    scores = build(category=category, batch_size=place + 1).score([*OF_KERAS, ""])
    expected = torch.tensor([values[place] for values in OF_KERAS.values()])
    assert torch.allclose(scores[:-1], expected, rtol=0, atol=6e-4)
    assert scores[-1] < 0.5


def test_case_punctuation_and_unknown_words_make_no_difference() -> None:
    scores = build().score(["You are SILLY!!", "you are silly", "qqqqqzz you are silly"])
    assert scores[0] == scores[1] == scores[2]


def test_the_last_hundred_words_are_read() -> None:
    silly, longer, kind = build().score(
        ["hello " * 120 + "you are silly", "hello " * 300 + "you are silly", "hello " * 120]
    )
    assert silly == longer > kind


def test_a_file_that_is_not_an_encoder_is_reported_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lstm_model_1.h5").write_bytes(b"")
    monkeypatch.setattr(toxblock, "_find_folder", lambda: tmp_path)
    for content in (Harmful(tmp_path / "made"), ["no encoder"]):
        (tmp_path / "encoder_1.pkl").write_bytes(pickle.dumps(content))
        with pytest.raises(ModelLoadError) as caught:
            scorer_on_cpu(ToxBlockScorer)
        assert says(caught.value, tmp_path, "pip install --no-deps tox-block==0.1.2")
    assert not (tmp_path / "made").exists()
