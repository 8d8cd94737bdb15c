"""A run can build on another: inherit its parameters, or test its agents again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    ParameterError,
    RunDirectoryError,
    UntrustedRunError,
)
from nip_astra.parameters import conversion
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.trainers import BaseRunParameters
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.tracking import wandb_runs
from nip_astra.version import __version__
from tests.kit.experiments import run_in
from tests.kit.messages import says
from tests.kit.toy_protocol_scenario import KIND, SMALL, toy_scenario_folder
from tests.tracking.test_wandb_runs import FakeApi, FakeArtifact

PARAMETERS, RERUN = "base_run_type=parameters", "base_run_type=rerun_tests"


@pytest.fixture(scope="module")
def counted(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the counting trainer; 3 instead of 4, with its own rate."""
    overrides = ["training.num_iterations=3", "training.lr=0.125", "toy_trainer.offset=2"]
    resolved = resolve_experiment(
        trainer="toy_trainer", scenario=str(toy), overrides=overrides, seed=7
    )
    return run_in(tmp_path_factory.mktemp("runs"), resolved, "counted")


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of agents that play a protocol."""
    folder = toy_scenario_folder(tmp_path_factory.mktemp("proof") / "toy_proof")
    file = folder.parent / "small.yaml"
    file.write_text(yaml.safe_dump({"trainer": "vanilla_ppo", "scenario": str(folder)} | SMALL))
    yield run_in(folder.parent / "runs", resolve_experiment(parameter_file=file), "proof")
    SCENARIOS.forget(KIND)


def build_on(run: Path | str, *overrides: str, **arguments: Any) -> ResolvedExperiment:
    given = [f"base_run.run={run}", *(f"base_run.{item}" for item in overrides[:1]), *overrides[1:]]
    return resolve_experiment(overrides=given, **arguments)


def results_of(path: Path) -> Any:
    return json.loads((path / "results.json").read_text())


def stored(folder: Path, **arguments: Any) -> HyperParameters:
    """Store the parameters of an experiment as those of a run."""
    hyper_params = resolve_experiment(**arguments).hyper_params
    (folder / "hyper_parameters.yaml").write_text(yaml.safe_dump(hyper_params.to_dict()))
    return hyper_params


# ---- parameters


def test_the_base_run_s_parameters_are_the_defaults_of_the_new_run(
    counted: Path, toy: Path
) -> None:
    resolved = build_on(counted, PARAMETERS, "training.lr=0.5")
    expected = {"trainer": "toy_trainer", "scenario": str(toy), "seed": 7}
    expected |= {"training.num_iterations": 3, "toy_trainer.offset": 2}
    for path, value in expected.items():
        assert resolved.hyper_params.get(path) == value
        assert resolved.sources[path] == "base run counted"
    assert resolved.hyper_params.training.lr == 0.5
    assert resolved.sources["training.lr"] == resolved.sources["base_run.run"] == "--set"


def test_a_parameter_file_and_an_object_win_over_the_base_run(
    counted: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    base = {"run": str(counted), "base_run_type": "parameters"}
    file.write_text(yaml.safe_dump({"base_run": base, "training": {"lr": 0.25}}))
    result = resolve_experiment(parameter_file=file).hyper_params
    assert (result.training.lr, result.training.num_iterations, result.seed) == (0.25, 3, 7)
    names = {"trainer": "toy_trainer", "scenario": result.scenario}
    plain = HyperParameters(**names, seed=1, base_run=BaseRunParameters(**base))
    result = resolve_experiment(hyper_params=plain).hyper_params
    assert (result.training.lr, result.seed) == (0.125, 1)


def test_the_base_run_wins_over_a_preset(tmp_path: Path) -> None:
    before = stored(tmp_path, trainer="ast_dpo", overrides=["training.lr=0.5"])
    after = build_on(tmp_path, PARAMETERS).hyper_params
    assert after.to_dict() == before.to_dict() | {"base_run": after.base_run.to_dict()}
    # Another scenario of the same kind speaks for itself.
    plain = resolve_experiment(trainer="ast_dpo", scenario="smollm2_chat").hyper_params
    result = build_on(tmp_path, PARAMETERS, scenario="smollm2_chat").hyper_params
    assert before.get("ast_chat") != plain.get("ast_chat")
    assert result.get("ast_chat") == plain.get("ast_chat")
    assert result.training.lr == 0.5


@pytest.mark.parametrize("kind", [PARAMETERS, RERUN])
def test_groups_that_the_base_run_switched_off_make_nothing_of_the_preset_unread(
    tmp_path: Path, kind: str
) -> None:
    off = ["rl.pretrain_agents=false"]
    arguments = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism_small", "overrides": off}
    before = stored(tmp_path, **arguments)
    assert build_on(tmp_path, kind).hyper_params.rl == before.rl
    other = build_on(tmp_path, PARAMETERS, trainer="reinforce").hyper_params
    assert not other.rl.pretrain_agents
    with pytest.raises(ParameterError, match=r"solo_agent\.num_epochs.*rl\.pretrain_agents"):
        build_on(tmp_path, PARAMETERS, "solo_agent.num_epochs=7")


def test_another_trainer_and_scenario_inherit_the_parameters_they_read(
    counted: Path, proof: Path
) -> None:
    chat = {"trainer": "ast_dpo", "scenario": "pocket_chat"}
    result = build_on(counted, PARAMETERS, **chat).hyper_params
    plain = resolve_experiment(**chat).hyper_params
    assert (result.training.lr, result.seed) == (0.125, 7)
    assert all(result.get(section) == plain.get(section) for section in ("ast_dpo", "ast_chat"))
    result = build_on(proof, PARAMETERS, **chat).hyper_params
    assert result.interaction_protocol is None
    assert result.rl.num_iterations == 3


def test_the_run_is_recorded_with_a_path_that_means_the_same_everywhere(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(counted.parent)
    resolved = build_on("counted", PARAMETERS, "training.num_iterations=2")
    assert resolved.hyper_params.base_run.run == str(counted)
    path = run_in(tmp_path, resolved, "next")
    assert results_of(path) == {"last": 4.0}
    sources = json.loads((path / "parameter_sources.json").read_text())
    assert sources["training.lr"] == "base run counted"


def test_the_record_of_a_run_does_not_need_its_base_run(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(counted, tmp_path / "copy")
    monkeypatch.setenv("TOY_BREAK", "1")
    with pytest.raises(ArithmeticError):
        run_in(tmp_path, build_on(copy, PARAMETERS), "cut")
    monkeypatch.delenv("TOY_BREAK")
    shutil.rmtree(copy)
    file = tmp_path / "cut" / "hyper_parameters.yaml"
    assert resolve_experiment(parameter_file=file).hyper_params.training.lr == 0.125
    assert resume_experiment(tmp_path / "cut", progress=False).results == {"last": 5.0}


def test_an_old_run_is_converted(
    counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = yaml.safe_load((counted / "hyper_parameters.yaml").read_text())
    values |= {"package_version": "0.0.1", "random_seed": values.pop("seed")}
    (tmp_path / "hyper_parameters.yaml").write_text(yaml.safe_dump(values))
    conversions = {(0, 0): lambda values: values | {"seed": values.pop("random_seed")}}
    monkeypatch.setattr(conversion, "_CONVERSIONS", conversions)
    result = build_on(tmp_path, PARAMETERS).hyper_params
    assert (result.seed, result.package_version) == (7, __version__)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["run=runs/a"], ["base_run: ", "base_run_type"]),
        (["base_run_type=parameters"], ["base_run: ", "give run"]),
        (["run=a", "base_run_type=paramters"], ["base_run.base_run_type: ", "none, "]),
        (["run=a", "base_run_typ=parameters"], ["base_run.base_run_typ: ", "unknown"]),
    ],
)
def test_half_a_base_run_and_a_folder_that_is_no_run_are_refused(
    tmp_path: Path, overrides: list[str], facts: list[str]
) -> None:
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(overrides=[f"base_run.{item}" for item in overrides])
    assert says(caught.value, "(from --set)", *facts)
    with pytest.raises(RunDirectoryError, match="hyper_parameters"):
        build_on(tmp_path, PARAMETERS)


# ---- rerun_tests


def test_the_agents_of_a_run_are_tested_again_and_nothing_is_trained(
    proof: Path, tmp_path: Path
) -> None:
    again = run_in(tmp_path, build_on(proof, RERUN), "again")
    assert results_of(again)["after"] == results_of(proof)["after"]
    assert results_of(again)["training"]["num_iterations"] == 0
    assert not (again / "model").exists()
    # Its record is enough to run it again.
    record = again / "hyper_parameters.yaml"
    second = run_in(tmp_path, resolve_experiment(parameter_file=record), "second")
    assert results_of(second)["after"] == results_of(again)["after"]
    with pytest.raises(ParameterError, match=r"rl\.lr: .*0\.01"):
        resolve_experiment(parameter_file=record, overrides=["rl.lr=1.0"])
    longer = build_on(proof, RERUN, "rl.num_test_iterations=3")
    assert longer.hyper_params.rl.num_iterations == 3
    results = results_of(run_in(tmp_path, longer, "longer"))["after"]
    assert results["num_episodes"] > 2 * results_of(proof)["after"]["num_episodes"]


def test_options_that_a_rerun_would_not_use_are_refused_all_at_once(
    proof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError) as caught:
        build_on(proof, RERUN, "rl.lr=0.5", "rl.gamma=0.95", seed=3, trainer="vanilla_ppo")
    assert [fault.path for fault in caught.value.faults] == ["seed", "rl.lr"]
    assert says(caught.value, "0.01", "0.5 (from --set)", "3 (from command line)")
    # Its own scenario may be named another way.
    scenario = Path(build_on(proof, RERUN).hyper_params.scenario)
    monkeypatch.chdir(scenario.parent)
    assert build_on(proof, RERUN, scenario=f"./{scenario.name}").hyper_params.rl.lr == 0.01
    with pytest.raises(ParameterError, match="scenario: "):
        build_on(proof, RERUN, scenario="graph_isomorphism")


def test_runs_that_cannot_be_tested_again_are_refused(
    counted: Path, toy: Path, proof: Path, tmp_path: Path
) -> None:
    trainer = prepare_experiment(HyperParameters(trainer="toy_trainer", scenario=str(toy))).trainer
    with pytest.raises(ConfigurationError, match="'toy_trainer'"):
        trainer.rerun_tests(counted)
    (tmp_path / "attack").mkdir()
    stored(tmp_path / "attack", trainer="ast_dpo")
    with pytest.raises(ConfigurationError, match="nip-astra evaluate RUN"):
        build_on(tmp_path / "attack", RERUN)
    for name in ("hyper_parameters.yaml", "environment.json"):
        shutil.copy(proof / name, tmp_path)
    with pytest.raises(CheckpointError, match="agents"):
        run_in(tmp_path, build_on(tmp_path, RERUN), "none")


def test_agents_that_learnt_alone_are_tested_again(proof: Path, tmp_path: Path) -> None:
    alone = build_on(proof, PARAMETERS, "solo_agent.num_epochs=2", trainer="solo_agent")
    first = run_in(tmp_path, alone, "alone")
    again = run_in(tmp_path, build_on(first, RERUN), "again")
    assert results_of(again)["after"] == results_of(first)["after"]
    assert results_of(again)["training"]["num_epochs"] == 0


# ---- from W&B


class AgentsOfARun(FakeArtifact):
    """The model that a run logged."""

    def __init__(self, run: Path) -> None:
        super().__init__("model", "", ("latest",))
        self.run = run

    def download(self, root: str) -> str:
        shutil.copytree(self.run / "model", root)
        return root


def test_a_base_run_may_be_on_w_and_b(
    proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = yaml.safe_load((proof / "hyper_parameters.yaml").read_text())
    api = FakeApi(config, [AgentsOfARun(proof)])
    monkeypatch.setattr(wandb_runs, "open_api", lambda: api)
    with pytest.raises(UntrustedRunError, match="scenario="):
        prepare_experiment(build_on("wandb://us/proofs/one", RERUN))
    resolved = build_on("wandb://us/proofs/one", RERUN, is_trusted=True)
    assert resolved.sources["rl.lr"] == "base run one"
    assert resolved.hyper_params.base_run.run == "wandb://us/proofs/one"
    again = run_in(tmp_path, resolved, "again")
    assert results_of(again)["after"] == results_of(proof)["after"]
    result = build_on("wandb://us/proofs/one", PARAMETERS, "rl.lr=0.5").hyper_params
    assert (result.rl.lr, result.rl.num_iterations) == (0.5, 3)
