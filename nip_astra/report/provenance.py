"""Where a run comes from: parameters, environment, commands, warnings, times, models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.parameters.files import OVERRIDE_SOURCE, flatten
from nip_astra.report.records import PROTOCOL, RunRecord, items, mapping, number, text
from nip_astra.tracking import run_directory as files
from nip_astra.trust import SETTINGS_SIGNATURE, SIGNATURE
from nip_astra.utils.formatting import NOTHING, count, decimal, value_text

HEADINGS = ("name", "from", "licence", "parameters", "size", "sha256", "threshold")
ROLES = ("attacker", "target")
_NOT_STATED = "not stated"
_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter with its source; `source` is empty where no file says it."""

    path: str
    value: str
    source: str

    @property
    def is_given(self) -> bool:
        """Whether somebody chose it for this run."""
        return self.source in (OVERRIDE_SOURCE, "command line", "hyper_params", "--plugin")


def parameters(run: RunRecord) -> list[Parameter]:
    """Every hyper-parameter that the run reads, with its source; all where sources are unknown."""
    return [
        Parameter(path, value_text(value), run.sources.get(path, ""))
        for path, value in flatten(run.hyper_params)
        if not run.sources or path in run.sources
    ]


def environment(run: RunRecord) -> list[tuple[str, str]]:
    """What the run ran on and its settings, without empty values."""
    known = {
        name: value
        for name, value in run.environment.items()
        if name not in (SIGNATURE, SETTINGS_SIGNATURE)
    }
    values = dict(flatten({**known, "settings": run.settings}))
    return [(name, value_text(value)) for name, value in values.items() if value not in (None, [])]


def commands(run: RunRecord) -> list[tuple[str, str]]:
    """The commands that run it again, each with what it needs."""
    folder = text(run.settings.get("runs_dir")) or "runs"
    file = shlex.quote(f"{folder.rstrip('/')}/{run.run_id}/{files.HYPER_PARAMETERS}")
    device = text(run.settings.get("device"))
    where = f" --device {shlex.quote(device)}" if device and device != "cpu" else ""
    made = [("from the run's directory", f"nip-astra --parameters {file}{where}")]
    if run.sources:
        given = [one for one in parameters(run) if one.is_given]
        made.append(("from the project alone", f"nip-astra {_options(run, given)}{where}"))
    return made


def all_warnings(run: RunRecord) -> list[str]:
    """The warnings of results, evaluations and log, each once."""
    found = [text(one) for one in items(run.results.get("warnings"))]
    of_evaluations: dict[str, list[str]] = {}
    for name, evaluation in run.evaluations.items():
        for one in items(evaluation.get("warnings")):
            of_evaluations.setdefault(text(one), []).append(name)
    found += [
        f"{'evaluation' if len(names) == 1 else 'evaluations'} {', '.join(names)}: {line}"
        for line, names in of_evaluations.items()
    ]
    listed = " ".join(found)
    found += [line for line in run.log_lines if line.partition(": ")[2] not in listed]
    return list(dict.fromkeys(found))


def times(run: RunRecord) -> list[tuple[str, float]]:
    """The seconds that each part of training took, the longest first."""
    sums: dict[str, float] = {}
    for row in run.timings:
        for name, value in row.items():
            seconds = number(value)
            if name.startswith("time/") and name.endswith("_seconds") and seconds is not None:
                part = name.removeprefix("time/").removesuffix("_seconds")
                sums[part] = sums.get(part, 0.0) + seconds
    return sorted(sums.items(), key=lambda item: -item[1])


def _options(run: RunRecord, given: Sequence[Parameter]) -> str:
    names = ("trainer", "scenario", "seed")
    words = [f"--{name} {shlex.quote(text(run.hyper_params.get(name)))}" for name in names]
    for one in given:
        if one.source == "--plugin":
            plugins = items(run.hyper_params.get("plugins"))
            words += [f"--plugin {shlex.quote(text(plugin))}" for plugin in plugins]
        elif one.path not in names:
            words.append(f"--set {shlex.quote(f'{one.path}={one.value}')}")
    return " ".join(words)


def cards(run: RunRecord) -> dict[str, Any] | None:
    """The cards, and the sentences about how the numbers can be had again."""
    if run.kind == PROTOCOL:
        return None
    found = _of_evaluations(run)
    models = found or _of_parameters(run)
    if not models:
        return None
    return {
        "headings": HEADINGS,
        "rows": [_cells(card) for card in models],
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
    models = [*_of_parameters(run), *_of_evaluations(run)]
    if any((card.get("role"), card.get("kind")) == ("scorer", "judge") for card in models):
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
