"""The environment of a run, and its changes when the run is resumed."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from nip_astra.errors import RunDirectoryError
from nip_astra.plugins import loaded_plugins
from nip_astra.tracking.run_directory import ENVIRONMENT, RunDirectory

logger = logging.getLogger(__name__)

PACKAGES = ("nip_astra", "torch", "transformers", "tensordict", "peft", "wandb")
_CODE_DIR = Path(__file__).resolve().parent
_GIT_TIMEOUT_SECONDS = 10.0


def describe_environment() -> dict[str, Any]:
    """Return versions, platform, git state of the code and plug-ins, without secrets.

    Packages are not imported; the thread count is torch's if torch is imported.
    """
    torch = sys.modules.get("torch")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "num_cpus": os.cpu_count(),
        "num_threads": None if torch is None else torch.get_num_threads(),
        "packages": {package: version_of(package) for package in PACKAGES},
        "git": _git_state(),
        "plugins": [
            {"spec": plugin.spec, "module": plugin.module_name, "sha256": plugin.sha256}
            for plugin in loaded_plugins()
        ],
    }


def processor_name() -> str:
    """Return the processor's model name, or its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def changes_of_rounding(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two environments that can change last digits, as sentences."""
    old, new = (
        {name: environment.get(name) for name in ("processor", "device", "layers")}
        | {"torch": environment.get("packages", {}).get("torch")}
        for environment in (before, now)
    )
    return [
        f"{name} was {value!r} and is {new[name]!r}"
        for name, value in old.items()
        if value is not None and value != new[name]
    ]


def note_computation(directory: RunDirectory, computed: dict[str, str]) -> None:
    """Record the `device` and the `layers` implementation; warn of changes since the start."""
    try:
        before = directory.read_json(ENVIRONMENT)
    except RunDirectoryError as error:
        # Resuming does not need it.
        logger.warning("the environment of the run's start cannot be read: %s", error)
        return
    now = {"processor": processor_name(), "packages": {"torch": version_of("torch")}} | computed
    changes = changes_of_rounding(before, now)
    if changes:
        logger.warning(
            "the run resumes in another environment, so last digits may differ from those of an "
            "uninterrupted run: %s",
            "; ".join(changes),
        )
    # Values of the start stay; runs of older versions have none.
    directory.write_json(ENVIRONMENT, computed | before)


def warn_of_changed_plugins(directory: RunDirectory) -> None:
    """Warn of plug-ins that changed since the run started."""
    try:
        recorded = directory.read_json(ENVIRONMENT)["plugins"]
        before = {plugin["spec"]: plugin["sha256"] for plugin in recorded}
        by_name = {Path(spec).name: digest for spec, digest in before.items()}
    except (RunDirectoryError, KeyError, TypeError) as error:
        # Resuming needs no more of that file than this.
        logger.warning("the plug-ins of the run's start cannot be read: %s", error)
        return
    for plugin in loaded_plugins():
        # A copy elsewhere keeps the name of the original.
        digest = before.get(plugin.spec, by_name.get(Path(plugin.spec).name, plugin.sha256))
        if digest != plugin.sha256:
            logger.warning(
                "the plug-in %s has changed since the run started; results may differ from those "
                "of an uninterrupted run",
                plugin.spec,
            )


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return commit and cleanness of the repository with this code, if there is one.

    A repository around an installed package, for instance around its virtual environment, is not
    the code's: git does not track the package there.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    if commit is None or status is None:
        return None
    return {"commit": commit, "is_dirty": bool(status)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=_CODE_DIR,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
