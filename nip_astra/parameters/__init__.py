"""Parameters: everything that changes the result of an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.training import TrainingConfiguration as TrainingConfiguration

__all__ = ["HyperParameters", "TrainingConfiguration"]


def __getattr__(name: str) -> Any:
    if name == "HyperParameters":
        from nip_astra.parameters.hyper_parameters import HyperParameters

        return HyperParameters
    if name == "TrainingConfiguration":
        from nip_astra.parameters.training import TrainingConfiguration

        return TrainingConfiguration
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
