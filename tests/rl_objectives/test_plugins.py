"""Policy losses and advantages of a plug-in train in every trainer family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nip_astra as na
from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rl_objectives.advantages import compute_advantages
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from tests.kit.experiments import FAST, TASK, run_in

ONE = ("training.num_iterations=1", "training.num_episodes_per_experience=2")
PROOFS = (
    *("rl.num_iterations=1", "rl.num_test_iterations=1", "rl.frames_per_batch=63"),
    *("rl.num_epochs=1", "graph_isomorphism.dataset.num_train=20"),
    *("graph_isomorphism.dataset.num_test=10", "rl.pretrain_agents=false"),
)
LOSS = ("loss=mine", "loss_options.epsilon=0.3")
ADVANTAGE = ("advantage=mine", "advantage_options.power=2.0")
# Overrides, and options by the section that has them.
FAMILIES = {
    "ast_grpo": ((*FAST, *ONE), {"ast_grpo": (*LOSS, *ADVANTAGE)}),
    "ast_ppo": ((*FAST, *ONE), {"ast_ppo": LOSS}),
    **{
        name: ((*TASK, *ONE), {f"{name}.policy_loss": LOSS, name: ADVANTAGE})
        for name in ("self_hosted_grpo", "remote_api_grpo")
    },
    "vanilla_ppo": (PROOFS, {"ppo": LOSS}),
}


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("trainer", FAMILIES)
def test_a_policy_loss_and_an_advantage_of_a_few_lines_train_in_every_family(
    trainer: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    options_used: set[str] = set()

    @na.register_policy_loss("mine")
    def loss(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, epsilon: float = 0.2):  # type: ignore[no-untyped-def]
        options_used.add(f"loss_options.epsilon={epsilon}")
        ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
        clipped_BT = ratio_BT.clamp(1 - epsilon, 1 + epsilon)
        return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)

    @na.register_advantage("mine")
    def advantage(rewards_N, group_N, run_N, *, power: float = 1.0):  # type: ignore[no-untyped-def]
        options_used.add(f"advantage_options.power={power}")
        advantages_N = torch.zeros_like(rewards_N)
        for group in group_N.unique():
            is_own_N = group_N == group
            advantages_N[is_own_N] = rewards_N[is_own_N] - rewards_N[is_own_N].nanmedian()
        return advantages_N.abs() ** power * advantages_N.sign()

    short, options = FAMILIES[trainer]
    own = [f"{section}.{option}" for section, given in options.items() for option in given]
    scenarios = dict.fromkeys(("ast_grpo", "ast_ppo"), str(tiny_scenario))
    scenarios["vanilla_ppo"] = "graph_isomorphism_small"
    resolved = resolve_experiment(
        trainer=trainer, scenario=scenarios.get(trainer), overrides=[*short, *own]
    )
    run_in(tmp_path, resolved, num_threads=1)
    assert options_used == {option for option in (LOSS[1], ADVANTAGE[1]) if option in str(own)}


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("trainer", ["ast_grpo", "remote_api_grpo"])
@pytest.mark.parametrize("option", ["baseline=leave_one_out", "scale=batch", "std_epsilon=0.1"])
def test_options_of_the_shipped_advantage_are_refused_beside_that_of_a_plugin(
    trainer: str, option: str
) -> None:
    @na.register_advantage("mine")
    def advantage(rewards_N, group_N, run_N):  # type: ignore[no-untyped-def]
        return rewards_N

    own = [f"{trainer}.advantage=mine", f"{trainer}.{option}"]
    with pytest.raises(ParameterError, match=rf"{option.partition('=')[0]}.*advantage"):
        resolve_experiment(trainer=trainer, overrides=own)


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize(
    ("result_of_loss", "fact"),
    [(lambda loss_BT: loss_BT.sum(), r"shape \[\]"), (lambda loss_BT: (loss_BT, {}), "tuple")],
)
def test_a_policy_loss_without_a_loss_for_each_token_is_refused_by_name(
    result_of_loss: Callable[[torch.Tensor], object], fact: str
) -> None:
    na.register_policy_loss("mine")(
        lambda logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT: result_of_loss(logprobs_BT)
    )
    tokens_BT, mask_BT = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match=rf"'mine'.*{fact}.*\[2, 3\]"):
        PolicyLoss.of("mine").of_tokens(tokens_BT, None, torch.ones(2), mask_BT)


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize(
    ("result_of_rewards", "fact"),
    [
        (lambda rewards_N: rewards_N[:-1], r"\[2\].*\[3\]"),
        (lambda rewards_N: rewards_N.tolist(), "list"),
        (lambda rewards_N: rewards_N / 0.0, "NaN or infinity"),
    ],
)
def test_an_advantage_that_is_no_number_per_sample_is_refused_by_name(
    result_of_rewards: Callable[[torch.Tensor], object], fact: str
) -> None:
    na.register_advantage("mine")(lambda rewards_N, group_N, run_N: result_of_rewards(rewards_N))
    rewards_N, group_N = torch.tensor([1.0, torch.nan, 2.0]), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ConfigurationError, match=f"'mine'.*{fact}"):
        compute_advantages("mine", rewards_N, group_N)


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("self_hosted_grpo.policy_loss.loss=cipso", "cispo"),
        ("self_hosted_grpo.advantage=grup", "group"),
        ("self_hosted_grpo.policy_loss.loss_options.dual_clp=3", "dual_clip"),
        ("self_hosted_grpo.policy_loss.loss_options.dual_clip=wide", "wide"),
        ("self_hosted_grpo.advantage_options.baselin=mean", "baseline"),
    ],
)
def test_unknown_names_and_options_name_the_nearest(override: str, facts: str) -> None:
    with pytest.raises(ParameterError, match=facts):
        resolve_experiment(trainer=override.partition(".")[0], overrides=[override])


@pytest.mark.parametrize(
    ("register", "missing"),
    [(na.register_policy_loss, "mask_BT"), (na.register_advantage, "run_N")],
)
def test_a_function_that_lacks_an_argument_is_refused(register: Any, missing: str) -> None:
    def two_arguments(first: Any, second: Any, *, scale: float = 1.0) -> None: ...

    with pytest.raises(ConfigurationError, match=missing):
        register("mine")(two_arguments)
