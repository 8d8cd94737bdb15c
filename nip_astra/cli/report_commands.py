"""What `nip-astra report` does; imported when it runs."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence

from nip_astra.cli.terminal import complain, say
from nip_astra.report.page import write_report


def report(runs: Sequence[str], *, output: str | None, redact: bool, is_opened: bool) -> None:
    """Write the page about the runs, say where it is, and show it if asked to."""
    path = write_report(runs, output, redact=redact)
    say(f"report     {path}")
    if is_opened and not webbrowser.open(path.resolve().as_uri()):
        complain("no browser was found to open it with")
