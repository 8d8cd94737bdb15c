"""Actors of Ray play what one process would, whatever their number, and when they die."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from nip_astra.errors import ConfigurationError, ContextLengthError
from nip_astra.language_models import huggingface
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment, run_experiment
from nip_astra.samplers import executor
from nip_astra.samplers.trees import TreeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.utils.actors import ActorOptions, Actors, get_actors, using_actors
from tests.kit import actors_here
from tests.kit.actors_here import ActorsHere
from tests.language_models.tree_engine.test_decode_graphs import Recorder, fix
from tests.samplers.test_executor import counted
from tests.samplers.test_trees import build

PROMPTS = ["hello", "good day", "the cat sat", "hello there", "good", "a dog"]


@pytest.fixture
def instance(tiny_scenario: Path, monkeypatch: pytest.MonkeyPatch) -> ScenarioInstance:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    return build(tiny_scenario)


def sample(sampler: TreeSampler, number: int = 0) -> RolloutTree:
    sampler.num_parts = 3
    return sampler.sample(PROMPTS, tree_width=2, tree_depth=2, key=(0, "actors", number))


def assert_equal(one: RolloutTree, other: RolloutTree) -> None:
    for name in one.nodes.keys():  # noqa: SIM118 - iteration gives rows
        assert torch.equal(one.nodes[name], other.nodes[name]), name
    assert (one.probes, one.responses, one.contexts) == (
        other.probes,
        other.responses,
        other.contexts,
    )
    assert one.num_unique_tokens == other.num_unique_tokens


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[ActorsHere]:
    """Actors are of this process."""
    return actors_here.install(monkeypatch)


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_any_number_of_actors_plays_the_same(
    instance: ScenarioInstance, here: list[ActorsHere], num_actors: int
) -> None:
    sampler = instance.sampler
    expected = sample(sampler)
    before = counted(instance)
    with using_actors(ActorOptions(num_actors)):
        played = sample(sampler)
    assert_equal(played, expected)
    after = counted(instance)
    assert [new - old for new, old in zip(after, before, strict=True)] == before


def test_what_was_learnt_reaches_actors_once_a_rollout(
    instance: ScenarioInstance, here: list[ActorsHere]
) -> None:
    sampler = instance.sampler
    with using_actors(ActorOptions(2)):
        sample(sampler)
        num_sent = len(here[0].sent)
        sample(sampler, 1)
        assert len(here[0].sent) == num_sent
        with torch.no_grad():
            for parameter in instance.agents["attacker"].language_model.parameters():
                parameter.data.mul_(1.5)
        played = sample(sampler, 2)
        assert len(here[0].sent) == num_sent + 1
        again = sample(sampler.with_attacker(sampler.reference), 2)
        assert len(here[0].sent) == num_sent + 1
    assert_equal(played, sample(sampler, 2))
    assert_equal(again, sample(sampler.with_attacker(sampler.reference), 2))
    assert played.probes != again.probes


def test_a_large_target_whose_matrices_were_freed_is_sent_whole(
    tiny_scenario: Path, here: list[ActorsHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    monkeypatch.setattr(huggingface, "SMALLEST_RELEASED", 1)
    sampler = build(tiny_scenario).sampler
    assert sampler.target.language_model._snapshot.is_released
    expected = sample(sampler)
    with using_actors(ActorOptions(2)):
        assert_equal(sample(sampler), expected)
        assert here[0].turn == 3


def test_captured_steps_stay_and_actors_capture_their_own(
    instance: ScenarioInstance, here: list[ActorsHere]
) -> None:
    """As on a GPU, where every model has some."""
    sampler = instance.sampler
    capture = Recorder(is_counter=True)
    for agent in instance.agents.values():
        fix(agent.language_model, capture)
    expected = sample(sampler)
    num_captured = capture.count
    assert num_captured
    with using_actors(ActorOptions(2)):
        assert_equal(sample(sampler), expected)
        assert here[0].turn == 3
    assert capture.count == num_captured


def test_actors_without_a_gpu_are_refused_for_models_that_are_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    resolved = resolve_experiment(trainer="ast_dpo")
    with pytest.raises(ConfigurationError, match=r"actor_gpus is 0"):
        prepare_experiment(resolved, num_actors=2, device="cuda")


def test_a_fault_in_an_actor_is_raised_as_what_it_is(
    instance: ScenarioInstance, here: list[ActorsHere]
) -> None:
    sampler = instance.sampler
    with using_actors(ActorOptions(1)):
        sample(sampler)
        with pytest.raises(ContextLengthError):
            sampler.sample(["good " * 500], tree_width=2, tree_depth=2, key=(0,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "more"), [((0, 1, 2, 4), ()), ((0, 2), ("ast_dpo.max_staleness=1",))]
)
def test_runs_on_any_number_of_actors_write_the_same_metrics(
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, ...],
    more: tuple[str, ...],
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    overrides = [
        "training.num_iterations=2",
        "training.eval_period=1",
        "training.num_episodes_per_experience=8",
        "ast_chat.num_rollout_parts=4",
        "ast_chat.evaluation.num_episodes=4",
        *more,
    ]
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=str(tiny_scenario), overrides=overrides
    )
    written = {}
    for num_actors in counts:
        settings = {"num_actors": num_actors, "progress": False}
        settings |= {"actor_cpus": 0.25} if num_actors else {}
        run = run_experiment(
            resolved, runs_dir=str(tmp_path), run_id=f"actors-{num_actors}", **settings
        )
        written[num_actors] = (
            (run.run_directory.path / "metrics.jsonl").read_bytes(),
            run.results["before"],
            run.results["after"],
        )
    assert all(one == written[0] for one in written.values())


def test_actors_that_would_be_idle_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_actors=2"):
        prepare_experiment(resolve_experiment(trainer="vanilla_ppo"), num_actors=2)


@pytest.mark.slow
def test_actors_of_ray_play_the_same_though_one_is_killed(instance: ScenarioInstance) -> None:
    pytest.importorskip("ray")
    sampler = instance.sampler
    expected = sample(sampler)
    for num_actors in (1, 2):
        with using_actors(ActorOptions(num_actors, num_cpus=0.5)):
            assert_equal(sample(sampler), expected)
            actors = get_actors()
            assert isinstance(actors, Actors)
            killed = actors.call([os.getpid], [])[0]
            marker = Path(os.environ.get("TMPDIR", "/tmp")) / f"killed-{killed}"
            results = actors.call([partial(_end_once, marker, number) for number in range(4)], [])
            assert results == [0, 1, 2, 3]
            assert marker.exists()
            marker.unlink()
            # What replaced it has the models again, as they have learnt meanwhile.
            with torch.no_grad():
                for parameter in instance.agents["attacker"].language_model.parameters():
                    parameter.mul_(1.1)
            expected = sample_alone(sampler)
            assert_equal(sample(sampler), expected)


def sample_alone(sampler: TreeSampler) -> RolloutTree:
    with using_actors(ActorOptions(0)):
        return sample(sampler)


def _end_once(marker: Path, number: int) -> int:
    if number == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number
