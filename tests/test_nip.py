"""Code written for nip runs with its import root renamed, and keeps its meaning."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.language_models.services.chat import ChatRequest
from nip_astra.nip import (
    AlternatingPeriodicUpdateSchedule,
    HyperParameters,
    LrFactors,
    RlTrainerParameters,
    running,
    tensors,
)
from nip_astra.nip import hyper_params as nip_parameters
from nip_astra.nip.hyper_params import DEFAULTS, ours
from nip_astra.nip.modules import MODULES
from nip_astra.nip.tensors import KEYS, Reward2GoTransform
from nip_astra.nip.texts import PureTextRlTrainer, as_nip, as_ours
from nip_astra.parameters.hyper_parameters import HyperParameters as PlainParameters
from nip_astra.run import prepare_experiment
from nip_astra.scenario_base.text.models import TextAgentParameters
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.text.rollouts import episode_returns
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.documents import ROOT, find
from tests.kit.text_games import Script, TextParts, build_text_parts, build_text_trainer
from tests.nip_scripts import ei_cv, ppo_gi
from tests.nip_scripts.uses import uses

SCRIPTS = ROOT / "tests" / "nip_scripts"
GUIDE = (ROOT / "doc" / "guides" / "coming-from-nip.md").read_text(encoding="utf-8")
NAMES: dict[str, list[str]] = json.loads((SCRIPTS / "names.json").read_text(encoding="utf-8"))
"""By file of nip's, what it uses of nip."""
PROGRAM_OF = {
    "ppo_gi": "ppo",
    "ppo_ic": "ppo",
    "solo_agents_gi": "solo",
    "solo_agents_ic": "solo",
    "ei_cv": "expert_iteration",
    "cv_benchmark": "benchmark",
    "analyse_cv_rollouts": "analyse",
    "vanilla_ppo": "tensor_trainers",
    "reinforce": "tensor_trainers",
    "spg": "tensor_trainers",
    "ei_pure_text": "text_trainers",
    "malt_pure_text": "text_trainers",
    "solo_agent": "solo_trainer",
    "time_timeable": "tools",
    "create_gi_dataset": "tools",
    "dummy_test_gi": "dummy",
    "dummy_test_ic": "dummy",
}
"""Programs of our own that use all of it."""
FURTHER = [
    *("AgentUpdateSchedule", "DatasetParameters", "PreparedExperimentInfo", "TestSchemeType"),
    *("scenario_base.data.Dataset", "scenario_base.agents.PureTextSharedModelGroup"),
    *("parameters.types.SpgVariantType", "parameters.update_schedule.ConstantUpdateSchedule"),
    *("rl_objectives.KLPENPPOLossImproved", "utils.maths.aggregate_mean_grouped_by_class"),
    *("trainers.trainer_base.attach_progress_bar", "protocols.main_protocols.DebateProtocol"),
    # What nip's unit tests import.
    *("ExperimentSettings", "experiment_settings.ExperimentSettings"),
    *("graph_isomorphism.GraphIsomorphismDataset", "parameters.AgentParameters"),
    *("graph_isomorphism.GraphIsomorphismEnvironment", "parameters.SoloAgentParameters"),
    *("image_classification.ImageClassificationDataset", "parameters.ZkProtocolParameters"),
    *("image_classification.ImageClassificationEnvironment", "protocols.ZeroKnowledgeProtocol"),
    *("protocols.build_protocol_handler", "scenario_base.Environment", "trainers.build_trainer"),
    *("scenario_base.TensorDictAgentPartMixin", "scenario_base.TensorDictDataLoader"),
    *("scenario_base.TensorDictDataset", "scenario_base.TensorDictEnvironment"),
    *("trainers.vanilla_ppo.VanillaPpoTrainer", "utils.maths.compute_nystrom_ihvp"),
    *("utils.maths.set_seed", "utils.output.DummyTqdm"),
]


