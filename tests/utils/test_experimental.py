"""Experimental features are reported once, and listed by doctor."""

from __future__ import annotations

import logging

import pytest

from nip_astra import installation as doctor
from nip_astra.utils.experimental import Experimental, warn_experimental


def test_a_feature_is_reported_once_a_process(caplog: pytest.LogCaptureFixture) -> None:
    warn_experimental.cache_clear()
    with caplog.at_level(logging.WARNING):
        warn_experimental(Experimental.VLLM)
        warn_experimental(Experimental.VLLM)
    assert len(caplog.records) == 1
    warn_experimental.cache_clear()


def test_doctor_lists_every_feature() -> None:
    assert {item.name for item in doctor._experimental()} == {"vllm"}
