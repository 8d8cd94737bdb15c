"""Columns beside a prompt reach scorers and records of a run and of its evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from tests.command_line import CommandLine

SCORER = """
def rate(completions, columns):
    assert all(set(one) == {"kind", "share"} for one in columns), columns
    return [float(one["share"]) for one in columns]
"""
COLUMNS = {"red": {"kind": "red", "share": "0.25"}, "blue": {"kind": "blue", "share": "0.75"}}


def test_a_scorer_and_all_records_have_the_columns(cli: CommandLine) -> None:
    scorer = cli.write("scorer.py", SCORER)
    words = ("hello", "good", "thanks", "how", "day", "fine")
    for number, split in enumerate(("train", "dev", "test")):
        rows = [
            f"{words[2 * number + place]},{kind},{COLUMNS[kind]['share']}"
            for place, kind in enumerate(COLUMNS)
        ]
        cli.write(f"{split}.csv", "\n".join(["goal,kind,share", *rows, ""]))
    files = [f"ast_chat.prompts.{one}={cli.folder / one}.csv" for one in ("train", "dev", "test")]
    overrides = (
        *files,
        "ast_chat.prompts.column=goal",
        f"ast_chat.scorer={{_type: python, function: '{scorer}:rate'}}",
        "training.num_iterations=1",
        "ast_chat.evaluation.num_episodes=4",
    )
    said = cli.run(overrides=overrides)
    assert said.code == 0, said.err
    run = cli.folder / "runs" / "one"
    said = cli("evaluate", str(run), "--num-episodes", "4", "--probability-episodes", "0")
    assert said.code == 0, said.err
    files = [*(run / "rollouts").glob("*.jsonl"), run / "evaluations" / "test" / "rows.jsonl"]
    assert len(files) == 4
    for file in map(Path, files):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            beside = row["prompt_columns"]
            assert beside == COLUMNS[beside["kind"]]
            assert row["response_score"] == float(beside["share"])
