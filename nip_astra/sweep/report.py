"""The page about a sweep: what its arms found, whether they differ, and how they learnt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from nip_astra.errors import RunDirectoryError
from nip_astra.report.charts import Line, line_chart, whisker
from nip_astra.report.curves import RunGroup, charts_of, parameter_differences
from nip_astra.report.page import render_sections
from nip_astra.report.records import RunRecord, read_run
from nip_astra.report.sections import Context, Spec
from nip_astra.sweep.orders import RunStatus, status_of
from nip_astra.sweep.plan import Arm
from nip_astra.sweep.results import HEADLINES, Difference, SweepResults
from nip_astra.sweep.runner import read_failures
from nip_astra.tracking.run_directory import REPORT, write_atomically
from nip_astra.utils.formatting import NOTHING, decimal, format_value, interval, value_text
from nip_astra.utils.statistics import holm

MAX_DRAWN = 7
"""Arms whose curves are drawn; the style sheet has as many colours."""
MAX_COMPARED = 12
"""Arms of which each is tested against each other; of more, each against the first."""
MAX_SHOWN = 4
"""Figures whose arms stand in a table of their own."""

_Placed = tuple[int, Arm]


def write_sweep_report(found: SweepResults, path: Path) -> None:
    """Write the page about a sweep.

    Raises
    ------
    RunDirectoryError
        When it cannot be written.
    """
    groups = _groups(found)
    specs = [
        Spec("arms", "Arms", lambda: _arms(found)),
        Spec("pairs", "Paired tests", lambda: _pairs(found)),
        Spec("trials", "Trials", lambda: _trials(found)),
        Spec("curves", "Learning curves", lambda: _curves(groups)),
        Spec("differences", "What differs", lambda: _differences(groups)),
        Spec("runs", "Runs", lambda: _runs(found)),
    ]
    facts = [
        ("runs ended", str(found.num_ended)),
        ("arms", str(len(found.arms))),
        ("seeds", ", ".join(map(str, found.plan.seeds))),
    ]
    if found.selected_by is not None:
        facts.append(("selected by", f"{found.selected_by} on the test data"))
    page = render_sections(f"Sweep {found.directory.absolute().name}", facts, specs)
    write_atomically(path, page)


def headline_figures(found: SweepResults) -> list[str]:
    """The figures that are compared: those that matter most, of those that there are."""
    names = found.figure_names
    return [name for name in HEADLINES if name in names][:MAX_SHOWN] or names[:1]


def _arms(found: SweepResults) -> Context | None:
    if not found.rows:
        return None
    names = headline_figures(found)
    tables = [_table_of(found, name) for name in names]
    return {"tables": tables, "cautions": found.cautions(names)}


def _table_of(found: SweepResults, name: str) -> Context:
    rows = []
    means = [(arm, found.over_seeds(arm, name)) for arm in found.arms]
    ends = [end for _, one in means if one for end in (one.high or one.mean, *one.values.values())]
    limit = max(ends, default=1.0)
    # A line from 0 has no place for what is below.
    if any(value < 0 for _, one in means if one for value in one.values.values()):
        limit = 0.0
    for place, (arm, mean) in enumerate(means):
        if mean is None:
            continue
        before = found.over_seeds(arm, name, "before")
        low = None if mean.low is None else max(mean.low, 0.0)
        rows.append(
            {
                "arm": arm.name,
                "letter": _letter(place),
                "color": _color(place),
                "num_seeds": len(mean.values),
                "before": format_value(name, before.mean) if before else NOTHING,
                "after": format_value(name, mean.mean),
                "interval": interval(mean.low, mean.high, name),
                "whisker": whisker(mean.mean, low, mean.high, limit=limit, color=_color(place)),
                "seeds": ", ".join(
                    format_value(name, mean.values[seed]) for seed in sorted(mean.values)
                ),
            }
        )
    return {"name": name, "rows": rows}


def _pairs(found: SweepResults) -> Context | None:
    placed: list[_Placed] = list(enumerate(found.arms))
    pairs = list(combinations(placed, 2))
    if len(placed) > MAX_COMPARED:
        pairs = pairs[: len(placed) - 1]
    tables: list[Context] = [
        {"name": name, "rows": _tested(found, name, pairs)} for name in headline_figures(found)
    ]
    tables = [table for table in tables if table["rows"]]
    return {"tables": tables} if tables else None


def _tested(
    found: SweepResults, name: str, pairs: Sequence[tuple[_Placed, _Placed]]
) -> list[dict[str, str]]:
    """A row a pair of arms that have two seeds in common or more."""
    known: list[tuple[str, Difference]] = []
    for (place, arm), (other_place, other) in pairs:
        beside = found.difference(other, arm, name)
        if beside is not None and beside.num_seeds > 1:
            known.append((f"{_letter(other_place)} less {_letter(place)}", beside))
    adjusted = iter(holm([beside.p for _, beside in known if beside.p is not None]))
    return [
        {
            "arms": arms,
            "difference": _signed(beside.mean),
            "interval": NOTHING
            if beside.low is None or beside.high is None
            else f"[{_signed(beside.low)}, {_signed(beside.high)}]",
            "p": NOTHING if beside.p is None else f"{beside.p:.2g}",
            "p_holm": NOTHING if beside.p is None else f"{next(adjusted):.2g}",
            "num_seeds": str(beside.num_seeds),
        }
        for arms, beside in known
    ]


def _trials(found: SweepResults) -> Context | None:
    if not found.trials or found.plan.search is None:
        return None
    is_more = found.plan.search.direction == "maximize"
    paths = list(dict.fromkeys(path for one in found.trials for path in one.arm.values))
    places = {arm.run_id(0): place for place, arm in enumerate(found.arms)}
    rows = [
        {
            "number": one.number,
            "state": one.state,
            "value": decimal(one.value),
            "trainer": one.arm.trainer,
            "values": [value_text(one.arm.values.get(path, "")) for path in paths],
        }
        for one in sorted(found.trials, key=lambda one: (places[one.arm.run_id(0)], one.number))
    ]
    values = [(float(one.number), one.value) for one in found.trials if one.state == "complete"]
    best, points = None, []
    for number, value in values:
        if value is not None:
            best = value if best is None else (max if is_more else min)(best, value)
            points.append((number, best))
    lines = [
        Line("trial", values, 2, is_thin=True),
        Line("best so far", points, 1, has_steps=True),
    ]
    chart = line_chart("Objective", lines, note="thick: best so far", x_label="trial")
    return {"paths": paths, "rows": rows, "charts": [chart] if chart else []}


def _groups(found: SweepResults) -> list[RunGroup]:
    """The runs of the first arms, those that have begun."""
    groups: list[RunGroup] = []
    for place, arm in enumerate(found.arms[:MAX_DRAWN]):
        runs = [
            run
            for seed in found.plan.seeds
            if (run := _read(found.directory / arm.run_id(seed))) is not None
        ]
        if runs:
            groups.append(RunGroup(_letter(place), arm.name, _color(place), runs))
    return groups


def _read(path: Path) -> RunRecord | None:
    try:
        return read_run(path) if path.is_dir() else None
    except RunDirectoryError:
        # It has begun and has written nothing yet.
        return None


def _curves(groups: Sequence[RunGroup]) -> Context | None:
    if not groups:
        return None
    return {
        "legend": [
            {
                "label": f"{group.name}: {group.label}"
                + (f"; mean of {len(group.runs)} seeds" if len(group.runs) > 1 else ""),
                "color": group.color,
            }
            for group in groups
        ],
        "is_compared": True,
        "charts": charts_of(groups, means_only=True),
        "metrics": [],
    }


def _differences(groups: Sequence[RunGroup]) -> Context | None:
    if len(groups) < 2:
        return None
    rows = parameter_differences([group.runs[0] for group in groups])
    names = [f"{group.name}: {group.label}" for group in groups]
    return {"names": names, "rows": [row for row in rows if row[0] != "seed"]}


def _runs(found: SweepResults) -> Context:
    failures = read_failures(found.directory)
    rows = []
    for arm in found.arms:
        for seed in found.plan.seeds:
            run_id = arm.run_id(seed)
            status = status_of(found.directory / run_id)
            is_failed = run_id in failures and status is not RunStatus.ENDED
            rows.append(
                {
                    "run_id": run_id,
                    "arm": arm.name,
                    "seed": seed,
                    "status": RunStatus.FAILED.value if is_failed else status.value,
                    "link": f"{run_id}/{REPORT}" if status is RunStatus.ENDED else "",
                    "message": failures.get(run_id, "") if is_failed else "",
                }
            )
    return {"rows": rows, "num_failed": sum(bool(row["message"]) for row in rows)}


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _color(place: int) -> int:
    return 1 + place % MAX_DRAWN


def _signed(value: float) -> str:
    written = decimal(value)
    return written if value < 0 else f"+{written}"
