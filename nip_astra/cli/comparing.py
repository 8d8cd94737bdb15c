"""The command line of `nip-astra compare-dumps`."""

from __future__ import annotations

from typing import Annotated

import typer

from nip_astra.cli.options import Debug


def compare_dumps(
    one: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or folder of dumps.")],
    other: Annotated[str, typer.Argument(metavar="RUN", help="The one to compare it with.")],
    tolerance: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, help="Difference of numbers that is none.")
    ] = 0.0,
    debug: Debug = False,
) -> None:
    """Tell the first stage at which the dumps of two runs differ; exit code 1 if they do."""
    from nip_astra.cli import dump_commands

    if dump_commands.compare(one, other, tolerance=tolerance):
        raise typer.Exit(1)
