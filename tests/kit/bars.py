"""A stand-in for tqdm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class RecordedBar:
    """Remembers its calls."""

    def __init__(self, total: int, **_: Any) -> None:
        self.total = total
        self.n = 0
        self.initial = 0
        self.postfixes: list[dict[str, str]] = []
        self.description = ""
        self.is_closed = False

    def update(self, n: int) -> None:
        self.n += n

    def set_description(self, description: str) -> None:
        self.description = description

    def set_postfix(self, values: dict[str, str], refresh: bool) -> None:
        self.postfixes.append(dict(values))

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Bars:
    """Opens bars, as `tqdm_func`."""

    opened: list[RecordedBar] = field(default_factory=list)

    def __call__(self, **options: Any) -> RecordedBar:
        self.opened.append(RecordedBar(**options))
        return self.opened[-1]
