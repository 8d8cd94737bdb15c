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
    assert ended.is_right_N.tolist() == [1.0, 0.0, 0.0]
    assert ended.is_undecided_N.tolist() == [0.0, 1.0, 0.0]


def test_the_first_episode_of_each_environment_is_distinguished() -> None:
    counts_ET = first_episodes(example())
    assert counts_ET.tolist() == [[True, True, False], [True, False, False]]
    ended = EpisodeLedger().ended(example(), counts_ET)
    assert ended.num_rounds_N.tolist() == [2.0, 1.0]


def test_an_episode_goes_on_into_the_next_batch() -> None:
    ledger = EpisodeLedger()
    ledger.ended(example())
    resumed = EpisodeLedger()
    resumed.load_state(ledger.state(), torch.device("cpu"))
    following = batch_of(
        [[1.0], [1.0]],
        [[False], [True]],
        [[2], [1]],
        y_E=[1, 1],
        datapoint_ET=[[3], [9]],
    )
    for one in (ledger, resumed):
        ended = one.ended(following)
        assert ended.reward_NA.tolist() == [[49.0, 98.0]]
        assert ended.num_rounds_N.tolist() == [3.0]


def test_the_worst_is_the_smallest_mean_of_a_datapoint() -> None:
    found = read(episode_statistics(EpisodeLedger().ended(example()), NAMES))
    assert found["mean_accuracy"] == pytest.approx(1 / 3)
    assert found["std_accuracy"] == pytest.approx(math.sqrt(2) / 3)
    assert found["worst_datapoint_accuracy"] == 0.0
    assert found["share_undecided"] == pytest.approx(1 / 3)
    assert found["mean_episode_length"] == pytest.approx(4 / 3)
    assert found["prover/mean_episode_reward"] == 5.0
    assert found["prover/worst_episode_reward"] == 4.0, "datapoint 7 has (3 + 8) / 2"
    assert found["verifier/worst_episode_reward"] == 8.0


def test_without_finished_episodes_there_are_no_episode_metrics() -> None:
    batch = batch_of([[1.0]], [[False]], [[2]], y_E=[0], datapoint_ET=[[0]])
    assert episode_statistics(EpisodeLedger().ended(batch), NAMES) == {}


