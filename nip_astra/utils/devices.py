"""Which device models run on, and with how many threads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.utils.processor import choose_num_threads, keep_freed_memory


@contextmanager
def threads_for(num_parameters: int, requested: int | None) -> Iterator[None]:
    """Compute with as many threads as a model of this size needs; see `choose_num_threads`."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(choose_num_threads(num_parameters, requested))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resolve_device(name: str | torch.device) -> torch.device:
    """The device for "cpu", "cuda", "cuda:1" or "auto"."""
    name = str(name)
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigurationError(
            f"the device {name!r} was asked for, but models run on 'cpu' or on GPUs of CUDA: "
            "'cuda', or 'cuda:1' for the second; 'auto' takes a GPU where there is one. Give one "
            "of these."
        )
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        raise ConfigurationError(
            f"the device {name!r} was asked for, but torch sees no GPU. Use --device cpu, or "
            "install a CUDA build of torch."
        )
    if number and int(number) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"the device {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs, "
            "numbered from 0. Give the number of one of them."
        )
    if number:
        return torch.device(name)
    return torch.device("cuda" if has_gpu and kind != "cpu" else "cpu")
