"""Commands that do not train: they evaluate, compare, show and export the results of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nip_astra.cli.options import (
    complain,
    option,
    run_argument,
    settings_of,
    shared_options,
    show,
    write_line,
)
from nip_astra.errors import counted
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN

if TYPE_CHECKING:
    from nip_astra.evaluation.families.base import Evaluation

BROKEN = 1
"""Exit code of `doctor` if a required part does not work."""
GATE_FAILED = 1
"""Exit code if a --fail-if condition holds."""
MAX_DIFFERENCES = 10
"""Maximum number of differences of dumps shown; the first matters most."""


@shared_options(
    *("scenario", "parameters", "scorers", "name", "seed", "threshold", "labelled", "embedder"),
    *("overwrite", "fail_if", "as_json", "overrides", "plugin", "trust"),
    *("device", "num_threads", "settings"),
)
def evaluate(
    options: Mapping[str, Any],
    runs: Annotated[
        list[str],
        run_argument("Runs, checkpoints, models, lists of probes, or chat models.", "RUN..."),
    ],
    targets: Annotated[
        list[str] | None,
        option("MODEL", "Model, or run whose target it is. Repeatable.", "--target"),
    ] = None,
    split: Annotated[
        str, option("NAME", "Opening prompts or problems: train, dev or test.")
    ] = "test",
    num_episodes: Annotated[
        int | None, option("NUMBER", "Conversations of the attacker, or problems.")
    ] = None,
    num_turns: Annotated[int | None, option("NUMBER", "Turns of a conversation.")] = None,
    probability_episodes: Annotated[
        int | None, option("NUMBER", "Conversations for the probability of failure; 0: none.")
    ] = None,
    importance_sampling: Annotated[
        bool,
        typer.Option(
            "--importance-sampling/--monte-carlo-only",
            help="Whether half of those have a turn of the attacker's.",
        ),
    ] = True,
    batch_size: Annotated[int | None, option("NUMBER", "Conversations at once.")] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="The model as it was before training.")
    ] = False,
    column: Annotated[
        str, option("NAME", "Column of the probes, where RUN is a list of them.")
    ] = DEFAULT_COLUMN,
) -> None:
    """Measure attackers on held-out prompts, chat models that play a protocol on held-out data,
    or policies on the problems of their task. A killed evaluation is continued.
    """
    as_json = options["as_json"]
    from nip_astra.evaluation.api import Matrix
    from nip_astra.evaluation.api import evaluate as evaluate_runs

    evaluations = evaluate_runs(
        runs,
        settings=settings_of(options),
        progress=not as_json,
        on_evaluation=lambda evaluation: _show(evaluation, as_json=as_json),
        **_request_options(options),
    )
    assert isinstance(evaluations, Matrix)
    if evaluations.path is not None and not as_json:
        show(evaluations.tables, dict)
        write_line(f"matrix     {evaluations.path}")
    for evaluation in evaluations:
        _gate(options["fail_if"], evaluation.values)


def _request_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `EvaluationRequest` among a command's arguments."""
    from nip_astra.evaluation.families.base import EvaluationRequest

    renamed = {"plugin": "plugins", "trust": "is_trusted"}
    fields = vars(EvaluationRequest())
    request_options = {}
    for option_name, value in options.items():
        field = renamed.get(option_name, option_name)
        if value is not None and field in fields:
            request_options[field] = value
    return request_options


def _show(evaluation: Evaluation, *, as_json: bool) -> None:
    """Print an evaluation and its folder."""
    if not as_json:
        for part in evaluation.parts:
            if "reused_from" in part and "num_episodes" in part:
                write_line(
                    f"reused     {counted(part['num_episodes'], 'conversation')} of the evaluation "
                    f"{part['reused_from']}"
                )
    show(evaluation.tables, lambda: evaluation.figures, as_json=as_json)
    if not as_json:
        write_line(f"evaluation {evaluation.path}\n")


def _gate(condition: str | None, values: Mapping[str, Any]) -> None:
    """End the program with exit code 1 if the condition holds."""
    from nip_astra.evaluation.conditions import holds

    if condition is not None and holds(condition, values):
        complain(f"failed: {condition}")
        raise typer.Exit(GATE_FAILED)


