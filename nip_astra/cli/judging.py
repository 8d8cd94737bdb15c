"""What `evaluate` and `score` share: who judges, the figures, and what is shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import typer

from nip_astra.cli.scorer_loading import load_scorers
from nip_astra.cli.terminal import complain, open_console, say
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.cards import code_of, scorer_card, weights_of
from nip_astra.evaluation.conditions import check_condition, holds
from nip_astra.evaluation.detectors import (
    LabelledResponse,
    Quality,
    measure_quality,
    read_labelled,
)
from nip_astra.evaluation.measured import known_turns
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rows import Episode
from nip_astra.evaluation.storage import EvaluationFolder, text_hash
from nip_astra.evaluation.summary import NGRAMS, VERSION, summarise
from nip_astra.evaluation.tables import as_text, comparison_tables, evaluation_tables
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.embeddings import Embedder, EmbedderParameters, build_embedder
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.parameters.content import resolve_reference
from nip_astra.safe_text import to_json
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.scorers.base import Scorer
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.service_use import last_failure, services_used
from nip_astra.utils.devices import resolve_device

GATE_FAILED = 1
"""Exit code where a --fail-if condition holds."""
NO_LABELS = "none"
"""As --labelled: leave out the scenario's own labelled responses."""
LABELLED = "labelled"
"""What the rating of labelled responses is called among the parts of an evaluation's work."""


@dataclass(frozen=True)
class JudgingRequest:
    """How conversations are to be judged and shown; None takes the run's own value."""

    scorers: Sequence[str]
    name: str | None
    threshold: float | None
    labelled: str | None
    embedder: str | None
    is_overwritten: bool
    fail_if: str | None
    as_json: bool

    def __post_init__(self) -> None:
        check_condition(self.fail_if)
        # NaN is in no range.
        if self.threshold is not None and not 0.0 < self.threshold <= 1.0:
            raise ConfigurationError(
                f"the failure threshold {self.threshold:g} was asked for, but scores lie between "
                "0 and 1. Give a number above 0 and not above 1 as --threshold, for instance 0.5."
            )


@dataclass(frozen=True)
class Judges:
    """Who judges conversations.

    Attributes
    ----------
    scorers : dict[str, Scorer]
        By name, the one that decides first.
    configuration : dict
        What changes the figures: parameters of the scorers, and what is not the default.
    labelled : Sequence[LabelledResponse]
        Empty where there are none.
    embedding : str
        What texts are embedded by, for a reader.
    cards : list[dict]
        Of the scorers.
    """

    scorers: dict[str, Scorer]
    configuration: dict[str, Any]
    labelled: Sequence[LabelledResponse]
    embedder: Embedder
    embedding: str
    cards: list[dict[str, Any]]


def load_judges(
    request: JudgingRequest,
    section: Any,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
    own_scorer: Scorer | None = None,
) -> Judges:
    """Load scorers, labelled responses and embedder.

    Parameters
    ----------
    section : Any
        Parameters of the scenario's kind.
    own_scorer : Scorer, optional
        The scenario's scorer, where it is loaded already.
    """
    loaded = load_scorers(request.scorers, section.scorer, settings, scenario_dir, own_scorer)
    described = {}
    for name, scorer in loaded.scorers.items():
        # What a name stands for may be other code, or other weights, the next time.
        identity = {"code": code_of(scorer), "weights": weights_of(scorer)}
        known = {key: digest for key, digest in identity.items() if digest is not None}
        described[name] = {**loaded.parameters[name], **known}
    configuration: dict[str, Any] = {"scorers": described}
    labelled = _labelled(request.labelled, section.evaluation.labelled_responses, scenario_dir)
    if labelled:
        texts = [f"{one.exchange.conversation}\t{one.is_failure}" for one in labelled]
        configuration["labelled"] = {"number": len(labelled), "sha256": text_hash(texts)}
    embedder, embedding = _embedder(request.embedder, settings, scenario_dir)
    if embedding != NGRAMS:
        configuration["embedder"] = embedding
    cards = [
        scorer_card(name, scorer.parameters, scenario_dir)
        for name, scorer in loaded.scorers.items()
    ]
    return Judges(loaded.scorers, configuration, labelled, embedder, embedding, cards)


