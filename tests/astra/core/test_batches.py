"""A problem on texts never receives more at once than its models can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nip_astra.astra import DPO, PPO, ASTSampler, HFASTProblem, System
from nip_astra.astra.core.batches import in_parts
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, ValuedWordProblem, WordProblem, hf_problem, texts_of, train
from tests.kit.tiny import make_tokenizer

GIB = 2**30


def test_two_thousand_texts_are_cut_and_a_few_are_not() -> None:
    problem = WordProblem()
    texts = ["how was your day, and what did you do after lunch? " * 3] * 2048
    parts = list(in_parts(problem, texts, spoken=64))
    assert [row for part in parts for row in range(2048)[part]] == list(range(2048))
    longest = len(texts[0]) // 3 + 1 + 64
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) * longest * 50_257 * 8 <= problem.max_batch_bytes == 4 * GIB
    assert min(sizes[:-1]) > 20
    assert list(in_parts(problem, texts[:8])) == [slice(0, 8)]


def test_long_texts_make_smaller_parts_and_one_text_is_always_let_through() -> None:
    letters, problem = WordProblem(), WordProblem()
    letters.tokenizer = range(100)
    problem.max_batch_bytes = 50_257 * 8 * 100
    texts = ["a" * 60, "a" * 60, "a" * 270, "a" * 3000, "a" * 3, "a" * 3]
    assert [(p.start, p.stop) for p in in_parts(problem, texts)] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    # A small vocabulary makes larger parts, and no bound makes a single part.
    problem.max_batch_bytes = None
    many = ["hello " * 50] * 5000
    assert len(list(in_parts(letters, many))) == 1 < len(list(in_parts(WordProblem(), many)))
    assert list(in_parts(problem, many)) == [slice(0, 5000)]


class Counts(ValuedWordProblem):
    """Records how many texts each method received."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ppl_weight=0.0, **options)
        self.sizes: dict[str, list[int]] = {"scored": [], "valued": []}

    def _logprobs(self, logits: torch.Tensor, continuation: Any) -> torch.Tensor:
        self.sizes["scored"].append(len(continuation))
        return super()._logprobs(logits, continuation)

    def value(self, context: Any, continuation: Any) -> torch.Tensor:
        self.sizes["valued"].append(len(context))
        return super().value(context, continuation)


@pytest.mark.parametrize("algorithm", [DPO, PPO])
def test_rollouts_and_scores_keep_to_the_bound(algorithm: Any) -> None:
    problem = Counts()
    problem.max_batch_bytes = 50_257 * 8 * 800  # room for about nine of their texts
    sampler = ASTSampler(problem, PROMPTS, tree_width=3, tree_depth=2)
    sizes = {"training_steps": 1, "num_episodes_per_experience": 4, "batch_size": 5}
    train(algorithm(problem), sampler, **sizes)
    spoken = [count for who, count in problem.requests if who == "attacker"]
    assert sum(spoken) == 4 * (3 + 9)
    assert max(spoken) < 12 < len(spoken) * 12
    assert len(spoken) > 2
    assert max(problem.sizes["scored"]) < 4 * 12


def test_values_of_parts_are_those_of_all_together() -> None:
    result = []
    for limit in (None, 50_257 * 8 * 30):
        problem = Counts()
        sampler = ASTSampler(problem, PROMPTS, tree_width=3, tree_depth=2)
        graph = sampler.rollout(0)
        problem.max_batch_bytes = limit
        problem.sizes["valued"].clear()
        steps = PPO(problem).flatten(graph)
        assert (max(problem.sizes["valued"]) < 12) == (limit is not None)
        result.append([step.tokens["old_logprobs"].tolist() for step in steps])
    assert result[0] == result[1]


def test_a_custom_reward_over_trees_of_tokens_keeps_to_the_bound(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(HFASTProblem):
        sizes: list[int]

        def reward(self, context: Any, probe: Any, response: Any) -> list[float]:
            self.sizes.append(len(probe))
            return [-float(len(text.ids)) for text in probe]

    result = []
    for limit in (4 * GIB, len(make_tokenizer()) * 8 * 200):
        monkeypatch.setattr(System, "max_batch_bytes", limit)
        problem = hf_problem(models, kind=Short)
        problem.sizes = []
        graph = ASTSampler(problem, PROMPTS, tree_width=3, tree_depth=2).rollout(0)
        assert sum(problem.sizes) == 3 + 9
        result.append((texts_of(graph), len(problem.sizes)))
    assert result[0][0] == result[1][0]
    assert result[0][1] == 1 < result[1][1]
