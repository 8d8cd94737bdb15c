"""The trainers of chat models teach a verifier more than chance explains."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trainer", "num_iterations"), [("pure_text_ei", 5), ("pure_text_malt", 4)]
)
def test_a_verifier_learns_from_its_preset_with_less_of_it(
    trainer: str, num_iterations: int, tmp_path: Path
) -> None:
    """The 95 % intervals before and after do not overlap; the guide has the whole presets."""
    shorter = [f"text_rl.num_iterations={num_iterations}", "text_rl.rollouts_per_iteration=128"]
    resolved = resolve_experiment(trainer=trainer, overrides=[*shorter, "seed=0"])
    run = run_experiment(resolved, runs_dir=str(tmp_path), run_id="run", progress=False)
    before, after = run.results["before"], run.results["after"]
    assert after["mean_accuracy_interval"][0] > before["mean_accuracy_interval"][1]
    assert after["mean_accuracy"] > 0.8
    assert after["num_episodes"] == 200
    assert run.results["training"]["num_jobs"] == num_iterations - 1
