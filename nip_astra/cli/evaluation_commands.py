"""What `evaluate`, `score` and `compare` do; imported when one of them runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer

from nip_astra.cli.commands import _console, _quieten_libraries
from nip_astra.cli.evaluation_loading import (
    LoadedAttacker,
    LoadedScorers,
    LoadedTarget,
    load_attacker,
    load_scorers,
    load_target,
    run_of,
)
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.conditions import holds
from nip_astra.evaluation.playing import EvaluationOptions, Player
from nip_astra.evaluation.rows import Episode
from nip_astra.evaluation.storage import (
    EVALUATIONS,
    FIGURES,
    EvaluationFolder,
    text_hash,
)
from nip_astra.evaluation.summary import VERSION, summarise
from nip_astra.evaluation.tables import (
    as_text,
    evaluation_tables,
    matrix_table,
)
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from nip_astra.progress import open_progress
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.planted_failures import PlantedFailure
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.processor import choose_num_threads, keep_freed_memory

TRANSFER = "transfer.json"
GATE_FAILED = 1
"""Exit code where a --fail-if condition holds."""


@dataclass(frozen=True)
class EvaluateRequest:
    """What `evaluate` was asked for; None takes the run's own value."""

    runs: Sequence[str]
    targets: Sequence[str]
    scorers: Sequence[str]
    name: str | None
    split: str
    seed: int | None
    num_episodes: int | None
    num_turns: int | None
    probability_episodes: int | None
    importance_sampling: bool
    batch_size: int | None
    threshold: float | None
    is_untrained: bool
    is_overwritten: bool
    overrides: Sequence[str]
    plugins: Sequence[str]
    fail_if: str | None
    as_json: bool


def evaluate(request: EvaluateRequest, settings_fields: Mapping[str, Any]) -> None:
    """Evaluate every attacker against every target."""
    _quieten_libraries()
    settings = ExperimentSettings.from_dict(dict(settings_fields))
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for path in request.runs:
        attacker = load_attacker(
            path,
            settings,
            overrides=request.overrides,
            plugins=request.plugins,
            is_untrained=request.is_untrained,
        )
        _use_processor(attacker, settings)
        for spec in request.targets or (None,):
            target = load_target(spec, attacker, settings)
            figures, folder = _evaluate_cell(request, attacker, target, settings)
            # Two runs may have the same id in different folders.
            is_taken = (attacker.label, target.label) in cells
            cells[path if is_taken else attacker.label, target.label] = figures
            show(figures, folder, as_json=request.as_json)
    if len(cells) > 1:
        _keep_matrix(request, cells)
    for figures in cells.values():
        gate(request.fail_if, figures)


def _evaluate_cell(
    request: EvaluateRequest,
    attacker: LoadedAttacker,
    target: LoadedTarget,
    settings: ExperimentSettings,
) -> tuple[dict[str, Any], EvaluationFolder]:
    """Play one attacker against one target, or go on with it, and write its figures."""
    section = attacker.section
    loaded = load_scorers(
        request.scorers,
        section.scorer,
        settings,
        attacker.resolved.scenario_dir,
        attacker.sampler.scorer,
    )
    prompts, options = _prompts(attacker, request.split), _options(request, attacker)
    sampler = _sampler(attacker, target, loaded, prompts, request.split)
    folder = EvaluationFolder.of_run(attacker.run, _name(request, attacker, target, loaded))
    configuration = _configuration(request, attacker, target, loaded, prompts, options)
    folder.open(configuration, is_overwritten=request.is_overwritten)
    progress = open_progress(
        options.num_episodes + options.num_probability_episodes, enabled=not request.as_json
    )
    progress.set_description(f"{attacker.label} against {target.label}")
    others = {name: loaded.scorers[name] for name in list(loaded.scorers)[1:]}
    player = Player(sampler, others, prompts, options, folder, on_part=progress.step)
    try:
        episodes = player.play_attacker()
        ordinary = player.play_probability() if options.num_probability_episodes else []
    finally:
        progress.close()
    figures = finish(
        folder,
        episodes,
        ordinary,
        options,
        loaded,
        planted=section.planted_failures if target.planted is None else target.planted,
        labels=(attacker.label, target.label),
        parts=folder.parts(),
        why_not_weighed=player.why_not_weighed(),
    )
    return figures, folder


def _sampler(
    attacker: LoadedAttacker,
    target: LoadedTarget,
    loaded: LoadedScorers,
    prompts: Sequence[str],
    split: str,
) -> TreeSampler:
    """Give the attacker's sampler with the target and the first scorer of the evaluation."""
    own = attacker.sampler
    agent = own.target if target.agent is None else target.agent
    agent.check_prompts(prompts, split=split)
    scorer = next(iter(loaded.scorers.values()))
    return TreeSampler(own.attacker, agent, own.reference, scorer, own.reward, own.max_cache_bytes)


