"""Training by a plan: what it changes, and that it goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.serve.api_errors import ApiError
from nip_astra.serve.job_store import JobStore, Status
from nip_astra.serve.tuning import Tuning, TuningPlan, fine_tune
from nip_astra.serve.tuning_data import TrainingText, read_texts, token_rows
from nip_astra.serve.worker import STOPPED, TRAINING, _Work
from tests.tiny import make_tokenizer

QUESTION = ({"role": "user", "content": "how are you"},)
CAT = ({"role": "user", "content": "the cat"},)
SAID = [TrainingText(QUESTION, ("fine thanks",)), TrainingText(CAT, ("sat on a mat",))]
PREFERRED = [
    TrainingText(QUESTION, ("fine thanks", "silly cat")),
    TrainingText(CAT, ("sat on a mat", "stupid")),
]


@pytest.fixture
def plan(tiny_model_dir: Path) -> TuningPlan:
    return TuningPlan(
        method="supervised",
        source=str(tiny_model_dir),
        num_epochs=8,
        batch_size=2,
        lr_multiplier=10.0,
        beta=0.1,
        seed=3,
        lora_rank=8,
        lora_alpha=16.0,
        start_from=None,
        device="cpu",
        num_threads=1,
    )


def losses(plan: TuningPlan, texts: list[TrainingText]) -> list[float]:
    return [report.metrics["loss"] for report in Tuning(plan, texts).run()]


def test_supervised_training_makes_answers_likely(plan: TuningPlan) -> None:
    tuning = Tuning(plan, SAID)
    before = tuning.evaluate(SAID)
    found = [report.metrics["loss"] for report in tuning.run()]
    # Two texts are one batch, so the first loss is that of the untrained model.
    assert found[0] == pytest.approx(before, rel=1e-5)
    assert tuning.evaluate(SAID) < before - 1.0
    assert tuning.num_tokens_trained == 8 * (3 + 5)


def test_dpo_begins_at_log_two_and_prefers(plan: TuningPlan) -> None:
    tuning = Tuning(replace(plan, method="dpo"), PREFERRED)
    reports = list(tuning.run())
    assert reports[0].metrics["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert reports[0].metrics["preference_accuracy"] == 0.0
    assert reports[-1].metrics["preference_accuracy"] == 1.0
    assert reports[-1].metrics["loss"] < 0.6


def test_the_same_plan_gives_the_same_weights(plan: TuningPlan, tmp_path: Path) -> None:
    for name in ("one", "other"):
        fine_tune(plan, SAID, tmp_path / name)
    one, other = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "other")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert losses(replace(plan, seed=4), SAID) != losses(plan, SAID)


@pytest.mark.parametrize("rank", [8, None])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_going_on_from_a_state_equals_not_stopping(
    plan: TuningPlan, method: str, rank: int | None
) -> None:
    plan = replace(plan, method=method, lora_rank=rank, batch_size=1)  # type: ignore[arg-type]
    texts = PREFERRED if method == "dpo" else SAID
    whole = Tuning(plan, texts)
    expected = [report.metrics["loss"] for report in whole.run()]
    first = Tuning(plan, texts)
    steps = first.run()
    found = [next(steps).metrics["loss"] for _ in range(5)]
    second = Tuning(plan, texts)
    second.load_state({name: value.clone() for name, value in first.state().items()})
    found += [report.metrics["loss"] for report in second.run()]
    assert found == expected
    pairs = zip(whole.weights, second.weights, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_training_goes_on_with_an_adapter(plan: TuningPlan, tmp_path: Path) -> None:
    fine_tune(plan, SAID, tmp_path / "first")
    again = Tuning(replace(plan, lora_rank=None, start_from=str(tmp_path / "first")), SAID)
    trained = Tuning(plan, SAID)
    before = trained.evaluate(SAID)
    assert again.evaluate(SAID) < before - 1.0
    assert all(
        "lora" in name for name, one in again.model.module.named_parameters() if one.requires_grad
    )


def test_a_cancelled_job_ends_after_its_step(
    plan: TuningPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(tmp_path)
    names = {"id": "job", "model": "tiny", "root": "tiny", "name": "ft:tiny"}
    store.add_job(names | {"plan": plan.to_dict(), "request": {}}, None)
    store.change_job("job", status=Status.RUNNING)
    store.job_folder("job").mkdir()
    row = {"messages": [*SAID[0].messages, {"role": "assistant", "content": SAID[0].answers[0]}]}
    (store.job_folder("job") / TRAINING).write_text(json.dumps(row))
    take_step, steps = Tuning._take_step, []

    def cancelled(tuning: Tuning, chosen: Sequence[int]) -> dict[str, float]:
        steps.append(tuning.step)
        if len(steps) == 2:
            store.change_job("job", status=Status.CANCELLED)
        return take_step(tuning, chosen)

    monkeypatch.setattr(Tuning, "_take_step", cancelled)
    assert _Work(store, store.job("job"), lambda: False).run() == STOPPED
    assert steps == [0, 1]
    assert store.job("job").status is Status.CANCELLED


def test_a_loss_that_is_no_number_ends_training(plan: TuningPlan) -> None:
    tuning = Tuning(replace(plan, lora_rank=None), SAID)
    next(iter(tuning.model.parameters())).data.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="Lower learning_rate_multiplier"):
        list(tuning.run())


def test_answers_are_learnt_with_the_end_that_the_template_writes() -> None:
    tokenizer = make_tokenizer()
    rows = token_rows(tokenizer, PREFERRED, (3,), window=96)
    words = [tokenizer.convert_ids_to_tokens(list(row.answer)) for row in rows[0]]
    assert words == [["fine", "thanks", "<end>"], ["silly", "cat", "<end>"]]
    context = tokenizer.convert_ids_to_tokens(list(rows[0][0].context))
    assert context == ["<bos>", "<user>", "how", "are", "you", "<end>", "<assistant>"]
    with pytest.raises(ConfigurationError, match=r"example 1 has \d+ tokens.*window holds 5"):
        token_rows(tokenizer, SAID, (3,), window=5)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 2 .* not JSON"),
        ("[]", "line 2 is no example of the method supervised"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "at least 2"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}',
            "another role than the assistant",
        ),
        ('{"messages": [], "weight": 1}', "'weight' is not supported"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, text: str) -> None:
    right = {"messages": [*QUESTION, {"role": "assistant", "content": "fine"}]}
    (tmp_path / "file").write_text(f"{json.dumps(right)}\n{line}\n")
    with pytest.raises(ApiError, match=text):
        read_texts(tmp_path / "file", "supervised")
    (tmp_path / "file").write_text("\n\n")
    with pytest.raises(ApiError, match="no examples"):
        read_texts(tmp_path / "file", "dpo")
