"""Actors without Ray: calls are written, and read by actors of this process."""

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
    """A stand-in for an object reference of Ray's."""

    def __init__(self, value: object) -> None:
        self.value = value


class ActorsHere:
    """`Actors` without Ray: calls are written, and read by actors of this process."""

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
        """Write calls now, and make them when their results are asked for."""
        self.sender.keep(kept)
        weights, references = self.sender.weights(), list(self.sender.references)
        # As the object store would, they are kept as they are now.
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
        """Nothing was begun."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[ActorsHere]:
    """Have actors be of this process; those that were opened."""
    made: list[ActorsHere] = []

    def make(options: ActorOptions) -> ActorsHere:
        made.append(ActorsHere(options.num_actors))
        return made[-1]

    monkeypatch.setattr(actors_module, "Actors", make)
    # TorchRL looks for its specification when it is imported.
    spec = ModuleSpec("ray", None)
    ray = SimpleNamespace(get=lambda reference: reference.value, __spec__=spec)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return made
