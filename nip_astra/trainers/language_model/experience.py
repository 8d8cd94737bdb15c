"""What an iteration of a language model's trainer gathers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
