"""Policies whose messages a judge rewards: its use is bounded, cached and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.checkpoints.tensors import load_state
from nip_astra.errors import BudgetExhaustedError, CheckpointError
from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import read_rows
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.trainers import trainer_base
from tests.kit.chat_stub import ChatStub, Reply, chat_stub, rating
from tests.kit.command_line import CommandLine
from tests.kit.experiments import run_in

SMALL = (
    "training.num_iterations=2",
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=32",
    "training.eval_period=1",
    "self_hosted_grpo.group_size=4",
    "task.evaluation.num_problems=3",
    "task.evaluation.num_dev_problems=2",
    "task.policy.max_new_tokens=3",
)
NUM_EPISODES = 2 * 2 * 4 + 2 * 2 + 2 * 3
"""Of a whole run: of training, dev evaluations, before and after."""


def _by_length(body: dict[str, Any], number: int) -> Reply:
    text = json.loads(body["messages"][1]["content"])["turn_to_rate"]["text"]
    return rating(len(text) % 11)


@pytest.fixture
def stub() -> Iterator[ChatStub]:
    with chat_stub(_by_length) as running:
        yield running


@pytest.fixture
def resolved(stub: ChatStub, tmp_path: Path) -> ResolvedExperiment:
    for name, problems in (("train", "12345"), ("test", "678")):
        rows = [json.dumps({"prompt": f"{problem}+1="}) for problem in problems]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    prices = "{prompt: 1000.0, completion: 2000.0}"
    judge = f"{{_type: judge, base_url: '{stub.base_url}', model: m, prices: {prices}}}"
    files = f"train: {tmp_path}/train.jsonl, test: {tmp_path}/test.jsonl"
    task = f"task.task={{_type: dataset, {files}, reward: scorer, scorer: {judge}}}"
    return resolve_experiment(trainer="self_hosted_grpo", overrides=[*SMALL, task])


def test_usage_of_a_judge_is_bounded_and_reported_and_a_resumed_run_pays_nothing_twice(
    stub: ChatStub, resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    whole = run_in(tmp_path, resolved, "whole")
    results = read_results(whole).results
    requests = sorted(json.dumps(body) for body in stub.requests)
    use = results["services"]["judge"]
    assert use["num_requests"] == len(requests) > 0
    costs = [row.get("services/judge_cost", 0.0) for row in read_rows(whole / "timings.jsonl")]
    assert 0 < max(costs) <= use["cost"]
    stub.requests.clear()
    with pytest.raises(BudgetExhaustedError, match="max_service_requests=9"):
        run_in(tmp_path, resolved, "cut", max_service_requests=9)
    assert len(stub.requests) == 9
    resumed = resume_experiment(tmp_path / "cut", max_service_requests=500, progress=False)
    assert sorted(map(json.dumps, stub.requests)) == requests
    assert resumed.results["after"] == results["after"]
    assert resumed.results["services"]["judge"]["num_requests"] == len(requests)


def test_a_dry_run_prices_the_judge_and_checkpoints_keep_its_answers(
    stub: ChatStub, resolved: ResolvedExperiment
) -> None:
    trainer: Any = prepare_experiment(resolved).trainer
    estimate = trainer.dry_run()
    assert estimate["judge_requests"] == NUM_EPISODES
    assert estimate["judge_cost"] > 0
    assert len(trainer.kept_parts()["verdicts 1"].save()["scores"]) == len(stub.requests)


def test_evaluations_of_a_judged_policy_count_their_own_requests(
    stub: ChatStub, resolved: ResolvedExperiment, cli: CommandLine, tmp_path: Path
) -> None:
    run = run_in(tmp_path / "runs", resolved, "one")
    num_before = len(stub.requests)

    def use_of(seed: int, *more: str) -> dict[str, Any]:
        options = ("--name", f"of_{seed}", "--seed", str(seed), "--json", *more)
        use: dict[str, Any] = json.loads(cli.ok("evaluate", str(run), *options).out)["services"]
        return use["judge"]

    first, second = use_of(5), use_of(6)
    assert first["num_requests"] + second["num_requests"] == len(stub.requests) - num_before
    assert first["num_requests"] + first["num_cached"] == 3
    assert use_of(5, "--overwrite")["num_cached"] == 3
    assert use_of(6) == second


def test_a_checkpoint_may_lack_only_the_answers_of_a_judge(
    resolved: ResolvedExperiment,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path, resolved)
    (checkpoint, *_) = sorted((run / "checkpoints").glob("step_*"))

    def continue_without(part: str) -> None:
        def without(path: Path) -> dict[str, Any]:
            content: dict[str, Any] = load_state(path)
            content.get("parts", {}).pop(part, None)
            return content

        monkeypatch.setattr(trainer_base, "load_state", without)
        prepare_experiment(resolved, progress=False).trainer.resume_from(checkpoint)

    continue_without("verdicts 1")
    assert "without verdicts 1" in caplog.text
    with pytest.raises(CheckpointError, match="KeyError: 'trainer'"):
        continue_without("trainer")
