"""Terminal tables of a run's results and of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nip_astra.distributed.placement import PLACEMENT, Plan
from nip_astra.errors import counted
from nip_astra.evaluation.tables import lined_table, services_table
from nip_astra.report import summary
from nip_astra.report.records import OWN_LOOP, PROTOCOL, RunRecord, words
from nip_astra.report.sections import planted
from nip_astra.report.summary import Row
from nip_astra.tracking.run_directory import REPORT
from nip_astra.tracking.wandb_runs import offline_runs
from nip_astra.utils.formatting import NOTHING, decimal, number, percent


def print_results(results: Mapping[str, Any], run_path: Path, console: Console) -> None:
    """Print the figures of `results.json` before and after training, warnings and paths."""
    run = RunRecord(run_path, results=dict(results))
    before, after = summary.measured(run)
    if results.get("kind") == OWN_LOOP:
        _print_figures({"before": before, "after": after}, console)
    elif run.kind == PROTOCOL or (before and after):
        console.print(Text(_heading(run, before, after)))
        headings, rows = summary.main_table(run)
        left_out = {"target queries", "failing responses"}
        left_out |= set() if "accuracy" in after else {"mean reward"}
        _print_table("", headings, [row for row in rows if row.label not in left_out], console)
        if run.kind == PROTOCOL:
            # With figures before training, more than two agents do not fit a terminal.
            by_agent = summary.agent_rows(run, has_before=len(run.agents) < 3)
            _print_table("", [words(name) for name in run.agents], by_agent, console)
        plants = planted(run) if (results.get("training") or {}).get("plants") else None
        if plants:
            console.print("", "target queries until training met a planted failure", sep="\n")
            _print_plants(plants["rows"], console)
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
    """Print the cost of a dry run and on other numbers of devices, at a price per device hour."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in estimate.items():
        if name != PLACEMENT:
            table.add_row(Text(words(name)), _value(value))
    console.print("dry run: nothing was written", table, sep="\n")
    if estimate.get(PLACEMENT):
        _print_placement(estimate[PLACEMENT], console, device_price)
        if estimate.get("loss", 0.0) is None:
            console.print(
                "The episode gave no sample to learn from, so updates are not in the table."
            )


def _print_placement(plans: Sequence[Plan], console: Console, price: float | None) -> None:
    """Print a column for each number of devices, and what was measured."""
    rows = {
        "with work to do": [f"{plan.num_used:,}" for plan in plans],
        **{
            f"GiB of {name}": [decimal(plan.memory[name] / 2**30) for plan in plans]
            for name in plans[0].memory
        },
        **(
            {"tokens/s of the policy": [decimal(plan.tokens_per_second) for plan in plans]}
            if plans[0].tokens_per_second
            else {}
        ),
        "hours": [decimal(plan.hours) for plan in plans],
        "device hours": [decimal(plan.device_hours) for plan in plans],
        "efficiency": [percent(plan.efficiency, 0) for plan in plans],
    }
    if price is not None:
        rows["cost"] = [decimal(plan.device_hours * price) for plan in plans]
    table = lined_table(None, "devices", (f"{plan.num_devices:,}" for plan in plans), rows.items())
    console.print("", "on devices such as this one", table, sep="\n")
    console.print(
        "Measured: seconds, tokens and memory of one episode and its step on this device. "
        "Computed: the table, also its first column, with assumed links, stragglers and failures; "
        "see doc/guides/scaling.md. torchrun divides updates and what language models play, actors "
        "of Ray the latter."
    )


def _print_figures(figures_by_time: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print numbers by name, in a column for each measurement that has any."""
    measured = {when: figures for when, figures in figures_by_time.items() if figures}
    names = dict.fromkeys(name for figures in measured.values() for name in figures)
    rows = []
    for name in names:
        values = [number(figures.get(name)) for figures in measured.values()]
        if any(value is not None for value in values):
            rows.append(Row(words(name), [decimal(value) for value in values]))
    _print_table("", list(measured), rows, console)


def _heading(run: RunRecord, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    when = "before and after training"
    if run.kind == PROTOCOL:
        tests = f"tests {when}" if before else "tests of the agents"
        heading = f"{summary.protocol_of(run)}, {tests}"
        num_episodes = number(after.get("num_episodes"))
        return heading if num_episodes is None else f"{heading}: {counted(num_episodes, 'episode')}"
    for name, unit in (("num_episodes", "episode"), ("num_problems", "problem")):
        if before.get(name) is not None:
            return f"{counted(number(before[name]), f'held-out {unit}')} {when}"
    return when


def _print_plants(rows: Sequence[Row], console: Console) -> None:
    """Print the planted failures, with their rarity if known."""
    first = 1 if any(row.cells[1] != NOTHING for row in rows) else 2
    headings = ["description", "met by ordinary turns", "training", "random search"]
    cells = [Row(row.label, row.cells[first:]) for row in rows]
    _print_table("planted failure", headings[first : len(rows[0].cells)], cells, console)


def _print_table(
    corner: str, headings: Sequence[str], rows: Sequence[Row], console: Console
) -> None:
    """Print the rows, without standard deviations; nothing if there are none."""
    rows_shown = [row for row in rows if not row.label.startswith("std ")]
    if not rows_shown:
        return
    console.print(lined_table(None, corner, headings, rows_shown))


def _value(value: Any) -> str:
    is_text = not isinstance(value, int | float | None)
    return str(value) if is_text else decimal(value, 4)
