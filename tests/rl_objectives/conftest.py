"""Fixtures of the tests of losses."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
from tensordict import TensorDict

from tests.rl_objectives.always_acting import AlwaysActing, make_batch


@pytest.fixture
def agents() -> AlwaysActing:
    return AlwaysActing()


@pytest.fixture
def batch(agents: AlwaysActing) -> TensorDict:
    return make_batch(agents)


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    """The trainers, imported only if a test requests them."""
    pytest.importorskip("trl", minversion="1.16")
    modules = {
        f"{name}Trainer": f"trainer.{name.lower()}_trainer"
        for name in ("DPO", "GRPO", "KTO", "RLOO")
    }
    modules |= {"CPOTrainer": "experimental.cpo", "ORPOTrainer": "experimental.orpo"}
    return SimpleNamespace(
        **{name: getattr(import_module(f"trl.{module}"), name) for name, module in modules.items()}
    )
