"""Speakers of the turns of a proposal, and the probabilities of their probes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nip_astra.evaluation.failure_probability import ATTACKER, attacker_at
from nip_astra.evaluation.playing import (
    rate_by_others,
    rate_responses,
    sampled_logprobs,
    sampler_of,
    scored_by,
    why_inexact,
)
from nip_astra.language_models.base import SamplingOptions, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scorers.base import Exchange, Message
from tests.evaluation.rows_by_hand import episode
from tests.kit.scorers import ScorerOf
from tests.kit.tiny import CPU, uniforms_of


@pytest.fixture(scope="module")
def sampler(tiny_scenario: Path) -> TreeSampler:
    """Of the tiny scenario, with an attacker that has moved away from the reference."""
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario))
    result = prepare_experiment(resolved).scenario_instance.sampler
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in result.attacker.language_model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return result


@pytest.mark.parametrize(
    ("proposal", "speakers"),
    [
        (ATTACKER, ("attacker", "attacker")),
        (attacker_at(1), ("attacker", "reference")),
        (attacker_at(2), ("reference", "attacker")),
    ],
)
def test_each_turn_is_sampled_from_the_model_whose_turn_it_is(
    sampler: TreeSampler, proposal: str, speakers: tuple[str, str]
) -> None:
    tree = sampler_of(proposal, sampler, num_turns=2).sample(
        ["hello", "good day", "the cat sat"], tree_width=1, tree_depth=2, key=(0, "x")
    )
    contexts = pad_left([tree.context_of(n) for n in range(tree.num_nodes)], CPU)
    sampled = tree.nodes["probe_logprobs"]
    for turn, speaker in enumerate(speakers):
        rows = tree.nodes["depth"] == turn
        gaps = {}
        for role in ("attacker", "reference"):
            model = getattr(sampler, role).language_model
            scored = model.logprobs(*contexts, tree.nodes["probe"], tree.nodes["probe_mask"])
            gaps[role] = (sampled - scored.detach())[rows].abs().max()
        assert gaps.pop(speaker) < 1e-4
        assert max(gaps.values()) > 1e-3
    agent = getattr(sampler, speakers[0])
    drawn = sampled_logprobs(agent.language_model, tree, agent.sampling)
    # The drawn result is never less likely than under the complete distribution.
    first = tree.nodes["depth"] == 0
    assert bool((drawn >= sampled.sum(dim=1) - 1e-4)[first].all())


@pytest.mark.parametrize("min_new_tokens", [0, 1, 2])
def test_the_probabilities_of_all_possible_probes_add_up_to_one(
    tiny_model: HuggingFaceLanguageModel, min_new_tokens: int
) -> None:
    """With the end, the length limit, forbidden tokens and the earliest end, by enumeration."""
    options = SamplingOptions(max_new_tokens=2, min_new_tokens=min_new_tokens)
    banned = set(tiny_model.token_sampler.banned_ids.tolist())
    tokens = [i for i in range(len(tiny_model.tokenizer)) if i not in banned]
    (end,) = tiny_model.end_ids
    short = [[end]] if min_new_tokens == 0 else []
    long = [
        [first, second]
        for first, second in itertools.product(tokens, repeat=2)
        if first != end and (second != end or min_new_tokens < 2)
    ]
    rows = short + long
    drawn = tiny_model.sampled_logprobs(
        *pad_left([[2, 7, 9]] * len(rows), CPU), *pad_right(rows, CPU), options
    )
    assert drawn.double().sum(dim=1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    plain = tiny_model.logprobs(*pad_left([[2, 7, 9]] * len(rows), CPU), *pad_right(rows, CPU))
    assert plain.double().sum(dim=1).exp().sum().item() < 0.99


def test_a_drawn_probe_is_as_likely_as_it_is_often_drawn_whatever_computes_it(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options, count = SamplingOptions(max_new_tokens=1, min_new_tokens=1), 20_000
    sampled = tiny_model.generate([[2, 7]], count, uniforms_of(count, 1), options)
    token = int(sampled.ids_BT.flatten().mode().values)
    share = (sampled.ids_BT == token).float().mean().item()
    rows = *pad_left([[2, 7]], CPU), *pad_right([[token]], CPU)
    drawn = tiny_model.sampled_logprobs(*rows, options)
    tiny_model._decoder = None  # as for another architecture
    plain = tiny_model.sampled_logprobs(*rows, options)
    assert share == pytest.approx(drawn.exp().item(), abs=0.01)
    torch.testing.assert_close(drawn, plain, atol=1e-4, rtol=0)


def test_truncated_sampling_makes_weights_inexact(sampler: TreeSampler) -> None:
    assert why_inexact([sampler.attacker, sampler.reference]) is None
    for changes, reason in (
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"top_p": 0.9, "top_k": 5}, "top_k 5, top_p 0.9"),
    ):
        attacker, reference = (
            replace(agent, sampling=replace(agent.sampling, **changes))
            for agent in (sampler.attacker, sampler.reference)
        )
        assert reason in str(why_inexact([attacker, reference]))
        assert "different options" in str(why_inexact([attacker, sampler.reference]))


# ---- rating of stored conversations


def share(exchange: Exchange) -> float | None:
    """The share of 100 characters, unknown for a question."""
    return None if "?" in exchange.text else len(exchange.text) / 100


def test_a_scorer_of_texts_rates_response_pair_and_probe() -> None:
    episodes = [episode(0, [None, None], probe=["ab", "a?"], response=["cde", "x"])]
    rate_responses(episodes, ScorerOf(share))
    first, second = episodes[0]
    assert first["response_score"] == pytest.approx(0.03)
    assert first["combined_score"] == pytest.approx(0.06)
    assert first["probe_score"] == pytest.approx(0.02)
    assert (second["combined_score"], second["probe_score"]) == (None, None)
    assert (first["is_error"], second["is_error"]) == (False, False)


def test_a_scorer_of_conversations_reads_the_earlier_messages() -> None:
    episodes = [episode(0, [None, None], prompt="hi", probe=["p", "q"], response=["r", "s"])]
    scorer = ScorerOf(lambda exchange: len(exchange.history) / 10, reads_history=True)
    rate_responses(episodes, scorer)
    # Opening, probe; then opening, probe, response, probe. The pair's score is the response's.
    assert [row["response_score"] for row in episodes[0]] == pytest.approx([0.2, 0.4])
    assert [row["combined_score"] for row in episodes[0]] == pytest.approx([0.2, 0.4])
    assert [row["probe_score"] for row in episodes[0]] == pytest.approx([0.1, 0.3])
    second = (Message("assistant", "hi"), Message("user", "p"), Message("assistant", "r"))
    assert Exchange("s", (*second, Message("user", "q"))) in scorer.seen
    assert Exchange("q", second, role="user") in scorer.seen


def test_further_scorers_do_not_change_the_first_verdict() -> None:
    episodes = [episode(0, [0.9, 0.1], response=["abc", "?"])]
    rate_by_others(episodes, {"lengths": ScorerOf(share)})
    assert [row["response_score"] for row in episodes[0]] == [0.9, 0.1]
    views = scored_by("lengths", episodes[0])
    assert views[0]["response_score"] == pytest.approx(0.03)
    assert views[1]["response_score"] is None
