"""A verifier learns by asking what it cannot decide alone, and a leak is detected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.scenarios.graphs.wl import wl_accuracy

pytestmark = pytest.mark.slow
SCENARIO = "graph_isomorphism_small"


def run(tmp_path: Path, trainer: str, *overrides: str) -> dict[str, Any]:
    resolved = resolve_experiment(trainer=trainer, scenario=SCENARIO, overrides=overrides)
    result = run_experiment(resolved, runs_dir=str(tmp_path), run_id=trainer, progress=False)
    return result.results


def test_alone_an_agent_distinguishes_as_much_as_its_rounds_of_message_passing(
    tmp_path: Path,
) -> None:
    after = run(tmp_path, "solo_agent")["after"]
    scores = _test_scores()
    assert after["verifier/test_accuracy"] <= wl_accuracy(scores, 2) + 0.01
    assert after["verifier/test_accuracy"] > wl_accuracy(scores, 2) - 0.05
    assert after["prover/test_accuracy"] > 0.97


def test_one_question_lifts_the_verifier_above_its_accuracy_alone(tmp_path: Path) -> None:
    after = run(tmp_path, "vanilla_ppo", "rl.num_iterations=70")["after"]
    low, _ = after["mean_accuracy_interval"]
    assert low > wl_accuracy(_test_scores(), 2) + 0.05


def test_with_a_shared_reward_the_prover_gives_the_label_away_and_the_probe_sees_it(
    tmp_path: Path,
) -> None:
    overrides = (
        "interaction_protocol=adp",
        "protocol_common.shared_reward=true",
        "graph_isomorphism.include_linear_message_space=true",
        "message_regression.regressor._type=linear",
        "rl.num_iterations=60",
        "rl.frames_per_batch=2048",
        "rl.pretrain_decisions=false",
    )
    after = run(tmp_path, "vanilla_ppo", *overrides)["after"]
    assert after["mean_accuracy"] >= 0.95
    lines = (tmp_path / "vanilla_ppo" / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line).get("message_regression/prover") for line in lines]
    first, *_, last = [accuracy for accuracy in read if accuracy is not None]
    assert first < 0.65
    assert last > 0.95


def _test_scores() -> Tensor:
    resolved = resolve_experiment(trainer="solo_agent", scenario=SCENARIO)
    instance = build_scenario_instance(
        resolved.hyper_params, ExperimentSettings(), kind=resolved.kind
    )
    assert instance.test_dataset is not None
    return instance.test_dataset["wl_score"]
