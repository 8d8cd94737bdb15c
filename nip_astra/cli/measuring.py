"""Commands that train nothing: they measure, compare, show and export what runs have written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nip_astra.cli.options import (
    AsJson,
    BatchSize,
    Column,
    Debug,
    Device,
    EmbedderName,
    EvaluationName,
    FailIf,
    ImportanceSampling,
    Labelled,
    NumEpisodes,
    NumTurns,
    Overrides,
    Overwrite,
    ParameterFile,
    Plugins,
    ProbabilityEpisodes,
    Runs,
    ScenarioName,
    Scorers,
    Seed,
    Settings,
    Split,
    Targets,
    Threads,
    Threshold,
    Trust,
    Untrained,
    Wandb,
    settings_of,
)
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN

MAX_DIFFERENCES = 10
"""Differences of dumps that are shown; the first is what matters."""


def evaluate(
    runs: Runs,
    scenario: ScenarioName = None,
    parameters: ParameterFile = None,
    targets: Targets = None,
    scorers: Scorers = None,
    name: EvaluationName = None,
    split: Split = "test",
    seed: Seed = None,
    num_episodes: NumEpisodes = None,
    num_turns: NumTurns = None,
    probability_episodes: ProbabilityEpisodes = None,
    importance_sampling: ImportanceSampling = True,
    batch_size: BatchSize = None,
    threshold: Threshold = None,
    labelled: Labelled = None,
    embedder: EmbedderName = None,
    untrained: Untrained = False,
    overwrite: Overwrite = False,
    fail_if: FailIf = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    plugin: Plugins = None,
    trust: Trust = False,
    device: Device = None,
    num_threads: Threads = None,
    settings: Settings = None,
    column: Column = DEFAULT_COLUMN,
    debug: Debug = False,
) -> None:
    """Measure attackers on held-out prompts, chat models that play a protocol on held-out data,
    or policies on the problems of their task; goes on where a killed evaluation was.
    """
    from nip_astra.cli import evaluation_commands as commands
    from nip_astra.cli.attacker_folders import Surroundings
    from nip_astra.cli.evaluation_loading import RunCode
    from nip_astra.cli.judging import JudgingRequest
    from nip_astra.cli.task_runs import evaluate_task_runs, is_task_run
    from nip_astra.cli.text_runs import evaluate_text_runs, is_text_run

    play = evaluate_text_runs if is_text_run(runs[0]) else commands.evaluate
    play = evaluate_task_runs if is_task_run(runs[0]) else play
    play(
        commands.EvaluateRequest(
            runs=runs,
            targets=targets or [],
            is_untrained=untrained,
            overrides=overrides or [],
            code=RunCode(plugin or [], trust),
            played=commands.PlayingRequest(
                split=split,
                seed=seed,
                num_episodes=num_episodes,
                num_turns=num_turns,
                probability_episodes=probability_episodes,
                importance_sampling=importance_sampling,
                batch_size=batch_size,
            ),
            judged=JudgingRequest(
                scorers or [], name, threshold, labelled, embedder, overwrite, fail_if, as_json
            ),
            surroundings=Surroundings(scenario, parameters),
            column=column,
        ),
        settings_of(settings, device=device, num_threads=num_threads),
    )


def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or an evaluation.")],
    scorers: Scorers = None,
    name: EvaluationName = None,
    threshold: Threshold = None,
    labelled: Labelled = None,
    embedder: EmbedderName = None,
    overwrite: Overwrite = False,
    fail_if: FailIf = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Rate the stored conversations of a run by other scorers; generates nothing."""
    from nip_astra.cli.evaluation_loading import RunCode
    from nip_astra.cli.judging import JudgingRequest
    from nip_astra.cli.stored_evaluations import score as score_stored
    from nip_astra.cli.text_runs import is_text_run
    from nip_astra.cli.text_scores import score_text_run

    judged = JudgingRequest(
        scorers or [], name, threshold, labelled, embedder, overwrite, fail_if, as_json
    )
    rate = score_text_run if is_text_run(run) else score_stored
    rate(run, judged, RunCode(plugin or [], trust), settings_of(device=device))


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Run directories or evaluations.")
    ],
    fail_if: FailIf = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file to write the comparison to.")
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Compare evaluations with the first, paired by opening prompt, datapoint or problem."""
    from nip_astra.cli import stored_evaluations
    from nip_astra.cli.evaluation_loading import RunCode
    from nip_astra.cli.task_runs import compare_task_runs, is_task_run
    from nip_astra.cli.text_runs import compare_text_runs, is_text_run

    if len(runs) > 1 and any(is_task_run(one) for one in runs):
        compare_task_runs(runs, fail_if=fail_if, out=out, as_json=as_json)
        return
    if is_text_run(runs[0]) and len(runs) > 1:
        compare_text_runs(runs, fail_if=fail_if, out=out, as_json=as_json)
        return
    code = RunCode(plugin or [], trust)
    stored_evaluations.compare_runs(runs, code=code, fail_if=fail_if, out=out, as_json=as_json)


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run directories; several are compared.")
    ],
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="RUN/report.html, or comparison.html for several runs."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option("--redact/--reveal", help="Whether the text of failures is blurred."),
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page about a run, or about several side by side."""
    import webbrowser

    from nip_astra.cli.terminal import complain, say
    from nip_astra.report.page import write_report

    path = write_report(runs, output, redact=redact)
    say(f"report     {path}")
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        complain("no browser was found to open it with")


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run, evaluation, or checkpoint.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="csv, jsonl, hitlog, tensorboard, inspect; huggingface for weights; of runs in "
            "words parquet too.",
        ),
    ],
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder to write to; RUN/exports.")
    ] = None,
    plugin: Plugins = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Write conversations, figures and curves, or weights, in the formats of other tools."""
    from nip_astra.cli import export_commands
    from nip_astra.cli.evaluation_loading import RunCode

    code = RunCode(plugin or [], trust)
    export_commands.export(run, form=form, output=output, code=code)


def doctor(
    runs_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Where runs are to be kept.")
    ] = "runs",
    online: Annotated[
        bool, typer.Option("--online", help="Also see which hosts can be reached.")
    ] = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Tell what is installed and works here; opens no connection unless asked."""
    from nip_astra.cli import doctor as command

    command.doctor(runs_dir=runs_dir, plugins=plugin or [], is_online=online, as_json=as_json)


