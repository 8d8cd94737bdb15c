"""Views of images by trained models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from sklearn.decomposition import PCA
from transformers import ResNetConfig, ResNetModel, ViTConfig, ViTModel

from nip_astra.errors import ConfigurationError, DataError, MissingDependencyError, ModelLoadError
from nip_astra.scenarios.images import pretrained
from nip_astra.scenarios.images.agents import ImageClassificationAgentParameters
from nip_astra.scenarios.images.pretrained import (
    HuggingFaceImageModel,
    PcaModel,
    PretrainedModel,
    embed_all,
    embedding_key,
    register_pretrained_model,
)
from nip_astra.utils import tensor_cache


def images(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def fit(train: torch.Tensor, **parameters: Any) -> PcaModel:
    return PcaModel(PcaModel.Parameters(**parameters), train_images_NKHW=train, scenario_dir=None)


# ---- principal components


def test_principal_components_are_those_of_scikit_learn_with_deviation_1() -> None:
    train, test = images(60, 1, 4, 4), images(10, 1, 4, 4, seed=1)
    result = fit(train, num_components=3).embed(test)
    reference = PCA(n_components=3, whiten=True, svd_solver="full").fit(train.flatten(1).numpy())
    expected = reference.transform(test.flatten(1).numpy()) * np.sqrt(60 / 59)
    assert result.shape == (10, 3, 1, 1)
    np.testing.assert_allclose(np.abs(result[..., 0, 0]), np.abs(expected), rtol=1e-3, atol=1e-4)
    # Signs are fixed.
    components_XF = fit(train, num_components=16).components_XF
    assert (components_XF.gather(0, components_XF.abs().argmax(0, keepdim=True)) > 0).all()
    own = fit(train, num_components=3).embed(train)[..., 0, 0]
    torch.testing.assert_close(own.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(own.std(0, correction=0), torch.ones(3))


def test_parts_of_an_image_are_laid_out_as_the_image_is() -> None:
    train = images(30, 2, 7, 6)
    model = fit(train, num_components=4, patch_size=2)
    result = model.embed(train)
    assert result.shape == (30, 4, 3, 3)
    changed = train.clone()
    changed[0, 1, 3, 5] += 1.0
    moved = (model.embed(changed) - result).abs().sum(1)
    assert moved.nonzero().tolist() == [[0, 1, 2]]


def test_directions_without_variance_give_zero() -> None:
    train = images(30, 1, 1, 2).expand(-1, -1, 2, -1)
    result = fit(train, num_components=4).embed(train)
    assert result[:, 2:].abs().max() == 0
    assert result[:, :2].abs().max() > 0


def test_impossible_numbers_of_principal_components_are_refused() -> None:
    train = images(30, 1, 4, 4)
    for wrong, most in (({"num_components": 17}, "that"), ({"patch_size": 5}, "4")):
        with pytest.raises(ConfigurationError, match=f"{most} at most"):
            fit(train, **wrong)


# ---- models of transformers


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resnet")
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_channels=3
    )
    torch.manual_seed(0)
    ResNetModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": [8, 12], "patch_size": 4}
    config = ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_channels=1)
    torch.manual_seed(0)
    ViTModel(config).save_pretrained(folder)
    return folder


def load(model: Path | str, **parameters: Any) -> HuggingFaceImageModel:
    return HuggingFaceImageModel(
        HuggingFaceImageModel.Parameters(model=str(model), **parameters),
        train_images_NKHW=torch.zeros(1, 1, 8, 8),
        scenario_dir=None,
    )


def test_a_convolutional_network_gives_its_last_map_in_batches(resnet: Path) -> None:
    given = images(5, 3, 32, 32)
    result = load(resnet, batch_size=2).embed(given)
    with torch.no_grad():
        expected = ResNetModel.from_pretrained(resnet).eval()(pixel_values=given).last_hidden_state
    assert expected.ndim == 4
    torch.testing.assert_close(result, expected)


def test_a_transformer_gives_its_patches_laid_out_as_the_image_is(vit: Path) -> None:
    given = images(3, 1, 8, 12)
    result = load(vit).embed(given)
    with torch.no_grad():
        state = ViTModel.from_pretrained(vit).eval()(pixel_values=given).last_hidden_state
    assert result.shape == (3, 8, 2, 3)
    torch.testing.assert_close(result[:, :, 1, 2], state[:, 1 + 5])
    torch.testing.assert_close(result[:, :, 0, 1], state[:, 1 + 1])


def test_grey_images_are_repeated_in_each_colour(resnet: Path) -> None:
    grey = images(2, 1, 32, 32)
    model = load(resnet)
    torch.testing.assert_close(model.embed(grey), model.embed(grey.expand(-1, 3, -1, -1)))
    assert load(resnet, image_size=64).embed(images(2, 3, 8, 8)).shape[-1] > 1


def test_images_are_normalised_like_in_the_model_s_preprocessor(vit: Path, tmp_path: Path) -> None:
    shutil.copytree(vit, tmp_path, dirs_exist_ok=True)
    config = {"image_mean": [0.25], "image_std": [0.5], "image_processor_type": "ViTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    given = images(2, 1, 8, 12)
    torch.testing.assert_close(load(tmp_path).embed(given), load(vit).embed((given - 0.25) / 0.5))
    # Models of timm define it in their configuration.
    timm = {"pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    mean, std = pretrained._normalisation(str(vit), timm)
    assert [*mean.flatten(), *std.flatten()] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_an_image_that_the_model_cannot_read_is_reported(resnet: Path, vit: Path) -> None:
    with pytest.raises(ConfigurationError, match="reads 3 channels, but images have 2"):
        load(resnet).embed(images(1, 2, 8, 8))
    with pytest.raises(ConfigurationError, match="Set its image_size"):
        load(vit).embed(images(1, 1, 16, 16))


def test_models_that_cannot_be_loaded_are_reported(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    cases = {
        tmp_path / "nowhere": "nowhere",
        tmp_path / "empty": r"config\.json",
        tmp_path: "Unrecognized model",
        tiny_model_dir: "image model",
    }
    for folder, fact in cases.items():
        with pytest.raises(ModelLoadError, match=fact):
            load(folder)

    def needs_timm(*_: object, **__: object) -> None:
        raise ImportError("TimmWrapperModel requires the timm library.\nInstall it.")

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", needs_timm)
    with pytest.raises(MissingDependencyError, match="pip install timm"):
        load(tmp_path)


def test_a_model_without_some_of_its_weights_is_refused(resnet: Path, tmp_path: Path) -> None:
    config = json.loads((resnet / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"depths": [1, 2]}))
    (tmp_path / "model.safetensors").write_bytes((resnet / "model.safetensors").read_bytes())
    with pytest.raises(ModelLoadError, match=r"encoder\."):
        load(tmp_path)


# ---- views of a dataset


@pytest.mark.usefixtures("no_plugins_left")
def test_a_custom_model_is_found_by_its_name_and_gives_a_view_of_each_image() -> None:
    @register_pretrained_model("mean_grey")
    class MeanGrey(PretrainedModel):
        """The mean of all pixels, times a factor, or something else."""

        class Parameters(PretrainedModel.Parameters):
            """The factor."""

            factor: float = 1.0
            fault: str = ""

        def embed(self, images_NKHW: torch.Tensor) -> torch.Tensor:
            views = self.parameters.factor * images_NKHW.mean((1, 2, 3), keepdim=True)
            wrong = {"flat": views[:, 0, 0, 0], "short": views[1:], "infinite": views / 0}
            return wrong.get(self.parameters.fault, views)

    def embedded(**values: object) -> Any:
        model = {"pretrained_embeddings_model": {"_type": "mean_grey"} | values}
        agent = ImageClassificationAgentParameters.from_dict(model)
        return embed_all(agent.pretrained_embeddings_model, *both, scenario_dir=None)

    both = images(4, 1, 2, 2), images(2, 1, 2, 2, seed=1)
    for result, given in zip(embedded(factor=2.0), both, strict=True):
        torch.testing.assert_close(result, 2 * given.mean((1, 2, 3), keepdim=True))
    for fault in ("flat", "short", "infinite"):
        with pytest.raises(DataError, match=r"'mean_grey' .* for 4 images"):
            embedded(fault=fault)


def test_equal_parameters_share_a_key_wherever_views_are_kept(tmp_path: Path) -> None:
    usual = embedding_key(PcaModel.Parameters())
    assert usual.startswith("embeddings_pca_")
    assert embedding_key(PcaModel.Parameters(cache_dir=str(tmp_path))) == usual
    assert embedding_key(PcaModel.Parameters(num_components=3)) != usual


def test_views_are_kept_on_disk_where_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = PcaModel.Parameters(cache_dir=str(tmp_path / "cache"), num_components=2)
    train, test = images(20, 1, 4, 4), images(5, 1, 4, 4, seed=1)
    first = embed_all(parameters, train, test, scenario_dir=None)
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 1
    monkeypatch.setattr(PcaModel, "embed", lambda *_: pytest.fail("was to be read from disk"))
    second = embed_all(parameters, train, test, scenario_dir=None)
    assert all(torch.equal(item, other) for item, other in zip(first, second, strict=True))
    monkeypatch.undo()
    for changed in ((train + 1, test), (train, test + 1)):
        embed_all(parameters, *changed, scenario_dir=None)
    others = PcaModel.Parameters(cache_dir=str(tmp_path / "cache"), num_components=3)
    embed_all(others, train, test, scenario_dir=None)
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_views_of_a_model_that_was_trained_again_are_computed_again(
    resnet: Path, tmp_path: Path
) -> None:
    shutil.copytree(resnet, tmp_path / "model")
    cache = str(tmp_path / "cache")
    parameters = HuggingFaceImageModel.Parameters(model="scenario://model", cache_dir=cache)
    train = images(4, 3, 8, 8)
    first, _ = embed_all(parameters, train, train, scenario_dir=tmp_path)
    trained = ResNetModel.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        next(trained.parameters()).mul_(2)
    trained.save_pretrained(tmp_path / "model")
    second, _ = embed_all(parameters, train, train, scenario_dir=tmp_path)
    assert not torch.allclose(first, second)


def _fails_on_a_full_disk(tensors: object, path: Path, metadata: object) -> None:
    path.write_bytes(b"begun")
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


def test_damaged_views_are_computed_again_and_an_unwritable_cache_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = PcaModel.Parameters(cache_dir=str(tmp_path / "cache"))
    train = images(20, 1, 4, 4)
    first, _ = embed_all(parameters, train, train, scenario_dir=None)
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    for damaged in (b"nothing", whole[:-4] + b"\0\0\0\0", whole[:-1]):
        path.write_bytes(damaged)
        caplog.clear()
        result, _ = embed_all(parameters, train, train, scenario_dir=None)
        assert "computed again" in caplog.text
        assert torch.equal(result, first)
        assert path.read_bytes() == whole
    (tmp_path / "file").write_text("")
    below = PcaModel.Parameters(cache_dir=str(tmp_path / "file"))
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "file"))):
        embed_all(below, train, train, scenario_dir=None)
    monkeypatch.setattr(tensor_cache, "save_file", _fails_on_a_full_disk)
    with pytest.raises(DataError, match="No space left"):
        embed_all(parameters, train + 1, train, scenario_dir=None)
    assert list(path.parent.iterdir()) == [path]
