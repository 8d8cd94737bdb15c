"""vLLM engines in Ray actors, run for real if an environment has vLLM for CPUs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.documents import ROOT
from tests.serve.servers import VLLM

SECONDS = 600


def run(folder: Path, num_engines: int, kind: str) -> list[dict[str, Any]]:
    """The run's log, by the Python interpreter beside the command that the environment names."""
    (process,) = start(folder, num_engines, kind)
    return read(process)


def start(
    folder: Path, num_engines: int, kind: str, *, count: int = 1
) -> list[subprocess.Popen[str]]:
    """The processes of a run."""
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
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_engines_sample_from_the_weights_of_now(tmp_path: Path, kind: str) -> None:
    first, second = run(tmp_path / "x", 2, kind)
    assert first["loss"] != second["loss"]
    # At this learning rate a rollout with the previous weights is off by some nats per token.
    for line in (first, second):
        assert line["tokens/generated"] > 100
        assert line["sampler_gap/mean"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("num_engines", "kind"), [(0, "full"), (0, "lora"), (1, "full")])
def test_engines_sample_from_weights_that_are_divided(
    num_engines: int, kind: str, tmp_path: Path
) -> None:
    leader, other = start(tmp_path / "x", num_engines, kind, count=2)
    try:
        first, second = read(leader)
        assert read(other) == []
    finally:
        other.kill()
    assert first["loss"] != second["loss"]
    for line in (first, second):
        assert line["tokens/generated"] > 100
        assert line["sampler_gap/mean"] < 1e-3


@pytest.mark.slow
def test_the_likelihood_of_a_target_that_shares_an_adapters_engine_is_refused(
    tmp_path: Path,
) -> None:
    (line,) = run(tmp_path / "x", 1, "refused")
    assert "LoRA" in line["refused"]
    assert "likelihood_model" in line["refused"]


@pytest.mark.slow
def test_a_target_with_an_engine_of_its_own_tells_how_likely_it_finds_probes(
    tmp_path: Path,
) -> None:
    *lines, compared = run(tmp_path / "x", 1, "own")
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["dev/probe_nll"] < 20
        assert line["sampler_gap/mean"] < 1e-3
    assert compared["num_compared"] > 2
    assert compared["largest_gap"] < 1e-3
