"""Novelty is 1 for new and 0 for repeated probes; a failure is worth less among its kind."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from nip_astra.reward_terms import novelty
from nip_astra.reward_terms.base import RatedProbes
from nip_astra.reward_terms.novelty import ProbeHistory
from nip_astra.utils.diversity import bleu_against
from tests.kit.tiny import make_classifier
from tests.reward_terms.rollouts import STRANGE, random_probes, rollout, term_of

# The last looks at all probes, not at the nearest.
KINDS: list[dict[str, Any]] = [
    {"name": "self_bleu_novelty"},
    {"name": "self_bleu_novelty", "orders": [1]},
    {"name": "cosine_novelty", "reduction": "max"},
    {"name": "cosine_novelty", "reduction": "mean"},
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.mark.parametrize("options", KINDS[:3], ids=str)
def test_a_repeated_probe_has_novelty_0_however_short(options: dict[str, Any]) -> None:
    term, probes = term_of(**options), ["how are you", "yes", "?", "\u732b", "\U0001f642", *STRANGE]
    term.observe(rollout(probes))
    term.observe(rollout(["something else"]))
    assert term.values(rollout(probes)).eq(0.0).all()


def test_novelty_falls_with_similarity_to_earlier_probes(kind: dict[str, Any]) -> None:
    term = term_of(**kind)
    term.observe(rollout(["do you like my cat today ?"]))
    values = term.values(
        rollout(["do you like my cat again ?", "do you like dogs", "xylophone quartet music"])
    ).tolist()
    assert 0.0 < values[0] < values[1] < values[2] <= 1.0


def test_self_bleu_novelty_is_1_minus_the_mean_bleu_of_its_orders() -> None:
    term = term_of("self_bleu_novelty")
    probes, earlier = random_probes(20, seed=2), random_probes(40, seed=1)
    term.observe(rollout(earlier))
    expected = 1 - bleu_against(probes, earlier, orders=[3, 4, 5])
    assert term.values(rollout(probes)).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_self_bleu_novelty_by_hand() -> None:
    term = term_of("self_bleu_novelty", orders=[2])
    term.observe(rollout(["the cat sat", "a cat ran"]))
    # "the cat ran": 3 of 3 words, 2 of 2 pairs, though it is new.
    # "the dog ran": 2 of 3 words, none of 2 pairs, which counts as a tenth.
    values = term.values(rollout(["the cat ran", "the dog ran"]))
    assert values.tolist() == pytest.approx([0.0, 1 - (2 / 3 * 0.1 / 2) ** 0.5], abs=1e-6)


def test_the_mean_counts_every_use_of_a_probe() -> None:
    term = term_of("cosine_novelty", reduction="mean")
    term.observe(rollout(["how are you", "how are you", "zzz", "how are you"]))
    # Three of four were the same; "zzz" shares no n-gram with them, but a hash may collide.
    assert term.values(rollout(["how are you"])).item() == pytest.approx(0.25, abs=0.03)
    assert term.values(rollout(["zzz"])).item() == pytest.approx(0.75, abs=0.03)


def test_an_encoder_may_define_similarity(tmp_path: Path) -> None:
    embedder = {"kind": "encoder", "model": str(make_classifier(tmp_path / "model"))}
    term = term_of("cosine_novelty", embedder=embedder)
    term.observe(rollout(["the cat sat"]))
    values = term.values(rollout(["the cat sat", "how are you fine", ""]))
    assert values[0] == values[2] == 0.0 < values[1]


def test_a_bounded_history_equals_a_history_of_only_the_kept_probes(kind: dict[str, Any]) -> None:
    bounded, fresh = term_of(**kind, max_history=15), term_of(**kind)
    for seed in range(6):
        bounded.observe(rollout(random_probes(12, seed=seed)))
    left = bounded.state()
    kept = [p for p, n in zip(left["probes"], left["counts"], strict=True) for _ in range(n)]
    assert len(left["probes"]) == 15
    fresh.observe(rollout(kept))
    nodes = rollout(random_probes(30, seed=7))
    assert torch.equal(bounded.values(nodes), fresh.values(nodes))


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_cosine_below_0_counts_as_0(reduction: str) -> None:
    pair = ["do you really think my boss should swim at the park ?", "?"]
    vectors = build_embedder(EmbedderParameters(), device=torch.device("cpu")).embed(pair)
    assert vectors[0] @ vectors[1] < -0.1
    term = term_of("cosine_novelty", reduction=reduction)
    term.observe(rollout(pair[:1]))
    assert term.values(rollout(pair[1:])).tolist() == [1.0]


def test_only_probes_with_a_high_score_are_remembered(kind: dict[str, Any]) -> None:
    term = term_of(**kind, min_score=0.5)
    probes = ["how are you", "do you like my cat", "a silly dog"]
    scores = torch.tensor([0.9, 0.1, torch.nan])
    term.observe(rollout(probes, response_score_N=scores))
    assert term.state()["probes"] == ["how are you"]
    alone = term_of(**kind)
    alone.observe(rollout(["how are you"]))
    assert torch.equal(term.values(rollout(probes)), alone.values(rollout(probes)))


def test_distinct_probes_are_kept_by_last_use_with_their_counts() -> None:
    history = ProbeHistory(3)
    assert history.remember(["a", "b", "a", "c"]) == (["a", "b", "c"], [])
    assert (history.probes, history.counts) == (["b", "a", "c"], [1, 2, 1])
    assert history.remember(["b"]) == ([], [])
    assert history.remember(["c", "d"]) == (["d"], ["a"])
    # Probes that come and go in a rollout are not reported.
    assert history.remember(["e", "f", "d", "g"]) == (["f", "g"], ["b", "c"])
    assert (history.probes, history.counts) == (["f", "d", "g"], [1, 2, 1])
    assert "d" in history
    assert "b" not in history
    smaller = ProbeHistory(2)
    smaller.load_state(history.state())
    assert (smaller.probes, smaller.counts, len(smaller)) == (["d", "g"], [2, 1], 2)


CAT, DOG, RAIN = "do you like my cat today ?", "do you like my dog today ?", "it rains on mondays ."


rarity, sharing = partial(term_of, "failure_rarity"), partial(term_of, "failure_sharing")


def failing(probes: list[str], scores: list[float] | None = None) -> RatedProbes:
    return rollout(probes, response_score_N=torch.tensor(scores or [1.0] * len(probes)))


@pytest.mark.parametrize("shape", ["log", "inverse_root"])
def test_all_is_rare_before_the_first_failure(shape: str) -> None:
    term = rarity(shape=shape)
    term.observe(failing([CAT, RAIN, ""], [0.0, 0.49, 1.0]))
    assert term.values(failing([CAT, RAIN])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("log", [1 - math.log(4) / math.log(5), 1 - math.log(2) / math.log(5), 1.0]),
        ("inverse_root", [1 / 2, 1 / math.sqrt(2), 1.0]),
    ],
)
def test_rarity_by_hand(shape: str, expected: list[float]) -> None:
    term = rarity(shape=shape)
    # Three of a kind (with two spellings), one of another, and one that did not fail.
    term.observe(failing([CAT, DOG, RAIN, CAT, "hello"], [0.9, 0.5, 1.0, 0.6, 0.1]))
    assert term.values(failing([DOG, RAIN, "hello"])).tolist() == pytest.approx(expected)


def test_rounding_does_not_distinguish_a_probe_from_itself() -> None:
    probes = list(dict.fromkeys(random_probes(60, seed=0)))
    term = rarity(similarity=1.0, shape="inverse_root")
    term.observe(failing(probes))
    assert (term.values(failing(probes)) <= math.sqrt(0.5) + 1e-6).all()


def test_probes_that_do_not_fail_earn_nothing_by_default() -> None:
    nodes = failing([CAT, CAT, RAIN], [0.8, 0.0, math.nan])
    assert rarity(weight=2.0).added(nodes).tolist() == pytest.approx([1.6, 0.0, 0.0])
    assert rarity(scaled_by_score=False).added(nodes).tolist() == [1.0, 1.0, 1.0]


def test_failures_share_with_their_kind_by_hand() -> None:
    # Four fail: each has three others; among the first three, two are alike.
    values = sharing().values(failing([CAT, DOG, CAT, RAIN, "hello"], [1.0, 0.5, 0.9, 1.0, 0.4]))
    alike = 1 - math.log(3) / math.log(4)
    assert values.tolist() == pytest.approx([alike, alike, alike, 1.0, 1.0])


def test_a_probe_that_does_not_fail_earns_by_its_score() -> None:
    nodes = failing([CAT, DOG, DOG, RAIN], [1.0, 0.2, math.nan, 0.2])
    assert sharing().values(nodes).tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0])
    assert sharing(weight=4.0).added(nodes).tolist() == pytest.approx([4.0, 0.0, 0.0, 0.8])


def test_failures_of_one_kind_alone_earn_nothing_and_one_alone_all() -> None:
    assert sharing().values(failing([CAT] * 6)).tolist() == pytest.approx([0.0] * 6, abs=1e-7)
    assert sharing().values(failing([CAT])).tolist() == [1.0]


def test_rollouts_without_failures_or_text_are_defined() -> None:
    assert sharing().values(failing([CAT, RAIN], [0.0, math.nan])).tolist() == [1.0, 1.0]
    odd = sharing().values(failing(["", " \n", "\ud800", "!", CAT]))
    assert odd.tolist()[:2] == [0.0, 0.0]
    assert bool(odd.isfinite().all())
    assert sharing().values(failing([])).tolist() == []


def test_parts_give_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = failing([CAT, DOG, RAIN, "hello", "", CAT, "my aunt sings"], [1, 0, 1, 1, 1, 1, 0.7])
    whole = sharing().values(nodes)
    monkeypatch.setattr(novelty, "PART_SIZE", 2)
    assert torch.equal(sharing().values(nodes), whole)


def test_the_rarest_word_decides() -> None:
    term = term_of("word_rarity")
    term.observe(rollout(["my cat sleeps", "my dog sleeps", "my cat really really runs", ""]))
    values = term.values(rollout(["my cat", "my", "the cat sleeps", "really my", "", " "]))
    # Three probes have words; "cat" is in two of them, "my" in three, "really" in one, "the" in
    # none.
    expected = [1 - math.log(n + 1) / math.log(4) for n in (2, 3, 0, 1)]
    assert values.tolist() == pytest.approx([*expected, 0.0, 0.0])


def test_case_and_punctuation_are_those_of_the_other_terms() -> None:
    term = term_of("word_rarity")
    term.observe(rollout(["Do you, really?"] * 8))
    assert term.values(rollout(["really , do YOU ?"])).tolist() == pytest.approx([0.0])


def test_words_in_a_row_count_as_one() -> None:
    term = term_of("word_rarity", order=2)
    term.observe(rollout(["my cat sleeps", "my cat runs", "my dog sleeps"]))
    values = term.values(rollout(["my cat", "cat sleeps", "dog runs", "my"])).tolist()
    expected = [1 - math.log(3) / math.log(4), 1 - math.log(2) / math.log(4), 1.0]
    assert values == pytest.approx([*expected, 0.0]), "one word is not a pair"


def test_a_share_that_stays_loses_worth_slowly() -> None:
    term, rare = term_of("word_rarity"), []
    for _ in range(6):
        term.observe(rollout(["my cat"] * 99 + ["my dog"]))
        rare.append(float(term.values(rollout(["my dog"]))))
    assert rare[0] == pytest.approx(1 - math.log(2) / math.log(101))
    assert rare == sorted(rare, reverse=True)
    assert rare[-1] == pytest.approx(1 - math.log(7) / math.log(601))
    assert float(term.values(rollout(["my cat"]))) < 0.01
