"""Usage of chat models in results, in metrics, and in the estimate of a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.errors import NothingMeasuredError, counted
from nip_astra.language_models.services.retrying import RetryingChatModel

MAX_FAILED_SHARE = 0.2
"""Share of failed requests above which a run warns."""


def services_used(services: Mapping[str, RetryingChatModel]) -> dict[str, Any]:
    """Return the usage of chat models, under `services`; empty without any."""
    if not services:
        return {}
    return {"services": {name: model.use.to_dict() for name, model in services.items()}}


def total_cost(services: Mapping[str, RetryingChatModel]) -> float | None:
    """Return the total cost of chat models so far; None without prices."""
    costs = [model.use.cost for model in services.values()]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def warnings_about_services(services: Mapping[str, RetryingChatModel]) -> list[str]:
    """Return warnings about services with many failed requests."""
    found = []
    for name, model in services.items():
        use = model.use
        num_failed = sum(use.failures.values())
        if num_failed > MAX_FAILED_SHARE * use.num_requests:
            reasons = ", ".join(f"{count} {reason}" for reason, count in use.failures.items())
            found.append(
                f"{num_failed} of {counted(use.num_requests, 'request')} to the {name}, "
                f"{use.model!r}, failed ({reasons}). Look at the service, its limits and the "
                "messages' roles: what has no answer enters no rate."
            )
    return found


def refuse_unanswered(services: Mapping[str, RetryingChatModel]) -> None:
    """Raise NothingMeasuredError if every request to a chat model failed."""
    for name, model in services.items():
        use = model.use
        if use.num_requests and not use.num_samples and not use.num_cached:
            reasons = ", ".join(f"{count} {reason}" for reason, count in use.failures.items())
            place = f" at {model.place}" if model.place else ""
            raise NothingMeasuredError(
                f"none of {counted(use.num_requests, 'request')} to the {name}, "
                f"{use.model!r}{place}, was answered "
                f"({reasons}); the last: {model.last_failure or 'unknown'}. Check the service, "
                "then run nip-astra resume RUN."
            )


def last_failure(services: Mapping[str, RetryingChatModel]) -> str:
    """Return why requests failed recently, by model; empty if none did."""
    failures = [f"{name}: {model.last_failure}" for name, model in services.items()]
    return "; ".join(text for text in failures if not text.endswith(": "))


def service_metrics(services: Mapping[str, RetryingChatModel]) -> dict[str, float]:
    """Return the usage of chat models so far, as metrics."""
    found = {}
    for name, model in services.items():
        use, key = model.use, f"services/{name.replace(' ', '_')}"
        found[f"{key}_requests"] = float(use.num_requests)
        found[f"{key}_tokens"] = float(use.prompt_tokens + use.completion_tokens)
        found[f"{key}_refusals"] = float(use.num_refusals)
        found[f"{key}_failures"] = float(sum(use.failures.values()))
        if use.cost is not None:
            found[f"{key}_cost"] = use.cost
    return found


def estimate_services(
    services: Mapping[str, RetryingChatModel], num_episodes: float
) -> dict[str, Any]:
    """Estimate the usage of chat models in a run of `num_episodes`, from one training episode."""
    found: dict[str, Any] = {}
    for name, model in services.items():
        use = model.use
        tokens = use.prompt_tokens + use.completion_tokens
        key = name.replace(" ", "_")
        found[f"{key}_requests"] = round(use.num_requests * num_episodes)
        found[f"{key}_tokens"] = round(tokens * num_episodes)
        found[f"{key}_cost"] = None if use.cost is None else use.cost * num_episodes
        found[f"{key}_seconds_per_request"] = use.median_seconds
    return found


def usage_metrics(
    counts: Mapping[str, int], services: Mapping[str, RetryingChatModel]
) -> dict[str, str]:
    """Return counts and, if prices are known, the cost, for the progress bar."""
    cost = total_cost(services)
    shown = {name: str(count) for name, count in counts.items()}
    return shown if cost is None else shown | {"cost": f"{cost:.4g}"}


def cost_metrics(
    counts: Mapping[str, int], services: Mapping[str, RetryingChatModel]
) -> dict[str, float]:
    """Return the same counts and cost as metrics."""
    cost = total_cost(services)
    found = {f"cost/{name}": float(count) for name, count in counts.items()}
    return found if cost is None else found | {"cost/money": cost}