KEPT = {
    "experiment_settings": "ExperimentSettings",
    "factory": "build_scenario_instance",
    "": (
        "AgentsParameters AlternatingPeriodicUpdateSchedule BaseRunParameters CommonPpoParameters "
        "CommonProtocolParameters ConstantUpdateSchedule ContiguousPeriodicUpdateSchedule "
        "DebateProtocolParameters GraphIsomorphismAgentParameters HyperParameters "
        "ImageClassificationAgentParameters ImageClassificationParameters InteractionProtocolType "
        "LrFactors MessageRegressionParameters NipProtocolParameters RandomAgentParameters "
        "ReinforceParameters RlTrainerParameters ScenarioType SoloAgentParameters SpgParameters "
        "TrainerType"
    ),
    "parameters": "HyperParameters",
    "parameters.agents": "AgentsParameters LrFactors",
    "parameters.trainers": "RlTrainerParameters TextRlParameters",
    "parameters.update_schedule": "AlternatingPeriodicUpdateSchedule",
    "parameters.parameters_base": "SubParameters",
    "parameters.types": "InteractionProtocolType ScenarioType TrainerType",
    "protocols.main_protocols": "DebateProtocol MnipProtocol NipProtocol",
    "protocols.registry": "build_protocol_handler register_protocol_handler",
    "protocols.protocol_base": "DeterministicSingleVerifierProtocolHandler ProtocolHandler",
    "protocols.zero_knowledge": "ZeroKnowledgeProtocol",
    "rl_objectives": "Objective",
    "run": "prepare_experiment run_experiment",
    "scenario_instance": "ScenarioInstance",
    "trainers.registry": "register_trainer",
    "trainers.reinforce": "ReinforceTrainer",
    "trainers.rl_tensordict_base": "TensorDictRlTrainer",
    "trainers.solo_agent": "SoloAgentTrainer",
    "trainers.spg": "SpgTrainer",
    "trainers.trainer_base": "IterationContext TensorDictTrainer Trainer attach_progress_bar",
    "trainers.vanilla_ppo": "VanillaPpoTrainer",
}
"""Public names of nip that are at the same place here, by module; its own name is left out."""


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays_registered() -> Iterator[None]:
    with plugins_forgotten_after():
        yield
    program.cache_clear()


@functools.cache
def program(name: str) -> ModuleType:
    """A program, which registers its trainers once."""
    module = sys.modules[f"nip_{name}"] = ModuleType(f"nip_{name}")
    exec(compile(source_of(name), name, "exec"), vars(module))
    return module


