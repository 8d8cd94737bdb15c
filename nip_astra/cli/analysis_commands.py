"""What `analyse` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.errors import DataError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.report.page import write_report
from nip_astra.resolving.analysing import analyse_run, count_analysis
from nip_astra.safe_text import to_json
from nip_astra.scenario_base.text.parameters import ChatModelParameters
from nip_astra.utils.formatting import interval, percent


class JudgeFile(SubParameters):
    """A judge, as a file describes it."""

    model: ChatModelParameters  # type: ignore[valid-type]
    """The chat model."""


def analyse(
    run: str,
    analysers: Sequence[str],
    judge: str | None,
    request: Mapping[str, Any],
    settings_fields: Mapping[str, Any],
    *,
    is_dry_run: bool,
    as_json: bool,
) -> None:
    """Judge stored rollouts, or count what that would ask, and print what came of it."""
    quieten_libraries()
    settings = ExperimentSettings.from_dict(dict(settings_fields))
    model = None if judge is None else read_judge(judge)
    if is_dry_run:
        counts = count_analysis(run, analysers, model, settings=settings, **request)
        _print_counts(counts, as_json=as_json)
        return
    found = analyse_run(run, analysers, model, settings=settings, **request)
    report = write_report([run])
    if as_json:
        say(to_json([one.summary for one in found], indent=2))
        return
    table = plain_table(None, "rollouts", "question", "agent", "yes", "95 %", "of", "unknown")
    for one in (analysis.summary for analysis in found):
        place = f"{one['split']}, iteration {one['iteration']}"
        for agent, share in one["shares"].items():
            cells = (
                *(place, one["analyser"], agent),
                *(percent(share["share"]), interval(share["low"], share["high"])),
                *(str(share["num_yes"] + share["num_no"]), str(share["num_unknown"])),
            )
            table.add_row(*map(Text, cells))
        if not one["shares"]:
            table.add_row(*map(Text, (place, one["analyser"], "nobody", "", "", "0", "")))
    console = open_console()
    console.print(table)
    console.print(f"analyses   {Path(run) / 'analyses'}\nreport     {report}", soft_wrap=True)


def read_judge(path: str) -> Any:
    """The parameters of the chat model that a YAML file describes.

    Raises
    ------
    DataError
        When it cannot be read, or holds no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"a judge was to be read from {path}, but: {error}. Give a YAML file of a chat model."
        ) from error
    if not isinstance(values, dict):
        raise DataError(
            f"a judge was to be read from {path}, but it holds no parameters. Give those of a chat "
            "model, for instance _type: openai and model: gpt-4o-mini."
        )
    return JudgeFile.from_dict({"model": values}).model


def _print_counts(counts: Mapping[str, Mapping[str, int]], *, as_json: bool) -> None:
    if as_json:
        say(to_json(counts, indent=2))
        return
    table = plain_table("requests at least; nothing was asked", "rollouts", "question", "requests")
    for place, by_name in counts.items():
        for name, count in by_name.items():
            table.add_row(Text(place), Text(name), str(count))
    open_console().print(table)
