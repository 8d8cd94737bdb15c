"""A rollout is a complete tree whose metrics can all be recomputed from its parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, NonFiniteOutputError
from nip_astra.language_models.base import pad_left
from nip_astra.language_models.tree_engine.sessions import CachedSession
from nip_astra.rl_objectives.rewards import ast_reward, mean_nll
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.prompts import Prompt
from nip_astra.rollouts.tree import merge_trees
from nip_astra.samplers.trees import rate_nodes
from nip_astra.scenario_base.chat_agent import FixedProbes
from nip_astra.scenario_instance import ScenarioInstance
from tests.kit.experiments import trainer_of
from tests.kit.scorers import ScorerOf
from tests.kit.tiny import CPU, WORDS, make_tokenizer, write_scenario

PROMPTS = ["hello", "good day", "the cat sat"]


def build(scenario: Path, *overrides: str) -> ScenarioInstance:
    instance: ScenarioInstance = trainer_of(
        "ast_dpo", *overrides, scenario=scenario
    ).scenario_instance
    return instance


@pytest.fixture
def instance(tiny_scenario: Path) -> ScenarioInstance:
    return build(tiny_scenario)


def _sample(instance: ScenarioInstance, prompts: list[str] = PROMPTS, **options: int):
    sizes = {"tree_width": 2, "tree_depth": 3} | options
    return instance.sampler.sample(prompts, key=(0, "test"), **sizes)


def test_a_tree_of_width_2_and_depth_3_has_14_nodes_an_episode(instance: ScenarioInstance) -> None:
    tree = _sample(instance)
    assert tree.num_nodes == 3 * 14
    assert tree.nodes["depth"].bincount().tolist() == [6, 12, 24]
    parent_N, depth_N, episode_N = (tree.nodes[name] for name in ("parent", "depth", "episode"))
    assert torch.equal(parent_N < 0, depth_N == 0)
    below_N = parent_N >= 0
    assert torch.equal(depth_N[parent_N[below_N]], depth_N[below_N] - 1)
    assert torch.equal(episode_N[parent_N[below_N]], episode_N[below_N])
    assert (parent_N[tree.sibling_groups()].diff(dim=1) == 0).all()


def test_two_generation_calls_a_level(
    instance: ScenarioInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for role in ("attacker", "target"):
        model = instance.agents[role].language_model
        session = model.open_session()
        generate = session.generate
        monkeypatch.setattr(model, "open_session", lambda session=session: session)
        monkeypatch.setattr(
            session,
            "generate",
            lambda *a, role=role, generate=generate, **k: calls.append(role) or generate(*a, **k),
        )
        monkeypatch.setattr(session, "close", lambda role=role: calls.append(f"{role} closed"))
    _sample(instance)
    # The attacker's cache is released before the target's peak.
    assert calls == [*["attacker", "target"] * 2, "attacker", "attacker closed", "target"]


def test_an_episode_depends_on_the_key_and_not_on_the_others(instance: ScenarioInstance) -> None:
    together = _sample(instance)
    alone = instance.sampler.sample(
        PROMPTS[1:2], tree_width=2, tree_depth=3, key=(0, "test"), first_episode=1
    )
    own = (together.nodes["episode"] == 1).nonzero().flatten().tolist()
    assert [together.probes[i] for i in own] == alone.probes
    assert [together.responses[i] for i in own] == alone.responses
    assert torch.allclose(together.nodes["reward"][own], alone.nodes["reward"], atol=1e-5)
    other = instance.sampler.sample(PROMPTS, tree_width=2, tree_depth=3, key=(1, "test"))
    assert other.probes != together.probes


@pytest.mark.parametrize("likelihood_model", ["reference", "target"])
def test_a_rollout_in_parts_equals_the_whole(tiny_scenario: Path, likelihood_model: str) -> None:
    instance = build(tiny_scenario, f"ast_chat.reward.likelihood_model={likelihood_model}")
    sampler, whole = instance.sampler, _sample(instance)
    per_tree = sampler.cache_bytes(PROMPTS, tree_width=2, tree_depth=3) // len(PROMPTS)
    for num_trees in (2, 1):
        sampler.max_cache_bytes = num_trees * per_tree
        parts = _sample(instance)
        assert parts.probes == whole.probes
        assert parts.responses == whole.responses
        assert parts.contexts == whole.contexts
        for name, values in whole.nodes.items():
            assert torch.allclose(parts.nodes[name], values, atol=1e-5), name
    sampler.max_cache_bytes = per_tree - 1
    with pytest.raises(ConfigurationError, match=r"width 2 and depth 3.* Raise max_rollout_gib"):
        _sample(instance)
    # A smaller rollout fits.
    assert sampler.num_at_once(PROMPTS, tree_width=2, tree_depth=2) >= 1


def test_the_predicted_cache_size_is_correct(instance: ScenarioInstance) -> None:
    tree = _sample(instance)
    predicted = instance.sampler.cache_bytes(PROMPTS, tree_width=2, tree_depth=3)
    per_token = instance.agents["attacker"].language_model.cache_bytes_per_token
    # Two layers of two key-value heads of eight numbers, keys and values, float32.
    assert per_token == 2 * 2 * 2 * 8 * 4
    assert predicted >= sum(tree.num_unique_tokens.values()) * per_token


def test_no_token_is_forwarded_twice(instance: ScenarioInstance) -> None:
    models = {role: agent.language_model for role, agent in instance.agents.items()}
    with (
        models["attacker"].counting() as attacker,
        models["target"].counting() as target,
        models["reference"].counting() as reference,
    ):
        tree = _sample(instance)
    # Siblings that happen to begin with the same word are sampled separately; nothing else is
    # repeated.
    assert attacker.forwarded <= 1.15 * tree.num_unique_tokens["attacker"]
    assert target.forwarded <= 1.15 * tree.num_unique_tokens["target"]
    assert reference.forwarded <= 1.10 * reference.scored
    assert reference.scored == tree.num_unique_tokens["attacker"]


def test_each_context_is_the_conversation_so_far(instance: ScenarioInstance) -> None:
    tree = _sample(instance)
    tokenizer = instance.agents["attacker"].language_model.tokenizer
    for node in (0, 13, tree.num_nodes - 1):
        texts: list[str] = []
        above = int(tree.nodes["parent"][node])
        while above >= 0:
            texts = [tree.probes[above], tree.responses[above], *texts]
            above = int(tree.nodes["parent"][above])
        texts.insert(0, tree.prompts[int(tree.nodes["episode"][node])])
        roles = ["<user>", "<assistant>"] * len(texts)
        turns = [f"{role} {text} <end>" for role, text in zip(roles, texts, strict=False)]
        rendered = " ".join(["<bos>", *turns, "<assistant>"]).replace("  ", " ")
        assert tokenizer.decode(tree.context_of(node)) == rendered


def test_logprobs_are_those_of_the_tokens_sampled(instance: ScenarioInstance) -> None:
    tree = _sample(instance)
    contexts = [tree.context_of(node) for node in range(tree.num_nodes)]
    recomputed = instance.agents["attacker"].language_model.logprobs(
        *pad_left(contexts, CPU), tree.nodes["probe"], tree.nodes["probe_mask"]
    )
    assert torch.allclose(recomputed, tree.nodes["probe_logprobs"], atol=1e-4)
    # Before training, the attacker equals its reference.
    assert torch.allclose(tree.nodes["reference_logprobs"], tree.nodes["probe_logprobs"], atol=1e-4)
    assert not tree.nodes["reference_logprobs"].requires_grad


def test_reward_is_made_of_its_parts(instance: ScenarioInstance) -> None:
    tree = _sample(instance)
    nodes = tree.nodes
    scorer = instance.sampler.scorer
    assert torch.equal(nodes["response_score"], scorer.score(tree.responses))
    both = [f"{p} {r}" for p, r in zip(tree.probes, tree.responses, strict=True)]
    assert torch.equal(nodes["combined_score"], scorer.score(both))
    expected = ast_reward(
        nodes["response_score"],
        nodes["combined_score"],
        nodes["probe_nll"],
        nodes["is_empty"],
        w_response=1.0,
        w_combined=0.5,
        w_likelihood=0.1,
        empty_nll=math.log(len(instance.agents["attacker"].language_model.tokenizer)),
    )
    assert torch.allclose(nodes["reward"], expected, atol=1e-6)
    assert torch.allclose(
        nodes["probe_nll"], mean_nll(nodes["reference_logprobs"], nodes["probe_mask"])
    )


def test_likelihood_under_the_target_reads_the_probe_as_the_target_does(
    tiny_scenario: Path,
) -> None:
    instance = build(tiny_scenario, "ast_chat.reward.likelihood_model=target")
    tree = _sample(instance, tree_depth=1)
    target = instance.agents["target"]
    speech = target.conversation_format
    for node in range(tree.num_nodes):
        prompt = tree.prompts[int(tree.nodes["episode"][node])]
        words = [i for i in tree.nodes["probe"][node].tolist() if i > 5]
        turns = [Turn("assistant", ids=speech.encode(prompt)), Turn("user", ids=tuple(words))]
        context = speech.context(turns)
        context = context[: speech.last_turn_span(turns, context)[0]]
        module = target.language_model.module
        logits = module(torch.tensor([context + words])).logits[0].log_softmax(-1)
        picked = logits[len(context) - 1 : -1].gather(1, torch.tensor(words).unsqueeze(1))
        nll = -picked.mean().item()
        assert tree.nodes["probe_nll"][node].item() == pytest.approx(nll, abs=1e-4)


def test_models_with_different_tokenizers_exchange_text(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path)
    make_tokenizer(WORDS[::-1]).save_pretrained(tmp_path / "target")
    instance = build(scenario)
    assert not instance.agents["attacker"].shares_tokens_with(instance.agents["target"])
    tree = _sample(instance)
    target = instance.agents["target"]
    # The target read the attacker's text.
    ids = target.conversation_format.encode(tree.probes[0])
    assert target.decode([ids]) == [tree.probes[0]]
    assert tree.num_nodes == 42


def test_training_never_touches_target_or_reference(instance: ScenarioInstance) -> None:
    for role in ("target", "reference"):
        model = instance.agents[role].language_model
        assert list(model.parameters()) == []
        assert not any(p.requires_grad for p in model.module.parameters())
    assert any(True for _ in instance.agents["attacker"].language_model.parameters())


@pytest.mark.parametrize("likelihood_model", ["target", "reference"])
def test_an_unused_reference_reads_nothing_and_changes_nothing_else(
    tiny_scenario: Path, likelihood_model: str
) -> None:
    instance = build(tiny_scenario, f"ast_chat.reward.likelihood_model={likelihood_model}")
    sampler, reference = instance.sampler, instance.agents["reference"]
    options = {"tree_width": 1, "tree_depth": 2, "key": (0, "test")}
    with reference.language_model.counting() as spent:
        usual = sampler.with_attacker(reference).sample(PROMPTS, **options)
    assert spent.scored > 0
    with reference.language_model.counting() as spent:
        tree = sampler.with_attacker(reference, asks_reference=False).sample(PROMPTS, **options)
    assert spent.scored == 0
    assert tree.nodes["reference_logprobs"].isnan().all()
    follows = {"reference_logprobs"}
    if likelihood_model == "reference":
        follows |= {"probe_nll", "reward"}
    for name in tree.nodes.keys() - follows:
        assert torch.equal(tree.nodes[name], usual.nodes[name]), name
    assert (tree.probes, tree.responses) == (usual.probes, usual.responses)


@pytest.mark.parametrize("separator", ["", ".", "the cat"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_plain_turns_are_scored_whatever_parts_them(
    tiny_scenario: Path, monkeypatch: pytest.MonkeyPatch, separator: str, is_cut: bool
) -> None:
    """Even if a session kept only the key of the token before a turn."""
    overrides = [
        "ast_chat.target.format=plain",
        f"ast_chat.target.turn_separator='{separator}'",
        "ast_chat.reward.likelihood_model=target",
    ]
    trees = []
    for is_kept in (True, False):
        instance = build(tiny_scenario, *overrides)
        target = instance.agents["target"]
        if is_cut:
            target.language_model.context_window = 12 + target.sampling.max_new_tokens
        if not is_kept:
            monkeypatch.setattr(CachedSession, "_count_cached", lambda *_: None)
        trees.append(_sample(instance))
        assert (target.num_truncated_contexts > 0) == is_cut
    kept, apart = trees
    assert kept.probes == apart.probes
    assert kept.responses == apart.responses
    assert not kept.nodes["probe_nll"].isnan().any()
    torch.testing.assert_close(kept.nodes["probe_nll"], apart.nodes["probe_nll"])


@pytest.mark.parametrize("role", ["attacker", "target", "reference"])
def test_logits_that_are_no_numbers_stop_the_rollout(tiny_scenario: Path, role: str) -> None:
    instance = build(tiny_scenario)
    with torch.no_grad():
        for weights in getattr(instance.sampler, role).language_model.module.parameters():
            weights.fill_(float("nan"))
    with pytest.raises(NonFiniteOutputError, match=rf"{role}'s model.*test.*token 1 of row 1"):
        _sample(instance)


def test_probes_of_several_lengths_are_merged_as_if_played_together(
    instance: ScenarioInstance,
) -> None:
    texts = FixedProbes(["the cat", "are you fine you cat"])
    sampler = instance.sampler.with_attacker(texts)
    size: dict[str, Any] = {"tree_width": 1, "tree_depth": 1, "key": (0, "lengths")}
    whole = sampler.sample(["hello", "hi"], **size)
    parts = [
        sampler.sample([prompt], first_episode=number, **size)
        for number, prompt in enumerate(["hello", "hi"])
    ]
    merged = merge_trees(parts)
    assert (merged.probes, merged.responses) == (whole.probes, whole.responses)
    for name in ("probe", "probe_mask", "reference_logprobs", "reward"):
        torch.testing.assert_close(merged.nodes[name], whole.nodes[name])


def test_a_rollout_without_an_opening_prompt_is_refused(instance: ScenarioInstance) -> None:
    with pytest.raises(ConfigurationError, match=r"no opening prompt.*at least one"):
        _sample(instance, [])


def test_the_columns_beside_a_prompt_reach_a_scorer_that_reads_the_conversation(
    instance: ScenarioInstance,
) -> None:
    scorer = ScorerOf(lambda exchange: 0.0, reads_history=True)
    tree = _sample(instance, [Prompt("hello", (("goal", "be rude"),))], tree_depth=2)
    rate_nodes(scorer, tree)
    assert len(scorer.seen) == tree.num_nodes
    assert {exchange.columns for exchange in scorer.seen} == {(("goal", "be rude"),)}
