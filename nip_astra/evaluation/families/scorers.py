"""Scorers, labelled responses and embedder of an evaluation, and cards of its models.

A card has `role`, `name`, `kind`, `source`, `licence`, `num_parameters`, `size_bytes` and `sha256`;
null if unknown.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from nip_astra.errors import ConfigurationError, DataError, NipAstraError
from nip_astra.evaluation.detectors import LabelledResponse, read_labelled
from nip_astra.evaluation.families.base import EvaluationRequest, closing_services
from nip_astra.evaluation.storage import EvaluationFolder, text_hash, weights_files, weights_hash
from nip_astra.evaluation.summary import NGRAMS
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.embeddings import Embedder, EmbedderParameters, build_embedder
from nip_astra.language_models.services.retrying import resume_usage
from nip_astra.parameters.content import resolve_reference
from nip_astra.scorers.base import SCORERS, Scorer, build_scorer, open_services
from nip_astra.trust import active_source, on_behalf_of
from nip_astra.utils.devices import resolve_device

NO_LABELS = "none"
"""As --labelled: leave out the scenario's own labelled responses."""
PACKAGES = {"profanity": "alt-profanity-check", "toxblock": "tox-block", "detoxify": "detoxify"}
"""Packages that ship or fetch the weights of scorers."""
_LICENCE_FILES = ("LICENSE", "LICENCE", "LICENSE.txt", "LICENSE.md", "COPYING")

Card = dict[str, Any]


def load_scorers(
    specs: Sequence[str],
    own: Any,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
    own_scorer: Scorer | None = None,
) -> dict[str, Scorer]:
    """Load the named scorers, the deciding one first; without names, the scenario's own.

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
    for spec in specs or ("own",):
        name, parameters = _scorer_parameters(spec, own)
        while name in scorers:
            name += "_2"
        if spec == "own" and own_scorer is not None:
            scorers[name] = own_scorer
            continue
        # Any but the run's own was named by the user.
        with on_behalf_of(active_source() if spec == "own" else None):
            device = resolve_device(settings.device)
            scorers[name] = build_scorer(parameters, device=device, scenario_dir=scenario_dir)
    return scorers


def _scorer_parameters(spec: str, own: Any) -> tuple[str, Any]:
    if spec == "own":
        return str(own.type_name), own
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml"):
        return spec, SCORERS.get(spec).Parameters.from_dict({})
    values = read_mapping(path, "_type and the scorer's parameters")
    kind = values.pop("_type", None)
    if not isinstance(kind, str):
        raise DataError(
            f"the scorer's file {path} has no _type. Begin it with `_type: <name>`, one of: "
            f"{', '.join(SCORERS.names())}."
        )
    return path.stem, SCORERS.get(kind).Parameters.from_dict(values)


def read_mapping(path: str | Path, content: str) -> dict[str, Any]:
    """Read a mapping from a YAML file; `content` describes it for messages.

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
    """Scorers of conversations, with their labelled responses and an embedder of probes.

    Attributes
    ----------
    scorers : dict[str, Scorer]
        By name, the deciding one first.
    configuration : dict
        Everything here that changes the figures.
    embedding : str
        Describes the embedder.
    cards : list[dict]
        Of the scorers.
    """

    scorers: dict[str, Scorer]
    configuration: dict[str, Any]
    labelled: Sequence[LabelledResponse]
    embedder: Embedder
    embedding: str
    cards: list[Card]


