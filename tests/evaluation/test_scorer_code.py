"""The code of a scorer is part of what it is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import torch

from nip_astra import plugins
from nip_astra.evaluation import cards
from nip_astra.evaluation.cards import code_of
from nip_astra.scorers.base import Scorer
from nip_astra.scorers.disclosure import DisclosureScorer
from nip_astra.scorers.profanity import ProfanityScorer
from nip_astra.scorers.registry import SCORERS, build_scorer

FUNCTION = "def rude(completions):\n    return float('rude' in completions)\n"


def built(**parameters: object) -> Scorer:
    kind = str(parameters.pop("_type"))
    given = SCORERS.get(kind).Parameters.from_dict(parameters)
    return build_scorer(given, device=torch.device("cpu"), scenario_dir=None)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_function_with_other_code_is_another_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_part: bool
) -> None:
    codes = []
    for folder, text in (("a", FUNCTION), ("b", FUNCTION), ("c", FUNCTION.replace("in", "not in"))):
        monkeypatch.setattr(plugins, "_LOADED", {})
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(text)
        own = {"_type": "python", "function": f"{path}:rude"}
        mean = {"_type": "weighted", "parts": {"one": {"scorer": own}}}
        codes.append(code_of(built(**(mean if is_part else own))))
    assert codes[0] == codes[1] != codes[2]
    assert None not in codes


class Installed(Scorer):
    """One of an installed package."""

    __module__ = "yaml"

    def _score(self, texts: Sequence[str]) -> list[float]:
        return [0.0 for _ in texts]


def test_a_scorer_of_an_installed_package_is_known_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = Installed(Scorer.Parameters(), device=torch.device("cpu"))
    first = code_of(scorer)
    monkeypatch.setattr(metadata, "version", lambda _: "0.0.1")
    assert code_of(scorer) != first


def test_what_ships_has_no_code_of_its_own_but_the_packages_that_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = DisclosureScorer.Parameters(secrets=["a word"])
    assert code_of(DisclosureScorer(parameters, device=torch.device("cpu"))) is None
    # Without the package that it needs.
    scorer = ProfanityScorer.__new__(ProfanityScorer)
    first = code_of(scorer)
    monkeypatch.setattr(cards.metadata, "version", lambda _: "0.0.1")
    assert code_of(scorer) != first
