"""What a judge said of what agents said: a table of shares, and verdicts beside conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.report.records import RunRecord, items, mapping, number, text
from nip_astra.report.spec import Context
from nip_astra.report.wording import NOTHING, count, interval, percent

_SPLIT_OF = {"train": "train", "before": "test", "evaluation": "test"}
"""Whose rollouts a table of episodes is a sample of."""


def analyses(run: RunRecord) -> Context | None:
    """The table of all analyses of a run; None where nothing was judged."""
    found = [one for one in run.analyses if mapping(one.get("shares"))]
    if not found:
        return None
    places = sorted({_place(one) for one in found})
    names = dict.fromkeys(
        (text(one.get("analyser")), agent) for one in found for agent in mapping(one["shares"])
    )
    rows = []
    for name, agent in names:
        by_place = {
            _place(one): mapping(mapping(one["shares"]).get(agent))
            for one in found
            if text(one.get("analyser")) == name
        }
        rows.append(
            {
                "analyser": name.replace("_", " "),
                "agent": agent.replace("_", " "),
                "cells": [_cell(by_place.get(place, {})) for place in places],
            }
        )
    meanings = {text(one.get("analyser")): text(one.get("meaning")) for one in found}
    judges = sorted({text(mapping(one.get("judge")).get("model")) for one in found})
    return {
        "headings": [f"{split}, iteration {number_of + 1}" for split, number_of in places],
        "rows": rows,
        "meanings": [(name.replace("_", " "), told) for name, told in meanings.items()],
        "judges": judges,
    }


def verdicts_of(run: RunRecord, table: str, row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Agent, analyser and what was said of an episode, for the page."""
    step, episode = number(row.get("step")), number(row.get("episode"))
    place = (_SPLIT_OF.get(table, table), int(step or 0) - 1)
    found = []
    for one in run.analyses:
        if _place(one) != place:
            continue
        for judged in map(mapping, items(one.get("judged"))):
            if number(judged.get("rollout")) == episode:
                reason = text(judged.get("reason"))
                told = text(judged.get("verdict")) + (f": {reason}" if reason else "")
                name = text(one.get("analyser")).replace("_", " ")
                found.append((text(judged.get("agent")), name, told))
    return found


def _place(one: Mapping[str, Any]) -> tuple[str, int]:
    return text(one.get("split")), int(number(one.get("iteration")) or 0)


def _cell(share: Mapping[str, Any]) -> str:
    if not share:
        return NOTHING
    num_known = (number(share.get("num_yes")) or 0) + (number(share.get("num_no")) or 0)
    told = f"{percent(number(share.get('share')))} {interval(share.get('low'), share.get('high'))}"
    unknown = number(share.get("num_unknown")) or 0
    return f"{told} of {count(num_known)}" + (f", {count(unknown)} unknown" if unknown else "")
