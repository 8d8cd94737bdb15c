"""Checks of an installation on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml
from rich.text import Text

import nip_astra
from nip_astra.errors import NipAstraError, ParameterError, counted, reason_of
from nip_astra.evaluation.run_results import frame_of
from nip_astra.evaluation.tables import Printable, plain_table
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.content import find_scenario, resolve_reference, scenario_names
from nip_astra.plugins import load_plugin
from nip_astra.tracking.environment import version_of
from nip_astra.tracking.wandb_runs import has_credentials
from nip_astra.trust import read_variable

if TYPE_CHECKING:
    import pandas as pd

WARNING_SPACE_GIB = 2.0
"""Free space for runs below which there is a warning; below `MIN_SPACE_GIB` it is an error."""
MIN_SPACE_GIB = 0.1
HOSTS = (("Hugging Face hub", "huggingface.co"), ("Weights & Biases", "api.wandb.ai"))
TIMEOUT_SECONDS = 3.0
SERVICE_PACKAGES = ("fastapi", "uvicorn", "python-multipart")
_GIB = 1024**3


class Status(StrEnum):
    """The result of a check."""

    WORKS = "works"
    ABSENT = "absent"
    """Optional, and not installed."""
    WARNING = "warning"
    """Works with restrictions."""
    BROKEN = "broken"
    """Required, but does not work."""
    INFO = "info"
    """Information only."""


@dataclass(frozen=True)
class Finding:
    """One line of a table."""

    area: str
    name: str
    status: Status
    text: str


Findings = Iterator[Finding]

STYLES = {
    Status.WORKS: "green",
    Status.ABSENT: "dim",
    Status.WARNING: "yellow",
    Status.BROKEN: "bold red",
    Status.INFO: "",
}


@dataclass(frozen=True)
class Diagnosis(Printable):
    """The findings of `doctor`."""

    findings: list[Finding]

    @property
    def is_sound(self) -> bool:
        """Whether all required parts work."""
        return not any(finding.status is Status.BROKEN for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        findings = [asdict(finding) for finding in self.findings]
        return {"is_sound": self.is_sound, "findings": findings}

    def to_frame(self) -> pd.DataFrame:
        """Return a row per finding."""
        return frame_of(self.to_dict()["findings"])

    def tables(self) -> list[Any]:
        """Return a table per area and a summary, for a terminal."""
        blocks: list[Any] = []
        # In order of first occurrence.
        areas = dict.fromkeys(finding.area for finding in self.findings)
        for area in areas:
            table = plain_table(area, "", "", "")
            table.show_header = False
            for finding in self.findings:
                if finding.area != area:
                    continue
                status = "" if finding.status is Status.INFO else str(finding.status)
                style = STYLES[finding.status]
                table.add_row(Text(finding.name), Text(status, style), Text(finding.text))
            blocks += [table, ""]
        if not self.is_sound:
            summary = "A required part does not work; see the lines marked broken."
        elif any(finding.status is Status.WARNING for finding in self.findings):
            summary = "All required parts work; see the lines marked warning."
        else:
            summary = "All required parts work."
        return [*blocks, summary]


def doctor(
    runs_dir: str | Path = "runs", *, plugins: Sequence[str] = (), online: bool = False
) -> Diagnosis:
    """Check the installation, a folder for runs, and the scorers of plug-ins.

    Connections to hosts are opened only with `online`.
    """
    for spec in plugins:
        load_plugin(spec)
    findings = examine(Path(runs_dir), is_online=online)
    return Diagnosis(findings + (reach_hosts() if online else []))


def examine(runs_dir: Path, *, is_online: bool = False) -> list[Finding]:
    """Run every check that needs no connection; report failing checks, too."""
    checks: dict[str, Callable[[], Findings]] = {
        "system": _system,
        "packages": _packages,
        "extras": _extras,
        "devices": _devices,
        "scorers": _scorers,
        "models": _models,
        "network": lambda: _network(is_online),
        "tracking": _tracking,
        "runs": lambda: _runs(runs_dir),
        "service": _service,
        "sandbox": _sandbox,
    }
    findings: list[Finding] = []
    # Messages of libraries, for instance about a download, do not apply here.
    with closed_network(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        for area, check in checks.items():
            try:
                findings += check()
            except Exception as error:
                # Reported, so that the other checks run.
                text = f"could not be checked: {type(error).__name__}: {reason_of(error)}"
                findings.append(Finding(area, area, Status.BROKEN, text))
    return findings


@contextmanager
def closed_network() -> Iterator[None]:
    """Refuse every connection and address lookup within the block."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("the doctor opens no connection")

    # mypy refuses assignments to methods of a class.
    socket_class: Any = socket.socket
    connect, connect_ex = socket_class.connect, socket_class.connect_ex
    getaddrinfo = socket.getaddrinfo
    socket_class.connect = socket_class.connect_ex = socket.getaddrinfo = refuse
    try:
        yield
    finally:
        socket_class.connect, socket_class.connect_ex = connect, connect_ex
        socket.getaddrinfo = getaddrinfo


