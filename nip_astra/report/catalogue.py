"""The page of a folder of runs: a sortable, filterable table, and overlaid curves."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from nip_astra.errors import RunDirectoryError
from nip_astra.report import summary
from nip_astra.report.charts import CURVES, HELD_OUT, Line, points_of, thin_line
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    TASK,
    RunRecord,
    mapping,
    number,
    read_run,
    text,
    words,
)
from nip_astra.safe_text import safe_text
from nip_astra.tracking.run_directory import FAILED, HYPER_PARAMETERS, REPORT
from nip_astra.utils.formatting import count

NUM_POINTS = 60
"""Number of points of a curve on the page."""
MAX_DEPTH = 3
"""Maximum depth of a run below the page's folder, as in a sweep."""
FIGURES = {
    CONVERSATION: "failing conversations",
    TASK: "right answers",
    PROTOCOL: "right decisions",
}
"""The main figure by kind of run."""


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a folder, including those of its sweeps, by name."""
    depths = range(1, MAX_DEPTH + 1)
    found = (folder.glob("/".join(["[!.]*"] * depth + [HYPER_PARAMETERS])) for depth in depths)
    return sorted({file.parent for files in found for file in files})


def catalogue(folder: Path, output: Path) -> dict[str, Any]:
    """Return the rows of all runs in a folder, with page-relative links, and their curves."""
    runs, notes = [], []
    for path in runs_in(folder):
        try:
            runs.append(read_run(path, has_tables=False))
        except RunDirectoryError as error:
            notes.append(str(error))
    rows = [_row(run, folder, output) for run in runs]
    choices = {
        name: sorted({str(row[name]) for row in rows}) for name in ("trainer", "scenario", "status")
    }
    curves = json.dumps([_curves(run) for run in runs], separators=(",", ":"))
    data = Markup(curves.replace("<", "\\u003c"))
    return {"rows": rows, "choices": choices, "data": data, "notes": notes}


def _row(run: RunRecord, folder: Path, output: Path) -> dict[str, Any]:
    training, (before, after) = mapping(run.results.get("training")), summary.measured(run)
    columns = summary.OVERVIEW[run.kind][:2]
    number_of = number(training.get("num_iterations")) or run.metrics.num_rows
    status = "finished" if run.results else "unfinished"
    page = run.path / REPORT
    link = quote(os.path.relpath(page, output.parent)) if page.is_file() else ""
    # Parameters are written when a run starts.
    written = datetime.fromtimestamp((run.path / HYPER_PARAMETERS).stat().st_mtime, UTC)
    return {
        "name": run.path.relative_to(folder).as_posix(),
        "link": link,
        "trainer": text(run.hyper_params.get("trainer")),
        "scenario": Path(text(run.hyper_params.get("scenario"))).name,
        "seed": number(run.hyper_params.get("seed")),
        "status": "failed" if run.results.get("status") == FAILED else status,
        "iterations": number_of,
        "figure": FIGURES[run.kind],
        "before": columns[0].cell(before),
        "after": columns[1].cell(after),
        "values": [_value(columns[1].names, after), _value(columns[0].names, before)],
        "started": f"{written:%Y-%m-%d %H:%M}",
    }


def _value(names: Sequence[str], report: dict[str, Any]) -> float | None:
    known = (number(report.get(name)) for name in names)
    return next((value for value in known if value is not None), None)


def _curves(run: RunRecord) -> dict[str, list[list[float]]]:
    """Return the points of each chart of the run, by title."""
    found: dict[str, list[list[float]]] = {}
    for curve in CURVES:
        if curve.kinds and run.kind not in curve.kinds:
            continue
        for agent in run.agents if "{}" in curve.names[0] else [""]:
            title = f"{curve.title}, {words(agent)}" if agent else curve.title
            for name in curve.names:
                points = points_of(run, name.format(agent))
                if len(points) > (1 if name.startswith(HELD_OUT) else 0):
                    line, _, _ = thin_line(Line("", points), NUM_POINTS, NUM_POINTS)
                    known = [(x, y) for x, y in line.points if y is not None]
                    found[safe_text(title)] = [[x, float(f"{y:.4g}")] for x, y in known]
                    break
    return found


def facts_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the number of runs, in total and by status."""
    states = [row["status"] for row in rows]
    counts = [("runs", len(rows)), *((name, states.count(name)) for name in dict.fromkeys(states))]
    return [(name, count(value)) for name, value in counts]
