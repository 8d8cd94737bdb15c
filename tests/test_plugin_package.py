"""A real package, installed beside nip_astra, is discovered through its entry point and runs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.command_line import CommandLine
from tests.kit.documents import ROOT

PACKAGE = ROOT / "tests" / "plugin_package"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package was installed, without network access."""
    target = tmp_path_factory.mktemp("site")
    if importlib.util.find_spec("hatchling") is None:
        _install_by_hand(target)
        return target
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


def _install_by_hand(target: Path) -> None:
    """Write an installer's metadata, as far as importlib.metadata reads it."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    shutil.copy(PACKAGE / "my_trainer.py", target)
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_an_installed_trainer_is_listed_with_its_package_and_runs_by_its_name_alone(
    site: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    listed = cli("list", "trainers")
    (line,) = (line for line in listed.out.splitlines() if line.startswith("my_trainer"))
    assert "entry point of my-trainer" in line
    assert "Maximise the likelihood of probes" in line
    ran = cli.ok(
        *("--trainer", "my_trainer", "--scenario", str(cli.scenario), "--test-run"),
        *("--run-id", "installed", "--set", "my_trainer.min_reward_range=0"),
    )
    assert "held-out episodes before and after training" in ran.out
    assert (cli.folder / "runs" / "installed" / "results.json").is_file()
    metrics = (cli.folder / "runs" / "installed" / "metrics.jsonl").read_text()
    assert '"log_likelihood"' in metrics


def test_the_package_needs_no_line_in_the_project(site: Path) -> None:
    (info,) = site.glob("*.dist-info")
    assert "[nip_astra.trainers]" in (info / "entry_points.txt").read_text()
    sources = [path.read_text() for path in (ROOT / "nip_astra").rglob("*.py")]
    assert not any('"my_trainer"' in source for source in sources)
