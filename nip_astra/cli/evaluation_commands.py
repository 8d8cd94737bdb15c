"""What `evaluate` does; imported when it runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nip_astra.cli.attacker_folders import Surroundings
from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.evaluation_loading import (
    LoadedAttacker,
    LoadedTarget,
    RunCode,
    load_attacker,
    load_target,
    run_of,
    section_about,
    with_service_files,
)
from nip_astra.cli.judging import Judges, JudgingRequest, finish, gate, load_judges, show
from nip_astra.cli.terminal import open_console
from nip_astra.cli.text_attackers import is_text_attacker, num_turns_of, openings_of, place_of
from nip_astra.errors import ConfigurationError, NothingMeasuredError
from nip_astra.evaluation.cards import model_card, text_card
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.playing import EvaluationOptions, Player
from nip_astra.evaluation.reuse import reuse_conversations
from nip_astra.evaluation.rows import Episode
from nip_astra.evaluation.storage import EVALUATIONS, EvaluationFolder, text_hash
from nip_astra.evaluation.summary import VERSION, summarise
from nip_astra.evaluation.tables import matrix_tables
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel, resume_usage
from nip_astra.language_models.services.run_sync import close_all
from nip_astra.progress import open_progress
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.chat_agent import ChatAgent
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN
from nip_astra.scenario_base.text_attackers import ChatAttacker, FixedProbes
from nip_astra.scorers.base import open_services
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.service_use import refuse_unanswered
from nip_astra.utils.actors import actor_options, using_actors
from nip_astra.utils.forked import using_processes
from nip_astra.utils.processor import (
    choose_num_processes,
    choose_num_threads,
    keep_freed_memory,
)

TRANSFER = "transfer"


@dataclass(frozen=True)
class PlayingRequest:
    """What is to be played; None takes the run's own value."""

    split: str
    seed: int | None
    num_episodes: int | None
    num_turns: int | None
    probability_episodes: int | None
    importance_sampling: bool
    batch_size: int | None


@dataclass(frozen=True)
class EvaluateRequest:
    """What `evaluate` was asked for."""

    runs: Sequence[str]
    targets: Sequence[str]
    is_untrained: bool
    overrides: Sequence[str]
    code: RunCode
    played: PlayingRequest
    judged: JudgingRequest
    surroundings: Surroundings = field(default_factory=Surroundings)
    column: str = DEFAULT_COLUMN


_OF_ATTACKERS = {
    "targets": "--target",
    "scorers": "--scorer",
    "labelled": "--labelled",
    "embedder": "--embedder",
    "threshold": "--threshold",
    "num_turns": "--num-turns",
    "probability_episodes": "--probability-episodes",
    "scenario": "--scenario",
    "parameter_file": "--parameters",
}
"""Options of `evaluate` about attackers and targets."""


def refuse_unread(
    request: EvaluateRequest,
    kind: str,
    advice: str,
    is_of_kind: Callable[[str], bool],
    more: Mapping[str, str] = {},
) -> None:
    """Refuse options about attackers and targets where there are none, and runs of other kinds.

    Parameters
    ----------
    kind, advice : str
        What the runs are, after "whose", and what to do about an option.
    more : Mapping
        Further options that are not read, by the name of what they give.

    Raises
    ------
    ConfigurationError
        Before anything is played.
    """
    given = {**vars(request), **vars(request.played), **vars(request.judged)}
    given |= vars(request.surroundings)
    names = {**_OF_ATTACKERS, **more}
    unread = [option for name, option in names.items() if given[name] not in (None, (), [])]
    unread += [] if request.played.importance_sampling else ["--monte-carlo-only"]
    unread += [] if request.column == DEFAULT_COLUMN else ["--column"]
    first = request.runs[0]
    if unread:
        raise ConfigurationError(
            f"{', '.join(unread)} was given to evaluate {first}, whose {kind}: {advice}"
        )
    others = [path for path in request.runs if not is_of_kind(path)]
    if others:
        raise ConfigurationError(
            f"{others[0]} was to be evaluated beside {first}, whose {kind}, but it is no such run. "
            f"Evaluate runs of one kind at a time: nip-astra evaluate {shlex.quote(others[0])}"
        )


_Cells: TypeAlias = dict[tuple[str, str], dict[str, Any]]
"""Figures by attacker and target."""


