"""Every file of the repository is of a kind that is listed here."""

from __future__ import annotations

import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.kit.documents import ROOT

KINDS = (
    # Of the project as a whole.
    *(".ci/*", ".gitignore", ".pre-commit-config.yaml", "CITATION.cff", "LICENSE"),
    *("*.md", "mkdocs.yml", "pyproject.toml", "run.py"),
    # The package: source, the templates of its report, and kernels that are compiled on first use.
    *("nip_astra/*.py", "nip_astra/py.typed"),
    *(f"nip_astra/report/templates/*.{suffix}" for suffix in ("jinja", "css", "js")),
    *(f"nip_astra/scenarios/graphs/native/*.{suffix}" for suffix in ("c", "h")),
    # Content that runs read.
    *("parameters/*.yaml", "parameters/*.json"),
    *(f"scenarios/*.{suffix}" for suffix in ("yaml", "json", "jsonl", "jinja", "py")),
    *("scenarios/*.safetensors", "scenarios/*/LICENSE"),
    # What developers run and read.
    *("benchmarks/*.py", "doc/*.py", "doc/*.png"),
    *(f"tests/*.{suffix}" for suffix in ("py", "json", "yaml", "txt", "mjs")),
    "tests/plugin_package/pyproject.toml",
)
"""Patterns of paths in which `*` covers folders too."""


def list_files(root: Path, scratch: Path) -> list[str]:
    """Return the files that git tracks; in a copy without its history, those it does not ignore."""
    listing = ["ls-files", "-z"]
    if not (root / ".git").exists():
        repository = scratch / "repository"
        subprocess.run(["git", "init", "-q", "--bare", repository], check=True)
        options = [f"--git-dir={repository}", f"--work-tree={root}", "-c", "core.bare=false"]
        listing = [*options, *listing, "--others", "--exclude-standard"]
    output = subprocess.run(["git", *listing], cwd=root, check=True, capture_output=True).stdout
    return [path for path in output.decode().split("\0") if path]


def list_unknown(paths: list[str]) -> list[str]:
    return [path for path in paths if not any(fnmatchcase(path, kind) for kind in KINDS)]


@pytest.mark.skipif(shutil.which("git") is None, reason="git lists the files")
def test_every_file_is_of_a_listed_kind(tmp_path: Path) -> None:
    paths = list_files(ROOT, tmp_path)
    assert "pyproject.toml" in paths
    assert list_unknown(paths) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a distribution leaves kinds out")
def test_every_listed_kind_has_files(tmp_path: Path) -> None:
    paths = list_files(ROOT, tmp_path)
    unused = [kind for kind in KINDS if not any(fnmatchcase(path, kind) for path in paths)]
    assert unused == [], "a kind without files covers what nobody has looked at"


@pytest.mark.parametrize(
    "path",
    [".coverage", "core", "nip_astra/a.so", "tests/data.bin", "runs/a/log.txt", "notes.txt"],
)
def test_a_file_of_another_kind_is_refused(path: str) -> None:
    assert list_unknown([path, "run.py"]) == [path]


@pytest.mark.skipif(shutil.which("git") is None, reason="git lists the files")
def test_a_copy_without_history_is_listed_too(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    (root / ".gitignore").write_text("runs/\n")
    (root / "runs").mkdir()
    for name in ("runs/log.txt", "a.py", "core"):
        (root / name).write_text("")
    assert sorted(list_files(root, tmp_path)) == [".gitignore", "a.py", "core"]
