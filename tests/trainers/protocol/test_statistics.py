"""Statistics of play by hand.

Shapes: E environments, T rounds, A agents.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
from nip_astra.scenarios.image_classification import ImageClassificationScenario
from nip_astra.trainers.protocol.statistics import (
    NUM_TEST_EPISODES,
    EpisodeLedger,
    MetricSums,
    episode_rows,
    episode_statistics,
    first_episodes,
    frame_statistics,
    mean_over_agents,
    num_samples,
    policy_figures,
    read,
    whole_episodes,
)
from tests.kit.protocol_games import build_game
from tests.kit.toy_protocol_scenario import toy_trainer

NAMES = ("prover", "verifier")


def batch_of(
    reward_ET: list[list[float]],
    done_ET: list[list[bool]],
    decision_ET: list[list[int]],
    *,
    y_E: list[int],
    datapoint_ET: list[list[int]],
) -> TensorDict:
    """A batch in which the second agent gets twice the reward of the first."""
    reward = torch.tensor(reward_ET)
    size = reward.shape
    reward_ETA1 = torch.stack([reward, 2 * reward], dim=-1)[..., None]
    done = torch.tensor(done_ET)[..., None]
    following = {
        "agents": TensorDict({"reward": reward_ETA1}, batch_size=size),
        "done": done,
        "terminated": done,
        "decision": torch.tensor(decision_ET),
    }
    content = {
        "y": torch.tensor(y_E)[:, None, None].expand(*size, 1),
        "datapoint_id": torch.tensor(datapoint_ET),
        "agents": TensorDict({}, batch_size=size),
        "next": TensorDict(following, batch_size=size),
    }
    return TensorDict(content, batch_size=size)


def example() -> TensorDict:
    # The first environment ends an episode on datapoint 7 correctly, and another on 8 without a
    # decision; the second ends an episode on 7 incorrectly, and continues.
    return batch_of(
        [[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]],
        [[False, True, True], [True, False, False]],
        [[2, 1, 2], [0, 2, 2]],
        y_E=[1, 1],
        datapoint_ET=[[7, 7, 8], [7, 9, 9]],
    )


def test_episodes_are_counted_from_their_first_round_to_their_last() -> None:
    ended = EpisodeLedger().ended(example())
    assert ended.datapoint_N.tolist() == [7, 8, 7]
    assert ended.reward_NA.tolist() == [[3.0, 6.0], [4.0, 8.0], [8.0, 16.0]]
    assert ended.num_rounds_N.tolist() == [2.0, 1.0, 1.0]
    assert ended.is_correct_N.tolist() == [1.0, 0.0, 0.0]
    assert ended.is_undecided_N.tolist() == [0.0, 1.0, 0.0]
    counts_ET = first_episodes(example())
    assert counts_ET.tolist() == [[True, True, False], [True, False, False]]
    assert EpisodeLedger().ended(example(), counts_ET).num_rounds_N.tolist() == [2.0, 1.0]
    unfinished = batch_of([[1.0]], [[False]], [[2]], y_E=[0], datapoint_ET=[[0]])
    assert episode_statistics(EpisodeLedger().ended(unfinished), NAMES) == {}


def test_an_episode_goes_on_into_the_next_batch() -> None:
    ledger = EpisodeLedger()
    ledger.ended(example())
    resumed = EpisodeLedger()
    resumed.load_state(ledger.state(), torch.device("cpu"))
    following = batch_of(
        [[1.0], [1.0]], [[False], [True]], [[2], [1]], y_E=[1, 1], datapoint_ET=[[3], [9]]
    )
    for continued in (ledger, resumed):
        ended = continued.ended(following)
        assert ended.reward_NA.tolist() == [[49.0, 98.0]]
        assert ended.num_rounds_N.tolist() == [3.0]


def test_the_worst_is_the_smallest_mean_of_a_datapoint() -> None:
    statistics = read(episode_statistics(EpisodeLedger().ended(example()), NAMES))
    expected = {"mean_accuracy": 1 / 3, "std_accuracy": math.sqrt(2) / 3, "share_undecided": 1 / 3}
    expected |= {"mean_episode_length": 4 / 3, "worst_datapoint_accuracy": 0.0}
    # Datapoint 7 has (3 + 8) / 2.
    expected |= {"prover/mean_episode_reward": 5.0, "prover/worst_episode_reward": 4.0}
    expected |= {"verifier/worst_episode_reward": 8.0}
    assert {name: statistics[name] for name in expected} == pytest.approx(expected)


def test_the_critics_variance_is_the_unexplained_variance() -> None:
    batch = example()
    target = torch.tensor([[0.0, 2.0, 4.0], [0.0, 2.0, 4.0]])[..., None, None].expand(2, 3, 2, 1)
    batch["agents", "value_target"] = target
    batch["agents", "advantage"] = target
    value = torch.stack([target[..., 0, 0] - 5, torch.ones(2, 3)], dim=-1)[..., None]
    batch["agents", "value"] = value
    statistics = read(frame_statistics(batch, NAMES))
    assert statistics["prover/residual_critic_variance"] == pytest.approx(0.0, abs=1e-6)
    assert statistics["verifier/residual_critic_variance"] == pytest.approx(1.0)
    assert statistics["prover/mean_value"] == pytest.approx(-3.0)
    assert statistics["prover/mean_step_reward"] == pytest.approx(63 / 6)


def test_metrics_leave_out_frames_minibatches_and_agents_without_a_value() -> None:
    sums = MetricSums()
    for frames, loss, ess in (([1.0, math.nan], 1.0, math.nan), ([3.0], 2.0, 0.5)):
        values = {"a/x": torch.tensor(frames), "a/kl": torch.tensor(math.nan)}
        sums.add(values | {"loss": torch.tensor(loss), "a/ess": torch.tensor(ess)})
    metrics = sums.result()
    assert read(metrics) == {"a/mean_x": 2.0, "a/std_x": 1.0, "loss": 1.5, "a/ess": 0.5}
    metrics |= {"b/ess": torch.tensor(0.25), "b/kl": torch.tensor(2.0)}
    assert read(mean_over_agents(metrics, ("a", "b"), ("ess", "kl"))) == {"ess": 0.375, "kl": 2.0}
    assert read({}) == {}


@pytest.mark.usefixtures("toy_protocol")
def test_entropies_are_shares_of_the_largest_where_an_agent_has_a_choice() -> None:
    trainer = toy_trainer()
    for name in NAMES:
        head = trainer.agents[name].policy_head
        for weight in head.parameters():
            weight.data.zero_()
    trainer.agents["prover"].policy_head.message.bias.data[0] = 100.0
    batch = trainer.collect()
    figures = policy_figures(batch, NAMES)
    turns_F: Tensor = batch["active_mask"][..., 0, 0].flatten()
    assert torch.equal(figures["prover/message_entropy"].isfinite(), turns_F)
    assert figures["prover/message_entropy"][turns_F].abs().max() < 1e-6
    assert figures["prover/max_message_prob"][turns_F].min() > 0.999
    for name in ("verifier/message_entropy", "verifier/decision_entropy"):
        of_turns = figures[name][figures[name].isfinite()]
        torch.testing.assert_close(of_turns, torch.ones(int((~turns_F).sum())))
    assert not bool(figures["prover/decision_entropy"].isfinite().any())


# ---- rows of sample episodes


def play(
    protocol: str = "nip", num_steps: int = 12, **scenario: Any
) -> tuple[ScenarioInstance, TensorDict]:
    game = build_game(protocol, scenario)
    assert game.train_environment is not None
    assert game.combined_agents is not None
    sampler = EpisodeSampler(game.train_environment, game.combined_agents, key=(0,))
    sampler.collect(3)
    return game, sampler.collect(num_steps)


def rows_of(
    game: ScenarioInstance, batch: TensorDict, num_episodes: int = 10_000, **options: int
) -> list[dict[str, Any]]:
    columns, rows = episode_rows(
        batch, game, num_episodes=num_episodes, **({"step": 3, "seed": 0} | options)
    )
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_episodes_begin_and_end_in_the_batch() -> None:
    game, batch = play()
    spans = whole_episodes(batch)
    done_ET, begun_E = batch["next", "done"].squeeze(-1), batch["round"][:, 0] > 0
    for environment, first, last in spans:
        rounds = batch["round"][environment, first : last + 1].tolist()
        assert rounds == list(range(len(rounds)))
        assert done_ET[environment, last]
        assert not done_ET[environment, first:last].any()
    assert begun_E.any(), "some episodes began before the batch"
    num_begun_before = int((begun_E & done_ET.any(dim=1)).sum())
    assert len(rows_of(game, batch)) == len(spans) == int(done_ET.sum()) - num_begun_before
    batch["round"] += 1
    assert rows_of(game, batch) == []


def test_a_row_records_the_played_episode_in_plain_values() -> None:
    game, batch = play("mnip", include_linear_message_space=True)
    assert game.protocol_handler is not None
    protocol, rows = game.protocol_handler, rows_of(game, batch)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row, span in zip(rows, whole_episodes(batch), strict=True):
        frames = batch[span.environment, span.first : span.last + 1]
        rewards = frames["next", "agents", "reward"].sum(dim=0).squeeze(-1).tolist()
        assert row["rewards"] == pytest.approx(
            dict(zip(protocol.agent_names, rewards, strict=True))
        )
        assert row["label"] == int(frames["y"][0])
        assert row["decision"] == int(frames["next", "decision"][-1])
        assert row["is_correct"] is (row["label"] == row["decision"])
        assert row["datapoint"] == {"id": int(frames["datapoint_id"][0])}
        assert [played["round"] for played in row["rounds"]] == frames["round"].tolist()
        for played, frame in zip(row["rounds"], frames.unbind(0), strict=True):
            moves = [expected_move(frame, name, protocol) for name in protocol.agent_names]
            assert played["moves"] == [move for move in moves if move]


def expected_move(frame: TensorDict, name: str, protocol: ProtocolHandler) -> dict[str, Any]:
    """An agent's move in a round; empty if it was inactive."""
    number = protocol.agent_names.index(name)
    active_C, decides = frame["active_mask"][number], bool(frame["can_decide"][number])
    if not decides and not active_C.any():
        return {}

    def messages(kind: str) -> dict[str, list[int]]:
        of_channels = zip(
            protocol.message_channel_names, frame["agents", kind][number], strict=True
        )
        return {c: m.tolist() for (c, m), sent in zip(of_channels, active_C, strict=True) if sent}

    return {
        "agent": name,
        "decision": int(frame["agents", "decision"][number]) if decides else None,
        "messages": messages("message"),
        "linear": messages("linear_message"),
        "logprob": pytest.approx(float(frame["agents", "logprob"][number]), abs=1e-5),
    }


