"""What a person sees when a run has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nip_astra.distributed.placement import PLACEMENT, Plan
from nip_astra.evaluation.measured import Replies
from nip_astra.evaluation.tables import bounds_text, services_table
from nip_astra.evaluation.tables import rate as write_rate
from nip_astra.report import protocol_runs, wording
from nip_astra.report.records import RunRecord
from nip_astra.report.summary import Row, distinct_text, met_in_training, plants_text
from nip_astra.tracking.run_directory import REPORT
from nip_astra.tracking.wandb_tracker import offline_runs

NOTHING = "-"
"""Stands where there is no figure."""


def print_results(results: Mapping[str, Any], run_path: Path, console: Console) -> None:
    """Print the table before and after training, what was found, warnings and paths.

    Parameters
    ----------
    results : Mapping
        The content of `results.json`; figures that a trainer does not give are left out.
    """
    is_protocol = results.get("kind") == protocol_runs.KIND
    if is_protocol:
        _print_protocol(RunRecord(run_path, results=dict(results)), console)
    before, after = results.get("before") or {}, results.get("after") or {}
    random = results.get("random_search") or {}
    if before and after and not is_protocol:
        heading = "before and after training"
        if before.get("num_episodes") is not None:
            heading = f"{_count(before['num_episodes'])} held-out episodes {heading}"
        elif before.get("num_problems") is not None:
            heading = f"{_count(before['num_problems'])} held-out problems {heading}"
        console.print(heading, _comparison(results), sep="\n")
        found = (results.get("training") or {}).get("plants") or {}
        if found:
            heading = "target queries until training met a planted failure"
            planted = results.get("planted_failures") or ()
            rarity = {plant["name"]: plant.get("rarity") for plant in planted}
            table = _plants(found, random.get("plants") or {}, rarity)
            console.print("", heading, table, sep="\n")
    if results.get("services"):
        console.print("", services_table(results["services"]), sep="\n")
    for warning in results.get("warnings") or ():
        console.print(Text(f"warning: {warning}", style="bold yellow"))
    console.print()
    report = run_path / REPORT
    paths = {
        "run": run_path,
        "model": results.get("model_dir"),
        "results": run_path / "results.json",
        "report": report if report.exists() else None,
    }
    for name, path in paths.items():
        if path is not None:
            # Whole, however narrow the terminal: it is there to be copied.
            console.print(Text(f"{name:<10} {path}"), soft_wrap=True)
    for folder in offline_runs(run_path):
        console.print(Text(f"W&B        upload it with: wandb sync {folder}"), soft_wrap=True)


def print_dry_run(
    estimate: Mapping[str, Any], console: Console, *, device_price: float | None = None
) -> None:
    """Print the cost estimate of a dry run, and what the run takes on other numbers of devices.

    Parameters
    ----------
    device_price : float, optional
        Price of one device and hour.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in estimate.items():
        if name != PLACEMENT:
            table.add_row(Text(name.replace("_", " ")), _number(value, 4))
    console.print("dry run: nothing was written", table, sep="\n")
    if estimate.get(PLACEMENT):
        _print_placement(estimate[PLACEMENT], console, device_price)
        if estimate.get("loss", 0.0) is None:
            console.print(
                "The episode gave no sample to learn from, so updates are not in the table."
            )


def _print_placement(plans: Sequence[Plan], console: Console, price: float | None) -> None:
    """Print a column for each number of devices, and say what was measured."""
    table = Table()
    table.add_column("devices")
    for plan in plans:
        table.add_column(f"{plan.num_devices:,}", justify="right")
    rows = {
        "with work to do": [f"{plan.num_used:,}" for plan in plans],
        **{
            f"GiB of {name}": [_number(plan.memory[name] / 2**30) for plan in plans]
            for name in plans[0].memory
        },
        **(
            {"tokens/s of the policy": [_number(plan.tokens_per_second) for plan in plans]}
            if plans[0].tokens_per_second
            else {}
        ),
        "hours": [_number(plan.hours) for plan in plans],
        "device hours": [_number(plan.device_hours) for plan in plans],
        "efficiency": [_percent(plan.efficiency) for plan in plans],
    }
    if price is not None:
        rows["cost"] = [_number(plan.device_hours * price) for plan in plans]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print("", "on devices such as this one", table, sep="\n")
    console.print(
        "Measured: seconds, tokens and memory of one episode and its step on this device. "
        "Computed: the table, also its first column, with assumed links, stragglers and failures; "
        "see doc/guides/scaling.md. torchrun divides updates and what language models play, actors "
        "of Ray the latter."
    )


