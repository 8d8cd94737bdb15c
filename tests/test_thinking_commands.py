"""`stress`, `evaluate` and `task` with models that think, in the forms of their families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_line import CommandLine
from tests.kit.families import FAMILIES, WITH_THOUGHTS, Family
from tests.kit.tiny import make_reciting_model

SCORER = """
def is_rude(completions):
    return [float("rude" in completion) for completion in completions]
"""
SHORT = (
    *("training.num_iterations=1", "training.num_episodes_per_experience=1"),
    *("training.minibatch_size=4", "ast_chat.tree_depth=2", "ast_chat.evaluation.num_episodes=2"),
    "ast_chat.evaluation.labelled_responses=null",
)
SHORT_TASK = ("training.num_iterations=1", "training.num_episodes_per_experience=2")


EACH = ["Qwen 3", "Qwen 3.5", "gpt-oss", "Gemma 4", "Muse"]
"""One family for each way in which thoughts are marked."""
OTHERS = [name for name in WITH_THOUGHTS if name not in EACH]


def think(family: Family, thought: str) -> str:
    assert family.think is not None
    return family.think(thought)


ANSWERS: dict[str, Callable[[Family], str]] = {
    "kind": lambda family: think(family, "Be rude?") + family.say("kind"),
    "rude": lambda family: think(family, "Be kind?") + family.say("rude"),
    "cut": lambda family: think(family, "Be rude?").partition("rude?")[0] + "rude?",
}
"""What a target answers."""


def make_target(folder: Path, name: str, kind: str) -> str:
    family = FAMILIES[name]
    path = folder / f"{kind}-{family.template}"
    return str(make_reciting_model(path, family.tokenizer(), ANSWERS[kind](family)))


def settings(values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("names", [EACH, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_replies_are_scored_and_thoughts_are_not(
    names: list[str], cli: CommandLine, tmp_path: Path
) -> None:
    Path("rude.py").write_text(SCORER)
    scored = ("--scorer", "rude.py:is_rude", "--run-id", "s", *settings(SHORT))
    cli.ok("stress", "--target", make_target(tmp_path, names[1], "kind"), *scored)
    after = read_json(Path("runs/s/results.json"))["after"]
    assert (after["num_failed"], after["num_known"]) == (0, 2)
    for line in Path("runs/s/rollouts/train.jsonl").read_text().splitlines():
        node = json.loads(line)
        assert (node["response"], node["response_reasoning"]) == ("kind", "Be rude?")
    short = ("--num-episodes", "2", "--probability-episodes", "0")
    for kind, rate, rated in (("kind", 0.0, names), ("rude", 1.0, names[:1])):
        targets = [make_target(tmp_path, name, kind) for name in rated]
        cli.ok("evaluate", "runs/s", *(f"--target={target}" for target in targets), *short)
        for target in targets:
            folder = Path("runs/s/evaluations") / f"test-{Path(target).name}"
            assert read_json(folder / "evaluation.json")["failure_rate"]["value"] == rate
    # A thought that is cut is no answer, so there is nothing to rate.
    result = cli("evaluate", "runs/s", "--target", make_target(tmp_path, names[0], "cut"), *short)
    assert result.code == 2
    assert "4 undetermined" in result.err


@pytest.mark.parametrize(
    "name", [*EACH, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_rewards_read_the_answer_without_the_thought(
    name: str, cli: CommandLine, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    text = think(family, "Is it 4?") + family.say("5")
    model = make_reciting_model(tmp_path / "model", family.tokenizer(), text)
    rows = [{"prompt": f"2 + 3 = ? ({number})", "answer": "5"} for number in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--model", str(model), "--data", "rows.jsonl", "--reward", "exact")
    cli.ok("task", *given, "--num-generations", "2", "--run-id", "t", *settings(SHORT_TASK))
    after = read_json(Path("runs/t/results.json"))["after"]
    assert (after["num_correct"], after["num_answers"]) == (8, 8)
