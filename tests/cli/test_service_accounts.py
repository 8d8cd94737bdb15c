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
    cli.scenario = write_scenario(
        tmp_path / "s", target={"chat_model": TARGET, "max_new_tokens": 3}
    )
    assert cli.run(overrides=("training.num_iterations=1",)).code == 0
    return str(tmp_path / "runs" / "one")


def test_evaluations_of_one_run_count_their_own_requests(cli: CommandLine, run: str) -> None:
    def use_of(seed: int, *more: str) -> dict[str, Any]:
        options = ("--probability-episodes", "0", "--json", "--name", f"of_{seed}")
        result = cli.ok("evaluate", run, *options, "--seed", str(seed), *more)
        use: dict[str, Any] = json.loads(result.out)["services"]["target"]
        return use

    first, second = use_of(5), use_of(6)
    assert first["num_requests"] == second["num_requests"] > 0
    assert use_of(5) == first, "all conversations have been played"
    anew = use_of(6, "--overwrite")
    assert (anew["num_requests"], anew["num_remembered"]) == (0, second["num_samples"])
    shutil.rmtree(Path(run) / "evaluations" / "of_6")
    assert use_of(6) == anew


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_judge_named_for_an_evaluation_keeps_to_the_budget_and_is_reported(
    cli: CommandLine, run: str, is_reused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "key-that-nobody-writes")

    def answer(body: dict[str, Any], number: int) -> Reply:
        return rating(len(body["messages"][1]["content"]) % 11)

    with chat_stub(answer) as stub:
        judge = {"_type": "judge", "base_url": stub.base_url, "model": "m", "prices": PRICES}
        judge["api_key_variable"] = "MY_KEY"
        cli.write("judge.yaml", json.dumps(judge))
        own = ("evaluate", run, "--probability-episodes", "0")
        by_judge = ("--scorer", "judge.yaml", "--json")
        if is_reused:
            cli.ok(*own)
        result = cli(*own, *by_judge, "--settings", "max_service_requests=1")
        assert result.code != 0
        assert "max_service_requests=1" in result.err
        use = json.loads(cli.ok(*own, *by_judge).out)["services"]["judge"]
        num_requests = len(stub.requests)
        assert use["num_requests"] == num_requests > 0
        again = json.loads(cli.ok("score", run, *by_judge, "--name", "again").out)
        use = again["services"]["judge"]
        sent = {headers["Authorization"] for headers in stub.headers}
        assert sent == {"Bearer key-that-nobody-writes"}
        assert len(stub.requests) == num_requests, "the run remembers its judge's replies"
        assert (use["num_requests"], use["num_remembered"] > 0) == (0, True)
    written = [path.read_bytes() for path in Path(run).rglob("*") if path.is_file()]
    assert not [content for content in written if b"key-that-nobody-writes" in content]
