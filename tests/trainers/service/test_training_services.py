"""A training service of a plug-in, named by `train_service.backend`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.language_models.services.training import (
    TRAINING_SERVICES,
    TrainingServiceRequest,
)
from nip_astra.plugins import load_plugin
from tests.kit.experiments import iterations_of, task_trainer

PLUGIN = '''
import nip_astra as na

@na.register_training_service("counting")
class Counting(na.LocalTrainingService):
    """Trains in this process, and counts its steps."""

    @classmethod
    def open(cls, request):
        service = super().open(request)
        service.name, service.num_steps = request.parameters.options["name"], 0
        return service

    def optim_step(self, **options):
        self.num_steps += 1
        return super().optim_step(**options)
'''
SECTION = "remote_api_grpo.train_service"


@pytest.fixture
def _plugin(tmp_path: Path) -> Iterator[None]:
    before = TRAINING_SERVICES.snapshot()
    path = tmp_path / "counting.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    yield
    TRAINING_SERVICES.restore(before)


@pytest.mark.usefixtures("_plugin")
def test_a_registered_service_trains_the_policy_and_reads_its_options() -> None:
    more = (f"{SECTION}.backend=counting", f"{SECTION}.options={{name: mine}}")
    trainer = task_trainer("remote_api_grpo", *more)
    iterations_of(trainer, 1)
    assert trainer.service.name == "mine"
    assert trainer.service.num_steps == 1


def test_an_unknown_service_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ParameterError, match=r"backend.*htp.*'http'"):
        task_trainer("remote_api_grpo", f"{SECTION}.backend=htp")


def test_what_learns_beside_the_policy_is_refused_by_a_remote_service() -> None:
    trainer = task_trainer("remote_api_grpo")
    options = {"backend": "http", "base_url": "http://127.0.0.1:1"}
    request = TrainingServiceRequest(
        trainer.parameters.train_service.model_copy(update=options),
        trainer.policy,
        "policy",
        trainer.training,
        trainer.optimizer,
        trainer.learned,
        torch.nn.ModuleDict({"value_head": torch.nn.Linear(1, 1)}),
        0,
        None,
    )
    with pytest.raises(ConfigurationError, match="value_head"):
        TRAINING_SERVICES.get("http").open(request)
