"""Which code and weights rate: the same parameters with others are another scorer."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

from nip_astra.evaluation.cards import PACKAGES, package_text, weights_digest
from nip_astra.evaluation.storage import text_hash
from nip_astra.scorers.base import Scorer


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
