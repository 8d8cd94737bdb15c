"""Image classification: agents point at parts of an image, and the verifier decides its label."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from tensordict import TensorDict, TensorDictBase

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.types import ScenarioType
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentPolicyHead,
    AgentShape,
    AgentValueHead,
    SoloAgentHead,
)
from nip_astra.scenarios.heads import SummarySoloHead, SummaryValueHead
from nip_astra.scenarios.images.agents import (
    IMAGE,
    ImageBody,
    ImageClassificationAgentParameters,
    ImageGrid,
    ImagePolicyHead,
)
from nip_astra.scenarios.images.data import ImageDatasetParameters, build_image_datasets
from nip_astra.scenarios.images.drawing import ImageView
from nip_astra.scenarios.images.pretrained import embed_all, embedding_key
from nip_astra.scenarios.registry import register_scenario
from nip_astra.scenarios.tensordict_base import Datasets, TensorDictScenario


@register_scenario(ScenarioType.IMAGE_CLASSIFICATION)
class ImageClassificationScenario(TensorDictScenario):
    """Agents point at parts of an image, and the verifier decides its label.

    The image is halved `num_block_groups` times to a grid of latent pixels, the symbols of
    messages.
    """

    kind: ClassVar[str] = str(ScenarioType.IMAGE_CLASSIFICATION)
    datapoint_kind = "image"
    datapoint_view = ImageView

    class Parameters(TensorDictScenario.Parameters):
        """Images and agents."""

        agents: Mapping[str, ImageClassificationAgentParameters] = {
            DEFAULT_AGENT: ImageClassificationAgentParameters()
        }
        """Agents by name; those of `default` apply to all others."""
        dataset: ImageDatasetParameters = ImageDatasetParameters()
        """The images and their labels."""
        num_block_groups: int = Field(default=1, ge=1, le=1000)
        """Number of halvings of the image. Larger gives fewer symbols, of larger parts."""
        initial_num_channels: int = Field(default=16, ge=1, le=1_000_000)
        """Width of the first group of blocks; each further one has twice as many. Larger learns
        more and is slower."""

    @classmethod
    def build_datasets(cls, parameters: Any, *, seed: int, scenario_dir: Path | None) -> Datasets:
        datasets = build_image_datasets(parameters.dataset, scenario_dir=scenario_dir)
        train, test = datasets
        _check_size(parameters, train)
        # Agents with equal models share the embeddings.
        models = {}
        for agent in parameters.agents.values():
            model = agent.pretrained_embeddings_model
            if model is not None and not agent.is_random:
                models[embedding_key(model)] = model
        for key, model in models.items():
            train[key], test[key] = embed_all(
                model, train["image"], test["image"], scenario_dir=scenario_dir
            )
        return datasets

    @classmethod
    def num_symbols(cls, parameters: Any, dataset: TensorDict) -> int:
        return _grid(parameters, dataset).num_latent_pixels

    @classmethod
    def build_body(
        cls, parameters: Any, agent: Any, shape: AgentShape, dataset: TensorDict
    ) -> AgentBody:
        embedding_channels: int | None = None
        if agent.pretrained_embeddings_model is not None:
            embeddings_NFhw = dataset[embedding_key(agent.pretrained_embeddings_model)]
            embedding_channels = embeddings_NFhw.shape[1]
        return ImageBody(
            agent,
            shape,
            _grid(parameters, dataset),
            num_block_groups=parameters.num_block_groups,
            initial_num_channels=parameters.initial_num_channels,
            embedding_channels=embedding_channels,
        )

    @classmethod
    def build_policy_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentPolicyHead:
        return ImagePolicyHead(agent, shape, cls.impossible_symbols)

    @classmethod
    def build_value_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> AgentValueHead:
        return SummaryValueHead(agent, shape, IMAGE, shape.d_representation)

    @classmethod
    def build_solo_head(cls, parameters: Any, agent: Any, shape: AgentShape) -> SoloAgentHead:
        return SummarySoloHead(agent, IMAGE, shape.d_representation)

    @classmethod
    def describe_datapoint(cls, parameters: Any, row: TensorDictBase) -> dict[str, Any]:
        """Return the image's pixels from 0 to 255, and its height and width in latent pixels."""
        grid = ImageGrid.of(row["image"].shape, parameters.num_block_groups)
        pixels_KHW = (row["image"].clamp(0.0, 1.0) * 255).round().long()
        pixels_HWK = pixels_KHW.permute(1, 2, 0)
        pixels = pixels_HWK.squeeze(-1) if grid.num_channels == 1 else pixels_HWK
        description = super().describe_datapoint(parameters, row)
        description["kind"] = cls.datapoint_kind
        description["pixels"] = pixels.tolist()
        description["latent"] = [grid.latent_height, grid.latent_width]
        return description


def _grid(parameters: Any, dataset: TensorDict) -> ImageGrid:
    return ImageGrid.of(dataset["image"].shape[1:], parameters.num_block_groups)


def _check_size(parameters: Any, dataset: TensorDict) -> None:
    """Raise if an image has fewer than two symbols, of which a message could choose."""
    grid = _grid(parameters, dataset)
    if grid.num_latent_pixels >= 2:
        return
    advice = "Choose larger images."
    for num_halvings in range(1, max(grid.height, grid.width).bit_length()):
        if (grid.height >> num_halvings) * (grid.width >> num_halvings) >= 2:
            advice = f"Set image_classification.num_block_groups to {num_halvings} at most."
    raise ConfigurationError(
        f"halving images of {grid.height} x {grid.width} pixels {parameters.num_block_groups} "
        f"times leaves {grid.num_latent_pixels} latent pixel, but a message needs two. {advice}"
    )
