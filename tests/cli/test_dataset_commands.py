"""Data is made, fetched and converted from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from PIL import Image

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenarios.graphs.generation import GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.pair_files import load_pairs
from nip_astra.scenarios.images.data import ImageDatasetParameters, build_image_datasets
from tests.kit.command_line import CommandLine, refused
from tests.scenarios.graph_isomorphism.published import write_published


def option_in(output: str) -> str:
    """The last option in a command's hint about using its result."""
    return output.rpartition("--set ")[2].split()[0]


def test_created_pairs_are_those_that_a_run_would_generate(cli: CommandLine) -> None:
    options = ["--set", "num_train=30", "--set", "num_test=10", "--set", "sizes=[5,7]"]
    result = cli.ok("dataset", "create", "pairs.safetensors", *options)
    assert "30 pairs, 50 % isomorphic" in result.out
    parameters = GraphPairParameters(num_train=30, num_test=10, sizes=[5, 7])
    for split, pairs in zip(("train", "test"), load_pairs("pairs.safetensors"), strict=True):
        for stored, generated in zip(pairs, generate_pairs(parameters, split), strict=True):
            np.testing.assert_array_equal(stored, generated)
    given: Any = {"trainer": "vanilla_ppo", "scenario": "graph_isomorphism"}
    resolved = resolve_experiment(**given, overrides=[option_in(result.out)])
    assert Path(resolved.hyper_params.get("graph_isomorphism.dataset.file")).is_file()


def test_wrong_pairs_are_reported(cli: CommandLine) -> None:
    Path("kept").write_text("kept")
    for arguments, fact in {
        "kept": "kept",
        "new --set num_train=0": "num_train",
        "new --set file=other": "file",
        "new --set sizes=[": "--set",
    }.items():
        assert fact in refused(cli("dataset", "create", *arguments.split()))
        assert [path.read_text() for path in Path().iterdir()] == ["kept"]


def test_published_pairs_are_converted(cli: CommandLine, tmp_path: Path) -> None:
    train = generate_pairs(GraphPairParameters(num_train=30, sizes=[7, 8]), "train")
    test = generate_pairs(GraphPairParameters(num_test=10, sizes=[7]), "test")
    for name, pairs in (("train", train), ("test", test)):
        write_published(tmp_path / name / "data.pt", pairs)
    files = ("--train", str(tmp_path / "train/data.pt"), "--test", str(tmp_path / "test/data.pt"))
    result = cli.ok("dataset", "convert", "pairs.safetensors", *files)
    assert "warning" not in result.out
    found_train, found_test = load_pairs("pairs.safetensors")
    np.testing.assert_array_equal(found_train.adjacency, train.adjacency)
    np.testing.assert_array_equal(found_test.adjacency[..., :7, :7], test.adjacency)
    assert found_test.adjacency.shape[-1] == 8
    same = ("--train", files[1], "--test", files[1])
    assert "30 of 30 pairs" in cli("dataset", "convert", "same.safetensors", *same).out


def test_unconvertible_pairs_are_reported_and_nothing_is_written(cli: CommandLine) -> None:
    file = cli.write("data.pt", "text")
    result = cli("dataset", "convert", "pairs.safetensors", "--train", file, "--test", file)
    assert "neural-interactive-proofs" in refused(result)
    assert not Path("pairs.safetensors").exists()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the hub return a few grey images; returns the requests."""
    requests: list[str] = []

    def load(hub_id: str, *rest: Any, **more: Any) -> Any:
        requests.append(hub_id)
        if "/" not in hub_id or Path(hub_id).exists():
            return real(hub_id, *rest, **more)
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        images = [Image.new("L", (6, 6), number) for number in range(8)]
        rows = {"image": images, "label": [number % 2 for number in range(8)]}
        split = datasets.Dataset.from_dict(rows, features=features)
        return datasets.DatasetDict({"train": split, "test": split})

    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    datasets.disable_progress_bars()
    return requests


def test_images_are_fetched_to_a_folder_that_a_run_reads(hub: list[str], cli: CommandLine) -> None:
    result = cli.ok("dataset", "download", "kmnist", "mnist", "--output", "images")
    assert "8 train, 8 test" in result.out
    assert hub == ["tanganke/kmnist", "ylecun/mnist"]
    parameters = ImageDatasetParameters(name="kmnist", path="images/kmnist")
    train, test = build_image_datasets(parameters, scenario_dir=None)
    assert len(train) == len(test) == 8
    assert option_in(result.out) == "image_classification.dataset.path=images/mnist"
    # Without a folder they stay in the cache.
    cli.ok("dataset", "download", "cifar10")
    assert hub[2:] == ["uoft-cs/cifar10"]
    assert not Path("cifar10").exists()


def test_ids_that_the_hub_lacks_and_a_silent_hub_are_reported(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("local", "digits"):
        assert "kmnist" in refused(cli("dataset", "download", name))
    failure = ConnectionError("no route to host\nmore")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=failure))
    message = refused(cli("dataset", "download", "mnist"))
    assert ("no route to host" in message, "more" in message) == (True, False)
