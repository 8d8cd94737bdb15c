"""The adapter over detoxify reads a local checkpoint, and downloads nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.scorers.detoxify import DetoxifyScorer
from tests.kit.harmful import Harmful
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "you", "are", "silly", "good"]
NAMES = ["toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"]
TEXTS = ["hello you are silly", "good", "", "you are good hello"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the published form, and its architecture's configuration."""
    root = tmp_path_factory.mktemp("detoxify")
    (root / "bert").mkdir()
    (root / "bert" / "vocab.txt").write_text("\n".join(WORDS))
    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 24,
        "initializer_range": 0.5,
    }
    # As on the hub: the base model, which lacks the six labels.
    BertConfig(**shape).save_pretrained(root / "bert")
    BertTokenizer(str(root / "bert" / "vocab.txt")).save_pretrained(root / "bert")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**shape, num_labels=len(NAMES)))
    save(root / "model.ckpt", model.state_dict())
    return root


def save(path: Path, weights: dict[str, torch.Tensor], *, model_type: str = "no-such/bert") -> None:
    architecture = {
        "model_type": model_type,
        "model_name": "BertForSequenceClassification",
        "tokenizer_name": "BertTokenizer",
        "num_classes": len(NAMES),
    }
    config = {"arch": {"args": architecture}, "dataset": {"args": {"classes": NAMES}}}
    torch.save({"config": config, "state_dict": weights}, path)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def build(folder: Path, **parameters: Any) -> DetoxifyScorer:
    pytest.importorskip("detoxify")
    local = {"checkpoint": "scenario://model.ckpt", "config_path": "scenario://bert"}
    return scorer_on_cpu(DetoxifyScorer, folder, **local | parameters)


def logits_of(folder: Path, text: str) -> torch.Tensor:
    weights = torch.load(folder / "model.ckpt", weights_only=True)["state_dict"]
    config = BertConfig.from_pretrained(folder / "bert", num_labels=len(NAMES))
    model = BertForSequenceClassification(config).eval()
    model.load_state_dict(weights)
    tokenizer = BertTokenizer.from_pretrained(folder / "bert")
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0]


@pytest.mark.parametrize(
    ("place", "category"),
    enumerate(["toxicity", "severe_toxicity", "obscene", "threat", "insult", "identity_attack"]),
)
def test_the_score_is_the_sigmoid_of_the_category_in_any_batch(
    folder: Path, place: int, category: str
) -> None:
    scores = build(folder, category=category, batch_size=place + 1).score(TEXTS)
    expected = torch.stack([logits_of(folder, text).sigmoid()[place] for text in TEXTS])
    assert torch.allclose(scores, expected, atol=1e-6)
    assert scores.unique().numel() == len(TEXTS)


def test_a_text_longer_than_the_window_is_cut(folder: Path) -> None:
    scores = build(folder).score(["silly " * 24, "silly " * 90])
    assert scores[0] == scores[1]


def test_an_unknown_category_is_reported_with_the_categories(folder: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(folder, category="insul")
    assert says(caught.value, "category 'insul'", "'insult'?", "severe_toxicity")


def write_without_a_weight(folder: Path, path: Path) -> None:
    weights = torch.load(folder / "model.ckpt", weights_only=True)["state_dict"]
    del weights["classifier.bias"]
    save(path, weights)


WRONG: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda folder, path: None, "No such file or directory"),
    "another file": (lambda folder, path: torch.save({"state_dict": {}}, path), "'config'"),
    "fewer weights": (write_without_a_weight, r"classifier\.bias"),
    "code": (
        lambda folder, path: torch.save({"config": Harmful(path.with_name("made"))}, path),
        "Weights only load failed",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_unusable_checkpoint_is_reported_and_runs_no_code(
    folder: Path, tmp_path: Path, wrong: str
) -> None:
    write, fact = WRONG[wrong]
    write(folder, tmp_path / "wrong.ckpt")
    with pytest.raises(ModelLoadError, match=fact):
        build(folder, checkpoint=str(tmp_path / "wrong.ckpt"))
    assert not (tmp_path / "made").exists()


def test_a_published_model_is_fetched_by_its_address_and_hash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[tuple[str, dict[str, Any]]] = []

    def fetch(url: str, **options: Any) -> Any:
        if requests:
            raise OSError("no network")
        requests.append((url, options))
        return torch.load(folder / "model.ckpt", weights_only=True)

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    build(folder, checkpoint=None, variant="unbiased-small")
    ((url, options),) = requests
    assert url.endswith("unbiased-albert-c8519128.ckpt")
    assert (options["weights_only"], options["check_hash"]) == (True, True)
    with pytest.raises(ModelLoadError, match=r"'original' .*no network"):
        build(folder, checkpoint=None)
