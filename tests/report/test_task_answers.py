"""What a policy answered is shown by table and iteration, whatever it said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nip_astra.report import answers
from nip_astra.report.answers import groups_of
from nip_astra.report.page import render_report
from nip_astra.report.records import read_run
from nip_astra.run import run_experiment
from tests.kit.resuming import short_experiment


def make_run(folder: Path, tables: dict[str, list[dict[str, Any]]]) -> Path:
    (folder / "rollouts").mkdir()
    (folder / "hyper_parameters.yaml").write_text("trainer: self_hosted_grpo\ntask: {policy: {}}\n")
    (folder / "evaluations" / "test").mkdir(parents=True)
    (folder / "evaluations" / "test" / "evaluation.json").write_text('{"kind": "task"}')
    for name, rows in tables.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(step: int, reward: float | None, *messages: Any, problem: int = 0) -> dict[str, Any]:
    return {"step": step, "problem": problem, "reward": reward, "messages": list(messages)}


PROBLEM = ["user", "2+9="]


def test_answers_stand_by_table_and_those_of_training_last(tmp_path: Path) -> None:
    several = [PROBLEM, ["assistant", "12"], ["user", "too high"], ["assistant", "11"]]
    rows = [row(1, 0.0, PROBLEM, ["assistant", "3"]), row(9, 1.0, *several), row(9, None, PROBLEM)]
    evaluated = [{**row(0, 0.5, PROBLEM), "problem": i, "step": None} for i in range(25)]
    files = {"rollouts/train.jsonl": rows, "evaluations/test/problems.jsonl": evaluated}
    evaluation, training = groups_of(read_run(make_run(tmp_path, files)))
    assert (evaluation.title, evaluation.counts) == ("Evaluation test", {"wrong": 25})
    assert training.counts == {"right": 1, "wrong": 1, "without a verdict": 1}
    assert training.items[0].after[0].messages == [tuple(one) for one in several[1:]]
    assert [one.after[0].label for one in training.items] == [
        *("iteration 9", "iteration 9", "iteration 1")
    ]


def test_problems_are_compared_before_and_after_training(tmp_path: Path) -> None:
    def table(step: int, *rewards: float | None) -> list[dict[str, Any]]:
        return [
            row(step, reward, PROBLEM, ["assistant", f"{i}"], problem=i) | {"problem_hash": "same"}
            for i, reward in enumerate(rewards)
        ]

    before, after = table(0, 0.0, 1.0, 1.0, 0.0, None), table(9, 1.0, 0.0, 1.0, 0.0, 1.0)
    # Another run of the last problem, which is right in one of two.
    after += [{**after[-1], "run": 1, "reward": 0.0, "is_right": False}]
    files = {"rollouts/before.jsonl": before, "rollouts/evaluation.jsonl": after}
    (group,) = groups_of(read_run(make_run(tmp_path, files)))
    kinds = ["fixed", "broken", "right both times", "wrong both times", "wrong"]
    assert [item.kind for item in group.items] == kinds
    assert group.counts == dict.fromkeys(kinds, 1)
    assert [side.label for side in group.items[4].sides] == ["after run 1", "after run 2", "before"]
    page = render_report([read_run(tmp_path)])
    assert json.loads(group.data)[1][4][0][:3] == ["after run 1", "wrong", 0.0]
    assert page.count('class="e"') == 5


def test_conversations_of_an_attacker_are_compared_by_prompt(tmp_path: Path) -> None:
    def table(step: int, *scores: float) -> list[dict[str, Any]]:
        return [
            {"step": step, "node": 0, "parent": -1, "depth": 0, "episode": i, "prompt": prompt}
            | {"probe": "why ?", "response": f"<b>{score}", "response_score": score}
            for i, (prompt, score) in enumerate(zip("abca", scores, strict=True))
        ]

    folder = make_run(tmp_path, {"rollouts/before.jsonl": table(0, 0.1, 0.9, 0.2, 0.9)})
    (folder / "rollouts" / "evaluation.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in table(9, 0.9, 0.1, 0.2, 0.9))
    )
    (folder / "hyper_parameters.yaml").write_text(
        "trainer: ast_dpo\nast_chat: {failure_threshold: 0.5}\n"
    )
    (group,) = groups_of(read_run(folder))
    kinds = ["failing now", "failing no more", "never failing", "failing both times"]
    assert [one[0] for one in map(group.plain, group.items)] == kinds
    assert [item.title for item in group.items] == ["a", "b", "c", "a"]
    page = render_report([read_run(folder)])
    before_and_after = page.partition("Before and after</h2>")[2]
    assert "&lt;b&gt;0.9" in before_and_after
    assert re.search(r'class="w t x" tabindex="0"[^>]*>&lt;b&gt;0.9', before_and_after)


def test_texts_of_a_large_list_are_shortened_and_no_item_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_CHARACTERS", 20_000)
    rows = [row(9, 1.0, PROBLEM, ["assistant", "x" * 5000], problem=i) for i in range(50)]
    (group,) = groups_of(read_run(make_run(tmp_path, {"rollouts/evaluation.jsonl": rows})))
    assert group.limit == answers.CUTS[-1]
    items = json.loads(group.data)
    assert len(items) == 50
    assert items[49][4][0][4][0][1].startswith("x" * answers.CUTS[-1] + " …")


def test_a_part_of_the_answers_is_shown_with_their_number(tmp_path: Path) -> None:
    rows = [row(1, 1.0, PROBLEM, problem=number) for number in range(2)]
    run = make_run(tmp_path, {"rollouts/evaluation.jsonl": rows})
    (run / "results.json").write_text('{"after": {"num_problems": 13}}')
    assert "2 of 13 problems stored" in render_report([read_run(run)])


def test_what_was_said_is_no_html_and_odd_rows_are_shown(tmp_path: Path) -> None:
    rows = [
        row(1, 0.25, ["user", "<script>alert(1)</script>"], ["assistant", "\u202e<b>no</b>"]),
        row(1, float("nan"), "no message", ["user"], [1, 2]),
    ]
    page = render_report([read_run(make_run(tmp_path, {"rollouts/evaluation.jsonl": rows}))])
    assert "&lt;script&gt;alert(1)" in page
    assert "\\u003cscript>alert(1)" in page, "in the data of the script"
    assert "<script>alert(1)" not in page
    assert "\u202e" not in page
    assert "could not be drawn" not in page


def test_a_page_of_a_task_tells_nothing_of_roles_and_parameters_that_it_lacks(
    tmp_path: Path,
) -> None:
    resolved = short_experiment("remote_api_grpo", tmp_path / "x", num_iterations=1)
    settings = {"runs_dir": str(tmp_path), "progress": False}
    runs = [
        run_experiment(resolved, run_id=name, **settings).run_directory.path for name in ("a", "b")
    ]
    page = (runs[0] / "report.html").read_text()
    results = json.loads((runs[0] / "results.json").read_text())
    num_problems = results["after"]["num_problems"]
    assert f"Held out<small>{num_problems} problems: " in page
    compared = render_report([read_run(one) for one in runs])
    for text in (re.sub(r"(?s)<(style|script).*?</\1>", "", one) for one in (page, compared)):
        for word in ("attacker", "reference and scorer", "probe NLL", "target queries"):
            assert word not in text, word
    for group in ("rl.num_iterations", "ppo.clip_low", "text_rl.", "protocol_common."):
        assert group not in page, group
    assert "training.minibatch_size" in page
    assert "Right answers before and after training" in compared
