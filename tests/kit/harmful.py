"""An object whose pickle runs code when it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Harmful:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)
