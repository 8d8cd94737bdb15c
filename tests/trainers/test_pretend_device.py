"""Protocol agents train on a device other than the CPU as on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import metrics_of, run_in
from tests.kit.pretend_device import pretend_device

RL = ("rl.frames_per_batch=24", "rl.minibatch_size=24", "rl.num_epochs=1")
RL += ("rl.pretrain_agents=false",)
GRAPHS = "graph_isomorphism_small"
SIZES = tuple(f"graph_isomorphism.dataset.{name}=12" for name in ("num_train", "num_test"))


def first_metrics(runs_dir: Path, **given: object) -> dict[str, float]:
    return metrics_of(run_in(runs_dir, resolve_experiment(**given), test_run=True, num_threads=1))[
        0
    ]


@pytest.mark.parametrize(
    ("trainer", "scenario", "overrides"),
    [
        *(("vanilla_ppo", GRAPHS, RL + SIZES), ("mappo", GRAPHS, RL + SIZES)),
        *(("reinforce", None, RL), ("spg", None, RL), ("solo_agent", GRAPHS, SIZES)),
    ],
)
def test_another_device_gives_the_numbers_of_the_cpu(
    trainer: str,
    scenario: str | None,
    overrides: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"trainer": trainer, "scenario": scenario, "overrides": overrides}
    on_cpu = first_metrics(tmp_path / "cpu", **given)
    with pretend_device() as device:
        for name, module in list(sys.modules.items()):
            if name.startswith("nip_astra") and hasattr(module, "resolve_device"):
                monkeypatch.setattr(module, "resolve_device", lambda _, device=device: device)
        on_device = first_metrics(tmp_path / "device", **given)
    on_cpu = {name: one for name, one in on_cpu.items() if "loss" in name or "reward" in name}
    assert len(on_cpu) > 3
    # Layers in C and in torch round differently.
    assert {n: on_device[n] for n in on_cpu} == pytest.approx(on_cpu, rel=0.02, abs=1e-3)


def test_tensors_of_two_devices_do_not_mix():
    with pretend_device() as device:
        ones = torch.ones(3, device=device)
        assert (ones + torch.tensor(1.0)).tolist() == [2.0] * 3
        assert ones[torch.tensor([0, 2])].cpu().tolist() == [1.0] * 2
        with pytest.raises(RuntimeError, match="add"):
            ones + torch.ones(3)
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device=device, generator=torch.Generator())
