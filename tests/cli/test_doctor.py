"""Findings of `nip-astra doctor`."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nip_astra import installation as doctor
from nip_astra.installation import Finding, Status, closed_network, examine
from nip_astra.scorers.base import SCORERS
from tests.kit.command_line import CommandLine, refused

CALLER = """
import socket

from nip_astra.scorers.base import Scorer
from nip_astra.scorers.base import register_scorer


@register_scorer("calls_home")
class CallsHome(Scorer):
    \"\"\"Opens a connection.\"\"\"

    def __init__(self, *arguments, **options):
        socket.create_connection(("127.0.0.1", 9))
"""


class Usage(NamedTuple):
    free: float


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the scorers, which load models."""
    monkeypatch.setattr(doctor, "_scorers", lambda: iter(()))


def test_a_sound_installation_is_reported(cli: CommandLine) -> None:
    said = cli.ok("doctor")
    assert "All required parts work." in said.out
    for line in ("torch ", "cpu ", "profanity ", "judge ", "pocket_chat ", "W&B mode ", "offline "):
        assert f"\n{line}" in said.out
    assert "can be imported; needs model" in said.out
    assert "GiB free, will be made" in said.out


@pytest.mark.usefixtures("quick")
def test_the_findings_are_also_json(cli: CommandLine) -> None:
    said = cli("doctor", "--json", "--runs-dir", str(cli.folder))
    found = json.loads(said.out)
    assert found["is_sound"] is True
    areas = {one["area"] for one in found["findings"]}
    assert areas >= {"system", "packages", "extras", "devices", "models", "network", "runs"}
    assert {one["status"] for one in found["findings"]} <= {str(status) for status in Status}


@pytest.mark.usefixtures("quick")
def test_a_missing_required_package_ends_with_exit_code_1(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[str], str | None] = doctor.version_of
    versions: dict[str, str | None] = {"scipy": None, "numpy": "0.1", "peft": None}
    wanted = [*doctor._requirements(), _requirement("numpy>=1")]
    monkeypatch.setattr(doctor, "_requirements", lambda: wanted)
    monkeypatch.setattr(doctor, "version_of", lambda name: versions.get(name, real(name)))
    said = cli("doctor")
    assert said.code == 1
    found = [" ".join(line.split()) for line in said.out.splitlines()]
    assert "scipy broken is needed: pip install scipy" in found
    assert "numpy warning 0.1, but >=1 was tested" in found
    assert "lora absent without peft: pip install 'nip_astra[lora]'" in found
    assert "marked broken" in found[-1]


def _requirement(text: str) -> Any:
    from packaging.requirements import Requirement

    return Requirement(text)


def test_an_installed_package_is_read_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["rich>=13", 'peft>=0.14; extra == "lora"', 'no-such-thing; sys_platform == "none"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    assert [one.name for one in doctor._packages()] == ["rich"]
    assert [one.name for one in doctor._extras()] == ["lora"]


def test_the_replacement_of_a_sandbox_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from nip_astra.utils import interpreter, sandbox

    def told() -> dict[str, str]:
        found = doctor._sandbox()
        return {one.name: f"{one.status} {one.text}" for one in found}

    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "there is no `bwrap`")
    monkeypatch.setattr(interpreter, "why_no_interpreter", lambda: "p is not installed")
    assert told()["bubblewrap"].startswith("absent there is no `bwrap`; whole programs")
    assert told()["interpreter"] == "absent p is not installed: pip install 'nip_astra[sandbox]'"
    monkeypatch.setattr(interpreter, "why_no_interpreter", lambda: "")
    assert "calls functions that models wrote instead" in told()["interpreter"]
    assert "system calls" not in told()
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "")
    monkeypatch.setattr(sandbox, "why_no_filter", lambda: "p has no numbers")
    monkeypatch.setattr(sandbox, "why_no_memory_group", lambda: "no group")
    assert told()["bubblewrap"].startswith("works runs programs")
    assert told()["system calls"].startswith("warning not filtered (p has no numbers)")
    assert all(name in told()["system calls"] for name in ("keyrings", "AF_VSOCK", "io_uring"))
    assert told()["memory"] == "info bounded for each process alone: no group"
    monkeypatch.setattr(sandbox, "why_no_filter", lambda: "")
    monkeypatch.setattr(sandbox, "why_no_memory_group", lambda: "")
    assert told()["system calls"].startswith("works filtered")
    assert told()["memory"].startswith("works bounded for all processes")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("free_gib", "code"), [(100, 0), (1, 0), (0.01, 1)])
def test_a_full_disk_is_told(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, free_gib: float, code: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free_gib * 1024**3))
    said = cli("doctor")
    assert said.code == code
    assert ("marked warning" in said.out) is (free_gib == 1)


@pytest.mark.usefixtures("quick")
def test_a_runs_folder_that_cannot_be_written_is_reported(cli: CommandLine) -> None:
    cli.write("file", "")
    # By its name: a path as long as in parallel tests is folded in two columns at once.
    said = cli("doctor", "--runs-dir", "file")
    assert said.code == 1
    told = "".join(said.out.split())
    assert "filecannotbewrittento:Notadirectory;giveanotherfolderas--runs-dir" in told
    told = "".join(cli("doctor", "--runs-dir", "file/runs").out.split())
    assert "file/runscannotbemade:Notadirectory;giveanotherfolderas--runs-dir" in told


def test_no_connection_can_be_opened_within(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by name nor by address; afterwards connections work again."""
    before = socket.socket.connect, socket.getaddrinfo
    with closed_network():
        for attempt in (
            lambda: socket.create_connection(("localhost", 9)),
            lambda: socket.socket().connect(("127.0.0.1", 9)),
            lambda: socket.socket().connect_ex(("127.0.0.1", 9)),
        ):
            with pytest.raises(OSError, match="the doctor opens no connection"):
                attempt()
    assert (socket.socket.connect, socket.getaddrinfo) == before
    monkeypatch.setattr(SCORERS, "names", lambda: ["calls_home"])
    said = cli("doctor", "--json", "--plugin", cli.write("home.py", CALLER))
    (found,) = [one for one in json.loads(said.out)["findings"] if one["name"] == "calls_home"]
    assert found["status"] == "warning"
    assert found["text"] == "cannot be built: OSError: the doctor opens no connection"


@pytest.mark.usefixtures("quick")
def test_hosts_are_contacted_only_on_request(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def connect(address: tuple[str, int], timeout: float) -> None:
        asked.append(address[0])
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "not checked without --online" in cli("doctor").out
    assert asked == []
    said = cli("doctor", "--online")
    assert (said.code, asked) == (0, ["huggingface.co", "api.wandb.ai"])
    assert "huggingface.co cannot be reached: no route" in said.out


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("oh")

    for name in ("_scorers", "_devices", "_models"):
        monkeypatch.setattr(doctor, name, fail)
    found = examine(tmp_path)
    text = "could not be checked: ZeroDivisionError: oh"
    assert Finding("devices", "devices", Status.BROKEN, text) in found


def test_wrong_options_are_refused(cli: CommandLine) -> None:
    assert cli("doctor", "--nothing").code == 2
    assert "the plug-in 'no.py'" in refused(cli("doctor", "--plugin", "no.py"))
