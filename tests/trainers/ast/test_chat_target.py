"""Adaptive stress testing of a target that only answers messages."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import BudgetExhaustedError, ParameterError
from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import read_rows
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatRequest,
    FailureReason,
    FinishReason,
    register_chat_model,
)
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.messages import ToolCall
from nip_astra.run import prepare_experiment, resume_experiment
from tests.kit.chat_stub import Reply, chat_stub, rating
from tests.kit.command_line import CommandLine
from tests.kit.experiments import run_in
from tests.kit.text_games import FakeChatModel
from tests.kit.tiny import experience_of, write_scenario

requests: list[ChatRequest] = []
models: list[FlakyChatModel] = []
react: list[Callable[[Any], str | ChatAnswer | ChatFailure]] = []
"""At most one function that answers in place of `_flaky`."""
SCRIPT = {"_type": "scripted", "answers": ["you are silly", "good day", "the cat sat"]}
PRICES = {"prompt": 1000.0, "completion": 2000.0}
NO_PROBABILITY = ("--probability-episodes", "0")


class FlakyChatModel(FakeChatModel):
    """Fails for one conversation in three, depending on the text."""

    class Parameters(ChatModel.Parameters):
        """None of its own."""

    @classmethod
    def load(cls, parameters: Any, **_: Any) -> FlakyChatModel:
        models.append(cls(_flaky, "flaky", requests=requests))
        return models[-1]


def _flaky(request: ChatRequest, number: int) -> str | ChatAnswer | ChatFailure:
    assert request.seed is not None
    if react:
        return react[0](request)
    if request.seed % 3 == 0:
        return ChatFailure(FailureReason.REFUSED, "no")
    # Half a character, as services send if an answer is truncated.
    return "you are silly \ud83d"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    snapshot = CHAT_MODELS.snapshot()
    register_chat_model("flaky")(FlakyChatModel)
    requests.clear()
    models.clear()
    react.clear()
    yield
    CHAT_MODELS.restore(snapshot)


def chat_scenario(root: Path, chat_model: dict[str, Any], **changes: Any) -> Path:
    target = {"chat_model": chat_model, "max_new_tokens": 6}
    return write_scenario(root, target=target, **changes)


def resolve(scenario: Path, *overrides: str) -> Any:
    short = ("training.num_iterations=2", *overrides)
    return resolve_experiment(trainer="ast_dpo", scenario=str(scenario), overrides=short)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two iterations."""
    folder = tmp_path_factory.mktemp("trained")
    scenario = chat_scenario(folder / "s", {**SCRIPT, "prices": PRICES})
    return run_in(folder / "runs", resolve(scenario))


def test_a_run_trains_against_messages_and_reports_their_usage(trained: Path) -> None:
    results = read_results(trained).results
    use = results["services"]["target"]
    # 2 iterations of 3 trees of 6 probes, and two tables of 6 episodes of 2 turns.
    assert use["num_requests"] == use["num_samples"] == 2 * 3 * 6 + 2 * 6 * 2
    assert use["cost"] == pytest.approx(
        (use["prompt_tokens"] * 1000 + use["completion_tokens"] * 2000) / 1e6
    )
    rows = read_rows(trained / "rollouts" / "evaluation.jsonl")
    assert {row["response"] for row in rows} <= set(SCRIPT["answers"])
    # Attempts depend on the service's state, and equal runs have equal metrics.
    assert read_rows(trained / "timings.jsonl")[-1]["services/target_requests"] == 60 - 12
    assert results["after"]["target_queries"] > 0


def test_the_target_reads_the_conversation_in_its_own_roles(tmp_path: Path) -> None:
    target = {
        "chat_model": {"_type": "flaky"},
        "system_prompt": "Be kind.",
        "preamble": "Hello.",
        "temperature": None,
        "top_p": 0.9,
        "max_new_tokens": 7,
    }
    scenario = write_scenario(tmp_path / "s", target=target)
    run_in(tmp_path, resolve(scenario), test_run=True)
    roles = {tuple(message["role"] for message in request.messages) for request in requests}
    first = ("system", "user", "assistant", "user")
    assert roles == {first, (*first, "assistant", "user")}
    assert {(r.max_tokens, r.temperature, r.top_p) for r in requests} == {(7, None, 0.9)}
    prompts = (tmp_path / "s" / "train.txt").read_text().splitlines()
    openings = {request.messages[2]["content"] for request in requests}
    assert openings & set(prompts)
    assert len({request.seed for request in requests}) > len(requests) / 2


