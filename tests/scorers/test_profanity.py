"""The profanity scorer needs an optional package, and reports this."""

from __future__ import annotations

import sys

import pytest
import torch

from nip_astra.errors import MissingDependencyError
from nip_astra.scorers.profanity import ProfanityScorer


def build() -> ProfanityScorer:
    return ProfanityScorer(ProfanityScorer.Parameters(), device=torch.device("cpu"))


def test_rude_words_score_higher_than_kind_words() -> None:
    pytest.importorskip("profanity_check")
    kind, rude = build().score(["what a lovely day", "you are a stupid idiot"]).tolist()
    assert 0.0 <= kind < 0.5 < rude <= 1.0


def test_without_its_package_it_explains_the_installation_before_anything_is_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    with pytest.raises(MissingDependencyError) as caught:
        build()
    assert "pip install 'nip_astra[profanity]'" in str(caught.value)
