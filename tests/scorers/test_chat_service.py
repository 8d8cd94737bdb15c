"""A service is asked again where that may help, in measure, and never told of the key in a text."""

from __future__ import annotations

import sys
import threading

import pytest

from nip_astra.errors import ConfigurationError, MissingDependencyError
from nip_astra.scorers.chat_service import ChatService, MalformedAnswerError, ServiceError
from tests.scorers.chat_stub import ChatStub, Reply, chat_stub

pytest.importorskip("httpx")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Watch:
    """A clock that only waiting moves on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def service(stub: ChatStub, watch: Watch | None = None, **options: object) -> ChatService:
    watch = watch or Watch()
    return ChatService(stub.base_url, clock=watch.clock, pause=watch.pause, **options)  # type: ignore[arg-type]


def number(answer: str) -> float:
    try:
        return float(answer)
    except ValueError as error:
        raise MalformedAnswerError(f"the answer {answer!r} is no number") from error


def test_the_answer_is_read() -> None:
    with chat_stub([Reply(content="7")]) as stub:
        assert service(stub).ask({"model": "m"}, number) == 7.0
        assert stub.requests == [{"model": "m"}]
        assert stub.paths == ["/v1/chat/completions"]


def test_a_slash_at_the_end_of_the_address_makes_no_difference() -> None:
    with chat_stub([Reply(content="7")]) as stub:
        stub.base_url += "/"
        service(stub).ask({}, number)
        assert stub.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_what_may_pass_is_tried_again(status: int) -> None:
    watch = Watch()
    with chat_stub([Reply(status, "busy"), Reply(status, "busy"), Reply(content="7")]) as stub:
        assert service(stub, watch, backoff=2.0).ask({}, number) == 7.0
    assert watch.waits == [2.0, 4.0]


def test_waiting_grows_up_to_a_minute_and_ends_with_the_reason() -> None:
    watch = Watch()
    with chat_stub([Reply(500, body="out of\n order")] * 8) as stub:
        with pytest.raises(ServiceError, match=r"^status 500 out of order \(8 attempts\)$"):
            service(stub, watch, num_retries=7).ask({}, number)
        assert len(stub.requests) == 8
    assert watch.waits == [1, 2, 4, 8, 16, 32, 60]


@pytest.mark.parametrize(
    ("header", "expected"), [("7", 7.0), ("0.2", 1.0), ("soon", 1.0), ("-3", 1.0), ("9999", 300.0)]
)
def test_what_the_service_asks_to_wait_is_waited(header: str, expected: float) -> None:
    watch = Watch()
    with chat_stub([Reply(429, headers={"Retry-After": header}), Reply(content="7")]) as stub:
        service(stub, watch).ask({}, number)
    assert watch.waits == [expected]


def test_a_late_answer_is_given_up_and_tried_again() -> None:
    never = threading.Event()
    watch = Watch()
    with chat_stub([Reply(waits_for=never), Reply(content="7")]) as stub:
        assert service(stub, watch, timeout=0.05).ask({}, number) == 7.0
        never.set()
    assert watch.waits == [1.0]


def test_late_answers_alone_are_told() -> None:
    never = threading.Event()
    with chat_stub([Reply(waits_for=never)] * 2) as stub:
        with pytest.raises(ServiceError, match=r"^ReadTimeout timed out \(2 attempts\)$"):
            service(stub, timeout=0.05, num_retries=1).ask({}, number)
        never.set()


def test_a_service_that_is_not_there_is_told() -> None:
    with chat_stub([]) as stub:
        asked = service(stub, num_retries=1)
    with pytest.raises(ServiceError, match=r"^ConnectError .*\(2 attempts\)$"):
        asked.ask({}, number)


def test_a_malformed_answer_is_asked_for_again_at_once() -> None:
    watch = Watch()
    replies = [
        Reply(content="seven"),
        Reply(body="<html>"),
        Reply(body="[]"),
        Reply(body='{"choices": []}'),
        Reply(content=None),
        Reply(content="7"),
    ]
    with chat_stub(replies) as stub:
        assert service(stub, watch).ask({}, number) == 7.0
        assert len(stub.requests) == 6
    assert watch.waits == []


def test_answers_that_stay_malformed_are_told() -> None:
    with (
        chat_stub([Reply(content="seven")] * 3) as stub,
        pytest.raises(ServiceError, match=r"^the answer 'seven' is no number \(3 attempts\)$"),
    ):
        service(stub, num_retries=2).ask({}, number)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_is_not_sent_again(status: int) -> None:
    with chat_stub([Reply(status, body="too long")]) as stub:
        with pytest.raises(ServiceError, match=f"^status {status} too long$") as caught:
            service(stub).ask({}, number)
        assert len(stub.requests) == 1
    assert caught.value.is_about_format is False


def test_a_form_that_is_refused_is_known() -> None:
    reply = Reply(400, body='{"error": "Unsupported parameter: response_format"}')
    with chat_stub([reply]) as stub, pytest.raises(ServiceError) as caught:
        service(stub).ask({}, number)
    assert caught.value.is_about_format is True


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405])
def test_what_no_other_request_would_mend_is_a_wrong_configuration(status: int) -> None:
    with chat_stub([Reply(status, body="no", headers={"Location": "/x"})]) as stub:
        with pytest.raises(ConfigurationError, match=f"answered with status {status}.*Check base"):
            service(stub).ask({}, number)
        assert len(stub.requests) == 1


def test_the_key_is_sent_and_shown_nowhere() -> None:
    key = "a-key-that-nobody-sees"
    replies = [
        Reply(401, body=f"wrong key {key}"),
        Reply(404, body=f"no model for {key}"),
        Reply(400, body=f"bad {key}"),
        Reply(500, body=f"oops {key}"),
        Reply(body=f"{key}"),
    ]
    with chat_stub(replies) as stub:
        asked = service(stub, api_key=key, num_retries=0)
        for _ in replies:
            with pytest.raises((ConfigurationError, ServiceError)) as caught:
                asked.ask({}, number)
            assert key not in str(caught.value)
            assert key not in repr(caught.value.__cause__)
        assert {header["Authorization"] for header in stub.headers} == {f"Bearer {key}"}


def test_without_a_key_none_is_sent() -> None:
    with chat_stub([Reply(content="7")]) as stub:
        service(stub).ask({}, number)
        assert "Authorization" not in stub.headers[0]


def test_attempts_are_spread_over_the_minute() -> None:
    watch = Watch()
    with chat_stub([Reply(content="7"), Reply(500), *[Reply(content="7")] * 2]) as stub:
        asked = service(stub, watch, requests_per_minute=30, backoff=0.5)
        for _ in range(3):
            asked.ask({}, number)
    # One begins every two seconds; the backoff of half a second is part of them.
    assert watch.waits == [2.0, 0.5, 1.5, 2.0]


def test_a_service_that_was_stopped_begins_nothing() -> None:
    with chat_stub([Reply(content="7")]) as stub:
        asked = service(stub)
        asked.stop()
        with pytest.raises(ServiceError, match="it was stopped"):
            asked.ask({}, number)
        assert stub.requests == []
        asked.go_on()
        assert asked.ask({}, number) == 7.0


@pytest.mark.parametrize(
    "address",
    ["http://me:secret@127.0.0.1/v1", "http://127.0.0.1/v1?key=secret", "http://127.0.0.1/v1#a"],
)
def test_an_address_that_holds_a_secret_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ChatService(address)
    assert "it holds a user, a password or a query, which would be written" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_without_its_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingDependencyError) as caught:
        ChatService("http://127.0.0.1/v1")
    assert "the scorer 'judge' was asked for, and it needs the package httpx" in str(caught.value)
    assert "pip install 'nip_astra[judge]'" in str(caught.value)
