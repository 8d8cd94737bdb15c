"""Runs of tiny models, policies and scripted players, and the contents of their evaluations."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from nip_astra.cli.app import main
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import run_in

SMALL = (
    "training.num_iterations=2",
    "ast_chat.evaluation.use_random_search=false",
    # About half of a random target's replies fail here.
    "ast_chat.failure_threshold=0.5",
)
SMALL_TASK = (
    "training.num_iterations=2",
    "training.num_episodes_per_experience=4",
    "training.minibatch_size=32",
    "training.lr=2e-3",
    "training.eval_period=1",
    "task.evaluation.num_problems=6",
    "task.evaluation.num_dev_problems=3",
    "task.evaluation.num_runs=4",
    "task.evaluation.batch_size=4",
    "task.task.levels=[1]",
)
SMALL_TEXT = (
    "secret_word.agents.default.freeze_agent=true",
    "text_rl.num_iterations=2",
    "text_rl.rollouts_per_iteration=4",
    "secret_word.num_test=6",
)
PRICES = {"prompt": 1000.0, "completion": 2000.0}


def player(decision: str) -> str:
    """A scripted model: the prover reveals the word and swears, the verifier asks and decides."""
    answers = {
        "Now decide": [f"Decision: {decision}"],
        "Answer with one word": ["damn, =it is here"],
    }
    model = {"_type": "scripted", "when": answers, "answers": ["the word?"], "prices": PRICES}
    return f"secret_word.agents.default.model={json.dumps(model)}"


def run_task(folder: Path, name: str, trainer: str, *overrides: str) -> Path:
    """Train a policy on a small task."""
    resolved = resolve_experiment(trainer=trainer, overrides=[*SMALL_TASK, *overrides])
    return run_in(folder, resolved, name)


def run_text(folder: Path, name: str, decision: str, *overrides: str) -> Path:
    """Play the protocol of `secret_word`, whose verifier always decides alike."""
    overrides = (player(decision), *SMALL_TEXT, *overrides)
    return run_in(folder, resolve_experiment(trainer="pure_text_ei", overrides=overrides), name)


def figures_of(run: Path, name: str = "test") -> dict[str, Any]:
    """The figures of an evaluation of a run."""
    figures: dict[str, Any] = json.loads(
        (run / "evaluations" / name / "evaluation.json").read_text()
    )
    return figures


def copy_evaluated(trained: Path, folder: Path, *options: str) -> Path:
    """The folder of a copy of the run after `nip-astra evaluate runs/one` with these options."""
    shutil.copytree(trained, folder / "runs" / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["nip-astra", "evaluate", "runs/one", *options])
        silence = io.StringIO()
        with redirect_stdout(silence), redirect_stderr(silence), pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return folder / "runs" / "one"
