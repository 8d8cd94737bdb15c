"""Protocol agents train on a device other than the CPU as on the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.kit.pretend_device import pretend_device

RL = ("rl.frames_per_batch=48", "rl.minibatch_size=48", "rl.pretrain_agents=false")
GRAPHS = {"scenario": "graph_isomorphism_small"}
SIZES = tuple(f"graph_isomorphism.dataset.{name}=24" for name in ("num_train", "num_test"))


def first_metrics(runs_dir: Path, **given: object) -> dict[str, float]:
    where = {"runs_dir": str(runs_dir), "run_id": "run", "progress": False, "num_threads": 1}
    run_experiment(resolve_experiment(**given), ExperimentSettings(test_run=True, **where))
    return json.loads((runs_dir / "run" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    "given",
    [
        {"trainer": "vanilla_ppo", "overrides": RL + SIZES} | GRAPHS,
        {"trainer": "mappo", "overrides": RL + SIZES} | GRAPHS,
        {"trainer": "reinforce", "overrides": RL},
        {"trainer": "spg", "overrides": RL},
        {"trainer": "solo_agent", "overrides": SIZES} | GRAPHS,
    ],
    ids=lambda given: given["trainer"],
)
def test_another_device_gives_the_numbers_of_the_cpu(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_cpu = first_metrics(tmp_path / "cpu", **given)
    with pretend_device() as device:
        for name, module in list(sys.modules.items()):
            if name.startswith("nip_astra") and hasattr(module, "resolve_device"):
                monkeypatch.setattr(module, "resolve_device", lambda _, device=device: device)
        on_device = first_metrics(tmp_path / "device", **given)
    names = [name for name in on_cpu if "loss" in name or "reward" in name]
    assert len(names) > 3
    # Layers in C and in torch round differently.
    assert {n: on_device[n] for n in names} == pytest.approx(
        {n: on_cpu[n] for n in names}, rel=0.02, abs=1e-3
    )


def test_tensors_of_two_devices_do_not_mix():
    with pretend_device() as device:
        ones = torch.ones(3, device=device)
        assert (ones + torch.tensor(1.0)).tolist() == [2.0] * 3
        assert ones[torch.tensor([0, 2])].cpu().tolist() == [1.0] * 2
        with pytest.raises(RuntimeError, match="add"):
            ones + torch.ones(3)
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device=device, generator=torch.Generator())
