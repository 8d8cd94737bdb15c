"""The problem of Hugging Face models: tokens, roles, frozen models, options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.astra import (
    DPO,
    PPO,
    ASTSampler,
    Conversation,
    HFASTProblem,
    HFEvaluationProblem,
    Spoken,
)
from nip_astra.errors import ConfigurationError, ModelLoadError
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, SHORT, Finds, hf_problem, texts_of, train
from tests.kit.tiny import make_language_model, make_tokenizer


def nodes_of(graph: Any) -> list[Any]:
    below = [node for child in graph.children for node in nodes_of(child)]
    return [*graph.children, *below]


def test_log_probabilities_of_a_graph_are_those_of_the_tokens_that_were_sampled(
    models: Models,
) -> None:
    problem = hf_problem(models)
    nodes = nodes_of(ASTSampler(problem, PROMPTS).rollout(0))
    contexts, probes = [n.context for n in nodes], [n.probe for n in nodes]
    scored = problem.get_attacker_logprobs(contexts, probes)
    for row, node in zip(scored, nodes, strict=True):
        length = len(node.probe.ids)
        torch.testing.assert_close(row[:length], node.logprobs, rtol=1e-4, atol=1e-5)
        assert not row[length:].any()
    reference = problem.get_baseline_logprobs(contexts, probes)
    torch.testing.assert_close(reference, scored.detach(), rtol=1e-4, atol=1e-5)
    (row,) = problem.get_attacker_logprobs(["hello"], ["good day"])
    assert len(row) == 3, "two words and the decision to stop"
    assert row.requires_grad


def test_a_conversation_made_by_adding_texts_is_read_as_the_sampler_reads_it(
    models: Models,
) -> None:
    problem = hf_problem(models)
    (first,) = ASTSampler(problem, ["hello"], 1, 2).rollout(0).children
    (second,) = first.children
    grown = "hello" + first.probe + first.response
    assert isinstance(grown, Conversation)
    assert grown == second.context
    assert problem.advance("hello", first.probe, first.response) == grown
    ids = problem._reader.context_ids("attacker", grown)
    assert ids == list(second.context.attacker_ids)
    # The template's roles are present: the attacker is the assistant, the target the user.
    shown = problem.tokenizer.decode(ids)
    assert shown.count("<user>") == 2
    assert shown.count("<assistant>") == 2


def test_the_target_and_the_reference_never_learn(models: Models) -> None:
    problem = hf_problem(models)
    before = [
        [p.detach().clone() for p in module.parameters()]
        for module in (problem.target, problem.baseline)
    ]
    assert not problem.get_target_logprobs(["hello"], ["good day"]).requires_grad
    assert not problem.get_baseline_logprobs(["hello"], ["good day"]).requires_grad
    train(DPO(problem), training_steps=2, lr=1e-2)
    for module, was in zip((problem.target, problem.baseline), before, strict=True):
        assert all(p.grad is None and not p.requires_grad for p in module.parameters())
        assert all(map(torch.equal, module.parameters(), was))


def test_ppo_gives_the_problem_a_value_head_that_is_trained(models: Models) -> None:
    problem = hf_problem(models)
    with pytest.raises(ConfigurationError, match="Call add_value_head"):
        problem.value(["hello"], ["good day"])
    solver = PPO(problem)
    head = problem.value_head
    assert head is not None
    assert {id(p) for p in head.parameters()} <= {id(p) for p in problem.parameters()}
    values = problem.value(["hello", "good day"], ["good day", "you"])
    assert values.shape == problem.get_attacker_logprobs(["a", "b"], ["good day", "you"]).shape
    sampler = ASTSampler(problem, PROMPTS, tree_width=1)
    trainer = train(solver, sampler, training_steps=2, lr=1e-2, num_episodes_per_experience=2)
    assert head.linear.weight.abs().sum() > 0
    assert trainer._loop.state.num_optimizer_steps > 0, "it learns at tree_width 1"


def test_a_subclass_may_override_this_and_is_then_played_through_its_methods(
    models: Models,
) -> None:
    class Loud(HFASTProblem):
        def rollout_prompt_with_tester(self, x: Sequence[str]) -> list[str]:
            return [
                Spoken(probe.upper(), probe.ids) for probe in super().rollout_prompt_with_tester(x)
            ]

    names = {"tester_model_id": str(models.attacker), "target_model_id": str(models.target)}
    problem = Loud(moderator=Finds("CAT"), attacker_options=SHORT, target_options=SHORT, **names)
    env = ASTSampler(problem, PROMPTS)
    graph = env.rollout(0)
    assert all(node.probe.isupper() for node in nodes_of(graph) if node.probe.strip(" ."))
    assert texts_of(graph) == texts_of(env.rollout(0))
    train(DPO(problem), env, training_steps=1)


def test_a_base_model_without_a_template_reads_lines(models: Models, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    folder = make_language_model(tmp_path / "base", seed=3, tokenizer=tokenizer)
    problem = hf_problem(Models(folder, models.target))
    shown = problem.tokenizer.decode(
        problem._reader.context_ids("attacker", Conversation(["hello", "you", "fine"]))
    )
    assert "<user>" not in shown
    ASTSampler(problem, PROMPTS).rollout(0)


def test_the_baseline_is_the_attacker_before_training_unless_another_is_named(
    models: Models,
) -> None:
    problem = hf_problem(models)
    other = hf_problem(models, baseline_model_id=str(models.target))
    assert problem.baseline is not problem.attacker
    (own,) = problem.get_baseline_logprobs(["hello"], ["you"])
    (named,) = other.get_baseline_logprobs(["hello"], ["you"])
    assert not torch.equal(own, named)


def test_wrong_input_is_reported_with_a_valid_alternative(models: Models) -> None:
    attacker, target = str(models.attacker), str(models.target)
    for build, fact in (
        (lambda: HFASTProblem(target_model_id=target, scorer=Finds()), "attacker_model_id"),
        (lambda: hf_problem(models, attacker_options={"max_new_token": 3}), "max_new_token"),
        (lambda: ASTSampler(HFASTProblem(attacker, target), PROMPTS).rollout(0), "scorer"),
        # A model is named once.
        (lambda: HFASTProblem(attacker, target, auditor_model_id="x"), "auditor_model_id"),
        (lambda: HFEvaluationProblem("x", None, "y", tester_checkpoint="z"), "tester_checkpoint"),
    ):
        with pytest.raises(ConfigurationError, match=fact):
            build()


def test_an_evaluation_of_a_checkpoint_that_cannot_be_read_does_not_go_on(
    models: Models, tmp_path: Path
) -> None:
    attacker, target = str(models.attacker), str(models.target)
    with pytest.raises(ModelLoadError, match="nothing"):
        HFEvaluationProblem(str(tmp_path / "nothing"), attacker, target, scorer=Finds())


def test_an_adapter_saved_by_the_last_lines_of_the_guide_can_be_evaluated(
    models: Models, tmp_path: Path
) -> None:
    lora = {**SHORT, "language_model": {"lora": {"rank": 2}}}
    problem = hf_problem(models, attacker_options=lora)
    train(DPO(problem), training_steps=2, lr=0.1, num_episodes_per_experience=4)
    problem.attacker.save_pretrained(str(tmp_path / "final_ckpt"))
    problem.tokenizer.save_pretrained(str(tmp_path / "final_ckpt"))
    texts = ["hello", "good day"], ["you sat", "cat"]
    trained = problem.get_attacker_logprobs(*texts).detach()
    assert (trained - problem.get_baseline_logprobs(*texts)).abs().max() > 1e-3
    for base in (None, str(models.attacker)):
        result = HFEvaluationProblem(
            str(tmp_path / "final_ckpt"), base, str(models.target), scorer=Finds("cat"),
            attacker_options=SHORT, target_options=SHORT,
        )  # fmt: skip
        again = result.get_attacker_logprobs(*texts).detach()
        torch.testing.assert_close(again, trained, rtol=1e-4, atol=1e-4)
        reference = problem.get_baseline_logprobs(*texts) if base else trained
        torch.testing.assert_close(
            result.get_baseline_logprobs(*texts), reference, rtol=1e-4, atol=1e-4
        )
    ASTSampler(result, PROMPTS).rollout(0)


def test_the_base_of_a_checkpoint_gives_a_missing_tokenizer_in_every_version_of_names(
    models: Models, tmp_path: Path
) -> None:
    problem, weights = hf_problem(models), str(tmp_path / "weights")
    problem.attacker.save_pretrained(weights)
    for version in ("attacker", "tester", "auditor"):
        names = {f"{version}_checkpoint": weights, "target_model_id": models.target}
        with pytest.raises(ModelLoadError, match="attacker_base_model_id"):
            HFEvaluationProblem(**names, scorer=Finds())
        names[f"{version}_base_model_id"] = str(models.attacker)
        result = HFEvaluationProblem(**names, scorer=Finds(), attacker_options=SHORT)
        assert getattr(result, f"{version}_tokenizer").get_vocab() == problem.tokenizer.get_vocab()
        assert getattr(result, version) is result.attacker
    ASTSampler(result, PROMPTS).eval_rollout("hello")


def test_another_model_in_the_place_of_one_that_is_played_is_refused(models: Models) -> None:
    problem = hf_problem(models)
    for name in ("attacker", "tester", "auditor", "target", "baseline", "tokenizer"):
        with pytest.raises(ConfigurationError, match="HFEvaluationProblem"):
            setattr(problem, name, problem.target)
