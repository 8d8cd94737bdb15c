"""The connection to a Ray cluster, or to Ray on this machine."""

from __future__ import annotations

import logging
import os
from typing import Any

from nip_astra.errors import ConfigurationError, MissingDependencyError

_USAGE = "RAY_USAGE_STATS_ENABLED"
_GPU_RULE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def open_ray(address: str | None = None) -> Any:
    """The package Ray, connected; one that is connected already stays so.

    Parameters
    ----------
    address : str, optional
        Of a running cluster, or "auto" for the one of this machine. Without it, RAY_ADDRESS of the
        environment holds; without that, Ray is started here and ends with this process.

    Raises
    ------
    MissingDependencyError
        When Ray is not installed.
    ConfigurationError
        When there is no cluster at the address.
    """
    # Ray would tell its makers about the machine; whoever wants that sets the variable.
    os.environ.setdefault(_USAGE, "0")
    os.environ.setdefault(_GPU_RULE, "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"work was to be done on Ray, but the package ray cannot be imported: {error}. Install "
            "it with: pip install 'nip_astra[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        ray.init(
            address=place,
            include_dashboard=False if place == "local" else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"Ray was to be reached at {place!r}, but it cannot be: {error}. Give the address of a "
            "running cluster by --settings ray_address=HOST:6379, or none to start Ray here."
        ) from error
    return ray
