"""A device is the requested device, or an error."""

from __future__ import annotations

import pytest
import torch

from nip_astra.astra import HFASTProblem, RegisteredScorer
from nip_astra.errors import ConfigurationError
from nip_astra.utils.devices import resolve_device


@pytest.fixture(params=[0, 2])
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


def test_available_devices_are_returned(num_gpus: int) -> None:
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if num_gpus else "cpu")
    for name in ("cuda", "cuda:1") if num_gpus else ():
        assert resolve_device(name) == torch.device(name)


@pytest.mark.parametrize(
    "name", ["banana", "mps", "", "cpu:0", "cuda:", "cuda:x", "CUDA", "None", "cuda:2"]
)
def test_an_unknown_or_missing_device_is_reported_and_not_replaced(
    num_gpus: int, name: str
) -> None:
    for build in (
        resolve_device,
        lambda device: HFASTProblem("nowhere", "nowhere", device=device),
        lambda device: RegisteredScorer("profanity", device=device),
    ):
        with pytest.raises(ConfigurationError, match=f"'{name}'"):
            build(name)
