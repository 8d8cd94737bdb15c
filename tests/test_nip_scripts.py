"""Scripts written for nip run here, with only the line changes that the guide lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters import HyperParameters
from nip_astra.scenario_base.text.models import TextAgentParameters
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.documents import ROOT
from tests.nip_scripts import ei_cv, ppo_gi

GUIDE = (ROOT / "doc" / "guides" / "coming-from-nip.md").read_text(encoding="utf-8")
SCRIPTS = Path(__file__).parent / "nip_scripts"
TINY_PPO: dict[str, Any] = {
    "num_iterations": [2],
    "num_test_iterations": [1],
    "frames_per_batch": [64],
    "minibatch_size": [32],
    "max_train_size": [60],
    "seed": [8144],
    "update_spec": [(1, 1)],
}
TINY_EI: dict[str, Any] = {
    "interaction_protocol": ["debate"],
    "num_iterations": [2],
    "max_message_rounds": [3],
    "rollouts_per_iteration": [4],
    "levels": [[1]],
    "num_invalid_generation_retries": [2],
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


@pytest.mark.parametrize("name", ["ppo_gi", "ei_cv"])
def test_every_line_that_changes_is_in_the_guide(name: str) -> None:
    texts = ((SCRIPTS / f"{name}{end}").read_text() for end in (".nip.txt", ".py"))
    # Without indentation: a call may be nested deeper here.
    theirs, ours = (
        [line.strip() for line in text.replace("from nip ", "from nip_astra ").splitlines()]
        for text in texts
    )
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


@pytest.mark.parametrize("script", [ppo_gi, ei_cv], ids=["ppo", "expert iteration"])
def test_a_script_runs_over_its_grid(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = script.param_grid | (TINY_PPO if script is ppo_gi else TINY_EI)
    monkeypatch.setattr(script, "param_grid", grid)
    script.run_all(runs_dir=str(tmp_path), progress=False)
    (path,) = tmp_path.iterdir()
    run = RunDirectory.open(path)
    recorded = HyperParameters.from_dict(run.read_yaml("hyper_parameters.yaml"))
    assert recorded == script.construct_params({name: values[0] for name, values in grid.items()})
    results = run.read_json("results.json")
    if script is ppo_gi:
        assert path.name == "ppo_gi_a_0"
        assert {path.stem for path in (path / "model").iterdir()} == {"prover", "verifier"}
        assert 0 <= results["after"]["mean_accuracy"] <= 1
        assert recorded.rl.num_iterations == 2
    else:
        assert results["protocol"] == "debate"
        assert sorted(results["groups"]) == ["provers", "verifiers"]
        assert {"accuracy_where_level_1", "mean_accuracy"} <= set(results["after"])


def default_of(path: str) -> Any:
    """A class's default, by the parameter's path in a file."""
    trainer = path.partition(".")[0] if path.startswith(("spg.", "reinforce.")) else "vanilla_ppo"
    trainer = "solo_agent" if path.startswith("solo_agent.") else trainer
    scenario = "image_classification" if path.startswith("image_") else "graph_isomorphism"
    if path.startswith(("text_rl.", "pure_text_ei.", "code_validation.")):
        trainer, scenario = "pure_text_ei", "code_validation"
    value: Any = type(HyperParameters(trainer=trainer, scenario=scenario))
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
