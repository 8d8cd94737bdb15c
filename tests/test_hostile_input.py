"""Broken, endless or impossibly large input ends in a message and not in a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nip_astra.errors import RunDirectoryError, ScorerTimeoutError
from nip_astra.evaluation.storage import encode_rows, read_rows
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scorers.base import Scorer
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says
from tests.report.runs import failing

ROOT = Path(__file__).resolve().parents[1]
SHOW = ("show", "--trainer", "ast_dpo")
DEEP = {"lists": "a: " + "[" * 100_000, "groups": "{a: " * 50_000}
"""YAML that is nested without end."""


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        *((("show", "--parameters", f"{one}.yaml"), (f"{one}.yaml", "too deep")) for one in DEEP),
        (("show", "--parameters", "/dev/zero"), ("/dev/zero",)),
        ((*SHOW, "--set", "training.lr=" + "[" * 5_000), ("training.lr", "YAML")),
        *(((*SHOW, "--set", one), (one,)) for one in ("training[lr]=1", "training[lr=1")),
        ((*SHOW, "--set", "training.lr]=1"), ("training.lr]=1",)),
        ((*SHOW, "--set", "training.lr=1e30"), ("training.lr: ", "at most 100")),
        (("show", "--trainer", "vanilla_ppo", "--set", "rl.lr=1e30"), ("rl.lr: ", "at most 100")),
        (("show", "--trainer", "solo_agent", "--set", "solo_agent.lr=1e30"), ("solo_agent.lr: ",)),
        (("--trainer", "ast_dpo", "--num-threads", "1000000"), ("num_threads: ", "at most")),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_input_without_end_or_of_impossible_size_is_refused(
    cli: CommandLine, arguments: tuple[str, ...], facts: tuple[str, ...]
) -> None:
    for name, text in DEEP.items():
        cli.write(f"{name}.yaml", text)
    assert says(refused(cli(*arguments)), *facts)


@pytest.mark.parametrize(
    "overrides",
    [
        ("ast_chat.tree_width=1000000000",),
        ("ast_chat.tree_depth=1000000000",),
        ("ast_chat.tree_width=1", "ast_chat.tree_depth=1000000000"),
        ("ast_chat.tree_width=10", "ast_chat.tree_depth=7"),
        ("ast_chat.evaluation.num_episodes=1000000000",),
        ("training.num_episodes_per_experience=1000000000",),
    ],
)
def test_sizes_that_no_memory_holds(cli: CommandLine, overrides: tuple[str, ...]) -> None:
    started = time.monotonic()
    refused(cli.run(overrides=overrides))
    assert time.monotonic() - started < 30
    assert not (cli.folder / "runs" / "one").exists()


def test_a_runs_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/runs\xff")
    with pytest.raises(RunDirectoryError, match=r"UTF-8.*--runs-dir"):
        RunDirectory.create(folder, "one")


def test_half_a_surrogate_pair_is_written_and_read_back(tmp_path: Path) -> None:
    rows = [{"probe": "a \ud800 b"}]
    (tmp_path / "rows.jsonl").write_bytes(encode_rows(rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows
    directory = RunDirectory.create(tmp_path, "one")
    directory.write_json("one.json", rows)
    assert directory.read_json("one.json") == rows


def test_an_export_of_half_a_surrogate_pair(cli: CommandLine, tmp_path: Path) -> None:
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(cli.scenario))
    run = RunDirectory.create(tmp_path / "runs", "one")
    run.write_yaml("hyper_parameters.yaml", resolved.hyper_params.to_dict())
    table = json.dumps(failing("b \ud800", node=0, parent=-1))
    (run.path / "rollouts" / "evaluation.jsonl").write_text(f"{table}\n")
    for form in ("csv", "jsonl", "hitlog"):
        cli.ok("export", str(run.path), "--format", form)


def test_a_closed_standard_output_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / 'run.py'}"
    shell = {"shell": True, "cwd": tmp_path, "capture_output": True, "text": True}
    for line in ("--help >&-", "--help | true", "show --help >&-"):
        done = subprocess.run(f"{command} {line}", check=False, **shell)  # type: ignore[call-overload]
        assert "Traceback" not in done.stderr, done.stderr
        assert "Exception ignored" not in done.stderr


class Hanging(Scorer):
    """Never answers."""

    calls = 0

    def _score(self, texts: object) -> list[float]:
        type(self).calls += 1
        time.sleep(60)
        return []


@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_scorer_that_hangs_has_a_time_limit(on_failure: str) -> None:
    parameters = Hanging.Parameters(timeout_seconds=0.2, on_failure=on_failure)
    scorer = Hanging(parameters, device=torch.device("cpu"))
    Hanging.calls = 0
    started = time.monotonic()
    if on_failure == "stop":
        with pytest.raises(ScorerTimeoutError, match=r"timeout_seconds=0\.2"):
            scorer.score(["a", "b"])
    else:
        assert scorer.score(["a", "b"]).isnan().all()
    assert time.monotonic() - started < 10
    assert Hanging.calls == 1


def test_an_iteration_without_samples_shows_no_nan(cli: CommandLine) -> None:
    result = cli.run(overrides=("ast_dpo.min_reward_difference=1000000",))
    assert result.code == 0, result.err
    assert "nan" not in result.err
    assert "loss=nothing to learn from" in result.err
