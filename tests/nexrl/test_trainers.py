"""Trainers written for NexRL run on our loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nip_astra.nexrl.activity_tracker import ActivityTrackerProxy
from nip_astra.nexrl.base_module import NexRLModule
from nip_astra.nexrl.executor import execute
from nip_astra.nexrl.trainer import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    RemoteApiOpdTrainer,
    RemoteApiTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
)
from nip_astra.nexrl.trainer.teacher_client import TeacherClient
from nip_astra.nexrl.utils.config_utils import get_train_service_config_by_role
from nip_astra.nexrl.utils.finetune_service_utils import convert_trajectories_to_datums
from omegaconf import OmegaConf

from nip_astra.errors import ConfigurationError
from nip_astra.nexrl.nexrl_types import Batch, Trajectory
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT
from tests.kit.experiments import iterations_of

POLICY = ROOT / "scenarios" / "arithmetic" / "models" / "policy"
SMALL = (
    "training.num_episodes_per_experience=2",
    "training.num_iterations=2",
    "task.evaluation.num_problems=2",
)


@pytest.fixture(autouse=True)
def _own_plugins() -> Iterator[None]:
    with plugins_forgotten_after():
        yield


def trainer_of(tmp_path: Path, name: str, values: str = "", *overrides: str) -> Any:
    """Return the trainer of this module with that name, built from a recipe."""
    file = tmp_path / f"{name}.py"
    file.write_text(f"from {__name__} import {name}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "trainer:\n"
        f"  custom_trainer_module_path: {file.name}\n  custom_trainer_class_name: {name}\n{values}"
    )
    resolved = resolve_experiment(parameter_file=recipe, overrides=[*SMALL, *overrides])
    return prepare_experiment(resolved, progress=False).trainer


def first_iteration(trainer: Any) -> dict[str, float]:
    (metrics,) = iterations_of(trainer, 1)
    return metrics


# ---- modules and configuration


def test_a_module_has_a_name_and_a_tracker() -> None:
    module = NexRLModule()
    assert module._module_name == "invalid"
    assert module._activity_tracker is None
    module.set_module_name("mine")
    tracker = ActivityTrackerProxy()
    module.set_activity_tracker(tracker)
    assert module.get_module_name() == "mine"
    assert module._activity_tracker is tracker
    assert module.health_check() is True
    with tracker.track("mine", "work"):
        assert tracker.get_training_step() == 0


class Reads(SelfHostedTrainer):
    """Reads its configuration in every way."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.read = [
            config.get("color"),
            config.get("missing", "none"),
            config["total_train_steps"],
            "missing" in config,
            config.algorithm.get("my_param", 0.5),
        ]

    def _prepare_batch(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}


def test_a_configuration_of_omegaconf_is_used_as_it_is() -> None:
    config = OmegaConf.create(
        {"color": "red", "total_train_steps": 3, "algorithm": {"my_param": "${color}"}}
    )
    trainer = Reads(config)
    assert trainer._config is config
    assert trainer.read == ["red", "none", 3, False, "red"]
    assert (trainer.get_train_step(), trainer._pad_token_id) == (0, 0)
    assert trainer.tokenizer.pad_token_id == 0


def test_a_mapping_of_values_has_what_every_configuration_has() -> None:
    assert Reads({}).read == [None, "none", 1, False, 0.5]


def test_further_values_of_a_recipe_reach_its_trainer(tmp_path: Path) -> None:
    values = (
        "  color: red\n  total_train_steps: 9\n  algorithm: {my_param: '${trainer.color}'}\n"
        "  train_service: {backend: mock, config: {warmth: 3, learning_rate: 1.0e-3}}\n"
    )
    trainer = trainer_of(tmp_path, "Reads", values)
    assert trainer.read == ["red", "none", 2, False, "red"]
    service = get_train_service_config_by_role(trainer._config.train_service, "actor")
    assert (service.config.warmth, service.config.learning_rate) == (3, 1e-3)
    assert (service.backend, service.resource.world_size) == ("local", 1)


# ---- trainers on batches


