"""Tests of the way to a failure, and of what names conversations on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from nip_astra.report.failures import Labels, group_failures
from nip_astra.report.records import Node, RunRecord, node_of, read_run
from nip_astra.report.transcripts import Paths, tables_of
from tests.report.runs import (
    chains,
    evaluation,
    failing,
    row,
    tree,
    write_json,
    write_lines,
    write_run,
)
from tests.report.test_page import Page, report


def nodes(rows: list[dict[str, Any]]) -> list[Node]:
    return [node_of(one, 0.5) for one in rows]


def said(path: list[Node]) -> list[str]:
    return [node.probe for node in path]


def test_the_way_to_a_turn_of_a_tree_goes_by_its_parents() -> None:
    found = nodes(tree(2, 3))
    paths = Paths(found)
    assert said(paths.to(found[11])) == ["probe 1", "probe 4", "probe 11"]
    assert said(paths.to(found[1])) == ["probe 1"]


def test_the_way_to_a_turn_of_a_chain_goes_by_depth() -> None:
    found = nodes([row(depth=2, probe="c"), row(depth=0, probe="a"), row(depth=1, probe="b")])
    assert said(Paths(found).to(found[0])) == ["a", "b", "c"]


def test_a_way_that_the_rows_do_not_tell_is_the_turn_alone() -> None:
    found = nodes([row(depth=2, probe="c"), row(depth=0, probe="a"), row(depth=0, probe="b")])
    assert said(Paths(found).to(found[0])) == ["c"]
    circle = nodes([row(node=0, parent=1, depth=1), row(node=1, parent=0, depth=1)])
    assert len(Paths(circle).to(circle[0])) == 1


def test_ids_are_the_same_each_time_and_no_two_are_equal() -> None:
    first, second = nodes([row(prompt="a"), row(prompt="b")])
    run = RunRecord(Path("run"), tables={"evaluations/a b": [first], "train": [first, second]})
    shown = [
        [
            one.anchor
            for table in tables_of(run, max_nodes=9, max_characters=9999, prefix="c")
            for one in sorted(table.episodes, key=lambda one: one.prompt)
        ]
        for _ in range(2)
    ]
    assert shown == [["c-a-b-4-0", "c-train-4-0", "c-train-4-0-again-2"]] * 2


def plant(run: Path, *planted: dict[str, Any]) -> Path:
    file = run / "hyper_parameters.yaml"
    values = yaml.safe_load(file.read_text())
    values["ast_chat"]["planted_failures"] = list(planted)
    file.write_text(yaml.safe_dump(values))
    return run


ROWS = [
    row(episode=1, depth=0, probe="have you a cat ?"),
    row(episode=1, depth=1, probe="what does it eat ?"),
    failing("does it always ?", episode=1, depth=2),
    row(episode=2, depth=0),
]


def test_a_conversation_has_the_planted_failures_and_the_cluster_of_its_failures(
    tmp_path: Path,
) -> None:
    two_turns = {"name": "food", "probe": "always", "previous_probe": "eat"}
    other = {"name": "other", "probe": "always", "previous_probe": "sleep"}
    folder = write_run(tmp_path / "a", tables={"evaluation": ROWS})
    run = read_run(plant(folder, {"name": "broken", "probe": "("}, other, two_turns))
    labels = Labels(run, group_failures(run))
    assert labels.plants == ["other", "food"]
    assert [(one.table, one.number, one.size) for one in labels.clusters] == [("evaluation", 1, 1)]
    assert labels.of("evaluation", run.tables["evaluation"][:3]) == ([1], [0])
    assert labels.of("evaluation", run.tables["evaluation"][3:]) == ([], [])


def with_evaluation(folder: Path) -> Path:
    example = {name: ROWS[2][name] for name in ("episode", "depth", "prompt", "probe", "response")}
    clusters = [{"size": 1, "most_likely": example, "turns": [[1, 2]]}]
    run = write_run(folder, evaluations={"held_out": evaluation(clusters=clusters)})
    write_lines(run / "evaluations" / "held_out" / "rows.jsonl", ROWS)
    return run


def test_an_evaluations_clusters_name_their_conversations(tmp_path: Path) -> None:
    run = read_run(with_evaluation(tmp_path / "a"))
    labels = Labels(run, None)
    assert labels.of("evaluations/held_out", run.tables["evaluations/held_out"][:3]) == ([], [0])


def failures_of(found: Page) -> str:
    start = found.source.index('<section id="failures">')
    return found.source[start : found.source.index("</section>", start)]


def test_a_failure_is_shown_with_the_turns_before_it_and_a_link_to_its_place(
    tmp_path: Path,
) -> None:
    found = report(with_evaluation(tmp_path / "a"))
    section = Page(f"{failures_of(found)}</section>").words
    told = ["turn 1", "have you a cat ?", "turn 2", "what does it eat ?", "turn 3"]
    places = [section.index(text) for text in [*told, "does it always ?", "failure at turn 3"]]
    assert places == sorted(places)
    assert "conversation 1 of \u201cheld_out\u201d, iteration 4" in section
    link = "conversations-held-out-4-1"
    assert f'href="#{link}"' in failures_of(found)
    assert link in found.attributes("id")
    assert f"{link}-t3" in found.attributes("id")


def test_earlier_turns_are_blurred_only_where_they_failed_too(tmp_path: Path) -> None:
    rows = [failing("first", episode=1), row(episode=1, depth=1, probe="between")]
    rows.append(failing("second", episode=1, depth=2, logprob=-1.0))
    folder = write_run(tmp_path / "a", tables={"evaluation": rows})
    section = failures_of(report(folder, redact=True))
    for text, is_veiled in (("first", True), ("between", False), ("second", True)):
        assert (f' x" tabindex="0">{text}<' in section) is is_veiled


def test_a_failure_whose_conversation_is_not_stored_says_so(tmp_path: Path) -> None:
    lone = [failing("it is alone", episode=1, depth=2)]
    words = report(write_run(tmp_path / "a", tables={"evaluation": lone})).words
    assert "turn 3" in words
    assert "earlier turns are not stored" in words


def test_evaluations_of_older_versions_have_no_turns_and_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", evaluations={"held_out": evaluation()})
    write_json(
        folder / "evaluations" / "held_out" / "evaluation.json",
        evaluation(clusters=[{"size": 2, "most_likely": {"probe": "p"}, "turns": [[1], "x", 3]}]),
    )
    assert "could not be drawn" not in report(folder).words


def test_a_link_to_a_conversation_that_the_page_leaves_out_is_none(tmp_path: Path) -> None:
    rows = [*chains(4000, probe="a probe of ordinary length ?", response_score=0.6)]
    found = report(write_run(tmp_path / "a", tables={"evaluation": rows}))
    ids = set(found.attributes("id"))
    assert {link[1:] for link in found.attributes("href")} <= ids
