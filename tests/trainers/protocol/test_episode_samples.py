"""Rows of sample episodes are whole episodes, played as the batch says, in plain values."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
from nip_astra.scenarios.image_classification import ImageClassificationScenario
from nip_astra.trainers.protocol.statistics import (
    NUM_TEST_EPISODES,
    episode_rows,
    num_samples,
    whole_episodes,
)
from tests.kit.protocol_games import build_game


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


def test_a_row_tells_what_was_played() -> None:
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


def test_tests_record_more_than_training_unless_nothing_is_asked_for() -> None:
    assert num_samples("train", 2) == 2
    assert num_samples("evaluation", 2) == NUM_TEST_EPISODES
    assert num_samples("evaluation", NUM_TEST_EPISODES + 1) == NUM_TEST_EPISODES + 1
    assert num_samples("evaluation", 0) == 0


def test_a_pair_of_graphs_is_told_by_its_edges() -> None:
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
def test_an_image_is_told_by_its_pixels(num_channels: int) -> None:
    image = torch.tensor([[0.0, 0.5], [1.0, 2.0]]).expand(num_channels, 2, 2).repeat(1, 2, 1)
    row = TensorDict({"image": image, "datapoint_id": torch.tensor(7)})
    kind = ImageClassificationScenario
    told = kind.describe_datapoint(kind.Parameters(), row)
    pixel = [[level] * 3 if num_channels == 3 else level for level in (0, 128, 255, 255)]
    assert told == {
        "id": 7, "kind": "image", "latent": [2, 1], "pixels": [pixel[:2], pixel[2:]] * 2,
    }  # fmt: skip
