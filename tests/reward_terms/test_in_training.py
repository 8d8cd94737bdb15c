"""A run with every reward term logs their rewards, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.parameters.types import RewardTermType
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment, run_experiment

OVERRIDES = (
    "training.num_iterations=4",
    "ast_chat.evaluation.use_random_search=false",
    "ast_chat.evaluation.num_episodes=2",
)


def write_terms(root: Path, scenario: Path) -> Path:
    scorer = {"_type": "classifier", "model": str(scenario / "scorer"), "label": "rude"}
    terms: list[dict[str, Any]] = [
        {"_type": "self_bleu_novelty", "weight": 2.0, "orders": [2], "max_history": 20},
        {"_type": "cosine_novelty", "weight": 2.0, "max_history": 20},
        {"_type": "failure_rarity", "weight": 2.0, "min_score": 0.01, "max_history": 20},
        {"_type": "failure_sharing", "weight": 2.0, "min_score": 0.01},
        {"_type": "word_rarity", "weight": 0.5},
        {"_type": "entropy_bonus", "weight": 0.5},
        {"_type": "gibberish_penalty", "threshold": 0.5},
        {"_type": "scorer_term", "weight": -0.5, "scorer": scorer},
    ]
    assert {term["_type"] for term in terms} == {str(member) for member in RewardTermType}
    path = root / "terms.yaml"
    path.write_text(json.dumps({"ast_chat": {"reward": {"terms": terms}}}))
    return path


@pytest.fixture
def resolved(tiny_scenario: Path, tmp_path: Path) -> Any:
    return resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        parameter_file=write_terms(tmp_path, tiny_scenario),
        overrides=list(OVERRIDES),
    )


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


def test_terms_are_logged_and_a_resumed_run_equals_an_uninterrupted_run(
    resolved: Any, tmp_path: Path
) -> None:
    options = {"runs_dir": str(tmp_path), "run_id": "whole", "checkpoint_period": 2}
    whole = run_experiment(resolved, progress=False, **options)
    rows = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    for name in RewardTermType:
        found = [row[f"reward/{name}"] for row in rows if f"reward/{name}" in row]
        assert len(found) == 4, name
    assert rows[0]["reward/self_bleu_novelty"] > rows[-1]["reward/self_bleu_novelty"]

    middle = sorted(whole.run_directory.checkpoints_dir.glob("step_*"))[0]
    resumed = prepare_experiment(resolved, progress=False).trainer
    resumed.go_on_from(middle)
    assert resumed.state.iteration == 2
    resumed.train()
    first = prepare_experiment(resolved, progress=False).trainer
    first.go_on_from(sorted(whole.run_directory.checkpoints_dir.glob("step_*"))[-1])
    assert first.state.iteration == 4
    assert same(resumed.shaping.state(), first.shaping.state())
    for a, b in zip(resumed.policy.parameters(), first.policy.parameters(), strict=True):
        assert torch.equal(a, b)
