"""The loops of doc/loops give the metrics of the trainers that they reproduce."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra import resolve_experiment, run_experiment
from tests.kit.documents import ROOT
from tests.kit.experiments import metrics_of

SHORT = {
    "stress_testing": (
        "ast_dpo",
        {"EPISODES": 1},
        [
            "training.num_episodes_per_experience=1",
            "ast_chat.evaluation.num_episodes=1",
            "ast_chat.evaluation.use_random_search=false",
        ],
    ),
    "text_protocol": (
        "pure_text_ei",
        {"NUM_ROLLOUTS": 48},
        ["text_rl.rollouts_per_iteration=48", "text_rl.test_scheme=none"],
    ),
    "interactive_proof": ("vanilla_ppo", {}, ["rl.num_test_iterations=1"]),
    "task": ("self_hosted_grpo", {}, ["task.evaluation.num_problems=1"]),
}
"""Trainer of each loop, smaller constants, and overrides of equal sizes and of less evaluation."""
NUM_ITERATIONS = 2
# The trainer's Adam is fused, and small differences grow within an iteration.
RELATIVE_TOLERANCE = {"interactive_proof": 0.01}


@pytest.mark.parametrize("name", SHORT)
def test_a_loop_gives_the_metrics_of_its_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, constants, smaller = SHORT[name]
    folder = ROOT / "doc" / "loops"
    assert len((folder / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 220
    monkeypatch.syspath_prepend(folder)
    loop: Any = importlib.import_module(name)
    vars(loop).update(constants)
    overrides = [*loop.overrides(NUM_ITERATIONS), *smaller]
    loop.overrides = lambda num_iterations: overrides
    experiment = resolve_experiment(trainer=trainer, overrides=overrides)
    run = run_experiment(experiment, runs_dir=str(tmp_path), progress=False, num_threads=1)
    logged = metrics_of(run.run_directory.path)
    torch.set_num_threads(1)
    for number, metrics in enumerate(loop.train(NUM_ITERATIONS)):
        expected = {key: logged[number][key] for key in metrics}
        tolerance = RELATIVE_TOLERANCE.get(name, 1e-4)
        assert metrics == pytest.approx(expected, rel=tolerance, abs=1e-6)
