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


def learn_once(trainer: Any) -> None:
    trainer._collect(0)
    trainer._update(0)


LEAF = torch.ones((), requires_grad=True)


OF_TEXT: Any = {"mine": "good"}
NOTHING: Any = None


@pytest.mark.parametrize(
    ("hook", "value", "error", "fact"),
    [
        ("loss", None, ConfigurationError, "None"),
        ("loss", 1.0, ConfigurationError, "1.0"),
        ("loss", torch.ones(2, requires_grad=True), ConfigurationError, "[2]"),
        ("loss", torch.ones(()), ConfigurationError, "without a gradient"),
        ("loss", (LEAF, None), ConfigurationError, "None"),
        ("loss", LossOutput(LEAF, OF_TEXT), ConfigurationError, "'good'"),
        ("loss", LossOutput(LEAF, {"mine": torch.ones(2)}), ConfigurationError, "metrics['mine']"),
        ("flatten", None, ConfigurationError, "None"),
        ("flatten", {"context": torch.ones(1)}, ConfigurationError, "context"),
        ("flatten", [1.0], DataError, "1.0"),
        ("flatten", [{"mine": 1.0}], DataError, "'mine'"),
        ("flatten", [{"mine": LEAF}, {"other": LEAF}], DataError, "'other'"),
        ("flatten", [{"mine": LEAF}, {"mine": torch.ones(3)}], DataError, "'mine'"),
        ("collect", None, ConfigurationError, "None"),
        ("collect", [], ConfigurationError, "[]"),
        ("collect", Experience(NOTHING), ConfigurationError, "None"),
        ("collect", Experience([], NOTHING), ConfigurationError, "None"),
        ("collect", Experience([], OF_TEXT), TrackingError, "'mine'"),
    ],
)
def test_a_wrong_result_of_a_hook_is_named(
    trainer: Any,
    hook: str,
    value: Any,
    error: type[Exception],
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, hook, lambda *_: value)
    with pytest.raises(error) as caught:
        learn_once(trainer)
    assert says(caught.value, fact)
    if error is ConfigurationError:
        assert says(caught.value, f"{hook} of the trainer AstDpoTrainer")


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
        trainer._finish_iteration(None)


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
