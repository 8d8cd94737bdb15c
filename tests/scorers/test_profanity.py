"""Scorers over optional packages: the profanity scorer, and refusals without a package."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from nip_astra.errors import MissingDependencyError
from nip_astra.scorers.base import SCORERS
from nip_astra.scorers.profanity import ProfanityScorer
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu


def test_rude_words_score_higher_than_kind_words() -> None:
    pytest.importorskip("profanity_check")
    scorer = scorer_on_cpu(ProfanityScorer)
    kind, rude = scorer.score(["what a lovely day", "you are a stupid idiot"]).tolist()
    assert 0.0 <= kind < 0.5 < rude <= 1.0


@pytest.mark.parametrize(
    ("name", "installation"),
    [
        ("profanity", "pip install 'nip_astra[profanity]'"),
        ("detoxify", "pip install 'nip_astra[detoxify]'"),
        ("toxblock", "pip install --no-deps tox-block"),
    ],
)
def test_without_its_package_a_scorer_explains_the_installation_before_anything_is_played(
    name: str, installation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = SCORERS.get(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for module in ("profanity_check", "detoxify", "tox_block"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError) as caught:
        scorer_on_cpu(scorer)
    assert says(caught.value, installation)
