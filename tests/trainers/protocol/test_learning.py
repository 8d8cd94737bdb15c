"""How agents learn from a batch: minibatches, learning agents, clipping, learning rates."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import CheckpointError, ConfigurationError, NonFiniteLossError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.agents import LrFactors
from nip_astra.trainers.protocol.learning import MinibatchBuffer, episode_numbers
from nip_astra.trainers.protocol.optimizers import GroupAdam
from tests.kit.toy_protocol_scenario import ToyAgentParameters, ToyBody, toy_trainer
from tests.trainers.test_rl_tensordict_base import AGENTS, changed, parts_changed, weights_of

pytestmark = pytest.mark.usefixtures("toy_protocol")


def test_the_first_minibatch_has_ratio_one() -> None:
    trainer = toy_trainer(rl={"minibatch_size": 96})
    metrics = trainer.loss_module(trainer.collect().flatten())
    for name in AGENTS:
        found = [float(metrics[f"{name}/{one}"]) for one in ("kl", "ess", "clip_fraction")]
        assert found == pytest.approx([0.0, 1.0, 0.0], abs=1e-5)


def test_a_shared_body_runs_once_for_each_agent_and_minibatch() -> None:
    trainer = toy_trainer(rl={"use_shared_body": True})
    batch = trainer.collect()
    bodies = [trainer.agents[name].policy_body for name in AGENTS]
    before = [body.num_calls for body in bodies]
    trainer.learner.learn(batch, 0)
    assert [body.num_calls - b for body, b in zip(bodies, before, strict=True)] == [6, 6]


def test_a_frozen_part_does_not_move() -> None:
    frozen = {"agent_lr_factor": {"actor": 0.0}}
    moved = parts_changed(toy_trainer(toy_protocol={"agents": {"verifier": frozen}}))
    parts = ("policy_body", "policy_head", "value_body", "value_head")
    assert moved == {*(f"prover.{part}" for part in parts), *(f"verifier.{p}" for p in parts[2:])}


def test_an_agent_out_of_turn_keeps_its_weights_and_optimizer_state() -> None:
    schedule = {"_type": "contiguous", "period": 4, "start": 0, "stop": 1}
    trainer = toy_trainer(toy_protocol={"agents": {"verifier": {"update_schedule": schedule}}})
    optimizer = trainer.optimizers.optimizers["verifier"]
    trainer.learner.learn(trainer.collect(), 0)
    weights = weights_of(trainer)
    memory = [value["exp_avg"].clone() for value in optimizer.state.values()]
    trainer.learner.learn(trainer.collect(), 1)
    moved = changed(weights, weights_of(trainer))
    assert moved
    assert not any("verifier" in name for name in moved)
    kept = [value["exp_avg"] for value in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(memory, kept, strict=True))
    trainer.learner.learn(trainer.collect(), 4)
    assert any("verifier" in name for name in changed(weights, weights_of(trainer)))


@pytest.mark.parametrize("clipping", ["joint", "per_agent"])
def test_a_frozen_agent_has_no_part_in_the_clipping_of_others(clipping: str) -> None:
    def after(frozen_gain: float) -> dict[str, Tensor]:
        frozen = {"update_schedule": {"_type": "constant", "is_on": False}}
        trainer = toy_trainer(
            rl={"grad_clipping": clipping, "max_grad_norm": 0.01},
            toy_protocol={"agents": {"verifier": frozen}},
        )
        batch = trainer.collect()
        # Whatever values the gradients of non-learning agents have.
        for weight in trainer.agents["verifier"].parameters():
            weight.grad = torch.full_like(weight, frozen_gain)
        trainer.learner.learn(batch, 0)
        return weights_of(trainer)

    assert changed(after(0.0), after(1e6)) == set()


def test_one_agents_gradient_scales_the_others_only_where_the_norm_is_joint() -> None:
    def prover_norm(clipping: str, verifier_scale: float) -> float:
        trainer = toy_trainer(rl={"grad_clipping": clipping, "max_grad_norm": 1.0})
        for name, scale in (("prover", 1.0), ("verifier", verifier_scale)):
            for weight in trainer.agents[name].parameters():
                weight.grad = torch.full_like(weight, scale)
        trainer.optimizers.clip(AGENTS)
        grads = [w.grad for w in trainer.agents["prover"].parameters()]
        return float(torch.nn.utils.get_total_norm(grads))

    assert prover_norm("per_agent", 100.0) == pytest.approx(1.0, rel=1e-4)
    assert prover_norm("joint", 100.0) < 0.05


def test_learning_rates_are_products_of_factors_and_fall_to_zero() -> None:
    factors = {"agent_lr_factor": {"actor": 0.5, "critic": 2.0}}
    factors["body_lr_factor"] = {"actor": 0.25, "critic": 1.0}
    trainer = toy_trainer(
        rl={"anneal_lr": True, "lr": 0.08, "num_iterations": 4},
        toy_protocol={"agents": {"verifier": factors}},
    )
    groups = trainer.optimizers.optimizers["verifier"].param_groups
    assert {group["lr_factor"] for group in groups} == {0.5 * 0.25, 0.5, 2.0}
    for iteration, left in ((0, 1.0), (3, 0.25)):
        trainer.optimizers.begin(iteration)
        for group in groups:
            assert group["lr"] == pytest.approx(0.08 * group["lr_factor"] * left)


def test_a_graph_network_has_a_learning_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ToyBody, "gnn_parameters", lambda body: body.net[0].parameters(), raising=False
    )
    monkeypatch.setattr(
        ToyAgentParameters, "gnn_lr_factor", LrFactors(actor=0.125, critic=1.0), raising=False
    )
    optimizer = toy_trainer().optimizers.optimizers["prover"]
    slow = [group["params"] for group in optimizer.param_groups if group["lr_factor"] == 0.125]
    assert [len(weights) for weights in slow] == [2], "weight and bias of the policy's first layer"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step_and_leaves_no_worker(
    num_threads: int,
) -> None:
    trainer = toy_trainer(settings=ExperimentSettings(progress=False, num_threads=num_threads))
    with ExitStack() as stack:
        trainer._build_train_context(stack)
        batch = trainer.collect()
        batch["agents", "value_target"][0] = float("nan")
        with pytest.raises(NonFiniteLossError, match="in iteration 1"):
            trainer.learner.learn(batch, 0)
    assert all(bool(value.isfinite().all()) for value in weights_of(trainer).values())


# ---- minibatches


def test_episodes_are_numbered_from_end_to_end_and_apart_in_each_environment() -> None:
    done = torch.tensor([[False, True, False, False], [True, True, False, True]])
    numbers = episode_numbers(done)
    assert numbers.tolist() == [[0, 0, 1, 1], [4, 5, 6, 6]]


LENGTHS = [3, 1, 4, 1, 5, 2, 6]
"""Of episodes, 22 frames in all."""


def filled(size: int, key: str = "key", lengths: list[int] = LENGTHS, **more: Any) -> Any:
    buffer = MinibatchBuffer(size, key, **more)
    episode = torch.repeat_interleave(torch.arange(len(lengths)) * 10, torch.tensor(lengths))
    content = {"episode": episode, "frame": torch.arange(len(episode))}
    mixed = torch.randperm(len(episode), generator=torch.Generator().manual_seed(0))
    buffer.extend(TensorDict(content, batch_size=[len(episode)])[mixed])
    return buffer


def frames_of(buffer: MinibatchBuffer) -> list[list[int]]:
    return [minibatch["frame"].tolist() for minibatch in buffer]


@pytest.mark.parametrize("options", [{}, {"episode_key": "episode"}], ids=["frames", "episodes"])
def test_an_epoch_gives_each_frame_once_in_an_order_that_survives_a_restart(
    options: dict[str, str],
) -> None:
    buffer, again, other, restarted = (filled(6, key, **options) for key in "aaba")
    epochs = [frames_of(buffer) for _ in range(2)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(22))
        if not options:
            assert [len(batch) for batch in epoch] == [6, 6, 6, 4]
    assert epochs[0] != epochs[1]
    assert frames_of(again) == epochs[0] != frames_of(other)
    restarted.load_state_dict(again.state_dict())
    assert frames_of(restarted) == epochs[1]


def test_an_episode_is_in_one_minibatch() -> None:
    buffer = filled(6, episode_key="episode")
    for _ in range(5):
        minibatches = list(buffer)
        episodes = [set(minibatch["episode"].tolist()) for minibatch in minibatches]
        assert sum(len(one) for one in episodes) == len(LENGTHS)
        assert all(0 < len(minibatch) < 6 + 6 for minibatch in minibatches)
    assert [len(one) for one in filled(22, episode_key="episode")] == [22]
    longer = filled(2, lengths=[5, 7], episode_key="episode")
    assert sorted(len(one) for one in longer) == [5, 7]


def test_an_empty_buffer_is_reported() -> None:
    buffer = filled(4)
    assert len(buffer) == 22
    buffer.empty()
    with pytest.raises(ConfigurationError, match="holds no frames"):
        next(iter(buffer))


# ---- Adam for a group of weights


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() for shape in ((3, 4), (4,), (2,))]


def groups(of: list[Tensor]) -> list[dict[str, object]]:
    return [{"params": of[:2], "lr": 0.01}, {"params": of[2:], "lr": 0.1}]


def push(ours: list[Tensor], torchs: list[Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for one, other in zip(ours, torchs, strict=True):
        one.grad = torch.randn(one.shape)
        other.grad = one.grad.clone()


@pytest.mark.parametrize("exchanges_state", [False, True])
def test_it_moves_weights_as_torch_does_to_the_bit(exchanges_state: bool) -> None:
    ours, torchs = weights(), weights()
    adam = GroupAdam(groups(ours), lr=0.1, eps=1e-5)
    other = torch.optim.Adam(groups(torchs), lr=0.1, eps=1e-5, fused=True)
    for seed in range(6):
        push(ours, torchs, seed)
        adam.step()
        other.step()
        if exchanges_state:
            remembered = [copy.deepcopy(optimizer.state_dict()) for optimizer in (other, adam)]
            adam.load_state_dict(remembered[0])
            other.load_state_dict(remembered[1])
    assert all(map(torch.equal, ours, torchs))


def test_a_weight_without_gradient_has_a_zero_gradient() -> None:
    ours = weights()
    adam = GroupAdam(groups(ours), lr=0.1, eps=1e-5)
    ours[0].grad = torch.ones_like(ours[0])
    adam.step()
    moved = [not torch.equal(*pair) for pair in zip(ours, weights(), strict=True)]
    assert moved == [True, False, False]


def test_a_state_of_other_groups_or_with_counts_that_differ_within_one_is_refused() -> None:
    torchs = weights()
    other = torch.optim.Adam(groups(torchs), lr=0.1, eps=1e-5, fused=True)
    for learns in ((True, True, True), (True, False, True)):
        for weight, has_gradient in zip(torchs, learns, strict=True):
            weight.grad = torch.ones_like(weight) if has_gradient else None
        other.step()
    adam = GroupAdam(groups(weights()), lr=0.1, eps=1e-5)
    with pytest.raises(CheckpointError, match="1 to 2 times"):
        adam.load_state_dict(other.state_dict())
    state = adam.state_dict()
    state["param_groups"] = [{**state["param_groups"][0], "params": [0, 1, 2, 3]}]
    with pytest.raises(CheckpointError, match=r"\[4\] weights .* \[\d, \d\]"):
        adam.load_state_dict(state)
