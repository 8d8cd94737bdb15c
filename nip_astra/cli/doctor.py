"""What `nip-astra doctor` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.text import Text

from nip_astra.cli.doctor_checks import Finding, Question, Status, examine, reach_hosts
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.plugins import load_plugin
from nip_astra.safe_text import to_json

BROKEN = 1
"""Exit code where something that is needed does not work."""
STYLES = {
    Status.WORKS: "green",
    Status.ABSENT: "dim",
    Status.WARNING: "yellow",
    Status.BROKEN: "bold red",
    Status.TOLD: "",
}


def doctor(*, runs_dir: str, plugins: Sequence[str], is_online: bool, as_json: bool) -> None:
    """Print what is installed and works; end with 1 where something needed does not."""
    for spec in plugins:
        load_plugin(spec)
    findings = examine(Question(Path(runs_dir), is_online))
    if is_online:
        findings += reach_hosts()
    broken = [one for one in findings if one.status is Status.BROKEN]
    if as_json:
        plain = {"is_sound": not broken, "findings": [asdict(one) for one in findings]}
        say(to_json(plain, indent=2))
    else:
        _show(findings)
    if broken:
        raise typer.Exit(BROKEN)


def _show(findings: Sequence[Finding]) -> None:
    console = open_console()
    for area in dict.fromkeys(one.area for one in findings):
        table = plain_table(area, "", "", "")
        table.show_header = False
        for one in findings:
            if one.area == area:
                word = "" if one.status is Status.TOLD else str(one.status)
                table.add_row(Text(one.name), Text(word, STYLES[one.status]), Text(one.text))
        console.print(table, "")
    counts = {status: sum(one.status is status for one in findings) for status in Status}
    if counts[Status.BROKEN]:
        told = "Something that is needed does not work; see the lines marked broken."
    elif counts[Status.WARNING]:
        told = "Everything that is needed works; see the lines marked warning."
    else:
        told = "Everything that is needed works."
    console.print(told)
