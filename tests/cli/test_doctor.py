"""Findings of `nip-astra doctor`."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from nip_astra import installation
from nip_astra.installation import Finding, Status, closed_network, doctor, examine
from nip_astra.scorers.base import SCORERS
from nip_astra.utils import interpreter, sandbox
from tests.kit.command_line import CommandLine
from tests.kit.messages import says

CALLER = """
import socket

import nip_astra as na

@na.register_scorer("calls_home")
class CallsHome(na.Scorer):
    def __init__(self, *arguments, **options):
        socket.create_connection(("127.0.0.1", 9))
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the scorers, which load models."""
    monkeypatch.setattr(installation, "_scorers", lambda: iter(()))


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_sound_installation_is_reported(cli: CommandLine) -> None:
    result = cli.ok("doctor")
    lines = ("torch", "cpu", "profanity", "judge", "pocket_chat", "W&B mode", "offline")
    assert says(result.out, "All required parts work.", *(f"\n{line} " for line in lines))
    assert "needs model" in result.out


@pytest.mark.usefixtures("quick")
def test_a_missing_package_is_reported(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = installation.version_of
    versions = {"scipy": None, "numpy": "0.1", "peft": None}
    wanted = [*installation._requirements(), Requirement("numpy>=1")]
    monkeypatch.setattr(installation, "_requirements", lambda: wanted)
    monkeypatch.setattr(installation, "version_of", lambda n: versions.get(n, real(n)))
    assert cli("doctor").code == 1
    diagnosis = doctor()
    assert (diagnosis.is_sound, "broken" in diagnosis.tables()[-1]) == (False, True)
    findings = by_name(diagnosis.findings)
    statuses = [findings[name].status for name in ("scipy", "numpy", "lora")]
    assert statuses == [Status.BROKEN, Status.WARNING, Status.ABSENT]
    assert says(findings["numpy"].text, "0.1", ">=1")
    assert says(findings["lora"].text, "peft", "pip install 'nip_astra[lora]'")


def test_requirements_are_read_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["rich>=13", 'peft>=0.14; extra == "lora"', 'no-such-thing; sys_platform == "none"']
    monkeypatch.setattr(installation.metadata, "requires", lambda _: wanted)
    assert list(by_name(installation._packages())) == ["rich"]
    assert list(by_name(installation._extras())) == ["lora"]


@pytest.mark.parametrize(
    ("missing", "statuses"),
    [
        ("", {"bubblewrap": "works", "system calls": "works", "memory": "works"}),
        ("filter", {"system calls": "warning"}),
        ("memory_group", {"memory": "info"}),
        ("interpreter", {"bubblewrap": "works", "interpreter": "absent"}),
        ("bubblewrap", {"bubblewrap": "absent", "interpreter": "works"}),
    ],
)
def test_the_sandbox_and_its_replacement_are_reported(
    monkeypatch: pytest.MonkeyPatch, missing: str, statuses: dict[str, str]
) -> None:
    for part in ("bubblewrap", "filter", "memory_group", "interpreter"):
        module = interpreter if part == "interpreter" else sandbox
        reason = "a reason" if part == missing else ""
        monkeypatch.setattr(module, f"why_no_{part}", lambda reason=reason: reason)
    findings = by_name(installation._sandbox())
    assert {name: findings[name].status for name in statuses} == statuses
    assert ("system calls" in findings) is (missing != "bubblewrap")
    assert any("a reason" in finding.text for finding in findings.values()) is bool(missing)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("free_gib", "status", "code"), [(100, "works", 0), (1, "warning", 0), (0.01, "broken", 1)]
)
def test_a_full_disk_is_reported(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, free_gib: float, status: str, code: int
) -> None:
    usage = SimpleNamespace(free=free_gib * 1024**3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = cli("doctor", "--json")
    report = json.loads(result.out)
    assert (result.code, report["is_sound"]) == (code, code == 0)
    assert ("warning" in doctor().tables()[-1]) is (status == "warning")
    assert {one["status"] for one in report["findings"]} <= {str(one) for one in Status}
    (finding,) = (one for one in report["findings"] if one["area"] == "runs")
    assert finding["status"] == status


def test_a_runs_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "runs"):
        (finding,) = installation._runs(place)
        assert finding.status is Status.BROKEN
        assert says(finding.text, place, "Not a directory", "--runs-dir")


def test_no_connection_is_opened(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
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
    result = cli("doctor", "--json", "--plugin", cli.write("home.py", CALLER))
    (finding,) = [one for one in json.loads(result.out)["findings"] if one["name"] == "calls_home"]
    assert says(finding, "'warning'", "OSError: the doctor opens no connection")


@pytest.mark.usefixtures("quick")
def test_hosts_are_contacted_on_request(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Mock(side_effect=OSError("no route"))
    monkeypatch.setattr(socket, "create_connection", connect)
    assert "--online" in cli("doctor").out
    assert not connect.called
    out = cli.ok("doctor", "--online").out
    hosts = [call.args[0][0] for call in connect.call_args_list]
    assert hosts == ["huggingface.co", "api.wandb.ai"]
    assert says(out, "huggingface.co", "no route")


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_scorers", "_devices", "_models"):
        monkeypatch.setattr(installation, name, Mock(side_effect=ZeroDivisionError("oh")))
    finding = by_name(examine(tmp_path))["devices"]
    assert finding.status is Status.BROKEN
    assert says(finding.text, "ZeroDivisionError", "oh")


def test_it_is_reported_whether_models_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = installation._service()
    assert (finding.status, "127.0.0.1" in finding.text) == (Status.WORKS, True)
    monkeypatch.setattr(installation, "SERVICE_PACKAGES", ("fastapi", "no-such-package"))
    (finding,) = installation._service()
    assert (finding.status, "no-such-package" in finding.text) == (Status.ABSENT, True)
