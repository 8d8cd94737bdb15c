"""The evaluator's metrics, computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nip_astra.astra import (
    ASTEvaluator,
    ASTSampler,
    Conversation,
    Evaluator,
    Graph,
    GraphMetrics,
    Node,
    RegisteredScorer,
)
from nip_astra.errors import ConfigurationError
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, Finds, WordProblem, hf_problem


class Rates(Finds):
    """Rates a text by the number it ends with."""

    def score(self, x: Sequence[str]) -> list[float | None]:
        return [None if text.endswith("?") else float(text.split()[-1]) for text in x]


def chain(*turns: tuple[str, float]) -> Graph[str, str]:
    children: list[Any] = []
    for probe, score in reversed(turns):
        children = [Node("c", probe, "r", score, children, response_score=score)]
    return Graph("c", children)


def test_means_are_over_turns_and_the_first_failures_are_found() -> None:
    evaluator = ASTEvaluator(ASTSampler(WordProblem(Rates()), PROMPTS))
    one = evaluator.compute_metrics(chain(("p 0.1", 0.2), ("p 0.6", 0.4), ("p 0.8", 0.9)))
    expected = {"num_turns": 3, "avg_adversarial_toxicity": 0.5, "avg_target_toxicity": 0.5}
    expected |= {"first_adversarial_toxicity_turn": 2, "first_target_toxicity_turn": 3}
    assert {name: one.overall[name] for name in expected} == pytest.approx(expected)
    none = evaluator.compute_metrics(chain(("p 0.0", 0.0)))
    unknown = evaluator.compute_metrics(chain(("p ?", float("nan"))))
    assert unknown.per_turn[0]["target_toxicity"] is None
    result = evaluator.aggregate_metrics([one, none, unknown])["summary"]
    assert result["pct_rollouts_with_target_toxicity/attack_success_rate"] == 0.5
    assert (result["n_rollouts"], result["n_rollouts_without_verdict"]) == (3, 1)
    assert result["avg_target_toxicity"] == pytest.approx(0.25)
    # Its failure comes after a turn without a verdict.
    late = evaluator.compute_metrics(chain(("p ?", float("nan")), ("p 0.1", 0.9)))
    result = evaluator.aggregate_metrics([one, none, late])["summary"]
    assert result["pct_rollouts_with_target_toxicity/attack_success_rate"] == 0.5


def test_a_probe_is_rated_as_the_attackers_turn_after_the_turns_before_it() -> None:
    # The attacker discloses only words that the target has not used before.
    scorer = RegisteredScorer("disclosure", secrets=["hello cat"])
    evaluator = ASTEvaluator(ASTSampler(WordProblem(scorer), PROMPTS))
    node = Node(Conversation(["hello", "you", "mat"]), "hello cat", "sat", 0.0)
    (turn,) = evaluator.compute_metrics(Graph("hello", [node])).per_turn
    assert turn["adversarial_toxicity"] == 0.5


def test_an_evaluation_writes_a_file_and_plays_all_episodes_together(
    models: Models, tmp_path: Path
) -> None:
    problem = hf_problem(models)
    evaluator = ASTEvaluator(ASTSampler(problem, PROMPTS, 1, 2), seeds=PROMPTS)
    with problem.agents["target"].language_model.counting() as spent:
        metrics = evaluator.evaluate(n_rollouts=3, progress=False)
    assert spent.generated > 0
    assert metrics == evaluator.evaluate(n_rollouts=3, progress=False)
    assert metrics["summary"]["n_rollouts"] == len(metrics["details"]) == 3
    Evaluator.write_json(metrics, str(tmp_path / "metrics.json"))
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics


def test_numbers_serve_as_seeds_and_too_many_episodes_are_refused() -> None:
    env = ASTSampler(WordProblem(), PROMPTS)
    assert ASTEvaluator(env).evaluate(5, progress=False)["summary"]["n_rollouts"] == 5
    with pytest.raises(ConfigurationError, match="seeds"):
        ASTEvaluator(env).evaluate()
    with pytest.raises(ConfigurationError, match="9 episodes"):
        ASTEvaluator(env, seeds=PROMPTS).evaluate(9)
    for count in (0, -1):
        with pytest.raises(ConfigurationError, match=f"n_rollouts={count}"):
            ASTEvaluator(env, seeds=PROMPTS).evaluate(count)


def test_a_custom_evaluator_implements_two_methods() -> None:
    class Counts(Evaluator[str, str, str]):
        def compute_metrics(self, g: Graph[str, str]) -> GraphMetrics:
            return GraphMetrics({"turns": len(list(g.chain()))}, [])

        def aggregate_metrics(self, all_metrics: list[GraphMetrics]) -> dict[str, Any]:
            return {"turns": sum(metrics.overall["turns"] for metrics in all_metrics)}

    env = ASTSampler(WordProblem(), PROMPTS, 2, 3)
    assert Counts(env, PROMPTS).evaluate(progress=False) == {"turns": 12}


def test_an_episode_is_summarised_as_in_the_oldest_examples() -> None:
    env = ASTSampler(WordProblem(Finds("you")), ["hello"], tree_depth=2)
    graph = env.eval_rollout("hello")
    summary = env.extract_metrics(graph)
    assert [turn.target_tox for turn in summary.turns] == [1.0, 1.0]
    assert summary.first_target_tox_turn == 1
    probes = ["you" in node.probe.split() for node in graph.chain()]
    assert [turn.attack_tox for turn in summary.turns] == [float(has) for has in probes]
    expected = probes.index(True) + 1 if any(probes) else None
    assert summary.first_attack_tox_turn == expected
    # The reference draws from six words uniformly.
    assert summary.turns[0].attack_logprob == pytest.approx(-math.log(6), abs=1e-4)
