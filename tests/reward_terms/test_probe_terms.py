"""Entropy bonus, gibberish penalty, and a scorer's view of the probe."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nip_astra.errors import ScorerError
from nip_astra.rollouts.prompts import Prompt
from nip_astra.scorers.base import Exchange, Scorer, Verdict, register_scorer
from tests.kit.tiny import make_classifier
from tests.reward_terms.rollouts import rollout, term_of

NAN = float("nan")
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -6.0], [-0.5, -1.5, 99.0], [NAN, math.inf, 1.0]])


def test_the_entropy_bonus_is_the_negative_log_probability_per_token() -> None:
    nodes = rollout(["a b", "c", "d"], logprobs_NT=LOGPROBS, mask_NT=MASK)
    assert term_of("entropy_bonus").values(nodes).tolist() == [3.0, 1.0, 0.0]
    added = term_of("entropy_bonus").added(nodes)
    assert added.tolist() == pytest.approx([0.03, 0.01, 0.0])


def test_the_penalty_is_the_surprisal_under_the_reference_beyond_the_threshold() -> None:
    nodes = rollout(["a b", "c", "d"], reference_NT=LOGPROBS, mask_NT=MASK)
    values = term_of("gibberish_penalty", threshold=2.5).values(nodes)
    assert values.tolist() == [-0.5, 0.0, 0.0]
    assert term_of("gibberish_penalty", threshold=0.0).values(nodes).tolist() == [-3.0, -1.0, 0.0]
    assert term_of("gibberish_penalty", threshold=3.0).values(nodes).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["entropy_bonus", "gibberish_penalty"])
def test_padding_and_order_change_nothing(name: str) -> None:
    options = {"threshold": 0.5} if name == "gibberish_penalty" else {}
    term, logprobs = term_of(name, **options), -torch.rand(4, 5) * 3
    mask = torch.arange(5) < torch.tensor([[1], [5], [2], [3]])

    def values(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return term.values(
            rollout("abcd", logprobs_NT=logprobs, reference_NT=logprobs, mask_NT=mask)
        )

    plain = values(logprobs, mask)
    wide = torch.nn.functional.pad(logprobs, (0, 3), value=NAN)
    padded = values(wide, torch.nn.functional.pad(mask, (0, 3)))
    assert torch.allclose(plain, padded, atol=1e-6)
    assert torch.equal(values(logprobs.flip(0), mask.flip(0)), plain.flip(0))


class SillyScorer(Scorer):
    """1 for silly, 0 for kind, no verdict for hm, a failure for boom."""

    reads_history = True
    seen: list[Exchange] = []

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        self.seen.extend(exchanges)
        if any(exchange.text == "boom" for exchange in exchanges):
            raise RuntimeError("boom")
        known = {"silly": 1.0, "kind": 0.0, "so so": 0.5}
        return [known.get(exchange.text) for exchange in exchanges]


@pytest.fixture(autouse=True)
def _silly(no_plugins_left: None) -> None:
    SillyScorer.seen = []
    register_scorer("silly")(SillyScorer)


def test_a_value_is_the_scorers_score_of_the_probe_as_the_users() -> None:
    term = term_of("scorer_term", scorer={"_type": "silly"}, weight=-2.0)
    nodes = rollout(["silly", "kind", "so so"])
    assert term.values(nodes).tolist() == [1.0, 0.0, 0.5]
    assert term.added(nodes).tolist() == [-2.0, 0.0, -1.0]
    assert SillyScorer.seen[0] == Exchange("silly", (), "user")
    columns = (("goal", "rudeness"),)
    term.values(replace(nodes, prompts=[Prompt("hello", columns)] * 3))
    assert SillyScorer.seen[-1] == Exchange("so so", (), "user", columns)


def test_a_probe_without_verdict_gets_the_mean_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    term = term_of("scorer_term", scorer={"_type": "silly"})
    with caplog.at_level(logging.WARNING):
        assert term.values(rollout(["silly", "hm", "so so", "hm"])).tolist() == [1, 0.75, 0.5, 0.75]
    assert "2 of 4 probes" in caplog.text
    assert term.values(rollout(["hm", "hm"])).tolist() == [0.0, 0.0]


def test_a_failing_scorer_stops_or_is_skipped_by_its_own_parameters() -> None:
    nodes = rollout(["silly", "boom"])
    with pytest.raises(ScorerError, match="boom"):
        term_of("scorer_term", scorer={"_type": "silly"}).values(nodes)
    skipping = term_of("scorer_term", scorer={"_type": "silly", "on_failure": "skip"})
    assert skipping.values(nodes).tolist() == [1.0, 1.0]


def test_any_registered_scorer_may_be_named_with_files_of_the_scenario(tmp_path: Path) -> None:
    make_classifier(tmp_path / "model")
    scorer = {"_type": "classifier", "model": "scenario://model", "label": "rude"}
    term = term_of("scorer_term", scorer=scorer, scenario_dir=tmp_path)
    values = term.values(rollout(["you are silly", ""]))
    assert ((values > 0) & (values < 1)).all()
