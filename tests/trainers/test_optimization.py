"""Optimizers and schedules are looked up by name, including those of a plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services import training
from nip_astra.parameters.training import OPTIMIZERS, SCHEDULES, TrainingConfiguration
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.trainers.optimization import build_optimizer, learning_rate

PLUGIN = """
import torch
import nip_astra as na


@na.register_optimizer("heavy_ball")
def heavy_ball(groups, *, lr, weight_decay):
    return torch.optim.SGD(groups, lr=lr, weight_decay=weight_decay, momentum=0.9)


@na.register_schedule("halved")
def halved(progress):
    return 1.0 if progress < 0.5 else 0.5
"""


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_optimizer_of_torch_steps(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    decay = 0.0 if name == "rprop" else 0.1
    config = TrainingConfiguration(optimizer=name, lr=0.1, weight_decay=decay)
    optimizer = build_optimizer(config, [weight])
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0].get("weight_decay", 0.0) == decay
    weight.square().sum().backward()
    optimizer.step()
    assert weight.mean() < 1


def test_adamw_of_a_large_model_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainingConfiguration(optimizer="adamw", lr=0.1, weight_decay=0.1)
    results = []
    for smallest in (10**6, 700):
        monkeypatch.setattr(training, "SMALLEST_FUSED", smallest)
        generator = torch.Generator().manual_seed(0)
        shapes = [(20, 10), (333,), (7,), (10, 20)]
        weights = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        optimizer = build_optimizer(config, weights)
        assert bool(optimizer.param_groups[0]["fused"]) == (smallest == 700)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        results.append([*weights, *(x for one in optimizer.state.values() for x in one.values())])
    assert len(results[0]) == len(results[1]) == 4 * 4
    for unfused, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, unfused)


def test_weight_decay_is_refused_where_an_optimizer_has_none() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigurationError, match="weight_decay"):
        build_optimizer(TrainingConfiguration(optimizer="rprop", weight_decay=0.1), weights)


def test_the_learning_rate_warms_up_and_falls_as_scheduled() -> None:
    cosine = TrainingConfiguration(lr=2.0, lr_schedule="cosine", num_warmup_steps=4)
    linear = TrainingConfiguration(lr=2.0, lr_schedule="linear")
    places = ((cosine, 0, 0.0), (cosine, 3, 0.0), (cosine, 9, 0.5), (linear, 0, 0.25))
    rates = [
        learning_rate(one, step=step, progress=progress, num_steps=12)
        for one, step, progress in places
    ]
    assert rates == pytest.approx([0.5, 2.0, 1.0, 1.5])


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
def test_a_schedule_of_steps_is_that_of_transformers(name: str) -> None:
    config = TrainingConfiguration(
        lr=2.0, lr_schedule=name, num_warmup_steps=3, schedules_steps=True
    )
    rates = [learning_rate(config, step=step, progress=0.0, num_steps=8) for step in range(8)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    theirs = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=3, num_training_steps=8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected)


def test_vectors_can_be_left_out_of_weight_decay() -> None:
    matrix, bias = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2,)))
    config = TrainingConfiguration(lr=0.1, weight_decay=0.1, decays_vectors=False)
    optimizer = build_optimizer(config, [bias, matrix])
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.max() < 1
    assert bias.min() == 1


@pytest.mark.usefixtures("no_plugins_left")
def test_a_plug_in_adds_an_optimizer_and_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    overrides = ["training.optimizer=heavy_ball", "training.lr_schedule=halved", "training.lr=0.5"]
    resolved = resolve_experiment(trainer="ast_dpo", plugins=[str(path)], overrides=overrides)
    training = resolved.hyper_params.training
    optimizer = build_optimizer(training, [torch.nn.Parameter(torch.ones(1))])
    assert optimizer.param_groups[0]["momentum"] == 0.9
    rates = [
        learning_rate(training, step=9, progress=p, num_steps=12) for p in (0.0, 0.4, 0.6, 1.0)
    ]
    assert rates == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.usefixtures("no_plugins_left")
def test_an_optimizer_that_is_none_is_refused_by_name() -> None:
    OPTIMIZERS.register("forgotten")(lambda groups, *, lr, weight_decay: None)
    config = TrainingConfiguration(optimizer="forgotten")
    with pytest.raises(ConfigurationError, match=r"'forgotten'.*NoneType"):
        build_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.usefixtures("no_plugins_left")
@pytest.mark.parametrize("factor", [float("nan"), -1.0, float("inf"), None])
def test_a_schedule_that_is_no_factor_is_refused_by_name(factor: float | None) -> None:
    SCHEDULES.register("wrong")(lambda progress: factor)
    config = TrainingConfiguration(lr_schedule="wrong")
    with pytest.raises(ConfigurationError, match=f"'wrong'.*{factor}"):
        learning_rate(config, step=0, progress=0.5, num_steps=2)