def test_as_many_right_as_other_episodes_are_drawn_if_there_are_as_many() -> None:
    game, batch = play(num_steps=40)
    assert min(Counter(row["is_correct"] for row in rows_of(game, batch)).values()) > 5
    for num_episodes, num_correct in ((10, 5), (7, 4), (1, 1)):
        rows = rows_of(game, batch, num_episodes)
        assert len(rows) == num_episodes
        assert sum(row["is_correct"] for row in rows) == num_correct
    label_ET = batch["y"].squeeze(-1)
    for is_correct, decision_ET in ((True, label_ET), (False, 1 - label_ET)):
        batch["next", "decision"] = decision_ET
        assert [row["is_correct"] for row in rows_of(game, batch, 6)] == [is_correct] * 6


def test_the_choice_depends_on_seed_and_step_alone() -> None:
    game, batch = play(num_steps=40)

    def chosen(**options: int) -> list[int]:
        return [row["episode"] for row in rows_of(game, batch, 6, **options)]

    state = torch.get_rng_state()
    first = chosen()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert chosen() == first
    assert chosen(step=4) != first
    assert chosen(seed=1) != first
    assert len(set(first)) == 6


def test_tests_record_more_than_training_unless_disabled() -> None:
    assert num_samples("train", 2) == 2
    assert num_samples("evaluation", 2) == NUM_TEST_EPISODES
    assert num_samples("evaluation", NUM_TEST_EPISODES + 1) == NUM_TEST_EPISODES + 1
    assert num_samples("evaluation", 0) == 0


