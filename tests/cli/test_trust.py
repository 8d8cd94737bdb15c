"""Runs and sweeps of others run no code, and read, send or overwrite nothing without approval."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import nip_astra
from nip_astra import plugins
from nip_astra.errors import UntrustedRunError
from nip_astra.experiment_settings import SETTINGS_OF_OTHERS, ExperimentSettings
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import SubParameters, is_inside
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment, resume_experiment
from nip_astra.sweep.plan import SweepPlan
from nip_astra.sweep.runner import SweepRunner
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trust import StoredSource, is_own, on_behalf_of, read_variable, sign
from tests.kit.command_line import CommandLine, plugins_forgotten_after, refused
from tests.kit.messages import says
from tests.report.runs import report

MARKER = "import pathlib\npathlib.Path({path!r}).touch()\n"
SECRET = "a-value-of-the-environment"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the code of a foreign run creates."""
    return tmp_path / "it_ran"


@pytest.fixture
def code(cli: CommandLine, tmp_path: Path, marker: Path) -> Path:
    """Code of others."""
    (tmp_path / "theirs").mkdir()
    return Path(cli.write("theirs/evil.py", MARKER.format(path=str(marker))))


@pytest.fixture
def foreign(run: Path, code: Path) -> Path:
    """A run of the tiny models whose parameters, written by others, name a plug-in."""
    change(run, plugins=[str(code)])
    return run


def change(run: Path, **values: Any) -> None:
    directory, name = RunDirectory(run), "hyper_parameters.yaml"
    directory.write_yaml(name, directory.read_yaml(name) | values)


