"""A run whose service is killed in the midst of its work says so, and goes on without loss."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from nip_astra.errors import ServiceUnreachableError
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.serve.settings import TrainingProtocol
from tests.resuming import short_experiment, what_was_found
from tests.serve.training.dying import DEATHS, dying_server
from tests.serve.training.running import POLICY, Server, training_server

SECTION = "remote_api_grpo.train_service"
SETTINGS: dict[str, Any] = {"progress": False, "checkpoint_period": 1}


def run_of(protocol: TrainingProtocol, port: int, folder: Path) -> ResolvedExperiment:
    return short_experiment(
        "remote_api_grpo",
        folder / "scenario",
        f"{SECTION}.backend={protocol}",
        f"{SECTION}.base_url=http://127.0.0.1:{port}",
        f"{SECTION}.model=policy",
        f"{SECTION}.patience_seconds=1",
        "task.policy.language_model.lora.rank=4",
        "task.policy.language_model.lora.alpha=32",
        "task.policy.min_new_tokens=0",
        "training.lr=1e-3",
        num_iterations=3,
    )


def numbers_of(lines: bytes) -> list[dict[str, float]]:
    """Metrics by iteration."""
    return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="module", params=["http", "tinker"])
def undisturbed(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingProtocol, dict[str, bytes]]:
    """A protocol, and what a run finds through it whose service stays."""
    if request.param == "tinker":
        pytest.importorskip("tinker")
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_server([request.param]) as server:
        resolved = run_of(request.param, server.port, folder)
        run_experiment(resolved, runs_dir=str(folder), run_id="run", **SETTINGS)
    return request.param, what_was_found(folder / "run")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.parametrize("dies_in", DEATHS)
def test_a_service_killed_at_work_is_told_and_its_run_goes_on_without_loss(
    undisturbed: tuple[TrainingProtocol, dict[str, bytes]], dies_in: str, tmp_path: Path
) -> None:
    protocol, expected = undisturbed[0], {**undisturbed[1]}
    state_dir = str(tmp_path / "state")
    with dying_server(protocol, state_dir, dies_in) as (port, process):
        resolved = run_of(protocol, port, tmp_path)
        with pytest.raises(ServiceUnreachableError, match=r"does not answer.*nip-astra resume"):
            run_experiment(resolved, runs_dir=str(tmp_path), run_id="run", **SETTINGS)
        process.join(5)
        assert process.exitcode == -signal.SIGKILL
    # One of the three iterations is lost.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [
        "step_00000005"
    ]
    server = Server({"policy": str(POLICY)}, [protocol], {"state_dir": state_dir})
    server.port = port
    server.start()
    try:
        resume_experiment(tmp_path / "run", progress=False)
    finally:
        server.stop()
    found = what_was_found(tmp_path / "run")
    if protocol == "tinker":
        # Which requests its server answers together is a matter of time, and so are last bits.
        metrics = [numbers_of(one.pop("metrics.jsonl")) for one in (found, expected)]
        for mine, theirs in zip(*metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert found == expected
