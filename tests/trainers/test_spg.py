"""Provers and verifiers that anticipate each other learn by every variant, with right steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.ippo import IppoObjective
from nip_astra.rl_objectives.objective import frames_of
from nip_astra.rl_objectives.spg import shaping_losses
from nip_astra.rl_objectives.stackelberg import VARIANTS, agent_updates
from nip_astra.trainers.spg import SpgTrainer, policy_weights
from tests.kit.learning import Learning
from tests.kit.toy_protocol_scenario import KIND, merged, toy_trainer

pytestmark = pytest.mark.usefixtures("toy_protocol")

CALM = {"ppo": {"entropy_weight": 0.0, "normalize_advantage": False}}
WORD_AND_VERDICT = {
    "interaction_protocol": "adp",
    "rl": {"num_iterations": 18, "frames_per_batch": 256, "minibatch_size": 256, "lr": 0.03},
    "ppo": {"entropy_weight": 0.1},
}
SETTINGS = [{"variant": variant} for variant in VARIANTS] + [
    {"variant": "spg", "ihvp_variant": "conjugate_gradient"},
    {"variant": "spg", "ihvp_variant": "neumann"},
]


def spg_trainer(**more: Any) -> SpgTrainer:
    trainer = toy_trainer("spg", **merged({"rl": {"num_epochs": 1}}, more))
    assert isinstance(trainer, SpgTrainer)
    return trainer


def gradients(trainer: Any, batch: TensorDict, names: tuple[str, ...] | None = None) -> dict:
    """Gradients of the weights after a minibatch, the complete batch, by agent."""
    trainer.optimizers.zero_grad()
    figures = trainer.loss_module.compute_gradients(batch.flatten(), names or trainer.agents.names)
    by_agent = {
        name: [
            None if p.grad is None else p.grad.clone() for p in trainer.agents[name].parameters()
        ]
        for name in trainer.agents.names
    }
    return by_agent | {"figures": figures}


def policy_part(trainer: Any, by_agent: dict, name: str) -> torch.Tensor:
    """The gradient of an agent's policy, with separate bodies."""
    policy = {id(p) for p in policy_weights(trainer.agents[name])}
    pairs = zip(trainer.agents[name].parameters(), by_agent[name], strict=True)
    return torch.cat([grad.flatten() for p, grad in pairs if id(p) in policy])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "_".join(s.values()))
def test_every_variant_and_inverse_learns_a_word_and_its_meaning(
    learning: Learning, settings: dict[str, Any]
) -> None:
    rl = {"num_epochs": 2 if VARIANTS[settings["variant"]].is_clipped else 1}
    more = {"rl": rl, "seed": learning.seed}
    trainer = spg_trainer(spg=settings, **merged(WORD_AND_VERDICT, more))
    trainer.train()
    learning.check(trainer.state.last["mean_accuracy"], threshold=0.85, best=1.0)


def test_without_followers_an_agent_learns_as_by_ppo_with_frames_of_all() -> None:
    """The policy gradient is the same, except for the mean over all frames, not only its own."""
    one_group = {"variant": "pspg", "stackelberg_sequence": [["verifier", "prover"]]}
    trainer = spg_trainer(spg=one_group, **CALM)
    batch = trainer.collect()
    ours = gradients(trainer, batch)
    ppo = IppoObjective(trainer.agents, trainer.hyper_params.ppo, trainer.rl)
    trainer.loss_module = ppo
    theirs = gradients(trainer, batch)
    for name in trainer.agents.names:
        share = trainer.agents.is_acting(name, batch.flatten()).float().mean()
        assert 0 < share < 1
        torch.testing.assert_close(
            policy_part(trainer, ours, name), share * policy_part(trainer, theirs, name)
        )
        critic = [g for g in ours[name] if g is not None]
        assert len(critic) == sum(1 for g in theirs[name] if g is not None)


@pytest.mark.parametrize("use_shared_body", [False, True])
def test_directions_are_those_of_the_losses_of_all_frames(use_shared_body: bool) -> None:
    trainer = spg_trainer(
        spg={"variant": "lola", "opponent_step_factor": 100.0},
        rl={"use_shared_body": use_shared_body},
        **merged(CALM, {"ppo": {"critic_coef": 0.0}}),
    )
    batch = trainer.collect()
    of_trainer = gradients(trainer, batch)
    frames, agents = batch.flatten(), trainer.agents
    logprobs = torch.stack([agents.evaluate(n, frames).logprobs_B for n in agents.names], dim=1)
    mask = torch.stack([agents.is_acting(name, frames) for name in agents.names], dim=1)
    assert not (mask[:, 0] & mask[:, 1]).any()  # sequential: rounds alone have no mixed derivative
    losses = shaping_losses(
        logprobs,
        frames["agents", "advantage"].squeeze(-1),
        mask,
        episode_B=frames["episode"],
        round_B=frames["round"],
    )
    updates = agent_updates(
        list(losses),
        [policy_weights(agents[name]) for name in agents.names],
        rule=trainer.loss_module.rule,
        step_sizes=trainer.loss_module.step_sizes(),
        groups=trainer.loss_module.groups,
    )
    leader = agents.number("verifier")
    assert updates[leader].shaping_P.norm() > 0.01 * updates[leader].gradient_P.norm() > 0
    for number, name in enumerate(agents.names):
        expected = torch.cat([part.flatten() for part in updates[number].update])
        torch.testing.assert_close(
            policy_part(trainer, of_trainer, name), expected, rtol=1e-4, atol=1e-7
        )


