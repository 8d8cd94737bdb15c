"""What the evaluations say of the scorers themselves: how good, and how far they agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.report.records import RunRecord, items, mapping, text
from nip_astra.report.summary import Row
from nip_astra.report.wording import NOTHING, count, decimal, figure_text, percent

QUALITY_HEADINGS = (
    "conversations with a failure",
    "corrected",
    "failures found",
    "others passed",
    "labelled",
)
AGREEMENT_HEADINGS = (
    "turns",
    "agree",
    "Cohen\N{RIGHT SINGLE QUOTATION MARK}s kappa",
    "correlation",
    "both / first / second / neither",
)

Groups = list[tuple[str, list[Row]]]
"""Rows by the name of their evaluation."""


def quality_rows(run: RunRecord) -> Groups:
    """Quality and corrected rate of each scorer of each evaluation with labels."""
    found = [
        (name, [_quality(one, scorer) for scorer in mapping(one.get("detectors"))])
        for name, one in run.evaluations.items()
    ]
    return [(name, rows) for name, rows in found if rows]


def agreement_rows(run: RunRecord) -> Groups:
    """How far each two scorers of each evaluation agree."""
    found = [
        (name, [_agreement(mapping(pair)) for pair in items(one.get("scorer_agreement"))])
        for name, one in run.evaluations.items()
    ]
    return [(name, rows) for name, rows in found if rows]


def _quality(evaluation: Mapping[str, Any], scorer: str) -> Row:
    found = mapping(mapping(evaluation.get("detectors")).get(scorer))
    corrected = mapping(found.get("corrected"))
    is_first = scorer == text(evaluation.get("scorer"))
    own = evaluation if is_first else mapping(mapping(evaluation.get("scorers")).get(scorer))
    told = figure_text("failure_rate", corrected.get("failure_rate"))
    cells = [
        figure_text("failure_rate", own.get("failure_rate")),
        f"refused: {text(corrected.get('reason'))}" if corrected.get("is_refused") else told,
        figure_text("sensitivity", found.get("sensitivity")),
        figure_text("specificity", found.get("specificity")),
        f"{count(found.get('num_failures'))} + {count(found.get('num_others'))}",
    ]
    return Row(scorer, cells)


def _agreement(pair: Mapping[str, Any]) -> Row:
    counts = [count(pair.get(key)) for key in ("both", "only_first", "only_second", "neither")]
    cells = [
        count(pair.get("num_turns")),
        percent(pair.get("agreement")),
        decimal(pair.get("kappa")),
        decimal(pair.get("correlation")),
        " / ".join(counts),
    ]
    return Row(f"{text(pair.get('first'))}, {text(pair.get('second'))}", cells)


def kinds_text(evaluation: Mapping[str, Any]) -> str:
    """How many kinds of failure there are at least, with the interval."""
    kinds = mapping(evaluation.get("kinds"))
    if not kinds.get("seen"):
        return NOTHING
    low, high = decimal(kinds.get("low")), decimal(kinds.get("high"))
    return f"{decimal(kinds.get('value'))} [{low}, {high}]"
