"""Rendering of the report of runs, or of a folder of runs, as a self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from nip_astra.errors import ConfigurationError, RunDirectoryError, counted
from nip_astra.evaluation.run_results import status_of
from nip_astra.report import summary
from nip_astra.report.charts import (
    CURVES,
    HELD_OUT,
    Line,
    group_runs,
    points_of,
    run_label,
    thin_line,
)
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    TASK,
    RunRecord,
    is_run,
    mapping,
    number,
    read_run,
    text,
    words,
)
from nip_astra.report.sections import Spec, sections_of_comparison, sections_of_run
from nip_astra.safe_text import safe_text
from nip_astra.tracking.run_directory import (
    ENVIRONMENT,
    HYPER_PARAMETERS,
    REPORT,
    RESULTS,
    SETTINGS,
    write_atomically,
)
from nip_astra.tracking.tracker import METRICS_FILE, TIMINGS_FILE
from nip_astra.utils import formatting
from nip_astra.utils.formatting import count
from nip_astra.version import __version__

COMPARISON_FILE = "comparison.html"
"""File name of a report of several runs, beside the first run's directory."""
VEILED = 'x" tabindex="0"'
"""Start of the attributes of a blurred element; see `veil` in parts.html.jinja."""
TOOLS = '<div class="tools"'
"""Start of the search controls for conversations."""
FILTERS = ("percent", "decimal", "count", "duration")

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

logger = logging.getLogger(__name__)


class Section(NamedTuple):
    """A rendered section."""

    anchor: str
    title: str
    html: Markup


class RunPart(NamedTuple):
    """A run of a comparison with its own sections."""

    anchor: str
    label: str
    run_id: str
    sections: list[Section]


def write_report(
    run_paths: Sequence[str | Path], output: str | Path | None = None, *, redact: bool = True
) -> Path:
    """Write one self-contained page about the runs and return its path.

    The page lists what is missing or broken in a run directory.

    Parameters
    ----------
    run_paths : Sequence of str or Path
        Run directories; several are compared. A folder of runs gives a page with a table of all.
    output : str or Path, optional
        Where to write; `report.html` in the run's directory or the folder, or for several runs
        `comparison.html` beside the first run's directory.
    redact : bool
        Whether the text of failures is blurred until the reader clicks on it.

    Raises
    ------
    RunDirectoryError
        When a path is not a run directory, or the page cannot be written.
    ConfigurationError
        When no run is given.
    """
    if not run_paths:
        raise ConfigurationError(
            "no run given. Give one or more run directories, for instance runs/<run id>."
        )
    folder = Path(run_paths[0])
    if len(run_paths) == 1 and not is_run(folder) and runs_in(folder):
        output = folder / REPORT if output is None else output
        context = _catalogue(folder, Path(output))
        states = Counter(row["status"] for row in context["rows"])
        facts = [("runs", states.total()), *states.items()]
        page = render_sections(
            f"Runs in {folder.resolve().name}",
            [(name, count(value)) for name, value in facts],
            [Spec("catalogue", "Runs", lambda: context)],
            redact=redact,
        )
    else:
        runs = [read_run(path) for path in run_paths]
        page = render_report(runs, redact=redact)
        if output is None:
            first = runs[0].path
            output = first / REPORT if len(runs) == 1 else first.resolve().parent / COMPARISON_FILE
    try:
        write_atomically(Path(output), page)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{error} Another place is given with --output.") from error
    return Path(output)


def render_report(runs: Sequence[RunRecord], *, redact: bool = True) -> str:
    """Render the page about one run, or about several with a comparison first, as HTML."""
    if len(runs) == 1:
        (run,) = runs
        names = [text(run.hyper_params.get(name)) for name in ("trainer", "scenario")]
        title = f"{names[0]} on {Path(names[1]).name}" if all(names) else run.run_id
        facts = [
            ("run", run.run_id),
            ("seed", text(run.hyper_params.get("seed"))),
            ("device", text(run.settings.get("device"))),
            ("status", status_of(run.results)),
        ]
        facts = [(name, value) for name, value in facts if value]
        return render_sections(title, facts, sections_of_run(run), redact=redact)
    groups = group_runs(runs)
    anchors = {id(run): f"run-{index}" for index, run in enumerate(runs, start=1)}
    sections = _drawn(sections_of_comparison(groups, anchors), redact)
    parts = []
    for group in groups:
        for run in group.runs:
            anchor = anchors[id(run)]
            specs = sections_of_run(run, anchor=anchor, num_runs=len(runs))
            sections_drawn = _drawn(specs, redact, f"{anchor}-")
            parts.append(RunPart(anchor, run_label(run, group), run.run_id, sections_drawn))
    return _page(f"Comparison of {len(runs)} runs", [], sections, parts)