def test_a_run_is_own_until_its_parameters_or_its_signature_change(
    run: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, environment = run / "hyper_parameters.yaml", run / "environment.json"
    assert is_own(trained / parameters.name)
    assert is_own(parameters), "a moved run"
    whole = environment.read_text()
    for broken in ("", "[1]", "{}", '{"signature": 3}', '{"signature": "é"}'):
        environment.write_text(broken)
        assert not is_own(parameters)
    environment.write_text(whole)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        assert not is_own(parameters), "there is no key"
        sign(b"anything")
        assert not is_own(parameters), "it is another key"
    assert is_own(parameters)
    change(run, seed=7)
    assert not is_own(parameters)


def test_only_a_private_key_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    signature = sign(b"x")
    key = tmp_path / "nip_astra" / "run_key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert list(key.parent.iterdir()) == [key]
    assert sign(b"x") == signature
    key.chmod(0o644)
    assert sign(b"x") is None
    key.unlink()
    key.symlink_to("/dev/zero")
    assert sign(b"x") is None
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        assert sign(b"x") is None, "no key can be kept there"


OPENERS = {
    "show": ("show", "--parameters", "runs/one/hyper_parameters.yaml"),
    "run": ("run", "--parameters", "runs/one/hyper_parameters.yaml", "--run-id", "two"),
    "schema": ("show", "--yaml", "--parameters", "runs/one/hyper_parameters.yaml"),
    "time": ("time", "rollout", "--repeats", "1", "--parameters", "runs/one/hyper_parameters.yaml"),
    "resume": ("resume", "one"),
    "evaluate": ("evaluate", "runs/one", "--num-episodes", "2", "--probability-episodes", "0"),
    "score": ("score", "runs/one"),
    "export": ("export", "runs/one", "--format", "csv"),
}


@pytest.mark.parametrize("command", OPENERS)
def test_no_command_runs_the_code_of_a_foreign_run(
    cli: CommandLine, foreign: Path, marker: Path, command: str
) -> None:
    if command == "resume":
        (foreign / "results.json").unlink()
    assert says(refused(cli(*OPENERS[command])), "evil.py", "--plugin", "--trust")
    assert not marker.exists()


def name_a_module(cli: CommandLine, run: Path, code: Path) -> None:
    change(run, plugins=["antigravity"])


def name_a_custom_trainer(cli: CommandLine, run: Path, code: Path) -> None:
    shutil.copy(code, run / "x.py")
    change(run, custom_trainer_module_path="x.py", custom_trainer_class_name="X")


def name_a_scenario_with_a_plugin(cli: CommandLine, run: Path, code: Path) -> None:
    folder = shutil.copytree(cli.scenario, cli.folder / "scenario")
    shutil.copy(code, folder / "plugin.py")
    change(run, scenario=str(folder))


def extend_a_file_with_a_plugin(cli: CommandLine, run: Path, code: Path) -> None:
    cli.write("runs/one/more.yaml", f"plugins: [{code}]\nnote: ${{oc.env:A_SECRET}}\n")
    text = (run / "hyper_parameters.yaml").read_text().replace("plugins: []\n", "")
    (run / "hyper_parameters.yaml").write_text(f"extends: more.yaml\n{text}")


def name_a_scorers_function(cli: CommandLine, run: Path, code: Path) -> None:
    code.write_text(f"{code.read_text()}def f(completions): ...\n")
    section = RunDirectory(run).read_yaml("hyper_parameters.yaml")["ast_chat"]
    change(run, ast_chat=section | {"scorer": {"_type": "python", "function": f"{code}:f"}})


@pytest.mark.parametrize(
    ("name_code", "command", "fact"),
    [
        (name_a_module, "show", "antigravity"),
        (name_a_custom_trainer, "show", "x.py"),
        (name_a_scenario_with_a_plugin, "show", "scenario/plugin.py"),
        (extend_a_file_with_a_plugin, "show", "evil.py"),
        (name_a_scorers_function, "score", "evil.py"),
        (name_a_scorers_function, "evaluate", "--trust"),
    ],
)
def test_no_code_that_a_foreign_run_names_is_run(
    cli: CommandLine, run: Path, code: Path, marker: Path, name_code: Any, command: str, fact: str
) -> None:
    name_code(cli, run, code)
    message = refused(cli(*OPENERS[command]))
    assert (fact in message, SECRET in message, marker.exists()) == (True, False, False)


def test_foreign_runs_are_read_without_their_code(
    cli: CommandLine, foreign: Path, trained: Path, marker: Path
) -> None:
    shutil.copytree(foreign, foreign.parent / "two")
    cli.ok("compare", "runs/one", "runs/two")
    cli.ok("report", "runs/one")
    assert "evil.py" in refused(cli("evaluate", str(trained), "--target", "runs/one"))
    assert not marker.exists()


@pytest.mark.parametrize("command", ["show", "time", "export", "score"])
def test_trust_loads_the_code_of_a_run(
    cli: CommandLine, foreign: Path, code: Path, marker: Path, command: str
) -> None:
    cli.ok(*OPENERS[command], "--trust")
    assert marker.exists()
    if command == "show":
        marker.unlink()
        name_a_scenario_with_a_plugin(cli, foreign, code)
        change(foreign, plugins=[])
        cli.ok(*OPENERS[command], "--trust")
        assert marker.exists()


@pytest.mark.parametrize(
    ("command", "options"), [("show", ()), ("export", ()), ("show", ("--trust",))]
)
def test_a_copy_of_the_same_name_that_the_user_gives_replaces_a_runs_plugin(
    cli: CommandLine, foreign: Path, marker: Path, command: str, options: tuple[str, ...]
) -> None:
    other = cli.write("other.py", "READ = True\n")
    copy = cli.write("evil.py", "READ = True\n")
    if not options:
        assert "evil.py" in refused(cli(*OPENERS[command], "--plugin", other))
    cli.ok(*OPENERS[command], "--plugin", copy, *options)
    assert not marker.exists()


def test_plugins_of_one_name_are_kept_apart_and_lost_plugins_are_named(
    cli: CommandLine, foreign: Path, marker: Path, tmp_path: Path
) -> None:
    (tmp_path / "also").mkdir()
    first, theirs = tmp_path / "also" / "evil.py", tmp_path / "theirs" / "evil.py"
    first.write_text("READ = True\n")
    change(foreign, plugins=[str(first), str(theirs)])
    cli.ok(*OPENERS["show"], "--plugin", str(first), "--trust")
    assert marker.exists()
    plugins._LOADED.clear()
    theirs.unlink()
    assert "--plugin" in refused(cli(*OPENERS["show"], "--trust"))


def test_a_scorer_that_the_user_names_rates_a_foreign_run(cli: CommandLine, run: Path) -> None:
    change(run, seed=7)
    path = cli.write("rate.py", "def f(completions):\n    return [0.25 for _ in completions]\n")
    file = cli.write("mine.yaml", f"_type: python\nfunction: {path}:f\n")
    cli.ok("score", "runs/one", "--scorer", file)


@pytest.mark.parametrize("name", ["MY_KEY", "TINKER_API_KEY"])
def test_a_foreign_run_gets_no_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    with on_behalf_of(StoredSource("their run", is_trusted=False)):
        with pytest.raises(UntrustedRunError, match=name):
            read_variable(name)
        with on_behalf_of(None):
            read_variable(name)
    with on_behalf_of(StoredSource("my run", is_trusted=True)):
        read_variable(name)


def test_the_report_of_a_foreign_run_shows_no_variable_of_the_environment(run: Path) -> None:
    for name in ("hyper_parameters.yaml", "settings.yaml"):
        (run / name).write_text(f"note: ${{oc.env:A_SECRET}}\n{(run / name).read_text()}")
    page = report(run)
    assert "${oc.env:A_SECRET}" in page.text
    signature = json.loads((run / "environment.json").read_text())["signature"]
    assert len(signature) == 64
    assert not {one for one in (SECRET, signature) if one in page.source}


def test_a_stored_run_and_its_scenario_resolve_no_reference(cli: CommandLine, run: Path) -> None:
    folder = shutil.copytree(cli.scenario, cli.folder / "theirs")
    with (folder / "scenario.yaml").open("a") as file:
        file.write("note: ${oc.env:A_SECRET}\n")
    for values, fact in (
        ({"custom_trainer_class_name": "${oc.env:A_SECRET}"}, "custom_trainer_class_name"),
        ({"scenario": str(folder), "custom_trainer_class_name": None}, "${oc.env:A_SECRET}"),
    ):
        stored = RunDirectory(run).read_yaml("hyper_parameters.yaml") | values
        # Not through the run directory, which writes a reference as text.
        (run / "hyper_parameters.yaml").write_text(yaml.safe_dump(stored))
        result = cli(*OPENERS["show"])
        assert fact in refused(result)
        assert SECRET not in result.out + result.err


def test_a_file_of_the_users_own_may_refer_to_the_environment_and_name_plugins(
    cli: CommandLine, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SEED", "7")
    code = cli.write("mine.py", MARKER.format(path=str(marker)))
    text = f"trainer: ast_dpo\nplugins: [{code}]\nseed: ${{oc.decode:${{oc.env:MY_SEED}}}}\n"
    file = cli.write("mine.yaml", text)
    assert resolve_experiment(parameter_file=file).hyper_params.seed == 7
    assert marker.exists()


def test_a_base_run_of_others_runs_no_code(cli: CommandLine, foreign: Path, marker: Path) -> None:
    own = cli.write("own.py", "OWN = True\n")
    base = "base_run: {run: runs/one, base_run_type: parameters}"
    mine = cli.write("mine.yaml", f"plugins: [{own}]\n{base}\n")
    with pytest.raises(UntrustedRunError, match=r"evil\.py .* base run one"):
        resolve_experiment(parameter_file=mine)
    assert not marker.exists()
    assert own in plugins._LOADED
    assert resolve_experiment(parameter_file=mine, is_trusted=True).hyper_params.trainer
    assert marker.exists()


def test_references_to_a_package_import_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: Path
) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text(MARKER.format(path=str(marker)))
    for name in ("__init__.py", "a.txt"):
        (inner / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_reference("package://outer.inner/a.txt", None) == inner / "a.txt"
    assert not marker.exists()


def test_plugins_of_a_notebook_are_known(foreign: Path, marker: Path, tmp_path: Path) -> None:
    with plugins_forgotten_after():
        plugins.load_plugin(tmp_path / "theirs" / "evil.py")
        marker.unlink()
        resolve_experiment(parameter_file=foreign / "hyper_parameters.yaml")
    assert not marker.exists()


ROOT = Path(nip_astra.__file__).parent
CANARY = "NIP_ASTRA_CANARY"
# Parameters that name files, models, addresses, variables, or options of foreign code. A parameter
# that is missing here and is marked as harmless in the code needs a second look.
OUTSIDE = """
AdvantageParameters.advantage_options AgentParameters.checkpoint_version
AgentParameters.load_from_run AstSftTrainer.Parameters.probes BaseRunParameters.run
BatchParameters.trainer_values TrajectoryParameters.trainer_values
ClassifierScorer.Parameters.model CodeValidationScenario.Parameters.problems
ConversationAgentParameters.template_options
CommonPpoParameters.loss_options GymnasiumTask.Parameters.arguments
OpenEnvTask.Parameters.arguments ToolParameters.options
DatasetTask.Parameters.dev DatasetTask.Parameters.test
DatasetTask.Parameters.train DetoxifyScorer.Parameters.checkpoint
DetoxifyScorer.Parameters.config_path EmbedderParameters.model
EvaluationParameters.labelled_responses FineTuningParameters.api_key_variable
FineTuningParameters.base_url GraphPairParameters.file HuggingFaceImageModel.Parameters.model
HuggingFaceLanguageModel.Parameters.base_model HuggingFaceLanguageModel.Parameters.model
HttpChatModel.Parameters.body HttpChatModel.Parameters.headers
HttpChatModel.Parameters.secrets HttpChatModel.Parameters.url
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


def test_settings_of_others_that_reach_outside_need_approval(run: Path, tmp_path: Path) -> None:
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
    fields = {n: one for n, one in ExperimentSettings.model_fields.items() if not one.exclude}
    ours = {"runs_dir", "process_store"} | SETTINGS_OF_OTHERS
    assert set(fields) - ours == set(OUTSIDE_SETTINGS)
    for name in SETTINGS_OF_OTHERS - {"run_id"}:
        assert is_inside(fields[name].annotation, fields[name].metadata), name


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
        except BaseException as error:
            seen += [] if isinstance(error, UntrustedRunError) else [repr(error)]
        finally:
            os.write(writing, "; ".join(seen).encode()[:10_000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        uses = pipe.read()
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
def test_links_out_of_a_run_are_refused(
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
    runner._make_folder()
    runner._write_plan()
    return runner


def test_a_sweep_of_others_needs_approval(
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
        runner._make_folder()


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
