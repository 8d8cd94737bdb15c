"""Actors without Ray: calls are pickled and run by actors of this process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nip_astra.utils import actors as actors_module
from nip_astra.utils.actors import ActorOptions, CallWriter, _Actor


class Reference:
    """A stand-in for Ray's object reference."""

    def __init__(self, value: object) -> None:
        self.value = value


class ActorsHere:
    """`Actors` without Ray: calls are pickled and run by actors of this process."""

    def __init__(self, num_actors: int) -> None:
        self.sent: list[int] = []
        self.sender = CallWriter(self._put)
        threads = torch.get_num_threads()
        self.actors = [_Actor(threads, []) for _ in range(num_actors)]
        self.turn = 0

    def _put(self, value: object) -> Reference:
        self.sent.append(len(value) if isinstance(value, bytes | list) else 0)
        return Reference(value)

    def call(self, calls: list[Callable[[], Any]], kept: list[object]) -> list[Any]:
        return self.begin(calls, kept)()

    def begin(self, calls: list[Callable[[], Any]], kept: list[object]) -> Callable[[], list[Any]]:
        """Pickle calls now, and run them when their results are requested."""
        self.sender.keep(kept)
        weights, references = self.sender.weights(), list(self.sender.references)
        # Arguments keep their present values, as in the object store.
        weights = copy.deepcopy(weights)
        written = [self.sender.dumps(call) for call in calls]
        has_grad = torch.is_grad_enabled()

        def make() -> list[Any]:
            results = []
            for call in written:
                actor = self.actors[self.turn % len(self.actors)]
                self.turn += 1
                results.append(actor.run(references, weights, call, has_grad))
            return results

        return make

    def close(self) -> None:
        """Nothing was started."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[ActorsHere]:
    """Make actors objects of this process; returns the opened actors."""
    made: list[ActorsHere] = []

    def make(options: ActorOptions) -> ActorsHere:
        made.append(ActorsHere(options.num_actors))
        return made[-1]

    monkeypatch.setattr(actors_module, "Actors", make)
    # TorchRL checks for its specification at import.
    spec = ModuleSpec("ray", None)
    ray = SimpleNamespace(get=lambda reference: reference.value, __spec__=spec)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return made