def evaluate(request: EvaluateRequest, settings_fields: Mapping[str, Any]) -> None:
    """Evaluate every attacker against every target."""
    quieten_libraries()
    asked: list[ChatModel] = []
    try:
        cells, folders = _evaluate_cells(request, settings_fields, asked)
    finally:
        close_all(asked)
    if len(cells) > 1:
        _keep_matrix(request, cells, folders)
    for figures in cells.values():
        gate(request.judged.fail_if, figures)


def _evaluate_cells(
    request: EvaluateRequest, settings_fields: Mapping[str, Any], asked: list[ChatModel]
) -> tuple[_Cells, dict[tuple[str, str], EvaluationFolder]]:
    """The figures and folders of every attacker against every target; see `_evaluate_cell`."""
    plain_settings = ExperimentSettings.from_dict(dict(settings_fields))
    cells: _Cells = {}
    folders: dict[tuple[str, str], EvaluationFolder] = {}
    for path in request.runs:
        settings = with_service_files(plain_settings, _place_of(path))
        attacker = load_attacker(
            path,
            settings,
            code=request.code,
            overrides=request.overrides,
            is_untrained=request.is_untrained,
            surroundings=request.surroundings,
            column=request.column,
        )
        for spec in request.targets or (None,):
            target = load_target(spec, attacker, settings, request.code)
            with _processor(attacker, target, settings):
                figures, folder = _evaluate_cell(request, attacker, target, settings, asked)
            # Two runs may have the same id in different folders.
            is_taken = (attacker.label, target.label) in cells
            key = (path if is_taken else attacker.label, target.label)
            cells[key], folders[key] = figures, folder
            show(figures, folder, as_json=request.judged.as_json)
    return cells, folders


def _evaluate_cell(
    request: EvaluateRequest,
    attacker: LoadedAttacker,
    target: LoadedTarget,
    settings: ExperimentSettings,
    asked: list[ChatModel],
) -> tuple[dict[str, Any], EvaluationFolder]:
    """Play one attacker against one target, or go on with it, and write its figures.

    Parameters
    ----------
    asked : list of ChatModel
        Gets the models whose connections are to be ended.
    """
    section, scenario_dir = attacker.section, attacker.resolved.scenario_dir
    described = None if target.agent is None else target.description
    judged = section_about(described, section, scenario_dir)
    judges = load_judges(request.judged, judged, settings, scenario_dir, attacker.sampler.scorer)
    prompts, options = _prompts(attacker, request.played.split), _options(request, attacker)
    sampler = _sampler(attacker, target, judges, prompts, request.played.split)
    folder = EvaluationFolder.of_run(attacker.run, _name(request, attacker, target, judges))
    configuration = _configuration(request, attacker, target, judges, prompts, options)
    is_new = folder.open(configuration, is_overwritten=request.judged.is_overwritten)
    check_condition(request.judged.fail_if, _shape_of_figures(options, judges))
    services = _services(sampler, judges, settings)
    asked.extend(services.values())
    resume_usage(services, f"evaluation {folder.path.name}", is_new=is_new)
    if not request.judged.is_overwritten:
        _reuse(folder, configuration, judges, options, is_quiet=request.judged.as_json)
    player = Player(
        sampler,
        {name: judges.scorers[name] for name in list(judges.scorers)[1:]},
        prompts,
        options,
        folder,
    )
    title = f"{attacker.label} against {target.label}"
    try:
        episodes, ordinary = _play(player, title, request.judged, services)
        figures = finish(
            folder,
            episodes,
            ordinary,
            options,
            judges,
            planted=section.planted_failures if target.planted is None else target.planted,
            labels=(attacker.label, target.label),
            parts=folder.parts(),
            cards=_cards(attacker, target, sampler),
            why_not_weighed=player.why_not_weighed(),
            services=services,
        )
    except NothingMeasuredError:
        folder.forget_rows()
        raise
    return figures, folder


def _shape_of_figures(options: EvaluationOptions, judges: Judges) -> dict[str, Any]:
    """The names of the figures that an evaluation will have, for `check_condition`."""
    texts = dict.fromkeys(("name", "attacker", "target", "scorer", "split"), "")
    figures = summarise([], [], options, embed=judges.embedder.embed, scorers=list(judges.scorers))
    return {**texts, **figures, "services": {}, "cards": [], "version": VERSION}


def _place_of(spec: str) -> Path:
    """The folder that keeps an attacker's evaluations."""
    return place_of(spec) if is_text_attacker(spec) else run_of(spec)[0]


