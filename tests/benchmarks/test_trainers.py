"""The trainer benchmark trains its arms, and reports the figures of their runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine

SMALL = ("training.num_iterations=1", "ast_chat.evaluation.num_episodes=2")


def test_every_ast_trainer_is_an_arm(benchmark: ModuleType) -> None:
    ast_trainers = {name for name in TRAINERS.names() if name.startswith("ast_")}
    assert set(benchmark.TRAINERS) == ast_trainers


def typed_here(type_command: CommandLine) -> Callable[..., None]:
    """Runs a command of the program in this process, which has imported it."""

    def run(command: list[str], **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "nip_astra"]
        assert type_command(*command[3:]).code == 0

    return run


def test_an_arm_is_trained_and_its_figures_are_those_of_the_run(
    benchmark: ModuleType,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "figures.json"
    arguments = [
        *("--arms", "ast_grpo+novelty", "--seeds", "3", "--out", str(out)),
        *("--scenario", str(tiny_scenario)),
        *(part for override in SMALL for part in ("--set", override)),
    ]
    monkeypatch.setattr(sys, "argv", ["trainers.py", *arguments])
    type_command = CommandLine(tmp_path, tiny_scenario, capsys)
    here = SimpleNamespace(run=typed_here(type_command))
    monkeypatch.setattr(benchmark, "subprocess", here)
    benchmark.main()
    printed = capsys.readouterr().out
    runs = json.loads(out.read_text())
    (run,) = runs
    assert (run["arm"], run["seed"]) == ("ast_grpo+novelty", 3)
    # Three episodes of a tree of width 2 and depth 2.
    assert run["target_queries"] == 18
    assert run["iterations"] == 1
    assert run["generated_tokens"] > 0
    assert run["seconds"] > 0
    assert f"`{run['arm']}`" in printed


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
