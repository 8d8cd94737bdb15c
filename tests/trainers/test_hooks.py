"""Return values of trainer hooks are checked where they are read, and named by hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError, TrackingError
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.trainers.language_model_base import Experience
from tests.kit.experiments import ast_trainer


@pytest.fixture(scope="module")
def trainer(tiny_scenario: Path) -> Any:
    return ast_trainer("ast_dpo", tiny_scenario, "training.num_episodes_per_experience=2")


def learn_once(trainer: Any) -> None:
    trainer._collect(0)
    trainer._update(0)


def returning(value: Any) -> Any:
    return lambda *_: value


LEAF = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("hook", "value", "fact"),
    [
        ("loss", None, "None"),
        ("loss", 1.0, "1.0"),
        ("loss", torch.ones(2, requires_grad=True), "[2]"),
        ("loss", torch.ones(()), "without a gradient"),
        ("loss", (LEAF, None), "None"),
        ("loss", LossOutput(LEAF, {"mine": "good"}), "'good'"),  # type: ignore[dict-item]
        ("loss", LossOutput(LEAF, {"mine": torch.ones(2)}), "metrics['mine']"),
        ("flatten", None, "None"),
        ("flatten", {"context": torch.ones(1)}, "context"),
        ("collect", None, "None"),
        ("collect", [], "[]"),
        ("collect", Experience(None), "None"),  # type: ignore[arg-type]
        ("collect", Experience([], None), "None"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_result_of_a_hook_is_named(
    trainer: Any, hook: str, value: Any, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, hook, returning(value))
    with pytest.raises(ConfigurationError) as caught:
        learn_once(trainer)
    assert f"{hook} of the trainer AstDpoTrainer" in str(caught.value)
    assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "fact"),
    [
        ([1.0], "1.0"),
        ([{"mine": 1.0}], "'mine'"),
        ([{"mine": torch.ones(())}, {"other": torch.ones(())}], "'other'"),
        ([{"mine": torch.ones(())}, {"mine": torch.ones(3)}], "'mine'"),
    ],
)
def test_samples_that_make_no_batch_are_named(
    trainer: Any, samples: Any, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "flatten", returning(samples))
    with pytest.raises(DataError) as caught:
        learn_once(trainer)
    assert fact in str(caught.value)


def test_metrics_that_are_text_are_named(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = Experience([], {"mine": "good"})  # type: ignore[dict-item]
    monkeypatch.setattr(trainer, "collect", returning(experience))
    with pytest.raises(TrackingError, match="'mine'"):
        trainer._collect(0)


@pytest.mark.parametrize(
    ("figures", "fact"),
    [({}, "mean_reward"), ({"mean_reward": "good"}, "mean_reward"), (None, "NoneType")],
)
def test_figures_of_dev_are_numbers_with_that_which_chooses(
    tiny_scenario: Path, figures: Any, fact: str
) -> None:
    trainer: Any = ast_trainer(
        "ast_dpo", tiny_scenario, "training.eval_period=1", "training.dev_metric=mean_reward"
    )
    trainer.evaluate_dev = returning(figures)
    trainer.state.begin([], {})
    with pytest.raises((ConfigurationError, TrackingError), match=fact):
        trainer._finish_iteration(None, {"time/collect_seconds": 1.0, "time/update_seconds": 1.0})


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_alone_is_a_loss(
    trainer: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trainer.loss
    trainer._collect(0)
    whole = dict(trainer._optimizer_step(next(trainer._step_groups(0))))
    monkeypatch.setattr(trainer, "loss", lambda batch: own(batch).loss.reshape(shape))
    found = trainer._optimizer_step(next(trainer._step_groups(0)))
    assert found.keys() == {"loss", "grad_norm", "lr"}
    assert whole.keys() > found.keys()
    logged = {"mine": 2, "share": torch.ones(1)}
    monkeypatch.setattr(trainer, "loss", lambda batch: (own(batch).loss, logged))
    metrics = trainer._optimizer_step(next(trainer._step_groups(0)))
    assert (metrics["mine"], metrics["share"]) == (2.0, 1.0)
