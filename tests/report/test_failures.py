"""Groups and clusters of failures, the turns before them, and links to their conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from nip_astra.report.failures import GroupedFailures, Labels, group_failures
from nip_astra.report.records import Node, RunRecord, node_of, read_run
from nip_astra.report.transcripts import Paths, tables_of
from tests.kit.messages import says
from tests.report.runs import (
    THRESHOLD,
    Page,
    evaluation,
    failing,
    report,
    row,
    run_of,
    tree,
    write_lines,
    write_run,
)

ROWS = [
    row(episode=1, depth=0, probe="have you a cat ?"),
    row(episode=1, depth=1, probe="what does it eat ?"),
    failing("does it always ?", episode=1, depth=2),
    row(episode=2, depth=0),
]


def grouped(*rows: dict[str, Any], table: str = "evaluation") -> GroupedFailures:
    return group_failures(run_of(**{table: list(rows)}))


def leaders(found: GroupedFailures) -> list[str]:
    return [group.members[0].node.probe for group in found.groups]


def test_probes_that_share_most_words_in_order_form_a_group_led_by_the_most_likely() -> None:
    result = grouped(
        failing("my cat always eats pizza with my mother .", logprob=-5.0),
        failing("do you really know that ?", logprob=-6.0),
        failing("my dog always eats soup with my mother .", logprob=-7.0),
        row(),
    )
    assert [group.size for group in result.groups] == [2, 1]
    assert (result.num_failures, result.num_distinct, result.table) == (3, 3, "evaluation")
    assert leaders(result)[0] == "my cat always eats pizza with my mother ."
    assert "log-probability" in result.criterion
    assert len(grouped(failing("a b c d e f"), failing("f e d c b a")).groups) == 2
    # Long probes are compared by their first words.
    assert (
        len(grouped(failing("a " * 100 + "b " * 5000), failing("a " * 100 + "c " * 5000)).groups)
        == 1
    )
    (group,) = grouped(failing("Why ?"), failing("why  ?")).groups
    assert [member.num_occurrences for member in group.members] == [2]
    assert [group.size for group in grouped(failing(""), failing("")).groups] == [2]
    assert grouped(failing("a"), table="train").table == "train"
    assert grouped(row()).groups == []
    assert group_failures(RunRecord(Path("run"))) is None
    # Without log-probabilities the lowest NLL leads.
    rows = [failing("a b c", probe_nll=0.9), failing("x y z", probe_nll=0.2)]
    for item in rows:
        item["reference_logprob"] = item["probe_num_tokens"] = None
    result = grouped(*rows)
    assert leaders(result)[0] == "x y z"
    assert "NLL per token" in result.criterion


def path_to(rows: list[dict[str, Any]], place: int) -> list[str]:
    nodes: list[Node] = [node_of(item, THRESHOLD) for item in rows]
    return [node.probe for node in Paths(nodes).to(nodes[place])]


def test_the_path_to_a_turn_follows_parents_or_depths() -> None:
    assert path_to(tree(2, 3), 11) == ["probe 1", "probe 4", "probe 11"]
    assert path_to(tree(2, 3), 1) == ["probe 1"]
    chain = [row(depth=2, probe="c"), row(depth=0, probe="a"), row(depth=1, probe="b")]
    assert path_to(chain, 0) == ["a", "b", "c"]
    # Rows that do not determine it, and that form a cycle.
    assert path_to([chain[0], chain[1], row(depth=0, probe="b")], 0) == ["c"]
    assert len(path_to([row(node=0, parent=1, depth=1), row(node=1, parent=0, depth=1)], 0)) == 1


def test_ids_of_conversations_are_stable_and_unique() -> None:
    first, second = (node_of(row(prompt=prompt)) for prompt in "ab")
    run = RunRecord(Path("run"), tables={"evaluations/a b": [first], "train": [first, second]})
    for _ in range(2):
        shown = [
            one.anchor
            for table in tables_of(run, prefix="c")
            for one in sorted(table.episodes, key=lambda one: one.prompt)
        ]
        assert shown == ["c-a-b-4-0", "c-train-4-0", "c-train-4-0-again-2"]


def plant(run: Path, *planted: dict[str, Any]) -> Path:
    file = run / "hyper_parameters.yaml"
    values = yaml.safe_load(file.read_text())
    values["ast_chat"]["planted_failures"] = list(planted)
    file.write_text(yaml.safe_dump(values))
    return run


def with_evaluation(folder: Path) -> Path:
    example = {name: ROWS[2][name] for name in ("episode", "depth", "prompt", "probe", "response")}
    clusters = [{"size": 1, "most_likely": example, "turns": [[1, 2]]}]
    run = write_run(folder, evaluations={"held_out": evaluation(clusters=clusters)})
    write_lines(run / "evaluations" / "held_out" / "rows.jsonl", ROWS)
    return run


def test_a_conversation_has_the_planted_failures_and_clusters_of_its_failures(
    tmp_path: Path,
) -> None:
    two_turns = {"name": "food", "probe": "always", "previous_probe": "eat"}
    other = {"name": "other", "probe": "always", "previous_probe": "sleep"}
    folder = write_run(tmp_path / "a", tables={"evaluation": ROWS})
    run = read_run(plant(folder, {"name": "broken", "probe": "("}, other, two_turns))
    labels = Labels(run, group_failures(run))
    assert labels.plants == ["other", "food"]
    assert [(item.table, item.number, item.size) for item in labels.clusters] == [
        ("evaluation", 1, 1)
    ]
    assert labels.of("evaluation", run.tables["evaluation"][:3]) == ([1], [0])
    assert labels.of("evaluation", run.tables["evaluation"][3:]) == ([], [])
    run = read_run(with_evaluation(tmp_path / "b"))
    table = "evaluations/held_out"
    assert Labels(run, None).of(table, run.tables[table][:3]) == ([], [0])


def failures_of(found: Page) -> str:
    start = found.source.index('<section id="failures">')
    return found.source[start : found.source.index("</section>", start) + len("</section>")]


def test_a_failure_is_shown_with_the_turns_before_it_and_a_link_to_its_place(
    tmp_path: Path,
) -> None:
    result = report(with_evaluation(tmp_path / "a"))
    section = Page(failures_of(result)).words
    turns = ["turn 1", "have you a cat ?", "turn 2", "what does it eat ?", "turn 3"]
    places = [section.index(text) for text in [*turns, "does it always ?", "failure at turn 3"]]
    assert places == sorted(places)
    assert "conversation 1 of \u201cheld_out\u201d, iteration 4" in section
    link = "conversations-held-out-4-1"
    assert f'href="#{link}"' in failures_of(result)
    assert {link, f"{link}-t3"} <= set(result.attributes("id"))


def test_failures_without_their_turns_or_conversation_are_shown(tmp_path: Path) -> None:
    lone = [failing("it is alone", episode=1, depth=2)]
    words = report(write_run(tmp_path / "a", tables={"evaluation": lone})).words
    assert says(words, "turn 3", "earlier turns are not stored")
    # Of older versions.
    clusters = [{"size": 2, "most_likely": {"probe": "p"}, "turns": [[1], "x", 3]}]
    folder = write_run(tmp_path / "b", evaluations={"held_out": evaluation(clusters=clusters)})
    assert "could not be drawn" not in report(folder).words
    # Earlier turns are blurred only where they failed too.
    rows = [failing("first", episode=1), row(episode=1, depth=1, probe="between")]
    rows.append(failing("second", episode=1, depth=2, logprob=-1.0))
    section = failures_of(
        report(write_run(tmp_path / "c", tables={"evaluation": rows}), redact=True)
    )
    for text, is_veiled in (("first", True), ("between", False), ("second", True)):
        assert (f' x" tabindex="0">{text}<' in section) is is_veiled
