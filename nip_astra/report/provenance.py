"""Where a run comes from: parameters, environment, commands, warnings, time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nip_astra.parameters.files import OVERRIDE_SOURCE, flatten
from nip_astra.report.records import RunRecord, items, number, text
from nip_astra.report.wording import value_text
from nip_astra.tracking import run_directory as files
from nip_astra.trust import SETTINGS_SIGNATURE, SIGNATURE


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
    told = dict(flatten({**known, "settings": run.settings}))
    return [(name, value_text(value)) for name, value in told.items() if value not in (None, [])]


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
    told = " ".join(found)
    found += [line for line in run.log_lines if line.partition(": ")[2] not in told]
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