@shared_options(
    *("scorers", "name", "threshold", "labelled", "embedder", "overwrite", "fail_if", "as_json"),
    *("plugin", "trust", "device"),
)
def score(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run directory, or an evaluation.")],
) -> None:
    """Rate the stored conversations of a run with other scorers; generate nothing."""
    from nip_astra.evaluation.api import score as score_run

    evaluation = score_run(run, settings=settings_of(options), **_request_options(options))
    _show(evaluation, as_json=options["as_json"])
    _gate(options["fail_if"], evaluation.values)


@shared_options("fail_if", "as_json", "plugin", "trust")
def compare(
    options: Mapping[str, Any],
    runs: Annotated[list[str], run_argument("Run directories or evaluations.", "RUN RUN...")],
    out: Annotated[str | None, option("FILE", "JSON file to write the comparison to.")] = None,
) -> None:
    """Compare evaluations with the first, paired by opening prompt, datapoint or problem."""
    from nip_astra.evaluation.api import compare as compare_runs
    from nip_astra.tracking.run_directory import RunDirectory

    fail_if = options["fail_if"]
    comparison = compare_runs(
        runs, fail_if=fail_if, plugins=options["plugin"] or [], is_trusted=options["trust"]
    )
    if out is not None:
        RunDirectory(Path(out).parent).write_json(Path(out).name, comparison.to_dict())
    show(comparison.tables, comparison.to_dict, as_json=options["as_json"])
    for label in comparison.comparisons:
        _gate(fail_if, comparison.values(label))


@shared_options()
def report(
    options: Mapping[str, Any],
    runs: Annotated[
        list[str],
        run_argument("Run directories; several are compared. Or a folder of runs.", "RUN..."),
    ],
    output: Annotated[
        str | None, option("FILE", "RUN/report.html, or comparison.html for several runs.")
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact/--reveal", help="Whether the text of failures is blurred.")
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Write one HTML page about a run, several side by side, or all runs in a folder."""
    import webbrowser

    from nip_astra.evaluation.api import locate
    from nip_astra.report.page import write_report

    path = write_report(list(map(locate, runs)), output, redact=redact)
    write_line(f"report     {path}")
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        complain("no browser was found to open it with")


@shared_options("plugin", "trust")
def export(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run, evaluation, or checkpoint.")],
    form: Annotated[
        str,
        option(
            "NAME",
            "csv, jsonl, parquet, hitlog, tensorboard, inspect; huggingface for weights.",
            "--format",
        ),
    ],
    output: Annotated[str | None, option("DIR", "Folder to write to; RUN/exports.")] = None,
) -> None:
    """Write conversations, figures, curves or weights in other tools' formats."""
    from nip_astra.evaluation.api import export as export_run

    plugins, is_trusted = options["plugin"] or [], options["trust"]
    for file in export_run(run, form, output, plugins=plugins, is_trusted=is_trusted):
        write_line(f"export     {file}")


@shared_options()
def push(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run directory.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="user/name on the hub.")],
    private: Annotated[
        bool, typer.Option("--private/--public", help="Whether a new repository is private.")
    ] = True,
    license: Annotated[  # noqa: A002 - the hub's word
        str | None, option("NAME", "Licence, for instance apache-2.0.")
    ] = None,
    output: Annotated[
        str | None, option("DIR", "Also write what is published to this folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write --output alone.")] = False,
) -> None:
    """Publish a run's trained model on the Hugging Face hub, with a model card."""
    from nip_astra.hub import push_to_hub

    address = push_to_hub(
        run, repo, private=private, license=license, folder=output, dry_run=dry_run
    )
    write_line(f"{'folder' if dry_run else 'model'}      {address}")


@shared_options("as_json", "plugin")
def doctor(
    options: Mapping[str, Any],
    runs_dir: Annotated[str, option("DIR", "Where runs are kept.")] = "runs",
    online: Annotated[
        bool, typer.Option("--online", help="Also see which hosts can be reached.")
    ] = False,
) -> None:
    """Check the installation; no connection is opened without --online."""
    from nip_astra.installation import doctor as diagnose

    diagnosis = diagnose(runs_dir, plugins=options["plugin"] or [], online=online)
    show(diagnosis.tables, diagnosis.to_dict, as_json=options["as_json"])
    if not diagnosis.is_sound:
        raise typer.Exit(BROKEN)


