"""The benchmark of interactive proofs compares ways that compute the same, and times them."""

from __future__ import annotations

import json
import logging
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


def test_all_arms_are_timed_and_compute_the_same(
    proofs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    num_threads = torch.get_num_threads()
    arguments = ["--quick", "--repetitions", "1", "--num-threads", "1"]
    proofs.main([*arguments, "--out", str(out)])
    assert torch.get_num_threads() == num_threads
    figures = json.loads(out.read_text())
    assert set(figures["agreement"]) == {"ours and plain"}
    for differences in figures["agreement"].values():
        assert differences["losses"] < 1e-4
        assert differences["gradients"] < 1e-3
    labels = [f"{name}, 1 thread" for name in proofs.ARMS]
    assert set(figures["arms"]) == set(labels)
    for arm in figures["arms"].values():
        seconds = arm["seconds"]
        parts = ("forward", "backward", "clipping", "optimizer", "minibatches")
        assert 0 < sum(seconds[part] for part in parts) < 1.01 * seconds["update"]
        whole = seconds["collect"] + seconds["GAE"] + seconds["update"]
        assert whole <= 1.01 * seconds["iteration"]
        assert arm["trained_frames_per_second"] == pytest.approx(64 / seconds["iteration"])
    pairs = {(row["arm"], row["than"]): row for row in figures["ratios"]}
    assert set(pairs) == {(labels[1], labels[0])}
    for (slower, faster), row in pairs.items():
        slow, fast = (figures["arms"][label]["seconds"]["update"] for label in (slower, faster))
        assert row["update"] == pytest.approx(slow / fast)
    shown = capsys.readouterr().out
    assert "| iteration, ms |" in shown
    assert str(tmp_path) not in shown


def test_ways_that_do_not_compute_the_same_are_not_timed(proofs: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"differ by 2\.0e-03 .* Nothing was timed"):
        proofs._checked({"losses": 0.0, "gradients": 2e-3})
    with pytest.raises(SystemExit, match="differ by nan"):
        proofs._checked({"losses": float("nan")})


def test_the_comparison_sees_a_body_that_computes_something_else(
    proofs: ModuleType, load: Callable[[str], ModuleType]
) -> None:
    plain_proofs = load("plain_proofs")
    trainer = load("our_proofs").graph_trainer(64, 32, 1, 1)
    plain = plain_proofs.PlainWay(trainer, num_epochs=1)
    with torch.no_grad():
        next(plain.critic.parameters()).mul_(1.5)
    with pytest.raises(SystemExit):
        proofs._checked(plain_proofs.compare(trainer, plain))
    plain.close()