def render_sections(
    title: str, facts: Sequence[tuple[str, str]], specs: Sequence[Spec], *, redact: bool = True
) -> str:
    """Render a page of custom sections as HTML."""
    return _page(title, facts, _drawn(specs, redact), [])


def _page(
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    parts: Sequence[RunPart],
) -> str:
    drawn = [*sections, *(section for part in parts for section in part.sections)]
    style = _source("style.css")
    # Where no conversation is shown there is nothing to look for.
    script = _source("script.js") if any(TOOLS in section.html for section in drawn) else ""
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=title,
            facts=facts,
            sections=sections,
            runs=parts,
            # A page without a failure, or of a protocol, has nothing to blur.
            is_veiled=any(VEILED in section.html for section in drawn),
            version=__version__,
            style=Markup(style),
            style_hash=_digest(style),
            script=Markup(script),
            script_hash=_digest(script),
        )
    )


def _drawn(specs: Sequence[Spec], redact: bool, prefix: str = "") -> list[Section]:
    """Return the non-empty sections; one that fails is replaced by its error."""
    sections = []
    for spec in specs:
        try:
            context = spec.build()
            if context is None:
                continue
            template = _environment().get_template(f"{spec.name}.html.jinja")
            inside = Markup(template.render(context, redact=redact))
        except Exception as error:
            # A finished run must not fail because a file of it holds something unforeseen.
            logger.exception("the section %r of a report could not be drawn", spec.name)
            message = f"This section could not be drawn: {type(error).__name__}: {error}"
            inside = Markup("<p>{}</p>").format(safe_text(message))
        anchor, html = f"{prefix}{spec.name}", '<section id="{}"><h2>{}</h2>{}</section>'
        drawn = Markup(html).format(anchor, spec.title, inside)
        sections.append(Section(anchor, spec.title, drawn))
    return sections


