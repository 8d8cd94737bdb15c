"""Images and their labels, also of files that the `datasets` library reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from nip_astra.errors import DataError, MissingDependencyError, ParameterError
from nip_astra.scenarios.images import data
from nip_astra.scenarios.images.data import (
    ImageDatasetParameters,
    ImageSource,
    build_image_datasets,
    split_by_class,
)
from nip_astra.scenarios.tensordict_base import Datasets
from tests.kit.messages import says
from tests.kit.recording import record_calls


def build(path: Path | None = None, **dataset: Any) -> Datasets:
    local = {} if path is None else {"name": "local", "path": str(path)}
    return build_image_datasets(ImageDatasetParameters(**local | dataset), scenario_dir=None)


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
    random = partial(build, binarification_method="random")
    whole, other = (random(make_balanced=False, binarification_seed=seed) for seed in (0, 1))
    fewer = random(max_train_size=100)
    assert abs(float(whole.train["y"].float().mean()) - 0.5) < 0.05
    assert all(labels == {0, 1} for labels in labels_by_class(whole).values())
    known, some = (
        {image.numpy().tobytes(): int(y) for image, y in zip(part["image"], part["y"], strict=True)}
        for part in (whole.train, fewer.train)
    )
    assert len(fewer.train) == 100
    assert some.items() <= known.items()
    assert not torch.equal(whole.train["y"][:300], whole.test["y"][:300])
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


NUM_TRAIN, NUM_TEST = 12, 8


def picture(number: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    """A picture whose first pixel encodes its number."""
    image = Image.new(mode, size)
    value: Any = (number, 255, 0) if mode == "RGB" else number
    image.putpixel((0, 0), value)
    return image


def make_split(
    count: int,
    first: int = 0,
    *,
    image: str = "image",
    label: str = "label",
    labels: list[Any] | None = None,
    mode: str = "RGB",
) -> datasets.Dataset:
    features = {image: datasets.Image()}
    if labels is None:
        features[label] = datasets.ClassLabel(names=["cat", "dog"])
    rows = {
        image: [picture(first + number, mode) for number in range(count)],
        label: labels or [number % 2 for number in range(count)],
    }
    made = datasets.Dataset.from_dict(rows)
    return made.cast(datasets.Features({**made.features, **features}))


def both(**options: Any) -> datasets.DatasetDict:
    train, test = make_split(NUM_TRAIN, **options), make_split(NUM_TEST, 50, **options)
    return datasets.DatasetDict(train=train, test=test)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def write_images(folder: Path, layout: str) -> Path:
    """Write images with or without a test split in a layout, and return the path to read."""
    folder.mkdir()
    if layout == "a file":
        make_split(NUM_TRAIN).to_parquet(folder / "images.parquet")
        return folder / "images.parquet"
    if layout == "a saved split":
        make_split(NUM_TRAIN).save_to_disk(folder)
        return folder
    splits = both()
    if layout == "saved splits":
        splits.save_to_disk(folder)
        return folder
    for name, split in splits.items():
        if layout == "files of splits":
            split.to_parquet(folder / f"{name}-00000-of-00001.parquet")
            continue
        for number, row in enumerate(split):
            path = folder / name / ("cat", "dog")[row["label"]] / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(path)
    return folder


def numbers(split: Any) -> dict[int, int]:
    """The label of each picture by its number."""
    first = (split["image"][:, 0, 0, 0] * 255).round().long().tolist()
    return dict(zip(first, split["y"].flatten().tolist(), strict=True))


@pytest.mark.parametrize("layout", ["files of splits", "saved splits", "folders of images"])
def test_every_layout_on_disk_gives_the_same_images(tmp_path: Path, layout: str) -> None:
    path = write_images(tmp_path / "images", layout)
    train, test = build(path, binarification_method="select_two", selected_classes=[0, 1])
    assert train["image"].shape == (NUM_TRAIN, 3, 5, 6)
    assert train["image"].dtype == torch.float32
    assert float(train["image"][:, 1, 0, 0].min()) == 1.0
    assert numbers(train) == {number: number % 2 for number in range(NUM_TRAIN)}
    assert numbers(test) == {50 + number: number % 2 for number in range(NUM_TEST)}


@pytest.mark.parametrize("layout", ["a file", "a saved split"])
def test_without_test_images_the_others_are_split_by_class(tmp_path: Path, layout: str) -> None:
    result = build(write_images(tmp_path / "images", layout), test_share=0.5)
    assert [len(split) for split in result] == [6, 6]
    assert not set(numbers(result.train)) & set(numbers(result.test))
    assert all(int(split["y"].sum()) == 3 for split in result)


HUB = {
    "mnist": ("ylecun/mnist", None, "image", "label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None, "image", "label"),
    "cifar10": ("uoft-cs/cifar10", None, "img", "label"),
    "cifar100": ("uoft-cs/cifar100", None, "img", "fine_label"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits", "image", "label"),
}


@pytest.mark.parametrize("name", HUB)
def test_datasets_of_the_hub_are_requested_by_id_and_read_by_their_columns(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hub_id, config, image, label = HUB[name]
    mode, num_channels = ("L", 1) if "mnist" in name else ("RGB", 3)
    loaded = {(hub_id, config): both(image=image, label=label, mode=mode)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: loaded[names])
    assert build(name=name).train["image"].shape == (NUM_TRAIN, num_channels, 5, 6)


def test_transparent_images_become_coloured(tmp_path: Path) -> None:
    images = [picture(number).convert("RGBA") for number in range(8)]
    result = build(save_images(tmp_path / "images", images), test_share=0.5)
    assert result.train["image"].shape[1] == 3


def test_images_that_are_left_out_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, data, "_pixels")
    path = write_images(tmp_path / "images", "saved splits")
    assert len(build(path, max_train_size=4).train) == 4
    assert len(calls) == 4 + NUM_TEST


def test_a_missing_hub_or_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> None:
        raise ConnectionError("no route to the hub.\nTry later.")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"'mnist' .*ylecun/mnist.*no route to the hub"):
        build(name="mnist")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'nip_astra\[images\]'"):
        build(name="cifar10")


def save_images(folder: Path, images: list[Image.Image]) -> Path:
    made = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 4})
    made.cast_column("image", datasets.Image()).save_to_disk(folder)
    return folder


def parquet(folder: Path, **options: Any) -> Path:
    make_split(8, **options).to_parquet(f"{folder}.parquet")
    return folder.with_suffix(".parquet")


def no_parquet(folder: Path) -> Path:
    folder.with_suffix(".parquet").write_text("no Parquet")
    return folder.with_suffix(".parquet")


def splits(folder: Path, **of_split: datasets.Dataset) -> Path:
    datasets.DatasetDict(of_split).save_to_disk(folder)
    return folder


SIZES = [picture(n, size=(4, 4 + n // 4)) for n in range(8)]
DEEP = [Image.new("I;16", (4, 4))] * 8
WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no such folder": (lambda folder: folder, "images does not exist"),
    "no Parquet": (no_parquet, r"images\.parquet"),
    "another column": (lambda folder: parquet(folder, image="photo"), "'image'.* 'photo'"),
    "no training images": (lambda folder: splits(folder, dev=make_split(4)), "'dev'"),
    "classes of words": (lambda folder: parquet(folder, labels=["cat"] * 8), "'label'.*'cat'"),
    "fractions": (lambda folder: parquet(folder, labels=[0.5] * 8), r"'label'.*0\.5"),
    "negative classes": (lambda folder: parquet(folder, labels=[-1] * 8), "'label'.*-1"),
    "one class": (lambda folder: parquet(folder, labels=[3] * 8), "no images"),
    "several sizes": (
        lambda folder: save_images(folder, SIZES),
        r"shapes: \[3, 4, 4\], \[3, 5, 4\]",
    ),
    "grey images to test on": (
        lambda folder: splits(folder, train=make_split(8), test=make_split(8, mode="L")),
        r"\[3, 5, 6\] .*\[1, 5, 6\]",
    ),
    "more than 8 bits": (lambda folder: save_images(folder, DEEP), "'I;16'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_unusable_images_are_reported(tmp_path: Path, wrong: str) -> None:
    write, facts = WRONG[wrong]
    with pytest.raises(DataError, match=facts):
        build(write(tmp_path / "images"))
