"""What is classified, and how the networks of the agents look."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from nip_astra.parameters.agents import HeadParameters
from nip_astra.parameters.conditions import where, where_above, where_given
from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters
from nip_astra.scenarios.images.pretrained.base import PretrainedModelParameters


class ImageDatasetParameters(SubParameters):
    """Which images, and which of them are labelled 0 and which 1.

    The experiment's seed does not enter: runs of different seeds see the same datapoints.
    """

    name: Literal[
        "digits",
        "tiny",
        "mnist",
        "fashion_mnist",
        "kmnist",
        "cifar10",
        "cifar100",
        "svhn",
        "local",
    ] = "digits"
    """digits: 1,797 images of 8 x 8 pixels that scikit-learn carries. tiny: 400 images of 8 x 8
    pixels made at once, ten classes of faint strokes, to try things out. local: a dataset of your
    own at `path`. Any other is read from the Hugging Face hub, or from `path` where that is
    given."""
    path: str | None = None
    """A Parquet file, a folder of Parquet files, a folder that `save_to_disk` wrote, or one of
    `train/<class>/` and `test/<class>/` with image files; or `scenario://` or `package://` and
    such a path."""
    binarification_method: Literal["merge", "select_two", "random"] = "merge"
    """How classes become two labels. merge: classes are shuffled; the first half of them is 0, the
    rest 1. select_two: two classes are 0 and 1, all others are left out. random: each image has a
    label of its own that never changes, so that it can only be learned by heart."""
    binarification_seed: Annotated[int, where("binarification_method", "merge", "random")] = Field(
        default=0, ge=0, le=MAX_WHOLE
    )
    """Root of what merge and random draw."""
    selected_classes: list[int] | None = None
    """The class that select_two labels 0, and the one that it labels 1."""
    make_balanced: bool = True
    """Whether images of the more frequent label are left out, so that both are equally frequent."""
    max_train_size: int | None = Field(default=None, ge=2)
    """Most images to train on; null takes all. Larger generalises better."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the images to test on, where the source has no test images of its own."""
    split_seed: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Root of what is drawn to split the source and to leave images out."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        classes = self.selected_classes
        if self.binarification_method == "select_two":
            if classes is None or len(classes) != 2 or classes[0] == classes[1]:
                raise PydanticCustomError(
                    "selected_classes",
                    "with binarification_method select_two, selected_classes must name two "
                    "different classes, for instance [3, 8]",
                )
        elif classes is not None:
            raise PydanticCustomError(
                "selected_classes",
                "selected_classes is read by binarification_method select_two only, which is "
                "{method}; leave one of them out",
                {"method": self.binarification_method},
            )
        if self.name in ("digits", "tiny") and self.path is not None:
            raise PydanticCustomError(
                "path", "digits and tiny are built in and have no path; name the data local"
            )
        if self.name == "local" and self.path is None:
            raise PydanticCustomError("path", "the name local needs a path to read images from")
        return self


class ImageClassificationAgentParameters(HeadParameters):
    """An agent that looks at an image and at what was said about it."""

    activation_function: Literal["tanh", "relu", "gelu", "sigmoid"] = "relu"
    """What stands between layers."""
    building_block_type: Literal["conv", "residual"] = "conv"
    """conv: one convolution and activation. residual: two of them, added to what went in."""
    num_blocks_per_group: int = Field(default=2, ge=1, le=1000)
    """Blocks before each halving of the image. Larger sees more around a pixel and is slower."""
    kernel_size: int = Field(default=3, ge=1)
    """Width and height of convolutions in pixels; odd. Larger sees more and is slower."""
    stride: Literal[1, 2] = 1
    """1: the maximum of 2 x 2 pixels halves the image after each group of blocks. 2: the first
    convolution of a group halves it instead, which is faster and coarser."""
    d_latent_pixel_selector: Annotated[int, where_above("num_latent_pixel_selector_layers", 1)] = (
        Field(default=16, ge=1)
    )
    """Width of the hidden layers of what chooses a latent pixel."""
    num_latent_pixel_selector_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers of what chooses a latent pixel; 1 has no hidden layer."""
    pretrained_embeddings_model: PretrainedModelParameters | None = None  # type: ignore[valid-type]
    """A trained model whose view of the image the body reads beside the pixels; null for none."""
    pretrained_embedding_channels: Annotated[int, where_given("pretrained_embeddings_model")] = (
        Field(default=16, ge=1)
    )
    """Channels that such a view is reduced to, before it is brought to the image's size."""

    @field_validator("kernel_size")
    @classmethod
    def _is_odd(cls, size: int) -> int:
        if size % 2 == 0:
            raise PydanticCustomError(
                "kernel_size",
                "must be odd, so that a convolution has a pixel in its middle",
                {"hint": f"Take {size + 1}."},
            )
        return size