def _reuse(
    folder: EvaluationFolder,
    configuration: Mapping[str, Any],
    judges: Judges,
    options: EvaluationOptions,
    *,
    is_quiet: bool,
) -> None:
    """Take the conversations of another evaluation of the run where they are the same."""
    reused = reuse_conversations(folder, configuration, judges.scorers, options)
    if reused is not None and not is_quiet:
        number = reused.num_episodes + reused.num_probability_episodes
        text = f"{number} conversations are those of the evaluation {reused.source}"
        open_console().print(text, highlight=False, soft_wrap=True)


def _play(
    player: Player,
    title: str,
    judged: JudgingRequest,
    services: Mapping[str, RetryingChatModel],
) -> tuple[list[Episode], list[Episode]]:
    """Play what is not there yet, with a progress bar.

    Raises
    ------
    NothingMeasuredError
        After a part, when every request to a chat model failed.
    """
    options = player.options
    progress = open_progress(
        options.num_episodes + options.num_probability_episodes, enabled=not judged.as_json
    )
    progress.set_description(title)

    def on_part(num_episodes: int) -> None:
        progress.step(num_episodes)
        if num_episodes:
            refuse_unanswered(services)

    player.on_part = on_part
    try:
        episodes = player.play_attacker()
        ordinary = player.play_probability() if options.num_probability_episodes else []
    finally:
        progress.close()
    return episodes, ordinary


def _services(
    sampler: TreeSampler, judges: Judges, settings: ExperimentSettings
) -> dict[str, RetryingChatModel]:
    """The chat models that are asked, by who they are."""
    target = sampler.target
    found = {"target": target.chat_model} if isinstance(target, ChatAgent) else {}
    if isinstance(sampler.attacker, ChatAttacker):
        found["attacker"] = sampler.attacker.agent.chat_model
    return found | open_services(judges.scorers.values(), settings)


def _cards(
    attacker: LoadedAttacker, target: LoadedTarget, sampler: TreeSampler
) -> list[dict[str, Any]]:
    """The cards of the two that converse."""
    weights, sizes = attacker.weights, {}
    for role in ("attacker", "target"):
        # A chat model does not tell.
        sizes[role] = getattr(sampler, role).language_model.num_parameters() or None
    parameters = attacker.section.attacker.language_model
    if attacker.texts is not None:
        parameters = attacker.texts.card
    of_attacker = (
        text_card("attacker", attacker.label, "fixed probes")
        if parameters is None
        else model_card(
            "attacker",
            parameters,
            attacker.resolved.scenario_dir,
            num_parameters=sizes["attacker"],
            trained=None if weights is None else attacker.label,
            sha256=weights,
        )
    )
    return [
        of_attacker,
        model_card(
            "target", target.language_model, target.scenario_dir, num_parameters=sizes["target"]
        ),
    ]


def _sampler(
    attacker: LoadedAttacker,
    target: LoadedTarget,
    judges: Judges,
    prompts: Sequence[str],
    split: str,
) -> TreeSampler:
    """The attacker's sampler with the target and the first scorer of the evaluation."""
    own = attacker.sampler
    agent = own.target if target.agent is None else target.agent
    agent.check_prompts(prompts, split=split)
    scorer = next(iter(judges.scorers.values()))
    return TreeSampler(
        own.attacker,
        agent,
        own.reference,
        scorer,
        own.reward,
        own.max_cache_bytes,
        num_parts=own.num_parts,
    )


def _name(
    request: EvaluateRequest, attacker: LoadedAttacker, target: LoadedTarget, judges: Judges
) -> str:
    """The evaluation's name: the one asked for, or one of what differs from the run's own."""
    judged = request.judged
    scorers = list(judges.scorers) if judged.scorers else []
    if judged.name is not None and len(request.targets) < 2:
        return judged.name
    parts = [request.played.split, attacker.suffix, target.suffix, *scorers]
    if judged.name is not None:
        parts = [judged.name, target.suffix]
    return "-".join(_file_name(part) for part in parts if part)


def _configuration(
    request: EvaluateRequest,
    attacker: LoadedAttacker,
    target: LoadedTarget,
    judges: Judges,
    prompts: Sequence[str],
    options: EvaluationOptions,
) -> dict[str, Any]:
    """Everything that changes the evaluation's result."""
    section = attacker.section
    return {
        "attacker": {
            "weights": attacker.weights,
            "untrained": request.is_untrained,
            **section.attacker.to_dict(),
            **({} if attacker.texts is None else {"texts": attacker.texts.description}),
        },
        "target": target.description,
        **judges.configuration,
        "prompts": {"number": len(prompts), "sha256": text_hash(prompts)},
        "reward": section.reward.to_dict(),
        "options": {k: v for k, v in asdict(options).items() if k != "batch_size"},
    }


