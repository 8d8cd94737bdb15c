"""Connection to a Ray cluster, or to a local Ray instance."""

from __future__ import annotations

import logging
import os
import signal
import threading
from math import ceil
from typing import Any

from nip_astra.errors import ConfigurationError, WorkerProcessError
from nip_astra.lazy import import_extra
from nip_astra.trust import read_variable
from nip_astra.utils.processor import num_cores

_USAGE = "RAY_USAGE_STATS_ENABLED"
_NICENESS = "RAY_worker_niceness"
_GPU_RULE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def open_ray(address: str | None = None, *, num_cpus: float = 0) -> Any:
    """Return the `ray` package, connected; an existing connection is reused.

    Without an address or RAY_ADDRESS, Ray starts on this machine with at least `num_cpus` cores,
    and ends with this process.
    """
    # No usage statistics, unless the variable is set.
    os.environ.setdefault(_USAGE, "0")
    os.environ.setdefault(_GPU_RULE, "0")
    # By default Ray's workers have a lower priority than all other processes.
    os.environ.setdefault(_NICENESS, "0")
    ray = import_extra("ray", "work on Ray", "ray")
    if ray.is_initialized():
        return ray
    cluster = address or read_variable("RAY_ADDRESS") or "local"
    is_local = cluster == "local"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=cluster,
            include_dashboard=False if is_local else None,
            num_cpus=max(num_cores(), ceil(num_cpus)) if is_local else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"Ray cannot be reached at {cluster!r}: {error}. Set --settings ray_address=HOST:6379 "
            "to a running cluster, or leave it out to start Ray here."
        ) from error
    finally:
        # Ray would end the process at once, where a run saves its work first.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return ray


def check_ray_lives(ray: Any) -> None:
    """Raise `WorkerProcessError` if a local Ray process has ended.

    The next use of its object store would end this process silently.
    """
    node = getattr(getattr(getattr(ray, "_private", None), "worker", None), "_global_node", None)
    for name, process in () if node is None else node.dead_processes():
        if name in ("raylet", "gcs_server"):
            raise WorkerProcessError(
                f"the Ray process {name!r} ({process.pid}) has ended, perhaps for lack of memory. "
                "Use fewer actors, or none: --settings num_actors=0."
            )