@shared_options("as_json", "plugin", "trust", "device", "wandb", "settings")
def analyse(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run directory of a trainer of chat models.")],
    analysers: Annotated[
        list[str] | None, option("NAME", "Registered name; all. Repeatable.", "--analyser")
    ] = None,
    judge: Annotated[
        str | None, option("FILE", "YAML file of a chat model; that of the run.")
    ] = None,
    split: Annotated[str, option("NAME", "Stored rollouts: train, test or all.")] = "test",
    iteration: Annotated[
        int | None, typer.Option(min=0, metavar="NUMBER", help="The first is 0; all of them.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the verdicts of another judge.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the requests; ask and write nothing.")
    ] = False,
) -> None:
    """Let a judge answer questions about stored rollouts of chat models."""
    from rich.text import Text

    from nip_astra.evaluation.api import locate
    from nip_astra.evaluation.tables import plain_table
    from nip_astra.experiment_settings import ExperimentSettings
    from nip_astra.report.page import write_report
    from nip_astra.report.sections import share_text
    from nip_astra.resolving.analysing import analyse_run, count_analysis, read_judge

    request: dict[str, Any] = {
        "split": split,
        "iteration": iteration,
        "is_overwritten": overwrite,
        "plugins": options["plugin"] or [],
        "is_trusted": options["trust"],
        "settings": ExperimentSettings.from_dict(settings_of(options)),
    }
    model, as_json = None if judge is None else read_judge(judge), options["as_json"]
    path = locate(run)
    if dry_run:
        counts = count_analysis(path, analysers or [], model, **request)
        title = "requests at least; none was sent"
        table = plain_table(title, "rollouts", "question", "requests")
        for rollouts, count_by_question in counts.items():
            for question, count in count_by_question.items():
                table.add_row(Text(rollouts), Text(question), str(count))
        show(lambda: [table], lambda: counts, as_json=as_json)
        return
    analyses = analyse_run(path, analysers or [], model, **request)
    summaries = [analysis.summary for analysis in analyses]
    page = write_report([path])
    table = plain_table(None, "rollouts", "question", "agent", "yes")
    for summary in summaries:
        rollouts = f"{summary['split']}, iteration {summary['iteration']}"
        for agent, share in (summary["shares"] or {"nobody": {}}).items():
            cells = (rollouts, summary["analyser"], agent, share_text(share))
            table.add_row(*map(Text, cells))
    show(lambda: [table], lambda: summaries, as_json=as_json)
    if not as_json:
        write_line(f"analyses   {path / 'analyses'}\nreport     {page}")


@shared_options()
def compare_dumps(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run directory, or folder of dumps.")],
    other_run: Annotated[str, typer.Argument(metavar="RUN", help="Run to compare it with.")],
    tolerance: Annotated[
        float, option("NUMBER", "Largest absolute difference that counts as equal.", min=0)
    ] = 0.0,
) -> None:
    """Find the first stage at which the dumps of two runs differ; exit code 1 if they do."""
    from nip_astra.checkpoints.tensors import compare_dumps
    from nip_astra.evaluation.api import locate

    comparison = compare_dumps(locate(run), locate(other_run), tolerance=tolerance)
    if not comparison.differences:
        write_line(f"the same in {counted(comparison.num_stages, 'stage')}")
        return
    first_stage = comparison.differences[0].stage
    write_line(f"they differ first in {first_stage}")
    first_differences = [
        difference for difference in comparison.differences if difference.stage == first_stage
    ]
    for difference in first_differences[:MAX_DIFFERENCES]:
        write_line(f"  {difference.field} {difference.description}".rstrip())
    if len(first_differences) > MAX_DIFFERENCES:
        write_line(f"  and {len(first_differences) - MAX_DIFFERENCES} more")
    later_stages = {difference.stage for difference in comparison.differences} - {first_stage}
    if later_stages:
        num_stages = counted(comparison.num_stages, "stage")
        write_line(f"then in {len(later_stages)} more of {num_stages}")
    raise typer.Exit(1)


COMMANDS = (evaluate, score, compare, report, export, push, doctor)
"""Commands in the order of the help."""
