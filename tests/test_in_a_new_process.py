"""Reports of a new process, compared with the state of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.kit.documents import ROOT
from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer

CODE = """
import json, sys
from nip_astra.overview import schema
# First, because the rest registers names.
shipped = schema()
from tests.test_in_a_new_process import attacker_metrics, numbers_of_a_game
from tests.kit.toy_protocol_scenario import toy_kind
with toy_kind():
    numbers = numbers_of_a_game(3)
metrics = attacker_metrics(*sys.argv[1:])
print(json.dumps({"schema": shipped, "numbers": numbers, "metrics": metrics}))
"""


def numbers_of_a_game(seed: int) -> list[object]:
    """Final weights of provers and verifiers."""
    trainer = toy_trainer(seed=seed)
    trainer.train()
    result: list[object] = json.loads(json.dumps([trainer.results["after"], trainer.state.last]))
    return result


def attacker_metrics(scenario: str, runs_dir: str, run_id: str) -> str:
    """The metrics of a run of two iterations, from its file."""
    short = ("use_random_search=false", "num_episodes=2")
    overrides = ["training.num_iterations=2", *(f"ast_chat.evaluation.{part}" for part in short)]
    resolved = resolve_experiment(trainer="ast_dpo", scenario=scenario, overrides=overrides)
    run_experiment(resolved, runs_dir=runs_dir, run_id=run_id, progress=False)
    return (Path(runs_dir) / run_id / "metrics.jsonl").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reported(tiny_scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of a new process; its hash seed differs from this process's."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tiny_scenario), str(tmp_path_factory.mktemp("a")), "one"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_schema_that_ships_is_that_of_the_classes(reported: dict[str, Any]) -> None:
    """In its own process: in this process other tests have registered names."""
    ships = (ROOT / "parameters" / "schema.json").read_text(encoding="utf-8")
    command = "python run.py schema > parameters/schema.json"
    assert reported["schema"] == json.loads(ships), f"write it anew: {command}"


def test_equal_parameters_give_equal_numbers(
    reported: dict[str, Any], tiny_scenario: Path, tmp_path: Path
) -> None:
    """In every family."""
    with toy_kind():
        assert reported["numbers"] == numbers_of_a_game(3) != numbers_of_a_game(4)
    assert reported["metrics"] == attacker_metrics(str(tiny_scenario), str(tmp_path), "here")
    assert len(reported["metrics"].splitlines()) == 2
