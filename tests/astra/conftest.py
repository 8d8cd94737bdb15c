"""Tiny models, made once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.tiny import make_language_model


class Models(NamedTuple):
    """Folders of two random models."""

    attacker: Path
    target: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("astra")
    return Models(
        make_language_model(root / "attacker", seed=1), make_language_model(root / "target", seed=2)
    )
