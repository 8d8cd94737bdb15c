"""The registry of scorers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import ScorerType
from nip_astra.registry import Registry
from nip_astra.scorers.base import Scorer

SCORERS: Registry[type[Scorer]] = Registry(
    "scorer", package="nip_astra.scorers", members=ScorerType
)


def register_scorer(name: str) -> Callable[[type[Scorer]], type[Scorer]]:
    """Register a `Scorer` subclass under the `_type` by which parameter files name it."""

    def decorate(cls: type[Scorer]) -> type[Scorer]:
        claim_parameters(cls, name)
        return SCORERS.register(name)(cls)

    return decorate


def build_scorer(parameters: Any, *, device: torch.device, scenario_dir: Path | None) -> Scorer:
    """The scorer that the parameters describe."""
    return SCORERS.get(parameters.type_name)(parameters, device=device, scenario_dir=scenario_dir)
