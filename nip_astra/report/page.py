"""Write the report of one or several runs: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.report.charts import group_runs, run_label
from nip_astra.report.records import RunRecord, read_run, text
from nip_astra.report.sections import Spec, sections_of_comparison, sections_of_run
from nip_astra.report.transcripts import MAX_CHARACTERS, MAX_NODES
from nip_astra.safe_text import safe_text
from nip_astra.tracking.run_directory import REPORT, write_atomically
from nip_astra.utils import formatting
from nip_astra.version import __version__

COMPARISON_FILE = "comparison.html"
"""Name of a report of several runs, beside the first run's directory."""
VEILED = 'x" tabindex="0"'
"""Start of the attributes of a blurred element; see `veil` in parts.html.jinja."""
TOOLS = '<div class="tools"'
"""Start of the search among conversations."""
FILTERS = ("percent", "decimal", "count", "duration")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A section that has been drawn."""

    anchor: str
    title: str
    html: Markup


@dataclass(frozen=True)
class RunPart:
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
        Run directories; several are compared.
    output : str or Path, optional
        Where to write; `report.html` in the run's directory, or for several runs
        `comparison.html` beside the first run's directory.
    redact : bool
        Whether the text of failures is blurred until the reader asks for it.

    Raises
    ------
    RunDirectoryError
        When a path is no run directory, or the page cannot be written.
    ConfigurationError
        When no run is given.
    """
    if not run_paths:
        raise ConfigurationError(
            "no run was given. Give one or more run directories, for instance runs/<run id>."
        )
    runs = [read_run(path) for path in run_paths]
    if output is None:
        first = runs[0].path
        output = first / REPORT if len(runs) == 1 else first.resolve().parent / COMPARISON_FILE
    page = render_report(runs, redact=redact)
    try:
        write_atomically(Path(output), page)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{error} Another place is given with --output.") from error
    return Path(output)


def render_report(runs: Sequence[RunRecord], *, redact: bool = True) -> str:
    """The page about one run, or about several with a comparison first, as HTML."""
    drawer = _Drawer(redact)
    limits = {
        "max_nodes": MAX_NODES // len(runs),
        "max_characters": MAX_CHARACTERS // len(runs),
    }
    if len(runs) == 1:
        specs = sections_of_run(runs[0], anchor="conversations", has_curves=True, **limits)
        sections, parts = drawer.draw(specs), []
    else:
        groups = group_runs(runs)
        anchors = {id(run): f"run-{place}" for place, run in enumerate(runs, start=1)}
        sections = drawer.draw(sections_of_comparison(groups, anchors))
        parts = [
            RunPart(
                anchors[id(run)],
                run_label(run, group),
                run.run_id,
                drawer.draw(
                    sections_of_run(run, anchor=anchors[id(run)], has_curves=False, **limits),
                    f"{anchors[id(run)]}-",
                ),
            )
            for group in groups
            for run in group.runs
        ]
    return _page(_title(runs), _facts(runs), sections, parts)


def render_sections(
    title: str, facts: Sequence[tuple[str, str]], specs: Sequence[Spec], *, redact: bool = True
) -> str:
    """A page of sections of one's own, as HTML."""
    return _page(title, facts, _Drawer(redact).draw(specs), [])


def _page(
    title: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    parts: Sequence[RunPart],
) -> str:
    drawn = [*sections, *(section for part in parts for section in part.sections)]
    style = _source("style.css")
    # Where no conversation is shown there is nothing to look for.
    script = _source("script.js") if any(TOOLS in one.html for one in drawn) else ""
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


class _Drawer:
    """Renders sections; one that fails is replaced by its error."""

    def __init__(self, redact: bool) -> None:
        self.redact = redact

    def draw(self, specs: Sequence[Spec], prefix: str = "") -> list[Section]:
        drawn = [self._draw_one(spec, f"{prefix}{spec.name}") for spec in specs]
        return [section for section in drawn if section is not None]

    def _draw_one(self, spec: Spec, anchor: str) -> Section | None:
        try:
            context = spec.build()
            if context is None:
                return None
            template = _environment().get_template(f"{spec.name}.html.jinja")
            inside = Markup(template.render(context, redact=self.redact))
        except Exception as error:
            # A finished run must not fail because a file of it holds something unforeseen.
            logger.exception("the section %r of a report could not be drawn", spec.name)
            written = f"This section could not be drawn: {type(error).__name__}: {error}"
            inside = Markup("<p>{}</p>").format(safe_text(written))
        html = Markup('<section id="{}"><h2>{}</h2>{}</section>').format(anchor, spec.title, inside)
        return Section(anchor, spec.title, html)


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
    return environment


def _shown(value: object) -> object:
    """Make a text safe, wherever a template writes it; what is HTML already was made of such."""
    return safe_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _source(name: str) -> str:
    """Return a file beside the templates as it is."""
    loader = _environment().loader
    assert loader is not None
    source, _, _ = loader.get_source(_environment(), name)
    return source


def _digest(text: str) -> str:
    """Return what the page's policy calls a style or script by."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _title(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"Comparison of {len(runs)} runs"
    names = [text(runs[0].hyper_params.get(name)) for name in ("trainer", "scenario")]
    return f"{names[0]} on {Path(names[1]).name}" if all(names) else runs[0].run_id


def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    if len(runs) > 1:
        return []
    run = runs[0]
    named = [("run", run.run_id), ("seed", text(run.hyper_params.get("seed")))]
    named += [("device", text(run.settings.get("device")))]
    named += [("finished", "yes" if run.results else "not yet")]
    return [(name, value) for name, value in named if value]
