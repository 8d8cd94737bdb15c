"""How agents learn from a batch: minibatches, who learns, clipping, learning rates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nip_astra.errors import NonFiniteLossError
from nip_astra.parameters.agents import LrFactors
from tests.kit.toy_protocol_scenario import ToyAgentParameters, ToyBody, toy_trainer
from tests.trainers.test_rl_tensordict_base import AGENTS, changed, parts_changed, weights_of

pytestmark = pytest.mark.usefixtures("toy_protocol")


def test_the_first_minibatch_has_ratio_one() -> None:
    trainer = toy_trainer(rl={"minibatch_size": 96})
    batch = trainer.collect()
    found = trainer.loss_module(batch.flatten())
    for name in AGENTS:
        assert float(found[f"{name}/kl"]) == pytest.approx(0.0, abs=1e-6)
        assert float(found[f"{name}/ess"]) == pytest.approx(1.0, abs=1e-5)
        assert float(found[f"{name}/clip_fraction"]) == 0.0


def test_the_last_smaller_minibatch_is_stepped_too() -> None:
    trainer = toy_trainer()
    trainer.train()
    assert trainer.state.num_optimizer_steps == 3 * 2 * 3, "96 frames are 40 + 40 + 16"


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
    assert moved == {
        "prover.policy_body",
        "prover.policy_head",
        "prover.value_body",
        "prover.value_head",
        "verifier.value_body",
        "verifier.value_head",
    }


def test_an_agent_out_of_turn_keeps_its_weights_and_what_its_optimizer_remembers() -> None:
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
        trainer = toy_trainer(
            rl={"grad_clipping": clipping, "max_grad_norm": 0.01},
            toy_protocol={
                "agents": {"verifier": {"update_schedule": {"_type": "constant", "is_on": False}}}
            },
        )
        batch = trainer.collect()
        # Whatever stands in the gradients of who does not learn.
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
    agents = {
        "verifier": {
            "agent_lr_factor": {"actor": 0.5, "critic": 2.0},
            "body_lr_factor": {"actor": 0.25, "critic": 1.0},
        }
    }
    trainer = toy_trainer(
        rl={"anneal_lr": True, "lr": 0.08, "num_iterations": 4}, toy_protocol={"agents": agents}
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


def test_random_agents_play_and_do_not_learn() -> None:
    trainer = toy_trainer(toy_protocol={"agents": {"prover": {"is_random": True}}})
    trainer.train()
    assert trainer.results["after"]["prover/mean_message_entropy"] == pytest.approx(1.0)
    assert set(trainer.optimizers.optimizers) == {"verifier"}


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step() -> None:
    trainer = toy_trainer()
    batch = trainer.collect()
    batch["agents", "value_target"][0] = float("nan")
    before = weights_of(trainer)
    with pytest.raises(NonFiniteLossError, match="in iteration 1"):
        trainer.learner.learn(batch, 0)
    finite = {name for name, value in weights_of(trainer).items() if bool(value.isfinite().all())}
    assert finite == set(before)