def finish(
    folder: EvaluationFolder,
    episodes: Sequence[Episode],
    ordinary: Sequence[Episode],
    options: EvaluationOptions,
    judges: Judges,
    *,
    planted: Sequence[PlantedFailure],
    labels: tuple[str, str],
    parts: Sequence[Mapping[str, Any]],
    cards: Sequence[Mapping[str, Any]] = (),
    why_not_weighed: str | None = None,
    services: Mapping[str, RetryingChatModel],
) -> dict[str, Any]:
    """Work out the figures and write them with the table.

    Raises
    ------
    NothingMeasuredError
        When no turn has a verdict.
    """
    names = list(judges.scorers)
    qualities = {
        name: _quality(folder, name, scorer, judges.labelled, options.failure_threshold)
        for name, scorer in judges.scorers.items()
        if judges.labelled
    }
    of_labels = [part for part in folder.parts() if part.get("table") == LABELLED]
    others = [part for part in parts if part.get("table") != LABELLED]
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
        embed=judges.embedder.embed,
        embedding=judges.embedding,
        planted=planted,
        scorers=names,
        qualities=qualities,
        why_not_weighed=why_not_weighed,
        parts=[*others, *of_labels],
    )
    known_turns(figures["outcomes"]).refuse_nothing(
        f"the evaluation {folder.path.name}", last_failure(services)
    )
    limit = {"threshold": options.failure_threshold}
    figures |= services_used(services)
    figures["cards"] = [*cards, *(card | limit for card in judges.cards)]
    folder.write(figures, as_text(evaluation_tables(figures)))
    return figures


def _quality(
    folder: EvaluationFolder,
    name: str,
    scorer: Scorer,
    labelled: Sequence[LabelledResponse],
    threshold: float,
) -> Quality:
    """Let a scorer rate labelled responses, unless it has for this evaluation, all of them."""
    for part in folder.parts():
        if part.get("table") == LABELLED and part["scorer"] == name and not part["num_unknown"]:
            return Quality(**{field.name: part[field.name] for field in fields(Quality)})
    quality = measure_quality(labelled, scorer, threshold=threshold)
    calls = {"scorer_calls": len(labelled)}
    folder.note_part({"table": LABELLED, "scorer": name, **asdict(quality), **calls})
    return quality


def show(figures: Mapping[str, Any], folder: EvaluationFolder, *, as_json: bool) -> None:
    """Print an evaluation and where it is."""
    if as_json:
        say(to_json(folder.figures(), indent=2))
        return
    console = open_console()
    for part in evaluation_tables(figures):
        console.print(part)
    console.print(f"evaluation {folder.path}\n", soft_wrap=True)


def show_comparison(found: Mapping[str, Any], *, out: str | None, as_json: bool) -> None:
    """Print a comparison, and write it to a file as JSON where one is named."""
    if out is not None:
        RunDirectory(Path(out).parent).write_json(Path(out).name, _with_nulls(found))
    if as_json:
        say(to_json(_with_nulls(found), indent=2))
        return
    console = open_console()
    for part in comparison_tables(found):
        console.print(part)


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """The labels, a number behind each that was there before."""
    found: list[str] = []
    for label in labels:
        number, free = 2, label
        while free in found:
            free, number = f"{label} ({number})", number + 1
        found.append(free)
    return found


def _with_nulls(value: Any) -> Any:
    """Nested values with None in place of NaN, which JSON has not."""
    if isinstance(value, Mapping):
        return {name: _with_nulls(item) for name, item in value.items()}
    return None if isinstance(value, float) and value != value else value


def gate(condition: str | None, figures: Mapping[str, Any]) -> None:
    """End the program with exit code 1 where the condition holds."""
    if condition is not None and holds(condition, figures):
        complain(f"failed: {condition}")
        raise typer.Exit(GATE_FAILED)


def _labelled(
    asked: str | None, own: str | None, scenario_dir: Path | None
) -> Sequence[LabelledResponse]:
    reference = own if asked is None else asked
    if reference is None or asked == NO_LABELS:
        return ()
    return read_labelled(Path(resolve_reference(reference, scenario_dir)))


def _embedder(
    asked: str | None, settings: ExperimentSettings, scenario_dir: Path | None
) -> tuple[Embedder, str]:
    if asked == "":
        raise ConfigurationError(
            "an embedder was asked for, but its name is empty. Give ngram, or an encoder's folder, "
            "package://name/folder or hub id."
        )
    if asked in (None, "ngram"):
        parameters = EmbedderParameters()
    else:
        parameters = EmbedderParameters(kind="encoder", model=asked)
    device = resolve_device(settings.device)
    embedder = build_embedder(parameters, device=device, scenario_dir=scenario_dir)
    return embedder, NGRAMS if parameters.kind == "ngram" else f"mean of {asked}"
