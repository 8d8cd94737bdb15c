"""What `nip-astra time` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.text import Text

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.safe_text import to_json
from nip_astra.trainers.timing import time_components


def time_parts(
    experiment: dict[str, Any],
    settings: dict[str, Any],
    components: Sequence[str],
    *,
    num_repeats: int,
    as_json: bool,
) -> None:
    """Time parts of an experiment's iteration; writes nothing."""
    quieten_libraries()
    prepared = prepare_experiment(resolve_experiment(**experiment), **settings)
    seconds = time_components(prepared.trainer, components, num_repeats=num_repeats)
    if as_json:
        say(to_json({"seconds": seconds}, indent=2))
        return
    table = plain_table(None, "component", "median", "least", "most")
    for name, times in seconds.items():
        figures = (median(times), min(times), max(times))
        table.add_row(Text(name), *(f"{1000 * figure:,.1f} ms" for figure in figures))
    open_console().print(table)
