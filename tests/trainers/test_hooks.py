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
from tests.kit.messages import says


@pytest.fixture(scope="module")
def trainer(tiny_scenario: Path) -> Any:
    return ast_trainer("ast_dpo", tiny_scenario, "training.num_episodes_per_experience=2")


LEAF = torch.ones((), requires_grad=True)


def learn_once(trainer: Any) -> None:
    trainer._collect(0)
    trainer._update(0)


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
    monkeypatch.setattr(trainer, hook, lambda *_: value)
    with pytest.raises(ConfigurationError) as caught:
        learn_once(trainer)
    assert says(caught.value, f"{hook} of the trainer AstDpoTrainer", fact)


@pytest.mark.parametrize(
    ("hook", "value", "error", "fact"),
    [
        ("flatten", [1.0], DataError, "1.0"),
        ("flatten", [{"mine": 1.0}], DataError, "'mine'"),
        ("flatten", [{"mine": LEAF}, {"other": LEAF}], DataError, "'other'"),
        ("flatten", [{"mine": LEAF}, {"mine": torch.ones(3)}], DataError, "'mine'"),
        ("collect", Experience([], {"mine": "good"}), TrackingError, "'mine'"),  # type: ignore[dict-item]
    ],
)
def test_samples_that_make_no_batch_and_metrics_that_are_text_are_named(
    trainer: Any,
    hook: str,
    value: Any,
    error: type[Exception],
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, hook, lambda *_: value)
    with pytest.raises(error, match=fact):
        learn_once(trainer)


@pytest.mark.parametrize(
    ("figures", "fact"),
    [({}, "mean_reward"), ({"mean_reward": "good"}, "mean_reward"), (None, "NoneType")],
)
def test_dev_figures_are_numbers_and_include_the_metric_of_selection(
    tiny_scenario: Path, figures: Any, fact: str
) -> None:
    trainer: Any = ast_trainer(
        "ast_dpo", tiny_scenario, "training.eval_period=1", "training.dev_metric=mean_reward"
    )
    trainer.evaluate_dev = lambda: figures
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
    of_loss = trainer._optimizer_step(next(trainer._step_groups(0)))
    assert of_loss.keys() == {"loss", "grad_norm", "lr"}
    assert whole.keys() > of_loss.keys()
    logged = {"mine": 2, "share": torch.ones(1)}
    monkeypatch.setattr(trainer, "loss", lambda batch: (own(batch).loss, logged))
    metrics = trainer._optimizer_step(next(trainer._step_groups(0)))
    assert (metrics["mine"], metrics["share"]) == (2.0, 1.0)