def load_judges(
    request: EvaluationRequest,
    section: Any,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
    own_scorer: Scorer | None = None,
) -> Judges:
    """Load scorers, labelled responses and embedder.

    `section` holds the parameters of the scenario's kind, and `own_scorer` is its loaded scorer.
    """
    scorers = load_scorers(request.scorers, section.scorer, settings, scenario_dir, own_scorer)
    described = {}
    for name, scorer in scorers.items():
        # A name may resolve to other code or weights the next time.
        identity = {"code": code_of(scorer), "weights": weights_of(scorer)}
        known = {key: digest for key, digest in identity.items() if digest is not None}
        described[name] = {**scorer.parameters.to_dict(), **known}
    configuration: dict[str, Any] = {"scorers": described}
    labels = section.evaluation.labelled_responses if request.labelled is None else request.labelled
    labelled: Sequence[LabelledResponse] = ()
    if labels is not None and request.labelled != NO_LABELS:
        labelled = read_labelled(Path(resolve_reference(labels, scenario_dir)))
        texts = [
            f"{response.exchange.conversation}\t{response.is_failure}{response.weighted_stratum}"
            for response in labelled
        ]
        configuration["labelled"] = {"number": len(labelled), "sha256": text_hash(texts)}
    model = request.embedder
    if model == "":
        raise ConfigurationError(
            "embedder (--embedder) is empty. Give ngram, or an encoder's folder, "
            "package://name/folder or hub id."
        )
    embedding, kind = NGRAMS, EmbedderParameters()
    if model not in (None, "ngram"):
        embedding, kind = f"mean of {model}", EmbedderParameters(kind="encoder", model=model)
        configuration["embedder"] = embedding
    device = resolve_device(settings.device)
    return Judges(
        scorers,
        configuration,
        labelled,
        build_embedder(kind, device=device, scenario_dir=scenario_dir),
        embedding,
        [scorer_card(name, one.parameters, scenario_dir) for name, one in scorers.items()],
    )


@contextmanager
def rating_anew(
    folder: EvaluationFolder,
    configuration: Mapping[str, Any],
    scorers: Mapping[str, Scorer],
    settings: ExperimentSettings,
    request: EvaluationRequest,
    *,
    source: Path,
) -> Iterator[dict[str, Any]]:
    """Open the folder of an evaluation that rates texts of `source`, and scorers' chat models."""
    if folder.path.resolve() == source.resolve():
        raise ConfigurationError(
            f"{source} holds the texts to rate. Give the new evaluation another --name."
        )
    is_new = folder.open(configuration, is_overwritten=request.overwrite)
    services = open_services(scorers.values(), settings)
    resume_usage(services, f"evaluation {folder.path.name}", is_new=is_new)
    with closing_services(services):
        yield services


# ---- identities of scorers


def code_of(scorer: Scorer) -> str | None:
    """Return a digest of a scorer's own files and package versions; None for code of nip_astra.

    Imports of those files are covered by the version of the file's package alone.
    """
    parts = [text for name in scorer.modules for text in _describe(name)]
    # Without the modules' names: that of a plug-in changes with its folder.
    return text_hash(sorted(parts)) if parts else None


def weights_of(scorer: Scorer) -> str | None:
    """Return a digest of the weights named by a scorer and those nested in it, or None."""
    reference = _scorer_reference(scorer.parameters)
    folder = None if reference is None else _folder(reference, scorer.scenario_dir)
    own = None if folder is None else _weights(folder)[1]
    digests = (own, *map(weights_of, scorer.nested_scorers))
    known = [digest for digest in digests if digest is not None]
    return text_hash(known) if known else None


