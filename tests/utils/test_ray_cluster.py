"""Where Ray is reached, and the message if it cannot be."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nip_astra.errors import (
    ConfigurationError,
    ContextLengthError,
    MissingDependencyError,
    NipAstraError,
    WorkerProcessError,
)
from nip_astra.utils.actors import results_of
from nip_astra.utils.ray_cluster import open_ray


class Ray(SimpleNamespace):
    """A stand-in that records its arguments, and handles signals like the real Ray."""

    def __init__(self) -> None:
        super().__init__(given=[], fault=None)

    def is_initialized(self) -> bool:
        return False

    def init(self, **given: Any) -> None:
        self.given.append(given)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    result = Ray()
    monkeypatch.setitem(sys.modules, "ray", result)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return result


def test_the_cluster_is_the_requested_then_that_of_the_environment_then_local(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    open_ray(num_cpus=1000)
    monkeypatch.setenv("RAY_ADDRESS", "there:1")
    open_ray(num_cpus=1000)
    open_ray("elsewhere:2")
    assert [item["address"] for item in ray.given] == ["local", "there:1", "elsewhere:2"]
    assert [item["num_cpus"] for item in ray.given] == [1000, None, None]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_cluster_or_package_is_reported(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.fault = ConnectionError("nobody answers")
    with pytest.raises(ConfigurationError, match=r"'far:6379'.*nobody answers.*ray_address"):
        open_ray("far:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[ray\]"):
        open_ray()


def test_a_process_of_ray_that_has_ended_is_named() -> None:
    raylet = SimpleNamespace(pid=17)
    dead: list[Any] = []
    node = SimpleNamespace(dead_processes=lambda: dead)
    ray = SimpleNamespace(
        _private=SimpleNamespace(worker=SimpleNamespace(_global_node=node)),
        exceptions=SimpleNamespace(
            GetTimeoutError=TimeoutError, RayTaskError=KeyError, RayError=IndexError
        ),
    )

    def get(_: list[Any], timeout: float) -> None:
        # It ends while its results are awaited.
        dead.append(("raylet", raylet))
        raise TimeoutError

    ray.get = get
    with pytest.raises(WorkerProcessError, match=r"raylet.*17"):
        results_of(ray, [])


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RuntimeError("heads of 24"), WorkerProcessError),
        (ContextLengthError("heads of 24"), ContextLengthError),
    ],
)
def test_an_error_in_an_actor_is_reported_whatever_its_ray_class(
    cause: Exception, kind: type[NipAstraError]
) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    raised = exceptions.RayTaskError("generate", "heads of 24, in line 7", cause)

    def get(_: list[Any], timeout: float) -> None:
        raise raised.as_instanceof_cause()

    with pytest.raises(kind) as caught:
        results_of(SimpleNamespace(get=get, exceptions=exceptions), [])
    message = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert type(caught.value) is kind
    assert "heads of 24, in line 7" in message