def _system() -> Findings:
    yield Finding("system", "nip_astra", Status.INFO, nip_astra.__version__)
    yield Finding("system", "Python", Status.INFO, f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", "platform", Status.INFO, platform.platform())
    # macOS and Windows cannot restrict a process to some processors.
    get_affinity = getattr(os, "sched_getaffinity", None)
    num_usable = os.cpu_count() if get_affinity is None else len(get_affinity(0))
    yield Finding("system", "processors", Status.INFO, f"{num_usable} of {os.cpu_count()} usable")


def _packages() -> Findings:
    for requirement in _requirements():
        name, marker = requirement.name, requirement.marker
        is_required = marker is None or marker.evaluate({"extra": ""})
        if not is_required:
            continue
        version = version_of(name)
        if version is None:
            text = f"is needed: pip install {name}"
            yield Finding("packages", name, Status.BROKEN, text)
        elif not requirement.specifier.contains(version, prereleases=True):
            text = f"{version}, but {requirement.specifier} was tested"
            yield Finding("packages", name, Status.WARNING, text)
        else:
            yield Finding("packages", name, Status.WORKS, version)


def _extras() -> Findings:
    extras: dict[str, dict[str, str | None]] = {}
    for requirement in _requirements():
        marker = str(requirement.marker or "")
        if "extra ==" in marker:
            extra = marker.rpartition("extra ==")[2].strip(" \"'")
            extras.setdefault(extra, {})[requirement.name] = version_of(requirement.name)
    for extra, versions in extras.items():
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            text = f"without {', '.join(missing)}: pip install 'nip_astra[{extra}]'"
            yield Finding("extras", extra, Status.ABSENT, text)
        else:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Finding("extras", extra, Status.WORKS, text)


def _devices() -> Findings:
    import torch

    from nip_astra.scenarios.graphs.native_layers import why_absent

    threads = counted(torch.get_num_threads(), "thread")
    yield _check_device("cpu", f"{threads} unless a run is small or sets another number")
    reason = why_absent()
    if reason:
        text = f"layers of graphs are left to torch, which takes 1.6 times as long: {reason}"
        yield Finding("devices", "compiler", Status.ABSENT, text)
    else:
        text = "layers of graphs are compiled for this processor"
        yield Finding("devices", "compiler", Status.WORKS, text)
    if not torch.cuda.is_available():
        yield Finding("devices", "cuda", Status.ABSENT, "torch finds no GPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory_gib = properties.total_memory / _GIB
        yield _check_device(f"cuda:{index}", f"{properties.name}, {memory_gib:.0f} GiB")


def _check_device(device: str, description: str) -> Finding:
    """Multiply two small matrices on a device, and check the result."""
    import torch

    try:
        ones = torch.ones(64, 64, device=device)
        is_correct = bool((ones @ ones == 64.0).all())
    except RuntimeError as error:
        text = f"{description}; {reason_of(error)}"
        return Finding("devices", device, Status.BROKEN, text)
    if is_correct:
        return Finding("devices", device, Status.WORKS, description)
    return Finding("devices", device, Status.BROKEN, f"{description}; computes wrongly")


def _scorers() -> Findings:
    import torch

    from nip_astra.scorers.base import SCORERS, build_scorer

    for name in SCORERS.names():
        try:
            parameters = SCORERS.get(name).Parameters.from_dict({})
            build_scorer(parameters, device=torch.device("cpu"), scenario_dir=None)
        except ParameterError as error:
            paths = ", ".join(fault.path for fault in error.faults)
            yield Finding("scorers", name, Status.INFO, f"can be imported; needs {paths}")
        except NipAstraError as error:
            yield Finding("scorers", name, Status.ABSENT, reason_of(error))
        except Exception as error:
            # A plug-in's scorer may raise anything.
            text = f"cannot be built: {type(error).__name__}: {reason_of(error)}"
            yield Finding("scorers", name, Status.WARNING, text)
        else:
            yield Finding("scorers", name, Status.WORKS, "loads with its default parameters")


def _models() -> Findings:
    for scenario in scenario_names():
        folder = find_scenario(scenario)
        values = yaml.safe_load((folder / "scenario.yaml").read_text(encoding="utf-8"))
        references = sorted(set(_find_models(values)))
        missing = [reference for reference in references if not _is_local(reference, folder)]
        if missing:
            yield Finding("models", scenario, Status.ABSENT, f"not here: {', '.join(missing)}")
        elif references:
            yield Finding("models", scenario, Status.WORKS, ", ".join(references))
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    names = sorted(path.name.removeprefix("models--") for path in cache.glob("models--*"))
    cached = ", ".join(name.replace("--", "/") for name in names) or "no model"
    yield Finding("models", "Hugging Face cache", Status.INFO, f"{cache}: {cached}")


def _find_models(values: Any) -> Iterator[str]:
    """Yield every model in a scenario's nested parameters."""
    if isinstance(values, dict):
        if isinstance(values.get("model"), str):
            yield values["model"]
        values = list(values.values())
    if isinstance(values, list):
        for nested in values:
            yield from _find_models(nested)


def _is_local(reference: str, folder: Path) -> bool:
    """Return whether a model is in a folder of this machine or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    try:
        model = resolve_reference(reference, folder)
    except NipAstraError:
        return False
    if isinstance(model, Path):
        return model.exists()
    try:
        config_path = try_to_load_from_cache(model, "config.json")
    except ValueError:
        # It cannot be the name of a repository.
        return False
    return isinstance(config_path, str)


def _network(is_online: bool) -> Findings:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE")
    value_by_name = {name: read_variable(name) for name in names}
    settings = [f"{name}={value}" for name, value in value_by_name.items() if value is not None]
    is_offline = (value_by_name["HF_HUB_OFFLINE"] or "0").upper() in ("1", "ON", "YES", "TRUE")
    hub = "serves no models" if is_offline else "serves models that are not on this machine"
    text = f"the hub {hub}; {', '.join(settings) or 'no variable changes it'}"
    yield Finding("network", "offline", Status.INFO, text)
    if not is_online:
        text = "not checked without --online"
        yield Finding("network", "hosts", Status.INFO, text)


def reach_hosts() -> list[Finding]:
    """Open and close a connection to each host that a run may use."""
    findings = []
    for name, host in HOSTS:
        try:
            socket.create_connection((host, 443), timeout=TIMEOUT_SECONDS).close()
        except OSError as error:
            text = f"{host} cannot be reached: {reason_of(error)}"
            findings.append(Finding("network", name, Status.ABSENT, text))
        else:
            findings.append(Finding("network", name, Status.WORKS, f"{host} can be reached"))
    return findings


def _tracking() -> Findings:
    default = ExperimentSettings.model_fields["wandb"].default
    mode = read_variable("WANDB_MODE")
    text = f"{default} unless a run sets another"
    if mode:
        text += f"; WANDB_MODE={mode}"
    yield Finding("tracking", "W&B mode", Status.INFO, text)
    key = "has a key" if has_credentials() else "has no key: wandb login, or set WANDB_API_KEY"
    yield Finding("tracking", "W&B key", Status.INFO, f"this machine {key}")


def _runs(runs_dir: Path) -> Findings:
    path = runs_dir.absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    exists = nearest == path
    try:
        with TemporaryDirectory(dir=nearest):
            pass
    except OSError as error:
        action = "written to" if exists else "made"
        reason = error.strerror or error
        text = f"{path} cannot be {action}: {reason}; give another folder as --runs-dir"
        yield Finding("runs", str(runs_dir), Status.BROKEN, text)
        return
    free_gib = shutil.disk_usage(nearest).free / _GIB
    if free_gib < MIN_SPACE_GIB:
        status = Status.BROKEN
    elif free_gib < WARNING_SPACE_GIB:
        status = Status.WARNING
    else:
        status = Status.WORKS
    note = "" if exists else ", will be made"
    yield Finding("runs", str(runs_dir), status, f"{free_gib:.1f} GiB free{note}")


def _service() -> Findings:
    from nip_astra.serve.settings import ServiceSettings

    missing = [name for name in SERVICE_PACKAGES if version_of(name) is None]
    settings = ServiceSettings()
    if missing:
        text = f"without {', '.join(missing)}: pip install 'nip_astra[serve]'"
        yield Finding("service", "nip-astra serve", Status.ABSENT, text)
        return
    try:
        socket.create_server((settings.host, 0)).close()
    except OSError as error:
        text = f"no port can be opened on {settings.host}: {reason_of(error)}"
        yield Finding("service", "nip-astra serve", Status.WARNING, text)
        return
    text = f"can listen on {settings.host}; files and jobs are kept in {settings.state_folder()}"
    yield Finding("service", "nip-astra serve", Status.WORKS, text)


def _requirements() -> list[Any]:
    """Return the package's requirements, from its metadata or from the checkout's project file."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("nip_astra") or []
    except metadata.PackageNotFoundError:
        file = Path(nip_astra.__file__).parents[1] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = list(project["dependencies"])
        for extra, packages in project["optional-dependencies"].items():
            lines += [f"{package}; extra == '{extra}'" for package in packages]
    return [Requirement(line) for line in lines]


def _sandbox() -> Findings:
    from nip_astra.utils.interpreter import why_no_interpreter
    from nip_astra.utils.sandbox import (
        OPEN_CALLS,
        why_no_bubblewrap,
        why_no_filter,
        why_no_memory_group,
    )

    no_bubblewrap, no_interpreter = why_no_bubblewrap(), why_no_interpreter()
    if no_bubblewrap:
        text = f"{no_bubblewrap}; whole programs that models wrote are not run"
        yield Finding("sandbox", "bubblewrap", Status.ABSENT, text)
    else:
        text = "runs programs that models wrote, without a network, files or other processes"
        yield Finding("sandbox", "bubblewrap", Status.WORKS, text)
        if no_filter := why_no_filter():
            text = f"not filtered ({no_filter}): {OPEN_CALLS}"
            yield Finding("sandbox", "system calls", Status.WARNING, text)
        else:
            text = "filtered: no keyrings, shared memory, io_uring, bpf or other kinds of sockets"
            yield Finding("sandbox", "system calls", Status.WORKS, text)
        if no_memory_group := why_no_memory_group():
            text = f"bounded for each process alone: {no_memory_group}"
            yield Finding("sandbox", "memory", Status.INFO, text)
        else:
            text = "bounded for all processes of a program together"
            yield Finding("sandbox", "memory", Status.WORKS, text)
    if no_interpreter:
        text = f"{no_interpreter}: pip install 'nip_astra[sandbox]'"
        yield Finding("sandbox", "interpreter", Status.ABSENT, text)
    else:
        use = "calls functions that models wrote instead" if no_bubblewrap else "is not needed"
        yield Finding("sandbox", "interpreter", Status.WORKS, f"pydantic-monty {use}")