def test_the_critics_variance_is_the_unexplained_variance() -> None:
    batch = example()
    target = torch.tensor([[0.0, 2.0, 4.0], [0.0, 2.0, 4.0]])[..., None, None].expand(2, 3, 2, 1)
    batch["agents", "value_target"] = target
    batch["agents", "advantage"] = target
    value = torch.stack([target[..., 0, 0] - 5, torch.ones(2, 3)], dim=-1)[..., None]
    batch["agents", "value"] = value
    found = read(frame_statistics(batch, NAMES))
    assert found["prover/residual_critic_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found["verifier/residual_critic_variance"] == pytest.approx(1.0)
    assert found["prover/mean_value"] == pytest.approx(-3.0)
    assert found["prover/mean_step_reward"] == pytest.approx(63 / 6)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    found = read({"a/x": torch.tensor(1.5), "b": torch.tensor(math.nan), "c": torch.tensor(3)})
    assert found == {"a/x": 1.5, "c": 3.0}
    assert read({}) == {}


def test_metrics_of_frames_leave_out_frames_without_a_value() -> None:
    sums = MetricSums()
    sums.add({"a/x": torch.tensor([1.0, math.nan]), "loss": torch.tensor(1.0)})
    sums.add({"a/x": torch.tensor([3.0]), "loss": torch.tensor(2.0)})
    assert read(sums.result()) == {"a/mean_x": 2.0, "a/std_x": 1.0, "loss": 1.5}


def test_minibatches_without_metrics_of_an_agent_do_not_count() -> None:
    sums = MetricSums()
    for ess, kl in ((1.0, math.nan), (math.nan, math.nan), (0.5, math.nan)):
        sums.add({"a/ess": torch.tensor(ess), "a/kl": torch.tensor(kl)})
    found = sums.result()
    assert read(found) == {"a/ess": 0.75}
    found |= {"b/ess": torch.tensor(0.25), "b/kl": torch.tensor(2.0)}
    assert read(mean_over_agents(found, ("a", "b"), ("ess", "kl"))) == {"ess": 0.5, "kl": 2.0}


@pytest.mark.usefixtures("toy_protocol")
def test_entropies_are_shares_of_the_largest_where_an_agent_has_a_choice() -> None:
    trainer = toy_trainer()
    for name in NAMES:
        head = trainer.agents[name].policy_head
        for weight in head.parameters():
            weight.data.zero_()
    trainer.agents["prover"].policy_head.message.bias.data[0] = 100.0
    batch = trainer.collect()
    found = policy_figures(batch, NAMES)
    turns_ET: Tensor = batch["active_mask"][..., 0, 0].flatten()
    assert torch.equal(found["prover/message_entropy"].isfinite(), turns_ET)
    assert found["prover/message_entropy"][turns_ET].abs().max() < 1e-6
    assert found["prover/max_message_prob"][turns_ET].min() > 0.999
    verifier = found["verifier/message_entropy"]
    torch.testing.assert_close(verifier[verifier.isfinite()], torch.ones(int((~turns_ET).sum())))
    decisions = found["verifier/decision_entropy"]
    torch.testing.assert_close(decisions[decisions.isfinite()], torch.ones(int((~turns_ET).sum())))
    assert not bool(found["prover/decision_entropy"].isfinite().any())


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
    done_ET = batch["next", "done"].squeeze(-1)
    assert (batch["round"][:, 0] > 0).any(), "some episodes began before the batch"
    for environment, first, last in spans:
        rounds = batch["round"][environment, first : last + 1].tolist()
        assert rounds == list(range(len(rounds)))
        assert done_ET[environment, last]
        assert not done_ET[environment, first:last].any()
    begun_before = sum(
        bool(batch["round"][number, 0] > 0 and done_ET[number].any())
        for number in range(len(batch))
    )
    assert len(spans) == int(done_ET.sum()) - begun_before
    assert len(rows_of(game, batch)) == len(spans)


def test_a_row_records_the_played_episode() -> None:
    game, batch = play("mnip", include_linear_message_space=True)
    assert game.protocol_handler is not None
    names = game.protocol_handler.agent_names
    for row, span in zip(rows_of(game, batch), whole_episodes(batch), strict=True):
        frames = batch[span.environment, span.first : span.last + 1]
        rewards = frames["next", "agents", "reward"].sum(dim=0).squeeze(-1)
        assert row["rewards"] == pytest.approx(dict(zip(names, rewards.tolist(), strict=True)))
        assert row["label"] == int(frames["y"][0])
        assert row["decision"] == int(frames["next", "decision"][-1])
        assert row["is_right"] is (row["label"] == row["decision"])
        assert row["datapoint"] == {"id": int(frames["datapoint_id"][0])}
        assert [one["round"] for one in row["rounds"]] == frames["round"].tolist()
        for one, frame in zip(row["rounds"], frames.unbind(0), strict=True):
            check_round(one, frame, game)


def check_round(one: dict[str, Any], frame: TensorDict, game: ScenarioInstance) -> None:
    assert game.protocol_handler is not None
    protocol = game.protocol_handler
    moves = {move["agent"]: move for move in one["moves"]}
    for number, name in enumerate(protocol.agent_names):
        active_C, decides = frame["active_mask"][number], bool(frame["can_decide"][number])
        assert (name in moves) is (decides or bool(active_C.any()))
        if name not in moves:
            continue
        move, agents = moves[name], frame["agents"]
        assert move["decision"] == (int(agents["decision"][number]) if decides else None)
        assert move["logprob"] == pytest.approx(float(agents["logprob"][number]), abs=1e-5)
        for said, kind in (("messages", "message"), ("linear", "linear_message")):
            assert move[said] == {
                channel: agents[kind][number, place].tolist()
                for place, channel in enumerate(protocol.message_channel_names)
                if active_C[place]
            }


def test_rows_are_plain_values() -> None:
    game, batch = play(include_linear_message_space=True)
    rows = rows_of(game, batch)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_as_many_right_as_other_episodes_are_drawn() -> None:
    game, batch = play(num_steps=40)
    known = Counter(row["is_right"] for row in rows_of(game, batch))
    assert min(known.values()) > 5
    for asked, right in ((10, 5), (7, 4), (1, 1)):
        rows = rows_of(game, batch, asked)
        assert len(rows) == asked
        assert sum(row["is_right"] for row in rows) == right


def test_where_one_kind_is_short_the_other_fills_up() -> None:
    game, batch = play(num_steps=40)
    for is_right in (True, False):
        changed = batch.clone()
        label_ET = changed["y"].squeeze(-1)
        changed["next", "decision"] = label_ET if is_right else 1 - label_ET
        rows = rows_of(game, changed, 6)
        assert [row["is_right"] for row in rows] == [is_right] * 6


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


def test_a_batch_without_a_whole_episode_gives_no_row() -> None:
    game, batch = play()
    batch["round"] += 1
    assert rows_of(game, batch) == []


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
    told = kind.describe_datapoint(kind.Parameters(), row)
    assert told == {
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
    told = kind.describe_datapoint(kind.Parameters(), row)
    pixel = [[level] * 3 if num_channels == 3 else level for level in (0, 128, 255, 255)]
    assert told == {
        "id": 7, "kind": "image", "latent": [2, 1], "pixels": [pixel[:2], pixel[2:]] * 2,
    }  # fmt: skip
