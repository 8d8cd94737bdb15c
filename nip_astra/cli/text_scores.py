"""What `nip-astra score` does with rollouts of chat models that play a protocol."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.evaluation_loading import RunCode, with_service_files
from nip_astra.cli.judging import JudgingRequest, gate
from nip_astra.cli.scorer_loading import load_scorers
from nip_astra.cli.terminal import open_console, say
from nip_astra.cli.text_exports import run_of_text
from nip_astra.cli.text_runs import EPISODES, VERSION, conditions_of, figures_table
from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.rows import encode_rows
from nip_astra.evaluation.storage import EVALUATIONS, FIGURES, EvaluationFolder, text_hash
from nip_astra.evaluation.tables import as_text
from nip_astra.evaluation.text_scores import rate_answers, score_figures
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.retrying import resume_usage
from nip_astra.language_models.services.run_sync import close_all
from nip_astra.report.page import write_report
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.safe_text import to_json
from nip_astra.scorers.base import open_services
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory
from nip_astra.trainers.service_use import services_used
from nip_astra.trainers.text.analysis import stored_samplings
from nip_astra.trainers.text.rollout_files import ROLLOUTS
from nip_astra.utils.nested_array_dict import NestedArrayDict

SCORES = "scores.jsonl"
"""A line an answer, with its scores."""
DEFAULT_THRESHOLD = 0.5
"""Score from which an answer counts among the high ones."""


class _Source(NamedTuple):
    """Rollouts that are to be scored.

    Attributes
    ----------
    name : str
        The evaluation's, or that of the run's sampling.
    path : Path
        File of the rollouts.
    told : Mapping
        What is known of them already, as an evaluation's figures.
    """

    name: str
    path: Path
    told: Mapping[str, Any]


def score_text_run(
    path: str, request: JudgingRequest, code: RunCode, settings_fields: Mapping[str, Any]
) -> None:
    """Let scorers rate every answer of stored rollouts, and tell the figures by agent."""
    quieten_libraries()
    _check(path, request)
    run = run_of_text(Path(path))
    resolved = resolve_experiment(
        parameter_file=RunDirectory.open(run).path / HYPER_PARAMETERS,
        plugins=code.plugins,
        is_trusted=code.is_trusted,
    )
    settings = with_service_files(ExperimentSettings.from_dict(dict(settings_fields)), run)
    loaded = load_scorers(request.scorers, None, settings, resolved.scenario_dir)
    names = list(loaded.scorers)
    source = _source_of(Path(path), run)
    threshold = DEFAULT_THRESHOLD if request.threshold is None else request.threshold
    folder = EvaluationFolder.of_run(run, request.name or f"{source.name}-{'-'.join(names)}")
    configuration = {
        "scored_from": source.name,
        "rollouts": text_hash([source.path.read_text(encoding="utf-8")]),
        "scorers": loaded.parameters,
        "threshold": threshold,
    }
    is_new = folder.open(configuration, is_overwritten=request.is_overwritten)
    services = open_services(loaded.scorers.values(), settings)
    resume_usage(services, f"evaluation {folder.path.name}", is_new=is_new)
    rollouts = NestedArrayDict.load(source.path)
    try:
        answers = rate_answers(rollouts, source.told["agents"], loaded.scorers)
    finally:
        close_all(services.values())
    (folder.path / SCORES).write_bytes(encode_rows(answers))
    # Beside the scores it is an evaluation as it was: to compare, to report, to export.
    shutil.copyfile(source.path, folder.path / ROLLOUTS)
    if (source.path.parent / EPISODES).is_file():
        shutil.copyfile(source.path.parent / EPISODES, folder.path / EPISODES)
    scored = score_figures(answers, names, threshold=threshold)
    figures = {
        **source.told,
        "version": VERSION,
        "kind": "interaction_proof",
        "name": folder.path.name,
        **configuration,
        "figures": {**source.told["figures"], **scored},
        **services_used(services),
    }
    table = figures_table(figures)
    folder.write(figures, as_text([table]))
    write_report([str(run)])
    if request.as_json:
        say(to_json(figures, indent=2))
    else:
        console = open_console()
        console.print(table)
        console.print(f"evaluation {folder.path}\n", soft_wrap=True)
    gate(request.fail_if, conditions_of(figures))


def _check(path: str, request: JudgingRequest) -> None:
    unread = [f"--{name}" for name in ("labelled", "embedder") if getattr(request, name)]
    if unread:
        raise ConfigurationError(
            f"{', '.join(unread)} was given to score {path}, whose agents play a protocol in "
            "words: no failures are grouped, and none are compared with labels. Leave it out."
        )
    if not request.scorers or "own" in request.scorers:
        raise ConfigurationError(
            f"the answers of {path} were to be scored, but its scenario has no scorer of its own, "
            "since a game's rewards say how agents did. Name one: --scorer detoxify, or a YAML "
            "file with _type: judge and a rubric. To ask a judge yes-or-no questions about whole "
            "rollouts, use nip-astra analyse."
        )


def _source_of(path: Path, run: Path) -> _Source:
    """The evaluation at a path; of a run its newest that was played, else its last test."""
    folders = [path] if path != run else _played_evaluations(run)
    if folders:
        told = EvaluationFolder(folders[0]).figures()
        return _Source(folders[0].resolve().name, folders[0] / ROLLOUTS, told)
    directory = RunDirectory(run)
    results = directory.read_json(RESULTS) if directory.has_ended else {}
    tests = [one for one in stored_samplings(directory) if one.split == "test"]
    if not tests or not results:
        raise DataError(
            f"stored rollouts were to be scored, but {run} has not ended, or made no test. Resume "
            f"it, or evaluate it first: nip-astra evaluate {run}"
        )
    told = {
        "run": directory.run_id,
        "agents": results["agents"],
        "split": "test",
        "figures": results["after"],
    }
    return _Source("test", tests[-1].path, told)


def _played_evaluations(run: Path) -> Sequence[Path]:
    """Evaluations of a run that were played and not scored, the newest first."""
    found = [file.parent for file in (run / EVALUATIONS).glob(f"*/{FIGURES}")]
    played = [one for one in found if "scored_from" not in EvaluationFolder(one).configuration()]
    return sorted(played, key=lambda one: (one / FIGURES).stat().st_mtime_ns, reverse=True)
