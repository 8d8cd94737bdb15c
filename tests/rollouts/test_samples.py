"""Samples of a batch are dicts, and batches of them are those of plain dicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import Sample, collate, samples_of
from nip_astra.rollouts.trajectory import Trajectory


@pytest.fixture
def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    trajectories = [
        Trajectory(
            torch.randint(9, (own + 4,), generator=generator),
            [0] * first + [1] * own + [0] * (4 - first),
            logprobs=torch.rand(own + 4, generator=generator),
            reward=float(own),
            group_id=own % 2,
            advantage=0.5 * own,
        )
        for first, own in ((1, 3), (4, 1), (0, 2), (2, 5), (3, 0))
    ]
    return samples_of(Batch.from_trajectories(trajectories))


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 1], [1, 1, 0]])
def test_a_batch_is_that_of_plain_dicts(samples: list[Sample], rows: list[int]) -> None:
    plain = [dict(sample) for sample in samples]
    assert all(type(one) is dict for one in plain)
    whole, one_by_one = collate([samples[i] for i in rows]), collate([plain[i] for i in rows])
    assert list(whole.keys()) == list(one_by_one.keys())
    for name, value in whole.items():
        assert value.dtype == one_by_one[name].dtype
        assert torch.equal(value, one_by_one[name])


def test_changes_of_a_sample_reach_its_batch(samples: list[Sample]) -> None:
    samples[0]["advantages"] = samples[0]["advantages"] + 1
    samples[1]["response"][0] = 8
    batch = collate(samples[:2])
    assert batch["advantages"][0, 0] == 2.5
    assert batch["response"][1, 0] == 8
    for sample in samples:
        sample["own"] = torch.tensor(1.0)
    assert collate(samples)["own"].sum() == 4


def test_a_sample_is_a_dict(samples: list[Sample]) -> None:
    names = list(dict(samples[0]))
    assert names[:4] == ["context", "response", "is_trained", "episode"]
    assert list(samples[1] | {"a": names}) == [*names, "a"]
    assert list({**samples[2]}) == list(samples[3]) == names
    for made in (copy.deepcopy(samples[0]), pickle.loads(pickle.dumps(samples[0]))):
        assert type(made) is dict
        assert torch.equal(made["response"], samples[0]["response"])
