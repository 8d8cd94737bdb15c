"""A text service for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

    from tests.serve.running import Running


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[Running]:
    """A service of the tiny model, in a thread of this process."""
    from tests.serve.running import running

    with running({"tiny": str(tiny_model_dir)}) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[OpenAI]:
    """OpenAI's client of that service."""
    from openai import OpenAI

    with OpenAI(base_url=service.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are trained in this process."""
    from tests.serve.running import train_in_this_process

    train_in_this_process(monkeypatch)
