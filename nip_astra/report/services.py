"""What chat models took: requests, tokens, money, time, refusals and failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.evaluation.tables import model_label
from nip_astra.report.records import RunRecord, mapping, number, text
from nip_astra.report.spec import Context
from nip_astra.report.wording import NOTHING, count, decimal

HEADINGS = (
    *("model", "requests", "remembered", "refusals", "failures", "tokens read", "tokens said"),
    *("cost", "seconds, median", "seconds, 95 %"),
)


def services(run: RunRecord) -> Context | None:
    """The table of a run and its evaluations; None where no chat model was asked."""
    rows = rows_of("the run", run.results)
    for name, evaluation in run.evaluations.items():
        rows += rows_of(f"evaluation {name}", evaluation)
    if not rows:
        return None
    return {
        "headings": HEADINGS,
        "rows": rows,
        "is_guessed": any(cells[-1] for _, cells in rows),
        "has_prices": any(cells[7] != NOTHING for _, cells in rows),
    }


def rows_of(where: str, figures: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """A heading and the cells of each chat model, and last whether its tokens were guessed."""
    found = []
    for name, value in mapping(figures.get("services")).items():
        use = mapping(value)
        failures = mapping(use.get("failures"))
        told = ", ".join(f"{count(number(n))} {reason}" for reason, n in failures.items())
        cells = [
            model_label(text(use.get("model"))) or NOTHING,
            *(count(number(use.get(key))) for key in ("num_requests", "num_remembered")),
            count(number(use.get("num_refusals"))),
            told or "0",
            *(count(number(use.get(key))) for key in ("prompt_tokens", "completion_tokens")),
            *(decimal(number(use.get(key))) for key in ("cost", "median_seconds", "p95_seconds")),
            "guessed" if number(use.get("num_estimated")) else "",
        ]
        found.append((f"{text(name)}, {where}", cells))
    return found