@cache
def _environment() -> Environment:
    # Everything is escaped: most texts of a run were written by a model.
    environment = Environment(
        loader=PackageLoader("nip_astra.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(formatting, name) for name in FILTERS}
    environment.filters |= {"counted": counted, "breakable": _breakable}
    return environment


def _breakable(name: str) -> Markup:
    """Return a name whose line may break after its separators."""
    return Markup(re.sub("([-_/=]+)(?=.)", r"\1<wbr>", str(escape(safe_text(name)))))


def _shown(value: object) -> object:
    """Escape a text wherever a template writes it; HTML was already built from escaped texts."""
    return safe_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _source(name: str) -> str:
    """Return the text of a file beside the templates."""
    loader = _environment().loader
    assert loader is not None
    source, _, _ = loader.get_source(_environment(), name)
    return source


def _digest(text: str) -> str:
    """Return the digest of a style or script for the page's content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- a folder of runs

KEPT_ENTRIES = ".report_entries.json"
"""File of a folder with what its last report read of each run."""
ENTRY_FORMAT = 1
"""Version of these entries; it rises when a row or a curve is made in another way."""
_FILES_OF_ENTRY = (HYPER_PARAMETERS, SETTINGS, ENVIRONMENT, RESULTS, METRICS_FILE, TIMINGS_FILE)


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a folder, including those of its sweeps, by name."""
    depths = range(1, MAX_DEPTH + 1)
    files_by_depth = (
        folder.glob("/".join(["[!.]*"] * depth + [HYPER_PARAMETERS])) for depth in depths
    )
    return sorted({file.parent for files in files_by_depth for file in files})


def _catalogue(folder: Path, output: Path) -> dict[str, Any]:
    """Return the rows of all runs in a folder, with page-relative links, and their curves.

    What was read of a run is kept in the folder, and read again when a file of the run changes.
    """
    stored_entries = _read_kept_entries(folder)
    entries, rows, notes = {}, [], []
    for path in runs_in(folder):
        name = path.relative_to(folder).as_posix()
        stamp = _stamp(path)
        entry = stored_entries.get(name)
        if entry is None or entry["stamp"] != stamp:
            try:
                run = read_run(path, has_tables=False)
            except RunDirectoryError as error:
                notes.append(str(error))
                continue
            entry = {"stamp": stamp, "row": _row(run), "curves": _curves(run)}
        entries[name] = entry
        page = path / REPORT
        link = quote(os.path.relpath(page, output.parent)) if page.is_file() else ""
        rows.append({**entry["row"], "name": name, "link": link})
    if entries != stored_entries:
        _keep_entries(folder, entries)
    choices = {
        name: sorted({str(row[name]) for row in rows}) for name in ("trainer", "scenario", "status")
    }
    curves = json.dumps([entry["curves"] for entry in entries.values()], separators=(",", ":"))
    data = Markup(curves.replace("<", "\\u003c"))
    return {"rows": rows, "choices": choices, "data": data, "notes": notes}


def _stamp(run: Path) -> list[Any]:
    """Return names, sizes and times of the files that the table of runs is made of."""
    stamps = []
    for name in _FILES_OF_ENTRY:
        with suppress(OSError):
            status = (run / name).lstat()
            stamps.append([name, status.st_size, status.st_mtime_ns])
    return stamps


def _read_kept_entries(folder: Path) -> dict[str, Any]:
    """Return what an earlier report of the folder read; nothing if that cannot be used."""
    try:
        digest, _, content = (folder / KEPT_ENTRIES).read_text(encoding="utf-8").partition("\n")
        if digest != _entries_digest(content):
            return {}
        entries: dict[str, Any] = json.loads(content)
    except (OSError, ValueError, RecursionError):
        return {}
    return entries


def _entries_digest(content: str) -> str:
    """Return the digest of kept entries, which also changes with the way they are made."""
    return hashlib.sha256(f"{ENTRY_FORMAT} {content}".encode()).hexdigest()


def _keep_entries(folder: Path, entries: Mapping[str, Any]) -> None:
    content = json.dumps(entries, separators=(",", ":"))
    try:
        write_atomically(folder / KEPT_ENTRIES, f"{_entries_digest(content)}\n{content}")
    except RunDirectoryError as error:
        # The page is complete without it; the next one is slower.
        logger.info("%s", error)


def _row(run: RunRecord) -> dict[str, Any]:
    """Return the cells of a run, as JSON can hold them."""
    training, (before, after) = mapping(run.results.get("training")), summary.measured(run)
    columns = summary.OVERVIEW[run.kind][:2]
    number_of = number(training.get("num_iterations")) or run.metrics.num_rows
    # Parameters are written when a run starts.
    written = datetime.fromtimestamp((run.path / HYPER_PARAMETERS).stat().st_mtime, UTC)
    return {
        "trainer": text(run.hyper_params.get("trainer")),
        "scenario": Path(text(run.hyper_params.get("scenario"))).name,
        "seed": number(run.hyper_params.get("seed")),
        "status": status_of(run.results),
        "iterations": number_of,
        "figure": FIGURES[run.kind],
        "before": columns[0].cell(before),
        "after": columns[1].cell(after),
        "values": [
            number(report.get(summary.main_rate(report) or "")) for report in (after, before)
        ],
        "started": f"{written:%Y-%m-%d %H:%M}",
    }


def _curves(run: RunRecord) -> dict[str, list[list[float]]]:
    """Return the points of each chart of the run, by title."""
    points_by_title: dict[str, list[list[float]]] = {}
    for curve in CURVES:
        if curve.kinds and run.kind not in curve.kinds:
            continue
        for agent in run.agents if "{}" in curve.names[0] else [""]:
            title = f"{curve.title}, {words(agent)}" if agent else curve.title
            for name in curve.names:
                points = points_of(run, name.format(agent))
                if len(points) > (1 if name.startswith(HELD_OUT) else 0):
                    line, _, _ = thin_line(Line("", points), NUM_POINTS, NUM_POINTS)
                    drawn = [(x, y) for x, y in line.points if y is not None]
                    points_by_title[safe_text(title)] = [[x, float(f"{y:.4g}")] for x, y in drawn]
                    break
    return points_by_title
