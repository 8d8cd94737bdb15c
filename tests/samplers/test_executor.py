"""A rollout's parts depend only on the experiment, not on the number of processes."""

from __future__ import annotations

import os
import signal
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, ContextLengthError
from nip_astra.evaluation.failure_probability import attacker_at
from nip_astra.evaluation.playing import sampler_of
from nip_astra.language_models import huggingface
from nip_astra.language_models.base import TokenCount
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor, trees
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.actors import ActorOptions, Actors, get_actors, using_actors
from nip_astra.utils.forked import can_fork, get_num_processes, using_processes
from tests.kit import actors_here
from tests.kit.actors_here import ActorsHere
from tests.kit.experiments import FAST, metrics_of, run_in
from tests.kit.recording import Call, record_calls
from tests.language_models.test_abilities import Samples
from tests.language_models.tree_engine.test_decode_graphs import Recorder, fix
from tests.samplers.test_trees import build

PROMPTS = ["hello", "good day", "the cat sat", "hello there", "good", "a dog"]

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="processes are forked on Linux without a GPU only"),
    pytest.mark.usefixtures("forked"),
]


@pytest.fixture
def instance(tiny_scenario: Path) -> ScenarioInstance:
    return build(tiny_scenario)


@pytest.fixture
def sampler(instance: ScenarioInstance) -> TreeSampler:
    return instance.sampler


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls that cut rollouts into parts."""
    return record_calls(monkeypatch, trees, "cut_rollout")


def num_parts_of(cuts: list[Call]) -> list[int]:
    return [len(call.result) for call in cuts]


SIZE = {"tree_width": 2, "tree_depth": 2}


def sample(sampler: TreeSampler, count: int, num_parts: int = 2) -> RolloutTree:
    sampler.num_parts = num_parts
    with using_processes(count):
        return sampler.sample(PROMPTS, **SIZE, key=(0, "parts"), first_episode=3)


def assert_equal(tree: RolloutTree, other: RolloutTree) -> None:
    assert set(tree.nodes.keys()) == set(other.nodes.keys())
    for name in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        assert torch.equal(tree.nodes[name], other.nodes[name]), name
    for name in ("probes", "responses", "contexts", "num_unique_tokens"):
        assert getattr(tree, name) == getattr(other, name), name


def counted(instance: ScenarioInstance) -> list[int]:
    """Tokens of each model, and at the end the contexts that were cut of each agent."""
    agents = instance.agents.values()
    counts = [agent.language_model.token_count for agent in agents]
    tokens = [getattr(count, field.name) for count in counts for field in fields(TokenCount)]
    return [*tokens, *(agent.num_truncated_contexts for agent in agents)]


@pytest.mark.parametrize(
    ("num_parts", "num_held", "num_processes", "window"),
    [(4, 6, 3, 80), (2, 6, 9, 16), (6, 2, 2, 80), (3, 1, 2, 80)],
)
def test_any_number_of_processes_plays_the_same_rollout(
    tiny_scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: list[Call],
    num_parts: int,
    num_held: int,
    num_processes: int,
    window: int,
) -> None:
    """Equal to the bit, since batches have the same rows.

    `num_held` trees fit into memory, and `window` tokens of a conversation are read.
    """
    batches = record_calls(monkeypatch, TreeSampler, "_play")
    trees, counts = [], []
    for count in (1, num_processes):
        instance = build(tiny_scenario)
        for agent in instance.agents.values():
            agent.language_model.context_window = window + agent.sampling.max_new_tokens
        # The same agent in two roles, as in a random search.
        sampler = instance.sampler.with_attacker(instance.agents["reference"])
        per_tree = sampler.cache_bytes(PROMPTS, **SIZE) // len(PROMPTS)
        sampler.max_cache_bytes = num_held * per_tree
        trees.append(sample(sampler, count, num_parts=num_parts))
        counts.append(counted(instance))
    assert len(batches) > 1, "one process has several batches too"
    assert cuts[0].result == cuts[1].result
    largest = max(len(call.arguments[1]) for call in batches)
    assert largest * len(cuts[0].result) <= num_held
    alone, together = trees
    assert together.prompts == PROMPTS
    assert_equal(together, alone)
    assert together.seconds.keys() == alone.seconds.keys()
    assert counts[0] == counts[1]
    assert any(counts[0][-3:]) is (window == 16)


def test_the_scorer_is_called_once_by_this_process(
    sampler: TreeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, sampler.scorer, "rate")
    tree = sample(sampler, 2)
    assert [len(call.arguments[0]) for call in calls] == [2 * tree.num_nodes]


def test_neither_few_nodes_nor_a_large_model_are_divided(
    sampler: TreeSampler, cuts: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, parameters = "SMALLEST_PART", "SMALL_MODEL_PARAMETERS"
    for bound, value in ((nodes, 36 // 2), (nodes, 36 // 2 + 1), (nodes, 2), (parameters, 10)):
        monkeypatch.setattr(executor, bound, value)
        sample(sampler, 2)
    assert num_parts_of(cuts) == [2, 1, 2, 1]


def test_custom_models_and_agents_are_not_divided(tiny_scenario: Path, cuts: list[Call]) -> None:
    class OwnModel(HuggingFaceLanguageModel):
        pass

    class OwnAgent(ConversationAgent):
        pass

    by_model, by_agent, foreign = (build(tiny_scenario) for _ in range(3))
    model: Any = by_model.agents["target"].language_model
    own = OwnModel(model.module, model.tokenizer, device=model.device, trainable=False)
    by_model.agents["target"].language_model = own
    assert not own.can_be_forked
    by_agent.sampler.target = OwnAgent(**vars(by_agent.agents["target"]))
    # A backend that does not declare whether it may be forked.
    foreign.sampler.target.language_model = Samples(foreign.agents["target"].language_model)
    for instance in (by_model, by_agent, foreign):
        sample(instance.sampler, 2)
    assert num_parts_of(cuts) == [1, 1, 1]


def test_importance_sampling_counts_the_tokens_of_both_speakers(tiny_scenario: Path) -> None:
    counts = []
    for count in (1, 2):
        instance = build(tiny_scenario)
        sampler = sampler_of(attacker_at(1), instance.sampler, num_turns=2)
        with using_processes(count):
            sampler.sample(PROMPTS, tree_width=1, tree_depth=2, key=(0, "x"))
        counts.append(counted(instance))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("num_threads", "used"), [(None, 3), (1, 1)])
def test_a_run_of_small_models_gives_the_same_on_any_number_of_cores(
    tiny_scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: list[Call],
    num_threads: int | None,
    used: int,
) -> None:
    monkeypatch.setattr("nip_astra.utils.processor.num_cores", lambda: 3)
    short = (*FAST, "training.num_iterations=1", "training.num_episodes_per_experience=3")
    resolved = resolve_experiment(
        trainer="ast_dpo",
        scenario=str(tiny_scenario),
        overrides=[*short, "ast_chat.num_rollout_parts=3"],
    )
    trainer = prepare_experiment(resolved, progress=False, num_threads=num_threads).trainer
    trainer.train()
    assert max(num_parts_of(cuts)) == 3
    assert trainer.results["num_processes"] == used
    assert get_num_processes() == 1


# ---- actors of Ray


def played(sampler: TreeSampler, number: int = 0) -> RolloutTree:
    sampler.num_parts = 3
    return sampler.sample(PROMPTS, **SIZE, key=(0, "actors", number))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[ActorsHere]:
    return actors_here.install(monkeypatch)


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_any_number_of_actors_plays_the_same(
    instance: ScenarioInstance, here: list[ActorsHere], num_actors: int
) -> None:
    expected = played(instance.sampler)
    before = counted(instance)
    with using_actors(ActorOptions(num_actors)):
        assert_equal(played(instance.sampler), expected)
    assert counted(instance) == [2 * count for count in before]


def test_learnt_weights_reach_actors_once_a_rollout(
    instance: ScenarioInstance, sampler: TreeSampler, here: list[ActorsHere]
) -> None:
    with using_actors(ActorOptions(2)):
        played(sampler)
        num_sent = len(here[0].sent)
        played(sampler, 1)
        assert len(here[0].sent) == num_sent
        with torch.no_grad():
            for parameter in instance.agents["attacker"].language_model.parameters():
                parameter.data.mul_(1.5)
        learned = played(sampler, 2)
        again = played(sampler.with_attacker(sampler.reference), 2)
        assert len(here[0].sent) == num_sent + 1
    assert_equal(learned, played(sampler, 2))
    assert_equal(again, played(sampler.with_attacker(sampler.reference), 2))
    assert learned.probes != again.probes


def test_a_large_target_whose_matrices_were_freed_is_sent_whole(
    tiny_scenario: Path, here: list[ActorsHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SMALLEST_RELEASED", 1)
    sampler = build(tiny_scenario).sampler
    assert sampler.target.language_model._snapshot.is_released
    expected = played(sampler)
    with using_actors(ActorOptions(2)):
        assert_equal(played(sampler), expected)
        assert here[0].turn == 3


def test_captured_steps_stay_and_actors_capture_their_own(
    instance: ScenarioInstance, sampler: TreeSampler, here: list[ActorsHere]
) -> None:
    """As on a GPU, where every model has some."""
    capture = Recorder(is_counter=True)
    for agent in instance.agents.values():
        fix(agent.language_model, capture)
    expected = played(sampler)
    num_captured = capture.count
    assert num_captured
    with using_actors(ActorOptions(2)):
        assert_equal(played(sampler), expected)
        assert here[0].turn == 3
    assert capture.count == num_captured


@pytest.mark.parametrize(
    ("trainer", "device", "fact"),
    [("ast_dpo", "cuda", "actor_gpus is 0"), ("vanilla_ppo", "cpu", "num_actors=2")],
)
def test_actors_without_the_gpu_that_models_need_and_idle_actors_are_refused(
    trainer: str, device: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match=fact):
        prepare_experiment(resolve_experiment(trainer=trainer), num_actors=2, device=device)


@pytest.mark.usefixtures("here")
def test_a_fault_in_an_actor_keeps_its_type(sampler: TreeSampler) -> None:
    with using_actors(ActorOptions(1)), pytest.raises(ContextLengthError):
        sampler.sample(["good " * 500], **SIZE, key=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "more"), [((0, 1, 2, 4), ()), ((0, 2), ("ast_dpo.max_staleness=1",))]
)
def test_runs_on_any_number_of_actors_write_the_same_metrics(
    tiny_scenario: Path, tmp_path: Path, counts: tuple[int, ...], more: tuple[str, ...]
) -> None:
    pytest.importorskip("ray")
    overrides = (
        *("training.num_iterations=2", "training.eval_period=1", *more),
        *("training.num_episodes_per_experience=8", "ast_chat.num_rollout_parts=4"),
        "ast_chat.evaluation.num_episodes=4",
    )
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(tiny_scenario), overrides=overrides
    )
    written = []
    for num_actors in counts:
        cpus = {"actor_cpus": 0.25} if num_actors else {}
        run = run_in(tmp_path, resolved, f"by-{num_actors}", num_actors=num_actors, **cpus)
        results = RunDirectory.open(run).read_json("results.json")
        written.append((metrics_of(run), results["before"], results["after"]))
    assert all(rows == written[0] for rows in written)


@pytest.mark.slow
def test_actors_of_ray_play_the_same_even_if_one_is_killed(instance: ScenarioInstance) -> None:
    pytest.importorskip("ray")
    sampler = instance.sampler
    expected = played(sampler)
    for num_actors in (1, 2):
        with using_actors(ActorOptions(num_actors, num_cpus=0.5)):
            assert_equal(played(sampler), expected)
            actors = get_actors()
            assert isinstance(actors, Actors)
            killed = actors.call([os.getpid], [])[0]
            marker = Path(os.environ.get("TMPDIR", "/tmp")) / f"killed-{killed}"
            results = actors.call([partial(_end_once, marker, number) for number in range(4)], [])
            assert results == [0, 1, 2, 3]
            assert marker.exists()
            marker.unlink()
            # Its replacement has the models again, with what they have learnt since.
            with torch.no_grad():
                for parameter in instance.agents["attacker"].language_model.parameters():
                    parameter.mul_(1.1)
            with using_actors(ActorOptions(0)):
                expected = played(sampler)
            assert_equal(played(sampler), expected)


def _end_once(marker: Path, number: int) -> int:
    if number == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number
