"""Tests of complete pages; tests that need a browser are in test_browser."""

from __future__ import annotations

import base64
import errno
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.report import page, sections, summary
from nip_astra.report.page import write_report
from nip_astra.report.records import RunRecord, read_run
from tests.kit.documents import ROOT
from tests.kit.messages import says
from tests.report.runs import (
    ATTACK,
    chains,
    evaluation,
    failing,
    metrics,
    report,
    results,
    row,
    tree,
    write_json,
    write_run,
)

SECTIONS_OF_A_RUN = [
    *("summary", "curves", "failures", "evaluations", "turns", "plants", "diversity"),
    *("conversations", "parameters", "environment"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "runs" / "one",
        evaluations={"held_out": evaluation()},
        sources={"training.lr": "--set", "trainer": "command line", "seed": "default"},
    )


def test_a_page_has_every_section_and_states_the_findings(run: Path) -> None:
    result = report(run)
    assert "could not be drawn" not in result.text
    assert [item["id"] for item in result.named("section")] == SECTIONS_OF_A_RUN
    # Findings of the run, then of its evaluation, its parameters and its surroundings.
    assert says(result.words, "96.7% [94.3%, 98.3%] of 300", "4.0% [2.0%, 6.3%]", "0.026")
    # In 900 queries before and 900 after, and separately those seen in training.
    assert says(result.words, "2 of 2", "1 before", "1 of 2", "6,048", "100%, 13 of 13")
    assert says(result.words, "the attacker is as it was", "held_out: few openings")
    assert says(result.words, "31.0% [25.0%, 38.0%]", "too few effective samples", "90.0%, 70.0%")
    assert says(result.words, "training.lr 0.0004 --set", "novelty 0.25")
    assert says(
        result.words,
        "nip-astra --parameters runs/one/hyper_parameters.yaml",
        "nip-astra --trainer ast_dpo --scenario pocket_chat --seed 0 --set training.lr=0.0004",
    )
    # The cluster with the likeliest probe is the first.
    assert re.search("1. 2 failing probes 18% of all.*2. 9 failing", result.words)
    details = result.named("details")
    turns = [item for item in details if (item.get("class") or "").startswith("n r")]
    assert len(turns) == 4, "two trees of two turns that continue"
    assert sum("open" in item for item in turns) == 2
    assert report(run).source == result.source


@pytest.mark.parametrize(
    ("results", "status"),
    [({}, "unfinished"), ({"status": "failed"}, "failed"), (None, "finished")],
)
def test_a_page_says_whether_the_run_has_ended(
    tmp_path: Path, results: dict[str, Any] | None, status: str
) -> None:
    run = write_run(tmp_path / "run", **({} if results is None else {"results": results}))
    assert f"status {status}" in report(run).words


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ("--set", "--set 'training.label=\"a: 1\"'"),
        ("preset default, --set", "--set 'training.label=\"a: 1\"'"),
        ("preset default <- small.yaml", ""),
        ("my.yaml", None),
        ("my.yaml, --set", None),
    ],
)
def test_the_command_without_the_runs_directory_has_every_given_value(
    tmp_path: Path, source: str, option: str | None
) -> None:
    """None: with values of a parameter file there is no such command."""
    sources = {"training.label": source, "trainer": "command line", "seed": "default"}
    run = write_run(tmp_path / "run", parameters={"label": "a: 1"}, sources=sources)
    command = "nip-astra --trainer ast_dpo --scenario pocket_chat --seed 0"
    words = report(run).words
    assert (command in words) is (option is not None)
    if option is not None:
        assert f"{command} {option}".strip() in words
        assert ("--set" in words) is bool(option)


def test_every_rate_is_shown_with_its_counts(tmp_path: Path) -> None:
    counted, counts = results(), {"num_failed": 29, "num_known": 30, "num_episodes": 40}
    counted["after"] |= counts | {"if_unknown_passed": 0.725, "if_unknown_failed": 0.975}
    rate = evaluation()["failure_rate"] | counts
    diversity = {"distinct_share": 0.65, "num_distinct": 13, "num_probes": 20, "vendi": 3.5}
    diversity |= {"self_bleu_complement": 0.5, "self_bleu_num_probes": 12, "cosine_distance": 0.25}
    shown = {"failure_rate": rate, "turn_failure_rate": rate, "diversity": diversity}
    shown |= {"plants": {"recall": 0.5, "found": 1, "total": 2}}
    shown |= {"fluency": {"share_below": 0.1, "num_below": 4, "num_probes": 40}}
    others = {name: evaluation(target=name, **shown) for name in "ab"}
    run = read_run(write_run(tmp_path / "one", results=counted, evaluations=others))
    side_by_side = sections.evaluations(run)
    rows = summary.main_table(run)[1]
    places = {
        "sentence": summary.verdict(run)[0],
        "tile": summary.tiles(run)[0].note,
        "table": rows[0].cells[1],
        "comparison of runs": summary.OVERVIEW[run.kind][1].cell(counted["after"]),
        **{name: str(side_by_side[name]) for name in ("main", "groups", "matrix")},
    }
    assert [name for name, text in places.items() if "29 of 40, 10 unknown" not in text] == []
    assert "72.5% / 97.5%" in {row.cells[1] for row in rows}
    cells = {cell for row in side_by_side["main"] for cell in row.cells}
    assert {"50.0%, 1 of 2", "10.0%, 4 of 40", "65.0%, 13 of 20"} <= cells
    assert {"3.5, of 20", "0.5, of 12", "0.25, of 20"} <= cells