class Grpo(SelfHostedGrpoTrainer):
    """Rescores, posts metrics, and computes advantages by a function of NexRL."""

    def _prepare_batch(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        assert isinstance(batch, Batch)
        batch = batch.reorder(list(range(len(batch)))[::-1])
        batch.metadata["global_token_num"] = torch.sum(
            batch.values["attention_mask"] * batch.values["loss_mask"], dim=-1
        ).tolist()
        with self._train_service_client.actor_context():
            trimmed = batch.trim_for_backend(["input_ids", "attention_mask", "position_ids"])
            answer = self._train_service_client.compute_log_prob(trimmed.to_nextrainer_batch())
        batch.values["old_log_probs"] = answer["batch"]["old_log_probs"]
        assert not self._data_dumper.enabled
        assert not self._data_dumper.should_dump("old_log_probs", self.get_train_step())
        self._activity_tracker.experiment_logger_post(backend="wandb", data={"mine": 1.0})
        batch, metrics = super()._prepare_batch(batch)
        return batch, metrics | {"tokens": sum(map(len, batch.values["tokens"]))}


def test_a_trainer_on_batches_uses_the_services_of_the_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "Grpo")
    metrics = first_iteration(trainer)
    assert metrics["mine"] == 1.0
    assert metrics["tokens"] > 0
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert trainer.get_train_step() == trainer._activity_tracker.get_training_step() == 1


