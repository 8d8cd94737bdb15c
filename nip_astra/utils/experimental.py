"""What is written and tested with stand-ins, and has not run on the machines that it is for."""

from __future__ import annotations

import logging
from enum import StrEnum
from functools import cache

logger = logging.getLogger(__name__)


class Experimental(StrEnum):
    """Such features; the value says what has to be seen before one of them is relied on."""

    DECODE_GRAPHS = "decoding steps captured as CUDA graphs were not run on a GPU yet"
    FLEX_ATTENTION = "scoring of trees by flex attention was not run on a GPU yet"
    VLLM = "the vLLM backend was run with vLLM on CPUs, not on a GPU yet"


@cache
def tell_experimental(feature: Experimental) -> None:
    """Warn, once in a process, that a feature is used that is experimental."""
    logger.warning(
        "experimental: %s; compare a short run with one that does without",
        feature,
    )
