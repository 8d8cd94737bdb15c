"""What is experimental is told once, and listed by doctor."""

from __future__ import annotations

import logging

import pytest

from nip_astra import installation as doctor
from nip_astra.utils.experimental import Experimental, warn_experimental


def test_a_feature_is_told_once_a_process(caplog: pytest.LogCaptureFixture) -> None:
    warn_experimental.cache_clear()
    with caplog.at_level(logging.WARNING):
        warn_experimental(Experimental.DECODE_GRAPHS)
        warn_experimental(Experimental.DECODE_GRAPHS)
        warn_experimental(Experimental.VLLM)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("experimental: decoding steps captured as CUDA graphs")
    warn_experimental.cache_clear()


def test_doctor_lists_every_feature() -> None:
    found = {one.name for one in doctor._experimental()}
    assert found == {"decode_graphs", "flex_attention", "vllm"}
