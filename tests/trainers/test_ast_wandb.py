"""An AST run is mirrored to W&B: parameters, metrics, conversations, model and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.tracking.wandb_log import WandbLog


def test_an_offline_run_holds_config_metrics_tables_and_artifacts(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    wandb = pytest.importorskip("wandb")
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        overrides=["training.num_iterations=2", "training.eval_period=1"],
    )
    run_experiment(
        resolved, runs_dir=str(tmp_path), run_id="mirrored", progress=False, wandb="offline"
    )
    wandb.teardown()
    (file,) = (tmp_path / "mirrored" / "wandb").glob("offline-run-*/*.wandb")
    log = WandbLog(file)
    assert log.config["training"]["num_iterations"] == 2
    assert log.config["environment"]["device"] == "cpu"
    rewards = [r["rollout/mean_reward"] for r in log.history if "rollout/mean_reward" in r]
    assert len(rewards) == 2
    assert any("rollouts/train" in row for row in log.history)
    assert any("report" in row for row in log.history)
    ends = [
        f"eval/{when}/failure_rate_{e}" for when in ("before", "after") for e in ("low", "high")
    ]
    assert set(ends) <= set(log.summary)
    assert {"train/loss", "eval/dev/failure_rate"} <= set().union(*log.history)
    assert {"attacker-mirrored", "checkpoint-mirrored"} <= {
        artifact.name for artifact in log.artifacts
    }
