"""A rollout is cut by the experiment alone, whatever the number of processes that play it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ContextLengthError
from nip_astra.evaluation.failure_probability import attacker_at
from nip_astra.evaluation.playing import sampler_of
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import Generation, TokenCount, TokenSampler
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.utils.forked import can_fork, get_num_processes, using_processes
from tests.samplers.test_trees import build

PROMPTS = ["hello", "good day", "the cat sat", "hello there", "good", "a dog"]

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux without a GPU only"),
    pytest.mark.usefixtures("forked"),
]


@pytest.fixture
def instance(tiny_scenario: Path) -> ScenarioInstance:
    return build(tiny_scenario)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many parts rollouts were divided."""
    counts: list[int] = []
    found = executor.cut_rollout

    def noted(*asked: Any, **more: Any) -> list[range]:
        cut = found(*asked, **more)
        counts.append(len(cut))
        return cut

    monkeypatch.setattr("nip_astra.samplers.trees.cut_rollout", noted)
    return counts


def sample(
    sampler: TreeSampler, count: int, prompts: list[str] = PROMPTS, num_parts: int = 2
) -> RolloutTree:
    sampler.num_parts = num_parts
    with using_processes(count):
        return sampler.sample(
            prompts, tree_width=2, tree_depth=2, key=(0, "parts"), first_episode=3
        )


def counted(instance: ScenarioInstance) -> list[int]:
    models = [agent.language_model for agent in instance.agents.values()]
    return [getattr(m.token_count, field.name) for m in models for field in fields(TokenCount)]


@pytest.mark.parametrize(
    ("num_parts", "num_held", "num_processes"),
    [(3, None, 2), (4, None, 3), (2, None, 9), (6, 2, 2), (2, 3, 2)],
)
def test_any_number_of_processes_plays_the_same_rollout(
    tiny_scenario: Path,
    instance: ScenarioInstance,
    monkeypatch: pytest.MonkeyPatch,
    num_parts: int,
    num_held: int | None,
    num_processes: int,
) -> None:
    """To the bit, for batches have the same rows; `num_held` trees fit into memory."""
    other = build(tiny_scenario)
    one = other.sampler.cache_bytes(PROMPTS, tree_width=2, tree_depth=2) // len(PROMPTS)
    batches: list[int] = []
    play = TreeSampler._play

    def noted(self: TreeSampler, prompts: list[str], *how: Any) -> RolloutTree:
        batches.append(len(prompts))
        return play(self, prompts, *how)

    monkeypatch.setattr(TreeSampler, "_play", noted)
    for sampler in (instance.sampler, other.sampler):
        sampler.max_cache_bytes = None if num_held is None else num_held * one
    alone = sample(instance.sampler, 1, num_parts=num_parts)
    assert len(batches) > 1, "one process has several batches too"
    together = sample(other.sampler, num_processes, num_parts=num_parts)
    assert (together.prompts, together.probes) == (PROMPTS, alone.probes)
    assert (together.responses, together.contexts) == (alone.responses, alone.contexts)
    assert together.num_unique_tokens == alone.num_unique_tokens
    assert counted(other) == counted(instance)
    assert set(together.nodes.keys()) == set(alone.nodes.keys())
    for name, values in alone.nodes.items():
        assert torch.equal(together.nodes[name], values), name
    assert together.seconds.keys() == alone.seconds.keys()