def _options(request: EvaluateRequest, attacker: LoadedAttacker) -> EvaluationOptions:
    own, section, asked = attacker.section.evaluation, attacker.section, request.played
    threshold = request.judged.threshold
    texts = None if attacker.texts is None else attacker.texts.attacker
    own_number = len(texts.probes) if isinstance(texts, FixedProbes) else own.num_episodes
    num_episodes = asked.num_episodes or own_number
    chances = asked.probability_episodes
    seed = attacker.resolved.hyper_params.seed if asked.seed is None else asked.seed
    return EvaluationOptions(
        split=asked.split,
        seed=seed,
        num_episodes=num_episodes,
        num_probability_episodes=num_episodes if chances is None else chances,
        use_importance_sampling=asked.importance_sampling and not request.is_untrained,
        num_turns=num_turns_of(texts, asked.num_turns, section.tree_depth),
        failure_threshold=section.failure_threshold if threshold is None else threshold,
        batch_size=asked.batch_size or own.batch_size,
        num_bootstrap_resamples=own.num_bootstrap_resamples,
    )


def _prompts(attacker: LoadedAttacker, split: str) -> Sequence[str]:
    datasets = attacker.instance.datasets
    if split not in datasets:
        raise ConfigurationError(
            f"the opening prompts {split!r} were asked for, but {attacker.label} has "
            f"{', '.join(datasets)}. Give one of them as --split."
        )
    if attacker.texts is not None:
        return openings_of(attacker.texts.attacker, datasets[split])
    return datasets[split]


def _keep_matrix(
    request: EvaluateRequest,
    cells: Mapping[tuple[str, str], Mapping[str, Any]],
    folders: Mapping[tuple[str, str], EvaluationFolder],
) -> None:
    """Print the transfer matrix and keep it beside the first run's evaluations."""
    kept = ("failure_rate", "turn_failure_rate", "probability_of_failure", "name", "warnings")
    plain = [
        {
            "attacker": attacker,
            "target": target,
            "configuration": folders[attacker, target].configuration()["sha256"],
            **{name: figures[name] for name in kept},
        }
        for (attacker, target), figures in cells.items()
    ]
    evaluations = RunDirectory(_place_of(request.runs[0]) / EVALUATIONS)
    name = _matrix_name(evaluations, plain, request.judged)
    path = evaluations.write_json(name, {"version": VERSION, "cells": plain})
    if not request.judged.as_json:
        console = open_console()
        for part in matrix_tables(cells):
            console.print(part)
        console.print(f"matrix     {path}", soft_wrap=True)


def _matrix_name(
    evaluations: RunDirectory, cells: Sequence[Mapping[str, Any]], judged: JudgingRequest
) -> str:
    """A file name that no matrix of other evaluations has, unless it is to be overwritten."""
    stem = TRANSFER if judged.name is None else f"{TRANSFER}-{_file_name(judged.name)}"
    name, number = f"{stem}.json", 2
    while (evaluations.path / name).is_file() and not judged.is_overwritten:
        stored = evaluations.read_json(name).get("cells", [])
        if _identities(stored) == _identities(cells):
            break
        name, number = f"{stem}-{number}.json", number + 1
    return name


def _identities(cells: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    names = ("attacker", "target", "name", "configuration")
    return [[cell.get(name) for name in names] for cell in cells]


@contextmanager
def _processor(
    attacker: LoadedAttacker, target: LoadedTarget, settings: ExperimentSettings
) -> Iterator[None]:
    """Use the cores as the larger of the models needs it."""
    keep_freed_memory()
    before = torch.get_num_threads()
    size = attacker.instance.num_parameters
    if target.agent is not None:
        size = max(size, target.agent.language_model.num_parameters())
    torch.set_num_threads(choose_num_threads(size, settings.num_threads))
    try:
        num_processes = choose_num_processes(size, settings.num_threads)
        with using_processes(num_processes), using_actors(actor_options(settings, size)):
            yield
    finally:
        torch.set_num_threads(before)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._@-" else "_" for c in text)
