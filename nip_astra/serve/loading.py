"""Load models to serve."""

from __future__ import annotations

from pathlib import Path

import torch

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.pretrained import find_tokenizer, load_model
from nip_astra.language_models.sources import computing_dtype, round_weights
from nip_astra.language_models.tree_engine.decoder import FAMILY, Decoder, why_unsupported
from nip_astra.language_models.tree_engine.weights import frozen_weights
from nip_astra.parameters.content import resolve_reference
from nip_astra.serve.engine import Engine, EngineLimits


def load_engine(
    path: str, *, device: torch.device, dtype: str = "float32", limits: EngineLimits
) -> Engine:
    """Load a model and start to serve it.

    Parameters
    ----------
    path : str
        Folder, hub id or `.gguf` file.

    Raises
    ------
    ModelLoadError
        When it cannot be loaded, or is not of the family that the engine computes.
    """
    module = load_model(path, None, None).to(device)
    reason = why_unsupported(module)
    if reason is not None:
        raise ModelLoadError(
            f"the model {path!r} was to be served, but {reason}. The service computes "
            f"{', '.join(FAMILY)}; serve a model of these."
        )
    tokenizer = find_tokenizer(path, None, None)
    precision = computing_dtype(module, dtype, device, trainable=False)
    round_weights(module, precision)
    decoder, num_parameters = Decoder(module), int(module.num_parameters())
    return Engine(
        decoder,
        frozen_weights(module, precision, use_adapter=False, release=True),
        tokenizer,
        module.generation_config,
        vocab_size=int(module.config.vocab_size),
        context_window=int(getattr(module.config, "max_position_embeddings", 1 << 20)),
        num_parameters=num_parameters,
        limits=limits,
    )


def find_model(path: str) -> str:
    """The absolute path of a model, or its hub id.

    Parameters
    ----------
    path : str
        Folder, hub id or `.gguf` file, as parameters of the Hugging Face backend name it, or
        `scenario://name/folder` for a model that a scenario ships.
    """
    found = resolve_reference(path)
    if isinstance(found, Path) and (found.exists() or found.is_absolute()):
        return str(found.resolve())
    return path
