"""What `score` and `compare` do: work on conversations that were stored, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.evaluation_loading import (
    RunCode,
    resolve_run,
    run_of,
    section_about,
    section_of,
    target_label,
    with_service_files,
)
from nip_astra.cli.judging import (
    Judges,
    JudgingRequest,
    distinct_labels,
    finish,
    gate,
    load_judges,
    show,
    show_comparison,
)
from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.comparison import Contender, compare, read_contender
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rating import rate_anew
from nip_astra.evaluation.rows import Episode, episodes_of, read_rows
from nip_astra.evaluation.storage import (
    EVALUATIONS,
    FIGURES,
    PROBABILITY_ROWS,
    ROWS,
    EvaluationFolder,
    find_evaluation,
    text_hash,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.retrying import resume_usage
from nip_astra.language_models.services.run_sync import close_all
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scorers.base import open_services
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory
from nip_astra.trust import on_behalf_of


def score(
    path: str,
    request: JudgingRequest,
    code: RunCode,
    settings_fields: Mapping[str, Any],
) -> None:
    """Rate stored conversations again, without a language model."""
    quieten_libraries()
    source, run = stored_rows(Path(path))
    settings = with_service_files(ExperimentSettings.from_dict(dict(settings_fields)), run)
    resolved = resolve_run(run, code)
    section = section_of(resolved)
    folder = EvaluationFolder(source.parent)
    before = folder.figures() if source.name == ROWS else {}
    described = folder.configuration().get("target") if before else None
    judged = section_about(described, section, resolved.scenario_dir)
    if resolved.source is not None:
        is_own_used = not request.scorers or "own" in request.scorers
        for part in ("evaluation", "scorer") if is_own_used else ("evaluation",):
            resolved.source.check_outside(f"{resolved.kind}.{part}")
    with on_behalf_of(resolved.source):
        judges = load_judges(request, judged, settings, resolved.scenario_dir)
    episodes = final_episodes(source, run)
    ordinary = episodes_of(read_rows(source.parent / PROBABILITY_ROWS))
    own = float(before.get("failure_threshold", section.failure_threshold))
    limit = own if request.threshold is None else request.threshold
    folder, is_new = _folder_for(source, run, before, judges, limit, request)
    services = open_services(judges.scorers.values(), settings)
    resume_usage(services, f"evaluation {folder.path.name}", is_new=is_new)
    try:
        num_calls = rate_anew(episodes, ordinary, judges.scorers)
    finally:
        close_all(services.values())
    folder.replace_rows(episodes, ordinary)
    weighed = (before.get("probability_of_failure") or {}).get("importance_sampling") or {}
    options = EvaluationOptions(
        split=str(before.get("split", "test")),
        seed=resolved.hyper_params.seed,
        num_episodes=len(episodes),
        num_probability_episodes=len(ordinary),
        use_importance_sampling=bool(weighed),
        num_turns=max(len(episode) for episode in episodes),
        failure_threshold=limit,
        num_bootstrap_resamples=section.evaluation.num_bootstrap_resamples,
    )
    figures = finish(
        folder,
        episodes,
        ordinary,
        options,
        judges,
        planted=_plants_of(before, section),
        labels=(before.get("attacker", RunDirectory(run).run_id), before.get("target", "target")),
        parts=[{"scorer_calls": num_calls}],
        services=services,
        cards=[card for card in before.get("cards", ()) if card["role"] != "scorer"],
        # Without episodes of its own it was refused before anything was weighed.
        why_not_weighed=weighed.get("reason") if weighed.get("num_episodes") == 0 else None,
    )
    show(figures, folder, as_json=request.as_json)
    gate(request.fail_if, figures)


def _folder_for(
    source: Path,
    run: Path,
    before: Mapping[str, Any],
    judges: Judges,
    threshold: float,
    request: JudgingRequest,
) -> tuple[EvaluationFolder, bool]:
    """Open the folder for conversations that are rated anew; says too whether it was made."""
    origin = before.get("name", source.stem)
    configuration = EvaluationFolder(source.parent).configuration() if before else {}
    dropped = ("sha256", "labelled", "embedder")
    folder = EvaluationFolder.of_run(run, request.name or f"{origin}-{'-'.join(judges.scorers)}")
    is_new = folder.open(
        {
            **{key: value for key, value in configuration.items() if key not in dropped},
            "scored_from": origin,
            "rows": text_hash([source.read_text(encoding="utf-8")]),
            **judges.configuration,
            "failure_threshold": threshold,
        },
        is_overwritten=request.is_overwritten,
    )
    return folder, is_new


def compare_runs(
    paths: Sequence[str], *, code: RunCode, fail_if: str | None, out: str | None, as_json: bool
) -> None:
    """Compare every other evaluation with the first, pair by pair."""
    if len(paths) < 2:
        raise ConfigurationError(
            "evaluations were to be compared, but one was given. Give two or more runs or "
            "evaluations: nip-astra compare runs/a runs/b"
        )
    contenders = [_contender(Path(path), code) for path in paths]
    labels = distinct_labels([contender.label for contender in contenders])
    contenders = [replace(c, label=label) for c, label in zip(contenders, labels, strict=True)]
    first, *others = contenders
    found = compare(first, others)
    show_comparison(found, out=out, as_json=as_json)
    for other in others:
        differences = found["comparisons"][other.label]
        gate(fail_if, {**other.figures, "baseline": first.figures, "comparison": differences})


def stored_rows(path: Path) -> tuple[Path, Path]:
    """The file of rows that a path means, and its run."""
    if (path / ROWS).is_file() and path.parent.name == EVALUATIONS:
        return path / ROWS, path.parent.parent
    run, _ = run_of(path)
    RunDirectory.open(run)
    if list((run / EVALUATIONS).glob(f"*/{FIGURES}")):
        # Not one that was itself rated anew: its rows have lost the first scorer's verdicts.
        folders = [f.parent for f in (run / EVALUATIONS).glob(f"*/{FIGURES}")]
        played = [f for f in folders if "scored_from" not in EvaluationFolder(f).configuration()]
        newest = max(played or folders, key=lambda f: (f / FIGURES).stat().st_mtime_ns)
        return newest / ROWS, run
    return run / "rollouts" / "evaluation.jsonl", run


def final_episodes(source: Path, run: Path) -> list[Episode]:
    """The episodes of the last step at which a table was written."""
    rows = read_rows(source)
    if not rows:
        raise DataError(
            f"stored conversations were to be read, but {source} holds none. Evaluate the run "
            f"first: nip-astra evaluate {run}"
        )
    last = max(row.get("step", 0) for row in rows)
    return episodes_of(row for row in rows if row.get("step", 0) == last)


def _contender(path: Path, code: RunCode) -> Contender:
    if (path / HYPER_PARAMETERS).is_file() and not list((path / EVALUATIONS).glob(f"*/{FIGURES}")):
        resolved = resolve_run(path, code)
        section = getattr(resolved.hyper_params, resolved.kind)
        file = path / "rollouts" / "evaluation.jsonl"
        found = read_contender(file, threshold=section.failure_threshold, label=path.name)
        return replace(found, figures=_figures_after(path, section))
    folder = find_evaluation(path)
    label = f"{folder.path.parent.parent.name}/{folder.path.name}"
    return read_contender(folder.path, threshold=0.5, label=label)


def _figures_after(run: Path, section: Any) -> dict[str, Any]:
    """What a run's own table after training says, in the names of an evaluation."""
    if not RunDirectory(run).has_ended:
        raise DataError(
            f"{run} has no figures after training: it failed or was stopped. Resume it first: "
            f"nip-astra resume {run}"
        )
    results = RunDirectory(run).read_json(RESULTS)
    after = results["after"]
    low, high = after["failure_rate_interval"]
    return {
        "failure_rate": {"value": after["failure_rate"], "low": low, "high": high},
        "nll": {"reference": after["probe_nll"]},
        "diversity": {"distinct_share": after["distinct_share"]},
        "outcomes": after["outcomes"],
        "split": "test",
        "tree_depth": section.tree_depth,
        "failure_threshold": section.failure_threshold,
        "scorer": str(section.scorer.type_name),
        "target": target_label(section),
        "warnings": results["warnings"],
    }


def _plants_of(before: Mapping[str, Any], section: Any) -> Sequence[PlantedFailure]:
    if before and before.get("plants") is None:
        return ()
    planted: Sequence[PlantedFailure] = section.planted_failures
    return planted
