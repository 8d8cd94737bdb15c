"""Cards of models and scorers, with licences and digests; digests of a scorer's own code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from nip_astra.errors import NipAstraError
from nip_astra.evaluation.storage import text_hash, weights_files, weights_hash
from nip_astra.parameters.content import resolve_reference
from nip_astra.scorers.base import SCORERS, Scorer

PACKAGES = {"profanity": "alt-profanity-check", "toxblock": "tox-block", "detoxify": "detoxify"}
"""Scorers whose weights a package ships, or knows where to find."""
_LICENCE_FILES = ("LICENSE", "LICENCE", "LICENSE.txt", "LICENSE.md", "COPYING")

Card = dict[str, Any]
"""`role`, `name`, `kind`, `source`, `licence`, `num_parameters`, `size_bytes` and `sha256`; null
where it is not known."""


def model_card(
    role: str,
    parameters: Any,
    scenario_dir: Path | None,
    *,
    num_parameters: int | None = None,
    trained: str | None = None,
    sha256: str | None = None,
) -> Card:
    """The card of a language model.

    Parameters
    ----------
    parameters : Any
        Of its backend; `model` is what it was loaded from.
    trained : str, optional
        Run in which the weights were trained from there.
    sha256 : str, optional
        Digest of the trained weights, in place of those they were trained from.
    """
    reference = getattr(parameters, "model", None)
    card = _card(role, parameters.type_name, reference, scenario_dir)
    card["num_parameters"] = num_parameters
    if trained is not None:
        card |= {"name": trained, "source": f"trained from {card['source']}", "sha256": sha256}
    return card | _service(parameters)


def text_card(role: str, name: str, kind: str) -> Card:
    """The card of a speaker that is no model."""
    return _card(role, kind, None, None) | {"name": name}


def scorer_card(name: str, parameters: Any, scenario_dir: Path | None) -> Card:
    """The card of a scorer."""
    kind = parameters.type_name
    reference = _scorer_reference(parameters)
    card = _card("scorer", kind, reference, scenario_dir)
    if reference is None:
        package = PACKAGES.get(kind)
        card["source"] = SCORERS.origin(kind) if package is None else package_text(package)
        card["licence"] = None if package is None else _package_licence(package)
    return card | _service(parameters) | {"name": name}


def weights_digest(parameters: Any, scenario_dir: Path | None) -> str | None:
    """The digest of the weights that a scorer names; None where no files of them are known."""
    reference = _scorer_reference(parameters)
    folder = None if reference is None else _folder(reference, scenario_dir)
    return None if folder is None else _weights(folder)[1]


def code_of(scorer: Scorer) -> str | None:
    """A digest of a scorer's own files and of its packages' versions.

    None where all of its code ships with nip_astra. What a file imports is covered by the version
    of the file's package alone.
    """
    found = [text for name in scorer.modules for text in _describe(name)]
    # Without the modules' names: that of a plug-in changes with its folder.
    return text_hash(sorted(found)) if found else None


def weights_of(scorer: Scorer) -> str | None:
    """A digest of the files of weights that a scorer and those nested in it name, or None."""
    own = weights_digest(scorer.parameters, scorer.scenario_dir)
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
    return [digest, *map(package_text, metadata.packages_distributions().get(top, ()))]


def _scorer_reference(parameters: Any) -> str | None:
    reference = getattr(parameters, "model", None) or getattr(parameters, "checkpoint", None)
    # A parameter of a plug-in's own may have the name and be something else.
    return reference if isinstance(reference, str) else None


def _card(role: str, kind: str, reference: str | None, scenario_dir: Path | None) -> Card:
    card: Card = {"role": role, "name": reference or kind, "kind": kind, "source": None}
    card |= {"licence": None, "num_parameters": None, "size_bytes": None, "sha256": None}
    if reference is None:
        return card
    card["source"] = _source(reference)
    folder = _folder(reference, scenario_dir)
    if folder is not None:
        size, digest = _weights(folder)
        card |= {"size_bytes": size, "sha256": digest, "licence": _licence(folder, scenario_dir)}
    if reference.startswith("package://"):
        package = reference.removeprefix("package://").partition("/")[0]
        card["licence"] = card["licence"] or _package_licence(package)
    return card


def _service(parameters: Any) -> dict[str, str]:
    if getattr(parameters, "service", None) == "local":
        return {"source": f"{parameters.weights} behind a service of the run"}
    url = getattr(parameters, "base_url", None)
    return {} if url is None else {"source": f"service at {url}"}


def _source(reference: str) -> str:
    scheme, found, rest = reference.partition("://")
    if found and scheme == "package":
        return package_text(rest.partition("/")[0])
    if found:
        return "the scenario's own files"
    return "a folder" if Path(reference).expanduser().exists() else f"hub id {reference}"


def _folder(reference: str, scenario_dir: Path | None) -> Path | None:
    """The folder or file of the weights, without asking any network; None without one."""
    try:
        found = resolve_reference(reference, scenario_dir)
    except NipAstraError:
        return None
    if isinstance(found, Path):
        return found if found.exists() else None
    try:
        cached = try_to_load_from_cache(found, "config.json")
    except ValueError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _weights(folder: Path) -> tuple[int, str | None]:
    """The size in bytes and the digest of weights."""
    stats = [path.stat() for path in weights_files(folder)]
    changed_ns = max((stat.st_mtime_ns for stat in stats), default=0)
    return sum(stat.st_size for stat in stats), _digest(folder, changed_ns)


@lru_cache(maxsize=32)
def _digest(folder: Path, _changed_ns: int) -> str | None:
    return weights_hash(folder)


def _licence(folder: Path, scenario_dir: Path | None) -> str | None:
    """The licence that a model's card or a licence file names, the nearest first."""
    start = folder if folder.is_dir() else folder.parent
    card = start / "README.md"
    if card.is_file() and (told := _front_matter(card).get("license")):
        return str(told)
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
        found = yaml.safe_load(rest.partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def package_text(package: str) -> str:
    """A package's name and version."""
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
