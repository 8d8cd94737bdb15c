"""The pocket target behind an address is stress-tested like the target in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.run_results import read_results
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import run_in
from tests.kit.messages import says

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from tests.serve.running import pocket_service


def play(scenario: str, folder: Path, *overrides: str) -> Any:
    small = (
        *("training.num_iterations=1", "training.num_episodes_per_experience=1"),
        *("ast_chat.evaluation.num_episodes=12", "ast_chat.evaluation.use_random_search=false"),
        "ast_chat.tree_depth=2",
    )
    given = [*small, *overrides]
    resolved = resolve_experiment(trainer="ast_dpo", scenario=scenario, overrides=given)
    return read_results(run_in(folder, resolved, scenario)).results


def test_a_run_against_the_address_ends_near_a_run_in_process(tmp_path: Path) -> None:
    inside = play("pocket_chat", tmp_path)
    with pocket_service() as service:
        address = f"ast_chat.target.chat_model.base_url={service.base_url}"
        outside = play("pocket_chat_api", tmp_path, address)
        num_requests = len(service.completions.log())
    before = outside["before"]
    assert before["num_episodes"] == inside["before"]["num_episodes"] == 12
    # The attacker's words of the first turn are the same; the target draws other numbers.
    assert abs(before["failure_rate"] - inside["before"]["failure_rate"]) < 0.2
    assert before["probe_nll"] == pytest.approx(inside["before"]["probe_nll"], rel=0.2)
    # A tree of 20 probes, and two tables of 12 episodes of 2 turns.
    use = outside["services"]["target"]
    # If the trained attacker opens with the same probe, its answer is cached.
    assert use["num_requests"] + use["num_cached"] == 20 + 2 * 12 * 2
    assert use["num_cached"] > 0
    assert num_requests == use["num_requests"]
    assert use["failures"] == {}
    assert says((tmp_path / "pocket_chat_api" / "report.html").read_text(), "Services", "pocket")


def test_parameters_are_those_of_pocket_chat_but_for_the_target() -> None:
    inside, outside = (
        resolve_experiment(trainer="ast_dpo", scenario=name).hyper_params.to_dict()
        for name in ("pocket_chat", "pocket_chat_api")
    )
    for values in (inside, outside):
        values["ast_chat"]["target"].pop("language_model")
        values["ast_chat"]["target"].pop("chat_model")
        values["ast_chat"].pop("planted_failures")
        values.pop("scenario")
    text = json.dumps(outside).replace("scenario://../pocket_chat/", "scenario://")
    assert json.loads(text) == inside
