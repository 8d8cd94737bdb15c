"""The first GPU run also runs on a CPU with small sizes, where nothing can differ."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kit.pretend_device import pretend_device
from tests.language_models import fake_vllm

SMALL = ("--small", "--device", "cpu")


def run(benchmark: ModuleType, out: Path, part: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the added records."""
    before = len(out.read_text().splitlines()) if out.exists() else 0
    code = benchmark.main([*SMALL, "--part", part, "--out", str(out)])
    return code, [json.loads(line) for line in out.read_text().splitlines()[before:]]


def test_each_row_is_measured_and_agrees_with_the_cpu(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[dict[str, Any]] = []
    for part in benchmark.PARTS:
        with monkeypatch.context() as patch:
            if part == "vllm":
                fake_vllm.install(patch)
            code, added = run(benchmark, tmp_path / "rows.jsonl", part)
        assert code == 0, [record for record in added if record["status"] == "failed"]
        records += added
    rows = [row for row in benchmark.ROWS if row.in_small]
    assert [(r["part"], r["row"]) for r in records] == [(row.part, row.name) for row in rows]
    for record in records:
        assert record["status"] == "measured"
        assert torch.__version__.startswith(record["versions"]["torch"])
        assert all(record[name] for name in ("is_small", "device", "peak_bytes"))
        assert record.get("agrees", True)
    by_name = {record["row"]: record["figures"] for record in records}
    assert by_name["objectives"]["num_compared"] > 100
    assert by_name["trainer: self_hosted_grpo"]["loss"][0] is not None
    assert by_name["engine: full"]["after"]["sampler_gap/mean"] < 1e-4


def test_objectives_make_their_tensors_on_the_device_of_their_inputs(
    benchmark: ModuleType, tmp_path: Path
) -> None:
    with pretend_device() as device:
        figures = benchmark.objectives(benchmark.Bench(device, tmp_path, is_small=True))
    assert figures["difference"] <= figures["tolerance"], figures["worst"]


def test_a_failing_row_or_part_is_written_and_the_others_run(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bench: Any) -> dict[str, Any]:
        raise RuntimeError("no kernel for this device")

    options = {
        "missing": {"run": fail, "needs": ("not_a_package",)},
        "on a GPU": {"run": fail, "needs_gpu": True},
        "broken": {"run": fail},
        "nan": {"run": lambda _: {"difference": float("nan"), "tolerance": 0.1}},
        "fine": {"run": lambda _: {"tokens": 3}},
    }
    rows = [benchmark.Row("memory", name, **values) for name, values in options.items()]
    monkeypatch.setattr(benchmark, "ROWS", rows)
    out = tmp_path / "rows.jsonl"
    code, (missing, on_gpu, broken, nan, fine) = run(benchmark, out, "memory")
    assert code == 1
    assert (missing["status"], missing["reason"]) == ("skipped", "package not_a_package is missing")
    assert on_gpu["status"] == "skipped"
    assert broken["status"] == "failed"
    assert "RuntimeError: no kernel for this device" in broken["error"]
    assert not nan["agrees"]
    assert (fine["status"], fine["figures"]) == ("measured", {"tokens": 3})
    out.unlink()
    # An executable that is not Python ends with a code other than 0 or 1.
    monkeypatch.setattr(benchmark.sys, "executable", "/bin/ls")
    assert not benchmark.run_in_subprocess("memory", SMALL, out)
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["part"], record["status"]) == ("memory", "failed")


def test_one_row_is_run_and_a_wrong_part_or_device_refused_with_the_list(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert benchmark.main([*SMALL, "--row", "scorer", "--out", str(out)]) == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    assert (record["part"], record["row"], record["agrees"]) == ("correctness", "scorer", True)
    for wrong in (
        *(["--part", "losses"], ["--row", "losses"], ["--part", "memory", "--row", "scorer"]),
        ["--device", "tpu"],
    ):
        with pytest.raises(SystemExit) as stopped:
            benchmark.main(wrong)
        assert stopped.value.code == 2
    assert "memory" in capsys.readouterr().err
    assert benchmark.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(benchmark.ROWS)
