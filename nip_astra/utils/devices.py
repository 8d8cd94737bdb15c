"""Which device models run on."""

from __future__ import annotations

import torch

from nip_astra.errors import ConfigurationError


def resolve_device(name: str) -> torch.device:
    """Give the device for "cpu", "cuda" or "auto".

    Raises
    ------
    ConfigurationError
        When a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigurationError(
            "the device 'cuda' was asked for, but torch sees no GPU. Use --device cpu, or install "
            "a CUDA build of torch."
        )
    return torch.device("cuda" if has_gpu and name in ("cuda", "auto") else "cpu")
