"""Which code rates: the same parameters with other code are another scorer."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

from nip_astra.evaluation.cards import PACKAGES, package_text
from nip_astra.evaluation.storage import text_hash
from nip_astra.scorers.base import Scorer


def code_of(scorer: Scorer) -> str | None:
    """Give a digest of a scorer's own files and of its packages' versions.

    None where all of its code ships with nip_astra. What a file imports is covered by the version
    of the file's package alone.
    """
    found = [text for name in scorer.modules for text in _describe(name)]
    # Without the modules' names: that of a plug-in changes with its folder.
    return text_hash(sorted(found)) if found else None


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
