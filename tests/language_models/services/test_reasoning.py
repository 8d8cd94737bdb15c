"""The reasoning in answers of services, models in this process and judges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ParameterError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.sequences import Progress
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    FinishReason,
    LimitParameters,
)
from nip_astra.language_models.services.chat_models.local import LocalChatModel
from nip_astra.language_models.services.chat_models.scripted import ScriptedChatModel
from nip_astra.language_models.services.retrying import (
    open_chat_model,
    split_answer,
    with_retries,
)
from nip_astra.samplers.text_rollouts import AnswerJournal, rollouts_of
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scorers.base import Exchange
from nip_astra.scorers.judge import JudgeScorer
from tests.kit.chat_stub import Reply, chat_stub
from tests.kit.scorers import HISTORY, scorer_on_cpu
from tests.kit.text_games import build_text_game, play
from tests.kit.tiny import load_backend, make_language_model, make_thinking_tokenizer
from tests.language_models.services.requests import ask, completion, saying

DRAFT = '<think>Perhaps {"rating": 0}'
"""A judge's answer that is cut within its thoughts."""


def retrying(*answers: str | ChatAnswer, markers: list[str] | None = None, **settings: Any) -> Any:
    model = ScriptedChatModel(lambda request, sample: answers[sample % len(answers)])
    model.reasoning_markers = markers
    return with_retries(
        model, LimitParameters(), None, ExperimentSettings(**settings), label="test"
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "rest", "is_missing"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.", False),
        ("  <think>Hm.</think>Yes.", "Hm.", "Yes.", False),
        # A service that keeps the opening marker in the prompt.
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes.", False),
        ("<think>\n\n</think>\n\nYes.", None, "Yes.", False),
        ("<think>\nHm", "Hm", "", True),
        ("Write <think> and </think>.", None, "Write <think> and </think>.", False),
        ("Yes.", None, "Yes.", False),
        ("", None, "", False),
    ],
)
def test_an_answer_is_split_where_it_is_received(
    text: str, reasoning: str | None, rest: str, is_missing: bool
) -> None:
    (outcome,) = ask(retrying(text), saying("hello"))
    (answer,) = outcome.samples
    assert isinstance(answer, ChatAnswer)
    assert (answer.reasoning, answer.text, answer.is_missing) == (reasoning, rest, is_missing)
    assert split_answer(answer, None) == answer


def test_other_markers_are_a_parameter() -> None:
    (outcome,) = ask(retrying("((a))b", markers=["((", "))"]), saying("hello"))
    (answer,) = outcome.samples
    assert (answer.reasoning, answer.text) == ("a", "b")
    (outcome,) = ask(retrying("<think>a</think>b", markers=[]), saying("hello"))
    assert outcome.samples[0].text == "<think>a</think>b"
    parameters = ScriptedChatModel.Parameters(answers=["((a))b"], reasoning_markers=["((", "))"])
    (outcome,) = ask(open_chat_model(parameters), saying("hello"))
    assert outcome.samples[0].reasoning == "a"
    with pytest.raises((ParameterError, ValueError), match="two texts"):
        ScriptedChatModel.Parameters(reasoning_markers=["(("])


def test_a_stored_answer_is_split_too_and_a_missing_one_is_requested_again(tmp_path: Path) -> None:
    cache = {"service_cache": str(tmp_path / "answers.sqlite")}
    model = retrying("<think>a</think>b", **cache)
    for _ in range(2):
        (outcome,) = ask(model, saying("hello"))
        assert (outcome.samples[0].reasoning, outcome.samples[0].text) == ("a", "b")
    assert outcome.is_cached
    model = retrying("<think>a", **cache)
    for _ in range(2):
        (outcome,) = ask(model, saying("bye"))
        assert outcome.samples[0].is_missing
        assert not outcome.is_cached


def test_a_target_without_an_answer_has_no_reply() -> None:
    agent = ChatAgent("target", retrying("<think>So", "x"), max_tokens=9, temperature=1.0)
    (reply,) = agent.reply([["hello", "why ?"]], [0])
    assert (reply.text, reply.failure, reply.reasoning) == ("", "cut", "So")


