"""Policy losses and advantages of a plug-in train in every trainer family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nip_astra as na
from nip_astra.errors import ConfigurationError, DuplicateNameError, ParameterError
from nip_astra.rl_objectives.advantages import compute_advantages
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.rl_objectives.registry import ADVANTAGES, POLICY_LOSSES
from nip_astra.trainers.registry import TRAINERS

TASK = (
    "training.num_iterations=1",
    "training.num_episodes_per_experience=2",
    "task.evaluation.num_problems=2",
)
CHAT = (
    "training.num_iterations=1",
    "training.num_episodes_per_experience=2",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.use_random_search=false",
)
SMALL_PROOFS = (
    *("rl.num_iterations=1", "rl.num_test_iterations=1", "rl.frames_per_batch=63"),
    *("rl.num_epochs=1", "graph_isomorphism.dataset.num_train=20"),
    *("graph_isomorphism.dataset.num_test=10", "rl.pretrain_agents=false"),
)
LOSS = ("loss=mine", "loss_options.epsilon=0.3")
ADVANTAGE = ("advantage=mine", "advantage_options.power=2.0")
FAMILIES = {
    "ast_grpo": (*CHAT, *(f"ast_grpo.{option}" for option in (*LOSS, *ADVANTAGE))),
    "ast_ppo": (*CHAT, *(f"ast_ppo.{option}" for option in LOSS)),
    "self_hosted_grpo": (
        *(f"self_hosted_grpo.policy_loss.{option}" for option in LOSS),
        *(*TASK, *(f"self_hosted_grpo.{option}" for option in ADVANTAGE)),
    ),
    "remote_api_grpo": (
        *(f"remote_api_grpo.policy_loss.{option}" for option in LOSS),
        *(*TASK, *(f"remote_api_grpo.{option}" for option in ADVANTAGE)),
    ),
    "vanilla_ppo": (*SMALL_PROOFS, *(f"ppo.{option}" for option in LOSS)),
}


@pytest.fixture
def _restored() -> Iterator[None]:
    registries = (POLICY_LOSSES, ADVANTAGES, TRAINERS)
    snapshots = [registry.snapshot() for registry in registries]
    yield
    for registry, snapshot in zip(registries, snapshots, strict=True):
        registry.restore(snapshot)


@pytest.fixture
def scenarios(tiny_scenario: Path) -> dict[str, str]:
    """Small scenarios for trainers whose own scenario is larger."""
    chat = dict.fromkeys(("ast_grpo", "ast_ppo", "my_simpo"), str(tiny_scenario))
    return chat | {"vanilla_ppo": "graph_isomorphism_small"}


def run(trainer: str, scenarios: dict[str, str], folder: Path, *overrides: str) -> Any:
    resolved = na.resolve_experiment(
        trainer=trainer, scenario=scenarios.get(trainer), overrides=list(overrides)
    )
    return na.run_experiment(resolved, runs_dir=str(folder), progress=False, num_threads=1)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("trainer", FAMILIES)
def test_a_policy_loss_and_an_advantage_of_a_few_lines_train_in_every_family(
    trainer: str, scenarios: dict[str, str], tmp_path: Path
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

    overrides = FAMILIES[trainer]
    run(trainer, scenarios, tmp_path, *overrides)
    in_file = {part for part in (LOSS[1], ADVANTAGE[1]) if part in " ".join(overrides)}
    assert options_used == in_file


@pytest.mark.usefixtures("_restored")
def test_a_trainer_like_simpo_of_thirty_lines_needs_one_import(
    scenarios: dict[str, str], tmp_path: Path
) -> None:
    code = '''
import nip_astra as na

@na.register_trainer("my_simpo")
class MySimpo(na.AstPreferenceTrainer):
    """Prefer the best probe to the worst by a margin."""

    class Parameters(na.AstPreferenceTrainer.Parameters):
        """The margin."""

        margin: float = na.Field(default=1.0, ge=0)
        """Difference of mean log-probabilities that is enough."""
        length_normalised: bool = True
        """Whether a probe counts by its mean log-probability."""

    def loss(self, batch):
        chosen_B, rejected_B = self.pair_logprobs(batch)
        margins_B = self.parameters.beta * (chosen_B - rejected_B) - self.parameters.margin
        return na.LossOutput(-margins_B.sigmoid().log().mean(), {"margin": margins_B.mean()})
'''
    assert len(code.strip().splitlines()) <= 30
    path = tmp_path / "my_simpo.py"
    path.write_text(code)
    na.load_plugin(path)
    done = run("my_simpo", scenarios, tmp_path / "runs", *CHAT)
    assert done.results["training"]["num_optimizer_steps"] > 0


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("reduce", "fact"),
    [(lambda loss_BT: loss_BT.sum(), r"shape \[\]"), (lambda loss_BT: (loss_BT, {}), "tuple")],
    ids=["a number", "with metrics"],
)
def test_a_policy_loss_without_a_loss_for_each_token_is_refused_by_name(
    reduce: Callable[[torch.Tensor], object], fact: str
) -> None:
    @na.register_policy_loss("mine")
    def mine(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT):  # type: ignore[no-untyped-def]
        return reduce(logprobs_BT * advantages_BT)

    tokens_BT, mask_BT = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match=rf"'mine'.*{fact}.*\[2, 3\]"):
        PolicyLoss.of("mine").of_tokens(tokens_BT, None, torch.ones(2), mask_BT)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda rewards_N: rewards_N[:-1], r"\[2\].*\[3\]"),
        (lambda rewards_N: rewards_N.tolist(), "list"),
        (lambda rewards_N: rewards_N / 0.0, "NaN or infinity"),
    ],
    ids=["too few", "a list", "infinite"],
)
def test_an_advantage_that_is_no_number_per_sample_is_refused_by_name(
    change: Callable[[torch.Tensor], object], fact: str
) -> None:
    @na.register_advantage("mine")
    def mine(rewards_N, group_N, run_N):  # type: ignore[no-untyped-def]
        return change(rewards_N)

    rewards_N, group_N = torch.tensor([1.0, torch.nan, 2.0]), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ConfigurationError, match=f"'mine'.*{fact}"):
        compute_advantages("mine", rewards_N, group_N)


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("self_hosted_grpo.policy_loss.loss=cipso", "cispo"),
        ("ast_grpo.loss=cipso", "cispo"),
        ("self_hosted_grpo.advantage=grup", "group"),
        ("self_hosted_grpo.policy_loss.loss_options.dual_clp=3", "dual_clip"),
        ("self_hosted_grpo.policy_loss.loss_options.dual_clip=wide", "wide"),
        ("self_hosted_grpo.advantage_options.baselin=mean", "baseline"),
    ],
)
def test_unknown_names_and_options_name_the_nearest(override: str, facts: str) -> None:
    with pytest.raises(ParameterError, match=facts):
        na.resolve_experiment(trainer=override.partition(".")[0], overrides=[override])


@pytest.mark.parametrize("register", [na.register_policy_loss, na.register_advantage])
def test_a_built_in_name_cannot_be_taken(register: Any) -> None:
    name = "ppo" if register is na.register_policy_loss else "group"
    with pytest.raises(DuplicateNameError):
        register(name)(lambda *inputs: None)


@pytest.mark.parametrize(
    ("register", "missing"),
    [(na.register_policy_loss, "mask_BT"), (na.register_advantage, "run_N")],
)
def test_a_function_that_lacks_an_argument_is_refused(register: Any, missing: str) -> None:
    def two_arguments(first: Any, second: Any, *, scale: float = 1.0) -> None: ...

    with pytest.raises(ConfigurationError, match=missing):
        register("mine")(two_arguments)
