"""Where the runs of a sweep are done: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Protocol

from nip_astra.sweep.orders import RunOrder, carry_out
from nip_astra.utils.ray_cluster import open_ray

MAX_RETRIES = 3
"""How often Ray does a run again whose worker died; each goes on where the last one was."""


class Job(Protocol):
    """A run that is being done."""

    def has_ended(self) -> bool:
        """Say whether it is done, well or not."""

    def stop(self) -> None:
        """Ask it to save its work and end."""

    def fault(self) -> str:
        """What kept it from being done at all; empty where the run's own log tells."""


class Place(Protocol):
    """What does runs.

    Attributes
    ----------
    num_at_once : int
        Runs that are done at the same time.
    """

    num_at_once: int

    def start(self, order: RunOrder) -> Job:
        """Begin a run, or go on with it."""


class LocalProcesses:
    """Each run is a process of this machine."""

    def __init__(self, num_at_once: int) -> None:
        self.num_at_once = num_at_once

    def start(self, order: RunOrder) -> Job:
        return _Process(order)


class _Process:
    def __init__(self, order: RunOrder) -> None:
        self._process = order.start()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def fault(self) -> str:
        return ""


class RayTasks:
    """Each run is a task of a Ray cluster, on any of its machines.

    All machines see the sweep's folder under the same path. A task whose worker died is done again
    by Ray, and goes on from the run's latest checkpoint.

    Parameters
    ----------
    address : str or None
        Of the cluster; None takes RAY_ADDRESS of the environment, or starts Ray on this machine.
    num_at_once : int or None
        None for as many as the cluster has room for now.
    num_cpus, num_gpus : float
        What a run takes of a machine.

    Raises
    ------
    MissingDependencyError
        When Ray is not installed.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_at_once: int | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
    ) -> None:
        self._ray = open_ray(address)
        self._task = self._ray.remote(
            num_cpus=num_cpus, num_gpus=num_gpus, max_retries=MAX_RETRIES
        )(carry_out)
        self.num_at_once = num_at_once or self._room(num_cpus, num_gpus)

    def start(self, order: RunOrder) -> Job:
        Path(order.stop).unlink(missing_ok=True)
        return _Task(self._ray, self._task.remote(order), order)

    def _room(self, num_cpus: float, num_gpus: float) -> int:
        there = self._ray.cluster_resources()
        asked = {"CPU": num_cpus, "GPU": num_gpus}
        rooms = [there.get(name, 0) // amount for name, amount in asked.items() if amount]
        return max(1, int(min(rooms, default=1)))


class _Task:
    def __init__(self, ray: Any, reference: Any, order: RunOrder) -> None:
        self._ray, self._reference, self._order = ray, reference, order
        self._fault = ""

    def has_ended(self) -> bool:
        ended, _ = self._ray.wait([self._reference], timeout=0)
        if not ended:
            return False
        try:
            self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            # The sweep goes on; the run is told as one that failed.
            self._fault = str(error).strip().rpartition("\n")[2]
        Path(self._order.stop).unlink(missing_ok=True)
        return True

    def stop(self) -> None:
        Path(self._order.stop).touch()

    def fault(self) -> str:
        return self._fault
