"""Checks of an installation on this machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
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

LITTLE_SPACE_GIB = 2.0
"""Free space for runs below which there is a warning; below `FULL_GIB` it is an error."""
FULL_GIB = 0.1
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
        return not any(one.status is Status.BROKEN for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"is_sound": self.is_sound, "findings": [asdict(one) for one in self.findings]}

    def to_frame(self) -> pd.DataFrame:
        """Return a row per finding."""
        return frame_of(self.to_dict()["findings"])

    def tables(self) -> list[Any]:
        """Return a table per area and a summary, for a terminal."""
        found: list[Any] = []
        for area in dict.fromkeys(one.area for one in self.findings):
            table = plain_table(area, "", "", "")
            table.show_header = False
            for one in self.findings:
                if one.area == area:
                    word = "" if one.status is Status.INFO else str(one.status)
                    table.add_row(Text(one.name), Text(word, STYLES[one.status]), Text(one.text))
            found += [table, ""]
        if not self.is_sound:
            last = "A required part does not work; see the lines marked broken."
        elif any(one.status is Status.WARNING for one in self.findings):
            last = "All required parts work; see the lines marked warning."
        else:
            last = "All required parts work."
        return [*found, last]


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

    kept = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo
    changeable: Any = socket.socket
    changeable.connect = changeable.connect_ex = socket.getaddrinfo = refuse
    try:
        yield
    finally:
        changeable.connect, changeable.connect_ex, socket.getaddrinfo = kept


def _system() -> Findings:
    yield Finding("system", "nip_astra", Status.INFO, nip_astra.__version__)
    yield Finding("system", "Python", Status.INFO, f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", "platform", Status.INFO, platform.platform())
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count()
    yield Finding("system", "processors", Status.INFO, f"{usable} of {os.cpu_count()} usable")


def _packages() -> Findings:
    for requirement in _requirements():
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            version = version_of(requirement.name)
            if version is None:
                text = f"is needed: pip install {requirement.name}"
                yield Finding("packages", requirement.name, Status.BROKEN, text)
            elif not requirement.specifier.contains(version, prereleases=True):
                text = f"{version}, but {requirement.specifier} was tested"
                yield Finding("packages", requirement.name, Status.WARNING, text)
            else:
                yield Finding("packages", requirement.name, Status.WORKS, version)


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

    number = torch.get_num_threads()
    threads = f"{counted(number, 'thread')} unless a run is small or sets another number"
    yield Finding("devices", "cpu", *_computes("cpu", threads))
    reason = why_absent()
    text = f"layers of graphs are left to torch, which takes 1.6 times as long: {reason}"
    compiled = (Status.WORKS, "layers of graphs are compiled for this processor")
    yield Finding("devices", "compiler", *((Status.ABSENT, text) if reason else compiled))
    if not torch.cuda.is_available():
        yield Finding("devices", "cuda", Status.ABSENT, "torch finds no GPU")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        text = f"{about.name}, {about.total_memory / _GIB:.0f} GiB"
        yield Finding("devices", f"cuda:{index}", *_computes(f"cuda:{index}", text))


def _computes(device: str, text: str) -> tuple[Status, str]:
    """Multiply two small matrices on a device, and check the result."""
    import torch

    try:
        ones = torch.ones(64, 64, device=device)
        is_correct = bool((ones @ ones == 64.0).all())
    except RuntimeError as error:
        return Status.BROKEN, f"{text}; {reason_of(error)}"
    return (Status.WORKS, text) if is_correct else (Status.BROKEN, f"{text}; computes wrongly")


def _scorers() -> Findings:
    import torch

    from nip_astra.scorers.base import SCORERS, build_scorer

    for name in SCORERS.names():
        try:
            parameters = SCORERS.get(name).Parameters.from_dict({})
            build_scorer(parameters, device=torch.device("cpu"), scenario_dir=None)
        except ParameterError as error:
            needed = ", ".join(fault.path for fault in error.faults)
            yield Finding("scorers", name, Status.INFO, f"can be imported; needs {needed}")
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
        references = sorted(set(_references(values)))
        lost = [one for one in references if not _is_here(one, folder)]
        if lost:
            yield Finding("models", scenario, Status.ABSENT, f"not here: {', '.join(lost)}")
        elif references:
            yield Finding("models", scenario, Status.WORKS, ", ".join(references))
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    names = sorted(path.name.removeprefix("models--") for path in cache.glob("models--*"))
    cached = ", ".join(name.replace("--", "/") for name in names) or "no model"
    yield Finding("models", "Hugging Face cache", Status.INFO, f"{cache}: {cached}")


def _references(values: Any) -> Iterator[str]:
    """Yield every model in a scenario's parameters."""
    if isinstance(values, dict) and isinstance(values.get("model"), str):
        yield values["model"]
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _references(value)


