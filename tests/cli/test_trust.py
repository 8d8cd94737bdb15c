"""A run from others is read without running its code or reading the user's environment."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from nip_astra import plugins
from nip_astra.errors import UntrustedRunError
from nip_astra.parameters.content import resolve_reference
from nip_astra.resolving.resolution import resolve_experiment
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


def test_the_key_is_private_and_without_a_private_key_nothing_is_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_foreign_runs_are_compared_reported_and_refused_as_targets_without_their_code(
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


def test_of_two_plugins_with_the_same_name_neither_replaces_the_other_and_a_lost_plugin_is_named(
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
def test_a_foreign_run_gets_no_key_from_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_base_run_of_others_runs_no_code_but_plugins_named_by_the_user_do(
    cli: CommandLine, foreign: Path, marker: Path
) -> None:
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


def test_plugins_given_in_a_notebook_are_known_to_a_run_that_names_them(
    foreign: Path, marker: Path, tmp_path: Path
) -> None:
    with plugins_forgotten_after():
        plugins.load_plugin(tmp_path / "theirs" / "evil.py")
        marker.unlink()
        resolve_experiment(parameter_file=foreign / "hyper_parameters.yaml")
    assert not marker.exists()
