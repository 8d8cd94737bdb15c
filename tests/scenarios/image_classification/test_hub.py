"""Images that the `datasets` library reads, from files that the tests write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from nip_astra.errors import DataError, MissingDependencyError
from nip_astra.scenarios.images.data import ImageDatasetParameters, build_image_datasets
from nip_astra.scenarios.tensordict_base import Datasets

NUM_TRAIN, NUM_TEST = 12, 8


def picture(number: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    """A picture whose first pixel tells its number."""
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
    splits = {
        "train": make_split(NUM_TRAIN, **options),
        "test": make_split(NUM_TEST, 50, **options),
    }
    return datasets.DatasetDict(splits)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def build(path: Path | str | None, name: str = "local", **dataset: Any) -> Datasets:
    given = dataset | ({} if path is None else {"path": str(path)})
    return build_image_datasets(ImageDatasetParameters(name=name, **given), scenario_dir=None)


def write_parquet_file(folder: Path) -> Path:
    make_split(NUM_TRAIN).to_parquet(folder / "images.parquet")
    return folder / "images.parquet"


def write_parquet_folder(folder: Path) -> Path:
    for name, split in both().items():
        split.to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return folder


def write_saved(folder: Path) -> Path:
    both().save_to_disk(folder)
    return folder


def write_saved_split(folder: Path) -> Path:
    make_split(NUM_TRAIN).save_to_disk(folder)
    return folder


def write_image_folder(folder: Path) -> Path:
    for name, (count, first) in {"train": (NUM_TRAIN, 0), "test": (NUM_TEST, 50)}.items():
        for number in range(count):
            path = folder / name / ("cat", "dog")[number % 2] / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(first + number).save(path)
    return folder


def numbers(split: Any) -> dict[int, int]:
    """The label of each picture by its number."""
    first = (split["image"][:, 0, 0, 0] * 255).round().long().tolist()
    return dict(zip(first, split["y"].flatten().tolist(), strict=True))


@pytest.mark.parametrize("write", [write_parquet_folder, write_saved, write_image_folder])
def test_every_layout_on_disk_gives_the_same_images(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    found = build(write(folder), binarification_method="select_two", selected_classes=[0, 1])
    assert found.train["image"].shape == (NUM_TRAIN, 3, 5, 6)
    assert found.train["image"].dtype == torch.float32
    assert float(found.train["image"][:, 1, 0, 0].min()) == 1.0
    assert numbers(found.train) == {number: number % 2 for number in range(NUM_TRAIN)}
    assert numbers(found.test) == {50 + number: number % 2 for number in range(NUM_TEST)}


@pytest.mark.parametrize("write", [write_parquet_file, write_saved_split])
def test_without_test_images_the_others_are_split_by_class(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    found = build(write(folder), test_share=0.5)
    assert [len(split) for split in found] == [6, 6]
    assert not set(numbers(found.train)) & set(numbers(found.test))
    assert all(int(split["y"].sum()) == 3 for split in found)


def test_a_scenario_may_bring_its_images_along(tmp_path: Path) -> None:
    write_parquet_file(tmp_path)
    parameters = ImageDatasetParameters(name="local", path="scenario://images.parquet")
    assert len(build_image_datasets(parameters, scenario_dir=tmp_path).train) > 0


@pytest.mark.parametrize(
    ("name", "hub_id", "config", "image", "label"),
    [
        ("mnist", "ylecun/mnist", None, "image", "label"),
        ("fashion_mnist", "zalando-datasets/fashion_mnist", None, "image", "label"),
        ("cifar10", "uoft-cs/cifar10", None, "img", "label"),
        ("cifar100", "uoft-cs/cifar100", None, "img", "fine_label"),
        ("svhn", "ufldl-stanford/svhn", "cropped_digits", "image", "label"),
    ],
)
def test_datasets_of_the_hub_are_asked_for_by_id_and_read_by_their_columns(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    hub_id: str,
    config: str | None,
    image: str,
    label: str,
) -> None:
    asked = []
    mode = "L" if "mnist" in name else "RGB"

    def load(*given: Any) -> datasets.DatasetDict:
        asked.append(given)
        return both(image=image, label=label, mode=mode)

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = build(None, name)
    assert asked == [(hub_id, config)]
    assert found.train["image"].shape == (NUM_TRAIN, 1 if mode == "L" else 3, 5, 6)


def test_a_hub_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> None:
        raise ConnectionError("no route to the hub.\nTry later.")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"'mnist' .*ylecun/mnist.*no route to the hub"):
        build(None, "mnist")


def test_without_the_library_its_installation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'nip_astra\[images\]'"):
        build(None, "cifar10")


def test_a_path_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist. Give the path of a file"):
        build(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    path.write_text("no Parquet")
    with pytest.raises(DataError, match=r"images\.parquet"):
        build(path)


def test_a_missing_column_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    make_split(4, image="photo").to_parquet(path)
    with pytest.raises(DataError, match=r"'image'.* 'photo', 'label'"):
        build(path)


def test_no_training_images_are_told(tmp_path: Path) -> None:
    datasets.DatasetDict(validation=make_split(4)).save_to_disk(tmp_path / "images")
    with pytest.raises(DataError, match="'validation'"):
        build(tmp_path / "images")


@pytest.mark.parametrize("wrong", ["cat", 0.5, -1])
def test_a_class_that_is_no_number_is_told(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "images.parquet"
    make_split(4, labels=[wrong] * 4).to_parquet(path)
    with pytest.raises(DataError, match=f"'label'.*{wrong!r}"):
        build(path)


def save_rows(folder: Path, images: list[Image.Image]) -> Path:
    made = datasets.Dataset.from_dict(
        {"image": images, "label": [number % 2 for number in range(len(images))]}
    ).cast_column("image", datasets.Image())
    made.save_to_disk(folder)
    return folder


def test_images_of_several_sizes_are_refused(tmp_path: Path) -> None:
    images = [picture(number, size=(4, 4 + number // 4)) for number in range(8)]
    with pytest.raises(DataError, match=r"shapes: \[3, 4, 4\], \[3, 5, 4\]"):
        build(save_rows(tmp_path / "images", images))


def test_images_to_test_on_of_another_shape_are_refused(tmp_path: Path) -> None:
    splits = {"train": make_split(8), "test": make_split(8, mode="L")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "images")
    with pytest.raises(DataError, match=r"\[3, 5, 6\] .*\[1, 5, 6\]"):
        build(tmp_path / "images")


def test_images_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    images = [Image.new("I;16", (4, 4)) for _ in range(8)]
    with pytest.raises(DataError, match="'I;16'"):
        build(save_rows(tmp_path / "images", images))


def test_transparent_images_become_coloured(tmp_path: Path) -> None:
    images = [picture(number).convert("RGBA") for number in range(8)]
    found = build(save_rows(tmp_path / "images", images), test_share=0.5)
    assert found.train["image"].shape[1] == 3


def test_images_that_are_left_out_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nip_astra.scenarios.images import data as hub

    read: list[object] = []
    pixels = hub._pixels

    def counted(picture: object, name: str) -> torch.Tensor:
        read.append(picture)
        return pixels(picture, name)

    monkeypatch.setattr(hub, "_pixels", counted)
    found = build(write_saved(tmp_path / "images"), max_train_size=4)
    assert len(found.train) == 4
    assert len(read) == 4 + NUM_TEST


def test_one_label_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.parquet"
    make_split(8, labels=[3] * 8).to_parquet(path)
    with pytest.raises(DataError, match=r"\[1\]"):
        build(path, make_balanced=False)
    with pytest.raises(DataError, match="no images"):
        build(path)