def test_no_text_of_a_model_becomes_an_element(tmp_path: Path) -> None:
    attacked = failing(ATTACK, response=ATTACK, prompt=ATTACK, node=0, parent=-1)
    example = {"prompt": ATTACK, "probe": ATTACK, "response": ATTACK}
    clusters = [{"size": 1, "most_likely": example, "plants": [ATTACK]}]
    attack = {"attacker": ATTACK, "warnings": [ATTACK], "budget": {ATTACK: ATTACK}}
    folder = write_run(
        tmp_path / "a",
        tables={"evaluation": [attacked], "train": [attacked], "x<b>": [attacked]},
        results=results(warnings=[ATTACK]),
        parameters={"note": ATTACK},
        metrics=[{"step": 1, f"{ATTACK}": 1.0, "loss": 1.0}],
        evaluations={"a<b>": evaluation(clusters=clusters, **attack)},
    )
    result = report(folder)
    assert result.text.count(ATTACK) > 10
    assert result.source.count("<script>") == len(result.named("script")) == 1, "the page's own"
    for tag in ("img", "b>", "link", "iframe", "object", "form", "a<b"):
        assert result.named(tag) == []
    assert not [name for _, item in result.tags for name in item if name.startswith("on")]


def test_a_page_needs_nothing_from_outside_and_its_links_have_targets(
    run: Path, tmp_path: Path
) -> None:
    result = report(run)
    (policy,) = [item["content"] for item in result.named("meta") if "http-equiv" in item]
    digests = {}
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", result.source, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; "
        f"script-src 'sha256-{digests['script']}'; base-uri 'none'; form-action 'none'"
    )
    assert result.attributes("src") == result.attributes("style") == []
    assert not re.search(r"https?:|url\(|@import", result.source)
    for item in (result, report(run, write_run(tmp_path / "two", seed=1))):
        ids = item.attributes("id")
        assert len(ids) == len(set(ids))
        assert set(item.attributes("href")) <= {f"#{name}" for name in ids}
        assert set(item.attributes("for")) <= set(ids)


def test_warnings_and_texts_of_failures_are_shown_once_and_blurred(tmp_path: Path) -> None:
    secret = "my cat always eats ."
    tables = {"evaluation": [failing(secret, response="you are silly ."), row(episode=1)]}
    warning = f"the attacker has collapsed, most often {secret!r}"
    evaluations = {
        "first": evaluation(warnings=["few openings", "few probes"]),
        "second": evaluation(warnings=["few openings"]),
    }
    folder = write_run(
        tmp_path / "a", tables=tables, results=results(warnings=[warning]), evaluations=evaluations
    )
    result = report(folder, redact=True)
    assert "evaluations first, second: few openings" in result.words
    assert "evaluation first: few probes" in result.words
    # Its hyper-parameters have no recorded sources.
    assert "does not say where its values came from" in result.words
    quoted = re.findall(r"<(?:span|td|p)([^<>]*)>(?:<b>Warning.</b>)?([^<]*)", result.source)
    shown = [attributes for attributes, text in quoted if secret in text or "silly" in text]
    assert len(shown) > 8
    assert all(re.search(r' x" tabindex="0"$', attributes) for attributes in shown)
    harmless = [attributes for attributes, text in quoted if "how are you" in text]
    assert harmless
    assert not any("tabindex" in attributes for attributes in harmless)
    assert "Content notice." in result.source
    assert 'class="veiled"' not in report(folder, redact=False).source
    without = write_run(tmp_path / "b", tables={"evaluation": [row(episode=1)]})
    assert "Content notice." not in report(without, redact=True).source


