"""Speakers of the turns of a proposal, and the probabilities of their probes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nip_astra.evaluation.failure_probability import ATTACKER, REFERENCE, attacker_at
from nip_astra.evaluation.playing import sampled_logprobs, sampler_of, why_inexact
from nip_astra.language_models.base import SamplingOptions, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers.trees import TreeSampler


@pytest.fixture(scope="module")
def sampler(tiny_scenario: Path) -> TreeSampler:
    """Of the tiny scenario, with an attacker that has moved away from the reference."""
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario))
    found = prepare_experiment(resolved).scenario_instance.sampler
    assert found is not None
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in found.attacker.language_model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return found


def _sample(sampler: TreeSampler, proposal: str) -> dict[str, torch.Tensor]:
    tree = sampler_of(proposal, sampler, num_turns=2).sample(
        ["hello", "good day", "the cat sat"], tree_width=1, tree_depth=2, key=(0, "x")
    )
    logprobs = {
        role: getattr(sampler, role)
        .language_model.logprobs(
            *pad_left([tree.context_of(n) for n in range(tree.num_nodes)], torch.device("cpu")),
            tree.nodes["probe"],
            tree.nodes["probe_mask"],
        )
        .detach()
        for role in ("attacker", "reference")
    }
    return {"sampled": tree.nodes["probe_logprobs"], "depth": tree.nodes["depth"], **logprobs}


@pytest.mark.parametrize(
    ("proposal", "speakers"),
    [
        (REFERENCE, ("reference", "reference")),
        (ATTACKER, ("attacker", "attacker")),
        (attacker_at(1), ("attacker", "reference")),
        (attacker_at(2), ("reference", "attacker")),
    ],
)
def test_each_turn_is_sampled_from_the_model_whose_turn_it_is(
    sampler: TreeSampler, proposal: str, speakers: tuple[str, str]
) -> None:
    found = _sample(sampler, proposal)
    for turn, speaker in enumerate(speakers):
        rows = found["depth"] == turn
        torch.testing.assert_close(found["sampled"][rows], found[speaker][rows], atol=1e-4, rtol=0)
        other = "attacker" if speaker == "reference" else "reference"
        assert (found["sampled"][rows] - found[other][rows]).abs().max() > 1e-3


def test_the_reference_alone_samples_as_without_a_proposal(sampler: TreeSampler) -> None:
    options = {"tree_width": 1, "tree_depth": 2, "key": (0, "x")}
    plain = sampler.with_attacker(sampler.reference).sample(["hello", "fine day"], **options)
    found = sampler_of(REFERENCE, sampler, num_turns=2).sample(["hello", "fine day"], **options)
    assert found.probes == plain.probes


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
    cpu = torch.device("cpu")
    drawn = tiny_model.sampled_logprobs(
        *pad_left([[2, 7, 9]] * len(rows), cpu), *pad_right(rows, cpu), options
    )
    assert drawn is not None
    assert drawn.double().sum(dim=1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    plain = tiny_model.logprobs(*pad_left([[2, 7, 9]] * len(rows), cpu), *pad_right(rows, cpu))
    assert plain.double().sum(dim=1).exp().sum().item() < 0.99


def test_a_model_of_another_architecture_gives_the_same_probabilities(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    cpu = torch.device("cpu")
    rows = *pad_left([[2, 7], [2, 9, 8]], cpu), *pad_right([[10, 3], [11, 12]], cpu)
    options = SamplingOptions(max_new_tokens=2, min_new_tokens=1)
    fast = tiny_model.sampled_logprobs(*rows, options)
    tiny_model._decoder = None
    plain = tiny_model.sampled_logprobs(*rows, options)
    assert fast is not None
    assert plain is not None
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=0)


def test_a_drawn_probe_is_as_likely_as_it_is_often_drawn(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    options = SamplingOptions(max_new_tokens=1, min_new_tokens=1)
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    sampled = tiny_model.generate(
        [[2, 7]], count, torch.rand(count, 1, generator=generator), options
    )
    token = int(sampled.ids_BT.flatten().mode().values)
    cpu = torch.device("cpu")
    drawn = tiny_model.sampled_logprobs(
        *pad_left([[2, 7]], cpu), *pad_right([[token]], cpu), options
    )
    assert drawn is not None
    share = (sampled.ids_BT == token).float().mean().item()
    assert share == pytest.approx(drawn.exp().item(), abs=0.01)


def test_scores_of_a_tree_are_sums_over_each_probe(sampler: TreeSampler) -> None:
    tree = sampler.sample(["hello"], tree_width=1, tree_depth=2, key=(0, "y"))
    agent = sampler.attacker
    found = sampled_logprobs(agent.language_model, tree, agent.sampling)
    sampled = tree.nodes["probe_logprobs"].sum(dim=1)
    # The drawn result is never less likely than under the complete distribution.
    assert found.shape == (2,)
    assert bool((found >= sampled - 1e-5).all())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"top_p": 0.9, "top_k": 5}, "top_k 5, top_p 0.9"),
    ],
)
def test_truncated_sampling_makes_weights_inexact(
    sampler: TreeSampler, changes: dict[str, float], reason: str | None
) -> None:
    agents = [
        replace(agent, sampling=replace(agent.sampling, **changes))
        for agent in (sampler.attacker, sampler.reference)
    ]
    found = why_inexact(agents)
    assert found is None if reason is None else reason in str(found)
    if changes:
        assert "different options" in str(why_inexact([agents[0], sampler.reference]))