def source_of(name: str) -> str:
    """A program's text with its import root renamed."""
    text = (SCRIPTS / f"{name}.nip.txt").read_text(encoding="utf-8")
    return re.sub(r"\b(from|import) nip\b", r"\1 nip_astra.nip", text)


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> None:
    """Run a program without a grid as a script."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *options])
    exec(compile(source_of(name), name, "exec"), {"__name__": "__main__"})


def run_grid(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str, **grid: list[Any]
) -> dict[str, RunDirectory]:
    """Run a program over its grid, with some values changed."""
    module = program(name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.setattr(module.experiment, "param_grid", {**module.param_grid, **grid})
    module.experiment.run()
    paths = [path.parent for path in (folder / "runs").glob("*/results.json")]
    return {path.name: RunDirectory.open(path) for path in paths}


# ---- names


@pytest.mark.parametrize("file", NAMES)
def test_a_program_uses_all_that_nips_file_uses(file: str) -> None:
    text = (SCRIPTS / f"{PROGRAM_OF[file]}.nip.txt").read_text(encoding="utf-8")
    assert set(NAMES[file]) - uses(text) == set()


def test_every_name_is_at_its_place_in_nip() -> None:
    imported = {
        use.split()[1] for file in NAMES.values() for use in file if use.startswith("import")
    }
    for path in sorted({name.removeprefix("nip.") for name in imported} | set(FURTHER)):
        assert find(f"nip_astra.nip.{path}") is not None
    for module, names in KEPT.items():
        for name in names.split():
            assert find(f"nip_astra.{module}.{name}".replace("..", ".")) is not None
    for module, names in MODULES.items():
        result = importlib.import_module(f"nip_astra.nip.{module}".rstrip("."))
        assert [name for name in names if getattr(result, name) is None] == []
    with pytest.raises(ImportError):
        importlib.import_module("nip_astra.nip.utils.nothing")


def test_the_guide_places_every_group_of_parameters() -> None:
    groups = [one for one in PlainParameters.model_fields if one not in ("plugins", "training")]
    left_out = [name for name in groups if f"`{name}" not in GUIDE and "custom" not in name]
    assert left_out == ["package_version"]


# ---- scripts


@pytest.mark.parametrize(
    ("changes", "provers"),
    [
        ({"scenario": ["image_classification"], "random_prover": [True]}, ["prover"]),
        (
            {"protocol": ["debate"], "update_spec": [(1, 1, 1)], "pretrain_agents": [True]},
            ["prover0", "prover1"],
        ),
    ],
)
def test_the_scripts_for_ppo_run(
    changes: dict[str, Any], provers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = run_grid("ppo", monkeypatch, tmp_path, "--num-workers", "1", "-q", **changes)
    ((name, run),) = runs.items()
    assert name == "ppo_a_0"
    assert {path.stem for path in (run.path / "model").iterdir()} == {"verifier", *provers}
    recorded = run.read_yaml("hyper_parameters.yaml")
    assert recorded["rl"]["num_iterations"] == 2
    assert recorded["ppo"]["entropy_weight"] == 0.002
    agents = recorded[changes.get("scenario", ["graph_isomorphism"])[0]]["agents"]
    assert all(agents[name]["is_random"] is ("random_prover" in changes) for name in provers)


def test_the_scripts_for_agents_alone_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run_grid("solo", monkeypatch, tmp_path)
    assert sorted(runs) == ["solo_a_0", "solo_a_1"]
    graphs, images = (runs[name].read_yaml("hyper_parameters.yaml") for name in sorted(runs))
    assert graphs["solo_agent"]["num_epochs"] == 2
    verifier = graphs["graph_isomorphism"]["agents"]["verifier"]
    assert verifier["body_lr_factor"]["actor"] == 0.01
    assert images["image_classification"]["dataset"]["selected_classes"] == [0, 1]


def test_the_scripts_for_chat_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    runs = run_grid("expert_iteration", monkeypatch, tmp_path, "test", "--dummy")
    assert sorted(runs) == ["ei_test_0", "ei_test_1"]
    results = runs["ei_test_1"].read_json("results.json")
    assert sorted(results["groups"]) == ["provers_group", "verifier"]

    class Api:
        def artifact(self, name: str, type: str) -> Any:  # noqa: A002  # W&B's name
            raise wandb.errors.CommError(f"artifact '{name}' not found")

    monkeypatch.setattr(wandb, "Api", Api)
    for name in ("WANDB_ENTITY", "WANDB_CV_PROJECT"):
        monkeypatch.setenv(name, "mine")
    counted: list[Any] = []
    monkeypatch.setattr(
        "nip_astra.nip.texts.count_analysis",
        lambda run, names, model, split: counted.append((Path(run).name, names)),
    )
    options = ("ei_test_0", "--dry-run", "--analysers", "follow_up", "prover_direct_quotation")
    run_script("analyse", monkeypatch, tmp_path, *options)
    assert counted == [("ei_test_0", ["follow_up", "direct_quotation"])]
    assert not (tmp_path / "runs" / "ei_test_0" / "analyses").exists()


def test_the_script_with_hosted_models_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import openai

    requests: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        requests.append(request)
        token = SimpleNamespace(token="yes", logprob=-0.5)
        token.top_logprobs = [token, SimpleNamespace(token="no", logprob=-1.0)]
        choice = SimpleNamespace(message=SimpleNamespace(content="yes"))
        choice.logprobs = SimpleNamespace(content=[token])
        return SimpleNamespace(choices=[choice])

    def client(**options: Any) -> Any:
        assert options == {"base_url": running.OPENROUTER, "api_key": "secret"}
        chat = SimpleNamespace(completions=SimpleNamespace(create=create))
        return nullcontext(SimpleNamespace(chat=chat))

    row = {"apps_split": "train", "difficulty": "interview", "question": "?"}
    row |= {"solutions": [{"solution": "a"}], "buggy_solutions": [{"solution": "b"}]}
    monkeypatch.setattr(openai, "OpenAI", client)
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, split: [row])
    with pytest.raises(running.EnvironmentVariableDoesNotExistError, match="OPENROUTER_API_KEY"):
        run_script("benchmark", monkeypatch, tmp_path, "some/model")
    monkeypatch.setenv("OPENROUTER_API_KEY", "secret")
    run_script("benchmark", monkeypatch, tmp_path, "some/model", "--check_probs")
    assert json.loads((tmp_path / "shares.json").read_text()) == [0.5]
    assert len(requests) == 4
    assert requests[0]["top_logprobs"] == 2
    # Absent unless requested, as in nip: its scripts test for it.
    for get_log_probs in (False, True):
        (result,) = running._get_openrouter_response(
            *("some/model", [], "secret"), get_log_probs=get_log_probs, get_top_logprobs=2
        )
        assert (result["log_probs"] is not None) is get_log_probs
        assert len(result["top_logprobs"]) == 1


def test_grids_are_divided_and_skip_as_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, dict[str, Any]] = {}
    experiment = running.SequentialHyperparameterExperiment(
        {"b": [1, 2], "a": [3, 4]},
        lambda arguments: ran.update({arguments.run_id: arguments.combo}),
        experiment_name="GRID",
    )
    divided = "--combo-groups 2 --combo-num 1 --num-skip 1"
    for options, names in (("", ["grid_0", "grid_1", "grid_2", "grid_3"]), (divided, ["grid_3"])):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["grid", *options.split()])
        experiment.run()
        assert list(ran) == names
    assert ran["grid_3"] == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("option", "shown"),
    [("", "warning"), ("-v", "info warning"), ("-d", "debug info warning"), ("-q", "")],
)
def test_the_options_of_a_grid_choose_the_messages_of_its_log(
    option: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def speak(arguments: running.ExperimentFunctionArguments) -> None:
        for name in ("debug", "info", "warning"):
            getattr(arguments.child_logger_adapter, name)(name)

    monkeypatch.setattr(running.logger, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["grid", *option.split()])
    running.SequentialHyperparameterExperiment({"a": [1]}, speak, experiment_name="GRID").run()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"[grid_0] {name}" for name in shown.split()]
    running.logger.setLevel(logging.NOTSET)


# ---- hyper-parameters


def test_defaults_are_nips() -> None:
    result = ours(HyperParameters("graph_isomorphism", "vanilla_ppo", "eru10000"))
    given = DEFAULTS["RlTrainerParameters"]
    for name in ("num_iterations", "lr", "gamma", "minibatch_size", "use_shared_body"):
        assert getattr(result.rl, name) == given[name]
    assert (result.seed, result.interaction_protocol) == (6198, "nip")
    assert (result.rl.grad_clipping, result.rl.clip_value) == ("joint", None)
    prover = result.graph_isomorphism.agents["prover"]
    assert (prover.num_transformer_layers, prover.use_dual_gnn) == (4, True)
    images = ours(HyperParameters("image_classification", "reinforce", "fashion_mnist"))
    assert images.reinforce.entropy_weight == 0
    for agent in images.image_classification.agents.values():
        assert (agent.body_lr_factor.actor, agent.body_lr_factor.critic) == (1, 1)
    text = ours(
        HyperParameters("code_validation", "pure_text_ei", "lrhammond/buggy-apps", "debate")
    )
    assert text.text_rl.rollouts_per_iteration == 1000 // 8
    assert (text.text_rl.test_scheme, text.text_rl.min_fine_tune_examples) == ("none", 10)
    verifier = text.code_validation.agents["verifier"]
    assert (verifier.fine_tune_from_scratch, verifier.max_tokens) == (True, 225)
    assert text.code_validation.levels == [2]


def test_values_that_nothing_reads_are_left_alone_and_mappings_stay_as_they_are() -> None:
    shared = {"actor": 0.5, "critic": 0.25}
    agents = {name: {"body_lr_factor": shared} for name in ("prover", "verifier")}
    given = HyperParameters(
        *("graph_isomorphism", "reinforce", "test"),
        agents=agents,
        rl={"lmbda": 0.5, "clip_value": True, "num_epochs": 1},
        ppo={"kl_beta": 7.0},
        spg={"variant": "sos"},
    )
    result = ours(given)
    assert result.graph_isomorphism.agents["verifier"].body_lr_factor.actor == 0.5
    assert result.ppo.kl_beta != 7.0
    assert shared == {"actor": 0.5, "critic": 0.25}
    assert HyperParameters.from_dict(given.to_dict()) == given
    assert given.get("rl.lmbda") == 0.5


def test_stored_learning_rate_factors_and_schedules_are_those_of_the_objects() -> None:
    schedule = AlternatingPeriodicUpdateSchedule(4, 3, first_agent=False)
    agent = {"agent_lr_factor": LrFactors(0.5, 0.25), "update_schedule": schedule}
    given = HyperParameters("graph_isomorphism", "vanilla_ppo", "test", agents={"_default": agent})
    stored = json.loads(json.dumps(given.to_dict()))
    by_nip = copy.deepcopy(stored)
    kind, arguments = type(schedule).__name__, [4, 3, False]
    names = ("period", "first_agent_num_rounds", "first_agent")
    of_nip = {"_type": kind, kind: dict(zip(names, arguments, strict=True))}
    by_nip["agents"]["_default"]["update_schedule"] = of_nip
    for values in (stored, by_nip):
        assert ours(HyperParameters.from_dict(values)) == ours(given)
    stored["agents"]["_default"]["update_schedule"]["_type"] = "never"
    with pytest.raises(ParameterError, match="never"):
        ours(HyperParameters.from_dict(stored))


def test_message_regression_is_left_out_if_the_trainer_has_none() -> None:
    enabled = {"message_regression": {"enabled": True}}
    probed, alone = (
        ours(HyperParameters("graph_isomorphism", trainer, "test", **enabled))
        for trainer in ("reinforce", "solo_agent")
    )
    assert probed.message_regression.regressor is not None
    assert alone.message_regression.regressor is None


def test_values_that_are_wrong_or_without_counterpart_are_refused() -> None:
    manual: dict[str, Any] = {"agents": {"prover": {"use_manual_architecture": True}}}
    for change, error, fact in (
        (manual, ConfigurationError, "prover"),
        ({"rl": {"lr": -1.0}}, ParameterError, "rl.lr"),
        ({"rl": {"learning_rate": 1.0}}, ConfigurationError, "learning_rate.*lmbda"),
        ({"agents": {"prover": {"lr": 1.0}}}, ConfigurationError, "lr: .*agent_lr_factor"),
    ):
        with pytest.raises(error, match=fact):
            ours(HyperParameters("graph_isomorphism", "vanilla_ppo", "test", **change))
    for values, fact in (
        ({"scenario": "code_validation", "code_validation": {"apps_difficulty": "odd"}}, "odd"),
        (
            {"scenario": "image_classification", "agents": {"a": {"building_block_type": "odd"}}},
            "odd",
        ),
    ):
        trainer = "pure_text_ei" if "code" in str(values) else "vanilla_ppo"
        with pytest.raises(ParameterError, match=fact):
            ours(HyperParameters(trainer=trainer, dataset="cifar10", **values))
    with pytest.raises(ConfigurationError, match="nothing"):
        HyperParameters.from_dict({"nothing": 1})


def test_extra_keys_are_ignored_at_every_level_if_requested() -> None:
    plain = HyperParameters("graph_isomorphism", "vanilla_ppo", "test").to_dict()
    more = json.loads(json.dumps(plain)) | {"nothing": 1}
    more["rl"]["nothing"] = more["agents"]["_default"]["nothing"] = 1
    assert HyperParameters.from_dict(more, ignore_extra_keys=True).to_dict() == plain
    with pytest.raises(ConfigurationError, match="nothing"):
        HyperParameters.from_dict({**plain, "rl": more["rl"]})


def test_parameter_classes_are_dataclasses_with_test_values() -> None:
    changed = dataclasses.replace(RlTrainerParameters(lr=0.1), gamma=0.5)
    assert (changed.lr, changed.gamma) == (0.1, 0.5)
    for name in ("GraphIsomorphismAgentParameters", "CodeValidationAgentParameters"):
        cls = getattr(nip_parameters, name)
        assert cls.construct_test_params() != cls()


# ---- trainers of agents with networks


@pytest.mark.parametrize(
    ("own", "shipped", "groups"),
    [
        ("own_ppo", "vanilla_ppo", {"rl": {"clip_value": True}, "ppo": {"clip_epsilon": 0.01}}),
        ("own_ppo", "vanilla_ppo", {"ppo": {"loss_type": "kl_penalty"}}),
        ("own_reinforce", "reinforce", {}),
        ("own_reinforce", "reinforce", {"reinforce": {"use_advantage_and_critic": True}}),
        ("own_spg", "spg", {"spg": {"variant": "lola"}}),
        (
            "own_spg",
            "spg",
            {"spg": {"variant": "psos", "stackelberg_sequence": (("prover",), ("verifier",))}},
        ),
    ],
)
def test_a_custom_trainer_learns_the_same_as_the_built_in_trainer(
    own: str, shipped: str, groups: dict[str, Any]
) -> None:
    program("tensor_trainers")

    def weights(trainer: str) -> list[torch.Tensor]:
        small = {"num_gnn_layers": 1, "num_transformer_layers": 1, "use_batch_norm": False}
        rl = {"frames_per_batch": 32, "minibatch_size": 16, "num_iterations": 1, "num_epochs": 1}
        rl |= {"num_test_iterations": 1, "lr": 0.01, "normalize_observations": False}
        given = HyperParameters(
            *("graph_isomorphism", trainer, "test"),
            agents={"_default": small},
            nip_protocol={"max_message_rounds": 4},
            dataset_options={"max_train_size": 20},
            **{**groups, "rl": rl | groups.get("rl", {})},
        )
        built = prepare_experiment(ours(given), progress=False).trainer
        if trainer == "own_reinforce":
            super(type(built), built)._get_replay_buffer(Reward2GoTransform(gamma=0.5))
            assert built.reward_to_go_gamma == 0.5
            built.reward_to_go_gamma = built.rl.gamma
        if trainer == own:
            heads = built.scenario_instance.combined_policy_head.parts
            assert [part.module for part in heads.values()] == [
                agent.policy_head for agent in built.agents.agents.values()
            ]
            assert len(built.scenario_instance.train_dataset) == 20
        before = [p.detach().clone() for p in built.agents.parameters()]
        built.train()
        after = list(built.agents.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return after

    assert all(torch.equal(a, b) for a, b in zip(weights(own), weights(shipped), strict=True))


def test_a_custom_solo_trainer_runs_and_saves(tmp_path: Path) -> None:
    program("solo_trainer")
    given = HyperParameters(
        *("graph_isomorphism", "own_solo", "test"),
        agents={"_default": {"num_gnn_layers": 1, "num_transformer_layers": 1}},
        solo_agent={"num_epochs": 3, "batch_size": 16, "learning_rate": 0.01},
        dataset_options={"max_train_size": 40},
    )
    running.run_experiment(given, runs_dir=str(tmp_path), run_id="alone", progress=False)
    lines = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    losses = [line["verifier.train_loss"] for line in figures if "verifier.train_loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert 0 <= figures[-1]["prover.test_accuracy"] <= 1
    assert RunDirectory.open(tmp_path / "alone").checkpoints_dir.is_dir()


def test_keys_and_transforms_that_would_not_be_read_are_refused() -> None:
    program("tensor_trainers")
    with pytest.raises(ConfigurationError, match="next"):
        Reward2GoTransform(gamma=0.5, in_keys=("next", "reward"))
    with pytest.raises(ConfigurationError, match="elsewhere"):
        tensors._Keys.set_keys(SimpleNamespace(), value="elsewhere")
    assert KEYS["done"] == ("agents", "done")
    _, rl = tensors._parameters(False, clip_value=True, clip_epsilon=0.1)
    assert rl.clip_value == 0.1


# ---- trainers of chat models


def _always_accepts(name: str) -> Script:
    def script(request: ChatRequest, number: int) -> str:
        is_last = "Last turn" in request.messages[-1]["content"]
        decision = ("reject", "accept")[(request.seed or 0) % 2 if name == "base" else 1]
        return f"Decision: {decision}" if is_last else f"said {(request.seed or 0) % 97}"

    return script


def _parts(folder: Path, trainer: str, **options: Any) -> TextParts:
    program("text_trainers")
    return build_text_parts(folder / "prompts", _always_accepts, trainer=trainer, **options)


@pytest.mark.parametrize("method", ["threshold", "weighted_sampling"])
def test_custom_expert_iteration_submits_supervised_jobs(method: str, tmp_path: Path) -> None:
    groups = {
        "pure_text_ei": {"rollout_selection_method": method},
        "text_rl": {"verifier_guess_replacement_proportion": 0.5},
    }
    parts = _parts(tmp_path, "own_ei", groups=groups)
    trainer = build_text_trainer(parts, RunDirectory.create(tmp_path, "run"))
    trainer.train()
    assert trainer._get_verifier_guess_replacement_proportion(0) == 0.5
    jobs = {key: examples for key, _, examples, options in parts.service.submitted}
    assert list(jobs) == ["run/prover/0", "run/verifier/0"]
    assert all(item.messages[-1]["role"] == "assistant" for item in jobs["run/prover/0"])
    # Three of six rollouts are replaced: those of false claims end with a rejection.
    assert len(jobs["run/verifier/0"]) >= 3


def test_custom_trees_make_pairs_and_tables(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    groups = {
        "nip": {"max_message_rounds": 4},
        "text_rl": {"rollouts_per_iteration": 4, "test_scheme": "none"},
    }
    parts = _parts(tmp_path, "own_malt", protocol="nip", groups=groups)
    trainer = build_text_trainer(parts, run)
    trainer.train()
    assert {options.method for *_, options in parts.service.submitted} == {"dpo"}
    kept = NestedArrayDict.load(run.path / "rollouts" / "train_0000" / "rollouts.json")
    for key, _, pairs, _ in parts.service.submitted:
        assert pairs, key
        assert all(pair.preferred != pair.rejected for pair in pairs)
        assert all(pair.messages[-1]["role"] == "user" for pair in pairs)
        raw = kept["agents", "raw_message"][..., trainer.agent_names.index(key.split("/")[1])]
        assert {text for pair in pairs for text in pair[1:]} <= set(raw.ravel()), key
    assert (run.path / "rollouts" / "expected_reward_by_round.jsonl").exists()
    # Two branches in each of four rounds, fewer where a conversation ended.
    assert 4 < len(kept) <= 4 * 2**4
    assert PureTextRlTrainer._get_log_stats(trainer, as_nip(kept)), "`train` may be left out"
    returns_NA = episode_returns(kept)
    assert set(np.unique(returns_NA[:, 0])) <= {0.0, 1.0}


def test_a_state_is_played_as_a_whole_conversation_is(tmp_path: Path) -> None:
    def fixed(name: str) -> Script:
        return lambda request, number: (
            "Decision: accept"
            if "Last turn" in request.messages[-1]["content"]
            else f"after {len(request.messages)}"
        )

    program("text_trainers")
    groups = {"nip": {"max_message_rounds": 4}}
    parts = build_text_parts(tmp_path, fixed, trainer="own_ei", protocol="nip", groups=groups)
    trainer = build_text_trainer(parts)
    trainer._prepare_groups()
    whole = trainer._sample_rollouts(trainer.train_environment, 0)

    class Stepwise(type(trainer)):
        @staticmethod
        def _sample_rollouts_for_single_environment(args: Any) -> list[NestedArrayDict]:
            return PureTextRlTrainer._sample_rollouts_for_single_environment(args)

    trainer.__class__ = Stepwise
    stepwise = trainer._sample_rollouts(trainer.train_environment, 0)
    names = {("node", "id"), ("node", "parent")}
    for key, array in whole.items(True, True):
        if key not in names:
            assert array.tolist() == stepwise[key].tolist(), key
    again = as_ours(as_nip(as_ours(whole)))
    assert again == as_ours(whole)
    assert whole["next", "done"][0].tolist() == [False, False, True, True]
    assert whole["message_history"][0, 2, :, 0].tolist() == ["after 2", "after 2", None, None]


def test_messages_of_agents_may_be_changed_before_a_step(tmp_path: Path) -> None:
    parts = _parts(tmp_path, "own_ei")
    trainer = build_text_trainer(parts)
    trainer._prepare_groups()
    environment, agents = trainer.train_environment, trainer.combined_agent
    environment.begin(trainer.episodes("train", 0), ("test",), trainer.files.journal("train", 0))
    assert trainer.scenario_instance.combined_whole is agents
    assert len(trainer.scenario_instance.test_dataset) == 8
    state = environment.step(agents.forward(environment.reset(), environment))
    state = agents.forward(environment.get_next_state_from_state(state), environment)
    label = int(state["y"][0])
    state["agents", "raw_message"][0, 1] = f"Decision: {('reject', 'accept')[label]}"
    state = environment.step(state)
    assert state["agents", "decision"][0, 1] == label
    assert state["next", "agents", "reward"][0, 1] == 1.0
    assert bool(state["next", "done"][0])


# ---- scripts with the line changes of the guide

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
    recorded = PlainParameters.from_dict(run.read_yaml("hyper_parameters.yaml"))
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
    value: Any = type(PlainParameters(trainer=trainer, scenario=scenario))
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
