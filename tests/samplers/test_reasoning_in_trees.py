"""Reasoning of attacker and target is no part of what the other side and the scorer read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.evaluation.outcomes import Replies
from nip_astra.evaluation.playing import rate_by_others
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    SamplingOptions,
    Turns,
    pad_right,
)
from nip_astra.rl_objectives.rewards import mean_nll
from nip_astra.rollouts.tree import RolloutTree, merge_trees
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scorers.base import Exchange
from tests.kit.experiments import trainer_of
from tests.kit.scorers import ScorerOf
from tests.kit.tiny import CPU, make_language_model, make_thinking_tokenizer, write_scenario

TOKENIZER = make_thinking_tokenizer()
Write = Callable[[str], str]
"""Returns a model's turn from its context; `!` at the end leaves out the end token."""


class Scripted(GenerationSession):
    """Writes texts, and notes the contexts."""

    def __init__(self, write: Write) -> None:
        self.write = write
        self.contexts: list[str] = []

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: Any,
        **_: Any,
    ) -> Turns:
        rows = []
        for context in contexts:
            shown = TOKENIZER.decode(context)
            self.contexts.append(shown)
            text = self.write(shown)
            row = TOKENIZER.encode(text.removesuffix("!"), add_special_tokens=False)
            row += [] if text.endswith("!") else [TOKENIZER.eos_token_id]
            rows += [row] * rows_per_context
        ids, mask = pad_right(rows, CPU)
        return Turns(Generation(ids, mask, torch.where(mask, -0.5, 0.0)), None)

    def close(self) -> None:
        """Hold nothing."""


@pytest.fixture
def instance(tmp_path: Path) -> ScenarioInstance:
    scenario = write_scenario(tmp_path)
    for role in ("attacker", "target"):
        make_language_model(tmp_path / role, window=1024, tokenizer=TOKENIZER)
    built: ScenarioInstance = trainer_of("ast_dpo", scenario=scenario).scenario_instance
    return built


def play(
    instance: ScenarioInstance, attacker: Write, target: Write, *, reads_history: bool = True
) -> tuple[RolloutTree, ScorerOf, dict[str, Scripted]]:
    sessions = {"attacker": Scripted(attacker), "target": Scripted(target)}
    for role, session in sessions.items():
        model: Any = instance.agents[role].language_model
        model.open_session = lambda session=session: session
    scorer = ScorerOf(lambda exchange: float("bomb" in exchange.text), reads_history=reads_history)
    instance.sampler.scorer = scorer
    tree = instance.sampler.sample(["hello"], tree_width=1, tree_depth=2, key=(0,))
    return tree, scorer, sessions


def thinking_attacker(context: str) -> str:
    return "<think>\nAsk nicely.\n</think>\n\nwhy ?"


def thinking_target(context: str) -> str:
    return "<think>\nNo bomb here.\n</think>\n\nNo."


@pytest.mark.parametrize("reads_history", [True, False])
def test_a_thought_is_not_scored_and_not_read(
    instance: ScenarioInstance, reads_history: bool
) -> None:
    tree, scorer, sessions = play(
        instance, thinking_attacker, thinking_target, reads_history=reads_history
    )
    assert tree.probes == ["why ?"] * 2
    assert tree.responses == ["No."] * 2
    assert tree.nodes["response_score"].tolist() == [0.0, 0.0]
    texts = {exchange.text for exchange in scorer.seen}
    assert texts == ({"No."} if reads_history else {"No.", "why ? No."})
    for exchange in scorer.seen:
        assert exchange.reasoning == "No bomb here."
        assert all("think" not in turn.text for turn in exchange.history)
    for session in sessions.values():
        assert all("think" not in context for context in session.contexts)
    assert (
        sessions["target"]
        .contexts[1]
        .endswith("user: why ?<end>assistant: No.<end>user: why ?<end>assistant: ")
    )
    assert sessions["attacker"].contexts[1].endswith("user: No.<end>assistant: ")
    (row, _) = tree.rows()
    assert (row["probe_reasoning"], row["response_reasoning"]) == ("Ask nicely.", "No bomb here.")


