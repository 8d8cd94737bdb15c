"""Scorers, labelled responses and embedder of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.cards import code_of, scorer_card, weights_of
from nip_astra.evaluation.detectors import LabelledResponse, read_labelled
from nip_astra.evaluation.families.base import EvaluationRequest
from nip_astra.evaluation.storage import text_hash
from nip_astra.evaluation.summary import NGRAMS
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.embeddings import Embedder, EmbedderParameters, build_embedder
from nip_astra.parameters.content import resolve_reference
from nip_astra.scorers.base import SCORERS, Scorer, build_scorer
from nip_astra.trust import active_source, on_behalf_of
from nip_astra.utils.devices import resolve_device

NO_LABELS = "none"
"""As --labelled: leave out the scenario's own labelled responses."""


class LoadedScorers(NamedTuple):
    """Scorers by name, the one that decides first, and their parameters."""

    scorers: dict[str, Scorer]
    parameters: dict[str, Any]


def load_scorers(
    specs: Sequence[str],
    own: Any,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
    own_scorer: Scorer | None = None,
) -> LoadedScorers:
    """The named scorers; without any, the scenario's own.

    Parameters
    ----------
    specs : Sequence[str]
        A registered name, `own` for the scenario's, or a YAML file of a scorer's parameters.
    own : Any
        Parameters of the scenario's scorer.
    own_scorer : Scorer, optional
        The scenario's scorer, if it is loaded already.
    """
    scorers: dict[str, Scorer] = {}
    found: dict[str, Any] = {}
    for spec in specs or ("own",):
        name, parameters = _scorer_parameters(spec, own)
        while name in scorers:
            name += "_2"
        scorer = own_scorer if spec == "own" else None
        if scorer is None:
            # Any but the run's own was named by the user.
            with on_behalf_of(active_source() if spec == "own" else None):
                scorer = build_scorer(
                    parameters, device=resolve_device(settings.device), scenario_dir=scenario_dir
                )
        scorers[name], found[name] = scorer, parameters.to_dict()
    return LoadedScorers(scorers, found)


def _scorer_parameters(spec: str, own: Any) -> tuple[str, Any]:
    if spec == "own":
        return str(own.type_name), own
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        return spec, SCORERS.get(spec).Parameters.from_dict({})
    values = read_mapping(path, "_type and the scorer's parameters")
    if not isinstance(values.get("_type"), str):
        raise DataError(
            f"the scorer's file {path} has no _type. Begin it with `_type: <name>`, one of: "
            f"{', '.join(SCORERS.names())}."
        )
    rest = {name: value for name, value in values.items() if name != "_type"}
    return path.stem, SCORERS.get(values["_type"]).Parameters.from_dict(rest)


def read_mapping(path: str | Path, content: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Parameters
    ----------
    content : str
        What it should hold, for the message.

    Raises
    ------
    DataError
        When it cannot be read, or holds no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Give a YAML file of {content}."
        ) from error
    if not isinstance(values, dict):
        raise DataError(f"{path} holds no parameters. Give a YAML file of {content}.")
    return values


@dataclass(frozen=True)
class Judges:
    """Scorers of conversations, and what belongs to them.

    Attributes
    ----------
    scorers : dict[str, Scorer]
        By name, the one that decides first.
    configuration : dict
        What changes the figures: parameters of the scorers, and what is not the default.
    labelled : Sequence[LabelledResponse]
        Empty if there are none.
    embedding : str
        What embeds texts, for a reader.
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
    request: EvaluationRequest,
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
        The scenario's scorer, if it is loaded already.
    """
    loaded = load_scorers(request.scorers, section.scorer, settings, scenario_dir, own_scorer)
    described = {}
    for name, scorer in loaded.scorers.items():
        # A name may stand for other code, or other weights, the next time.
        identity = {"code": code_of(scorer), "weights": weights_of(scorer)}
        known = {key: digest for key, digest in identity.items() if digest is not None}
        described[name] = {**loaded.parameters[name], **known}
    configuration: dict[str, Any] = {"scorers": described}
    labels = section.evaluation.labelled_responses if request.labelled is None else request.labelled
    labelled: Sequence[LabelledResponse] = ()
    if labels is not None and request.labelled != NO_LABELS:
        labelled = read_labelled(Path(resolve_reference(labels, scenario_dir)))
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


def _embedder(
    name: str | None, settings: ExperimentSettings, scenario_dir: Path | None
) -> tuple[Embedder, str]:
    if name == "":
        raise ConfigurationError(
            "embedder (--embedder) is empty. Give ngram, or an encoder's folder, "
            "package://name/folder or hub id."
        )
    if name in (None, "ngram"):
        parameters = EmbedderParameters()
    else:
        parameters = EmbedderParameters(kind="encoder", model=name)
    device = resolve_device(settings.device)
    embedder = build_embedder(parameters, device=device, scenario_dir=scenario_dir)
    return embedder, NGRAMS if parameters.kind == "ngram" else f"mean of {name}"
