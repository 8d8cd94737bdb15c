"""Fixtures of the tests of losses."""

from __future__ import annotations

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
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return SimpleNamespace(
        CPOTrainer=CPOTrainer,
        DPOTrainer=DPOTrainer,
        GRPOTrainer=GRPOTrainer,
        KTOTrainer=KTOTrainer,
        ORPOTrainer=ORPOTrainer,
        RLOOTrainer=RLOOTrainer,
    )
