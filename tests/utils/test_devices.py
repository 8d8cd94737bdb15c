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
    if num_gpus:
        assert resolve_device("cuda") == torch.device("cuda")
        assert resolve_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("name", ["banana", "mps", "", "cpu:0", "cuda:", "cuda:x", "CUDA", "None"])
def test_an_unknown_device_is_reported_with_the_valid_devices(num_gpus: int, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Valid: 'cpu', 'cuda', 'cuda:1' .*'auto'"):
        resolve_device(name)


def test_a_gpu_that_is_not_there_is_told(num_gpus: int) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'cuda:2': torch sees 2 GPUs|no GPU for the device 'cuda:2'"
    ):
        resolve_device("cuda:2")


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "banana"])
def test_nothing_runs_on_the_processor_in_its_place(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=f"device '{device}'"):
        HFASTProblem("nowhere", "nowhere", device=device)
    with pytest.raises(ConfigurationError, match=f"device '{device}'"):
        RegisteredScorer("profanity", device=device)
