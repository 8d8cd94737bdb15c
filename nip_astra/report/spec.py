"""What a section of the page is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Context = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A section: `build` gives what its template needs, or None where there is nothing to show."""

    name: str
    title: str
    build: Callable[[], Context | None]
