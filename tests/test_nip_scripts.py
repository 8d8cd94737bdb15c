"""Scripts written for nip run here, with only the line changes that the guide lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters import HyperParameters
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenario_base.text.models import TextAgentParameters
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.documents import ROOT
from tests.nip_scripts import ei_cv, ppo_gi

GUIDE = (ROOT / "doc" / "guides" / "coming-from-nip.md").read_text(encoding="utf-8")
SCRIPTS = Path(__file__).parent / "nip_scripts"
TINY = {
    "num_iterations": [2],
    "num_test_iterations": [1],
    "frames_per_batch": [64],
    "minibatch_size": [32],
    "max_train_size": [60],
    "seed": [8144],
}
OF_THE_SWEEP = re.compile(
    r"arguments|cmd_args|experiment|param_grid=|_fn=|nip.utils", re.IGNORECASE
)


def section(heading: str) -> str:
    """The text under a heading of the guide."""
    return GUIDE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of a table's rows, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def lines_of(name: str) -> list[str]:
    """A script's lines without indentation: a call may be nested deeper here."""
    text = (SCRIPTS / name).read_text(encoding="utf-8")
    return [line.strip() for line in text.replace("from nip ", "from nip_astra ").splitlines()]


@pytest.mark.parametrize("name", ["ppo_gi", "ei_cv"])
def test_every_line_that_changes_is_in_the_guide(name: str) -> None:
    theirs, ours = lines_of(f"{name}.nip.txt"), lines_of(f"{name}.py")
    gone = [line for line in theirs if line not in ours]
    heads = [
        re.match(r"\W*(?:from \S+ import )?([\w.]+)", line)
        for line in gone
        if not OF_THE_SWEEP.search(line)
    ]
    listed = section("A script, line by line")
    missing = {head[1] for head in heads if head and f"`{head[1]}" not in listed}
    assert missing == set()
    assert len(gone) < len(theirs) / 2


def test_the_ppo_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"update_spec": [(1, 1)]}
    monkeypatch.setattr(ppo_gi, "param_grid", ppo_gi.param_grid | TINY | more)
    ppo_gi.run_all(runs_dir=str(tmp_path), progress=False)
    run = RunDirectory.open(tmp_path / "ppo_gi_a_0")
    assert {path.stem for path in (run.path / "model").iterdir()} == {"prover", "verifier"}
    results = run.read_json("results.json")
    assert 0 <= results["after"]["mean_accuracy"] <= 1
    recorded = run.read_yaml("hyper_parameters.yaml")
    combo = {name: values[0] for name, values in ppo_gi.param_grid.items()}
    assert HyperParameters.from_dict(recorded) == ppo_gi.construct_params(combo)
    assert recorded["rl"]["num_iterations"] == 2


def test_the_ppo_script_prepares_a_run_as_it_stands() -> None:
    combo = {name: values[0] for name, values in ppo_gi.param_grid.items()} | {"max_train_size": 60}
    prepared = ppo_gi.run_preparer_fn(combo)
    assert prepared.total_num_iterations == 5000 + 2 * 10
    given = ppo_gi.construct_params(combo)
    assert given == resolve_experiment(hyper_params=given).hyper_params


def test_the_script_of_expert_iteration_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol, provers = "debate", ["prover0", "prover1"]
    tiny = {"interaction_protocol": [protocol], "num_iterations": [2], "max_message_rounds": [3]}
    tiny |= {"rollouts_per_iteration": [4], "levels": [[1]], "num_invalid_generation_retries": [2]}
    monkeypatch.setattr(ei_cv, "param_grid", ei_cv.param_grid | tiny)
    ei_cv.run_all(runs_dir=str(tmp_path), progress=False)
    run = RunDirectory.open(tmp_path / "ei_cv_a_0")
    results = run.read_json("results.json")
    assert results["protocol"] == protocol
    assert sorted(results["agents"]) == [*provers, "verifier"]
    assert sorted(results["groups"]) == ["provers", "verifiers"]
    assert {"accuracy_where_level_1", "mean_accuracy"} <= set(results["after"])
    combo = {name: values[0] for name, values in ei_cv.param_grid.items()}
    recorded = HyperParameters.from_dict(run.read_yaml("hyper_parameters.yaml"))
    assert recorded == ei_cv.construct_params(combo)


def test_the_script_of_expert_iteration_names_hosted_models_without_the_dummy() -> None:
    combo = {name: values[0] for name, values in ei_cv.param_grid.items()}
    given = ei_cv.construct_params(combo | {"use_dummy_api": False})
    agents = given.to_dict()["code_validation"]["agents"]
    assert agents["prover"]["model"]["_type"] == "openai"
    assert agents["prover"]["model"]["model"] == "gpt-4o-2024-08-06"
    assert agents["verifier"]["fine_tune_from_scratch"] is True
    assert agents["verifier"]["freeze_agent"] is False
    assert given.text_rl.verifier_guess_replacement_annealing == "linear"
    assert given.text_rl.num_iterations == 8
    assert ei_cv.run_preparer_fn(combo).total_num_iterations == 8


def default_of(path: str) -> Any:
    """A class's default, by the parameter's path in a file."""
    trainer = path.partition(".")[0] if path.startswith(("spg.", "reinforce.")) else "vanilla_ppo"
    trainer = "solo_agent" if path.startswith("solo_agent.") else trainer
    scenario = "image_classification" if path.startswith("image_") else "graph_isomorphism"
    if path.startswith(("text_rl.", "pure_text_ei.", "code_validation.")):
        trainer, scenario = "pure_text_ei", "code_validation"
    model = type(HyperParameters(trainer=trainer, scenario=scenario))
    value: Any = model
    for name in path.split("."):
        if value == {}:
            value = TextAgentParameters
            continue
        if isinstance(value, dict) or not hasattr(value, "model_fields"):
            value = value[name]
        else:
            value = value.model_fields[name].get_default(call_default_factory=True)
        value = type(value) if hasattr(type(value), "model_fields") else value
    return value


def test_the_defaults_in_the_guide_are_those_of_the_classes() -> None:
    defaults = list(rows(section("Defaults that differ")))
    assert len(defaults) > 18
    for path, theirs, here in defaults:
        if not path.startswith("`"):
            continue
        assert f"`{json.dumps(default_of(path.strip('`')))}`" == here, path
        assert theirs != here
