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
from tests.kit.messages import says


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


def results_by(exceptions: Any, error: Exception, **others: Any) -> Exception:
    """The error of `results_of` where Ray raises another."""

    def get(_: list[Any], timeout: float) -> None:
        raise error

    with pytest.raises(NipAstraError) as caught:
        results_of(SimpleNamespace(get=get, exceptions=exceptions, **others), [])
    return caught.value


def test_a_process_of_ray_that_has_ended_is_named() -> None:
    # It ends while its results are awaited.
    dead = iter([[], [("raylet", SimpleNamespace(pid=17))]])
    node = SimpleNamespace(dead_processes=lambda: next(dead))
    private = SimpleNamespace(worker=SimpleNamespace(_global_node=node))
    errors = {"GetTimeoutError": TimeoutError, "RayTaskError": KeyError, "RayError": IndexError}
    error = results_by(SimpleNamespace(**errors), TimeoutError(), _private=private)
    assert type(error) is WorkerProcessError
    assert says(error, "raylet", "17")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(RuntimeError, WorkerProcessError), (ContextLengthError, ContextLengthError)],
)
def test_an_error_in_an_actor_is_reported_whatever_its_ray_class(
    cause: type[Exception], kind: type[NipAstraError]
) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    raised = exceptions.RayTaskError("generate", "heads of 24, in line 7", cause("heads of 24"))
    error = results_by(exceptions, raised.as_instanceof_cause())
    assert type(error) is kind
    assert "heads of 24, in line 7" in f"{error} {getattr(error, '__notes__', '')}"
