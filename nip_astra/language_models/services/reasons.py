"""Reasons why an answer ended, and why a turn has none."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """The reason why an answer ended."""

    STOP = "stop"
    """The model ended its turn, or generated a stop text."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    CONTENT_FILTER = "content_filter"
    """The service withheld the rest."""


class FailureReason(StrEnum):
    """The reason why a valid request has no answer."""

    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """No connection, a lost one, or a server error in all attempts."""
    RATE_LIMITED = "rate_limited"
    """The service refused all attempts because of its limits."""
    REFUSED = "refused"
    """The service rejected this request; one that its content filter rejects is an answer with the
    finish reason `FinishReason.CONTENT_FILTER`."""
    CONTEXT_LENGTH = "context_length"
    """The conversation exceeds the model's window."""
    TOO_LONG = "too_long"
    """The answer is far longer than requested (`ChatRequest.longest_text`), or compressed so that
    its length cannot be limited."""
    MALFORMED = "malformed"
    """The response violates the protocol."""
    UNKNOWN_FORM = "unknown_form"
    """The service does not support the `response_format`."""

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        return self not in (
            FailureReason.REFUSED,
            FailureReason.CONTEXT_LENGTH,
            FailureReason.TOO_LONG,
            FailureReason.UNKNOWN_FORM,
        )

    @property
    def is_final(self) -> bool:
        """Whether a caller must not ask again: the model was asked as often as its limits allow, or
        would fail alike.
        """
        return self.may_pass or self is FailureReason.CONTEXT_LENGTH

    @property
    def is_of_service(self) -> bool:
        """Whether the service, and not its answer, is the reason; runs stop then."""
        return self.may_pass and self is not FailureReason.MALFORMED


SKIPPED = "ended"
"""Failure reason of turns after the first failed one of a conversation."""
CUT = "cut"
"""Failure reason of an answer that was cut before its first word, for instance in its reasoning."""
FAILED_ATTACKER = "attacker "
"""Beginning of the failure reason of a turn without a probe."""
MISSING = frozenset({CUT, FailureReason.TOO_LONG, FailureReason.CONTEXT_LENGTH})
"""Failure reasons of answers that are missing although the service works."""
NO_ERRORS = MISSING | {SKIPPED, FailureReason.REFUSED}
"""Failure reasons of turns whose service works: the conversation or its answer is the reason."""


def is_error(failure: str | None) -> bool:
    """Return whether a turn has no response because a service failed.

    Without a response and an error, a turn has no verdict.
    """
    return failure is not None and failure.removeprefix(FAILED_ATTACKER) not in NO_ERRORS
