"""Plug-ins are loaded once, and a failed one leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra import plugins
from nip_astra.errors import PluginError
from nip_astra.plugins import load_plugin, loaded_plugins, module_of
from nip_astra.registry import ALL_REGISTRIES, Registry
from tests.kit.command_line import CommandLine
from tests.kit.documents import ROOT
from tests.kit.messages import says
from tests.kit.registries import registering, registry_of_tools, write


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Any]]:
    """A registry of tools in an empty folder, without loaded plug-ins."""
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.chdir(tmp_path)
    with registry_of_tools(tmp_path / "site", monkeypatch) as registry:
        yield registry


def is_imported(path: Path) -> bool:
    return any(getattr(module, "__file__", None) == str(path) for module in sys.modules.values())


def failure_of(spec: str | Path) -> str:
    with pytest.raises(PluginError) as caught:
        load_plugin(spec)
    return str(caught.value)


def test_a_file_registers_its_names(tools: Registry[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", registering("mine"))
    plugin = load_plugin(path)
    assert tools.get("mine") is module_of(plugin).Tool
    assert tools.origin("mine") == f"{path}:2"
    assert (plugin.spec, plugin.path) == (str(path), path)
    assert len(plugin.sha256 or "") == 64
    (tmp_path / "folder").mkdir()
    assert load_plugin("folder/../mine.py") is load_plugin("mine.py") is plugin
    assert loaded_plugins() == [plugin]
    # A file of the same name in another folder is another plug-in.
    write(tmp_path / "there" / "mine.py", registering("there"))
    there = load_plugin("mine.py", relative_to=tmp_path / "there")
    assert tools.names() == ["hammer", "mine", "saw", "there"]
    assert module_of(there) is not module_of(plugin)
    second = write(tmp_path / "second.py", registering("mine"))
    assert says(failure_of(second), "line 2", f"{second}:2", f"{path}:2")
    path.write_text("x = 2\n")
    assert says(failure_of(path), path, "has changed", "new process")
    # A module is loaded by its name.
    write(tmp_path / "site" / "kit" / "__init__.py", "")
    write(tmp_path / "site" / "kit" / "mine.py", registering("of_kit"))
    module = load_plugin("kit.mine")
    assert (module.spec, module.path, module.sha256) == ("kit.mine", None, None)
    assert tools.get("of_kit") is sys.modules["kit.mine"].Tool
    assert load_plugin("kit.mine") is module


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        *((spec, ["neither", ".py"]) for spec in ("", "folder/mine", "my-module", "a..b")),
        ("nope.py", ["/nope.py", "No such file"]),
        ("no_such_module_here", ["ModuleNotFoundError", "no_such_module_here"]),
        ("kit_folder", ["__init__.py", "/site/kit_folder'"]),
    ],
)
def test_a_plugin_that_does_not_exist_is_refused(
    tools: Registry[Any], tmp_path: Path, spec: str, facts: list[str]
) -> None:
    write(tmp_path / "site" / "kit_folder" / "mine.py", registering("mine"))
    assert says(failure_of(spec), spec, *facts)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (registering("mine") + "\n\n1 / 0\n", ["line 7", "ZeroDivisionError"]),
        ("x = 1\ndef f(:\n", ["line 2", "SyntaxError"]),
        ("import neighbour\n", ["neighbour.py:1", "SyntaxError"]),
        ("import sys\nsys.exit(0)\n", ["line 2", "sys.exit"]),
        ("import beside\n", ["ModuleNotFoundError", "from .beside import"]),
        ("import nexrl.trainer\n", ["ModuleNotFoundError", "from nip_astra.nexrl"]),
        ("from nip_astra.registry import Registry\nRegistry('of_mine')\n1 / 0\n", []),
    ],
)
def test_a_failing_file_leaves_nothing_and_reports_line_and_cause(
    tools: Registry[Any], tmp_path: Path, text: str, facts: list[str]
) -> None:
    write(tmp_path / "site" / "neighbour.py", "def f(:\n")
    write(tmp_path / "beside.py", "x = 1\n")
    path = write(tmp_path / "mine.py", text)
    assert says(failure_of(path), path, *facts)
    assert tools.names() == ["hammer", "saw"]
    assert "of_mine" not in ALL_REGISTRIES
    assert not is_imported(path)
    assert loaded_plugins() == []
    path.write_text(registering("mine"))
    load_plugin(path)
    assert tools.names() == ["hammer", "mine", "saw"]


def test_modules_that_a_failed_plugin_imported_are_as_before(
    tools: Registry[Any], tmp_path: Path
) -> None:
    write(tmp_path / "site" / "neighbour.py", "x = 1\n")
    write(tmp_path / "site" / "kit.py", registering("helper"))
    write(tmp_path / "inner.py", registering("inner"))
    text = (
        "import toolbox.hammer, neighbour, kit\nfrom nip_astra.plugins import load_plugin\n"
        "load_plugin('inner.py')\nraise {}\n"
    )
    path = write(tmp_path / "mine.py", text.format("OSError"))
    failure_of(path)
    # Built-ins and libraries stay imported; what registered itself and inner plug-ins do not.
    assert tools.get("hammer") is sys.modules["toolbox.hammer"].Tool
    assert "neighbour" in sys.modules
    assert tools.names() == ["hammer", "saw"]
    assert loaded_plugins() == []
    # An interrupt goes through and leaves nothing.
    path.write_text(text.format("KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        load_plugin(path)
    assert tools.names() == ["hammer", "saw"]
    assert not is_imported(path)
    path.write_text("import kit\n")
    load_plugin(path)
    load_plugin("inner.py")
    assert tools.names() == ["hammer", "helper", "inner", "saw"]


def test_a_plugin_imports_the_files_beside_it(tools: Registry[Any], tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "x = 1\n")
    plugin = load_plugin(write(tmp_path / "mine.py", "from .beside import x\n"))
    assert module_of(plugin).x == 1
    before = set(sys.modules)
    failure_of(write(tmp_path / "other.py", "from .beside import x\n1 / 0\n"))
    assert set(sys.modules) == before


# ---- an installed package

PACKAGE = ROOT / "tests" / "plugin_package"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed, without network access."""
    target = tmp_path_factory.mktemp("site")
    pytest.importorskip("hatchling")
    # Built from a copy, so that the working tree stays clean.
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("source") / "package")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, "--target", target, source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_an_installed_trainer_is_listed_with_its_package_and_runs_by_its_name_alone(
    site: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    listed = cli("list", "trainers").out.splitlines()
    (line,) = (line for line in listed if line.startswith("my_trainer"))
    assert says(line, "entry point of my-trainer", "Maximise the likelihood of probes")
    ran = cli.ok(
        *("--trainer", "my_trainer", "--scenario", str(cli.scenario), "--test-run"),
        *("--run-id", "installed", "--set", "my_trainer.min_reward_range=0"),
    )
    assert "held-out episodes before and after training" in ran.out
    run = cli.folder / "runs" / "installed"
    assert (run / "results.json").is_file()
    assert '"log_likelihood"' in (run / "metrics.jsonl").read_text()
    # It needs no line in the project.
    sources = [path.read_text() for path in (ROOT / "nip_astra").rglob("*.py")]
    assert not any('"my_trainer"' in source for source in sources)
