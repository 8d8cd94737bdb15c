"""The trainer benchmark trains its arms, and reports the figures of their runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine

SMALL = ("training.num_iterations=1", "ast_chat.evaluation.num_episodes=2")


def test_an_arm_is_trained_and_its_figures_are_those_of_the_run(
    benchmark: ModuleType,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(benchmark.TRAINERS) == {one for one in TRAINERS.names() if one.startswith("ast_")}
    out = tmp_path / "figures.json"
    arguments = [
        *("--arms", "ast_grpo+novelty", "--seeds", "3", "--out", str(out)),
        *("--scenario", str(tiny_scenario)),
        *(part for override in SMALL for part in ("--set", override)),
    ]
    monkeypatch.setattr(sys, "argv", ["trainers.py", *arguments])

    def run_here(command: list[str], **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "nip_astra"]
        CommandLine(tmp_path, tiny_scenario, capsys).ok(*command[3:])

    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(run=run_here))
    benchmark.main()
    (run,) = json.loads(out.read_text())
    assert (run["arm"], run["seed"], run["iterations"]) == ("ast_grpo+novelty", 3, 1)
    # Three episodes of a tree of width 2 and depth 2.
    assert run["target_queries"] == 18
    assert min(run["generated_tokens"], run["seconds"]) > 0
    assert f"`{run['arm']}`" in capsys.readouterr().out


def test_reward_terms_are_compared_within_seeds(benchmark: ModuleType) -> None:
    def run(arm: str, seed: int, plants: int) -> dict[str, object]:
        same = {"after": 0.9, "distinct": 0.5, "nll": 0.8, "held_out_plants": 3}
        return {"arm": arm, "seed": seed, "plants": plants} | same

    plain = [run("ast_ppo", seed, 6) for seed in (1, 2, 3, 4)]
    # Differences 1, 3, 0; the fourth seed was not run with terms. Half of the interval is
    # 4.303 * sqrt(7 / 3) / sqrt(3).
    with_terms = [run("ast_ppo+novelty", seed, plants) for seed, plants in ((1, 7), (2, 9), (3, 6))]
    cells = benchmark.paired_table([*plain, *with_terms]).splitlines()[-1].split(" | ")
    assert cells[:4] == ["| `ast_ppo+novelty`", "3", "+1.3 (-2.5 to +5.1)", "2, 1, 0 (p = 0.500)"]
    assert cells[4:7] == ["+0.0 (each)", "0, 3, 0 (p = 1.000)", "+0.0% (each)"]
    assert benchmark.paired_table(plain) == ""
