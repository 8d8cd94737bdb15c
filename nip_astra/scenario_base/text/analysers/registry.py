"""The registry of rollout analysers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.registry import Registry
from nip_astra.scenario_base.text.analysers.base import RolloutAnalyser

Cls = TypeVar("Cls", bound=type[RolloutAnalyser])

ROLLOUT_ANALYSERS: Registry[type[RolloutAnalyser]] = Registry(
    "rollout_analyser",
    package="nip_astra.scenario_base.text.analysers",
    members=RolloutAnalyserType,
    modules=dict.fromkeys(RolloutAnalyserType, "library"),
)


def register_rollout_analyser(name: str) -> Callable[[Cls], Cls]:
    """Register a `RolloutAnalyser` subclass under the name by which it is asked for."""

    def decorate(cls: Cls) -> Cls:
        claim_parameters(cls, name)
        ROLLOUT_ANALYSERS.register(name)(cls)
        return cls

    return decorate


def build_rollout_analysers(chosen: Iterable[str | Any]) -> list[RolloutAnalyser]:
    """Analysers by names, or by their parameters.

    Raises
    ------
    UnknownNameError
        For a name that nothing is registered under.
    """
    found = []
    for one in chosen:
        name = one if isinstance(one, str) else one.type_name
        cls = ROLLOUT_ANALYSERS.get(name)
        found.append(cls(cls.Parameters() if isinstance(one, str) else one))
    return found
