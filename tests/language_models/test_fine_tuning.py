"""The fine-tuning engine: its training, its options, and its resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nip_astra.errors import ContextLengthError, NonFiniteLossError
from nip_astra.language_models.fine_tuning import (
    FineTuning,
    FineTuningPlan,
    TrainingText,
    token_rows,
)
from nip_astra.language_models.services.fine_tuning import FineTuningOptions
from tests.kit.tiny import make_tokenizer

QUESTION = ({"role": "user", "content": "how are you"},)
CAT = ({"role": "user", "content": "the cat"},)
SUPERVISED = [TrainingText(QUESTION, ("fine thanks",)), TrainingText(CAT, ("sat on a mat",))]
PREFERRED = [
    TrainingText(QUESTION, ("fine thanks", "silly cat")),
    TrainingText(CAT, ("sat on a mat", "stupid")),
]


def make_plan(model: Path) -> FineTuningPlan:
    options = FineTuningOptions(num_epochs=8, batch_size=2, lr_multiplier=10.0, beta=0.1, seed=3)
    # Of a plan stored before these options.
    options = replace(options, nll_weight=0.0, freeze_embeddings=False)
    lora = {"lora_rank": 8, "lora_alpha": 16.0, "start_from": None}
    where = {"source": str(model), "device": "cpu", "num_threads": 1}
    return FineTuningPlan(**options.resolved(), **lora, **where)


@pytest.fixture
def plan(tiny_model_dir: Path) -> FineTuningPlan:
    return make_plan(tiny_model_dir)


def losses(tuning: FineTuning) -> list[float]:
    return [report.metrics["loss"] for report in tuning.run()]


def fine_tune(plan: FineTuningPlan, texts: list[TrainingText], folder: Path) -> None:
    tuning = FineTuning(plan, texts)
    losses(tuning)
    tuning.save(folder)


def test_supervised_training_makes_answers_likely(plan: FineTuningPlan) -> None:
    tuning = FineTuning(plan, SUPERVISED)
    before = tuning.evaluate(SUPERVISED)
    result = losses(tuning)
    # Two texts form a single batch, so the first loss is the untrained model's.
    assert result[0] == pytest.approx(before, rel=1e-5)
    assert tuning.evaluate(SUPERVISED) < before - 1.0
    assert tuning.num_tokens_trained == 8 * (3 + 5)
    assert losses(FineTuning(replace(plan, seed=4), SUPERVISED)) != result


def test_dpo_begins_at_log_two_and_prefers(plan: FineTuningPlan) -> None:
    tuning = FineTuning(replace(plan, method="dpo"), PREFERRED)
    first, *_, last = [report.metrics for report in tuning.run()]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert (first["preference_accuracy"], last["preference_accuracy"]) == (0.0, 1.0)
    assert last["loss"] < 0.6


def test_training_goes_on_with_an_adapter(plan: FineTuningPlan, tmp_path: Path) -> None:
    fine_tune(plan, SUPERVISED, tmp_path / "first")
    again = FineTuning(
        replace(plan, lora_rank=None, start_from=str(tmp_path / "first")), SUPERVISED
    )
    before = FineTuning(plan, SUPERVISED).evaluate(SUPERVISED)
    assert again.evaluate(SUPERVISED) < before - 1.0
    named = again.model.module.named_parameters()
    assert all("lora" in name for name, weight in named if weight.requires_grad)


def test_a_loss_that_is_no_number_ends_training(plan: FineTuningPlan) -> None:
    tuning = FineTuning(replace(plan, lora_rank=None), SUPERVISED)
    next(iter(tuning.model.parameters())).data.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="step 1 "):
        list(tuning.run())


def test_answers_are_trained_with_the_end_of_the_template() -> None:
    tokenizer = make_tokenizer()
    rows = token_rows(tokenizer, PREFERRED, (3,), window=96)
    words = [tokenizer.convert_ids_to_tokens(list(row.answer)) for row in rows[0]]
    assert words == [["fine", "thanks", "<end>"], ["silly", "cat", "<end>"]]
    context = tokenizer.convert_ids_to_tokens(list(rows[0][0].context))
    assert context == ["<bos>", "<user>", "how", "are", "you", "<end>", "<assistant>"]


def test_the_weight_of_the_cross_entropy_keeps_preferred_answers_likely(
    plan: FineTuningPlan,
) -> None:
    plan = replace(plan, method="dpo", lora_rank=None)
    first, trained = [], []
    for weight in (0.0, 1.0):
        tuning = FineTuning(replace(plan, nll_weight=weight), PREFERRED)
        before = tuning.evaluate(SUPERVISED)
        first.append(next(tuning.run()).metrics["loss"])
        list(tuning.run())
        trained.append(tuning.evaluate(SUPERVISED))
    assert first[1] - first[0] == pytest.approx(before, rel=1e-5)
    assert trained[1] < min(trained[0], before) - 0.1


@pytest.mark.parametrize("is_frozen", [True, False])
def test_embeddings_are_frozen_or_trained(plan: FineTuningPlan, is_frozen: bool) -> None:
    tuning = FineTuning(replace(plan, lora_rank=None, freeze_embeddings=is_frozen), SUPERVISED)
    before = {name: weight.clone() for name, weight in tuning.model.module.named_parameters()}
    list(tuning.run())
    after = dict(tuning.model.module.named_parameters())
    kept = {name for name in before if torch.equal(before[name], after[name])}
    embeddings = {name for name in before if "embed" in name or "lm_head" in name}
    assert embeddings
    assert kept == (embeddings if is_frozen else set())


def test_the_schedule_sets_the_learning_rate_of_each_step(plan: FineTuningPlan) -> None:
    result = {}
    for schedule in ("linear", "constant"):
        tuning = FineTuning(replace(plan, num_epochs=4, lr_schedule=schedule), SUPERVISED)  # type: ignore[arg-type]
        rates = [tuning.optimizer.param_groups[0]["lr"] for _ in tuning.run()]
        result[schedule] = [rate / tuning.lr for rate in rates]
    assert result == {"linear": [1.0, 0.75, 0.5, 0.25], "constant": [1.0] * 4}


def test_a_prompt_that_is_too_long_is_refused_or_loses_its_first_tokens() -> None:
    tokenizer = make_tokenizer()
    (whole,) = token_rows(tokenizer, SUPERVISED[:1], (3,), window=96)
    window = len(whole[0].context) + len(whole[0].answer) - 2
    (cut,) = token_rows(tokenizer, SUPERVISED[:1], (3,), window=window, truncate_prompts=True)
    assert cut == [whole[0]._replace(context=whole[0].context[2:])]
    with pytest.raises(ContextLengthError, match="example 1 "):
        token_rows(tokenizer, SUPERVISED[:1], (3,), window=window)
    with pytest.raises(ContextLengthError):
        token_rows(tokenizer, SUPERVISED[:1], (3,), window=3, truncate_prompts=True)


def test_a_stored_plan_of_an_older_version_trains_as_it_did(plan: FineTuningPlan) -> None:
    values = plan.to_dict()
    for name in ("nll_weight", "freeze_embeddings", "lr_schedule", "truncate_prompts"):
        del values[name]
    assert FineTuningPlan.from_dict(values) == plan
