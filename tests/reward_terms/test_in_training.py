"""A run with every reward term logs their rewards, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from nip_astra.checkpoints.tensors import pack_state
from nip_astra.parameters.types import RewardTermType
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from tests.kit.experiments import FAST, metrics_of, run_in


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


def test_terms_are_logged_and_a_resumed_run_equals_an_uninterrupted_run(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        parameter_file=write_terms(tmp_path, tiny_scenario),
        overrides=[*FAST, "training.num_iterations=4"],
    )
    run = run_in(tmp_path, resolved, checkpoint_period=2)
    rows = metrics_of(run)
    for name in RewardTermType:
        assert sum(f"reward/{name}" in row for row in rows) == 4, name
    assert rows[0]["reward/self_bleu_novelty"] > rows[-1]["reward/self_bleu_novelty"]

    middle, *_, last = sorted((run / "checkpoints").glob("step_*"))
    resumed, whole = (prepare_experiment(resolved, progress=False).trainer for _ in range(2))
    resumed.resume_from(middle)
    assert resumed.state.iteration == 2
    resumed.train()
    whole.resume_from(last)
    assert whole.state.iteration == 4
    assert pack_state(resumed.shaping.state()) == pack_state(whole.shaping.state())
    for a, b in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(a, b)