def analyse(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory of a trainer of chat models.")
    ],
    analysers: Annotated[
        list[str] | None,
        typer.Option("--analyser", metavar="NAME", help="Registered name; all. Repeatable."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file of a chat model; that of the run."),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Stored rollouts: train, test or all.")
    ] = "test",
    iteration: Annotated[
        int | None, typer.Option(min=0, metavar="NUMBER", help="The first is 0; all of them.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what another judge has said.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the requests; ask and write nothing.")
    ] = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
    device: Device = None,
    wandb: Wandb = None,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Let a judge answer questions about stored rollouts of chat models."""
    from nip_astra.cli import analysis_commands

    request: dict[str, Any] = {
        "split": split,
        "iteration": iteration,
        "is_overwritten": overwrite,
        "plugins": plugin or [],
        "is_trusted": trust,
    }
    analysis_commands.analyse(
        run,
        analysers or [],
        judge,
        request,
        settings_of(settings, device=device, wandb=wandb),
        is_dry_run=dry_run,
        as_json=as_json,
    )


def compare_dumps(
    one: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or folder of dumps.")],
    other: Annotated[str, typer.Argument(metavar="RUN", help="The one to compare it with.")],
    tolerance: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, help="Difference of numbers that is none.")
    ] = 0.0,
    debug: Debug = False,
) -> None:
    """Tell the first stage at which the dumps of two runs differ; exit code 1 if they do."""
    from nip_astra.checkpoints import dumps
    from nip_astra.cli.terminal import say

    found = dumps.compare_dumps(Path(one), Path(other), tolerance=tolerance)
    if not found.differences:
        say(f"the same in all {found.num_stages} stages")
        return
    first = found.differences[0].stage
    say(f"they differ first in {first}")
    own = [one for one in found.differences if one.stage == first]
    for difference in own[:MAX_DIFFERENCES]:
        say(f"  {difference.field} {difference.description}".rstrip())
    if len(own) > MAX_DIFFERENCES:
        say(f"  and {len(own) - MAX_DIFFERENCES} more")
    later = dict.fromkeys(one.stage for one in found.differences if one.stage != first)
    if later:
        say(f"then in {len(later)} more of {found.num_stages} stages")
    raise typer.Exit(1)


COMMANDS = (evaluate, score, compare, report, export, doctor)
"""In the order of the help."""
