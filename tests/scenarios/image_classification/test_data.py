"""Images and their labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from nip_astra.errors import DataError, ParameterError
from nip_astra.scenarios.images.data import (
    ImageDatasetParameters,
    ImageSource,
    build_image_datasets,
    split_by_class,
)
from nip_astra.scenarios.tensordict_base import Datasets
from tests.kit.messages import says


def build(**dataset: Any) -> Datasets:
    return build_image_datasets(ImageDatasetParameters(**dataset), scenario_dir=None)


def digit_of(images: torch.Tensor) -> list[int]:
    """The class of digits, looked up by image."""
    digits = load_digits()
    pairs = zip(digits.images.astype("float32"), digits.target.tolist(), strict=True)
    known = {image.tobytes(): target for image, target in pairs}
    return [known[(image[0] * 16).numpy().tobytes()] for image in images]


def labels_by_class(datasets: Datasets) -> dict[int, set[int]]:
    result: dict[int, set[int]] = {}
    for split in datasets:
        for number, label in zip(digit_of(split["image"]), split["y"].flatten(), strict=True):
            result.setdefault(number, set()).add(int(label))
    return result


def test_the_digits_are_split_by_class_and_lie_between_0_and_1() -> None:
    datasets = build(make_balanced=False)
    assert [len(split) for split in datasets] == [1437, 360]
    for split in datasets:
        images = split["image"]
        assert (images.shape[1:], images.dtype) == ((1, 8, 8), torch.float32)
        assert (float(images.min()), float(images.max())) == (0.0, 1.0)
        assert (split["y"].shape, split["y"].dtype) == ((len(split), 1), torch.long)
        counts = torch.bincount(torch.tensor(digit_of(images))).float() / len(split)
        assert (counts - 0.1).abs().max() < 0.005


@pytest.mark.parametrize("name", ["digits", "tiny"])
def test_the_same_parameters_give_the_same_datasets(name: str) -> None:
    first, second, other = build(name=name), build(name=name), build(name=name, split_seed=1)
    for split, again in zip(first, second, strict=True):
        assert torch.equal(split["image"], again["image"])
        assert torch.equal(split["y"], again["y"])
    assert not torch.equal(first.train["image"][:50], other.train["image"][:50])


def test_merge_gives_half_of_the_classes_each_label_by_seed() -> None:
    groups = []
    for seed in (0, 1):
        result = labels_by_class(build(binarification_seed=seed))
        assert all(len(labels) == 1 for labels in result.values())
        groups.append({number for number, labels in result.items() if labels == {0}})
        assert len(groups[-1]) == 5
    assert groups[0] != groups[1]


def test_select_two_takes_the_first_class_for_0_and_leaves_the_others_out() -> None:
    datasets = build(binarification_method="select_two", selected_classes=[8, 3])
    assert labels_by_class(datasets) == {8: {0}, 3: {1}}


def test_random_labels_belong_to_the_image_and_to_the_seed() -> None:
    whole = build(binarification_method="random", make_balanced=False)
    assert abs(float(whole.train["y"].float().mean()) - 0.5) < 0.05
    assert all(labels == {0, 1} for labels in labels_by_class(whole).values())
    known = {
        image.numpy().tobytes(): int(label)
        for image, label in zip(whole.train["image"], whole.train["y"], strict=True)
    }
    fewer = build(binarification_method="random", max_train_size=100)
    assert len(fewer.train) == 100
    for image, label in zip(fewer.train["image"], fewer.train["y"], strict=True):
        assert known[image.numpy().tobytes()] == int(label)
    assert not torch.equal(whole.train["y"][:300], whole.test["y"][:300])
    other = build(binarification_method="random", make_balanced=False, binarification_seed=1)
    assert not torch.equal(other.train["y"], whole.train["y"])


@pytest.mark.parametrize("method", ["merge", "random"])
@pytest.mark.parametrize(("make_balanced", "size"), [(True, 50), (False, 51)])
def test_the_training_set_alone_is_limited_and_both_labels_may_be_balanced(
    make_balanced: bool, size: int, method: str
) -> None:
    options = {"binarification_method": method, "make_balanced": make_balanced}
    datasets = build(max_train_size=51, **options)
    assert len(datasets.train) == size
    assert len(datasets.test) > 300
    whole = build(**options).train
    for split in (*datasets, whole) if make_balanced else (whole,):
        assert (int(split["y"].sum()) * 2 == len(split)) is make_balanced


@pytest.mark.parametrize(
    ("dataset", "fact"),
    [
        ({"binarification_method": "select_two"}, "selected_classes"),
        ({"binarification_method": "select_two", "selected_classes": [1, 1]}, "selected_classes"),
        ({"selected_classes": [1, 2]}, "binarification_method"),
        ({"path": "somewhere"}, "path"),
        ({"name": "local"}, "path"),
        ({"name": "cifra10"}, "cifra10"),
        ({"max_train_size": 1}, "max_train_size"),
        ({"test_share": 1.0}, "test_share"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(
    dataset: dict[str, Any], fact: str
) -> None:
    with pytest.raises(ParameterError, match=fact):
        ImageDatasetParameters(**dataset)


def test_an_unknown_class_is_reported_with_the_valid_classes() -> None:
    with pytest.raises(DataError) as caught:
        build(binarification_method="select_two", selected_classes=[3, 12])
    assert says(caught.value, "'digits'", "12", "8, 9", "dataset.selected_classes")


def test_too_few_images_of_a_class_to_split_are_reported() -> None:
    source = ImageSource(torch.tensor([0, 0, 1]), lambda rows: torch.zeros(len(rows), 1, 2, 2))
    with pytest.raises(DataError, match="test_share"):
        split_by_class(source, ImageDatasetParameters(test_share=0.5))


def test_tiny_images_show_their_class() -> None:
    datasets = build(name="tiny", binarification_method="select_two", selected_classes=[0, 7])
    assert [len(split) for split in datasets] == [64, 16]
    for split in datasets:
        images = split["image"].squeeze(1)
        assert images.shape[1:] == (8, 8)
        assert 0 <= images.min() < images.max() <= 1
        # Class 0 is bright in row 1, class 7 in column 3.
        is_row = images[:, 1].mean(1) > images[:, :, 3].mean(1)
        assert torch.equal(is_row, split["y"].squeeze(1) == 0)