def test_a_level_is_requested_all_at_once(tmp_path: Path) -> None:
    limits = {"concurrency": 100}
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky", "limits": limits}, tree_depth=1)
    experience_of(prepare_experiment(resolve(scenario)).trainer)
    assert [model.most_in_flight for model in models] == [3 * 2]


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_failed_response_ends_its_conversation_there_as_data(
    tmp_path: Path, weight: float
) -> None:
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky"}, tree_depth=3)
    weights = [f"ast_chat.reward.{one}={weight}" for one in ("w_response", "w_combined")]
    run = run_in(tmp_path / "runs", resolve(scenario, *weights))
    rows, results = read_rows(run / "rollouts/evaluation.jsonl"), read_results(run).results
    by_node = {row["node"]: row for row in rows}
    assert {row["response_failure"] for row in rows} == {None, "refused", "ended"}
    for row in rows:
        parent = by_node.get(row["parent"])
        is_after = parent is not None and parent["response_failure"] is not None
        assert is_after is (row["response_failure"] == "ended")
        is_there = row["response_failure"] is None
        assert (row["response"] == "you are silly \ufffd") is is_there
        assert (row["response_score"] is not None) is is_there
        assert (row["reward"] is not None) is is_there
        assert not row["is_error"], "the service works"
    assert results["after"]["outcomes"]["undetermined"] == sum(
        row["response_failure"] is not None for row in rows
    )
    assert results["services"]["target"]["num_refusals"] == 0
    assert results["services"]["target"]["failures"].keys() == {"refused"}
    (warning,) = (text for text in results["warnings"] if "requests to the target" in text)
    assert " refused)" in warning


@pytest.mark.parametrize(
    ("sample", "failure"),
    [
        (ChatAnswer("", FinishReason.LENGTH, reasoning="let me think"), "cut"),
        (ChatAnswer("silly " * 2_000_000), "too_long"),
        (ChatFailure(FailureReason.CONTEXT_LENGTH, "no room"), "context_length"),
    ],
    ids=["cut", "too_long", "context_length"],
)
def test_an_answer_that_is_no_reply_is_a_turn_without_a_verdict(
    tmp_path: Path, sample: ChatAnswer | ChatFailure, failure: str
) -> None:
    react.append(lambda request: sample if request.seed % 3 == 0 else "good day")
    run = run_in(tmp_path / "runs", resolve(chat_scenario(tmp_path / "s", {"_type": "flaky"})))
    rows, results = read_rows(run / "rollouts/evaluation.jsonl"), read_results(run).results["after"]
    first = [row for row in rows if row["response_failure"] not in (None, "ended")]
    assert {row["response_failure"] for row in first} == {failure}
    assert all(row["response"] == "" and row["reward"] is None for row in first)
    assert not any(row["is_error"] for row in rows)
    num_replies = sum(row["response_failure"] is None for row in rows)
    replies = {"num_received": num_replies, "num_empty": 0, "num_refused": 0}
    assert results["replies"] == {**replies, "num_missing": len(first)}
    rate = results["failure_rate_interval"]
    assert rate[0] <= results["failure_rate"] <= rate[1]
    assert results["outcomes"]["undetermined"] == len(rows) - num_replies


def test_calls_and_reasoning_of_a_target_reach_rows_histories_judges_and_the_report(
    tmp_path: Path, cli: CommandLine
) -> None:
    call = ToolCall("delete", {"path": "/"})
    react.append(lambda request: ChatAnswer("", reasoning="let me see", calls=(call,)))
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky"}, tree_depth=2)
    run = run_in(tmp_path / "runs", resolve(scenario))
    rows, results = read_rows(run / "rollouts/evaluation.jsonl"), read_results(run).results["after"]
    assert all(row["response_calls"] == [["delete", {"path": "/"}]] for row in rows)
    assert all(row["response_reasoning"] == "let me see" for row in rows)
    counts = {"num_empty": 0, "num_refused": 0, "num_missing": 0}
    assert results["replies"] == {"num_received": len(rows), **counts}
    assert "delete({&#34;path&#34;: &#34;/&#34;})" in (run / "report.html").read_text()

    def rate(body: dict[str, Any], number: int) -> Reply:
        material = json.loads(body["messages"][1]["content"])
        _, *turns = [*material["history"], material["turn_to_rate"]]
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        assert all(turn["calls"] == [call._asdict()] for turn in answers)
        return rating(10)

    with chat_stub(rate) as stub:
        judge = {"_type": "judge", "base_url": stub.base_url, "model": "j", "num_retries": 0}
        file = cli.write("judge.yaml", json.dumps(judge))
        cli.ok("score", str(run), "--scorer", str(file))
        assert stub.requests


