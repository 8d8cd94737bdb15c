"""Features tested only with stand-ins, not on their target hardware."""

from __future__ import annotations

import logging
from enum import StrEnum
from functools import cache

logger = logging.getLogger(__name__)


class Experimental(StrEnum):
    """Experimental features, each with its untested parts."""

    VLLM = "the vLLM backend was run with vLLM on CPUs, not on a GPU yet"


@cache
def warn_experimental(feature: Experimental) -> None:
    """Warn once per process that a feature is experimental."""
    logger.warning("experimental: %s; compare a short run with one without it", feature)