def _is_here(reference: str, folder: Path) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = resolve_reference(reference, folder)
    except NipAstraError:
        return False
    if isinstance(found, Path):
        return found.exists()
    with suppress(ValueError):
        return isinstance(try_to_load_from_cache(found, "config.json"), str)
    return False


def _network(is_online: bool) -> Findings:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE")
    given = [f"{name}={value}" for name in names if (value := read_variable(name)) is not None]
    is_offline = (read_variable("HF_HUB_OFFLINE") or "0").upper() in ("1", "ON", "YES", "TRUE")
    hub = "serves no models" if is_offline else "serves models that are not on this machine"
    text = f"the hub {hub}; {', '.join(given) or 'no variable changes it'}"
    yield Finding("network", "offline", Status.INFO, text)
    if not is_online:
        text = "not checked without --online"
        yield Finding("network", "hosts", Status.INFO, text)


def reach_hosts() -> list[Finding]:
    """Open and close a connection to each host that a run may use."""
    found = []
    for name, host in HOSTS:
        try:
            socket.create_connection((host, 443), timeout=TIMEOUT_SECONDS).close()
        except OSError as error:
            text = f"{host} cannot be reached: {reason_of(error)}"
            found.append(Finding("network", name, Status.ABSENT, text))
        else:
            found.append(Finding("network", name, Status.WORKS, f"{host} can be reached"))
    return found


def _tracking() -> Findings:
    default = ExperimentSettings.model_fields["wandb"].default
    mode = read_variable("WANDB_MODE")
    text = f"{default} unless a run sets another" + (f"; WANDB_MODE={mode}" if mode else "")
    yield Finding("tracking", "W&B mode", Status.INFO, text)
    key = "has a key" if has_credentials() else "has no key: wandb login, or set WANDB_API_KEY"
    yield Finding("tracking", "W&B key", Status.INFO, f"this machine {key}")


def _runs(runs_dir: Path) -> Findings:
    path = runs_dir.absolute()
    nearest = next(one for one in (path, *path.parents) if one.exists())
    try:
        with TemporaryDirectory(dir=nearest):
            pass
    except OSError as error:
        what = f"{path} cannot be {'written to' if nearest == path else 'made'}"
        text = f"{what}: {error.strerror or error}; give another folder as --runs-dir"
        yield Finding("runs", str(runs_dir), Status.BROKEN, text)
        return
    free = shutil.disk_usage(nearest).free / _GIB
    status = Status.WORKS if free >= LITTLE_SPACE_GIB else Status.WARNING
    status = status if free >= FULL_GIB else Status.BROKEN
    where = "" if nearest == path else ", will be made"
    yield Finding("runs", str(runs_dir), status, f"{free:.1f} GiB free{where}")


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
        return [Requirement(one) for one in metadata.requires("nip_astra") or ()]
    except metadata.PackageNotFoundError:
        file = Path(nip_astra.__file__).parents[1] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    found = [Requirement(one) for one in project["dependencies"]]
    for extra, wanted in project["optional-dependencies"].items():
        found += [Requirement(f"{one}; extra == '{extra}'") for one in wanted]
    return found


def _sandbox() -> Findings:
    from nip_astra.utils.interpreter import why_no_interpreter
    from nip_astra.utils.sandbox import (
        OPEN_CALLS,
        why_no_bubblewrap,
        why_no_filter,
        why_no_memory_group,
    )

    absent, missing = why_no_bubblewrap(), why_no_interpreter()
    if absent:
        text = f"{absent}; whole programs that models wrote are not run"
        yield Finding("sandbox", "bubblewrap", Status.ABSENT, text)
    else:
        text = "runs programs that models wrote, without a network, files or other processes"
        yield Finding("sandbox", "bubblewrap", Status.WORKS, text)
        status, text = Status.WORKS, "filtered: no keyrings, shared memory, io_uring, bpf or other "
        text += "kinds of sockets"
        if unfiltered := why_no_filter():
            status, text = Status.WARNING, f"not filtered ({unfiltered}): {OPEN_CALLS}"
        yield Finding("sandbox", "system calls", status, text)
        status, text = Status.WORKS, "bounded for all processes of a program together"
        if ungrouped := why_no_memory_group():
            status, text = Status.INFO, f"bounded for each process alone: {ungrouped}"
        yield Finding("sandbox", "memory", status, text)
    if missing:
        text = f"{missing}: pip install 'nip_astra[sandbox]'"
        yield Finding("sandbox", "interpreter", Status.ABSENT, text)
    else:
        use = "is not needed" if not absent else "calls functions that models wrote instead"
        yield Finding("sandbox", "interpreter", Status.WORKS, f"pydantic-monty {use}")
