"""vLLM engines in Ray actors, run for real if an environment has vLLM for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.documents import ROOT
from tests.serve.test_two_servers import VLLM

SECONDS = 600


def start(
    folder: Path, num_engines: int, kind: str, *, count: int = 1
) -> list[subprocess.Popen[str]]:
    """Start a run's processes, by Python beside the command that the environment names."""
    command = os.environ.get(VLLM)
    if command is None:
        pytest.skip(f"needs vLLM for CPUs; {VLLM} names the command of its environment")
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)}
    python = str(Path(command).with_name("python"))
    given = [str(folder), str(num_engines), kind]
    if count > 1:
        more |= {"WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
        given.append(f"{folder}_store")
    return [
        subprocess.Popen(
            [python, "-m", "tests.language_models.vllm_on_ray", *given],
            env={**os.environ, **more, **({"RANK": str(rank)} if count > 1 else {})},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def read(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """A process's output after its end."""
    try:
        output, faults = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, faults[-3000:]
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_engines", "kind", "num_processes"),
    [
        *((2, "full", 1), (2, "lora", 1)),
        # The weights are divided among the processes.
        *((0, "full", 2), (0, "lora", 2), (1, "full", 2)),
    ],
)
def test_engines_sample_from_the_current_weights(
    num_engines: int, kind: str, num_processes: int, tmp_path: Path
) -> None:
    leader, *others = start(tmp_path / "x", num_engines, kind, count=num_processes)
    try:
        first, second = read(leader)
        assert [read(other) for other in others] == [[]] * len(others)
    finally:
        for other in others:
            other.kill()
    assert first["loss"] != second["loss"]
    # At this learning rate a rollout with the previous weights is off by some nats per token.
    for line in (first, second):
        assert line["tokens/generated"] > 100
        assert line["sampler_gap/mean"] < 1e-3


@pytest.mark.slow
def test_a_target_with_an_engine_of_its_own_scores_probes(tmp_path: Path) -> None:
    (process,) = start(tmp_path / "x", 1, "own")
    *lines, compared = read(process)
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["dev/probe_nll"] < 20
        assert line["sampler_gap/mean"] < 1e-3
    assert compared["num_compared"] > 2
    assert compared["largest_gap"] < 1e-3
