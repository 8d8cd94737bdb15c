"""With tempered or truncated sampling, gradients use the sampling distribution or a correction."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.resume_check import read_run_contents
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.samplers import executor
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.behaviour import (
    CorrectedStalenessParameters,
    check_staleness,
    correct_for_staleness,
)
from nip_astra.trainers.ast.rollouts import node_samples
from tests.kit import actors_here
from tests.kit.experiments import ast_trainer, metrics_of, run_in
from tests.kit.messages import says
from tests.kit.resuming import copy_as_killed_after, short_experiment
from tests.kit.tiny import experience_of

TRAINERS = ("ast_ppo", "ast_grpo", "ast_reinforce")
TEMPERED = ("ast_chat.attacker.temperature=0.5",)
CUT = (*TEMPERED, "ast_chat.attacker.top_p=0.9")
LONG = ("ast_chat.attacker.min_new_tokens=2",)

# ---- the mean gradient, by enumeration of all possible probes

CONTEXT = [2, 7, 9]


def _all_probes(trainer: AstTrainer) -> list[list[int]]:
    """Every nonempty probe of at most two tokens."""
    banned = set(trainer.policy.token_sampler.banned_ids.tolist())
    tokens = [i for i in range(len(trainer.policy.tokenizer)) if i not in banned]
    (end,) = trainer.policy.end_ids
    return [[a, b] for a in tokens for b in tokens if a != end]


def _model_logprobs(trainer: AstTrainer, rows: list[list[int]], *, drawn: bool) -> Tensor:
    """Log-probabilities of rows by the module itself; minus infinity if truncated."""
    sampling, policy = trainer.attacker.sampling, trainer.policy
    ids = torch.tensor([[*CONTEXT, *row] for row in rows])
    logits = policy.module(ids).logits[:, len(CONTEXT) - 1 : -1]
    if drawn:
        never = torch.zeros(logits.shape[-1]).index_fill(
            0, policy.token_sampler.banned_ids, float("-inf")
        )
        logits = logits / sampling.temperature + never
        logits[:, : sampling.min_new_tokens, list(policy.end_ids)] = float("-inf")
        probabilities, order = logits.softmax(dim=-1).detach().sort(dim=-1, descending=True)
        is_cut = probabilities.cumsum(dim=-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), -torch.inf)
    logprobs = logits.log_softmax(dim=-1)
    return logprobs.gather(2, ids[:, len(CONTEXT) :].unsqueeze(2)).squeeze(2).sum(dim=1)


def _tree(trainer: AstTrainer, rows: list[list[int]], reward_N: Tensor) -> RolloutTree:
    """A tree whose nodes are the rows, all after the same context."""
    probe, count = torch.tensor(rows), len(rows)
    zeros_N = torch.zeros(count, dtype=torch.long)
    content = {
        "parent": zeros_N - 1,
        "depth": zeros_N,
        "episode": zeros_N,
        "probe": probe,
        "probe_mask": torch.ones_like(probe, dtype=torch.bool),
        "reward": reward_N,
    }
    tree = RolloutTree(
        nodes=TensorDict(content, batch_size=[count]),
        tree_width=count,
        prompts=["hello"],
        probes=[""] * count,
        responses=[""] * count,
        contexts=[CONTEXT],
    )
    tree.nodes["probe_logprobs"] = trainer.probe_logprobs(tree)
    tree.nodes["reference_logprobs"] = tree.nodes["probe_logprobs"].clone()
    return tree


def _gradient(trainer: AstTrainer, value: Tensor) -> Tensor:
    parts = torch.autograd.grad(value, list(trainer.policy.parameters()), allow_unused=True)
    return torch.cat([part.flatten() for part in parts if part is not None])


def _relative_error(
    name: str, scenario: Path, sampling: tuple[str, ...], *behaviour: str, of_sampling: bool
) -> float:
    """Compare the mean gradient of a first step with that of the expected reward."""
    trainer = ast_trainer(
        name,
        scenario,
        *sampling,
        *(f"{name}.behaviour.{part}" for part in behaviour),
        "ast_chat.attacker.max_new_tokens=2",
        *{
            "ast_grpo": ("ast_grpo.variant=dr_grpo", "ast_grpo.kl.weight=0"),
            "ast_reinforce": ("ast_reinforce.kl_mix=0",),
        }[name],
    )
    rows = _all_probes(trainer)
    with torch.no_grad():
        chances_N = _model_logprobs(trainer, rows, drawn=True).exp()
    rows = [row for row, chance in zip(rows, chances_N.tolist(), strict=True) if chance > 0]
    chances_N = chances_N[chances_N > 0]
    assert chances_N.sum().item() == pytest.approx(1.0, abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    reward_N = torch.randn(len(rows), generator=generator)
    tree = _tree(trainer, rows, reward_N)
    assert trainer.behaviour is not None
    trainer.behaviour.prepare(tree, trainer.policy, trainer.sampler.reference.language_model)
    # The loss is a mean over samples of equal weight, and dr_grpo's divides by the length.
    scale = {"ast_grpo": 2, "ast_reinforce": 1}[name] * len(rows)
    samples = node_samples(tree, range(len(rows)), advantage=reward_N * chances_N * scale)
    estimate = -_gradient(trainer, trainer.step(trainer.collate_fn(samples)).loss)
    now_N = _model_logprobs(trainer, rows, drawn=of_sampling)
    exact = _gradient(trainer, (now_N.exp() * reward_N).sum())
    return float((estimate - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["ast_grpo", "ast_reinforce"])
@pytest.mark.parametrize("sampling", [TEMPERED, CUT, LONG], ids=["tempered", "cut", "long"])
def test_by_default_the_mean_gradient_is_that_of_the_expected_reward_of_the_sampler(
    name: str, sampling: tuple[str, ...], tiny_scenario: Path
) -> None:
    assert _relative_error(name, tiny_scenario, sampling, of_sampling=True) < 1e-3
    assert _relative_error(name, tiny_scenario, sampling, "logprobs=raw", of_sampling=True) > 0.2


@pytest.mark.parametrize("name", ["ast_grpo", "ast_reinforce"])
def test_weights_of_whole_probes_make_the_mean_gradient_that_of_the_raw_distribution(
    name: str, tiny_scenario: Path
) -> None:
    def error(*behaviour: str) -> float:
        options = ("logprobs=raw", *behaviour)
        return _relative_error(name, tiny_scenario, TEMPERED, *options, of_sampling=False)

    assert error("importance_weights=sequence", "max_importance_weight=1e9") < 1e-3
    uncorrected = error()
    assert uncorrected > 0.2
    assert error("importance_weights=token", "max_importance_weight=1e9") < uncorrected


# ---- rollouts


@pytest.mark.parametrize("name", ["ast_ppo", "ast_grpo"])
@pytest.mark.parametrize("sampling", [(), TEMPERED, CUT], ids=["plain", "tempered", "cut"])
def test_the_first_ratios_are_one_under_the_distribution_sampled_from(
    name: str, sampling: tuple[str, ...], tiny_scenario: Path
) -> None:
    """It is sharper than the model's, and at first the reference's too."""
    trainer = ast_trainer(name, tiny_scenario, *sampling)
    experience = experience_of(trainer)
    metrics = trainer.step(trainer.collate_fn(experience.samples)).metrics
    assert float(metrics["ratio_mean"]) == pytest.approx(1.0, abs=1e-4)
    assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics["clip_fraction"]) == 0.0
    if sampling:
        nodes = experience.tree.nodes
        drawn_NT = nodes["drawn_logprobs"]
        assert (drawn_NT - nodes["probe_logprobs"])[nodes["probe_mask"]].mean() > 0.1
        torch.testing.assert_close(drawn_NT, nodes["drawn_reference_logprobs"], atol=1e-4, rtol=0)


def test_importance_weights_are_bounded_and_logged(tiny_scenario: Path) -> None:
    options = ("logprobs=raw", "importance_weights=token", "max_importance_weight=1.5")
    behaviour = (f"ast_ppo.behaviour.{option}" for option in options)
    experience = experience_of(ast_trainer("ast_ppo", tiny_scenario, *TEMPERED, *behaviour))
    weights_NT, metrics = experience.tree.nodes["importance_weight"], experience.metrics
    assert weights_NT.max() <= 1.5
    mean = float(weights_NT[experience.tree.nodes["probe_mask"]].mean())
    assert metrics["importance_weight/mean"] == pytest.approx(mean)
    assert 0.0 <= metrics["importance_weight/truncated_share"] < 1.0


@pytest.mark.parametrize(("logprobs", "column"), [("sampling", "drawn"), ("raw", "probe")])
def test_the_entropy_bonus_is_that_of_the_distribution_learnt(
    logprobs: str, column: str, tiny_scenario: Path
) -> None:
    trainer = ast_trainer(
        "ast_ppo",
        tiny_scenario,
        *CUT,
        f"ast_ppo.behaviour.logprobs={logprobs}",
        "ast_chat.reward.terms=[{_type: entropy_bonus, weight: 1.0}]",
    )
    tree = experience_of(trainer).tree
    nodes, mask_NT = tree.nodes, tree.nodes["probe_mask"]
    entropies_N = -(nodes[f"{column}_logprobs"] * mask_NT).sum(dim=1) / mask_NT.sum(dim=1)
    is_empty_N = torch.tensor([not probe.strip() for probe in tree.probes])
    expected_N = entropies_N.masked_fill(is_empty_N, 0.0)
    assert torch.allclose(nodes["reward/entropy_bonus"], expected_N, atol=1e-6)


@pytest.mark.parametrize("name", TRAINERS)
def test_without_temper_or_cuts_no_choice_changes_anything(name: str, tiny_scenario: Path) -> None:
    losses = []
    for logprobs in ("sampling", "raw"):
        trainer = ast_trainer(name, tiny_scenario, f"{name}.behaviour.logprobs={logprobs}")
        with mock.patch.object(trainer.policy, "support_mask") as cuts:
            experience = experience_of(trainer)
        cuts.assert_not_called()
        assert "importance_weight" not in experience.tree.nodes.keys()  # noqa: SIM118
        losses.append(trainer.step(trainer.collate_fn(experience.samples)).loss)
        assert not trainer.results.get("warnings")
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", TRAINERS)
def test_uncorrected_off_policy_gradients_are_reported_once(
    name: str, tiny_scenario: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = ast_trainer(name, tiny_scenario, *CUT, f"{name}.behaviour.logprobs=raw")
        trainer.train()
    assert sum("off-policy" in record.getMessage() for record in caplog.records) == 1
    (warning,) = (text for text in trainer.results["warnings"] if "off-policy" in text)
    assert says(warning, "temperature 0.5, top_p 0.9", f"{name}.behaviour.logprobs=sampling")
    of_pairs = ast_trainer("ast_dpo", tiny_scenario, *CUT)
    assert of_pairs.behaviour is None
    assert not of_pairs.results.get("warnings")


@pytest.mark.parametrize("variant", ["gspo", "rloo"])
def test_weights_of_tokens_are_refused_where_a_probe_has_one_ratio(
    variant: str, tiny_scenario: Path
) -> None:
    options = (f"ast_grpo.variant={variant}", *TEMPERED, "ast_grpo.behaviour.logprobs=raw")
    weights = "ast_grpo.behaviour.importance_weights="
    with pytest.raises(ConfigurationError, match=rf"{variant}.*sequence"):
        ast_trainer("ast_grpo", tiny_scenario, *options, f"{weights}token")
    trainer = ast_trainer("ast_grpo", tiny_scenario, *options, f"{weights}sequence")
    assert trainer.step(trainer.collate_fn(experience_of(trainer).samples)).loss.isfinite()
    stale = (f"ast_ppo.loss={variant}", "ast_ppo.max_staleness=1")
    with pytest.raises(ConfigurationError, match=rf"{variant}.*ast_ppo.staleness_weights=sequence"):
        ast_trainer("ast_ppo", tiny_scenario, *stale)
    ast_trainer("ast_ppo", tiny_scenario, *stale, "ast_ppo.staleness_weights=sequence")


@pytest.mark.parametrize("greedy", ["temperature=0", "top_k=1"])
def test_greedy_probes_come_from_no_distribution(tiny_scenario: Path, greedy: str) -> None:
    with pytest.raises(ConfigurationError, match=greedy.replace("=", " ")):
        ast_trainer("ast_ppo", tiny_scenario, f"ast_chat.attacker.{greedy}")


# ---- rollouts of older weights


@pytest.mark.parametrize(
    ("trainer", "most"),
    [
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in (*TRAINERS, "ast_dpo")),
        pytest.param("ast_sft", 1, marks=pytest.mark.slow),
        ("ast_grpo", 3),
    ],
)
def test_asynchronous_rollouts_are_the_same_with_actors_and_after_a_kill(
    trainer: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    resolved = short_experiment(trainer, tmp_path / "x", f"{trainer}.max_staleness={most}")
    alone = run_in(tmp_path, resolved, "alone", checkpoint_period=1, num_checkpoints_kept=99)
    # These actors play when their results are awaited, long after the weights have changed.
    opened = actors_here.install(monkeypatch)
    by_actors = run_in(tmp_path, resolved, "actors", num_actors=2)
    assert opened[0].turn > 4
    assert read_run_contents(by_actors) == read_run_contents(alone)
    lines = metrics_of(alone)
    assert [line["rollout/staleness"] for line in lines] == [min(i, most) for i in range(4)]
    assert [("staleness/kl" in line) for line in lines] == [False, *([trainer in TRAINERS] * 3)]
    copy = tmp_path / "copy"
    copy_as_killed_after(alone, sorted(alone.glob("checkpoints/step_*"))[1], copy)
    resume_experiment(copy, progress=False)
    assert read_run_contents(copy) == read_run_contents(alone)


def test_the_rollout_of_an_iteration_uses_the_weights_of_the_previous_iteration(
    tmp_path: Path,
) -> None:
    probes = []
    for staleness in (0, 1):
        options = (f"ast_grpo.max_staleness={staleness}", "training.lr=0.05")
        folder = tmp_path / f"{staleness}"
        resolved = short_experiment("ast_grpo", folder, *options, num_iterations=2)
        trainer = prepare_experiment(resolved, progress=False).trainer
        of_initial_weights = trainer.rollouts.play(1).probes
        with mock.patch.object(trainer, "digest", wraps=trainer.digest) as digest:
            trainer.train()
        probes.append([call.args[0].probes for call in digest.call_args_list])
    fresh, stale = probes
    assert fresh[0] == stale[0]
    assert stale[1] == of_initial_weights != fresh[1]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_turn_means_under_old_weights_into_means_under_new_weights(
    tmp_path: Path, level: str
) -> None:
    resolved = short_experiment("ast_grpo", tmp_path / "x")
    trainer = prepare_experiment(resolved, progress=False).trainer
    with torch.no_grad():
        tree = trainer.rollouts.play(0)
        played_NT = tree.nodes["probe_logprobs"].clone()
        for weight in trainer.policy.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
        now_NT = trainer.probe_logprobs(tree)
    options = CorrectedStalenessParameters(
        max_staleness=1, staleness_weights=level, max_staleness_weight=1e9
    )
    metrics = correct_for_staleness(tree, now_NT, options)
    weights_NT, mask_NT = tree.nodes["importance_weight"], tree.nodes["probe_mask"]
    assert torch.equal(tree.nodes["probe_logprobs"], now_NT)
    gap_NT = (now_NT - played_NT) * mask_NT
    expected = gap_NT if level == "token" else gap_NT.sum(dim=1, keepdim=True).expand_as(gap_NT)
    assert torch.allclose(weights_NT[mask_NT].log(), expected[mask_NT], atol=1e-5)
    assert metrics["staleness/kl"] > 0
    assert 0 < metrics["staleness/effective_sample_size"] < 1
    assert metrics["staleness/truncated_share"] == 0
    bounded = CorrectedStalenessParameters(max_staleness=1, max_staleness_weight=0.5)
    tree.nodes["probe_logprobs"] = played_NT
    assert correct_for_staleness(tree, now_NT, bounded)["staleness/truncated_share"] > 0.2
    assert float(tree.nodes["importance_weight"].max()) == 0.5


def test_unsupported_sampling_and_corrections_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(number: int, *more: str) -> None:
        trainer = more[0].partition(".")[0]
        prepare_experiment(short_experiment(trainer, tmp_path / f"{number}", *more), progress=False)

    with pytest.raises(ConfigurationError, match=r"ast_grpo\.max_staleness .*temperature"):
        prepare(0, "ast_grpo.max_staleness=1", "ast_chat.attacker.temperature=0.7")
    # Pairs are learnt whatever the sampler and its options.
    prepare(1, "ast_dpo.max_staleness=1", "ast_chat.attacker.temperature=0.7")
    assert "num_actors" in caplog.text
    with pytest.raises(ConfigurationError, match=r"Set ast_grpo\.staleness_weights=sequence"):
        prepare(2, "ast_grpo.max_staleness=1", "ast_grpo.variant=gspo")
    gspo = ("ast_grpo.variant=gspo", "ast_grpo.staleness_weights=sequence")
    prepare(3, "ast_grpo.max_staleness=1", *gspo)
    target: Any = SimpleNamespace(language_model=object())
    with pytest.raises(ConfigurationError, match=r"ast_dpo\.max_staleness .*the target cannot"):
        check_staleness({"target": target}, None, "ast_dpo", has_actors=True)