def test_a_pair_of_graphs_is_recorded_by_its_edges() -> None:
    adjacency = torch.zeros(2, 4, 4)
    for graph, start, end in ((0, 0, 1), (0, 1, 2), (1, 0, 3)):
        adjacency[graph, start, end] = adjacency[graph, end, start] = 1.0
    row = TensorDict(
        {
            "adjacency": adjacency,
            "node_mask": torch.tensor([[True, True, True, False], [True, True, True, True]]),
            "wl_score": torch.tensor(2),
            "datapoint_id": torch.tensor(7),
        }
    )
    kind = GraphIsomorphismScenario
    assert kind.describe_datapoint(kind.Parameters(), row) == {
        "id": 7, "kind": "graphs", "nodes_per_graph": 4, "wl_score": 2,
        "graphs": [
            {"num_nodes": 3, "edges": [[0, 1], [1, 2]]}, {"num_nodes": 4, "edges": [[0, 3]]},
        ],
        "note": "refinement distinguishes the graphs in round 2",
    }  # fmt: skip
    for score, note in ((-1, ""), (6, "5 rounds of refinement do not distinguish the graphs")):
        row["wl_score"] = torch.tensor(score)
        assert kind.describe_datapoint(kind.Parameters(), row)["note"] == note


@pytest.mark.parametrize("num_channels", [1, 3])
def test_an_image_is_recorded_by_its_pixels(num_channels: int) -> None:
    image = torch.tensor([[0.0, 0.5], [1.0, 2.0]]).expand(num_channels, 2, 2).repeat(1, 2, 1)
    row = TensorDict({"image": image, "datapoint_id": torch.tensor(7)})
    kind = ImageClassificationScenario
    pixel = [[level] * 3 if num_channels == 3 else level for level in (0, 128, 255, 255)]
    assert kind.describe_datapoint(kind.Parameters(), row) == {
        "id": 7, "kind": "image", "latent": [2, 1], "pixels": [pixel[:2], pixel[2:]] * 2,
    }  # fmt: skip
