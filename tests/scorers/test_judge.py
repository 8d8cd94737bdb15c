"""A judge behind a service: its requests, the value of its answers, the results of failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from nip_astra.errors import ScorerError
from nip_astra.scorers.base import Exchange
from nip_astra.scorers.judge import JudgeScorer, find_rating
from tests.kit.chat_stub import ChatStub, Reply, chat_stub, rating
from tests.kit.messages import says
from tests.kit.scorers import HISTORY, scorer_on_cpu
from tests.language_models.services.requests import completion

pytest.importorskip("openai")


def build(stub: ChatStub, **parameters: Any) -> JudgeScorer:
    where = {"base_url": stub.base_url, "model": "judge-1", "backoff": 0.0}
    return scorer_on_cpu(JudgeScorer, **where | parameters)


def material_of(body: dict[str, Any]) -> dict[str, Any]:
    """What the judge is to rate."""
    material: dict[str, Any] = json.loads(body["messages"][1]["content"])
    return material


def by_text(scores: dict[str, Any]) -> Callable[[dict[str, Any], int], Reply]:
    """Answer by the text to be rated."""

    def answer(body: dict[str, Any], number: int) -> Reply:
        reply = scores[material_of(body)["turn_to_rate"]["text"]]
        return reply if isinstance(reply, Reply) else rating(reply)

    return answer


def test_the_score_is_the_rating_by_its_largest_and_null_is_no_verdict() -> None:
    with chat_stub(by_text({"a": 0, "b": 3, "c": 10, "d": None})) as stub:
        ratings = build(stub).rate([Exchange(text) for text in "cabd"])
        assert len(stub.requests) == 4
    assert ratings.scores_N[:3].tolist() == pytest.approx([1.0, 0.0, 0.3])
    assert math.isnan(ratings.scores_N[3])
    assert not ratings.is_error_N.any()
    with chat_stub([rating(3)]) as stub:
        assert build(stub, max_rating=4).score(["a"]).item() == 0.75


def test_the_columns_beside_a_prompt_reach_the_judge_as_material() -> None:
    goals = [(("goal", "rudeness"), ("n", 3)), (("goal", "calm"),), ()]
    with chat_stub([rating(1)] * 3) as stub:
        scorer = build(stub, concurrency=1)
        scorer.rate([Exchange("same", HISTORY, columns=columns) for columns in goals])
    columns = [material_of(body).get("columns") for body in stub.requests]
    assert columns == [{"goal": "rudeness", "n": 3}, {"goal": "calm"}, None]
    systems = [body["messages"][0]["content"] for body in stub.requests]
    assert ['"columns"' in system for system in systems] == [True, True, False]


def test_its_request_holds_the_conversation_as_material_with_the_rubric() -> None:
    with chat_stub([rating(1)]) as stub:
        build(stub, rubric="0: fine. 5: not.", max_rating=5, temperature=0.5, max_tokens=99).rate(
            [Exchange('no "quotes" é', HISTORY)]
        )
    (body,) = stub.requests
    assert body["model"] == "judge-1"
    assert (body["temperature"], body["max_tokens"]) == (0.5, 99)
    system, user = body["messages"]
    assert system["role"] == "system"
    assert says(system["content"], "0: fine. 5: not.", "from 0 to 5")
    assert json.loads(user["content"]) == {
        "history": [{"role": turn.role, "text": turn.text} for turn in HISTORY],
        "turn_to_rate": {"role": "assistant", "text": 'no "quotes" é'},
    }
    form = body["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["reason", "rating"]


def test_fields_can_be_left_out_and_added() -> None:
    more = {"seed": 3, "max_completion_tokens": 50}
    with chat_stub([rating(1)]) as stub:
        fewer = {"temperature": None, "max_tokens": None, "response_format": "text"}
        build(stub, **fewer, extra_body=more).score(["a"])
    assert set(stub.requests[0]) == {"model", "messages", "seed", "max_completion_tokens"}
    with chat_stub([rating(1)]) as stub:
        build(stub, response_format="json_object").score(["a"])
    assert stub.requests[0]["response_format"] == {"type": "json_object"}


def test_a_format_that_the_service_refuses_is_requested_once() -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        if "response_format" in body:
            return Reply(400, body="unknown field response_format")
        return Reply(content='Let me see. {"rating": 5} is what I would say.')

    with chat_stub(answer) as stub:
        scorer = build(stub, concurrency=1)
        assert scorer.score(["a", "b"]).tolist() == [0.5, 0.5]
        assert ["response_format" in body for body in stub.requests] == [True, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        *map(rating, ("five", True, [5], "1e999")),
        *(Reply(content=text) for text in ("", "five", "[3]", '{"score": 5}', '{"rating": NaN}')),
        Reply(content="{" * 5000),
        Reply(body="not json"),
        Reply(429),
        Reply(503),
    ],
)
def test_an_invalid_rating_is_requested_again_and_then_a_failure(wrong: Reply) -> None:
    with chat_stub([wrong, wrong, rating(5)]) as stub:
        assert build(stub, num_retries=2).score(["a"]).item() == 0.5
    with chat_stub([wrong, wrong]) as stub:
        with pytest.raises(ScorerError) as caught:
            build(stub, num_retries=1).score(["a"])
        assert len(stub.requests) == 2
    facts = ("'a'", "'judge-1'", stub.base_url, "2 attempts", "num_retries", "timeout")
    assert says(caught.value, *facts)


@pytest.mark.parametrize("given", ["7", " 7 ", "7.0", 7, 7.0])
def test_a_rating_may_be_a_number_in_a_text(given: Any) -> None:
    with chat_stub([rating(given)]) as stub:
        assert build(stub).score(["a"]).item() == pytest.approx(0.7)


@pytest.mark.parametrize(
    "answer",
    [
        *map(rating, (11, -1, "11", "-1", 1e999)),
        completion('{"rating": 0} on second thought {"rating": 7}', finish_reason="length"),
        completion('I would say {"rating": 0}, but', finish_reason="length"),
        completion(None, finish_reason="length"),
        completion('{"rating": 0}', finish_reason="content_filter"),
        completion(None, message={"role": "assistant", "content": None, "refusal": "I cannot."}),
        completion('{"rating": 0, "reason": "' + "so " * 1_000_000 + '"}'),
        Reply(400, body='{"error": {"code": "context_length_exceeded", "message": "no"}}'),
    ],
)
def test_a_rating_out_of_range_and_an_answer_that_is_no_whole_one_are_no_verdict(
    answer: Reply,
) -> None:
    with chat_stub([answer]) as stub:
        ratings = build(stub, num_retries=3).rate([Exchange("a")])
        assert len(stub.requests) == 1, "asking until there is a rating would select ratings"
    assert math.isnan(ratings.scores_N.item())
    assert not ratings.is_error_N.any()


def test_a_text_that_fails_for_good_is_an_error_and_the_others_count() -> None:
    scores = {"a": 5, "b": Reply(500, body="oops"), "c": Reply(400, body="too long"), "d": None}
    with chat_stub(by_text(scores)) as stub:
        ratings = build(stub, num_retries=2, on_failure="skip").rate(
            [Exchange(text) for text in "abcd"]
        )
        # Each of the two passing texts, three attempts at "b", one at "c": no second round.
        assert len(stub.requests) == 6
    assert ratings.is_error_N.tolist() == [False, True, True, False]
    assert ratings.scores_N[0].item() == 0.5


def test_the_key_is_read_from_the_variable_and_written_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", " my-own-key \n")
    caplog.set_level("DEBUG", logger="nip_astra")
    with chat_stub([Reply(500, body="my-own-key"), rating(5)]) as stub:
        scorer = build(stub, api_key_variable="JUDGE_KEY", num_retries=0, on_failure="skip")
        scorer.rate([Exchange("a")])
        scorer.rate([Exchange("a")])
        assert stub.headers[0]["Authorization"] == "Bearer my-own-key"
    assert "my-own-key" not in json.dumps(scorer.parameters.to_dict())
    assert "my-own-key" not in repr(scorer.parameters)
    assert len(caplog.records) == 1
    assert "my-own-key" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"rating": 3}', 3),
        ('```json\n{"reason": "so", "rating": 3}\n```', 3),
        ('{"rating": 1} no, rather {"rating": 3}', 3),
        ('I think {this} is {"a": 1} or {"reason": "{}", "rating": 3}.', 3),
        ('{"outer": {"rating": 3}', 3),
        ('{"rating": null}', None),
        ('{"reason": "so\n it \t is", "rating": 3}', 3),
        ('{"reason": "so, }", "rating": 3,}', 3),
        ('{"rating": 1} no: "{"rating": 3 , \n}', 3),
        ('{"reason": ["a", "b",], "rating": "3"}', "3"),
    ],
)
def test_a_rating_is_found_amid_other_words(answer: str, expected: int | None) -> None:
    assert find_rating(answer)["rating"] == expected
