"""Models and scorers of a run, where they come from, and how far numbers can be had again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.report.protocol_runs import is_protocol_run
from nip_astra.report.records import RunRecord, items, mapping, number, text
from nip_astra.report.spec import Context
from nip_astra.report.wording import NOTHING, count, decimal

HEADINGS = ("name", "from", "licence", "parameters", "size", "sha256", "threshold")
ROLES = ("attacker", "target")
_NOT_STATED = "not stated"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def cards(run: RunRecord) -> Context | None:
    """The cards, and the sentences about how the numbers can be had again."""
    if is_protocol_run(run):
        return None
    found = _of_evaluations(run)
    told = found or _of_parameters(run)
    if not told:
        return None
    return {
        "headings": HEADINGS,
        "rows": [_cells(card) for card in told],
        "is_digested": bool(found),
        "sentences": determinism(run),
    }


def determinism(run: RunRecord) -> list[str]:
    """Say under which conditions the same command gives the same numbers."""
    seed = text(run.hyper_params.get("seed"))
    found = [f"All random numbers derive from the seed {seed} by name."] if seed else []
    threads = number(run.environment.get("num_threads"))
    device = text(run.environment.get("device")) or text(run.settings.get("device")) or "cpu"
    if device == "cpu":
        many = "" if threads is None else f" with {count(threads)} thread{'s'[: threads != 1]}"
        found.append(
            f"It ran on a CPU{many}: the same parameters, packages, threads and kind of processor "
            "give the same numbers to the last bit, also where a run was stopped and resumed."
        )
    else:
        found.append(
            f"Its device was {device}: a GPU may add numbers up in another order each time, so "
            "that last digits differ, and with them words that were nearly as likely."
        )
    told = [*_of_parameters(run), *_of_evaluations(run)]
    if any((card.get("role"), card.get("kind")) == ("scorer", "judge") for card in told):
        found.append("A service stands behind a scorer; it may answer otherwise another time.")
    return found


def _of_evaluations(run: RunRecord) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for evaluation in run.evaluations.values():
        for card in map(mapping, items(evaluation.get("cards"))):
            if card and card not in found:
                found.append(card)
    order = (*ROLES, "scorer")
    return sorted(found, key=lambda card: _place(order, text(card.get("role"))))


def _of_parameters(run: RunRecord) -> list[Mapping[str, Any]]:
    """What the parameters say where no evaluation looked at the weights."""
    section = _section(run)
    found: list[Mapping[str, Any]] = []
    for role in ROLES:
        agent = mapping(section.get(role))
        model = mapping(agent.get("language_model")) or mapping(agent.get("chat_model"))
        if model:
            found.append(_told(role, model))
    scorer = mapping(section.get("scorer"))
    if scorer:
        found.append(_told("scorer", scorer) | {"threshold": section.get("failure_threshold")})
    return found


def _told(role: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = text(parameters.get("_type"))
    places = [parameters.get("base_url"), parameters.get("model")]
    if parameters.get("service") == "local":
        places = [parameters.get("weights")]
    source = next(filter(None, places), None)
    return {"role": role, "name": kind, "kind": kind, "source": source}


def _section(run: RunRecord) -> Mapping[str, Any]:
    """The parameters of the scenario's kind: those with a target."""
    sections = [mapping(value) for value in run.hyper_params.values()]
    return next((one for one in sections if "target" in one and "scorer" in one), {})


def _cells(card: Mapping[str, Any]) -> tuple[str, list[str]]:
    name, kind, source = (text(card.get(key)) for key in ("name", "kind", "source"))
    cells = [
        name or NOTHING,
        ", ".join(part for part in dict.fromkeys((kind, source)) if part and part != name),
        text(card.get("licence")) or _NOT_STATED,
        count(card.get("num_parameters")),
        _size(card.get("size_bytes")),
        text(card.get("sha256")) or NOTHING,
        decimal(card.get("threshold")),
    ]
    return text(card.get("role")), cells


def _size(value: Any) -> str:
    size = number(value)
    if size is None:
        return NOTHING
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{decimal(size)} {_UNITS[unit]}"


def _place(order: Sequence[str], role: str) -> int:
    return order.index(role) if role in order else len(order)
