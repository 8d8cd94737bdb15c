"""Minibatches hold each frame once, and those of whole episodes cut none."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from nip_astra.trainers.protocol.learning import MinibatchBuffer, episode_numbers


def test_episodes_are_numbered_from_end_to_end_and_apart_in_each_environment() -> None:
    done = torch.tensor([[False, True, False, False], [True, True, False, True]])
    numbers = episode_numbers(done)
    assert numbers.tolist() == [[0, 0, 1, 1], [4, 5, 6, 6]]


def frames(lengths: list[int]) -> TensorDict:
    episode = torch.repeat_interleave(torch.arange(len(lengths)) * 10, torch.tensor(lengths))
    content = {"episode": episode, "frame": torch.arange(len(episode))}
    mixed = torch.randperm(len(episode), generator=torch.Generator().manual_seed(0))
    return TensorDict(content, batch_size=[len(episode)])[mixed]


def test_an_epoch_holds_each_frame_once_and_each_episode_in_one_minibatch() -> None:
    lengths = [3, 1, 4, 1, 5, 2, 6]
    buffer = MinibatchBuffer(6, "key", episode_key="episode")
    buffer.extend(frames(lengths))
    epochs = [list(buffer) for _ in range(5)]
    for minibatches in epochs:
        seen = torch.cat([minibatch["frame"] for minibatch in minibatches])
        assert sorted(seen.tolist()) == list(range(22))
        episodes = [set(minibatch["episode"].tolist()) for minibatch in minibatches]
        assert sum(len(one) for one in episodes) == len(lengths)
        assert all(0 < len(minibatch) < 6 + 6 for minibatch in minibatches)
    assert len({tuple(epoch[0]["frame"].tolist()) for epoch in epochs}) > 1


def test_a_minibatch_as_large_as_the_batch_holds_all() -> None:
    buffer = MinibatchBuffer(22, "key", episode_key="episode")
    buffer.extend(frames([3, 1, 4, 1, 5, 2, 6]))
    assert [len(minibatch) for minibatch in buffer] == [22]


def test_episodes_longer_than_a_minibatch_stay_whole() -> None:
    buffer = MinibatchBuffer(2, "key", episode_key="episode")
    buffer.extend(frames([5, 7]))
    assert sorted(len(minibatch) for minibatch in buffer) == [5, 7]


def test_the_order_depends_on_the_key_and_the_epoch_and_survives_a_restart() -> None:
    def order(buffer: MinibatchBuffer) -> list[int]:
        return torch.cat([minibatch["frame"] for minibatch in buffer]).tolist()

    def filled(key: str) -> MinibatchBuffer:
        buffer = MinibatchBuffer(6, key, episode_key="episode")
        buffer.extend(frames([3, 1, 4, 1, 5, 2, 6]))
        return buffer

    first, again, other = filled("a"), filled("a"), filled("b")
    one = order(first)
    assert one == order(again) != order(other)
    second = order(first)
    restarted = filled("a")
    restarted.load_state_dict({"num_epochs": 1})
    assert order(restarted) == second != one
