"""When an AST run is compared with random search."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.kit.experiments import ast_trainer

PLANT = "ast_chat.planted_failures=[{name: one, probe: a}]"


@pytest.mark.parametrize(
    ("planted", "asked", "is_run"),
    [
        (True, "null", True),
        (True, "false", False),
        (False, "null", False),
        (False, "true", True),
    ],
)
def test_it_is_run_where_failures_are_planted_or_where_it_is_asked_for(
    tiny_scenario: Path, planted: bool, asked: str, is_run: bool
) -> None:
    plants = PLANT if planted else "ast_chat.planted_failures=[]"
    search = f"ast_chat.evaluation.use_random_search={asked}"
    trainer = ast_trainer("ast_dpo", tiny_scenario, plants, search)
    assert (trainer.evaluation.num_random_search_parts() > 0) is is_run


def test_before_and_after_count_planted_failures_of_the_same_conversations(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        overrides=[PLANT, "training.num_iterations=1"],
    )
    run = run_experiment(resolved, runs_dir=str(tmp_path), run_id="one", progress=False)
    before, after = run.results["before"], run.results["after"]
    training, random = run.results["training"], run.results["random_search"]
    assert before["target_queries"] == after["target_queries"]
    assert max(after["first_query"].values(), default=0) <= after["target_queries"]
    assert after["plants_found"] == sum(q is not None for q in after["first_query"].values())
    assert training["target_queries"] not in (0, after["target_queries"])
    assert training["num_plants"] == after["num_plants"] == 1
    # Random search has the queries of training and of the held-out conversations after it.
    needed = training["target_queries"] + after["target_queries"]
    assert needed <= random["target_queries"]
    for report in (before, after):
        assert report["num_failed"] <= report["num_known"] == report["num_episodes"]
        assert report["if_unknown_passed"] == report["if_unknown_failed"] == report["failure_rate"]
