"""Broken, endless or impossibly large input ends in a message and not in a traceback."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import RunDirectoryError, ScorerTimeoutError
from nip_astra.scorers.base import Scorer
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, plugins_forgotten_after, refused
from tests.kit.documents import ROOT
from tests.kit.messages import says
from tests.report.runs import failing, write_run

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


def test_an_export_of_half_a_surrogate_pair(cli: CommandLine) -> None:
    rows = [failing("b \ud800", node=0, parent=-1)]
    run = write_run(cli.folder / "one", tables={"evaluation": rows})
    for form in ("csv", "jsonl", "hitlog"):
        cli.ok("export", str(run), "--format", form)


def test_a_closed_standard_output_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} {ROOT / 'run.py'}"
    shell = {"shell": True, "cwd": tmp_path, "capture_output": True, "text": True}
    for line in ("--help | true", "show --help >&-"):
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


VALUES = (
    *("\N{SUPERSCRIPT TWO}", "1e400", ".nan", "-1", "1" + "0" * 30, "9" * 5000, "true", "0", "1.5"),
    *("[]", "{}", "''", '"\\0"', "null", "../../x", "hub://x", "x" * 5000, "${a.b}", "[1,["),
    *("{a: 1", "{_type: nope}", "{_type: openai}", "[[[[1]]]]", "scenario://../x"),
    *("package://no.such/x", "\ud800"),
)
SERVICE = "remote_api_grpo.train_service"
SWEEP = "sweep --dry-run --trainer ast_dpo"
INPUTS = {
    "--dry-run --trainer self_hosted_grpo --set": (
        "training.num_iterations training.minibatch_size training.lr training.optimizer task.task "
        "task.task._type task.max_turns task.evaluation.num_problems task.num_rollout_parts "
        "task.policy.language_model.model task.policy.max_new_tokens self_hosted_grpo.group_size "
        "self_hosted_grpo.max_staleness seed scenario nothing"
    ),
    "--dry-run --trainer pure_text_ei --set": (
        "text_rl.num_iterations text_rl.rollouts_per_iteration text_rl.fine_tune_method "
        "secret_word.num_test secret_word.agents.default.model secret_word.agents.verifier "
        "secret_word.agents.default.max_tokens nip.max_message_rounds interaction_protocol "
        "protocol_common.prover_reward pure_text_ei base_run.run plugins"
    ),
    "show --trainer remote_api_grpo --set": (
        f"{SERVICE}.backend {SERVICE}.base_url {SERVICE}.model {SERVICE}.token_variable "
        f"{SERVICE}.patience_seconds {SERVICE}.nothing"
    ),
    SWEEP: "--seeds --shard --scenario --objective --metric --num-trials",
    f"{SWEEP} --set": "training.lr seed",
    f"{SWEEP} --search": "training.lr",
    f"{SWEEP} --settings": "num_threads",
    "sweep --dry-run": "--trainer",
}
"""The start of a command, and names of parameters or options."""


def bad_inputs() -> list[Any]:
    """Arguments of 100 inputs, every ninth for a fast test; the same for every call."""
    commands = []
    for head, names in INPUTS.items():
        for name, value in product(names.split(), VALUES):
            words = [name, value] if name.startswith("--") else [f"{name}={value}"]
            commands.append((f"{head.split()[0]} {name} {value[:20]!a}", (*head.split(), *words)))
    return [
        pytest.param(words, id=name, marks=[pytest.mark.slow] if number % 9 else [])
        for number, (name, words) in enumerate(random.Random(31).sample(commands, 100))
    ]


@pytest.mark.parametrize("words", bad_inputs())
def test_a_value_that_type_range_or_place_does_not_allow_is_refused(
    cli: CommandLine, words: tuple[str, ...]
) -> None:
    """An input that is valid by chance may run; none may end in a traceback."""
    with plugins_forgotten_after():
        result = cli(*words)
    assert result.code in (0, 2), result
    assert "Traceback" not in result.err
    assert result.code == 0 or result.err.startswith(("error: ", "Usage: ")), result.err
