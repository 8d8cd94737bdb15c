"""Fixtures shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from tests.tiny import make_language_model, write_scenario


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Small operations run many times slower with two threads on busy cores.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama and its tokenizer."""
    return make_language_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> HuggingFaceLanguageModel:
    """A trainable backend over the tiny model."""
    return HuggingFaceLanguageModel(
        load_causal_lm(str(tiny_model_dir), None, "float32"),
        load_tokenizer(str(tiny_model_dir)),
        device=torch.device("cpu"),
        trainable=True,
    )


@pytest.fixture(scope="session")
def tiny_scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario folder over tiny random models."""
    return write_scenario(tmp_path_factory.mktemp("scenario"))
