"""Tests of the page as a whole; those that need a browser stand in test_browser."""

from __future__ import annotations

import base64
import errno
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.report import page, sections, summary
from nip_astra.report.page import write_report
from nip_astra.report.records import read_run
from tests.kit.documents import ROOT
from tests.report.runs import (
    ATTACK,
    chains,
    evaluation,
    failing,
    metrics,
    results,
    row,
    tree,
    write_run,
)

VOID = {"meta", "input", "br"}
SECTIONS_OF_A_RUN = [
    *("summary", "curves", "failures", "evaluations", "turns", "plants", "diversity"),
    *("conversations", "parameters", "environment"),
]


class Page(HTMLParser):
    """A page's elements and texts; fails where elements do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def attributes(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def report(*runs: Path, redact: bool = False) -> Page:
    path = write_report(runs, redact=redact)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "runs" / "one",
        evaluations={"held_out": evaluation()},
        sources={"training.lr": "--set", "trainer": "command line", "seed": "default"},
    )


def test_a_run_has_every_section(run: Path) -> None:
    found = report(run)
    assert [one["id"] for one in found.named("section")] == SECTIONS_OF_A_RUN
    assert "could not be drawn" not in found.text
    assert (run / "report.html").is_file()


def test_the_page_says_what_was_found_with_intervals(run: Path) -> None:
    words = report(run).words
    assert "After training, the target fails in 96.7% [94.3%, 98.3%] of 300 held-out" in words
    assert "before, it was 4.0% [2.0%, 6.3%]" in words
    assert "Its probes are 0.026 nats per token less likely than before." in words
    # In 900 queries before and 900 after, and apart from them what training met.
    assert "In held-out conversations 2 of 2 planted failures were found, 1 before" in words
    assert "Training met 1 of 2 in 6,048 target queries; random search met 1 in as many" in words
    assert "100%, 13 of 13" in words
    assert "Warning. the attacker is as it was" in words
    assert "Warning. evaluation held_out: few openings" in words


def test_every_rate_of_the_page_stands_beside_its_counts(tmp_path: Path) -> None:
    told, counts = results(), {"num_failed": 29, "num_known": 30, "num_episodes": 40}
    told["after"] |= counts
    rate = evaluation()["failure_rate"] | counts
    others = {
        name: evaluation(target=name, failure_rate=rate, turn_failure_rate=rate) for name in "ab"
    }
    run = read_run(write_run(tmp_path / "one", results=told, evaluations=others))
    side_by_side = sections.evaluations(run)
    assert side_by_side is not None
    places = {
        "sentence": summary.verdict(run)[0],
        "tile": summary.tiles(run)[0].note,
        "table": summary.main_table(run)[1][0].cells[1],
        "comparison of runs": summary.OVERVIEW[run.kind][1].cell(told["after"]),
        "evaluation": str(side_by_side["main"]),
        "all figures": str(side_by_side["groups"]),
        "transfer": str(side_by_side["matrix"]),
    }
    assert [name for name, text in places.items() if "29 of 40, 10 unknown" not in text] == []
    of_probes = {
        "plants": {"recall": 0.5, "found": 1, "total": 2},
        "fluency": {"share_below": 0.1, "num_below": 4, "num_probes": 40},
        "diversity": {
            "distinct_share": 0.65,
            "num_distinct": 13,
            "num_probes": 20,
            "vendi": 3.5,
            "self_bleu_complement": 0.5,
            "self_bleu_num_probes": 12,
            "cosine_distance": 0.25,
        },
    }
    run = read_run(
        write_run(tmp_path / "probes", results=told, evaluations={"a": evaluation(**of_probes)})
    )
    side_by_side = sections.evaluations(run)
    assert side_by_side is not None
    cells = {cell for row in side_by_side["main"] for cell in row.cells}
    assert {"50.0%, 1 of 2", "10.0%, 4 of 40", "65.0%, 13 of 20"} <= cells
    assert {"3.5, of 20", "0.5, of 12", "0.25, of 20"} <= cells
    told["after"] |= {"if_unknown_passed": 0.725, "if_unknown_failed": 0.975}
    rows = summary.main_table(read_run(write_run(tmp_path / "two", results=told)))[1]
    assert "72.5% / 97.5%" in {row.cells[1] for row in rows}


def test_an_evaluation_is_shown_with_its_clusters_the_likeliest_first(run: Path) -> None:
    words = report(run).words
    assert "31.0% [25.0%, 38.0%]" in words
    assert words.index("1. 2 failing probes 18% of all planted: pet") < words.index("2. 9 failing")
    assert "too few effective samples" in words
    assert "survival 90.0%, 70.0%" in words


def test_parameters_have_their_sources_and_the_commands_repeat_them(run: Path) -> None:
    words = report(run).words
    assert "training.lr 0.0004 --set" in words
    assert "nip-astra --parameters runs/one/hyper_parameters.yaml" in words
    assert (
        "nip-astra --trainer ast_dpo --scenario pocket_chat --seed 0 --set training.lr=0.0004"
        in words
    )
    assert "changes that were not committed" in words


def test_a_run_without_recorded_sources_says_so(tmp_path: Path) -> None:
    assert "does not say where its values came from" in report(write_run(tmp_path / "a")).words


def test_a_tree_can_be_browsed_turn_by_turn(run: Path) -> None:
    found = report(run)
    turns = [one for one in found.named("details") if (one.get("class") or "").startswith("n r")]
    assert len(turns) == 4, "two trees of two turns that go on"
    assert sum("open" in one for one in turns) == 2
    assert "novelty 0.25" in found.words


def test_nothing_that_a_model_wrote_becomes_an_element(tmp_path: Path) -> None:
    attacked = failing(ATTACK, response=ATTACK, prompt=ATTACK, node=0, parent=-1)
    example = {"prompt": ATTACK, "probe": ATTACK, "response": ATTACK}
    folder = write_run(
        tmp_path / "a",
        tables={"evaluation": [attacked], "train": [attacked], ATTACK[:0] + "x<b>": [attacked]},
        results=results(warnings=[ATTACK]),
        parameters={"note": ATTACK},
        metrics=[{"step": 1, f"{ATTACK}": 1.0, "loss": 1.0}],
        evaluations={
            "a<b>": evaluation(
                clusters=[{"size": 1, "most_likely": example, "plants": [ATTACK]}],
                attacker=ATTACK, warnings=[ATTACK], budget={ATTACK: ATTACK},
            )
        },
    )  # fmt: skip
    found = report(folder)
    assert found.text.count(ATTACK) > 10
    assert found.source.count("<script>") == len(found.named("script")) == 1, "the page's own"
    for tag in ("img", "b>", "link", "iframe", "object", "form", "a<b"):
        assert found.named(tag) == []
    assert not [name for _, one in found.tags for name in one if name.startswith("on")]


def test_the_page_needs_nothing_from_outside_and_forbids_it(run: Path) -> None:
    found = report(run)
    (policy,) = [one["content"] for one in found.named("meta") if "http-equiv" in one]
    digests = {}
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", found.source, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; "
        f"script-src 'sha256-{digests['script']}'; base-uri 'none'; form-action 'none'"
    )
    assert found.attributes("src") == found.attributes("style") == []
    assert all(link.startswith("#") for link in found.attributes("href"))
    assert not re.search(r"https?:|url\(|@import", found.source)


def test_links_lead_to_what_is_there_and_ids_are_unique(run: Path, tmp_path: Path) -> None:
    for found in (report(run), report(run, write_run(tmp_path / "two", seed=1))):
        ids = found.attributes("id")
        assert len(ids) == len(set(ids))
        assert {link[1:] for link in found.attributes("href")} <= set(ids)
        assert set(found.attributes("for")) <= set(ids)


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "runs" / "a", seed=0),
        write_run(tmp_path / "runs" / "b", seed=1),
        write_run(tmp_path / "runs" / "c", parameters={"lr": 0.1}),
    ]
    found = report(*folders)
    assert (tmp_path / "runs" / "comparison.html").is_file()
    assert [one["id"] for one in found.named("section")][:3] == [
        "overview", "differences", "curves",
    ]  # fmt: skip
    assert [one["id"] for one in found.named("details") if one.get("class") == "run"] == [
        "run-1", "run-2", "run-3",
    ]  # fmt: skip
    assert "A: ast_dpo · lr 0.0004; thick: mean of seeds 0, 1" in found.words
    assert "training.lr 0.0004 0.1" in found.words
    assert "mean of 2" in found.words


def test_a_warning_that_several_evaluations_share_is_told_once(tmp_path: Path) -> None:
    evaluations = {
        "first": evaluation(warnings=["few openings", "few probes"]),
        "second": evaluation(warnings=["few openings"]),
    }
    words = report(write_run(tmp_path / "a", evaluations=evaluations)).words
    assert "evaluations first, second: few openings" in words
    assert "evaluation first: few probes" in words


def test_redacted_text_is_blurred_wherever_a_failure_is_quoted(tmp_path: Path) -> None:
    secret = "my cat always eats ."
    tables = {"evaluation": [failing(secret, response="you are silly ."), row(episode=1)]}
    warning = f"the attacker has collapsed, most often {secret!r}"
    folder = write_run(
        tmp_path / "a", tables=tables, results=results(warnings=[warning]),
        evaluations={"held_out": evaluation()},
    )  # fmt: skip
    source = report(folder, redact=True).source
    quoted = re.findall(r"<(?:span|td|p)([^<>]*)>(?:<b>Warning.</b>)?([^<]*)", source)
    shown = [attributes for attributes, text in quoted if secret in text or "silly" in text]
    assert len(shown) > 8
    assert all(re.search(r' x" tabindex="0"$', attributes) for attributes in shown)
    harmless = [attributes for attributes, text in quoted if "how are you" in text]
    assert harmless
    assert not any("tabindex" in attributes for attributes in harmless)
    assert "Content notice." in source
    assert 'class="veiled"' not in report(folder, redact=False).source


def test_a_page_without_a_failure_blurs_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", tables={"evaluation": [row(episode=1)]})
    assert "Content notice." not in report(folder, redact=True).source


@pytest.mark.parametrize("name", ["results.json", "hyper_parameters.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"after": 3, "before": []}'])
def test_a_broken_file_leaves_a_page_with_a_note(run: Path, name: str, content: str | None) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    found = report(run)
    assert "could not be drawn" not in found.text
    assert found.named("section")[0]["id"] == "summary"


def test_values_of_unforeseen_types_leave_the_other_sections(tmp_path: Path) -> None:
    odd = {"failure_rate": "x", "first_query": 3, "failure_rate_interval": [1]}
    folder = write_run(
        tmp_path / "a",
        results={"after": odd, "before": 1, "planted_failures": {"a": 1}, "warnings": "text"},
        evaluations={"b": evaluation(clusters=5, diversity=[1], scores=None, warnings=None)},
        metrics=[{"step": 1, "loss": "high"}, {"step": "x"}, {"loss": 1.0}],
    )
    found = report(folder)
    assert "could not be drawn" not in found.text
    assert "Conversations" in found.text


def test_a_section_that_fails_says_so_and_the_others_stay(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a <fault>")

    monkeypatch.setattr(sections, "turns_to_failure", fail)
    found = report(run)
    assert "This section could not be drawn: RuntimeError: a <fault>" in found.text
    assert [one["id"] for one in found.named("section")] == SECTIONS_OF_A_RUN


def test_half_a_surrogate_pair_and_control_characters_can_be_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", tables={"train": [failing("a\ud800b\x00c\x1b[31m\u202e")]})
    text = report(folder).text
    assert "a\\ud800b\N{SYMBOL FOR NULL}c\N{SYMBOL FOR ESCAPE}[31m\\u202e" in text


def test_a_page_of_a_large_run_stays_below_two_megabytes(tmp_path: Path) -> None:
    rows = chains(4000, probe="is this a probe of ordinary length ?")
    trees = [one for number in range(20) for one in tree(4, 3, episode=number)]
    folder = write_run(tmp_path / "a", tables={"evaluation": rows, "before": rows, "train": trees})
    found = report(folder)
    assert len(found.source.encode()) < 2_000_000
    assert "A sample of" in found.words


def test_a_run_of_5000_iterations_has_a_small_page(tmp_path: Path) -> None:
    names = [f"agent_{number}/figure" for number in range(40)]
    rows = metrics(5000, **dict.fromkeys(names, 0.5))
    for place, one in enumerate(rows):
        one |= dict.fromkeys([*names, "failure_rate", "loss"], place * 7919 % 1000 / 1000)
    found = report(write_run(tmp_path / "a", metrics=rows))
    assert len(found.source.encode()) < 250_000
    assert "means of 42 iterations each, area: lowest to highest" in found.words


def test_the_same_run_gives_the_same_page(run: Path) -> None:
    assert report(run).source == report(run).source


def test_no_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no run given"):
        write_report([])


def test_a_page_that_cannot_be_written_is_a_typed_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_report([run], tmp_path / "missing" / "report.html")


def test_a_report_needs_no_torch(run: Path) -> None:
    code = (
        "import sys\nfrom nip_astra.report.page import write_report\n"
        f"write_report([{str(run)!r}])\n"
        "print([name for name in ('torch', 'transformers', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_wheel_carries_the_templates(tmp_path: Path) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    templates = Path(page.__file__).parent / "templates"
    names = [path.name for path in templates.iterdir()]
    assert "style.css" in names
    assert {f"nip_astra/report/templates/{name}" for name in names} <= carried


def test_a_run_that_cannot_be_written_to_says_how_its_page_is_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "w" in mode and run in self.parents:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(RunDirectoryError, match=r"Read-only file system.*--output"):
        write_report([run])
    elsewhere = tmp_path.with_name("elsewhere.html")
    assert write_report([run], elsewhere).exists()


def test_conversations_are_censored_in_the_share_without_a_failure_so_far(tmp_path: Path) -> None:
    rows = chains(4, depth=2)
    for place, score in ((0, 0.9), (1, None), (5, 0.9), (6, 0.9)):
        # Episode 1 is unknown before it fails at its second turn; episode 2 fails at its second.
        rows[place]["response_score"] = score
    made = write_run(tmp_path / "one", tables={"evaluation": rows})
    shown = sections.turns_to_failure(read_run(made))
    assert shown is not None
    assert [row.cells[-1] for row in shown["rows"]] == ["66.7%", "33.3%"]
    assert [row.cells[1] for row in shown["rows"]] == ["3", "4"]
