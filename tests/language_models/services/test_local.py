"""A language model in this process as a chat model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat import FailureReason, FinishReason
from nip_astra.language_models.services.chat_models.local import LocalChatModel
from nip_astra.utils.actors import ActorOptions, using_actors
from tests.kit import actors_here
from tests.kit.tiny import load_backend, make_byte_tokenizer, make_language_model
from tests.language_models.services.requests import ask, failure, saying, texts


@pytest.fixture
def model(tiny_model: HuggingFaceLanguageModel) -> LocalChatModel:
    return LocalChatModel(tiny_model, name="tiny", max_batch_size=16)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Requests and threads of each batch."""
    result: list[tuple[int, int]] = []
    complete = HuggingFaceLanguageModel.complete

    def counted(self: HuggingFaceLanguageModel, requests: Any, **options: Any) -> Any:
        result.append((len(requests), torch.get_num_threads()))
        return complete(self, requests, **options)

    monkeypatch.setattr(HuggingFaceLanguageModel, "complete", counted)
    return result


def test_requests_that_wait_together_are_answered_in_one_batch_and_as_alone(
    model: LocalChatModel, batches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        saying(f"hello {n}", seed=n, max_tokens=8, num_samples=2, needs_logprobs=True)
        for n in range(20)
    ]
    together = ask(model, *requests)
    assert batches == [(16, 1), (4, 1)]
    for request, outcome in zip(requests, together, strict=True):
        (alone,) = ask(model, request)
        assert texts(alone) == texts(outcome)
        for first, second in zip(alone.samples, outcome.samples, strict=True):
            assert first.token_logprobs == pytest.approx(second.token_logprobs, abs=1e-4)
    model.num_threads = 3
    monkeypatch.setattr(model.language_model, "num_parameters", lambda: 100_000_000)
    ask(model, saying("hello", max_tokens=2))
    assert batches[-1] == (1, 3)


def test_all_requests_may_wait_for_it_at_once() -> None:
    """The limits of services would leave its batches empty, or abandon running requests."""
    model = {"_type": "huggingface", "model": "x"}
    parameters = LocalChatModel.Parameters(language_model=model)
    assert parameters.limits.concurrency >= 4 * parameters.max_batch_size
    assert parameters.limits.attempt_timeout >= 3600
    changed = LocalChatModel.Parameters(language_model=model, limits={"num_retries": 1})
    assert changed.limits.model_copy(update={"num_retries": 5}) == parameters.limits


def test_a_seed_and_a_sample_number_name_an_answer(model: LocalChatModel) -> None:
    both, second, other, free = ask(
        model,
        saying("hello", seed=1, num_samples=2, max_tokens=12),
        saying("hello", seed=1, first_sample=1, max_tokens=12),
        saying("hello", seed=2, num_samples=2, max_tokens=12),
        saying("hello", num_samples=9, max_tokens=12),
    )
    assert texts(both)[1:] == texts(second)
    assert texts(both) != texts(other)
    assert len({*texts(both), *texts(other)}) > 2
    assert len(set(texts(free))) > 2
    greedy = ask(model, *(saying("hello", seed=n, temperature=0.0, max_tokens=5) for n in range(2)))
    assert texts(greedy[0]) == texts(greedy[1]) != ["<refused>"]


def test_a_stop_text_cuts_the_answer_and_its_logprobs(model: LocalChatModel) -> None:
    (whole,) = ask(model, saying("hello", seed=3, max_tokens=12))
    middle = texts(whole)[0][4:6]
    (cut,) = ask(model, saying("hello", seed=3, max_tokens=12, stop=(middle,), needs_logprobs=True))
    (answer,) = cut.samples
    assert answer.text == texts(whole)[0].partition(middle)[0]
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.token_logprobs) < 12


def test_a_request_beyond_the_window_is_refused_as_data(model: LocalChatModel) -> None:
    window = model.language_model.context_window
    long, fine = ask(model, saying("a " * window), saying("a", max_tokens=2))
    assert failure(long).reason is FailureReason.CONTEXT_LENGTH
    assert str(window) in failure(long).message
    assert len(fine.samples) == 1


