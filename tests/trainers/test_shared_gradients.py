"""Several processes that learn together: the same bits, and no process left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, HelperProcessError, NonFiniteLossError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.rl_objectives.objective import AgentLosses, Frames, Objective
from nip_astra.trainers.shared_gradients import CAN_SHARE, SharedGradients, Task
from tests.toy_protocol_scenario import toy_kind, toy_trainer
from tests.trainers.test_rl_tensordict_base import changed, weights_of

pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="processes are forked on Linux only")


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with toy_kind():
        yield


def learned(num_threads: int, trainer: str = "vanilla_ppo", **more: Any) -> Any:
    """Give a trainer after two iterations, and the figures of the last."""
    settings = ExperimentSettings(progress=False, num_threads=num_threads)
    built = toy_trainer(trainer, settings=settings, **more)
    with ExitStack() as stack:
        built._build_train_context(stack)
        for iteration in range(2):
            figures, _ = built.learner.learn(built.collect(), iteration)
    return built, figures


def no_child_is_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        ("vanilla_ppo", {}),
        ("vanilla_ppo", {"rl": {"use_shared_body": True}}),
        ("vanilla_ppo", {"ppo": {"loss_type": "kl_penalty", "kl_target": 1e-4}}),
        ("reinforce", {"reinforce": {"use_advantage_and_critic": True}}),
        ("reinforce", {}),
        ("mappo", {}),
    ],
)
def test_several_processes_change_no_bit(
    trainer: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, expected = learned(1, trainer, **more)
    forks = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or fork())
    together, found = learned(2, trainer, **more)
    assert len(forks) == 2, "one helper an iteration"
    assert changed(weights_of(alone), weights_of(together)) == set()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    for name, state in alone.loss_module.own_state().items():
        assert torch.equal(state, together.loss_module.own_state()[name])
    assert no_child_is_left()


def test_as_many_processes_as_there_are_parts_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    alone, _ = learned(1)
    together, _ = learned(64)
    assert changed(weights_of(alone), weights_of(together)) == set()
    assert no_child_is_left()


def test_an_objective_without_parts_learns_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nip_astra.rl_objectives.ippo.IppoObjective.loss_parts", no_parts)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    learned(2)


def no_parts(objective: Objective, name: str) -> tuple[AgentLosses, ...]:
    """Give no parts."""
    return Objective.loss_parts(objective, name)


def fail_in_helper(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Have helpers do something when they compute their second part of the losses."""
    first, compute, calls = os.getpid(), Objective.compute_part, []

    def computed(objective: Objective, *task: Any) -> dict[str, Tensor]:
        calls.append(task)
        if os.getpid() != first and len(calls) > 1:
            action()
        return compute(objective, *task)

    monkeypatch.setattr(Objective, "compute_part", computed)


def test_what_fails_in_a_helper_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError("no room for the nodes")

    fail_in_helper(monkeypatch, fail)
    with pytest.raises(HelperProcessError, match=r"(?s)--num-threads 1 .*no room for the nodes"):
        learned(2)
    assert no_child_is_left()


def test_a_helper_that_is_killed_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_helper(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(HelperProcessError, match="It ended without a word"):
        learned(2)
    assert no_child_is_left()


def test_a_gradient_that_is_not_finite_leaves_no_helper() -> None:
    trainer = toy_trainer(settings=ExperimentSettings(progress=False, num_threads=2))
    with ExitStack() as stack:
        trainer._build_train_context(stack)
        batch = trainer.collect()
        batch["agents", "value_target"][0] = float("nan")
        with pytest.raises(NonFiniteLossError, match="in iteration 1"):
            trainer.learner.learn(batch, 0)
    assert no_child_is_left()


def test_a_helper_does_not_hear_the_signal_that_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_in_helper(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
    learned(2)
    assert no_child_is_left()


def test_parts_with_a_weight_in_common_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(objective: Objective, name: str) -> tuple[AgentLosses, ...]:
        def policy(name: str, batch: Frames) -> dict[str, Tensor]:
            return objective.agent_losses(name, batch)

        return policy, policy

    monkeypatch.setattr("nip_astra.rl_objectives.ippo.IppoObjective.loss_parts", twice)
    with pytest.raises(ConfigurationError, match="Give them as one part"):
        learned(2)
    assert no_child_is_left()


def test_tasks_are_divided_by_how_long_they_took() -> None:
    tasks = [Task(name, part) for name in ("a", "b") for part in (0, 1)]
    seconds = dict(zip(tasks, [0.5, 3.0, 1.0, 2.0], strict=True))
    shared = SharedGradients(tasks, [], seconds)
    shared._count = 2
    loads = [sum(seconds[task] for task in share) for share in shared._shares()]
    assert sorted(loads) == [3.0, 3.5]
