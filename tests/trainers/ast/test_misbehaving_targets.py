"""Stress tests of targets whose service misbehaves at every third request: all of them go on."""

from __future__ import annotations

import socket
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("openai")

from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import read_rows
from nip_astra.language_models.services import http_client
from nip_astra.language_models.services.http_client import MIB
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import FAST, run_in
from tests.kit.misbehaving import MISBEHAVIOURS, RIGHT, misbehaving, reply
from tests.kit.tiny import write_scenario

ENDING = {"ConfigurationError", "BudgetExhaustedError"}
"""Outcomes of a service that is wrong for every request, so that the run ends."""
GOING_ON = [name for name, server in MISBEHAVIOURS.items() if not ENDING & {*server.outcomes}]
QUICK = {
    *("status 503", "no room: OpenAI", "a filter refuses the prompt", "body: half"),
    *("only calls of tools", "cut before the first word", "30 MB of text"),
}
NO_VERDICT = ("cut", "too_long", "context_length", "refused")
"""Failures of turns whose service works."""


def test_most_of_the_misbehaviours_must_not_end_a_run() -> None:
    assert len(MISBEHAVIOURS) > 150
    assert len(GOING_ON) > 100


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GOING_ON]
)
def test_a_run_goes_on_and_counts_what_it_did_not_measure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "LARGEST_ANSWER", 4 * MIB)
    numbers, right = count(1), reply(RIGHT)

    def send(connection: socket.socket) -> None:
        wrong = next(numbers) % 3 == 0
        (MISBEHAVIOURS[name].send if wrong else right)(connection)

    with misbehaving(send) as server:
        limits = {"num_retries": 0, "concurrency": 4, "attempt_timeout": 2.0}
        service = {"_type": "openai", "base_url": f"{server.address}/v1", "model": "m"}
        target = {"chat_model": service | {"limits": limits}, "max_new_tokens": 6}
        scenario = write_scenario(tmp_path / "s", target=target, tree_depth=1)
        sizes = (
            *("training.num_iterations=1", "training.num_episodes_per_experience=2"),
            "ast_chat.evaluation.num_episodes=6",
        )
        resolved = resolve_experiment(
            trainer="ast_dpo", scenario=str(scenario), overrides=[*FAST, *sizes]
        )
        run = run_in(tmp_path / "runs", resolved)
    results = read_results(run).results
    rows = read_rows(run / "rollouts/evaluation.jsonl")
    failures = [row["response_failure"] for row in rows if row.get("response_failure")]
    are_replies = {outcome.startswith("says") for outcome in MISBEHAVIOURS[name].outcomes}
    if name == "cut before the first word":
        are_replies = {False}
    # Some bodies may be read or not.
    assert bool(failures) is not are_replies.pop() or are_replies
    outcomes = results["after"]["outcomes"]
    num_without = sum(failure in NO_VERDICT for failure in failures)
    assert outcomes["undetermined"] == num_without
    assert outcomes["error"] == len(failures) - num_without
    assert outcomes["none"] + outcomes["failure"] == len(rows) - len(failures) > 0
