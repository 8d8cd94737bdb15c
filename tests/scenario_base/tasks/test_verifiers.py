"""Tasksets of verifiers are played and scored by their own rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError, MissingDependencyError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.scenario_base.tasks.base import TASKS, Episode, Task, build_task
from nip_astra.scorers.base import Message
from tests.kit.command_line import plugins_forgotten_after

HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not HAS_VERIFIERS, reason="verifiers is not installed")

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def is_right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def is_short(self, trace: vf.Trace) -> float:
        return 0.5 * float(len(trace.last_reply) < 4)


class SumConfig(vf.TasksetConfig):
    most: int = 9


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.most + 1):
            for b in range(10):
                yield SumTask(
                    SumData(prompt=f"{a}+{b}=", answer=str(a + b), name=f"{a}+{b}"),
                    self.config.task,
                )


__all__ = ["SumTaskset"]
"""
MORE = {
    "tools": (
        "class SumConfig",
        "class Tools(vf.Toolset):\n    pass\n\n\nSumTask.toolsets = classmethod("
        "lambda cls, config: [object()])\n\n\nclass SumConfig",
        "has tools",
    ),
    "runtime": (
        "self, trace: vf.Trace) -> float:\n        return 0.5",
        "self, trace: vf.Trace, runtime: vf.Runtime) -> float:\n        return 0.5",
        r"scores within a runtime \(is_short\)",
    ),
    "container": (
        "class SumTask(vf.Task[SumData]):",
        "class SumTask(vf.Task[SumData]):\n    NEEDS_CONTAINER = True\n",
        "needs a container",
    ),
    "setup": (
        "class SumTask(vf.Task[SumData]):",
        "class SumTask(vf.Task[SumData]):\n    async def setup(self, trace, runtime):\n"
        "        pass\n",
        r"prepares a runtime \(setup\)",
    ),
    "none": ('__all__ = ["SumTaskset"]', "__all__ = []", "exports 0 subclasses"),
    "env": (
        '__all__ = ["SumTaskset"]',
        'class Own(vf.Env):\n    pass\n\n\n__all__ = ["SumTaskset", "Own"]',
        r"environment \(Env\) of its own",
    ),
}


@pytest.fixture
def taskset(tmp_path: Path) -> Any:
    path = tmp_path / "my_sums.py"
    path.write_text(TASKSET)
    with plugins_forgotten_after():
        yield path


def task_of(path: Path, **options: Any) -> Task:
    sizes = {"num_test": 10, "num_dev": 5} | options
    parameters = TASKS.get("verifiers").Parameters(taskset=str(path), **sizes)
    return build_task(parameters, seed=0, device=torch.device("cpu"), scenario_dir=None)


def rated(task: Task, index: int, said: str) -> float | None:
    environment = task.environment("train", index)
    messages = [*environment.reset(), Message("assistant", said)]
    episode = Episode(environment, messages)
    assert environment.step(said).is_over
    task.rate([episode])
    return episode.reward


@needs_verifiers
def test_tasks_are_split_and_scored_by_their_own_weighted_rewards(taskset: Path) -> None:
    task = task_of(taskset)
    counts = [task.num_problems(split) for split in ("test", "dev", "train")]
    assert counts == [10, 5, 85]
    assert task.environment("test", 0).reset() == [Message("user", "0+0=")]
    assert task.environment("train", 0).reset() == [Message("user", "1+5=")]
    assert [rated(task, 0, said) for said in ("6", " 6", "66666", "7")] == [2.5, 2.5, 0.0, 0.5]


@needs_verifiers
def test_options_are_those_of_the_taskset(taskset: Path) -> None:
    assert task_of(taskset, options={"most": 1}).num_problems("train") == 5
    assert task_of(taskset, num_train=7).num_problems("train") == 7
    with pytest.raises(ConfigurationError, match=r"task\.task\.options"):
        task_of(taskset, options={"least": 1})
    with pytest.raises(DataError, match=r"(?s)10 .*task\.task\.num_test"):
        task_of(taskset, options={"most": 0})


@needs_verifiers
def test_a_system_prompt_stands_before_the_first_message(taskset: Path) -> None:
    text = TASKSET.replace("name=f", 'system_prompt="Add.", name=f')
    taskset.write_text(text)
    (message,) = task_of(taskset).environment("test", 0).reset()
    assert message.text == "Add.\n\n0+0="


@needs_verifiers
@pytest.mark.parametrize("name", MORE)
def test_what_one_message_cannot_do_is_refused(name: str, taskset: Path) -> None:
    old, new, message = MORE[name]
    assert old in TASKSET
    taskset.write_text(TASKSET.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=message):
        task_of(taskset)


@needs_verifiers
def test_a_reward_that_fails_is_told(taskset: Path) -> None:
    taskset.write_text(TASKSET.replace("float(trace.last_reply == task.answer)", "1 / 0"))
    with pytest.raises(DataError, match="ZeroDivisionError"):
        rated(task_of(taskset), 0, "6")


@needs_verifiers
def test_a_taskset_without_end_needs_a_number(taskset: Path) -> None:
    taskset.write_text(
        TASKSET.replace("    def load(self):", "    INFINITE = True\n\n    def load(self):")
    )
    with pytest.raises(ConfigurationError, match=r"task\.task\.num_train"):
        task_of(taskset)


@needs_verifiers
def test_a_policy_learns_a_taskset(taskset: Path) -> None:
    resolved = resolve_experiment(
        trainer="self_hosted_grpo",
        scenario=f"verifiers:{taskset}",
        overrides=[
            "training.num_episodes_per_experience=16",
            "training.num_iterations=25",
            "training.minibatch_size=128",
            "training.lr=1e-3",
            "task.task.num_test=10",
            "task.task.num_dev=5",
        ],
    )
    trainer: Any = prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer
    rewards = []
    for iteration in range(25):
        trainer._collect(iteration)
        rewards.append(trainer.state.iteration_metrics["rollout/reward_mean"])
        trainer._update(iteration)
        trainer.state.end()
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4


@pytest.mark.skipif(HAS_VERIFIERS, reason="verifiers is installed")
def test_without_verifiers_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'nip-astra\[verifiers\]'"):
        task_of(Path("my_sums.py"))


def test_a_scenario_names_its_taskset() -> None:
    resolved = resolve_experiment(trainer="self_hosted_grpo", scenario="verifiers:gsm8k")
    assert resolved.hyper_params.scenario == "verifiers"
    assert resolved.hyper_params.get("task.task.taskset") == "gsm8k"
    with pytest.raises(ConfigurationError, match=r"task\.task\.taskset"):
        resolve_experiment(trainer="self_hosted_grpo", scenario="verifiers")
