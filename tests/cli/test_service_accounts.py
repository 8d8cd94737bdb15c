"""Each evaluation's use of services is reported separately."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_line import CommandLine
from tests.kit.tiny import write_scenario
from tests.scorers.chat_stub import Reply, chat_stub, rating

PRICES = {"prompt": 1000.0, "completion": 2000.0}
TARGET = {"_type": "scripted", "answers": ["you are silly", "good day"], "prices": PRICES}


@pytest.fixture
def run(cli: CommandLine, tmp_path: Path) -> str:
    scenario = write_scenario(tmp_path / "s", target={"chat_model": TARGET, "max_new_tokens": 3})
    few = ("--set", "training.num_iterations=1")
    cli.ok("--trainer", "ast_dpo", "--scenario", str(scenario), "--run-id", "mine", *few)
    return str(tmp_path / "runs" / "mine")


def test_evaluations_of_one_run_count_their_own_requests(cli: CommandLine, run: str) -> None:
    def use_of(seed: int, *more: str) -> dict[str, Any]:
        asked = ("evaluate", run, "--probability-episodes", "0", "--json", "--name", f"of_{seed}")
        said = cli.ok(*asked, "--seed", str(seed), *more)
        found: dict[str, Any] = json.loads(said.out)["services"]["target"]
        return found

    first, second = use_of(5), use_of(6)
    assert first["num_requests"] == second["num_requests"] > 0
    assert use_of(5) == first, "it has played all already"
    anew = use_of(6, "--overwrite")
    assert (anew["num_requests"], anew["num_remembered"]) == (0, second["num_samples"])
    shutil.rmtree(Path(run) / "evaluations" / "of_6")
    assert use_of(6) == anew


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_judge_named_for_an_evaluation_keeps_to_the_budget_and_is_reported(
    cli: CommandLine, run: str, is_reused: bool
) -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        return rating(len(body["messages"][1]["content"]) % 11)

    with chat_stub(answer) as stub:
        judge = {"_type": "judge", "base_url": stub.base_url, "model": "m", "prices": PRICES}
        cli.write("judge.yaml", json.dumps(judge))
        by = ("--scorer", "judge.yaml", "--json")
        if is_reused:
            cli.ok("evaluate", run, "--probability-episodes", "0")
        played_by = ("evaluate", run, "--probability-episodes", "0", *by)
        few = cli(*played_by, "--settings", "max_service_requests=1")
        assert few.code != 0
        assert "max_service_requests=1" in few.err
        played = cli.ok(*played_by)
        use = json.loads(played.out)["services"]["judge"]
        assert use["num_requests"] == len(stub.requests) > 0
        num_asked = len(stub.requests)
        again = cli.ok("score", run, *by, "--name", "again")
        use = json.loads(again.out)["services"]["judge"]
        assert len(stub.requests) == num_asked, "the run remembers what its judge has said"
        assert (use["num_requests"], use["num_remembered"] > 0) == (0, True)
