"""A real package, installed beside nip_astra, is discovered through its entry point and runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.command_line import CommandLine
from tests.kit.documents import ROOT
from tests.kit.messages import says

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
