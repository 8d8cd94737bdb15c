"""Run the slow tests of optional packages, each package in its own virtual environment.

    python tests/kit/third_party.py mlflow trackio
    python tests/kit/third_party.py --list

Environments are made in `.third_party/<name>` and kept; delete the folder to start over.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".third_party"


class Package(NamedTuple):
    """Extras of nip_astra, the tests that need the package, and further packages."""

    extras: tuple[str, ...]
    tests: tuple[str, ...]
    others: tuple[str, ...] = ()


def client(word: str, *packages: str) -> Package:
    """A client of the text service, with its test."""
    tests = ("tests/serve/test_clients.py", "-k", word)
    return Package(("serve", "structured"), tests, packages)


PACKAGES = {
    "mlflow": Package(("mlflow",), ("tests/tracking/test_mirrors.py", "-k", "mlflow")),
    "trackio": Package(("trackio",), ("tests/tracking/test_mirrors.py", "-k", "trackio")),
    "tensorboard": Package(
        ("tensorboard",), ("tests/tracking/test_mirrors.py", "-k", "tensorboard")
    ),
    "gymnasium": Package(("gymnasium",), ("tests/scenario_base/tasks/test_environments.py",)),
    "textarena": Package(
        ("textarena",), ("tests/scenario_base/tasks/test_environments.py", "-k", "textarena")
    ),
    "openenv": Package(("openenv",), ("tests/scenario_base/tasks/test_environments.py",)),
    "verifiers": Package(
        ("verifiers", "openenv", "serve", "structured"),
        (
            "tests/scenario_base/tasks/test_verifiers.py",
            "tests/scenario_base/tasks/test_environments.py",
            "tests/serve/test_text_routes.py",
            "tests/serve/test_clients.py",
        ),
    ),
    "inspect_ai": client("inspect", "inspect_ai"),
    "langchain-openai": client("langchain", "langchain-openai"),
    "lm_eval": client("lm_eval", "lm-eval[api]"),
    "pyrit": client("pyrit", "pyrit"),
    "garak": client("garak", "garak"),
}


def run(name: str) -> int:
    """Build a package's environment if it does not exist, and run its tests."""
    package, folder = PACKAGES[name], FOLDER / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    extras = ",".join(("test", *package.extras))
    wanted = ["-e", f"{ROOT}[{extras}]", *package.others]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    versions = [python, "-m", "pip", "list", "--format=freeze"]
    found = subprocess.run(versions, check=True, capture_output=True, text=True).stdout
    print(*(one for one in found.split() if one.lower().startswith(f"{name}==")))
    arguments = ["-m", "pytest", "-n0", "-m", "slow or not slow", "-rs", *package.tests]
    return subprocess.run([python, *arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PACKAGES, []], help="Packages; all of them.")
    parser.add_argument("--list", action="store_true", help="List the packages.")
    given = parser.parse_args()
    if given.list:
        print(*PACKAGES, sep="\n")
        sys.exit()
    sys.exit(max(run(name) for name in given.names or PACKAGES))