class Placeholder(SelfHostedTrainer):
    """Sets one old log-probability per row, as NexRL does where it computes none."""

    def _prepare_batch(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        batch.values["old_log_probs"] = torch.zeros(len(batch), 1)
        batch.values["advantages"] = torch.ones(len(batch))
        return batch, {}


def test_a_placeholder_is_no_old_log_probability(tmp_path: Path) -> None:
    metrics = first_iteration(trainer_of(tmp_path, "Placeholder"))
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


class Adds(Placeholder):
    """Adds metrics to the step of its base."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:  # type: ignore[override]
        metrics = super().train(trajectories)
        return metrics | {"num_lists": sum(isinstance(one.tokens, list) for one in trajectories)}


def test_the_step_of_a_base_is_extended(tmp_path: Path) -> None:
    metrics = first_iteration(trainer_of(tmp_path, "Adds"))
    assert metrics["num_lists"] == metrics["num_samples"] == 16


# ---- trainers with a step of their own


class HandsOver(BaseTrainer):
    """Prepares a batch by itself and updates the policy through its service."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:  # type: ignore[override]
        batch = Batch.from_trajectories(trajectories)
        batch.values["advantages"] = batch.values["reward"] - 0.5
        output = self._train_service_client.update_actor(batch.to_nextrainer_batch())
        return {"seen": float(len(batch)), **output["meta_info"]["metrics"]}


class LearnsAlone(BaseTrainer):
    """Changes the weights by itself."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:  # type: ignore[override]
        with torch.no_grad():
            self.learned[0].add_(1.0)
        assert torch.is_grad_enabled()
        return {"seen": float(len(trajectories))}


def test_a_step_hands_a_batch_to_the_loop(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "HandsOver", "", "training.minibatch_size=16")
    metrics = first_iteration(trainer)
    assert metrics["seen"] == metrics["num_samples"] == 16
    assert metrics["num_steps"] == 1


def test_a_step_may_learn_by_itself_in_a_whole_run(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "LearnsAlone")
    before = trainer.learned[0].detach().clone()
    trainer.train()
    torch.testing.assert_close(trainer.learned[0].detach(), before + 2.0)
    assert not any("nothing was learned" in text for text in trainer.results.get("warnings", []))


# ---- trainers on trajectories


class Remote(RemoteApiGrpoTrainer):
    """Counts tokens of the policy before the advantages are computed."""

    def _prepare_trajectories(self, trajectories: Any, metrics: dict[str, Any]) -> Any:
        prepared = super()._prepare_trajectories(trajectories, metrics)
        metrics["response"] = sum(sum(one.loss_mask) for one in prepared)
        return sorted(prepared, key=lambda one: str(one["group_id"]))


def test_a_trainer_on_trajectories_gets_lists(tmp_path: Path) -> None:
    metrics = first_iteration(trainer_of(tmp_path, "Remote"))
    expected = metrics["rollout/response_tokens_mean"] * metrics["rollout/num_trajectories"]
    assert metrics["response"] == pytest.approx(expected)


class Imitates(RemoteApiTrainer):
    """Fine-tunes on its own samples."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._loss_fn = "cross_entropy"

    def _prepare_trajectories(self, trajectories: Any, metrics: dict[str, Any]) -> Any:
        return trajectories


def test_a_trainer_chooses_its_loss(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "Imitates")
    assert trainer._loss_fn == trainer.parameters.policy_loss.loss == "cross_entropy"
    metrics = first_iteration(trainer)
    assert metrics["loss"] > 0
    assert metrics["num_samples"] == 16


class Distils(RemoteApiTrainer):
    """Distils a teacher in a step of its own, by the service of trajectories."""

    loss_name = "importance_sampling"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._teacher_configs = config.get("teachers", [])

    def set_service_holder(self, service_holder: Any) -> None:
        super().set_service_holder(service_holder)
        (teacher,) = self._teacher_configs
        self._teacher = TeacherClient.from_config(teacher, service_holder)

    def _prepare_trajectories(self, trajectories: Any, metrics: dict[str, Any]) -> Any:
        for one in trajectories:
            teacher = self._teacher.compute_logprobs(one.tokens)
            student = self._service_holder.compute_logprobs(one.tokens)
            assert teacher[0] is student[0] is None
            assert teacher[1:] == pytest.approx(student[1:], abs=1e-4)
            one.extra_fields["token_advantages"] = [0.25] * sum(one.loss_mask)
        return trajectories

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:  # type: ignore[override]
        metrics: dict[str, Any] = {}
        datums = convert_trajectories_to_datums(self._prepare_trajectories(trajectories, metrics))
        metrics |= execute(
            self._service_holder.forward_backward_and_optim_step,
            datums_data=datums,
            loss_fn=self.loss_name,
            loss_fn_config={"entropy_coeff": self._entropy_coeff},
            learning_rate=self._learning_rate,
            beta1=self._beta1,
        )
        self._step_counter += 1
        path = self._service_holder.save_weights_for_sampler(f"step_{self._step_counter}")
        self._service_holder.set_current_sampling_path(path)
        assert self._service_holder.get_current_sampling_path() == "step_1"
        assert self._service_holder.get_tokenizer() is self.tokenizer
        return metrics | {"num_datums": len(datums)}


class DistilsOtherwise(Distils):
    """Requests another loss than that of the parameters."""

    loss_name = "ppo"


TEACHERS = f"  teachers: [{{base_model: {POLICY}}}]\n"


def test_a_trainer_distils_in_a_step_of_its_own(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "Distils", TEACHERS)
    metrics = first_iteration(trainer)
    assert metrics["num_datums"] == metrics["num_samples"] == 16
    assert metrics["num_steps"] > 0


def test_a_loss_other_than_that_of_the_parameters_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "DistilsOtherwise", TEACHERS)
    with pytest.raises(ConfigurationError, match="loss_fn is ppo"):
        first_iteration(trainer)


def test_a_teacher_behind_a_service_is_refused() -> None:
    config = {"base_model": "x", "base_url": "http://teacher"}
    with pytest.raises(ConfigurationError, match="http://teacher"):
        TeacherClient.from_config(config, None)  # type: ignore[arg-type]  # it is not reached


class Solves(RemoteApiCrossEntropyTrainer):
    """Fine-tunes on solutions."""


class Follows(RemoteApiOpdTrainer):
    """Distils the teacher of the parameters."""


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("Solves", ()),
        ("Follows", (f"follows.distillation.teacher={{_type: huggingface, model: {POLICY}}}",)),
    ],
)
def test_trainers_of_the_package_are_bases(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    trainer = trainer_of(tmp_path, name, "", *overrides)
    assert isinstance(trainer, BaseTrainer)
    metrics = first_iteration(trainer)
    assert metrics["num_samples"] > 0
