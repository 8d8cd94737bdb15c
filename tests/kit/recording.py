"""Calls of a function or method, recorded while it runs as before."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest


class Call(NamedTuple):
    """A call that returned; a method's first argument is its object if patched on the class."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


def record_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """Return a list that grows with the calls of `owner.name`."""
    calls: list[Call] = []
    function = getattr(owner, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        calls.append(Call(arguments, options, result))
        return result

    monkeypatch.setattr(owner, name, recorded)
    return calls