def test_an_error_reaches_all_requests_of_the_batch_and_no_later_request(
    model: LocalChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        broken = Mock(side_effect=RuntimeError("no memory"))
        patch.setattr(model.language_model, "complete", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            ask(model, saying("a", max_tokens=2), saying("b", max_tokens=2))
    assert texts(ask(model, saying("a", max_tokens=2))[0]) != ["<refused>"]


@pytest.mark.parametrize("changes", [{"top_p": 0.0}, {"temperature": -1.0}])
def test_invalid_options_are_refused(model: LocalChatModel, changes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        ask(model, saying("a", max_tokens=2, **changes))


def test_a_tokenizer_without_a_chat_template_is_refused(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_model.tokenizer, "chat_template", None)
    with pytest.raises(ModelLoadError, match="'tiny' has no chat template"):
        LocalChatModel(tiny_model, name="tiny")


@pytest.mark.parametrize(
    ("max_batch_size", "num_batches", "sizes"),
    [(16, 1, [5]), (2, 1, [2, 2, 1]), (16, 2, [2, 3]), (2, 2, [1, 2, 2]), (16, 9, [1] * 5)],
)
def test_parameters_decide_the_batches_with_and_without_actors(
    tiny_model_dir: Path,
    batches: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    max_batch_size: int,
    num_batches: int,
    sizes: list[int],
) -> None:
    made = actors_here.install(monkeypatch)
    given = {"_type": "huggingface", "model": str(tiny_model_dir)}
    parameters = LocalChatModel.Parameters(
        language_model=given, max_batch_size=max_batch_size, num_batches=num_batches
    )
    model = LocalChatModel.load(parameters, scenario_dir=None)
    prompts = ["hello", "good day", "the cat sat", "a dog", "hello there"]
    requests = [saying(text, seed=seed, max_tokens=5) for seed, text in enumerate(prompts)]
    with model.language_model.counting() as spent:
        alone = ask(model, *requests)
    assert [size for size, _ in batches] == sizes
    for num_actors in (1, 2, 4):
        batches.clear()
        with using_actors(ActorOptions(num_actors)), model.language_model.counting() as again:
            assert ask(model, *requests) == alone
        assert [size for size, _ in batches] == sizes
        assert made[-1].turn == len(sizes)
        assert again.generated == spent.generated


SCHEMA = {
    "type": "object",
    "properties": {"rating": {"enum": [0, 5, 10]}, "is_sure": {"type": "boolean"}},
    "required": ["rating", "is_sure"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "rating", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLanguageModel:
    folder = tmp_path_factory.mktemp("bytes")
    make_language_model(folder, window=512, tokenizer=make_byte_tokenizer())
    return load_backend(folder, trainable=False)


def test_answers_keep_to_a_response_format_beside_free_answers(
    byte_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    actors_here.install(monkeypatch)
    model = LocalChatModel(byte_model, name="bytes")
    requests = [
        saying("hi", seed=1, num_samples=4, max_tokens=300, response_format=FORM),
        saying("hi", seed=1, num_samples=4, max_tokens=20),
        saying("hi", seed=1, max_tokens=9, response_format=FORM),
        saying("hi", seed=1, num_samples=4, max_tokens=20, response_format={"type": "text"}),
    ]
    outcomes = ask(model, *requests)
    formed, free, (cut,), text = (texts(outcome) for outcome in outcomes)
    assert {tuple(sorted(json.loads(item))) for item in formed} == {("is_sure", "rating")}
    assert len(set(formed)) > 1
    assert text == free
    assert cut.startswith("{")
    assert outcomes[2].samples[0].finish_reason is FinishReason.LENGTH
    with using_actors(ActorOptions(2)):
        model = LocalChatModel(byte_model, name="bytes", num_batches=2)
        assert [texts(item) for item in ask(model, *requests)] == [formed, free, [cut], text]


def test_a_form_that_cannot_be_enforced_is_an_unknown_form(
    model: LocalChatModel, byte_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    forms = [
        {"type": "regex"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    ]
    requests = [saying("hi", response_format=form) for form in forms]
    of_bytes, formed = LocalChatModel(byte_model, name="bytes"), saying("hi", response_format=FORM)
    # The vocabulary of the other model cannot express JSON.
    outcomes = [*ask(of_bytes, *requests), *ask(model, formed)]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    vars(byte_model).pop("grammars", None)
    outcomes += ask(of_bytes, formed)
    assert [failure(outcome).reason for outcome in outcomes] == [FailureReason.UNKNOWN_FORM] * 5
    assert "structured" in failure(outcomes[-1]).message
