"""Models and scorers on the page, and how far the numbers can be had again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from nip_astra.report.records import read_run
from nip_astra.report.sections import cards, determinism
from nip_astra.utils.formatting import NOTHING
from tests.report.runs import evaluation, write_run

CARDS: list[dict[str, Any]] = [
    {"role": "scorer", "name": "toxblock", "kind": "toxblock", "source": "package tox-block 0.1.2",
     "licence": "MIT", "num_parameters": None, "size_bytes": None, "sha256": None,
     "threshold": 0.5},
    {"role": "target", "name": "big/model", "kind": "huggingface", "source": "hub id big/model",
     "licence": None, "num_parameters": 134515008, "size_bytes": 269060552, "sha256": "ab12"},
]  # fmt: skip


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def test_cards_of_evaluations_stand_once_each_the_scorers_last(tmp_path: Path) -> None:
    same = evaluation(cards=CARDS)
    run = read_run(write_run(tmp_path / "one", evaluations={"a": same, "b": same}))
    found = cards(run)
    assert found is not None
    assert [role for role, _ in found["rows"]] == ["target", "scorer"]
    assert found["rows"][0][1] == [
        "big/model", "huggingface, hub id big/model", "not stated", "134,515,008", "269.1 MB",
        "ab12", NOTHING,
    ]  # fmt: skip
    assert found["rows"][1][1][:3] == ["toxblock", "package tox-block 0.1.2", "MIT"]
    assert found["rows"][1][1][-1] == "0.5"


def test_without_an_evaluation_the_parameters_tell_what_they_can(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    model = {"language_model": {"_type": "huggingface", "model": "scenario://models/target"}}
    section = {"failure_threshold": 0.5, "target": model, "scorer": {"_type": "profanity"}}
    change(folder, "hyper_parameters.yaml", ast_chat=section)
    found = cards(read_run(folder))
    assert found is not None
    assert found["is_digested"] is False
    (target, cells), (scorer, _) = found["rows"]
    assert (target, scorer) == ("target", "scorer")
    assert cells[1] == "scenario://models/target"


def test_a_run_that_names_nobody_has_no_cards(tmp_path: Path) -> None:
    assert cards(read_run(write_run(tmp_path / "one"))) is None


def test_what_may_differ_another_time_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", seed=7)
    (folder / "environment.json").write_text('{"num_threads": 2}')
    seed, place = determinism(read_run(folder))
    assert seed == "All random numbers derive from the seed 7 by name."
    assert place.startswith("It ran on a CPU with 2 threads: the same parameters")
    change(folder, "settings.yaml", device="cuda")
    section = {"target": {}, "scorer": {"_type": "judge"}}
    change(folder, "hyper_parameters.yaml", ast_chat=section)
    _, place, asked = determinism(read_run(folder))
    assert place.startswith("Its device was cuda: a GPU may add numbers up in another order")
    assert asked == "A service stands behind a scorer; it may answer otherwise another time."


def test_the_device_is_the_one_that_auto_stood_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", seed=7)
    change(folder, "settings.yaml", device="auto")
    (folder / "environment.json").write_text('{"device": "cpu"}')
    assert determinism(read_run(folder))[1].startswith("It ran on a CPU: the same parameters")
    (folder / "environment.json").write_text('{"device": "cuda"}')
    assert determinism(read_run(folder))[1].startswith("Its device was cuda:")


def test_a_judge_of_an_evaluation_alone_may_answer_otherwise_too(tmp_path: Path) -> None:
    judge = {**CARDS[0], "kind": "judge"}
    run = read_run(write_run(tmp_path / "one", evaluations={"a": evaluation(cards=[judge])}))
    assert determinism(run)[-1].startswith("A service stands behind a scorer")
