"""The connection to a Ray cluster, or to Ray on this machine."""

from __future__ import annotations

import logging
import os
import signal
import threading
from math import ceil
from typing import Any

from nip_astra.errors import ConfigurationError, MissingDependencyError, WorkerProcessError
from nip_astra.trust import read_variable
from nip_astra.utils.processor import num_cores

_USAGE = "RAY_USAGE_STATS_ENABLED"
_NICENESS = "RAY_worker_niceness"
_GPU_RULE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def open_ray(address: str | None = None, *, num_cpus: float = 0) -> Any:
    """The package Ray, connected; one that is connected already stays so.

    Parameters
    ----------
    address : str, optional
        Of a running cluster, or "auto" for the one of this machine. Without it, RAY_ADDRESS of the
        environment holds; without that, Ray is started here and ends with this process.
    num_cpus : float
        Cores that Ray counts on this machine at least, where it is started here.
    """
    # Ray would tell its makers about the machine; whoever wants that sets the variable.
    os.environ.setdefault(_USAGE, "0")
    os.environ.setdefault(_GPU_RULE, "0")
    # Workers that Ray begins here would give way to every other process of the machine.
    os.environ.setdefault(_NICENESS, "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"work was to be done on Ray, but the package ray cannot be imported: {error}. Install "
            "it with: pip install 'nip_astra[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    place = address or read_variable("RAY_ADDRESS") or "local"
    is_here = place == "local"
    handlers = [(one, signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM)]
    try:
        ray.init(
            address=place,
            include_dashboard=False if is_here else None,
            num_cpus=max(num_cores(), ceil(num_cpus)) if is_here else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"Ray was to be reached at {place!r}, but it cannot be: {error}. Give the address of a "
            "running cluster by --settings ray_address=HOST:6379, or none to start Ray here."
        ) from error
    finally:
        # Ray would end the process at once, where a run saves its work first.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers:
                signal.signal(number, handler)
    return ray


def check_ray_lives(ray: Any) -> None:
    """Refuse to go on with a Ray of this machine of which a process has ended.

    Its library would end this process too, without a word, at the next use of its object store.
    """
    node = getattr(getattr(getattr(ray, "_private", None), "worker", None), "_global_node", None)
    for name, process in () if node is None else node.dead_processes():
        # It does without its dashboard and logs.
        if name in ("raylet", "gcs_server"):
            raise WorkerProcessError(
                f"the process {name!r} of Ray ({process.pid}) has ended, as for want of memory. "
                "Use fewer actors, or none with --settings num_actors=0."
            )
