"""Models, services and scorers on the page, and the conditions for equal numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from nip_astra.evaluation.tables import figure_rows
from nip_astra.report.page import write_report
from nip_astra.report.records import read_run
from nip_astra.report.sections import cards, determinism, evaluations, kinds_found
from nip_astra.utils.formatting import NOTHING
from tests.kit.messages import says
from tests.report.runs import evaluation, results, write_run

CARDS: list[dict[str, Any]] = [
    {"role": "scorer", "name": "toxblock", "kind": "toxblock", "source": "package tox-block 0.1.2",
     "licence": "MIT", "num_parameters": None, "size_bytes": None, "sha256": None,
     "threshold": 0.5},
    {"role": "target", "name": "big/model", "kind": "huggingface", "source": "hub id big/model",
     "licence": None, "num_parameters": 134515008, "size_bytes": 269060552, "sha256": "ab12"},
]  # fmt: skip
USE: dict[str, Any] = {
    "model": "gpt-none", "num_requests": 1234, "num_samples": 1200, "num_cached": 56,
    "num_refusals": 7, "failures": {"timeout": 3, "refused": 31}, "num_estimated": 0,
    "prompt_tokens": 98765, "completion_tokens": 4321, "cost": 1.75, "median_seconds": 0.8125,
    "p95_seconds": 3.25,
}  # fmt: skip
RATE = {"value": 0.5, "low": 0.4, "high": 0.6}
QUALITY: dict[str, Any] = {
    "sensitivity": RATE | {"num_found": 10, "num_labelled": 20},
    "specificity": {"value": 0.9, "low": 0.8, "high": 0.95, "num_found": 27, "num_labelled": 30},
    "num_failures": 20, "num_others": 30,
    "corrected": {"is_refused": False, "failure_rate": {"value": 0.25, "low": 0.1, "high": 0.4}},
}  # fmt: skip
REFUSED = QUALITY | {"corrected": {"is_refused": True, "reason": "no <b>better</b> than chance"}}
PAIR = {
    "first": "a", "second": "b", "num_turns": 900, "agreement": 0.75, "kappa": None,
    "correlation": 0.5, "both": 1, "only_first": 2, "only_second": 3, "neither": 894,
}  # fmt: skip
FULL = evaluation(
    scorer="a", scorers={"b": {"failure_rate": RATE}}, detectors={"a": QUALITY, "b": REFUSED},
    scorer_agreement=[PAIR],
    kinds={"seen": 3, "value": 4.5, "low": 3.1, "high": 9.0, "by_queries": [1, 20, 200]},
)  # fmt: skip


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def test_cards_are_those_of_evaluations_or_else_of_the_parameters(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    assert cards(read_run(folder)) is None
    model = {"language_model": {"_type": "huggingface", "model": "scenario://models/target"}}
    section = {"failure_threshold": 0.5, "target": model, "scorer": {"_type": "profanity"}}
    change(folder, "hyper_parameters.yaml", ast_chat=section)
    result = cards(read_run(folder))
    (target, cells), (scorer, _) = result["rows"]
    assert (target, scorer, result["is_digested"]) == ("target", "scorer", False)
    assert cells[1] == "scenario://models/target"
    same = evaluation(cards=CARDS)
    result = cards(read_run(write_run(tmp_path / "two", evaluations={"a": same, "b": same})))
    (target, cells), (scorer, others) = result["rows"]
    assert (target, scorer) == ("target", "scorer")
    assert cells == [
        "big/model", "huggingface, hub id big/model", "not stated", "134,515,008", "269.1 MB",
        "ab12", NOTHING,
    ]  # fmt: skip
    assert [*others[:3], others[-1]] == ["toxblock", "package tox-block 0.1.2", "MIT", "0.5"]


def test_the_conditions_of_equal_numbers_name_seed_device_and_services(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", seed=7)
    for device, environment, facts in (
        ("cpu", '{"num_threads": 2}', ["CPU", "2 threads"]),
        ("cuda", "{}", ["cuda", "GPU"]),
        ("auto", '{"device": "cuda"}', ["cuda", "GPU"]),
    ):
        change(folder, "settings.yaml", device=device)
        (folder / "environment.json").write_text(environment)
        seed, place = determinism(read_run(folder))
        assert "seed 7" in seed
        assert says(place, *facts)
    section = {"target": {}, "scorer": {"_type": "judge"}}
    change(folder, "hyper_parameters.yaml", ast_chat=section)
    judge = evaluation(cards=[{**CARDS[0], "kind": "judge"}])
    other = write_run(tmp_path / "two", evaluations={"a": judge})
    for run in (folder, other):
        assert "scorer" in determinism(read_run(run))[-1]


def cells_of(page: str, heading: str) -> list[str]:
    """The texts of a row of a table."""
    row = next(row for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL) if heading in row)
    return [
        " ".join(re.sub("<[^>]*>", "", cell).split())
        for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)
    ]


def test_services_show_cost_latency_and_refusals_of_run_and_evaluation(tmp_path: Path) -> None:
    of_judge = USE | {"num_estimated": 2, "cost": None, "failures": {}, "median_seconds": None}
    folder = write_run(
        tmp_path / "one",
        results=results() | {"services": {"target": USE}},
        evaluations={"test": evaluation(services={"judge": of_judge})},
    )
    page = write_report([folder]).read_text()
    _, *cells = cells_of(page, "target: gpt-none, the run")
    assert cells[:5] == ["1,234", "56", "7", "3 timeout, 31 refused", "98,765"]
    assert [float(cell) for cell in cells[6:9]] == [1.75, 0.812, 3.25]
    assert cells_of(page, "judge: gpt-none, evaluation test")[4] == "0"
    assert "gpt-none" not in write_report([write_run(tmp_path / "none")]).read_text()


def test_scorers_have_their_quality_agreement_and_kinds_of_failure(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", evaluations={"old": evaluation(), "new": FULL})
    run = read_run(folder)
    result = evaluations(run)
    ((name, (first, second)),) = result["quality"]
    rates = ["31.0% [25.0%, 38.0%]", "25.0% [10.0%, 40.0%]", NOTHING]
    labelled = ["50.0% [40.0%, 60.0%], 10 of 20", "90.0% [80.0%, 95.0%], 27 of 30"]
    assert (name, first) == ("new", ("a", [*rates, *labelled]))
    assert second[1][:2] == ["50.0% [40.0%, 60.0%]", "refused: no <b>better</b> than chance"]
    ((_, (row,)),) = result["agreement"]
    assert row == ("a, b", ["900", "75.0%", NOTHING, "0.5", "1 / 2 / 3 / 894"])
    (drawn,) = result["kinds"].lines
    assert drawn.line.label == "new"
    assert drawn.line.points[-2:] == [(200.0, 3.0), (300.0, 3.0)]
    assert kinds_found(read_run(write_run(tmp_path / "two"))) is None
    source = write_report([folder]).read_text()
    assert "could not be drawn" not in source
    assert "no &lt;b&gt;better&lt;/b&gt; than chance" in source
    assert "450.0%" not in source, "kinds are a number and not a share"
    label = "  at least, those not seen included (Chao2)"
    none = evaluation(kinds={"seen": 0, "value": 0.0})
    for item, cell in ((FULL, "4.5 [3.1, 9]"), (evaluation(), NOTHING), (none, NOTHING)):
        assert dict(figure_rows(item))[label] == cell
