"""GGUF files, which transformers parses several times to load one model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_LOADING = threading.RLock()


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Let transformers parse each GGUF file once, and map each model's names once.

    `from_pretrained` parses the file, with the tokens of its vocabulary, for the configuration and
    again for the weights, and works out the names of all tensors anew for every submodule; that
    took 12 of 17 seconds in which a model of 135 M weights was loaded.
    """
    import gguf

    with _LOADING:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = lru_cache(maxsize=2)(reader)
        gguf.get_tensor_name_map = lru_cache(maxsize=8)(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
