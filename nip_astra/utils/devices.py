"""Device and number of threads for models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.utils.processor import choose_num_threads, keep_freed_memory


@contextmanager
def threads_for(num_parameters: int, requested: int | None) -> Iterator[None]:
    """Set the number of torch threads for a model of this size; see `choose_num_threads`."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(choose_num_threads(num_parameters, requested))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device for "cpu", "cuda", "cuda:1" or "auto"."""
    name = str(name)
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigurationError(
            f"unknown device {name!r}. Valid: 'cpu', 'cuda', 'cuda:1' for the second GPU, or "
            "'auto' for a GPU if there is one."
        )
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        raise ConfigurationError(
            f"torch sees no GPU for the device {name!r}. Use --device cpu, or install a CUDA build "
            "of torch."
        )
    if number and int(number) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"there is no device {name!r}: torch sees {torch.cuda.device_count()} GPUs, numbered "
            "from 0."
        )
    if number:
        return torch.device(name)
    return torch.device("cuda" if has_gpu and kind != "cpu" else "cpu")
