"""What a person sees when a run has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_results(results: Mapping[str, Any], run_path: Path, console: Console) -> None:
    """Print the table before and after training, what was found, warnings and paths.

    Parameters
    ----------
    results : Mapping
        The content of `results.json`; a trainer without before and after gets paths only.
    """
    before, after = results.get("before"), results.get("after")
    if before and after:
        console.print(_comparison(before, after, results.get("random_search")))
        plants = _plants(results)
        if plants is not None:
            console.print("", plants)
    for warning in results.get("warnings", ()):
        console.print(Text(f"warning: {warning}", style="bold yellow"))
    console.print("")
    console.print(Text(f"run        {run_path}"))
    if results.get("model_dir"):
        console.print(Text(f"model      {results['model_dir']}"))
    console.print(Text(f"results    {run_path / 'results.json'}"))


def print_dry_run(estimate: Mapping[str, Any], console: Console) -> None:
    """Print the cost estimate of a dry run."""
    table = Table(title="dry run: nothing was written", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in estimate.items():
        table.add_row(name.replace("_", " "), _number(value, 4))
    console.print(table)


def _comparison(
    before: Mapping[str, Any], after: Mapping[str, Any], random: Mapping[str, Any] | None
) -> Table:
    title = f"{before['num_episodes']} held-out episodes before and after training"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    if random is not None:
        table.add_column("random search", justify="right")

    def add(label: str, left: str, right: str, third: str = "") -> None:
        table.add_row(label, left, right, *([third] if random is not None else []))

    add("episodes with a failure", _rate(before), _rate(after))
    add("mean score", _number(before["mean_score"]), _number(after["mean_score"]))
    add("probe NLL, nats per token", _number(before["probe_nll"]), _number(after["probe_nll"]))
    add(
        "distinct successful probes",
        _percent(before["distinct_share"]),
        _percent(after["distinct_share"]),
    )
    if after["num_plants"] is not None:
        third = f"{random['plants_found']} of {after['num_plants']}" if random else ""
        add(
            "planted failures found",
            f"{before['plants_found']} of {before['num_plants']}",
            f"{after['plants_found']} of {after['num_plants']}",
            third,
        )
    add(
        "target queries",
        f"{before['target_queries']:,}",
        f"{after['target_queries']:,}",
        f"{random['target_queries']:,}" if random else "",
    )
    return table


def _plants(results: Mapping[str, Any]) -> Table | None:
    found: Mapping[str, int | None] = results["after"].get("first_query") or {}
    if not found:
        return None
    random = (results.get("random_search") or {}).get("plants", {})
    table = Table(title="target queries until a planted failure was found", title_justify="left")
    table.add_column("planted failure")
    table.add_column("this run", justify="right")
    if random:
        table.add_column("random search", justify="right")
    order = sorted(found, key=lambda name: (found[name] is None, found[name] or 0))
    for name in order:
        row = [name, _query(found[name])]
        table.add_row(*row, *([_query(random.get(name))] if random else []))
    return table


def _query(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _rate(report: Mapping[str, Any]) -> str:
    low, high = report["failure_rate_interval"]
    return f"{report['failure_rate']:.1%} [{low:.1%}, {high:.1%}]"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: Any, digits: int = 3) -> str:
    return f"{value:,.{digits}g}" if isinstance(value, float) else str(value)
