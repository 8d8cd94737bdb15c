"""Asynchronous rollouts are sampled by older weights, and corrected for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.resume_check import what_was_found
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.samplers import executor
from nip_astra.trainers.ast.behaviour import (
    CorrectedStalenessParameters,
    check_staleness,
    correct_for_staleness,
)
from tests.kit import actors_here
from tests.kit.experiments import ast_trainer, metrics_of, run_in
from tests.kit.resuming import copy_as_killed_after, short_experiment

TRAINERS = ("ast_reinforce", "ast_grpo", "ast_ppo", "ast_dpo", "ast_sft")
CORRECTED = TRAINERS[:3]
GSPO = ("variant=gspo", "staleness_weights=sequence")


@pytest.mark.parametrize(
    ("trainer", "most"),
    [
        *(pytest.param(one, 1, marks=pytest.mark.slow) for one in TRAINERS),
        ("ast_grpo", 3),
    ],
)
def test_asynchronous_rollouts_are_the_same_with_actors_and_after_a_kill(
    trainer: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    resolved = short_experiment(trainer, tmp_path / "x", f"{trainer}.max_staleness={most}")
    kept = {"checkpoint_period": 1, "num_checkpoints_kept": 99}
    alone = run_in(tmp_path, resolved, "alone", **kept)
    # These actors play when they are waited for, and so long after the weights have changed.
    opened = actors_here.install(monkeypatch)
    by_actors = run_in(tmp_path, resolved, "actors", num_actors=2)
    assert opened[0].turn > 4
    assert what_was_found(by_actors) == what_was_found(alone)
    lines = metrics_of(alone)
    assert [line["rollout/staleness"] for line in lines] == [min(i, most) for i in range(4)]
    assert [("staleness/kl" in line) for line in lines] == [False, *([trainer in CORRECTED] * 3)]
    second = sorted(alone.glob("checkpoints/step_*"))[1]
    copy = tmp_path / "copy"
    copy_as_killed_after(alone, second, copy)
    resume_experiment(copy, progress=False)
    assert what_was_found(copy) == what_was_found(alone)


def test_without_staleness_nothing_is_corrected(tmp_path: Path) -> None:
    found = []
    for number, more in enumerate(((), ("ast_grpo.max_staleness=0",))):
        resolved = short_experiment("ast_grpo", tmp_path / f"x{number}", *more, num_iterations=2)
        path = run_in(tmp_path, resolved, f"run{number}")
        assert not any("staleness" in name for line in metrics_of(path) for name in line)
        found.append(what_was_found(path))
    assert found[0] == found[1]


def test_the_rollout_of_an_iteration_is_by_the_weights_of_the_one_before(tmp_path: Path) -> None:
    trees: dict[str, list[RolloutTree]] = {}
    lr = "training.lr=0.05"
    for name in ("0", "1"):
        more = f"ast_grpo.max_staleness={name}"
        trainer = prepare_experiment(
            short_experiment("ast_grpo", tmp_path / name, more, lr, num_iterations=2),
            progress=False,
        ).trainer
        trees[name] = []
        digest = trainer.digest
        kept = trees[name]
        trainer.digest = lambda tree, kept=kept, digest=digest: (kept.append(tree), digest(tree))[1]
        fresh = trainer.rollouts.play(1)
        trainer.train()
    assert trees["0"][0].probes == trees["1"][0].probes
    # The second iteration's probes are those of the untrained attacker.
    assert trees["1"][1].probes == fresh.probes != trees["0"][1].probes


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_turn_what_older_weights_say_into_what_the_new_ones_would(
    tmp_path: Path, level: str
) -> None:
    trainer = prepare_experiment(
        short_experiment("ast_grpo", tmp_path / "x"), progress=False
    ).trainer
    with torch.no_grad():
        tree = trainer.rollouts.play(0)
        played_NT = tree.nodes["probe_logprobs"].clone()
        for one in trainer.policy.parameters():
            one.add_(torch.randn_like(one), alpha=0.05)
        now_NT = trainer.probe_logprobs(tree)
    options = CorrectedStalenessParameters(
        max_staleness=1, staleness_weights=level, max_staleness_weight=1e9
    )
    figures = correct_for_staleness(tree, now_NT, options)
    weights_NT, mask_NT = tree.nodes["importance_weight"], tree.nodes["probe_mask"]
    assert torch.equal(tree.nodes["probe_logprobs"], now_NT)
    gap_NT = (now_NT - played_NT) * mask_NT
    expected = gap_NT if level == "token" else gap_NT.sum(dim=1, keepdim=True).expand_as(gap_NT)
    assert torch.allclose(weights_NT[mask_NT].log(), expected[mask_NT], atol=1e-5)
    assert figures["staleness/kl"] > 0
    assert 0 < figures["staleness/effective_sample_size"] < 1
    assert figures["staleness/truncated_share"] == 0
    bounded = CorrectedStalenessParameters(max_staleness=1, max_staleness_weight=0.5)
    tree.nodes["probe_logprobs"] = played_NT
    assert correct_for_staleness(tree, now_NT, bounded)["staleness/truncated_share"] > 0.2
    assert float(tree.nodes["importance_weight"].max()) == 0.5


def test_what_cannot_be_played_or_corrected_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(number: int, *more: str) -> None:
        trainer = more[0].partition(".")[0]
        prepare_experiment(short_experiment(trainer, tmp_path / f"{number}", *more), progress=False)

    with pytest.raises(ConfigurationError, match=r"ast_grpo\.max_staleness .*temperature"):
        prepare(0, "ast_grpo.max_staleness=1", "ast_chat.attacker.temperature=0.7")
    # Pairs are learnt from whoever said them, however they were drawn.
    prepare(1, "ast_dpo.max_staleness=1", "ast_chat.attacker.temperature=0.7")
    assert "num_actors" in caplog.text
    with pytest.raises(ConfigurationError, match=r"Set ast_grpo\.staleness_weights=sequence"):
        prepare(2, "ast_grpo.max_staleness=1", "ast_grpo.variant=gspo")
    prepare(3, "ast_grpo.max_staleness=1", *(f"ast_grpo.{one}" for one in GSPO))
    target: Any = SimpleNamespace(language_model=object())
    with pytest.raises(ConfigurationError, match=r"ast_dpo\.max_staleness .*the target cannot"):
        check_staleness({"target": target}, None, "ast_dpo", has_actors=True)


def test_a_tree_is_plain_values_and_back(tiny_scenario: Path) -> None:
    trainer = ast_trainer("ast_dpo", tiny_scenario)
    with torch.no_grad():
        tree = trainer.rollouts.play(0)
    again = RolloutTree.from_plain(tree.to_plain(), trainer.rollouts.prompts_of(0))
    assert list(again.rows()) == list(tree.rows())
    assert again.contexts == tree.contexts
    assert again.num_unique_tokens == tree.num_unique_tokens