def test_the_scorer_is_asked_once_by_this_process(
    instance: ScenarioInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, calls = instance.sampler, []
    rate = sampler.scorer.rate

    def rated(exchanges: Any) -> Any:
        calls.append(len(exchanges))
        return rate(exchanges)

    monkeypatch.setattr(sampler.scorer, "rate", rated)
    tree = sample(sampler, 2)
    assert calls == [2 * tree.num_nodes]


def test_contexts_that_are_cut_are_counted_once(tiny_scenario: Path, divided: list[int]) -> None:
    cut = []
    for count in (1, 2):
        instance = build(tiny_scenario)
        for agent in instance.agents.values():
            agent.language_model.context_window = 16 + agent.sampling.max_new_tokens
        # One agent in two roles, as in a random search.
        sampler = instance.sampler.with_attacker(instance.agents["reference"])
        sample(sampler, count)
        cut.append([agent.num_truncated_contexts for agent in instance.agents.values()])
    assert divided == [2, 2]
    assert sum(cut[0]) > 0
    assert cut[0] == cut[1]


def test_what_fails_in_another_process_is_raised_as_what_it_is(
    instance: ScenarioInstance,
) -> None:
    long = " ".join(["good"] * 2000)
    with pytest.raises(ContextLengthError) as alone:
        sample(instance.sampler, 1, [*PROMPTS, long])
    with pytest.raises(ContextLengthError) as together:
        sample(instance.sampler, 2, [*PROMPTS, long])
    assert str(together.value) == str(alone.value)


@pytest.mark.parametrize(
    ("num_held", "num_parts", "sizes"), [(4, 2, [2, 1]), (6, 2, [3]), (1, 1, [1] * 6)]
)
def test_no_more_is_held_at_once_than_the_memory_for_keys_and_values(
    instance: ScenarioInstance,
    monkeypatch: pytest.MonkeyPatch,
    divided: list[int],
    num_held: int,
    num_parts: int,
    sizes: list[int],
) -> None:
    sampler = instance.sampler
    per_episode = sampler.cache_bytes(PROMPTS, tree_width=2, tree_depth=2) // len(PROMPTS)
    sampler.max_cache_bytes = num_held * per_episode
    played: list[int] = []
    play = sampler._play

    def noted(prompts: list[str], *how: Any) -> RolloutTree:
        played.append(len(prompts))
        return play(prompts, *how)

    monkeypatch.setattr(sampler, "_play", noted)
    sample(sampler, 2)
    assert divided == [num_parts]
    # Of the six episodes this process has three, or all.
    assert played == sizes


def test_few_nodes_are_not_divided(
    instance: ScenarioInstance, divided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for smallest in (18, 19):
        monkeypatch.setattr(executor, "SMALLEST_PART", smallest)
        sample(instance.sampler, 2)
    assert divided == [2, 1], "36 nodes"


def test_what_would_lose_what_it_keeps_is_not_divided(
    tiny_scenario: Path, divided: list[int]
) -> None:
    class OwnModel(HuggingFaceLanguageModel):
        pass

    class OwnAgent(ConversationAgent):
        pass

    one, other, third = (build(tiny_scenario) for _ in range(3))
    model: Any = one.agents["target"].language_model
    own = OwnModel(model.module, model.tokenizer, device=model.device, trainable=False)
    one.agents["target"].language_model = own
    sample(one.sampler, 2)
    other.sampler.target = OwnAgent(**vars(other.agents["target"]))
    sample(other.sampler, 2)
    assert not own.can_be_forked
    third.sampler.target.language_model = Unforked(third.agents["target"])
    sample(third.sampler, 2)
    assert divided == [1, 1, 1]


def test_a_large_model_is_not_divided(
    instance: ScenarioInstance, divided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for smallest_large in (10**9, 10):
        monkeypatch.setattr(executor, "SMALL_MODEL_PARAMETERS", smallest_large)
        sample(instance.sampler, 2)
    assert divided == [2, 1]


def test_what_is_not_divided_is_played_by_one_process_in_pieces_too(
    instance: ScenarioInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory for keys and values holds some of the episodes only."""
    sampler = instance.sampler
    instance.agents["target"].language_model.can_be_forked = False
    sampler.max_cache_bytes = (
        2 * sampler.cache_bytes(PROMPTS, tree_width=2, tree_depth=2) // len(PROMPTS)
    )
    monkeypatch.setattr("nip_astra.samplers.executor.call_at_once", None)
    assert sample(sampler, 2).num_episodes == len(PROMPTS)


class Unforked(TokenSampler):
    """A model from elsewhere, which does not say whether it may be forked."""

    def __init__(self, agent: ConversationAgent) -> None:
        self._model = agent.token_sampler
        for name in ("tokenizer", "context_window", "end_ids", "token_count"):
            setattr(self, name, getattr(self._model, name))

    @classmethod
    def load(cls, parameters: Any, **options: Any) -> Unforked:
        raise NotImplementedError

    def num_parameters(self) -> int:
        return self._model.num_parameters()

    def generate(self, *asked: Any) -> Generation:
        return self._model.generate(*asked)


def test_importance_sampling_counts_the_tokens_of_both_speakers(tiny_scenario: Path) -> None:
    counts = []
    for count in (1, 2):
        instance = build(tiny_scenario)
        sampler = sampler_of(attacker_at(1), instance.sampler, num_turns=2)
        with using_processes(count):
            sampler.sample(PROMPTS, tree_width=1, tree_depth=2, key=(0, "x"))
        counts.append(counted(instance))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("asked", "used"), [(None, 3), (1, 1), (2, 2)])
def test_a_run_of_small_models_gives_the_same_on_any_number_of_cores(
    tiny_scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
    divided: list[int],
    asked: int | None,
    used: int,
) -> None:
    monkeypatch.setattr("nip_astra.utils.processor.num_cores", lambda: 3)
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        overrides=[
            "training.num_iterations=1",
            "training.num_episodes_per_experience=3",
            "ast_chat.num_rollout_parts=3",
        ],
    )
    settings = ExperimentSettings(progress=False, num_threads=asked)
    trainer = prepare_experiment(resolved, settings=settings).trainer
    trainer.train()
    assert max(divided) == 3
    assert trainer.results["num_processes"] == used
    assert get_num_processes() == 1
