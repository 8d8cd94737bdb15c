"""Print to a terminal, or to what takes its place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nip_astra.distributed.launch import rank_of_process
from nip_astra.safe_console import SafeConsole
from nip_astra.safe_text import safe_text

if TYPE_CHECKING:
    from nip_astra.resolving.resolution import ResolvedExperiment
    from nip_astra.run import ExperimentResult

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or pipe, which has no width of its own."""


def open_console() -> Console:
    """The console of standard output as it is now."""
    return SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPE_WIDTH)


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{safe_text(text)}\n")


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{safe_text(text)}\n")


def quieten_libraries() -> None:
    """Keep progress bars and advice of transformers off the screen."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def train_or_estimate(
    resolved: ResolvedExperiment, settings: Mapping[str, Any], *, is_dry: bool
) -> None:
    """Run an experiment, or its smallest step, and print the results."""
    if is_dry:
        from nip_astra.overview import dry_run as estimate
        from nip_astra.report.terminal import print_dry_run

        found = estimate(resolved, **settings)
        print_dry_run(found.estimate, open_console(), device_price=found.device_price)
        return
    from nip_astra.run import run_experiment

    print_outcome(run_experiment(resolved, **settings))


def print_outcome(result: ExperimentResult) -> None:
    """Print the results of a run, in the leading process."""
    from nip_astra.report.terminal import print_results

    if rank_of_process() == 0:
        print_results(result.results, result.run_directory.path, open_console())
