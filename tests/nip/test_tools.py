"""nip's tools beside training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.nip.maths import compute_nystrom_ihvp, compute_sos_update
from nip_astra.nip.tools import (
    DATASET_WRAPPER_CLASSES,
    TIMEABLES,
    DummyTqdm,
    Timeable,
    register_timeable,
    time_timeable,
)
from nip_astra.scenarios.graphs.pair_files import load_pairs
from tests.test_nip import run_script


@pytest.mark.parametrize("num_dims", [2, 3, 4])
def test_nystroms_product_equals_the_inverse_hessians_for_full_rank(num_dims: int) -> None:
    entries = torch.arange(1.0, num_dims + 1)
    leader, follower = (torch.diagflat(factor * entries) for factor in (1.0, 2.0))
    weight = torch.nn.Parameter(follower)
    answer = weight @ entries
    product = compute_nystrom_ihvp(
        follower_loss=(answer**2).sum(),
        leader_loss=((leader @ answer) ** 2).sum(),
        follower_params={"weight": weight},
        leader_params={"weight": leader},
        rank=num_dims**2,
        rho=0.1,
        retain_graph=False,
        generator=torch.Generator().manual_seed(0),
    )
    block = 2 * torch.outer(entries, entries)
    hessian = torch.block_diag(*[block] * num_dims)
    gradient = (block * (entries**2 * 2 * entries)).T.reshape(-1)
    expected = torch.linalg.solve(hessian + 0.1 * torch.eye(num_dims**2), gradient)
    torch.testing.assert_close(
        product["weight"], expected.view(num_dims, num_dims), atol=1e-2, rtol=1e-3
    )


def test_stable_opponent_shaping_takes_the_terms_by_name() -> None:
    def terms(*values: float) -> dict[str, Tensor]:
        return {"a": torch.tensor(values[:1]), "b": torch.tensor(values[1:])}

    # The shaping opposes LookAhead: p1 = -a |xi_0|^2 / <-chi, xi_0> = 0.5 * 2 / 4.
    update = compute_sos_update(terms(1.0, 2.0), terms(0.0, 1.0), terms(2.0, 2.0), 0.5, 0.1)
    assert {name: value.tolist() for name, value in update.items()} == {"a": [0.5], "b": [0.5]}


def test_a_dummy_bar_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with DummyTqdm(range(3), desc="Training") as bar:
        assert list(bar) == [0, 1, 2]
        bar.set_description("Testing")
        bar.update(1)
        bar.close()
    assert capsys.readouterr() == ("", "")


def test_the_scripts_with_tools_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_script("tools", monkeypatch, tmp_path, "pairs", "--num-graphs", "30")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "epoch" in shown
    assert "graph_isomorphism_ppo" in shown
    train, test = load_pairs(tmp_path / "data" / "graph_isomorphism" / "pairs.safetensors")
    assert len(train.wl_score) == len(test.wl_score) == 30


def test_timeables_are_registered_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nip_astra.nip.tools.TIMEABLES", dict(TIMEABLES))

    @register_timeable(name="mine")
    class Mine(Timeable):
        hyper_params = TIMEABLES["graph_isomorphism_solo_agent"].hyper_params

    assert set(time_timeable("mine", force_cpu=True).seconds) == {"epoch", "forward"}
    with pytest.raises(UnknownNameError, match="yours"):
        time_timeable("yours")
    with pytest.raises(ConfigurationError, match="param_scale"):
        time_timeable("mine", param_scale=2.0)
    assert {"test", "mnist", "cifar10"} <= set(DATASET_WRAPPER_CLASSES)


@pytest.mark.parametrize("options", [(), ("--images",)])
def test_the_short_scripts_run(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--use_cpu", "--prepare-experiment", "--run-id", "short", *options)
    run_script("dummy", monkeypatch, tmp_path, *given)
    assert (tmp_path / "runs" / "short" / "results.json").is_file()
    assert sys.argv[0] == "dummy"