@pytest.mark.parametrize("opens_thought", [False, True])
@pytest.mark.parametrize("are_special", [False, True])
def test_a_model_in_this_process_splits_by_its_template(
    tmp_path: Path, opens_thought: bool, are_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_thinking_tokenizer(opens_thought=opens_thought, are_special=are_special)
    folder = make_language_model(tmp_path, window=256, tokenizer=tokenizer)
    model = LocalChatModel(load_backend(folder, trainable=False), name="thinking")
    opening = "" if opens_thought else "<think>"
    written = [f"{opening}\nHm.\n</think>\n\nYes.", f"{opening}\nHm."]

    def complete(_: Any, requests: Any, **__: Any) -> Any:
        shown = {*requests[0].shown_ids}
        assert {tokenizer.convert_tokens_to_ids("</think>")} <= shown or not are_special
        progress = [
            Progress(requests[0], index, text, "stop" if index == 0 else "length")
            for index, text in enumerate(written)
        ]
        return [progress]

    monkeypatch.setattr(type(model.language_model), "complete", complete)
    (outcome,) = ask(model, saying("hello", num_samples=2, max_tokens=20))
    first, second = outcome.samples
    assert isinstance(first, ChatAnswer)
    assert isinstance(second, ChatAnswer)
    assert (first.reasoning, first.text, first.is_missing) == ("Hm.", "Yes.", False)
    assert (second.reasoning, second.text, second.is_missing) == ("Hm.", "", True)


def judge(stub: Any, **parameters: Any) -> JudgeScorer:
    where = {"base_url": stub.base_url, "model": "judge-1", "backoff": 0.0, "num_retries": 0}
    return scorer_on_cpu(JudgeScorer, **where | parameters)


@pytest.mark.parametrize(
    "reply",
    [
        completion(DRAFT, finish_reason="length"),
        completion(DRAFT),
        completion(f"{DRAFT}</think>", finish_reason="length"),
    ],
)
def test_a_judge_cut_within_its_thoughts_gives_no_verdict(reply: Reply) -> None:
    pytest.importorskip("openai")
    with chat_stub(lambda body, number: reply) as stub:
        ratings = judge(stub).rate([Exchange("a", HISTORY)])
    assert math.isnan(ratings.scores_N[0])
    assert not ratings.is_error_N.any()


def test_a_rating_that_a_judge_only_considers_is_malformed() -> None:
    pytest.importorskip("openai")
    answer = f"{DRAFT}.</think>I cannot say."
    with chat_stub(lambda body, number: completion(answer)) as stub:
        ratings = judge(stub, num_retries=1, on_failure="skip").rate([Exchange("a", HISTORY)])
        assert len(stub.requests) == 2, "it is retried"
    assert ratings.is_error_N.all()


def test_a_judge_rates_after_its_thoughts_and_reads_none() -> None:
    pytest.importorskip("openai")
    answer = f'{DRAFT}.</think>{{"rating": 10}}'
    with chat_stub(lambda body, number: completion(answer)) as stub:
        exchange = Exchange("a", HISTORY, reasoning="my secret")
        assert judge(stub).rate([exchange]).scores_N.tolist() == [1.0]
    assert "my secret" not in json.dumps(stub.requests)


def test_agents_of_a_text_protocol_read_answers_without_reasoning(tmp_path: Path) -> None:
    game = build_text_game("adp", tmp_path)
    model = retrying("<think>\nI must win.\n</think>\n\nDecision: accept")
    journal = AnswerJournal(tmp_path / "answers.jsonl")
    ends = play(game, model, journal=journal)
    rollouts = rollouts_of(game, ends)
    raw, reasoning = (rollouts["agents", name] for name in ("raw_message", "reasoning"))
    active = rollouts["agents", "is_active"]
    assert {*raw[active]} == {"Decision: accept"}
    assert {*reasoning[active]} == {"I must win."}
    assert not any("win" in prompt for prompt in rollouts["agents", "prompt"][active])
    # As a resumed run reads them.
    again = play(game, model, journal=AnswerJournal(tmp_path / "answers.jsonl"))
    assert [node.moves for node in again[0].path()] == [node.moves for node in ends[0].path()]


def test_an_agent_without_an_answer_sends_nothing(tmp_path: Path) -> None:
    game = build_text_game("adp", tmp_path)
    ends = play(game, retrying("<think>\nDecision: accept"))
    rollouts = rollouts_of(game, ends)
    active = rollouts["agents", "is_active"]
    assert rollouts["agents", "is_filled"][active].all()
    assert (rollouts["decision"] == 2).all()
    faults = [
        {move.parsed.fault for node in end.path() for move in node.moves.values()}
        for end in (*ends, *play(game, retrying("")))
    ]
    assert faults[0].isdisjoint(faults[1]), "the reason is not that it is empty"


def test_a_refusal_beside_reasoning_is_a_reply() -> None:
    answer = ChatAnswer("", FinishReason.STOP, refusal="no", reasoning="Hm.")
    assert not answer.is_missing
    assert split_answer(answer, None) == answer
