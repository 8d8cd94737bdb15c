"""How fast and how patiently a service is asked, and what it costs."""

from __future__ import annotations

from pydantic import Field

from nip_astra.language_models.services.usage import ChatUsage
from nip_astra.parameters.parameters_base import SubParameters

TOKENS_PRICED = 1_000_000


class LimitParameters(SubParameters):
    """How fast and how patiently a chat model is asked."""

    concurrency: int = Field(default=16, ge=1)
    """Requests under way at once. Larger is faster, where the service takes it."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Attempts begun in a minute, evenly spread; null for no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Tokens read and said in a minute, evenly spread; before its answer a request counts as its
    messages and `max_tokens`. null for no limit."""
    num_retries: int = Field(default=5, ge=0)
    """Further attempts where a service is busy, late, broken, or off its protocol."""
    backoff: float = Field(default=1.0, ge=0)
    """Seconds before the first further attempt, doubled for each next one, at most 60, of which a
    random half may be left out; what the service asks for in Retry-After is waited for where it is
    longer."""
    attempt_timeout: float = Field(default=600.0, gt=0)
    """Seconds after which an attempt is given up, though bytes may still come."""


class PriceParameters(SubParameters):
    """What a service charges; any currency, the same for all models of a run."""

    prompt: float = Field(ge=0)
    """Price of a million tokens that the model reads."""
    completion: float = Field(ge=0)
    """Price of a million tokens that the model says."""

    def cost(self, usage: ChatUsage) -> float:
        """The price of a request."""
        read, said = usage
        return (read * self.prompt + said * self.completion) / TOKENS_PRICED