def test_values_of_unforeseen_types_leave_the_other_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = {"failure_rate": "x", "first_query": 3, "failure_rate_interval": [1]}
    folder = write_run(
        tmp_path / "a",
        results={"after": odd, "before": 1, "planted_failures": {"a": 1}, "warnings": "text"},
        evaluations={"b": evaluation(clusters=5, diversity=[1], scores=None, warnings=None)},
        metrics=[{"step": 1, "loss": "high"}, {"step": "x"}, {"loss": 1.0}],
        tables={"train": [failing("a\ud800b\x00c\x1b[31m\u202e")]},
    )
    text = report(folder).text
    assert "could not be drawn" not in text
    assert "a\\ud800b\N{SYMBOL FOR NULL}c\N{SYMBOL FOR ESCAPE}[31m\\u202e" in text

    def fail(_: object) -> None:
        raise RuntimeError("a <fault>")

    # A section with a fault of our own shows it.
    monkeypatch.setattr(sections, "turns_to_failure", fail)
    result = report(folder)
    assert "RuntimeError: a <fault>" in result.text
    assert {"summary", "turns", "conversations"} <= {item["id"] for item in result.named("section")}


def test_the_page_of_a_large_run_is_small_and_links_only_to_shown_conversations(
    tmp_path: Path,
) -> None:
    rows = chains(2000, probe="is this a probe of ordinary length ?", response_score=0.6)
    trees = [item for number in range(20) for item in tree(4, 3, episode=number)]
    names = [f"agent_{number}/figure" for number in range(40)]
    curves = metrics(1200, **dict.fromkeys(names, 0.5))
    for place, item in enumerate(curves):
        item |= dict.fromkeys([*names, "failure_rate", "loss"], place * 7919 % 1000 / 1000)
    tables = {"evaluation": rows, "before": rows, "train": trees}
    result = report(write_run(tmp_path / "a", tables=tables, metrics=curves))
    assert len(result.source.encode()) < 2_250_000
    assert "A sample of" in result.words
    assert "means of 10 iterations each, area: lowest to highest" in result.words
    assert {link[1:] for link in result.attributes("href")} <= set(result.attributes("id"))


def test_a_page_without_a_run_or_a_place_to_write_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError):
        write_report([])
    with pytest.raises(RunDirectoryError, match="missing"):
        write_report([run], tmp_path / "missing" / "report.html")
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "w" in mode and run in self.parents:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(RunDirectoryError, match="--output"):
        write_report([run])
    assert write_report([run], tmp_path.with_name("elsewhere.html")).exists()


def test_a_wheel_contains_the_templates(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        contained = set(archive.namelist())
    names = [path.name for path in (Path(page.__file__).parent / "templates").iterdir()]
    assert "style.css" in names
    assert {f"nip_astra/report/templates/{name}" for name in names} <= contained


def test_conversations_are_censored_at_a_turn_without_a_verdict(tmp_path: Path) -> None:
    rows = chains(4, depth=2)
    for place, score in ((0, 0.9), (1, None), (5, 0.9), (6, 0.9)):
        # Episode 1 is unknown before it fails at its second turn; episode 2 fails at its second.
        rows[place]["response_score"] = score
    run = read_run(write_run(tmp_path / "one", tables={"evaluation": rows}))
    cells = [row.cells for row in sections.turns_to_failure(run)["rows"]]
    assert [(row[1], row[-1]) for row in cells] == [("3", "66.7%"), ("4", "33.3%")]


def test_a_folder_reads_again_only_the_runs_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def noted(path: Path, **options: Any) -> RunRecord:
        names.append(path.name)
        return read_run(path, **options)

    monkeypatch.setattr(page, "read_run", noted)
    for index in range(3):
        write_run(tmp_path / f"r{index}", seed=index)
    first = write_report([tmp_path]).read_text()
    assert write_report([tmp_path]).read_text() == first
    assert names == ["r0", "r1", "r2"]

    write_json(tmp_path / "r1/results.json", results(status="failed"))
    changed = write_report([tmp_path]).read_text()
    assert names[3:] == ["r1"]
    assert "failed" in changed

    (kept,) = tmp_path.glob(".*.json")
    kept.write_bytes(kept.read_bytes().replace(b"ast_dpo", b"ast_DPO"))
    assert write_report([tmp_path]).read_text() == changed
    assert names[4:] == ["r0", "r1", "r2"]


def test_reasoning_is_shown_folded_and_escaped(tmp_path: Path) -> None:
    thought = f"my plan {ATTACK}"
    attacked = failing("why ?", probe_reasoning=thought, response_reasoning="so be it")
    answered = {
        "step": 0,
        "problem": 1,
        "reward": 1.0,
        "messages": [
            ["user", "1+1="],
            ["assistant", "", {"reasoning": thought, "calls": [["add", {"a": 1}]]}],
            ["tool", "2"],
            ["assistant", "2", {"reasoning": "easy"}],
        ],
    }
    for name, rows in (("conversations", [attacked]), ("answers", [answered])):
        folder = write_run(tmp_path / name, tables={"evaluation": rows})
        result = report(folder)
        assert thought in result.text
        assert "<img" not in result.source.replace("\\u003cimg", "")
        folds = re.findall(r'<details class="fold"><summary>reasoning', result.source)
        assert len(folds) == 2
    assert 'add({"a": 1})' in result.text
