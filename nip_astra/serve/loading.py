"""Load models to serve."""

from __future__ import annotations

import torch

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.pretrained import find_tokenizer, load_model
from nip_astra.language_models.sources import computing_dtype, round_weights
from nip_astra.language_models.tree_engine.decoder import FAMILY, Decoder, why_unsupported
from nip_astra.language_models.tree_engine.weights import frozen_weights
from nip_astra.parameters.content import find_scenario
from nip_astra.serve.engine import Engine, EngineLimits

_SCENARIO = "scenario://"


def load_engine(
    path: str, *, device: torch.device, dtype: str = "float32", limits: EngineLimits
) -> Engine:
    """Load a model and start to serve it.

    Parameters
    ----------
    path : str
        Folder, hub id or `.gguf` file, as parameters of the Hugging Face backend name it, or
        `scenario://name/folder` for a model that a scenario ships.

    Raises
    ------
    ModelLoadError
        When it cannot be loaded, or is not of the family that the engine computes.
    """
    path = find_model(path)
    module = load_model(path, None, None).to(device)
    reason = why_unsupported(module)
    if reason is not None:
        raise ModelLoadError(
            f"the model {path!r} was to be served, but {reason}. The service computes "
            f"{', '.join(FAMILY)}; serve a model of these."
        )
    tokenizer = find_tokenizer(path, None, None)
    precision = computing_dtype(module, dtype, device, trainable=False, keeps_float32=False)
    round_weights(module, precision)
    decoder = Decoder(module)
    return Engine(
        decoder,
        frozen_weights(module, precision, use_adapter=False, release=True),
        tokenizer,
        module.generation_config,
        vocab_size=int(module.config.vocab_size),
        context_window=int(getattr(module.config, "max_position_embeddings", 1 << 20)),
        limits=limits,
    )


def find_model(path: str) -> str:
    """Where a model stands; a scenario's models are found by its name."""
    scenario, _, inside = path.removeprefix(_SCENARIO).partition("/")
    return str(find_scenario(scenario) / inside) if path.startswith(_SCENARIO) else path
