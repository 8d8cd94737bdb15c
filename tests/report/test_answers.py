"""Answers to problems and conversations before and after training, in tables and on the page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nip_astra.report import answers
from nip_astra.report.answers import groups_of
from nip_astra.report.page import render_report
from nip_astra.report.records import RunRecord, read_run
from nip_astra.report.summary import main_table, verdict
from nip_astra.report.terminal import print_results
from tests.kit.experiments import run_in
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.report.runs import write_lines

PROBLEM = ["user", "2+9="]


def make_run(
    folder: Path, parameters: str = "task: {policy: {}}", **tables: list[dict[str, Any]]
) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "hyper_parameters.yaml").write_text(f"trainer: self_hosted_grpo\n{parameters}\n")
    for name, rows in tables.items():
        write_lines(folder / "rollouts" / f"{name}.jsonl", rows)
    return folder


def row(step: int, reward: float | None, *messages: Any, problem: int = 0) -> dict[str, Any]:
    return {"step": step, "problem": problem, "reward": reward, "messages": list(messages)}


def test_the_page_and_the_terminal_show_the_number_of_right_answers(tmp_path: Path) -> None:
    right = {"accuracy": 0.3, "accuracy_interval": [0.25, 0.36], "num_problems": 300}
    before = right | {"num_correct": 90, "num_answers": 300}
    after = before | {"accuracy": 0.8, "accuracy_interval": [0.75, 0.84], "num_correct": 232}
    results = {"before": before, "after": after | {"num_answers": 290, "mean_reward": 0.8}}
    run = RunRecord(tmp_path, results=results)
    (sentence,) = verdict(run)
    assert says(sentence, "80.0% [75.0%, 84.0%]", "232 of 290", "30.0% [25.0%, 36.0%]", "90 of 300")
    headings, rows = main_table(run)
    assert headings == ["before", "after"]
    cells = ["30.0% [25.0%, 36.0%], 90 of 300", "80.0% [75.0%, 84.0%], 232 of 290"]
    assert rows[0].cells == cells
    console = Console(record=True, width=100)
    print_results(results, tmp_path, console)
    assert says(console.export_text(), "300", "right answers", cells[1])


def test_problems_are_compared_before_and_after_training(tmp_path: Path) -> None:
    def table(step: int, *rewards: float | None) -> list[dict[str, Any]]:
        return [
            row(step, reward, PROBLEM, ["assistant", f"{i}"], problem=i) | {"problem_hash": "same"}
            for i, reward in enumerate(rewards)
        ]

    before, after = table(0, 0.0, 1.0, 1.0, 0.0, None), table(9, 1.0, 0.0, 1.0, 0.0, 1.0)
    # Another run of the last problem, which is right in one of two.
    after += [{**after[-1], "run": 1, "reward": 0.0, "is_correct": False}]
    run = read_run(make_run(tmp_path, before=before, evaluation=after))
    (group,) = groups_of(run)
    kinds = ["fixed", "broken", "right both times", "wrong both times", "wrong"]
    assert [item.kind for item in group.items] == kinds
    assert group.counts == dict.fromkeys(kinds, 1)
    assert [side.label for side in group.items[4].sides] == ["after run 1", "after run 2", "before"]
    assert json.loads(group.data)[1][4][0][:3] == ["after run 1", "wrong", 0.0]
    assert render_report([run]).count('class="e"') == 5
    del run.tables["evaluation"]
    assert "Before training<small>5 problems:" in render_report([run])


def test_conversations_of_an_attacker_are_compared_by_prompt(tmp_path: Path) -> None:
    def table(step: int, *scores: float) -> list[dict[str, Any]]:
        return [
            {"step": step, "node": 0, "parent": -1, "depth": 0, "episode": i, "prompt": prompt}
            | {"probe": "why ?", "response": f"<b>{score}", "response_score": score}
            for i, (prompt, score) in enumerate(zip("abca", scores, strict=True))
        ]

    before, after = table(0, 0.1, 0.9, 0.2, 0.9), table(9, 0.9, 0.1, 0.2, 0.9)
    parameters = "ast_chat: {failure_threshold: 0.5}"
    run = read_run(make_run(tmp_path, parameters, before=before, evaluation=after))
    (group,) = groups_of(run)
    kinds = ["failing now", "failing no more", "never failing", "failing both times"]
    assert [one[0] for one in map(group.plain, group.items)] == kinds
    assert [item.title for item in group.items] == ["a", "b", "c", "a"]
    before_and_after = render_report([run]).partition("Before and after</h2>")[2]
    assert re.search(r'class="w t x" tabindex="0"[^>]*>&lt;b&gt;0.9', before_and_after)


def test_texts_of_a_large_list_are_shortened_and_no_item_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_CHARACTERS", 20_000)
    rows = [row(9, 1.0, PROBLEM, ["assistant", "x" * 5000], problem=i) for i in range(50)]
    several = [PROBLEM, ["assistant", "12"], ["user", "too high"], ["assistant", "11"]]
    trained = [row(1, 0.0, PROBLEM, ["assistant", "3"]), row(9, 1.0, *several), row(9, None)]
    folder = make_run(tmp_path, evaluation=rows, train=trained)
    (folder / "results.json").write_text('{"after": {"num_problems": 130}}')
    run = read_run(folder)
    group, training = groups_of(run)
    assert group.limit == answers.CUTS[-1]
    items = json.loads(group.data)
    assert len(items) == 50
    assert items[49][4][0][4][0][1].startswith("x" * answers.CUTS[-1] + " …")
    assert "50 of 130 problems stored" in render_report([run])
    # Answers of training come last, the newest first.
    assert training.counts == {"right": 1, "wrong": 1, "without a verdict": 1}
    assert training.items[0].after[0].messages == [tuple(item) for item in several[1:]]
    labels = [item.after[0].label for item in training.items]
    assert labels == ["iteration 9", "iteration 9", "iteration 1"]


def test_messages_are_no_html_and_odd_rows_are_shown(tmp_path: Path) -> None:
    rows = [
        row(1, 0.25, ["user", "<script>alert(1)</script>"], ["assistant", "\u202e<b>no</b>"]),
        row(1, float("nan"), "no message", ["user"], [1, 2]),
    ]
    page = render_report([read_run(make_run(tmp_path, evaluation=rows))])
    assert "&lt;script&gt;alert(1)" in page
    assert "\\u003cscript>alert(1)" in page, "in the data of the script"
    for text in ("<script>alert(1)", "\u202e", "could not be drawn"):
        assert text not in page


def test_a_page_of_a_task_has_no_roles_and_parameters_of_others(tmp_path: Path) -> None:
    resolved = short_experiment("remote_api_grpo", tmp_path / "x", num_iterations=1)
    runs = [run_in(tmp_path, resolved, "a")]
    runs.append(shutil.copytree(runs[0], tmp_path / "b"))
    page = (runs[0] / "report.html").read_text()
    results = json.loads((runs[0] / "results.json").read_text())
    assert f"Held out<small>{results['after']['num_problems']} problems: " in page
    compared = render_report([read_run(item) for item in runs])
    for text in (re.sub(r"(?s)<(style|script).*?</\1>", "", item) for item in (page, compared)):
        for word in ("attacker", "reference and scorer", "probe NLL", "target queries"):
            assert word not in text, word
    for group in ("rl.num_iterations", "ppo.clip_low", "text_rl.", "protocol_common."):
        assert group not in page, group
    assert "training.minibatch_size" in page
    assert "Right answers before and after training" in compared
