"""Problems and samplers: seeds, rewards, names, and whole batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nip_astra.astra import DPO, ASTProblem, ASTSampler, Graph, Moderator, Node, Sampler
from nip_astra.astra.core.scorer import rater_of
from nip_astra.errors import ConfigurationError, NipAstraError, ScorerError
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, Finds, WordProblem, hf_problem, says, texts_of, train
from tests.kit.learning import Learning
from tests.kit.scorers import ScorerOf


@pytest.mark.parametrize("kind", ["hugging face", "own"])
def test_equal_seeds_give_equal_graphs_and_zero_is_a_seed(kind: str, models: Models) -> None:
    env, again = (
        ASTSampler(hf_problem(models) if kind == "hugging face" else WordProblem(), PROMPTS)
        for _ in range(2)
    )
    first = {}
    for seed in (0, 1):
        torch.manual_seed(seed + 7)  # the global state must not matter
        before = torch.get_rng_state(), random.getstate()
        first[seed] = texts_of(env.rollout(seed))
        # Nor is it changed.
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
    random.seed(99)
    for seed in (0, 1):
        assert texts_of(env.rollout(seed)) == first[seed]
        assert texts_of(env.eval_rollout(seed)) == texts_of(env.eval_rollout(seed))
    assert first[0] != first[1]
    # Without a seed episodes differ, and a program repeats them.
    episodes = [texts_of(env.rollout()) for _ in range(3)]
    assert episodes[0] != episodes[1] != episodes[2]
    assert [texts_of(again.rollout()) for _ in range(3)] == episodes


def test_all_branches_of_a_level_are_requested_in_one_call() -> None:
    problem = WordProblem()
    ASTSampler(problem, PROMPTS, tree_width=3, tree_depth=2).rollout(0)
    assert problem.requests == [("attacker", 3), ("target", 3), ("attacker", 9), ("target", 9)]
    problem.requests.clear()
    sampler = ASTSampler(problem, PROMPTS, 2, 2)
    train(DPO(problem), sampler, training_steps=1, num_episodes_per_experience=4)
    assert problem.requests == [("attacker", 8), ("target", 8), ("attacker", 16), ("target", 16)]


def test_an_evaluation_from_a_number_plays_a_chain_and_rates_each_text_once() -> None:
    scorer = Finds()
    problem = WordProblem(scorer)
    graph = ASTSampler(problem, PROMPTS, tree_width=3, tree_depth=3).eval_rollout(0)
    first, second, _ = graph.chain()
    assert second.context == first.context + first.probe + first.response
    assert first.probe == first.attack == first.audit == first.challenge
    assert all(len(node.children) <= 1 for node in graph.chain())
    assert [count for _, count in problem.requests] == [1] * 6
    assert sum(scorer.calls) <= 6


def test_the_reward_is_that_of_the_paper_and_likelihood_counts_per_token() -> None:
    problem = WordProblem(Finds("silly"), ppl_weight=0.1)
    (silly, other) = problem.reward(
        ["hello"] * 2, [" cat mat", " cat sat"], [" you silly", " you sat"]
    )
    nll = math.log(6)  # the target knows six words, all equally likely
    assert silly == pytest.approx(1.0 + 0.5 - 0.1 * nll)
    assert other == pytest.approx(-0.1 * nll)


def test_an_empty_probe_earns_no_more_than_a_likely_probe() -> None:
    class Silent(WordProblem):
        def _logprobs(self, logits: Any, continuation: Sequence[str]) -> torch.Tensor:
            length = max(len(text.split()) for text in continuation)
            return torch.tensor(
                [[-1.0] * len(t.split()) + [0.0] * (length - len(t.split())) for t in continuation]
            )

    empty, likely = Silent().reward(["a"] * 2, ["", " cat mat"], [" fine"] * 2)
    assert empty < likely


@pytest.mark.parametrize("who", ["attacker", "tester", "auditor"])
def test_a_problem_may_name_its_methods_as_any_version_does(learning: Learning, who: str) -> None:
    def generate(self: Any, x: Sequence[str]) -> list[str]:
        return WordProblem.rollout_prompt_with_attacker(self, x)

    def scored(self: Any, context: Sequence[str], continuation: Sequence[str]) -> torch.Tensor:
        return self._logprobs(self.attacker.logits, continuation)

    body = {f"rollout_prompt_with_{who}": generate, f"get_{who}_logprobs": scored}
    problem = type("Named", (WordProblem,), body)(ppl_weight=0.0)
    for name in ("attacker", "tester", "auditor"):
        assert getattr(type(problem), f"get_{name}_logprobs") is scored
        assert getattr(type(problem), f"rollout_prompt_with_{name}") is generate
        assert hasattr(problem, f"_get_{name}_logprobs_and_validate")
    train(DPO(problem), training_steps=20, lr=0.1, batch_size=16, seed=learning.seed)
    learning.check(says(problem, "silly"), threshold=0.5, best=1.0)


def test_a_moderator_is_a_scorer_and_the_problem_knows_it_by_both_names() -> None:
    class Polite(Moderator):
        def moderate(self, x: Sequence[str]) -> list[float]:
            return [0.25 for _ in x]

    problem = WordProblem(moderator=None, scorer=Polite())
    assert problem.moderator is problem.scorer
    assert problem.scorer.score(["a"]) == [0.25]
    graph = ASTSampler(problem, PROMPTS).rollout(0)
    assert graph.children[0].response_score == 0.25
    problem.moderator = scorer = Finds()
    assert problem.scorer is scorer
    with pytest.raises(ConfigurationError, match="moderator"):
        ASTProblem.__init__(problem, Finds(), moderator=Finds())
    with pytest.raises(ConfigurationError, match="w_likelihood"):
        WordProblem(ppl_weight=-1.0)


def test_a_text_without_verdict_has_no_reward_and_makes_no_pair() -> None:
    class Unsure(Finds):
        def score(self, x: Sequence[str]) -> list[float | None]:
            return [None if "mat" in text else 0.0 for text in x]

    problem = WordProblem(Unsure())
    graph = ASTSampler(problem, PROMPTS, tree_width=16, tree_depth=1).rollout(0)
    unsure = [node for node in graph.children if "mat" in node.probe]
    assert unsure
    assert all(math.isnan(node.reward) for node in unsure)
    assert all("mat" not in p.suffix_pos + p.suffix_neg for p in DPO(problem).flatten(graph))


def test_a_scorer_that_reads_conversations_gets_them() -> None:
    scorer = ScorerOf(lambda exchange: 0.5, reads_history=True)
    (node,) = ASTSampler(WordProblem(scorer), ["hello"], 1, 1).rollout(0).children
    spoken = (("assistant", "hello"), ("user", node.probe), ("assistant", node.response))
    assert tuple((one.role, one.text) for one in scorer.seen[0].conversation) == spoken


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.rand(2, 3), "reach"),
        (torch.tensor([[-1.0, math.nan]] * 2), "nan"),
        (torch.zeros(3, 2), r"\[3, 2\]"),
        ([0.0, 0.0], "list"),
    ],
)
def test_invalid_log_probabilities_are_reported_at_every_use(given: Any, text: str) -> None:
    class Wrong(WordProblem):
        def get_baseline_logprobs(self, context: Any, continuation: Any) -> Any:
            return given

    problem = Wrong()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=text):
            problem.reference_values(["a", "b"], ["c", "d"])


def test_an_attacker_without_gradient_and_a_missing_text_are_reported() -> None:
    class Frozen(WordProblem):
        def get_attacker_logprobs(self, context: Any, continuation: Any) -> torch.Tensor:
            return super().get_attacker_logprobs(context, continuation).detach()

        def rollout_prompt_with_target(self, x: Sequence[str]) -> list[str]:
            return super().rollout_prompt_with_target(x)[1:]

    with pytest.raises(ConfigurationError, match="no_grad"):
        Frozen()._get_attacker_logprobs_and_validate(["a"], [" cat mat"])
    with pytest.raises(ConfigurationError, match="target of Frozen returned 1 for 2 texts"):
        ASTSampler(Frozen(), PROMPTS).rollout(0)

    class Cheap(WordProblem):
        def reward(self, context: Any, probe: Any, response: Any) -> list[float]:
            return [0.0]

    with pytest.raises(ConfigurationError, match="reward of Cheap returned 1 for 2"):
        ASTSampler(Cheap(), PROMPTS).rollout(0)


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        *(({"prompts": prompts}, "list") for prompts in ([], "hello", None)),
        ({"tree_width": 0}, "tree_width=0"),
        ({"tree_depth": -1}, "tree_depth=-1"),
    ],
)
def test_a_sampler_without_prompts_or_probes_is_refused(options: Any, fact: str) -> None:
    with pytest.raises(ConfigurationError, match=fact):
        ASTSampler(WordProblem(), **{"prompts": PROMPTS, **options})


class Lines(Sampler[str, str]):
    """A custom sampler with groups of unequal size and only `rollout`."""

    seeds: list[int]

    def rollout(self, seed: int | None = None) -> Graph[str, str]:
        self.seeds = [*getattr(self, "seeds", []), seed or 0]
        count = 2 + len(self.seeds) % 2
        probes = self.system.rollout_prompt_with_attacker(["go"] * count)
        nodes = [Node("go", p, "ok", float("silly" in p.split()), []) for p in probes]
        return Graph("go", nodes)


def test_a_custom_sampler_trains_with_a_seed_for_each_episode(learning: Learning) -> None:
    problem = WordProblem()
    env = Lines(problem)
    sizes = {"num_episodes_per_experience": 8, "batch_size": 16}
    train(DPO(problem), env, training_steps=30, lr=0.1, seed=learning.seed, **sizes)
    assert len(set(env.seeds)) == len(env.seeds) == 240
    assert max(env.seeds) < 2**32, "NumPy takes no larger seed"
    learning.check(says(problem, "silly"), threshold=0.5, best=1.0)
    with pytest.raises(NipAstraError, match="'hello'"):
        env.eval_rollout("hello")


def test_errors_of_an_own_scorer_name_its_class_and_its_cache_depends_on_its_code() -> None:
    class Loud(Finds):
        def score(self, x: Sequence[str]) -> list[float]:
            return [2.0] * len(x)

    rater: Any = rater_of(Loud())
    with pytest.raises(ScorerError, match="scorer 'Loud'"):
        rater.score(["hello"])
    assert {__name__, Finds.__module__} <= rater.modules


def test_log_densities_above_0_are_accepted_if_a_problem_allows_them() -> None:
    class Dense(WordProblem):
        """Its log-probabilities are shifted by a constant, like log-densities."""

        def _logprobs(self, logits: Any, continuation: Any) -> Any:
            dense = super()._logprobs(logits, continuation)
            return torch.where(dense == 0, dense, dense + 5.0)

    with pytest.raises(ConfigurationError, match="max_logprob"):
        train(DPO(Dense()), training_steps=1, num_episodes_per_experience=2)
    problem = Dense(ppl_weight=0.0)
    problem.max_logprob = None
    train(DPO(problem), lr=0.3, training_steps=3, num_episodes_per_experience=4)
    assert says(problem, "silly") > 1 / 6


class OnDevices(WordProblem):
    """Returns random numbers on chosen devices, as the models of a faulty setup."""

    def __init__(self, attacker: str = "cpu", reference: str = "cpu") -> None:
        super().__init__()
        self.devices = {"attacker": attacker, "reference": reference}

    def get_tester_logprobs(self, context: Any, continuation: Any) -> Any:
        return torch.randn(len(context), 5, device=self.devices["attacker"], requires_grad=True)

    def get_target_logprobs(self, context: Any, continuation: Any) -> Any:
        return torch.randn(len(context), 5, device=self.devices["reference"])

    get_baseline_logprobs = get_target_logprobs


def test_models_on_different_devices_are_reported_as_in_astra_rl() -> None:
    texts = ["hello", "world"], ["test", "case"]
    problem = OnDevices()
    assert problem._expected_device is None
    logprobs = problem._get_tester_logprobs_and_validate(*texts)
    assert problem._expected_device == logprobs.device == torch.device("cpu")
    assert problem._disable_asserts["tester_logprobs"] is True
    for role in ("target", "baseline", "tester"):
        result = getattr(problem, f"_get_{role}_logprobs_and_validate")(*texts)
        assert result.shape == (2, 5)
    mixed = OnDevices(reference="meta")
    mixed._get_tester_logprobs_and_validate(*texts)
    with pytest.raises(AssertionError, match=r"cpu.*baseline_logprobs.*meta"):
        mixed._get_baseline_logprobs_and_validate(*texts)
    problem._expected_device = torch.device("meta")
    with pytest.raises(AssertionError, match=r"meta.*some_logprobs.*cpu"):
        problem._check_logprobs("some_logprobs", torch.randn(1, 5), 1, False)
    with pytest.raises(AssertionError, match="gradient"):
        problem._check_logprobs("tester_logprobs", torch.randn(1, 5), 1, True)