def _print_protocol(run: RunRecord, console: Console) -> None:
    """Print what was decided before and after training, and the figures of each agent."""
    _, after = protocol_runs.measured(run)
    heading = f"{protocol_runs.protocol_of(run)}, tests before and after training"
    if run.results.get("before") is None:
        heading = f"{protocol_runs.protocol_of(run)}, tests of the agents"
    if after.num_episodes is not None:
        heading += f": {_count(int(after.num_episodes))} episodes"
    console.print(Text(heading))
    headings, rows = protocol_runs.overall_rows(run)
    agents = [name.replace("_", " ") for name in protocol_runs.agents_of(run)]
    # With figures before training, more than two agents do not fit a terminal.
    by_agent = protocol_runs.agent_rows(run, has_before=len(agents) < 3)
    for columns, found in ((headings, rows), (agents, by_agent)):
        shown = [row for row in found if not row.label.startswith("std ")]
        if shown:
            console.print(_table_of(columns, shown))


def _table_of(headings: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table()
    table.add_column("")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for row in rows:
        table.add_row(Text(row.label), *(Text(cell) for cell in row.cells))
    return table


def _comparison(results: Mapping[str, Any]) -> Table:
    before, after = results.get("before") or {}, results.get("after") or {}
    random = results.get("random_search") or {}
    columns = [before, after, random] if random else [before, after]
    met = met_in_training(results)
    rows = {
        "episodes with a failure": [_rate(report) for report in columns],
        "  if missing verdicts were passes / failures": [
            bounds_text(one) or NOTHING for one in columns
        ],
        "replies: empty / refused": [
            str(Replies.read(report.get("replies"))) or NOTHING for report in columns
        ],
        "right answers": [_rate(report, "accuracy") for report in columns],
        "mean reward": [_number(report.get("mean_reward")) for report in columns]
        if "accuracy" in after
        else [NOTHING],
        "mean score": [_number(report.get("mean_score")) for report in columns],
        "probe NLL, nats per token": [_number(report.get("probe_nll")) for report in columns],
        "distinct successful probes": [_plain(distinct_text(report)) for report in columns],
        "planted failures found": [_plain(plants_text(report)) for report in (before, after)],
        "planted failures met in training": []
        if met is None
        else [NOTHING, _plain(met.text(met.found)), _plain(met.text(met.random))],
        "  in target queries": [] if met is None else [NOTHING, *[_count(met.queries)] * 2],
    }
    table = Table()
    table.add_column("")
    for heading in ("before", "after", "random search")[: len(columns)]:
        table.add_column(heading, justify="right")
    for label, cells in rows.items():
        if any(cell != NOTHING for cell in cells):
            cells += [NOTHING] * (len(columns) - len(cells))
            table.add_row(label, *cells[: len(columns)])
    return table


def _plants(
    found: Mapping[str, int | None],
    random: Mapping[str, int | None],
    rarity: Mapping[str, float | None],
) -> Table:
    has_rarity = any(rarity.values())
    table = Table()
    table.add_column("planted failure")
    if has_rarity:
        table.add_column("met by ordinary turns", justify="right")
    table.add_column("training", justify="right")
    if random:
        table.add_column("random search", justify="right")
    for name in sorted(found, key=lambda name: (found[name] is None, found[name] or 0)):
        row = [_one_in(rarity.get(name))] if has_rarity else []
        row += [_count(found[name]), *([_count(random.get(name))] if random else [])]
        table.add_row(Text(name), *row)
    return table


def _rate(report: Mapping[str, Any], name: str = "failure_rate") -> str:
    low, high = report.get(f"{name}_interval") or (None, None)
    counts = report
    if name == "accuracy":
        counts = {"num_failed": report.get("num_right"), "num_known": report.get("num_answers")}
    return write_rate({**counts, "value": report.get(name), "low": low, "high": high})


def _one_in(share: float | None) -> str:
    return f"1 in {1.0 / share:,.0f}" if share else NOTHING


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _plain(text: str) -> str:
    """A cell of a report as a terminal shows it."""
    return NOTHING if text == wording.NOTHING else text


def _count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _number(value: Any, digits: int = 3) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.{digits}g}" if isinstance(value, float) else str(value)
