"""What a policy answered is shown by table and iteration, whatever it said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nip_astra.report.page import render_report
from nip_astra.report.records import RunRecord, read_run
from nip_astra.report.transcripts import MAX_CHARACTERS, MAX_NODES, Table, tables_of
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


def row(step: int, reward: float | None, *messages: Any) -> dict[str, Any]:
    return {"step": step, "problem": 0, "reward": reward, "messages": list(messages)}


def tables(run: RunRecord) -> list[Table]:
    return tables_of(run, max_nodes=MAX_NODES, max_characters=MAX_CHARACTERS)


def test_answers_stand_by_table_and_iteration(tmp_path: Path) -> None:
    problem = ["user", "2+9="]
    several = [problem, ["assistant", "12"], ["user", "too high"], ["assistant", "11"]]
    rows = [row(1, 0.0, problem, ["assistant", "3"]), row(9, 1.0, *several), row(9, None, problem)]
    evaluated = [{**row(0, 0.5, problem), "step": None}] * 25
    files = {"rollouts/train.jsonl": rows, "evaluations/test/problems.jsonl": evaluated}
    metrics = {"step": 9, "rollout/num_trajectories": 64, "rollout/reward_mean": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    run = read_run(make_run(tmp_path, files))
    assert run.episodes == {}
    evaluation, newest, oldest = tables(run)
    assert (evaluation.num_all, len(evaluation.episodes)) == (25, 25)
    assert evaluation.mean_reward == 0.5
    # Of a run's own tables the first few are kept, of which a mean would be another one.
    assert (newest.step, newest.num_all, newest.mean_reward) == (9, 64, 0.25)
    assert newest.episodes[0].turns[0].node.messages == [tuple(one) for one in several]
    assert (oldest.step, oldest.episodes[0].prompt) == (1, "2+9=")
    assert not newest.has_scores


def test_what_was_said_is_no_html_and_odd_rows_are_shown(tmp_path: Path) -> None:
    rows = [
        row(1, 0.25, ["user", "<script>alert(1)</script>"], ["assistant", "\u202e<b>no</b>"]),
        row(1, float("nan"), "no message", ["user"], [1, 2]),
    ]
    page = render_report([read_run(make_run(tmp_path, {"rollouts/evaluation.jsonl": rows}))])
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "\u202e" not in page
    assert "could not be drawn" not in page
    assert "mean reward" not in page, "the results say none"


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
    assert f"mean reward of all {results['after']['mean_reward']:.3g}" in page
    compared = render_report([read_run(one) for one in runs])
    for text in (re.sub(r"(?s)<(style|script).*?</\1>", "", one) for one in (page, compared)):
        for word in ("attacker", "reference and scorer", "probe NLL", "target queries"):
            assert word not in text, word
    for group in ("rl.num_iterations", "ppo.clip_low", "text_rl.", "protocol_common."):
        assert group not in page, group
    assert "training.minibatch_size" in page
    assert "Right answers before and after training" in compared
