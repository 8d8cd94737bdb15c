"""The verified claims about presets, again with one seed: each beats its comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment

pytestmark = pytest.mark.slow
ALONE = 0.57
"""The share of digits that the verifier tells alone, learning from labels."""


def run(tmp_path: Path, trainer: str, *overrides: str) -> dict[str, Any]:
    resolved = resolve_experiment(trainer=trainer, overrides=overrides)
    return run_experiment(resolved, runs_dir=str(tmp_path), run_id="one", progress=False).results


@pytest.mark.parametrize("trainer", ["mappo", "reinforce", "spg"])
def test_a_word_lifts_the_verifier_above_its_accuracy_alone(tmp_path: Path, trainer: str) -> None:
    low, _ = run(tmp_path, trainer)["after"]["mean_accuracy_interval"]
    assert low > ALONE + 0.05


@pytest.mark.parametrize(
    ("trainer", "overrides"),
    [
        *(
            (f"ast_{name}", ())
            for name in ("dpo", "ipo", "ppo", "grpo", "reinforce", "sft", "simpo")
        ),
        # By the paper's clip half of the probes are clipped at once: 0.04 to 0.16.
        (
            "ast_grpo",
            ("ast_grpo.variant=gspo", "ast_grpo.clip_low=0.03", "ast_grpo.clip_high=0.04"),
        ),
    ],
)
def test_an_attacker_learns_to_make_pocket_chat_fail(
    tmp_path: Path, trainer: str, overrides: tuple[str, ...]
) -> None:
    short = ("ast_chat.evaluation.num_episodes=60", "ast_chat.evaluation.use_random_search=false")
    results = run(tmp_path, trainer, *short, *overrides)
    assert results["before"]["failure_rate"] < 0.2
    assert results["after"]["failure_rate"] > 0.5


@pytest.mark.parametrize(
    ("trainer", "num_iterations"), [("pure_text_ei", 5), ("pure_text_malt", 4)]
)
def test_a_verifier_in_words_learns_from_less_of_its_preset(
    trainer: str, num_iterations: int, tmp_path: Path
) -> None:
    """The 95 % intervals before and after do not overlap; the guide has the complete presets."""
    shorter = (f"num_iterations={num_iterations}", "rollouts_per_iteration=128")
    results = run(tmp_path, trainer, *(f"text_rl.{one}" for one in shorter), "seed=0")
    before, after = results["before"], results["after"]
    assert after["mean_accuracy_interval"][0] > before["mean_accuracy_interval"][1]
    assert after["mean_accuracy"] > 0.8
    assert after["num_episodes"] == 200
    assert results["training"]["num_jobs"] == num_iterations - 1
