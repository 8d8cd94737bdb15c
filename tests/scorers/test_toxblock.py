"""tox-block's network equals a sum by hand, and its weights distinguish rude from kind texts."""

from __future__ import annotations

import importlib.util
import pickle
from itertools import product
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


def small_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    of_side = {"kernel": (2, 12), "recurrent_kernel": (3, 12), "bias": (12,)}
    sides = product(("forward", "backward"), of_side.items())
    shapes = {
        "embeddings": (7, 2),
        **{f"{side}_{name}": shape for side, (name, shape) in sides},
        "dense_kernel": (6, 4),
        "dense_bias": (4,),
        "dense_1_kernel": (4, 6),
        "dense_1_bias": (6,),
    }
    return {name: 2 * torch.randn(shape) for name, shape in shapes.items()}


def by_hand(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """The network, word by word."""
    highest = []
    for side, order in (("forward", ids), ("backward", ids[::-1])):
        state = cell = torch.zeros(len(w[f"{side}_bias"]) // 4)
        states = []
        for word in order:
            read = w["embeddings"][word] @ w[f"{side}_kernel"]
            total = read + state @ w[f"{side}_recurrent_kernel"] + w[f"{side}_bias"]
            # Gates are piecewise linear.
            opened = (0.2 * total + 0.5).clamp(0, 1).chunk(4)
            cell = opened[1] * cell + opened[0] * total.chunk(4)[2].tanh()
            state = opened[3] * cell.tanh()
            states.append(state)
        highest.append(torch.stack(states).amax(0))
    hidden = (torch.cat(highest) @ w["dense_kernel"] + w["dense_bias"]).relu()
    return (hidden @ w["dense_1_kernel"] + w["dense_1_bias"]).sigmoid()


def test_the_network_equals_the_sum_by_hand() -> None:
    weights = small_weights()
    rows = [[0, 0, 1, 2, 3], [4, 5, 6, 1, 1]]
    given = ToxBlockModel(weights)(torch.tensor(rows))
    expected = torch.stack([by_hand(weights, row) for row in rows])
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
