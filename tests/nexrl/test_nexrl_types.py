"""NexRL's trajectories and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nip_astra
from nip_astra.errors import DataError
from nip_astra.nexrl.nexrl_types import Batch, ModelTag, NexRLRole, Trajectory


def example_trajectory(**more: Any) -> Trajectory:
    extra_fields = {"run_id": 1, "group_id": "a", "logprobs": [0.0, -1.0, -2.0], **more}
    return Trajectory([5, 6, 7], [0, 1, 1], 1.0, False, extra_fields)


def padded_ids(ids: list[list[int]]) -> Batch:
    return Batch(values={"input_ids": torch.tensor(ids)}, metadata={"batch_size": len(ids)})


def test_roles_have_their_names() -> None:
    assert NexRLRole.ROLLOUT_WORKER.value == "rollout_worker"
    assert NexRLRole.TRAIN_WORKER.value == "train_worker"
    assert NexRLRole.ALGORITHM_PROCESSOR.value == "algorithm_processor"
    assert NexRLRole("validator") is NexRLRole.VALIDATOR
    assert ModelTag is str


# ---- trajectories


def test_a_trajectory_has_lists_and_fields_as_items_and_attributes() -> None:
    trajectory = example_trajectory()
    assert trajectory.tokens == trajectory["tokens"] == [5, 6, 7]
    assert sum(trajectory.loss_mask) == 2
    assert trajectory["run_id"] == trajectory.get("run_id") == trajectory.run_id == 1
    assert trajectory.get("missing", 3) == 3
    assert "reward" in trajectory
    assert "missing" not in trajectory
    trajectory["advantage"] = 0.5
    trajectory.color = "red"
    trajectory["reward"] = 2.0
    assert (trajectory.advantage, trajectory.reward) == (0.5, 2.0)
    assert dict(trajectory.items())["color"] == trajectory.extra_fields["color"] == "red"
    assert [name for name, _ in trajectory.items()] == trajectory.keys()
    assert trajectory.keys()[:4] == ["tokens", "loss_mask", "reward", "is_val"]
    with pytest.raises(KeyError, match="missing"):
        trajectory["missing"]


def test_a_trajectory_becomes_ours_and_back() -> None:
    trajectory = example_trajectory(token_advantages=[0.5, -0.5], mood="calm")
    ours = trajectory.to_core()
    assert isinstance(ours, nip_astra.Trajectory)
    assert ours.advantage.tolist() == [0.0, 0.5, -0.5]  # type: ignore[union-attr]  # a tensor
    back = Trajectory.from_core(ours)
    assert (back.tokens, back.loss_mask, back.reward) == ([5, 6, 7], [0, 1, 1], 1.0)
    assert back.logprobs == [0.0, -1.0, -2.0]
    assert (back.run_id, back.group_id, back.mood) == (1, "a", "calm")


def test_log_probabilities_without_the_first_token_are_aligned() -> None:
    ours = example_trajectory(logprobs=[-1.0, -2.0]).to_core()
    assert ours.logprobs is not None
    assert ours.logprobs.tolist() == [0.0, -1.0, -2.0]


# ---- batches


def test_a_batch_of_any_values_has_the_size_of_its_metadata() -> None:
    batch = Batch({"data": torch.tensor([1, 2, 3])}, {"batch_size": 3})
    assert len(batch) == batch.metadata["batch_size"] == 3
    assert "data" in batch.values


def test_a_copy_has_fields_of_its_own() -> None:
    batch = Batch({"data": torch.tensor([1, 2, 3])}, {"batch_size": 3, "model_tag": "test"})
    copy = batch.copy()
    copy.metadata["model_tag"] = "modified"
    copy.values["data"] = torch.zeros(3)
    assert batch.metadata["model_tag"] == "test"
    assert batch.values["data"].tolist() == [1, 2, 3]


def test_a_batch_becomes_a_dict() -> None:
    batch = Batch({"data": torch.tensor([1, 2, 3])}, {"batch_size": 3, "model_tag": "test"})
    values = batch.to_dict()
    assert values["data"].tolist() == [1, 2, 3]
    assert (values["batch_size"], values["model_tag"]) == (3, "test")


def test_padding_is_found_by_its_id_where_there_is_no_mask() -> None:
    left = Batch.remove_redundant_left_padding(
        padded_ids([[0, 0, 1, 2, 3], [0, 0, 4, 5, 6]]), pad_token_id=0
    )
    assert left.values["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    right = Batch.remove_redundant_right_padding(
        data=padded_ids([[1, 2, 3, 0, 0], [4, 5, 6, 7, 0]]), pad_token_id=0
    )
    assert right.values["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert "attention_mask" not in right.values


def test_a_trained_end_of_text_stays_where_it_is_also_the_padding() -> None:
    batch = Batch.from_trajectories(
        [
            Trajectory([5, 6, 2], [0, 1, 1], 1.0, extra_fields={"logprobs": [0.0, 0.0, 0.0]}),
            Trajectory([7, 2], [0, 1], 1.0, extra_fields={"logprobs": [0.0, 0.0]}),
        ]
    )
    stripped = Batch.remove_redundant_right_padding(batch, pad_token_id=2)
    assert stripped.values["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]


@pytest.mark.parametrize(("threshold", "width"), [(-1, 3), (0, 5), (1, 4), (9, 3)])
def test_no_more_columns_are_removed_than_the_threshold(threshold: int, width: int) -> None:
    batch = padded_ids([[0, 0, 1, 2, 3], [0, 0, 4, 5, 6]])
    stripped = Batch.remove_redundant_left_padding(
        batch, pad_token_id=0, max_strip_threshold=threshold, fields=["input_ids", "loss_mask"]
    )
    assert stripped.values["input_ids"].shape == (2, width)


def test_a_batch_without_the_anchor_field_stays() -> None:
    batch = Batch({"data": torch.tensor([1, 2, 3])}, {"batch_size": 3})
    assert Batch.remove_redundant_left_padding(batch, pad_token_id=0) is batch


def test_a_batch_of_trajectories_has_their_tokens_as_lists() -> None:
    first = example_trajectory(model_tag="m", temperature=0.5, score={"right": True})
    second = Trajectory([5], [1], 0.0, extra_fields={"logprobs": [-1.0], "score": {}})
    batch = Batch.from_trajectories([first, second])
    assert batch.values["tokens"] == [[5, 6, 7], [5]]
    assert (batch.metadata["model_tag"], batch.metadata["temperature"]) == ("m", 0.5)
    assert batch.values["score"] == [{"right": True}, {}]
    trajectories = batch.to_trajectories()
    assert [one.tokens for one in trajectories] == [[5, 6, 7], [5]]
    assert all(isinstance(one, Trajectory) for one in trajectories)
    assert Batch.from_trajectories([first], model_tag="other").metadata["model_tag"] == "other"


def test_rows_are_reordered_with_all_their_fields() -> None:
    batch = Batch.from_trajectories([example_trajectory(), Trajectory([8], [1], 0.0)])
    reordered = batch.reorder([1, 0])
    assert reordered.values["tokens"] == [[8], [5, 6, 7]]
    assert reordered.values["group_id"] == [None, "a"]
    assert isinstance(reordered, Batch)
    with pytest.raises(DataError):
        batch.reorder([0, 0])


def test_rows_that_fill_up_to_the_world_size_have_no_weight() -> None:
    batch = Batch.from_trajectories([example_trajectory()] * 3)
    assert batch.pad_to_world_size(4) is batch
    assert len(batch) == batch.metadata["batch_size"] == 4
    assert batch.values["row_weights"].tolist() == [1, 1, 1, 0]
    assert len(batch.to_trajectories()) == 3
    ids_only = padded_ids([[1, 2], [3, 4], [5, 6]]).pad_to_world_size(world_size=8)
    assert ids_only.values["input_ids"].shape == (8, 2)


def test_a_batch_is_trimmed_and_passed_to_a_service() -> None:
    batch = Batch.from_trajectories([example_trajectory(score={"right": 1.0})])
    trimmed = batch.trim_for_backend(["input_ids", "responses", "missing"])
    assert set(trimmed.values) == {"input_ids", "responses", "row_weights"}
    passed = batch.to_nextrainer_batch()
    assert passed["batch"]["input_ids"].tolist() == [[5, 6, 7]]
    assert passed["meta_info"]["batch_size"] == 1
    assert isinstance(passed["non_tensor_batch"]["score"], np.ndarray)
    back = Batch.from_nextrainer_batch(passed)
    assert back.values["input_ids"].tolist() == [[5, 6, 7]]
    assert back.metadata["model_tag"] == "default"