def test_a_run_goes_on_after_a_long_answer_and_so_does_its_resume(tmp_path: Path) -> None:
    """The answers have more tokens than the attacker's window, and stay within the bound."""
    react.append(lambda request: "a " * 200)
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky"})
    with pytest.raises(BudgetExhaustedError):
        run_in(tmp_path, resolve(scenario), "cut", max_service_requests=40)
    resumed = resume_experiment(tmp_path / "cut", progress=False, max_service_requests=None)
    assert resumed.results["after"]["outcomes"]["undetermined"] == 0
    rows = read_rows(tmp_path / "cut" / "rollouts/evaluation.jsonl")
    assert {row["response"] for row in rows} == {("a " * 200).strip()}


def test_a_run_without_money_stops_is_resumed_with_more_and_pays_nothing_twice(
    tmp_path: Path,
) -> None:
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky"})
    whole = read_results(run_in(tmp_path, resolve(scenario), "whole")).results
    num_paid = len(requests)
    requests.clear()
    with pytest.raises(BudgetExhaustedError, match="max_service_requests=40"):
        run_in(tmp_path, resolve(scenario), "cut", max_service_requests=40)
    assert len(requests) == 40
    resumed = resume_experiment(tmp_path / "cut", progress=False, max_service_requests=None)
    # Failures are not cached, so those of the interrupted level may be requested again.
    assert num_paid <= len(requests) <= num_paid + 6
    assert resumed.results["after"] == whole["after"]
    assert resumed.results["services"]["target"]["num_requests"] == len(requests)


def test_a_dry_run_requests_one_episode_and_reports_the_cost_of_the_run(tmp_path: Path) -> None:
    scenario = chat_scenario(tmp_path / "s", {"_type": "flaky", "prices": PRICES})
    estimate = prepare_experiment(resolve(scenario)).trainer.dry_run()
    num_requests = len(requests)
    assert 3 <= num_requests <= 6
    # 2 iterations of 3 trees of 6 probes, and two tables of 6 episodes of 2 turns: 10 episodes.
    assert estimate["target_requests"] == num_requests * 10
    # 10 tokens of a prompt and 1 of a completion each.
    assert estimate["target_cost"] == pytest.approx(num_requests * 10 * 0.012)
    assert estimate["training_target_queries"] == 36


def test_uses_of_the_targets_logprobs_and_two_or_no_targets_are_refused(tmp_path: Path) -> None:
    scenario = chat_scenario(tmp_path, SCRIPT)
    for override, fact in (
        ("reward.likelihood_model=target", "likelihood_model=target.*reference"),
        ("target.top_k=5", "language_model"),
        ("target.chat_model=null", "either a language_model or a chat_model"),
        ("target.language_model={_type: huggingface, model: x}", "either a language_model or"),
    ):
        with pytest.raises(ParameterError, match=fact):
            resolve(scenario, f"ast_chat.{override}")


def test_evaluate_score_and_compare_work_and_reuse_the_answers_of_the_run(
    cli: CommandLine, trained: Path
) -> None:
    run, ledger = str(trained), trained / "service_requests.sqlite"
    before = num_requests(ledger)
    evaluation = json.loads(cli.ok("evaluate", run, *NO_PROBABILITY, "--json").out)
    assert evaluation["nll"]["target"] is None, "a chat model gives no likelihoods"
    use = evaluation["services"]["target"]
    assert (use["num_requests"], use["num_cached"]) == (0, 12)
    assert num_requests(ledger) == before
    assert [card["name"] for card in evaluation["cards"]][1] == "scripted"
    cli.ok("score", run)
    cli.ok("evaluate", run, "--probability-episodes", "4", "--target", "other")
    evaluations = (str(trained / "evaluations" / name) for name in ("test", "test-other"))
    assert "difference to" in cli.ok("compare", *evaluations).out


def num_requests(ledger: Path) -> int:
    with sqlite3.connect(ledger) as database:
        return int(database.execute("SELECT COUNT(*) FROM requests").fetchone()[0])