def test_a_shared_body_also_learns_values() -> None:
    def shared(critic_coef: float) -> SpgTrainer:
        return spg_trainer(rl={"use_shared_body": True}, ppo={"critic_coef": critic_coef})

    without, with_values = shared(0.0), shared(0.5)
    batch = without.collect()
    plain, both = (gradients(trainer, batch) for trainer in (without, with_values))
    for name in without.agents.names:
        agent = with_values.agents[name]
        body = list(agent.policy_body.parameters())
        losses = with_values.loss_module.agent_losses(name, frames_of(batch.flatten()))
        of_values = torch.autograd.grad(losses["loss_value"], body)
        places = [id(weight) for weight in agent.parameters()]
        assert body
        for weight, of_value in zip(body, of_values, strict=True):
            place = places.index(id(weight))
            difference = both[name][place] - plain[name][place]
            torch.testing.assert_close(difference, of_value, rtol=1e-4, atol=1e-6)


TWO_FOLLOWERS = {"interaction_protocol": "debate", "debate": {"max_message_rounds": 2}}


@pytest.mark.parametrize(
    ("settings", "protocol"),
    [*((settings, {}) for settings in SETTINGS), *((s, TWO_FOLLOWERS) for s in SETTINGS[:2])],
)
def test_followers_are_foreseen_together_and_not_where_they_are_frozen(
    settings: dict[str, Any], protocol: dict[str, Any]
) -> None:
    trainer = spg_trainer(spg=settings, **protocol)
    followers = [name for name in trainer.agents.names if name != "verifier"]
    batch = trainer.collect()
    both = gradients(trainer, batch)["figures"]
    alone = gradients(trainer, batch, ("verifier",))
    frozen = alone["figures"]["verifier"]
    assert both["verifier"]["shaping_norm"] > 0
    assert {float(both[name]["shaping_norm"]) for name in followers} == {0.0}
    assert frozen["shaping_norm"] == frozen["lookahead_norm"] == 0
    assert all(grad is None for name in followers for grad in alone[name])
    torch.testing.assert_close(frozen["policy_grad_norm"], both["verifier"]["policy_grad_norm"])


@pytest.mark.parametrize(
    ("more", "leaders", "follower"),
    [
        ({}, ["verifier"], "prover"),
        ({"spg": {"stackelberg_sequence": [["prover"], ["verifier"]]}}, ["prover"], "verifier"),
        # An actor that never moves anticipates nobody, nor does a random agent.
        ({KIND: {"agents": {"prover": {"agent_lr_factor": {"actor": 0.0}}}}}, [], "verifier"),
        ({KIND: {"agents": {"prover": {"is_random": True}}}}, [], "verifier"),
    ],
)
def test_the_sequence_decides_who_foresees(
    more: dict[str, Any], leaders: list[str], follower: str
) -> None:
    trainer = spg_trainer(**more)
    figures = gradients(trainer, trainer.collect())["figures"]
    assert figures[follower]["shaping_norm"] == 0
    assert [n for n, values in figures.items() if values.get("shaping_norm", 0) > 0] == leaders


def test_opponent_steps_are_learning_rates_of_now() -> None:
    trainer = spg_trainer(
        spg={"variant": "lola", "opponent_step_factor": 3.0},
        rl={"lr": 0.1, "anneal_lr": True, "num_iterations": 4},
        **{KIND: {"agents": {"prover": {"agent_lr_factor": {"actor": 0.5}}}}},
    )
    trainer.state.iteration = 1
    sizes = trainer.loss_module.step_sizes()
    by_name = dict(zip(trainer.agents.names, sizes, strict=True))
    assert by_name == pytest.approx({"verifier": 0.3 * 0.75, "prover": 0.15 * 0.75})


def test_losses_of_the_module_are_those_without_opponent_shaping() -> None:
    trainer = spg_trainer(spg={"variant": "lola"})
    batch = trainer.collect()
    entries = trainer.loss_module(batch.flatten())
    assert {"loss_policy_prover", "loss_value_prover", "loss_entropy_verifier"} <= set(
        entries.keys()
    )
    policy = policy_weights(trainer.agents["verifier"])
    loss = entries["loss_policy_verifier"] + entries["loss_entropy_verifier"]
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy)]).norm()
    figures = gradients(trainer, batch)["figures"]["verifier"]
    torch.testing.assert_close(figures["policy_grad_norm"], norm)


@pytest.mark.parametrize(
    ("variant", "advice"), [("spg", "pspg"), ("lola", "pola"), ("sos", "psos"), ("psos", None)]
)
def test_plain_losses_that_go_several_times_over_frames_are_warned_of(
    variant: str, advice: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        spg_trainer(spg={"variant": variant}, rl={"num_epochs": 2})
    assert ("rl.num_epochs=1" in caplog.text) is (advice is not None)
    assert advice is None or f"spg.variant={advice}," in caplog.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"stackelberg_sequence": [["prover"]]}, r"\[\['prover'\]\].*each agent.*verifier"),
        ({"stackelberg_sequence": [["prover", "verifer"]]}, "verifer"),
        ({"ihvp_rho": 0.0}, "nystrom"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        spg_trainer(spg=settings)
