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
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of, run_in
from tests.kit.toy_protocol_scenario import toy_kind, toy_trainer

CODE = """
import json, sys
from nip_astra.overview import schema
# First, because the rest registers names.
shipped = schema()
from tests.test_in_a_new_process import numbers_of
print(json.dumps({"schema": shipped, "numbers": numbers_of(3, *sys.argv[1:])}))
"""


def numbers_of(seed: int, scenario: str, folder: str) -> Any:
    """The last figures of provers and verifiers, and the metrics of an attacker."""
    with toy_kind():
        trainer = toy_trainer(seed=seed)
        trainer.train()
    overrides = ["training.num_iterations=2", *FAST]
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=scenario, overrides=overrides, seed=seed
    )
    metrics = metrics_of(run_in(Path(folder), resolved, str(seed)))
    return json.loads(json.dumps([trainer.results["after"], trainer.state.last, metrics]))


@pytest.fixture(scope="module")
def reported(tiny_scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of a new process; its hash seed differs from this process's."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tiny_scenario), str(tmp_path_factory.mktemp("a"))],
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


def test_equal_parameters_give_equal_numbers_and_another_seed_others(
    reported: dict[str, Any], tiny_scenario: Path, tmp_path: Path
) -> None:
    mine, other = (numbers_of(seed, str(tiny_scenario), str(tmp_path)) for seed in (3, 4))
    assert reported["numbers"] == mine
    assert len(mine[-1]) == 2
    assert all(one != another for one, another in zip(mine, other, strict=True))
