"""Which engine a model needs, and whether another's is one."""

from __future__ import annotations

import logging
from typing import Any

from nip_astra.language_models.sources import SMALLEST_BFLOAT16_MODEL
from nip_astra.language_models.vllm_backend.engine import EngineOptions

logger = logging.getLogger(__name__)


def engine_dtype(asked: str, num_parameters: int) -> str:
    """What an engine without a scorer computes in."""
    if asked == "fastest":
        return "bfloat16" if num_parameters >= SMALLEST_BFLOAT16_MODEL else "float32"
    return "float32" if asked == "auto" else asked


def is_engine_of(options: EngineOptions, parameters: Any) -> bool:
    """Say whether an engine is as asked for; what is left at its default is not asked for.

    Parameters
    ----------
    options : EngineOptions
        Of the engine of a model that learns.
    parameters : VllmLanguageModel.Parameters
        Of another model.
    """
    fields = type(parameters).model_fields
    held = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "decode_graphs": "never" if options.enforce_eager else "always",
    }
    others = [
        name
        for name, value in held.items()
        if getattr(parameters, name) not in (fields[name].default, value)
    ]
    if others:
        logger.info(
            "%r gets an engine of its own, since its %s differs from that of the engine of the "
            "model that learns",
            parameters.model,
            " and ".join(others),
        )
    return not others
