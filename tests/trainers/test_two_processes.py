"""Equal parameters give equal numbers in two processes, in every family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.documents import ROOT
from tests.toy_protocol_scenario import toy_kind, toy_trainer

RUN = """
import json, sys
from tests.toy_protocol_scenario import toy_kind
from tests.trainers.test_two_processes import attacker_metrics, numbers_of_a_game
with toy_kind():
    numbers = numbers_of_a_game(3)
print(json.dumps([numbers, attacker_metrics(*sys.argv[1:])]))
"""


def numbers_of_a_game(seed: int) -> list[object]:
    """What provers and verifiers end with."""
    trainer = toy_trainer(seed=seed)
    trainer.train()
    found: list[object] = json.loads(json.dumps([trainer.results["after"], trainer.state.last]))
    return found


def attacker_metrics(scenario: str, runs_dir: str, run_id: str) -> str:
    """The metrics of a run of two iterations, as they stand in its file."""
    short = ("use_random_search=false", "num_episodes=2")
    overrides = ["training.num_iterations=2", *(f"ast_chat.evaluation.{part}" for part in short)]
    resolved = resolve_experiment(trainer="ast_dpo", scenario=scenario, overrides=overrides)
    run_experiment(resolved, runs_dir=runs_dir, run_id=run_id, progress=False)
    return (Path(runs_dir) / run_id / "metrics.jsonl").read_text(encoding="utf-8")


def test_equal_parameters_give_equal_numbers_in_two_processes(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    # Another hash seed than here, where it is drawn unless the environment has it.
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tiny_scenario), str(tmp_path), "there"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    numbers, metrics = json.loads(done.stdout.splitlines()[-1])
    with toy_kind():
        assert numbers == numbers_of_a_game(3) != numbers_of_a_game(4)
    assert metrics == attacker_metrics(str(tiny_scenario), str(tmp_path), "here")
    assert len(metrics.splitlines()) == 2
