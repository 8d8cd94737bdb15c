"""The benchmarks run, and count what they say."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.documents import ROOT


@pytest.fixture(scope="module")
def rollouts() -> ModuleType:
    """The module benchmarks/rollouts.py, which is in no package."""
    name = "benchmark_rollouts"
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "rollouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_rollouts_measures_a_scenario_and_writes_json(
    rollouts: ModuleType,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--scenario", str(tiny_scenario), "--iterations", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["rollouts.py", *arguments])
    rollouts.main()
    printed = capsys.readouterr().out
    for label in ("iterations per second", "tokens per second", "peak memory, MiB"):
        assert label in printed
    figures = json.loads(out.read_text())
    for part in ("attacker", "target", "reference"):
        # Nothing can be said without reading what came before at least once, and little twice.
        assert 1.0 <= figures["forwarded_per_unique_token"][part] < 1.3
        assert figures["forwarded_tokens"][part] > 0
    assert figures["num_iterations"] == 2
    assert figures["peak_memory_bytes"] > 0
    assert "packages" in figures["environment"]


def test_novelty_is_measured_beside_nltk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_nltk = importlib.util.find_spec("nltk") is not None
    out = tmp_path / "figures.json"
    arguments = ["--probes", "5", "--history", "30", "--by-nltk", str(2 * has_nltk)]
    monkeypatch.setattr(sys, "argv", ["novelty.py", *arguments, "--out", str(out)])
    runpy.run_path(str(ROOT / "benchmarks" / "novelty.py"), run_name="__main__")
    assert "turn_over" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["num_history"] == 30
    assert figures["kept"] > 0
    assert figures.get("largest_difference", 0.0) < 1e-12


def test_a_plot_of_growth_has_a_point_for_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(1, 2, 100), (2, 2, 200), (2, 3, 500)]
    rows = [
        {
            "episodes": episodes,
            "width": width,
            "unique_tokens": tokens,
            "phases": {"rollout": tokens / 1000, "update": tokens / 2000},
        }
        for episodes, width, tokens in sizes
    ]
    figures, drawing = tmp_path / "speed.json", tmp_path / "growth.svg"
    figures.write_text(json.dumps({"growth": {"rows": rows}}))
    monkeypatch.setattr(sys, "argv", ["growth_plot.py", str(figures), str(drawing)])
    runpy.run_path(str(ROOT / "benchmarks" / "growth_plot.py"), run_name="__main__")
    circles = ElementTree.parse(drawing).getroot().findall("{http://www.w3.org/2000/svg}circle")
    # Two episodes of width 2 are on both lines.
    places = {(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles}
    assert len(circles) == 4
    assert len(places) == 3
    # Twice the tokens and twice the seconds are twice as far from the origin.
    (left, low), (right, high), _ = sorted(places)
    assert (right - 50) == pytest.approx(2 * (left - 50), abs=0.2)
    assert (300 - 46 - high) == pytest.approx(2 * (300 - 46 - low), abs=0.2)