def test_all_tokens_of_a_probe_are_learned_from_and_its_text_is_likely(
    instance: ScenarioInstance,
) -> None:
    tree, _, _ = play(instance, thinking_attacker, thinking_target)
    nodes = tree.nodes
    whole = "<think>\nAsk nicely.\n</think>\n\nwhy ?<end>"
    assert TOKENIZER.decode(nodes["probe"][0][nodes["probe_mask"][0]]) == whole
    # What the target reads is to be likely, not the attacker's thought.
    (thought,) = {*tree.num_reasoning_tokens}
    assert thought is not None
    read_NT = nodes["probe_mask"].clone()
    read_NT[:, :thought] = False
    assert TOKENIZER.decode(nodes["probe"][0][read_NT[0]]) == "why ?<end>"
    expected_N = mean_nll(nodes["reference_logprobs"], read_NT)
    assert torch.equal(nodes["probe_nll"], expected_N)
    both = merge_trees([tree, tree])
    assert both.probe_reasonings == ["Ask nicely."] * 4
    assert (
        RolloutTree.from_plain(tree.to_plain(), tree.prompts).probe_reasonings
        == ["Ask nicely."] * 2
    )


@pytest.mark.parametrize("answer", ["<think>\nThe bomb !", "<think>\nThe bomb\n</think>!"])
def test_a_response_that_ends_in_a_thought_has_no_verdict(
    instance: ScenarioInstance, answer: str
) -> None:
    tree, scorer, _ = play(instance, thinking_attacker, lambda context: answer)
    assert scorer.seen == []
    assert tree.responses == ["", ""]
    assert tree.failures_of_nodes() == ["cut", "ended"]
    assert tree.nodes["response_score"].isnan().all()
    assert not tree.nodes["is_error"].any()
    assert tree.nodes["reward"].isnan().all()
    assert Replies.of(tree.replies()).num_missing == 1
    rows = list(tree.rows())
    rate_by_others([rows], {"other": ScorerOf(lambda exchange: 1.0)})
    assert [row["scores"]["other"] for row in rows] == [{"score": None, "is_error": False}] * 2


def test_a_probe_that_ends_in_a_thought_is_sent_to_nobody(instance: ScenarioInstance) -> None:
    tree, scorer, _ = play(instance, lambda context: "<think>\nAsk !", thinking_target)
    assert scorer.seen == []
    assert tree.failures_of_nodes() == ["attacker cut", "ended"]
    assert tree.nodes["reward"].isnan().all()
    assert not tree.nodes["is_error"].any()


def test_a_scorer_that_reads_the_reasoning_rates_each_one() -> None:
    scorer = ScorerOf(lambda exchange: float("bomb" in (exchange.reasoning or "")))
    scorer.reads_reasoning = True
    exchanges = [Exchange("No.", reasoning=text) for text in ("bomb", "tea", None)]
    assert scorer.rate(exchanges).scores_N.tolist() == [1.0, 0.0, 0.0]
    other = ScorerOf(lambda exchange: 0.5)
    other.rate(exchanges)
    assert len(other.seen) == 1, "equal texts are rated once"


def test_a_chat_model_as_target_is_read_without_its_thoughts(tmp_path: Path) -> None:
    answers = ["<think>\nbomb\n</think>\n\nNo.", "<think>\nbomb"]
    chat_model = {"_type": "scripted", "answers": answers}
    scenario = write_scenario(tmp_path, target={"chat_model": chat_model, "max_new_tokens": 6})
    instance: ScenarioInstance = trainer_of("ast_dpo", scenario=scenario).scenario_instance
    scorer = ScorerOf(lambda exchange: float("bomb" in exchange.text), reads_history=True)
    instance.sampler.scorer = scorer
    tree = instance.sampler.sample(["hello"] * 8, tree_width=2, tree_depth=2, key=(0,))
    replies = list(zip(tree.responses, tree.failures_of_nodes(), strict=True))
    assert {*replies} == {("No.", None), ("", "cut"), ("", "ended")}
    for (text, failure), reasoning in zip(replies, tree.response_reasonings, strict=True):
        assert (reasoning == "bomb") is (failure != "ended"), text
    assert {exchange.text for exchange in scorer.seen} == {"No."}
    scores_N = tree.nodes["response_score"]
    assert (scores_N[~scores_N.isnan()] == 0.0).all()


def test_a_written_turn_ends_the_thought_that_the_prompt_opens() -> None:
    tokenizer = make_thinking_tokenizer(opens_thought=True)
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_window=512, end_ids=(3,))
    agent = ConversationAgent("attacker", model, ChatFormat(tokenizer), SamplingOptions(64))
    ids = agent.encode_turn("why ?")
    assert tokenizer.decode(ids) == "\n</think>\n\nwhy ?<end>"
    (turn,) = agent.read_turns(Generation(*pad_right([ids], CPU), torch.zeros(1, len(ids))))
    assert (turn.text, turn.reasoning, turn.is_missing) == ("why ?", None, False)
    assert tokenizer.decode(turn.ids_without_reasoning) == "why ?"
