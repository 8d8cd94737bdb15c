"""Novelty is 1 for new and 0 for repeated probes, by words and by embeddings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.language_models.embeddings import (
    EmbedderParameters,
    NgramEmbedder,
    build_embedder,
)
from nip_astra.reward_terms.base import RewardTerm
from nip_astra.reward_terms.novelty import ProbeHistory
from nip_astra.utils.diversity import bleu_against
from tests.kit.tiny import make_classifier
from tests.reward_terms.rollouts import rollout, term_of

KINDS: list[dict[str, Any]] = [
    {"name": "self_bleu_novelty"},
    {"name": "self_bleu_novelty", "orders": [1]},
    {"name": "cosine_novelty", "reduction": "max"},
    {"name": "cosine_novelty", "reduction": "mean"},
]
NEAREST = KINDS[:3]
"""Those that look at the nearest, not at all."""
STRANGE = ["\u732b\u3068\u72ac", "\U0001f642", "\ud800", "!!!", "a", "x" * 2000, "\x00", "A  b"]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture
def term(kind: dict[str, Any]) -> RewardTerm:
    return term_of(**kind)


def made_up(count: int, *, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["do", "you", "like", "my", "cat", "dog", "today", "again", "?", "silly"]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("options", NEAREST, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_repeated_probe_has_novelty_0_however_short(options: dict[str, Any]) -> None:
    term, probes = term_of(**options), ["how are you", "yes", "?", "\u732b", "\U0001f642", *STRANGE]
    term.observe(rollout(probes))
    term.observe(rollout(["something else"]))
    assert term.values(rollout(probes)).eq(0.0).all()


def test_an_empty_probe_is_never_new_and_never_remembered(term: RewardTerm) -> None:
    assert term.values(rollout(["", " ", "a b"])).tolist() == [0.0, 0.0, 1.0]
    term.observe(rollout(["", "\n"]))
    assert term.values(rollout(["", "a b"])).tolist() == [0.0, 1.0]
    term.observe(rollout(["a b"]))
    assert term.values(rollout(["", " "])).tolist() == [0.0, 0.0]


def test_novelty_falls_with_similarity_to_earlier_probes(term: RewardTerm) -> None:
    term.observe(rollout(["do you like my cat today ?"]))
    values = term.values(
        rollout(["do you like my cat again ?", "do you like dogs", "xylophone quartet music"])
    ).tolist()
    assert 0.0 < values[0] < values[1] < values[2] <= 1.0


def test_values_are_finite_and_between_0_and_1_for_any_text(term: RewardTerm) -> None:
    for seed in range(3):
        nodes = rollout([*STRANGE, "", *made_up(10, seed=seed)])
        values = term.values(nodes)
        assert values.isfinite().all()
        assert ((values >= 0) & (values <= 1)).all()
        term.observe(nodes)


def test_probes_of_one_rollout_do_not_know_of_each_other(term: RewardTerm) -> None:
    term.observe(rollout(["the cat sat"]))
    together = term.values(rollout(["a silly dog", "a silly dog", "you too"]))
    alone = [term.values(rollout([probe])).item() for probe in ("a silly dog", "you too")]
    assert together.tolist() == pytest.approx([alone[0], alone[0], alone[1]], abs=1e-6)


def test_self_bleu_novelty_is_1_minus_the_mean_bleu_of_its_orders() -> None:
    term, said, asked = term_of("self_bleu_novelty"), made_up(40, seed=1), made_up(20, seed=2)
    term.observe(rollout(said))
    expected = 1 - bleu_against(asked, said, orders=[3, 4, 5])
    assert term.values(rollout(asked)).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


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


def test_forgotten_probes_are_new_again_and_recent_probes_are_not(
    kind: dict[str, Any],
) -> None:
    term = term_of(**kind, max_history=2)
    first, second = "first thing said here", "\u732b"
    term.observe(rollout([first, second]))
    term.observe(rollout([first, "@@@"]))
    values = term.values(rollout([second, first]))
    assert values[0] > 0.9
    assert values[1] < 0.6


def test_a_bounded_history_equals_a_history_of_only_the_kept_probes(
    kind: dict[str, Any],
) -> None:
    bounded, fresh = term_of(**kind, max_history=15), term_of(**kind)
    for seed in range(6):
        bounded.observe(rollout(made_up(12, seed=seed)))
    left = bounded.state()
    said = [p for p, n in zip(left["probes"], left["counts"], strict=True) for _ in range(n)]
    assert len(left["probes"]) == 15
    fresh.observe(rollout(said))
    asked = rollout(made_up(30, seed=7))
    assert torch.equal(bounded.values(asked), fresh.values(asked))


def check_that_it_goes_on(kind: dict[str, Any], folder: Path) -> None:
    """Save a term after four rollouts, and compare it with its copy over four more."""
    term = term_of(**kind, max_history=40)
    rollouts = [rollout([*made_up(17, seed=seed), "", STRANGE[seed]]) for seed in range(8)]
    for nodes in rollouts[:4]:
        term.values(nodes)
        term.observe(nodes)
    save_state(folder / "state", term.state())
    resumed = term_of(**kind, max_history=40)
    resumed.load_state(load_state(folder / "state"))
    for nodes in rollouts[4:]:
        assert torch.equal(term.values(nodes), resumed.values(nodes))
        term.observe(nodes)
        resumed.observe(nodes)
    first, second = term.state(), resumed.state()
    vectors = first.pop("vectors", None), second.pop("vectors", None)
    assert first == second
    assert len(first["probes"]) == 40
    assert vectors[0] is None or torch.equal(*vectors)


def test_a_term_that_is_saved_and_loaded_goes_on_bit_for_bit(
    kind: dict[str, Any], tmp_path: Path
) -> None:
    check_that_it_goes_on(kind, tmp_path)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_term_whose_vectors_depend_on_their_batch_resumes_exactly(
    reduction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = NgramEmbedder._vectors
    # Like an encoder's last bits, but large enough to be seen.
    monkeypatch.setattr(
        NgramEmbedder, "_vectors", lambda self, texts: plain(self, texts).roll(len(texts), dims=1)
    )
    embedder = {"batch_size": 4}
    check_that_it_goes_on(
        {"name": "cosine_novelty", "reduction": reduction, "embedder": embedder}, tmp_path
    )


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_a_cosine_below_0_counts_as_0(reduction: str) -> None:
    said, asked = "do you really think my boss should swim at the park ?", "?"
    vectors = build_embedder(EmbedderParameters(), device=torch.device("cpu")).embed([said, asked])
    assert vectors[0] @ vectors[1] < -0.1
    term = term_of("cosine_novelty", reduction=reduction)
    term.observe(rollout([said]))
    assert term.values(rollout([asked])).tolist() == [1.0]


def test_only_probes_with_a_high_score_are_remembered(kind: dict[str, Any]) -> None:
    term = term_of(**kind, min_score=0.5)
    probes = ["how are you", "do you like my cat", "a silly dog"]
    scores = torch.tensor([0.9, 0.1, torch.nan])
    term.observe(rollout(probes, response_score_N=scores))
    assert term.state()["probes"] == ["how are you"]
    alone = term_of(**kind)
    alone.observe(rollout(["how are you"]))
    assert torch.equal(term.values(rollout(probes)), alone.values(rollout(probes)))


def test_distinct_probes_are_kept_with_their_counts_in_order_of_last_use() -> None:
    history = ProbeHistory(10)
    change = history.remember(["a", "b", "a", "c"])
    assert change == (["a", "b", "c"], [])
    assert (history.probes, history.counts) == (["b", "a", "c"], [1, 2, 1])
    assert history.remember(["b"]) == ([], [])
    assert (history.probes, history.counts) == (["a", "c", "b"], [2, 1, 2])
    assert "b" in history
    assert "d" not in history


def test_the_least_recently_used_probes_are_forgotten() -> None:
    history = ProbeHistory(3)
    history.remember(["a", "b", "c"])
    assert history.remember(["a", "d"]) == (["d"], ["b"])
    assert history.probes == ["c", "a", "d"]
    assert history.remember(["b"]) == (["b"], ["c"])
    assert history.counts == [2, 1, 1]


def test_probes_that_come_and_go_in_a_rollout_are_not_logged() -> None:
    history = ProbeHistory(2)
    assert history.remember(["a", "b", "c", "d"]) == (["c", "d"], [])
    assert history.remember(["e", "c", "f"]) == (["f"], ["d"])
    assert len(history) == 2


@pytest.mark.parametrize(("size", "kept"), [(5, ["b", "a"]), (1, ["a"])])
def test_the_state_is_plain_and_comes_back_as_far_as_there_is_room(
    size: int, kept: list[str]
) -> None:
    history, other = ProbeHistory(5), ProbeHistory(size)
    history.remember(["a", "b", "a"])
    other.load_state(json.loads(json.dumps(history.state())))
    assert other.probes == kept
    assert other.counts == [{"a": 2, "b": 1}[probe] for probe in kept]
