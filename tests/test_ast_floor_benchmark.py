"""The floor of benchmarks/ast_floor.py counts every product once, and times what it says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.documents import ROOT


@pytest.fixture
def floor(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("ast_floor")


def a_second_a_row(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have a pass take a second for each of its rows, and give the passes that were asked for."""
    passes: list[tuple[int, int]] = []

    def seconds(self: Any, num_rows: int, num_head_rows: int) -> float:
        passes.append((num_rows, num_head_rows))
        return float(num_rows)

    monkeypatch.setattr(module.Floor, "_seconds", seconds)
    monkeypatch.setattr(module.Floor, "__init__", lambda self, dtype: setattr_seconds(self))
    return passes


def setattr_seconds(one: Any) -> None:
    one.seconds = one._seconds


def test_a_rollout_reads_each_token_once(
    floor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = a_second_a_row(floor, monkeypatch)
    setting = floor.Setting(width=2, depth=3, episodes=2, turn_tokens=5)
    # 4, 8 and 16 rows say five tokens each, of which four are read on; 70 others were read.
    work = {"forwarded": 28 * 4 + 70, "head_rows": 28 * 5}
    least = floor.Floor(torch.float32).of_turns(setting, "attacker", work)
    assert least == 28 * 4 + 70
    assert passes == [(4, 4), (8, 8), (16, 16), (10, 4), (20, 8), (40, 16)]


def test_the_target_scores_what_the_attacker_said(
    floor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = a_second_a_row(floor, monkeypatch)
    setting = floor.Setting(width=1, depth=1, episodes=3, turn_tokens=5, response_tokens=2)
    work = {"forwarded": 3 * 1 + 30, "head_rows": 3 * 2 + 15}
    floor.Floor(torch.float32).of_turns(setting, "target", work)
    assert passes == [(3, 3), (30, 18)], "three last positions, and fifteen tokens of the probes"


def test_an_update_is_two_passes(floor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = a_second_a_row(floor, monkeypatch)
    work = {"forwarded": 473, "head_rows": 256}
    assert floor.Floor(torch.bfloat16).of_update(work) == 2 * 473
    assert passes == [(473, 256)]


def test_an_iteration_reads_by_the_reference_once_and_learns_step_by_step(
    floor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = a_second_a_row(floor, monkeypatch)
    iteration = {
        "num_steps": 4,
        "work": {"reference": {"forwarded": 1579, "head_rows": 896}},
        "work_of_updates": {"attacker": {"forwarded": 2299, "head_rows": 896}},
    }
    assert floor.Floor(torch.float32).of_learning(iteration) == 1579 + 4 * 2 * 574
    assert passes == [(1579, 896), (574, 224)]


def test_a_step_beside_trls_samples_rates_reads_and_learns(
    floor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = a_second_a_row(floor, monkeypatch)
    own, target = floor.Floor(torch.bfloat16), floor.Floor(torch.float32)
    step = {"num_prompts": 8, "prompt_tokens": 93, "new_tokens": 32}
    assert own.of_online_dpo(step, target) == 744 + 31 * 16 + 3 * 1256 + 1256
    assert passes == [(744, 8), (16, 16), (1256, 512), (1256, 528)]


def test_a_pass_is_every_product_of_the_model(floor: ModuleType) -> None:
    asked: list[tuple[tuple[int, ...], int]] = []

    def kernel(weight_OI: torch.Tensor, bias: None) -> Any:
        return lambda x_NI: asked.append((tuple(weight_OI.shape), len(x_NI)))

    products = floor.Products(torch.float32, kernel)
    products.seconds(600, 300)
    layers = [(shape, 600) for shape in floor.LAYER] * 30
    head = [((49152, 576), 256), ((49152, 576), 44)]
    assert asked == (layers + head) * (floor.REPETITIONS + 1)
    weights = sum(rows * columns for (rows, columns), _ in [*layers, head[0]])
    assert weights * 4 == pytest.approx(538e6, rel=0.001), "SmolLM2-135M in float32"


def test_the_faster_kernel_counts(floor: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        def __init__(self, dtype: torch.dtype, kernel: Any) -> None:
            self.time = {floor.packed_linear: 3.0, floor.dense_linear: 2.0}[kernel]

        def seconds(self, num_rows: int, num_head_rows: int) -> float:
            return self.time * num_rows

    monkeypatch.setattr(floor, "Products", Timed)
    assert floor.Floor(torch.float32).seconds(5, 5) == 10.0
    assert floor.Floor(torch.float32).seconds(0, 0) == 0.0


def test_another_model_is_refused(floor: ModuleType) -> None:
    with pytest.raises(SystemExit, match="tiny was measured"):
        floor.rows_of({"setting": {"model": "tiny"}, "parts": {}}, {})


def test_it_reads_what_the_benchmark_wrote(
    floor: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(floor, "NUM_LAYERS", 1)
    monkeypatch.setattr(floor, "VOCABULARY", 300)
    # Few, for processors that are slow in bfloat16.
    role = {"forwarded": 60, "head_rows": 60}
    work = {"attacker": role, "target": role, "reference": role}
    setting = {"model": "smollm2", "episodes": 1, "turn_tokens": 4, "num_threads": 1}
    parts = {
        "deviation": {},
        "update": {
            "plain": {"phases": {"update": 10.0}},
            "bf16": {"phases": {"update": 2.0}, "work": work},
        },
        "iteration": {
            "plain": {"phases": {"rollout": 30.0, "update": 20.0}},
            "fp32": {
                "phases": {"rollout": 6.0, "update": 4.0},
                "work": work,
                "work_of_updates": work,
                "num_steps": 2,
            },
        },
    }
    measured: dict[str, Any] = {
        "settings": [{"label": "small", "setting": setting, "parts": parts}]
    }
    path = tmp_path / "ast_speed.json"
    step = {"num_prompts": 1, "prompt_tokens": 9, "new_tokens": 4, "precision": "fp32"}
    measured |= {
        "environment": {"num_threads": 1},
        "trl": [{**step, "trl_seconds": 50.0, "our_seconds": 10.0}],
    }
    path.write_text(json.dumps(measured), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["ast_floor.py", str(path)])
    floor.main()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ")
    ]
    assert [row[:4] for row in rows[2:]] == [
        ["rollout", "fp32", "30", "6"],
        ["update", "bf16", "10", "2"],
        ["iteration", "fp32", "50", "10"],
        ["part", "precision", "TRL, s", "ours, s"],
        ["---", "---", "---:", "---:"],
        ["step", "fp32", "50", "10"],
    ]
    assert float(rows[4][4]) > float(rows[2][4]), "an iteration is more than its rollout"
    for row in (*rows[2:5], rows[7]):
        least, ratio, most, share = (float(cell.replace(",", "")) for cell in row[4:])
        assert 0 < least < 1
        assert ratio == 5
        plain, ours = float(row[2]), float(row[3])
        assert most == pytest.approx(plain / least, rel=0.02)
        assert share == pytest.approx(least / ours, rel=0.02)
