"""Parameters: everything that changes the result of an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import exports_for_types, lazy_exports

if TYPE_CHECKING:
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.parameters_base import (
        PolymorphicParameters as PolymorphicParameters,
    )
    from nip_astra.parameters.parameters_base import SubParameters as SubParameters
    from nip_astra.parameters.parameters_base import polymorphic as polymorphic
    from nip_astra.parameters.training import TrainingConfiguration as TrainingConfiguration

_HOMES = exports_for_types(__file__)

__all__ = [*_HOMES]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
