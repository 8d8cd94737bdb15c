"""Trajectories become batches and come back, and padding is located by mask."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import DataError
from nip_astra.rl_objectives.advantages import codes_of
from nip_astra.rollouts.batch import Batch, compute_position_id_with_mask, padding_data
from nip_astra.rollouts.samples import Sample, collate, samples_of
from nip_astra.rollouts.trajectory import TokenSpan, Trajectory
from nip_astra.trainers.service.metrics import log_grpo_metrics


def make_trajectories(**more: Any) -> list[Trajectory]:
    return [
        Trajectory([5, 6, 2], [0, 1, 1], logprobs=[0, -1, -2], reward=1.0, group_id="a", **more),
        Trajectory([7, 2], [0, 1], logprobs=[0, -3], reward=0.0, group_id="a", **more),
        Trajectory([8, 9, 9, 2], [0, 1, 0, 1], logprobs=[0, -1, 0, -1], reward=0.5, **more),
    ]


def test_attribute_item_and_get_agree_for_fields_and_extras() -> None:
    trajectory = make_trajectories()[0]
    trajectory.advantage = 2.0
    trajectory["note"] = "well"
    trajectory.other = 3
    assert trajectory.advantage == trajectory["advantage"] == trajectory.get("advantage") == 2.0
    assert trajectory.note == trajectory["note"] == trajectory.get("note") == "well"
    assert trajectory["other"] == 3
    assert trajectory.get("run_id", "default") == "default"
    assert trajectory.get("nothing", 7) == 7
    assert "other" in trajectory
    assert "nothing" not in trajectory
    with pytest.raises(KeyError, match="a trajectory has no field 'nothing'"):
        trajectory["nothing"]
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = trajectory.nothing


def test_masks_of_another_length_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="has 3 tokens, but loss_mask has 2, logprobs has 1"):
        Trajectory([1, 2, 3], [0, 1], logprobs=[0.0])


def test_texts_of_tools_and_environments_are_masked() -> None:
    spans = [TokenSpan([1, 2]), TokenSpan([3], [-0.5]), TokenSpan([4, 5]), TokenSpan([6], [-1.5])]
    trajectory = Trajectory.from_spans(spans, reward=1.0)
    assert trajectory.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert trajectory.loss_mask.tolist() == [False, False, True, False, False, True]
    assert trajectory.logprobs.tolist() == [0, 0, -0.5, 0, 0, -1.5]
    assert trajectory.num_response_tokens == 2


def test_trajectories_made_together_are_pickled_alone() -> None:
    spans = [[TokenSpan(range(30)), TokenSpan([1, 2], [-0.1, -0.2])] for _ in range(50)]
    together = Trajectory.all_from_spans(spans, [{} for _ in spans])
    alone = Trajectory.from_spans(spans[7])
    assert len(pickle.dumps(together[7])) <= 1.1 * len(pickle.dumps(alone))


@pytest.mark.parametrize("array", [torch.tensor, np.array])
def test_truncation_cuts_everything_of_tokens_alike(array: Callable[..., Any]) -> None:
    advantage = array([0.0, 1.0, 2.0])
    trajectory = Trajectory([1, 2, 3], [0, 1, 1], logprobs=[0, -1, -2], advantage=advantage, name=4)
    cut = trajectory.truncated(2)
    assert len(cut) == len(cut.loss_mask) == 2
    assert torch.as_tensor(cut.advantage).tolist() == [0, 1]
    assert cut.name == 4


def test_a_batch_of_trajectories_is_padded_on_the_right() -> None:
    batch = Batch.from_trajectories(make_trajectories(length=4, text="x"), step=7)
    assert batch.values["input_ids"].tolist() == [[5, 6, 2, 0], [7, 2, 0, 0], [8, 9, 9, 2]]
    assert batch.values["loss_mask"].tolist()[2] == [False, True, False, True]
    assert batch.values["position_ids"].tolist()[1] == [0, 1, 1, 1]
    assert batch.values["logprobs"].tolist()[1] == [0, -3, 0, 0]
    assert batch.values["length"].tolist() == [4, 4, 4]
    assert batch.metadata["text"] == ["x"] * 3
    assert batch.metadata["step"] == 7
    assert batch.metadata["group_ids"] == ["a", "a", None]


def test_values_and_metadata_resolve_each_other() -> None:
    batch = Batch.from_trajectories(make_trajectories())
    assert batch.metadata["rewards"].tolist() == [1.0, 0.0, 0.5]
    assert batch.values["reward"] is batch.values["rewards"]
    for given in ([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], [1.0, 2.0, 4.0]):
        batch.metadata["advantages"] = given
        assert "advantages" in batch.values
        assert "advantages" in set(batch.values.keys())
        assert batch.values["advantages"].tolist() == given
    batch.metadata["advantages"] = []
    assert "advantages" not in set(batch.values.keys())
    assert len(batch.metadata["advantages"]) == 0
    del batch.metadata["advantages"]
    with pytest.raises(KeyError, match="a batch has no field 'advantages'"):
        batch.values["advantages"]


def test_padding_is_removed_by_mask_and_never_by_id() -> None:
    # NexRL compares ids, and with pad == eos removes the trained end token.
    batch = Batch.from_trajectories(
        [Trajectory([5, 6, 2], [0, 1, 1]), Trajectory([7, 8, 2], [0, 1, 1])]
    )
    assert batch.remove_redundant_right_padding(pad_token_id=2).width == 3
    wide = batch.select([0, 1])
    for name in wide._token_fields():
        value = wide.data[name]
        zeros = torch.zeros(2, 2, dtype=value.dtype)
        wide.data[name] = torch.cat([zeros, value, zeros], dim=1)
    left = Batch.remove_redundant_left_padding(
        wide, pad_token_id=9, anchor_field="input_ids", fields=["input_ids", "loss_mask"]
    )
    assert left.values["input_ids"].tolist() == [[5, 6, 2, 9, 9], [7, 8, 2, 9, 9]]
    assert left.values["loss_mask"].shape == (2, 5)
    both = wide.strip()
    assert both.values["input_ids"].tolist() == [[5, 6, 2], [7, 8, 2]]
    with pytest.raises(DataError, match="no fields of tokens: 'nothing'"):
        wide.strip(fields=["nothing"])


def test_rows_that_pad_a_batch_have_no_weight() -> None:
    batch = Batch.from_trajectories(make_trajectories()).pad_to_multiple(4)
    assert len(batch) == 4
    assert batch.values["row_weights"].tolist() == [1, 1, 1, 0]
    assert not batch.values["loss_mask"][3].any()
    assert batch.metadata["group_ids"][3] is None
    assert len(batch.to_trajectories()) == 3
    assert len(batch.pad_to_multiple(2)) == 4


def test_padding_data_strips_fills_and_counts_places() -> None:
    batch = padding_data(Batch.from_trajectories(make_trajectories()), pad_token_id=3, multiple=2)
    assert batch.values["input_ids"].tolist()[1] == [7, 2, 3, 3]
    assert len(batch) == 4
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_split_and_concatenated_is_the_same_batch() -> None:
    batch = Batch.from_trajectories(make_trajectories(text="x"))
    again = Batch.concatenate([part.strip() for part in batch.split(2)])
    assert again.width == 4
    for name in batch.data.keys() - {"position_ids"}:  # which differ in padding alone
        assert torch.equal(again.data[name], batch.data[name]), name
    assert again.rows == batch.rows
    twice = Batch.concatenate([batch, Batch.from_trajectories(batch.to_trajectories())])
    assert codes_of(twice.metadata["group_ids"]).tolist() == [0, 0, 1, 0, 0, 2]
    with pytest.raises(DataError, match="text are not in all of them"):
        Batch.concatenate([batch, Batch.from_trajectories(make_trajectories())])
    with pytest.raises(DataError, match="no batches"):
        Batch.concatenate([])


def test_rows_are_selected_and_shuffled_with_all_that_belongs_to_them() -> None:
    batch = Batch.from_trajectories(make_trajectories())
    batch.metadata["run_ids"] = ["first", "second", "third"]
    chosen = batch.select(torch.tensor([False, True, True]))
    assert chosen.metadata["group_ids"] == ["a", None]
    assert chosen.values["rewards"].tolist() == [0.0, 0.5]
    mixed = batch.shuffle(torch.Generator().manual_seed(1))
    pairs = zip(mixed.values["rewards"].tolist(), mixed.metadata["run_ids"], strict=True)
    assert sorted(pairs) == [(0.0, "second"), (0.5, "third"), (1.0, "first")]


def test_a_batch_comes_back_from_trajectories_and_from_files(tmp_path: Path) -> None:
    batch = Batch.from_trajectories(make_trajectories(text="x"), step=3)
    batch.values["advantages"] = torch.tensor([1.0, 2.0, 3.0])
    again = Batch.from_trajectories(batch.to_trajectories(), step=3)
    batch.save(tmp_path / "batch")
    read = Batch.load(tmp_path / "batch")
    for other in (again, read):
        torch.testing.assert_close(dict(other.data), dict(batch.data), atol=0, rtol=0)
        assert (other.rows, other.facts) == (batch.rows, batch.facts)


def test_numbers_of_numpy_become_tensors_too() -> None:
    batch = Batch.from_trajectories(make_trajectories())
    array, scalars = np.array([0.5, 1.0, -1.0]), [np.float32(0.5), np.float64(1), np.float16(-1)]
    for given in (array, array[::-1].copy()[::-1], scalars, (0.5, 1, -1)):
        batch.metadata["advantages"] = given
        stored = batch.values["advantages"]
        assert stored.dtype == torch.get_default_dtype()
        assert stored.tolist() == [0.5, 1.0, -1.0]
    batch.values["labels"] = np.array(["a", "b", "c"])
    assert isinstance(batch.metadata["labels"], np.ndarray)


def test_advantages_summed_from_the_end_are_read() -> None:
    """Rewards to go are a reversed NumPy view, which torch cannot read."""
    rows = make_trajectories()
    for trajectory in rows:
        trajectory["advantage"] = np.cumsum(np.ones(len(trajectory))[::-1])[::-1]
    made = Batch.from_trajectories(rows)
    assert made.values["advantages"][1].tolist() == [2.0, 1.0, 0.0, 0.0]
    given: Any = np.array([1.0, 2.0])[::-1]
    again = Trajectory([1, 2], [0, 1], advantage=given)
    assert torch.as_tensor(again.advantage).tolist() == [2.0, 1.0]
    again["advantage"] = np.array(0.5)
    assert torch.as_tensor(again.advantage).ndim == 0
    metrics = log_grpo_metrics(rows, {})
    assert metrics["grpo/advantage_max"] == 4.0


def test_extra_fields_of_nexrl_are_the_fields_themselves() -> None:
    given = {"group_id": "a", "run_id": 1, "logprobs": [0.0, -1.0, -2.0], "task_id": 3}
    trajectory = Trajectory([5, 6, 7], [0, 1, 1], reward=1.0, is_val=False, extra_fields=given)
    names = ("group_id", "run_id", "task_id", "is_val")
    assert [trajectory[name] for name in names] == ["a", 1, 3, False]
    assert trajectory.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert "extra_fields" not in trajectory.keys()  # noqa: SIM118 - no mapping
    trajectory.extra_fields["group_id"] = "b"
    trajectory.extra_fields = {"score": {"accuracy": 1.0}}
    assert trajectory.group_id == "b"
    assert trajectory.extra_fields.get("score") == {"accuracy": 1.0}
    assert {"group_id", "run_id", "task_id", "score"} <= set(trajectory.extra_fields)
    assert not {"tokens", "reward", "advantage"} & set(trajectory.extra_fields)
    del trajectory.extra_fields["task_id"]
    assert trajectory.get("task_id") is None


def test_token_advantages_of_nexrl_stand_at_the_tokens_of_the_policy() -> None:
    trajectory = Trajectory([5, 6, 7], [0, 1, 1], extra_fields={"token_advantages": [0.5, -1.0]})
    assert trajectory.advantage.tolist() == [0.0, 0.5, -1.0]
    with pytest.raises(DataError, match=r"\[3\].* 2 "):
        trajectory.extra_fields["token_advantages"] = [1.0, 2.0, 3.0]


def test_a_batch_is_made_of_values_and_metadata_as_in_nexrl() -> None:
    batch = Batch(
        values={
            "input_ids": torch.tensor([[5, 6, 7], [5, 8, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "loss_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
            "reward": [1.0, 0.0],
            "group_id": ["a", "a"],
            "run_id": torch.tensor([0, 1]),
        },
        metadata={"batch_size": 2, "temperature": 0.5},
    )
    assert len(batch) == batch.metadata["batch_size"] == 2
    assert batch.values["prompts"].tolist() == [[5], [5]]
    assert batch.values["responses"].tolist() == [[6, 7], [8, 0]]
    for names in (("group_id", "run_id"), ("group_ids", "run_ids")):
        assert [batch.values[name] for name in names] == [["a", "a"], [0, 1]]
    assert batch.values["loss_mask"].dtype == torch.bool
    assert batch.metadata["temperature"] == 0.5
    first, second = batch.to_trajectories()
    assert (first.tokens.tolist(), first.reward, first.run_id) == ([5, 6, 7], 1.0, 0)
    assert (second.tokens.tolist(), second.group_id, second.run_id) == ([5, 8], "a", 1)
    fields = ["input_ids", "prompts", "responses", "scoring_attention_mask"]
    for _ in ("computed", "stored"):
        cut = Batch.remove_redundant_right_padding(batch.select([1]), fields=fields)
        assert cut.values["responses"].tolist() == [[8]]
        batch.values["responses"] = batch.values["responses"]


def test_a_batch_needs_a_number_of_rows_which_may_be_zero_and_no_rewards() -> None:
    assert len(Batch({"reward": [1.0, 2.0]}, {})) == 2
    with pytest.raises(DataError, match="batch_size"):
        Batch({"temperature": 1.0})
    empty = Batch.from_trajectories([])
    assert (len(empty), empty.to_trajectories()) == (0, [])
    (unrewarded,) = Batch.from_trajectories([Trajectory([5, 6], [0, 1])]).to_trajectories()
    assert unrewarded.reward is None


# ---- samples of a batch


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
    assert all(type(sample) is dict for sample in plain)
    whole, one_by_one = collate([samples[i] for i in rows]), collate([plain[i] for i in rows])
    assert list(whole.keys()) == list(one_by_one.keys())
    torch.testing.assert_close(dict(whole), dict(one_by_one), atol=0, rtol=0)


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
