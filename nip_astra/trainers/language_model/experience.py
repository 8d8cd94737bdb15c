"""What an iteration of a language model's trainer gathers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.rollouts.samples import Sample


@dataclass(frozen=True)
class Experience:
    """What an iteration gathered.

    Attributes
    ----------
    samples : list of Sample
        What is learnt from; an iteration without any takes no step.
    metrics : dict[str, float]
        What is logged of it; `tokens/generated` gives the speed that the bar shows.
    seconds : Mapping[str, float]
        How long parts of the collecting took.
    """

    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def check_experience(found: Any, *, owner: str) -> Experience:
    """What a trainer's `collect` returned, where it is an `Experience` of lists and numbers.

    Parameters
    ----------
    owner : str
        Name of the trainer's class, for the message.

    Raises
    ------
    ConfigurationError
        When it is something else.
    """
    if not isinstance(found, Experience):
        raise _wrong(owner, "collect", found, "an Experience(samples, metrics)")
    for name in ("metrics", "seconds"):
        if not isinstance(getattr(found, name), Mapping):
            raise _wrong(owner, "collect", getattr(found, name), f"a dict of numbers as {name}")
    samples = check_samples(found.samples, owner=owner, hook="collect")
    return replace(found, samples=samples, metrics=dict(found.metrics))


def check_samples(found: Any, *, owner: str, hook: str) -> list[Any]:
    """The samples that a hook returned as a list.

    Raises
    ------
    ConfigurationError
        When it returned something else.
    """
    if not isinstance(found, list | tuple):
        raise _wrong(owner, hook, found, "a list of samples, which may be empty")
    return list(found)


def _wrong(owner: str, hook: str, found: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"{hook} of the trainer {owner} returned {str(found)[:60]!r} ({type(found).__name__}). It "
        f"must return {wanted}."
    )
