"""The classifier's score is its label's probability, whatever the batch."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from nip_astra.errors import ModelLoadError, ScorerError
from nip_astra.scorers.classifier import ClassifierScorer, ModelScorer
from nip_astra.utils.actors import ActorOptions, using_actors
from tests.kit import actors_here
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu
from tests.kit.tiny import make_classifier

TEXTS = ["hello you", "the cat sat on a mat .", "good", "how are you fine thanks"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier") / "model")


def scorer_of(model: Path, label: str = "rude", **options: Any) -> ClassifierScorer:
    return scorer_on_cpu(ClassifierScorer, model=str(model), label=label, **options)


def changed(directory: Path, folder: Path, **config: Any) -> Path:
    """A copy of the classifier with another configuration."""
    shutil.copytree(directory, folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def logits_of(directory: Path, text: str) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_the_score_is_the_softmax_of_the_label_in_any_batch(
    directory: Path, batch_size: int
) -> None:
    scores = scorer_of(directory, batch_size=batch_size).score([*TEXTS, "", " "])
    expected = torch.stack([logits_of(directory, text).softmax(0)[1] for text in TEXTS])
    assert torch.allclose(scores[:-2], expected, atol=1e-6)
    assert scores[:-2].unique().numel() == len(TEXTS)
    assert scores[-2] == scores[-1]


def test_a_multi_label_model_and_a_single_output_give_a_sigmoid(
    directory: Path, tmp_path: Path
) -> None:
    several = changed(directory, tmp_path / "several", problem_type="multi_label_classification")
    labels = {"id2label": {"0": "rude"}, "label2id": {"rude": 0}}
    single = changed(directory, tmp_path / "single", **labels)
    weights = load_file(directory / "model.safetensors")
    last = {k: v[1:] if k.startswith("classifier.") else v for k, v in weights.items()}
    save_file(last, single / "model.safetensors", metadata={"format": "pt"})
    expected = logits_of(directory, TEXTS[0]).sigmoid()[1].item()
    for folder in (several, single):
        assert scorer_of(folder).score(TEXTS[:1]).item() == pytest.approx(expected, abs=1e-6)


def test_a_text_longer_than_the_window_is_cut(directory: Path, tmp_path: Path) -> None:
    folder = changed(directory, tmp_path / "m")
    values = json.loads((folder / "tokenizer_config.json").read_text())
    del values["model_max_length"]
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    scores = scorer_of(folder).score(["cat " * 128, "cat " * 400])
    assert scores[0] == scores[1]


def test_positions_before_the_first_token_are_not_part_of_the_window(
    directory: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, model_max_length=10**30)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=18,
        pad_token_id=1,
        id2label={0: "civil", 1: "rude"},
    )
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scores = scorer_of(tmp_path).score(["cat " * 16, "cat " * 40])
    assert scores[0] == scores[1]


def test_a_model_that_is_not_a_classifier_is_reported(
    directory: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    without = changed(directory, tmp_path / "without")
    (without / "model.safetensors").unlink()
    cases = {without: "could not be loaded", tiny_model_dir: "score.weight"}
    if importlib.util.find_spec("gguf"):
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        cases[tmp_path / "model.gguf"] = "GGUF"
    for model, reason in cases.items():
        with pytest.raises(ModelLoadError) as caught:
            scorer_of(model, "LABEL_1")
        assert says(caught.value, str(model), reason)


class LengthScorer(ModelScorer):
    """Rates by length, and records its batches."""

    def _score(self, texts: Sequence[str]) -> list[float]:
        self.batches: list[list[str]] = []

        def rate(part: list[str]) -> torch.Tensor:
            self.batches.append(part)
            return torch.tensor([len(text) / 10 for text in part])

        return self._in_batches(texts, rate, len)


def build(**parameters: object) -> LengthScorer:
    return LengthScorer(LengthScorer.Parameters(**parameters), device=torch.device("meta"))


def test_texts_of_like_length_share_a_batch_and_scores_keep_their_order() -> None:
    scorer = build(batch_size=2)
    assert scorer.score(["aaaa", "b", "ccc", "dd"]).tolist() == pytest.approx([0.4, 0.1, 0.3, 0.2])
    assert scorer.batches == [["b", "dd"], ["ccc", "aaaa"]]


def test_a_scorer_runs_on_the_device_of_the_run_by_default() -> None:
    assert build().device == torch.device("meta")
    assert build(device="cpu").device == torch.device("cpu")


class ModelOnActors(ModelScorer):
    """Rates by a network; refuses the text "bad"."""

    can_be_copied = True

    def __init__(self, batch_size: int) -> None:
        parameters = ModelScorer.Parameters(batch_size=batch_size)
        super().__init__(parameters, device=torch.device("cpu"))
        self.network = torch.nn.Linear(3, 1)

    def _score(self, texts: Sequence[str]) -> list[float]:
        return self._in_batches(texts, self._by_network, len)

    def _by_network(self, part: list[str]) -> torch.Tensor:
        if "bad" in part:
            raise ValueError("no such word")
        inputs = torch.tensor([[len(text), text.count("a"), len(part)] for text in part])
        return self.network(inputs.float()).sigmoid()[:, 0]


def test_actors_rate_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = actors_here.install(monkeypatch)
    texts = ["a" * length + "b" * (length % 3) for length in range(1, 12)]
    scorer = ModelOnActors(batch_size=4)
    expected = scorer.score(texts)
    scorer._verdicts.clear()
    with using_actors(ActorOptions(2)):
        assert torch.equal(scorer.score(texts), expected)
        assert opened[0].turn == 3
        # Previous ratings are remembered here, and a single batch stays here.
        assert torch.equal(scorer.score([*texts, "c"])[:-1], expected)
        assert opened[0].turn == 3
        assert not opened[0].actors[0]._kept[0]._verdicts


def test_a_scorer_that_fails_in_an_actor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    actors_here.install(monkeypatch)
    scorer = ModelOnActors(batch_size=1)
    reason = "ValueError: no such word"
    with using_actors(ActorOptions(1)), pytest.raises(ScorerError, match=reason):
        scorer.score(["good", "bad"])


def test_a_scorer_on_a_gpu_stays_where_actors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = actors_here.install(monkeypatch)
    scorer = ModelOnActors(batch_size=1)
    scorer.device = torch.device("cuda")
    with using_actors(ActorOptions(1)):
        scorer.score(["good", "a"])
        assert not opened
    with using_actors(ActorOptions(1, num_gpus=0.5)):
        scorer.score(["better", "aa"])
        assert opened[0].turn == 2
