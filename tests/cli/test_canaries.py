"""No run or sweep from others reads, sends or overwrites anything without approval."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import nip_astra
from nip_astra.errors import UntrustedRunError
from nip_astra.experiment_settings import SETTINGS_OF_OTHERS, ExperimentSettings
from nip_astra.parameters.parameters_base import SubParameters, is_inside
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.sweep.plan import SweepPlan
from nip_astra.sweep.runner import SweepRunner
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine, refused

ROOT = Path(nip_astra.__file__).parent
CANARY = "NIP_ASTRA_CANARY"
# Parameters that name files, models, addresses, variables, or options of foreign code. A parameter
# that is missing here and is marked as harmless in the code needs a second look.
OUTSIDE = """
AdvantageParameters.advantage_options AgentParameters.checkpoint_version
AgentParameters.load_from_run AstSftTrainer.Parameters.probes BaseRunParameters.run
ClassifierScorer.Parameters.model CodeValidationScenario.Parameters.problems
CommonPpoParameters.loss_options GymnasiumTask.Parameters.arguments
OpenEnvTask.Parameters.arguments ToolParameters.options
DatasetTask.Parameters.dev DatasetTask.Parameters.test
DatasetTask.Parameters.train DetoxifyScorer.Parameters.checkpoint
DetoxifyScorer.Parameters.config_path EmbedderParameters.model
EvaluationParameters.labelled_responses FineTuningParameters.api_key_variable
FineTuningParameters.base_url GraphPairParameters.file HuggingFaceImageModel.Parameters.model
HuggingFaceLanguageModel.Parameters.base_model HuggingFaceLanguageModel.Parameters.model
HyperParameters.scenario ImageDatasetParameters.path JudgeScorer.Parameters.api_key_variable
JudgeScorer.Parameters.base_url JudgeScorer.Parameters.extra_body JudgeScorer.Parameters.weights
LlamaGuardScorer.Parameters.model LossParameters.loss_options
OpenAIChatModel.Parameters.api_key_variable OpenAIChatModel.Parameters.base_url
OpenAIChatModel.Parameters.extra_body OpenAIChatModel.Parameters.weights
PretrainedModel.Parameters.cache_dir PromptParameters.dev PromptParameters.test
PromptParameters.train RemoteLanguageModel.Parameters.model RolloutParameters.algorithm
TextAgentParameters.checkpoint_version TextAgentParameters.load_from_run
TrainServiceParameters.base_url TrainServiceParameters.model TrainServiceParameters.options
TrainServiceParameters.token_variable VerifiersTask.Parameters.options
VerifiersTask.Parameters.taskset WeakSupervisionParameters.probes
"""
NOT_OF_RUNS = ("ServiceSettings", "SweepPlan", "SearchParameters", "ExperimentSettings")


def parameter_groups() -> Iterator[type[SubParameters]]:
    for module in pkgutil.walk_packages(nip_astra.__path__, "nip_astra."):
        if ".astra." not in module.name and ".vllm" not in module.name:
            importlib.import_module(module.name)
    groups = [SubParameters]
    while groups:
        group = groups.pop()
        yield group
        groups += [one for one in group.__subclasses__() if one.__module__.startswith("nip_astra")]


def holds_group(annotation: Any) -> bool:
    is_group = isinstance(annotation, type) and issubclass(annotation, SubParameters)
    return is_group or any(holds_group(one) for one in get_args(annotation))


def test_each_parameter_that_may_reach_outside_of_a_run_needs_approval() -> None:
    names = {
        f"{group.__qualname__}.{name}"
        for group in parameter_groups()
        for name, field in group.model_fields.items()
        if name in vars(group).get("__annotations__", ())
        and group.__qualname__ not in NOT_OF_RUNS
        and not is_inside(field.annotation, field.metadata)
        and not holds_group(field.annotation)
    }
    assert names == set(OUTSIDE.split())


SETTINGS = {
    name: field
    for name, field in ExperimentSettings.model_fields.items()
    if not field.exclude and name not in ("runs_dir", "process_store")
}
OUTSIDE_SETTINGS: dict[str, Any] = {
    "actor_cpus": 2,
    "actor_gpus": 1,
    "num_actors": 1,
    "ray_address": "auto",
    "progress_path": CANARY,
    "service_cache": CANARY,
    "trackers": [CANARY],
    "wandb": "offline",
    "wandb_entity": CANARY,
    "wandb_group": CANARY,
    "wandb_project": CANARY,
    "wandb_tags": [CANARY],
}
"""Settings that reach outside of a run, each with another value than its default."""


def test_a_setting_of_others_that_reaches_outside_of_the_run_needs_approval(
    run: Path, tmp_path: Path
) -> None:
    (run / "results.json").unlink()
    directory = RunDirectory(run)
    own = directory.read_yaml("settings.yaml")
    for name, value in OUTSIDE_SETTINGS.items():
        value = str(tmp_path / CANARY) if value == CANARY else value
        directory.write_yaml("settings.yaml", own | {name: value})
        with pytest.raises(UntrustedRunError, match=name):
            resume_experiment(run)
        assert not (tmp_path / CANARY).exists()


def test_settings_that_stay_inside_a_run_hold_no_path_or_address() -> None:
    assert set(SETTINGS) - SETTINGS_OF_OTHERS == set(OUTSIDE_SETTINGS)
    for name in SETTINGS_OF_OTHERS - {"run_id"}:
        field = ExperimentSettings.model_fields[name]
        assert is_inside(field.annotation, field.metadata), name


def seen_in_a_fork(work: Callable[[], object], marks: Sequence[str]) -> str:
    """The marked files and addresses that a forked process used, and how the work ended.

    An audit hook cannot be removed, so the tests' own process gets none.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        seen: list[str] = []

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("open", "socket.connect") and any(one in str(arguments) for one in marks):
                seen.append(f"{event} {arguments}")

        sys.addaudithook(note)
        try:
            work()
            seen.append("no error")
        except UntrustedRunError:
            pass
        except BaseException as error:
            seen.append(repr(error))
        finally:
            os.write(writing, "; ".join(seen).encode()[:10_000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        uses = pipe.read().decode()
    os.waitpid(process, 0)
    return uses


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of a service that records connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


ATTACKS = {
    "address of a training service": """
        {trainer: self_hosted_grpo, scenario: arithmetic,
        self_hosted_grpo: {train_service: {backend: http, base_url: ADDRESS}}}""",
    "token over http": """
        {trainer: self_hosted_grpo, scenario: arithmetic, self_hosted_grpo:
        {train_service: {backend: http, base_url: ADDRESS, token_variable: TOKEN_VARIABLE}}}""",
    "token of Tinker": """
        {trainer: remote_api_grpo, scenario: arithmetic, remote_api_grpo:
        {train_service: {backend: tinker, base_url: ADDRESS, token_variable: TOKEN_VARIABLE}}}""",
    "address of a judge": "{ast_chat: {scorer: {_type: judge, base_url: ADDRESS, model: m}}}",
    "key of a judge": """{ast_chat: {scorer:
        {_type: judge, base_url: ADDRESS, model: m, api_key_variable: TOKEN_VARIABLE}}}""",
    "prompts": "{ast_chat: {prompts: {train: FILE}}}",
    "model of the target": "{ast_chat: {target: {language_model: {model: FILE}}}}",
    "labelled responses": "{ast_chat: {evaluation: {labelled_responses: FILE}}}",
    "file out of the scenario": "{ast_chat: {prompts: {train: 'scenario://../../FILE'}}}",
    "settings in the parameter file": "{settings: {progress_path: FILE}}",
}


@pytest.mark.parametrize(
    ("attack", "is_base"),
    # Settings are not taken from a base run.
    [*((name, False) for name in ATTACKS), *((name, True) for name in list(ATTACKS)[:-1])],
)
def test_building_a_run_of_others_reads_and_sends_nothing_outside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: str, attack: str, is_base: bool
) -> None:
    canary = tmp_path / CANARY
    canary.write_text("a secret\n")
    values = {"trainer": "ast_dpo", "scenario": "pocket_chat", "package_version": "0.1.0"}
    text = ATTACKS[attack].replace("TOKEN_VARIABLE", CANARY).replace("ADDRESS", listener)
    values |= yaml.safe_load(text.replace("FILE", str(canary)))
    run = tmp_path / "theirs"
    run.mkdir()
    (run / "hyper_parameters.yaml").write_text(json.dumps(values))
    given: dict[str, Any] = {"parameter_file": run / "hyper_parameters.yaml"}
    if is_base:
        given = {"overrides": [f"base_run={{run: {run}, base_run_type: parameters}}"]}
    monkeypatch.setenv(CANARY, "a secret value")
    marks = (str(canary), f", {listener.rpartition(':')[2]})")
    assert seen_in_a_fork(lambda: prepare_experiment(resolve_experiment(**given)), marks) == ""


def test_a_value_that_the_user_gives_needs_no_further_approval(tmp_path: Path) -> None:
    values = {"trainer": "ast_dpo", "scenario": "pocket_chat", "package_version": "0.1.0"}
    values["ast_chat"] = {"prompts": {"train": str(tmp_path / "train.txt")}}
    (tmp_path / "hyper_parameters.yaml").write_text(json.dumps(values))
    (tmp_path / "train.txt").write_text("hello there .\n" * 20)
    stored = {"parameter_file": tmp_path / "hyper_parameters.yaml"}
    with pytest.raises(UntrustedRunError):
        prepare_experiment(resolve_experiment(**stored))
    approved = f"ast_chat.prompts.train={tmp_path / 'train.txt'}"
    assert prepare_experiment(resolve_experiment(**stored, overrides=[approved]))
    assert prepare_experiment(resolve_experiment(**stored, is_trusted=True))


@pytest.mark.parametrize("place", ["checkpoints", "report.html", "rollouts/x.jsonl"])
def test_links_out_of_a_run_of_others_are_refused_and_others_are_followed(
    cli: CommandLine, run: Path, tmp_path: Path, place: str
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("precious")
    link = run / place
    if link.is_dir():
        link.rename(tmp_path / "moved")
    link.unlink(missing_ok=True)
    link.symlink_to(mine if place == "checkpoints" else mine / "notes.txt")
    assert RunDirectory.open(run), "it is the user's own"
    (run / "environment.json").write_text("{}")
    shown = ("show", "--parameters", "runs/one/hyper_parameters.yaml")
    for command in (*((name, "runs/one") for name in ("report", "evaluate", "resume")), shown):
        assert place in refused(cli(*command))
    assert (mine / "notes.txt").read_text() == "precious"
    link.unlink()
    (run / "latest").symlink_to("model")
    cli.ok("report", "runs/one")


def sweep_in(folder: Path, **values: Any) -> SweepRunner:
    """A sweep of the user, whose plan is stored."""
    runner = SweepRunner(SweepPlan(trainers=["ast_dpo"], seeds=[0], **values), folder)
    runner._prepare_folder()
    return runner


def test_a_sweep_of_others_runs_nothing_without_approval(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CANARY, "a secret value")
    marker, folder = tmp_path / "it_ran", tmp_path / "sweep"
    code = cli.write("theirs.py", f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    sweep_in(tmp_path / "own")
    cli.ok("sweep", str(tmp_path / "own"), "--dry-run")
    sweep_in(folder, plugins=[code], overrides=[f"ast_dpo.beta=${{oc.env:{CANARY}}}"])
    (folder / "sweep.signature").write_text("another key")
    for command in (("sweep", str(folder)), ("sweep", str(folder), "--dry-run")):
        result = cli(*command)
        assert str(folder) in refused(result)
        assert "a secret value" not in result.out + result.err
    assert not marker.exists()
    cli("sweep", str(folder), "--dry-run", "--trust")
    assert marker.exists(), "with the user's approval it is loaded"


def test_a_sweep_writes_through_no_link_of_others(tmp_path: Path) -> None:
    runner = sweep_in(tmp_path / "sweep")
    (tmp_path / "sweep" / "sweep.signature").unlink()
    (tmp_path / "sweep" / "logs").rmdir()
    (tmp_path / "sweep" / "logs").symlink_to(tmp_path)
    with pytest.raises(UntrustedRunError, match="logs"):
        runner._prepare_folder()


def test_the_environment_is_read_in_one_function() -> None:
    readers = []
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        is_exempt = path.relative_to(ROOT).parts[0] in ("trust.py", "_content")
        if is_exempt or not ("environ" in source or "getenv" in source):
            continue
        for node in ast.walk(ast.parse(source)):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            is_read = text.startswith(("os.environ.get(", "os.getenv(")) or (
                text.startswith("os.environ[") and isinstance(node.ctx, ast.Load)
            )
            if is_read or (isinstance(node, ast.Compare) and "in os.environ" in ast.unparse(node)):
                readers.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert readers == []
