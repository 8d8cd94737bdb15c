"""The benchmark of interactive proofs compares baseline and ours, and times them if they agree."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensordict.nn import composite_lp_aggregate, set_composite_lp_aggregate


@pytest.fixture(scope="module")
def proofs(benchmark: ModuleType) -> Iterator[ModuleType]:
    before = composite_lp_aggregate()
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    yield benchmark
    set_composite_lp_aggregate(before).set()


def test_baseline_and_ours_are_timed_and_compute_the_same(
    proofs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    num_threads = torch.get_num_threads()
    sizes = ["--frames", "64", "--minibatch", "32", "--epochs", "2", "--num-threads", "1"]
    proofs.main([*sizes, "--rounds", "1", "--out", str(out)])
    assert torch.get_num_threads() == num_threads
    report = json.loads(out.read_text())
    assert report["agreement"]["losses"] < 1e-4
    assert report["agreement"]["gradients"] < 1e-3
    figures = report["figures"]
    assert set(figures) == {"plain, 1", "ours, 1"}
    for medians in figures.values():
        whole = medians["collect"] + medians["GAE"] + medians["update"]
        assert 0 < whole <= 1.01 * medians["iteration"]
        assert medians["trained frames per second"] == pytest.approx(64 / medians["iteration"])
    slow, fast = (figures[name]["update"] for name in ("plain, 1", "ours, 1"))
    assert report["ratios"]["1"]["update"] == pytest.approx(slow / fast)
    assert "| iteration, ms |" in capsys.readouterr().out


def test_implementations_that_disagree_are_not_timed(
    proofs: ModuleType, load: Callable[[str], ModuleType]
) -> None:
    for figures, shown in (
        ({"losses": 0.0, "gradients": 2e-3}, r"2\.0e-03"),
        ({"losses": math.nan}, "nan"),
    ):
        with pytest.raises(SystemExit, match=f"differ by {shown}"):
            proofs.check(figures)
    plain_proofs = load("plain_proofs")
    trainer = load("our_proofs").graph_trainer(64, 32, 1, 1)
    plain = plain_proofs.TorchRlBaseline(trainer)
    with torch.no_grad():
        next(plain.critic.parameters()).mul_(1.5)
    with pytest.raises(SystemExit):
        proofs.check(plain_proofs.compare(trainer, plain))
    plain.close()
