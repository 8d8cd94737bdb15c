"""Several processes that learn together: the same bits, and no process left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from nip_astra.distributed import team
from nip_astra.errors import ConfigurationError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.objective import Objective
from nip_astra.trainers import vanilla_ppo
from nip_astra.trainers.protocol import divided_losses
from nip_astra.trainers.protocol.divided_losses import DividedLosses, Task
from nip_astra.trainers.vanilla_ppo import VanillaPpoTrainer
from nip_astra.utils.forked import can_fork
from tests.kit.toy_protocol_scenario import ToyBody, toy_trainer
from tests.trainers.test_rl_tensordict_base import changed, weights_of

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux without a GPU only"),
    pytest.mark.usefixtures("toy_protocol", "forked"),
]


def learned(num_threads: int, trainer: str = "vanilla_ppo", **more: Any) -> Any:
    """A trainer after two iterations, and the metrics of the last."""
    settings = ExperimentSettings(progress=False, num_threads=num_threads)
    built = toy_trainer(trainer, settings=settings, **more)
    with ExitStack() as stack:
        built._build_train_context(stack)
        for iteration in range(2):
            figures, _ = built.learner.learn(built.collect(), iteration)
    return built, figures


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
    trainer: str, more: dict[str, Any], forked: list[int]
) -> None:
    alone, expected = learned(1, trainer, **more)
    together, result = learned(2, trainer, **more)
    assert len(forked) == 2, "one an iteration"
    assert changed(weights_of(alone), weights_of(together)) == set()
    assert expected.keys() == result.keys()
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    own_states = (one.loss_module.own_state() for one in (alone, together))
    torch.testing.assert_close(*own_states, rtol=0, atol=0)


def test_as_many_processes_as_there_are_parts_at_most(
    monkeypatch: pytest.MonkeyPatch, forked: list[int]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    alone, _ = learned(1)
    together, _ = learned(64)
    assert len(forked) == 2 * 3, "four parts"
    assert changed(weights_of(alone), weights_of(together)) == set()


def test_an_agent_that_does_not_learn_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    agents = {"agents": {"prover": {"agent_lr_factor": {"actor": 0.0, "critic": 0.0}}}}
    alone, expected = learned(1, toy_protocol=agents)
    together, result = learned(4, toy_protocol=agents)
    assert changed(weights_of(alone), weights_of(together)) == set()
    assert list(expected) == list(result)


def _buffer_of_torchrl(trainer: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(96), sampler=SamplerWithoutReplacement(), batch_size=40
    )


class OwnLosses(IppoObjective):
    def agent_losses(self, *args: Any) -> Any:
        return super().agent_losses(*args)


class OwnGradients(IppoObjective):
    def compute_gradients(self, *args: Any) -> Any:
        return super().compute_gradients(*args)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (IppoObjective, "loss_parts", Objective.loss_parts),
        # Custom hooks are not bypassed.
        (vanilla_ppo, "IppoObjective", OwnLosses),
        (vanilla_ppo, "IppoObjective", OwnGradients),
        # It may draw from generators that other processes lack, as a body may while learning.
        (VanillaPpoTrainer, "_get_replay_buffer", _buffer_of_torchrl),
        (ToyBody, "has_hidden_state", True),
    ],
)
def test_indivisible_losses_learn_in_one_process(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    learned(2)


@pytest.mark.parametrize("hidden", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)])
def test_networks_that_draw_or_keep_statistics_are_refused(
    hidden: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = IppoObjective._value_entries

    def with_hidden(objective: Any, *args: Any) -> Tensor:
        hidden(torch.ones(4, 8))
        return compute(objective, *args)

    monkeypatch.setattr(IppoObjective, "_value_entries", with_hidden)
    monkeypatch.setattr(IppoObjective, "hidden", hidden, raising=False)
    buffers = [*hidden.buffers()]
    monkeypatch.setattr(IppoObjective, "buffers", lambda objective: iter(buffers))
    # The process with the task reports it; a worker by its traceback.
    refused = (ConfigurationError, WorkerProcessError)
    with pytest.raises(refused, match=r"as dropout does.*Train with --num-threads 1"):
        learned(2)


def in_worker(
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[[], object],
    when_called: int = 2,
    owner: Any = Objective,
    name: str = "compute_part",
) -> None:
    """Have workers do something when they call a function, by default for their second part."""
    first, function, calls = os.getpid(), getattr(owner, name), iter(range(1, 99))

    def called(*args: Any, **more: Any) -> Any:
        if os.getpid() != first and next(calls) >= when_called:
            action()
        return function(*args, **more)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(divided_losses, "team_on_this_machine", id="before the meeting"),
        pytest.param(dist, "init_process_group", id="while it connects"),
        pytest.param(Objective, "compute_part", id="at work"),
    ],
)
def test_a_worker_that_is_killed_stops_the_run(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_CONNECTING", timedelta(seconds=1))
    in_worker(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL), 1, owner, name)
    with pytest.raises(WorkerProcessError, match=r"process 2 of 2 .*SIGKILL"):
        learned(2)


def test_a_worker_does_not_hear_the_signal_that_stops_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.write(writing, b"sent")

    in_worker(monkeypatch, interrupt)
    learned(2)
    assert os.read(reading, 4) == b"sent"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("count", [2, 4])
def test_one_of_several_workers_that_fails_ends_all(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def fail() -> None:
        raise MemoryError("no room for the nodes")

    in_worker(monkeypatch, fail, when_called=1 if count == 4 else 2)
    with pytest.raises(WorkerProcessError, match=r"(?s)--num-threads 1 .*no room for the nodes"):
        learned(count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_figures_of_any_size_and_type_are_handed_over(dtype: torch.dtype) -> None:
    tasks = [Task("a", part) for part in range(3)]
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in tasks]
    long = torch.arange(200_000).remainder(100).to(dtype)

    def compute(task: Task) -> dict[str, Tensor]:
        weights[task.part].grad = torch.full((2,), float(task.part))
        return {"figure": long + task.part}

    shared = DividedLosses(tasks, weights, {})
    with shared.between(3):
        for _ in range(3):
            for weight in weights:
                weight.grad = None
            result = shared.compute(compute)
    assert list(result) == tasks
    for task in tasks:
        assert result[task]["figure"].dtype == dtype
        assert torch.equal(result[task]["figure"], long + task.part)
        assert weights[task.part].grad.tolist() == [task.part] * 2


def test_metrics_of_a_later_minibatch_may_differ_from_the_first() -> None:
    tasks = [Task("a", part) for part in range(2)]
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in tasks]
    number = 0

    def compute(task: Task) -> dict[str, Tensor]:
        # In the second, a task has nothing to learn; in the third, a metric is longer.
        if (task.part, number) != (1, 1):
            weights[task.part].grad = torch.full((2,), number + 0.5)
        return {"figure": torch.full((1 + (number == 2),), float(task.part))}

    shared, sent = DividedLosses(tasks, weights, {}), []
    exchange = shared._exchange
    shared._exchange = lambda part: (sent.append(number), exchange(part))[1]  # type: ignore[method-assign]
    with shared.between(2):
        for number in range(5):
            for weight in weights:
                weight.grad = None
            result = shared.compute(compute)
            assert [len(result[task]["figure"]) for task in tasks] == [1 + (number == 2)] * 2
            grads = [None if weight.grad is None else weight.grad.tolist() for weight in weights]
            expected = [number + 0.5] * 2
            assert grads == [expected, None if number == 1 else expected]
    # Each is sent in full once it differs from the last.
    assert sent == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_in_common_is_seen_however_tasks_are_divided(count: int) -> None:
    tasks = [Task("a", part) for part in range(2)]
    weight = torch.nn.Parameter(torch.zeros(2))

    def compute(task: Task) -> dict[str, Tensor]:
        weight.grad = torch.ones(2)
        return {}

    shared = DividedLosses(tasks, [weight], {})
    with pytest.raises(ConfigurationError, match="Give them as one part"), shared.between(count):
        shared.compute(compute)


def test_tasks_are_divided_by_how_long_they_usually_take() -> None:
    tasks = [Task(name, part) for name in ("a", "b") for part in (0, 1)]
    seconds = dict(zip(tasks, [0.5, 3.0, 1.0, 2.0], strict=True))
    shared = DividedLosses(tasks, [], seconds)
    loads = [sum(seconds[task] for task in share) for share in shared._shards(2)]
    assert sorted(loads) == [3.0, 3.5]
    # One slow minibatch does not change the division, and a permanent slowdown does.
    for slow in (3.0, 30.0, 3.1):
        shared._note(tasks[1], slow)
    assert shared._seconds[tasks[1]] == pytest.approx(3.1)
    for _ in range(40):
        shared._note(tasks[1], 8.0)
    assert shared._seconds[tasks[1]] == 8.0
