"""Where the weights of a model come from, and how they are held."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.base import TokenModel
from nip_astra.language_models.tree_engine.decode_graphs import DecodeGraphs


class WeightsParameters(TokenModel.Parameters):
    """Weights in the layout of transformers or GGUF, an adapter, and their precision."""

    model: str
    """Hub id, folder, `.gguf` file, `scenario://file` or `package://package/file`. An adapter's
    folder, as peft writes it, is added into its base's weights."""
    base_model: str | None = None
    """What the model was before training: where the tokenizer comes from if `model` holds none,
    and the weights under an adapter; null for what the adapter names."""
    dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
    """What is computed in. fastest: bfloat16 for a model that has 50 M weights or more and runs
    where bfloat16 is computed natively, else float32. auto: the same for a model that learns, and
    float32 for any other, so that a target answers exactly as published. Weights that are trained
    in full are kept in float32 either way, and rounded as they are read: mixed precision."""
    lora: LoraParameters | None = None
    """Train a low-rank adapter instead of the weights; the base stays as it is and serves as
    the reference, and as the target where that is the same model."""
    max_batch_tokens: int = Field(default=8192, ge=256)
    """Most positions in one forward pass without gradients, on a GPU with them too. Larger is
    faster there and takes more memory."""
    decode_graphs: DecodeGraphs = "auto"
    """Whether decoding steps are captured as CUDA graphs. auto: on a GPU, where that can be
    done; always: demanded; never. It changes speed, and log-probabilities by rounding.
    Experimental: not run on a GPU yet."""