def _describe(name: str) -> list[str]:
    top, _, rest = name.partition(".")
    if top == "nip_astra":
        package = PACKAGES.get(rest.rpartition(".")[2])
        return [] if package is None else [package_text(package)]
    if top in sys.stdlib_module_names:
        return []
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else name
    return [digest, *map(package_text, _distributions().get(top, ()))]


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return names of installed distributions by package; reading them takes a second."""
    return metadata.packages_distributions()


def _scorer_reference(parameters: Any) -> str | None:
    reference = getattr(parameters, "model", None) or getattr(parameters, "checkpoint", None)
    # A parameter of a plug-in may have the name and another meaning.
    return reference if isinstance(reference, str) else None


# ---- cards


def model_card(
    role: str,
    parameters: Any,
    scenario_dir: Path | None,
    *,
    num_parameters: int | None = None,
    trained: str | None = None,
    sha256: str | None = None,
) -> Card:
    """Return the card of a language model.

    Parameters
    ----------
    parameters : Any
        Of its backend; `model` is its source.
    trained, sha256 : str, optional
        The run that trained the weights, and the digest of the trained ones.
    """
    reference = getattr(parameters, "model", None)
    card = _card(role, parameters.type_name, reference, scenario_dir)
    card["num_parameters"] = num_parameters
    if trained is not None:
        card |= {"name": trained, "source": f"trained from {card['source']}", "sha256": sha256}
    return card | _service(parameters)


def text_card(role: str, name: str, kind: str) -> Card:
    """Return the card of a speaker that is not a model."""
    return _card(role, kind, None, None) | {"name": name}


def scorer_card(name: str, parameters: Any, scenario_dir: Path | None) -> Card:
    """Return the card of a scorer."""
    kind, reference = parameters.type_name, _scorer_reference(parameters)
    card = _card("scorer", kind, reference, scenario_dir)
    if reference is None:
        package = PACKAGES.get(kind)
        card["source"] = SCORERS.origin(kind) if package is None else package_text(package)
        card["licence"] = None if package is None else _package_licence(package)
    return card | _service(parameters) | {"name": name}


def _card(role: str, kind: str, reference: str | None, scenario_dir: Path | None) -> Card:
    card: Card = {"role": role, "name": reference or kind, "kind": kind, "source": None}
    card |= {"licence": None, "num_parameters": None, "size_bytes": None, "sha256": None}
    if reference is None:
        return card
    scheme, separator, rest = reference.partition("://")
    package = rest.partition("/")[0] if separator and scheme == "package" else None
    if package is not None:
        card["source"] = package_text(package)
    elif separator:
        card["source"] = "the scenario's own files"
    else:
        is_folder = Path(reference).expanduser().exists()
        card["source"] = "a folder" if is_folder else f"hub id {reference}"
    folder = _folder(reference, scenario_dir)
    if folder is not None:
        size, digest = _weights(folder)
        card |= {"size_bytes": size, "sha256": digest, "licence": _licence(folder, scenario_dir)}
    if package is not None:
        card["licence"] = card["licence"] or _package_licence(package)
    return card


def _service(parameters: Any) -> dict[str, str]:
    if getattr(parameters, "service", None) == "local":
        return {"source": f"{parameters.weights} behind a service of the run"}
    url = getattr(parameters, "base_url", None)
    return {} if url is None else {"source": f"service at {url}"}


def _folder(reference: str, scenario_dir: Path | None) -> Path | None:
    """Return the folder or file of the weights, without network access; None if there is none."""
    try:
        place = resolve_reference(reference, scenario_dir)
        if isinstance(place, Path):
            return place if place.exists() else None
        cached = try_to_load_from_cache(place, "config.json")
    except (NipAstraError, ValueError):
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _weights(folder: Path) -> tuple[int, str | None]:
    """Return the size in bytes and the digest of weights."""
    stats = [path.stat() for path in weights_files(folder)]
    changed_ns = max((stat.st_mtime_ns for stat in stats), default=0)
    return sum(stat.st_size for stat in stats), _digest(folder, changed_ns)


@lru_cache(maxsize=32)
def _digest(folder: Path, _changed_ns: int) -> str | None:
    return weights_hash(folder)


def _licence(folder: Path, scenario_dir: Path | None) -> str | None:
    """Return the licence in the nearest model card or licence file."""
    start = folder if folder.is_dir() else folder.parent
    card = start / "README.md"
    if card.is_file() and (licence := _front_matter(card).get("license")):
        return str(licence)
    places = [start]
    if scenario_dir is not None and scenario_dir.resolve() in start.resolve().parents:
        places.append(scenario_dir)
    for path in (place / name for place in places for name in _LICENCE_FILES):
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in lines if line.strip()), None)
    return None


def _front_matter(path: Path) -> Mapping[str, Any]:
    start, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("---\n")
    if start.strip():
        return {}
    try:
        values = yaml.safe_load(rest.partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def package_text(package: str) -> str:
    """Return a package's name and version."""
    try:
        return f"package {package} {metadata.version(package.replace('_', '-'))}"
    except metadata.PackageNotFoundError:
        return f"package {package}"


def _package_licence(package: str) -> str | None:
    try:
        about = metadata.metadata(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None
    for field in ("License-Expression", "License"):
        if field in about:
            return str(about[field]).strip().partition("\n")[0]
    named = [one for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    return named[0].rpartition(" :: ")[2] if named else None