def _name(
    request: EvaluateRequest, attacker: LoadedAttacker, target: LoadedTarget, loaded: LoadedScorers
) -> str:
    """Give the evaluation's name: the one asked for, or one of what differs from the run's own."""
    scorers = list(loaded.scorers) if request.scorers else []
    if request.name is not None and len(request.targets) < 2:
        return request.name
    parts = [request.split, attacker.suffix, target.suffix, *scorers]
    if request.name is not None:
        parts = [request.name, target.suffix]
    return "-".join(_file_name(part) for part in parts if part)


def _configuration(
    request: EvaluateRequest,
    attacker: LoadedAttacker,
    target: LoadedTarget,
    loaded: LoadedScorers,
    prompts: Sequence[str],
    options: EvaluationOptions,
) -> dict[str, Any]:
    """Give everything that changes the evaluation's result."""
    section = attacker.section
    return {
        "attacker": {
            "weights": attacker.weights,
            "untrained": request.is_untrained,
            **section.attacker.to_dict(),
        },
        "target": target.description,
        "scorers": loaded.parameters,
        "prompts": {"number": len(prompts), "sha256": text_hash(prompts)},
        "reward": section.reward.to_dict(),
        "options": {k: v for k, v in asdict(options).items() if k != "batch_size"},
    }


def finish(
    folder: EvaluationFolder,
    episodes: Sequence[Episode],
    ordinary: Sequence[Episode],
    options: EvaluationOptions,
    loaded: LoadedScorers,
    *,
    planted: Sequence[PlantedFailure],
    labels: tuple[str, str],
    parts: Sequence[Mapping[str, Any]],
    why_not_weighed: str | None = None,
) -> dict[str, Any]:
    """Work out the figures and write them with the table."""
    names = list(loaded.scorers)
    figures: dict[str, Any] = {
        "version": VERSION,
        "name": folder.path.name,
        "attacker": labels[0],
        "target": labels[1],
        "scorer": names[0],
        "split": options.split,
    }
    figures |= summarise(
        episodes,
        ordinary,
        options,
        embed=build_embedder(EmbedderParameters(), device=torch.device("cpu")).embed,
        planted=planted,
        scorers=names,
        why_not_weighed=why_not_weighed,
        parts=parts,
    )
    folder.write(figures, as_text(evaluation_tables(figures)))
    return figures


def _options(request: EvaluateRequest, attacker: LoadedAttacker) -> EvaluationOptions:
    own, section = attacker.section.evaluation, attacker.section
    num_episodes = request.num_episodes or own.num_episodes
    chances = request.probability_episodes
    seed = attacker.resolved.hyper_params.seed if request.seed is None else request.seed
    return EvaluationOptions(
        split=request.split,
        seed=seed,
        num_episodes=num_episodes,
        num_probability_episodes=num_episodes if chances is None else chances,
        use_importance_sampling=request.importance_sampling and not request.is_untrained,
        num_turns=request.num_turns or section.tree_depth,
        failure_threshold=request.threshold or section.failure_threshold,
        batch_size=request.batch_size or own.batch_size,
        num_bootstrap_resamples=own.num_bootstrap_resamples,
    )


def _prompts(attacker: LoadedAttacker, split: str) -> Sequence[str]:
    datasets = attacker.instance.datasets
    if split not in datasets:
        raise ConfigurationError(
            f"the opening prompts {split!r} were asked for, but {attacker.label} has "
            f"{', '.join(datasets)}. Give one of them as --split."
        )
    return datasets[split]


def _keep_matrix(
    request: EvaluateRequest, cells: Mapping[tuple[str, str], Mapping[str, Any]]
) -> None:
    """Print the transfer matrix and keep it beside the first run's evaluations."""
    kept = ("failure_rate", "turn_failure_rate", "probability_of_failure", "name")
    plain = [
        {"attacker": attacker, "target": target, **{name: figures[name] for name in kept}}
        for (attacker, target), figures in cells.items()
    ]
    run, _ = run_of(request.runs[0])
    path = RunDirectory(run / EVALUATIONS).write_json(
        TRANSFER, {"version": VERSION, "cells": plain}
    )
    if not request.as_json:
        console = _console()
        console.print(matrix_table(cells))
        console.print(f"matrix     {path}", soft_wrap=True)


def show(figures: Mapping[str, Any], folder: EvaluationFolder, *, as_json: bool) -> None:
    """Print an evaluation and where it is."""
    if as_json:
        sys.stdout.write((folder.path / FIGURES).read_text(encoding="utf-8"))
        return
    console = _console()
    for part in evaluation_tables(figures):
        console.print(part)
    console.print(f"evaluation {folder.path}\n", soft_wrap=True)


def gate(condition: str | None, figures: Mapping[str, Any]) -> None:
    """End the program with exit code 1 where the condition holds."""
    if condition is not None and holds(condition, figures):
        sys.stderr.write(f"failed: {condition}\n")
        raise typer.Exit(GATE_FAILED)


def _use_processor(attacker: LoadedAttacker, settings: ExperimentSettings) -> None:
    keep_freed_memory()
    torch.set_num_threads(
        choose_num_threads(attacker.instance.num_parameters, settings.num_threads)
    )


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._@-" else "_" for c in text)
