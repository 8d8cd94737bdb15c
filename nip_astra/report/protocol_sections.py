"""The sections about runs whose agents play an interaction protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nip_astra.report import (
    analyses,
    curves,
    protocol_curves,
    protocol_episodes,
    protocol_runs,
    provenance,
)
from nip_astra.report.curves import RunGroup, run_label
from nip_astra.report.records import RunRecord, text
from nip_astra.report.spec import Context, Spec

MAX_WITH_BEFORE = 3
"""Agents whose figures before training stand beside those after it; of more there is no room."""


def sections_of_protocol_run(run: RunRecord) -> list[Spec]:
    """The sections about what one run found; those about its origin come after them."""
    return [
        Spec("summary", "Summary", lambda: _summary(run)),
        Spec("curves", "Learning curves", lambda: _curves(run)),
        Spec("statistics", "Final figures", lambda: _statistics(run)),
        Spec("analyses", "Rollout analyses", lambda: analyses.analyses(run)),
        Spec("episodes", "Sample episodes", lambda: _episodes(run)),
    ]


def protocol_overview(groups: Sequence[RunGroup], anchors: Mapping[int, str]) -> Context:
    """The comparison of runs that play a protocol."""
    blocks = []
    for group in groups:
        rows = [
            {
                "label": run_label(run, group),
                "anchor": anchors[id(run)],
                "protocol": protocol_runs.protocol_of(run),
                "cells": protocol_runs.overview_cells(run),
                "rewards": protocol_runs.reward_texts(run),
                "whisker": protocol_runs.measured(run)[1].accuracy_whisker(group.color),
            }
            for run in group.runs
        ]
        legend = f"{group.name}: {group.label}" if group.name else group.label
        blocks.append({"legend": legend, "color": group.color, "rows": rows})
    warnings = [
        f"{run_label(run, group)}: {line}"
        for group in groups
        for run in group.runs
        for line in provenance.all_warnings(run)
    ]
    return {"headings": protocol_runs.OVERVIEW, "blocks": blocks, "warnings": warnings}


def _summary(run: RunRecord) -> Context:
    warnings = [{"text": line, "is_failing": False} for line in provenance.all_warnings(run)]
    return {
        "sentences": protocol_runs.verdict(run),
        "warnings": warnings,
        "tiles": protocol_runs.tiles(run),
        "headings": [],
        "rows": [],
    }


def _curves(run: RunRecord) -> Context:
    group = RunGroup("", text(run.hyper_params.get("trainer")) or "run", 1, [run])
    return {
        "legend": _agents(run),
        "is_compared": True,
        "charts": protocol_curves.charts_of_run(run),
        "metrics": curves.metric_rows([group]),
    }


def _statistics(run: RunRecord) -> Context | None:
    headings, rows = protocol_runs.overall_rows(run)
    agents = _agents(run)
    by_agent = protocol_runs.agent_rows(run, has_before=len(agents) <= MAX_WITH_BEFORE)
    if not rows and not by_agent:
        return None
    return {"headings": headings, "rows": rows, "agents": agents, "by_agent": by_agent}


def _episodes(run: RunRecord) -> Context | None:
    tables = protocol_episodes.tables_of(run)
    has_texts = any(one.texts for table in tables for one in table.episodes)
    context = {"tables": tables, "agents": _agents(run), "has_texts": has_texts}
    return context if tables else None


def _agents(run: RunRecord) -> list[Context]:
    colors = protocol_runs.colors_of(protocol_runs.agents_of(run))
    return [{"label": name.replace("_", " "), "color": color} for name, color in colors.items()]
