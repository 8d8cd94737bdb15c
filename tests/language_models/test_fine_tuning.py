"""The fine-tuning engine: its training, its options, and its resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, ContextLengthError, NonFiniteLossError
from nip_astra.language_models.fine_tuning import (
    FineTuning,
    FineTuningPlan,
    TokenRow,
    TrainingExample,
    TrainingText,
    preference_texts,
    token_rows,
)
from nip_astra.language_models.services.fine_tuning import FineTuningOptions, without_weight
from tests.kit.learning import Learning
from tests.kit.tiny import make_byte_tokenizer, make_tokenizer

QUESTION = ({"role": "user", "content": "how are you"},)
CAT = ({"role": "user", "content": "the cat"},)


def say(text: str, role: str = "assistant", **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": text, **more}


SUPERVISED = [
    (TrainingText((*QUESTION, say("fine thanks"))),),
    (TrainingText((*CAT, say("sat on a mat"))),),
]
PREFERRED = [
    preference_texts(QUESTION, [say("fine thanks"), say("silly cat")]),
    preference_texts(CAT, [say("sat on a mat"), say("stupid")]),
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


def fine_tune(plan: FineTuningPlan, texts: list[TrainingExample], folder: Path) -> None:
    tuning = FineTuning(plan, texts)
    losses(tuning)
    tuning.save(folder)


def test_supervised_training_makes_answers_likely(plan: FineTuningPlan, learning: Learning) -> None:
    tuning = FineTuning(replace(plan, seed=learning.seed), SUPERVISED)
    before = tuning.evaluate(SUPERVISED)
    result = losses(tuning)
    # Two texts form a single batch, so the first loss is the untrained model's.
    assert result[0] == pytest.approx(before, rel=1e-5)
    learning.check(tuning.evaluate(SUPERVISED) / before, threshold=0.7, best=0.0)
    assert tuning.num_tokens_trained == 8 * (3 + 5)
    assert losses(FineTuning(replace(plan, seed=learning.seed + 1), SUPERVISED)) != result


def test_dpo_begins_at_log_two_and_prefers(plan: FineTuningPlan, learning: Learning) -> None:
    tuning = FineTuning(replace(plan, method="dpo", seed=learning.seed), PREFERRED)
    first, *_, last = [report.metrics for report in tuning.run()]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert (first["preference_accuracy"], last["preference_accuracy"]) == (0.0, 1.0)
    learning.check(last["loss"], threshold=0.6, best=0.0)


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
    words = [tokenizer.convert_ids_to_tokens(list(row.ids)) for row in rows[0]]
    assert words == [["fine", "thanks", "<end>"], ["silly", "cat", "<end>"]]
    context = tokenizer.convert_ids_to_tokens(list(rows[0][0].context))
    assert context == ["<bos>", "<user>", "how", "are", "you", "<end>", "<assistant>"]


CHAT = (
    *QUESTION,
    say("fine thanks"),
    say("the cat", "user"),
    say("sat on a mat"),
    say("good", "user"),
    say("day"),
)


def learned_tokens(tokenizer: Any, row: TokenRow) -> list[str]:
    ids = [token for token, is_learned in zip(row.ids, row.is_learned, strict=True) if is_learned]
    return list(tokenizer.convert_ids_to_tokens(ids))


def test_every_message_of_the_assistant_is_learned_in_one_row() -> None:
    tokenizer = make_tokenizer()
    ((row,),) = token_rows(tokenizer, [(TrainingText(CHAT),)], (3,), window=96)
    answers = ["fine", "thanks", "<end>", "sat", "on", "a", "mat", "<end>", "day", "<end>"]
    assert learned_tokens(tokenizer, row) == answers
    whole = tokenizer.apply_chat_template(list(CHAT), tokenize=True)["input_ids"]
    assert [*row.context, *row.ids] == whole


def test_a_message_of_weight_zero_is_read_and_not_learned() -> None:
    tokenizer = make_tokenizer()
    chat = (*CHAT[:3], say("sat on a mat", weight=0), *CHAT[4:])
    ((row,),) = token_rows(tokenizer, [(TrainingText(chat),)], (3,), window=96)
    assert learned_tokens(tokenizer, row) == ["fine", "thanks", "<end>", "day", "<end>"]
    assert len(row.ids) == len(row.is_learned) > 5


def test_a_conversation_costs_the_mean_over_the_tokens_of_its_messages(
    plan: FineTuningPlan,
) -> None:
    alone = [(TrainingText((*CHAT[:index], CHAT[index])),) for index in (1, 3, 5)]
    silent = [
        (TrainingText((*map(without_weight, text.messages[:-1]), text.messages[-1])),)
        for (text,) in alone
    ]
    tuning = FineTuning(plan, [(TrainingText(CHAT),)])
    assert len(tuning.rows[0]) == 1
    apart = [tuning.evaluate([example]) for example in silent]
    expected = (3 * apart[0] + 5 * apart[1] + 2 * apart[2]) / 10
    assert tuning.evaluate([(TrainingText(CHAT),)]) == pytest.approx(expected, rel=1e-5)
    assert next(tuning.run()).metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert tuning.num_tokens_trained == 10


THINKING_TEMPLATE = (
    "<bos>{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }} "
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('.')[-1] }}{% endif %} <end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_after_one_that_the_template_shortens_have_rows_of_their_own() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    chat = (*QUESTION, say("silly . fine"), say("the cat", "user"), say("a mat . thanks"))
    (rows,) = token_rows(tokenizer, [(TrainingText(chat),)], (3,), window=96)
    assert [learned_tokens(tokenizer, row) for row in rows] == [
        ["silly", ".", "fine", "<end>"],
        ["a", "mat", ".", "thanks", "<end>"],
    ]
    # What the model reads when it gives the second answer.
    read = tokenizer.convert_ids_to_tokens(list(rows[1].context))
    assert "silly" not in read
    assert "fine" in read


def test_calls_of_tools_are_learned_as_the_template_writes_them() -> None:
    tokenizer = make_byte_tokenizer()
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    chat = (
        *QUESTION,
        say("", tool_calls=[call]),
        say("2", "tool", tool_call_id="1"),
        say("It is 2"),
    )
    ((row,),) = token_rows(tokenizer, [(TrainingText(chat, tools),)], (3,), window=10**4)
    learned = tokenizer.decode(
        [token for token, is_learned in zip(row.ids, row.is_learned, strict=True) if is_learned]
    )
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><end>'
    assert learned == f"{written}It is 2<end>"
    assert '"name": "add"' in tokenizer.decode(list(row.context))
    with pytest.raises(ConfigurationError, match="example 1"):
        token_rows(make_tokenizer(), [(TrainingText(chat, tools),)], (3,), window=96)


def test_a_job_of_an_older_version_learns_the_last_message_alone(plan: FineTuningPlan) -> None:
    older = FineTuning(replace(plan, last_message_only=True), [(TrainingText(CHAT),)])
    ((row,),) = older.rows
    assert learned_tokens(older.model.tokenizer, row) == ["day", "<end>"]


def test_the_weight_of_the_cross_entropy_keeps_preferred_answers_likely(
    plan: FineTuningPlan, learning: Learning
) -> None:
    fast = {"lora_rank": None, "lr_multiplier": 100.0, "beta": 1.0}
    plan = replace(plan, method="dpo", seed=learning.seed, **fast)
    first, trained = [], []
    for weight in (0.0, 1.0):
        tuning = FineTuning(replace(plan, nll_weight=weight), PREFERRED)
        before = tuning.evaluate(SUPERVISED)
        first.append(next(tuning.run()).metrics["loss"])
        list(tuning.run())
        trained.append(tuning.evaluate(SUPERVISED))
    assert first[1] - first[0] == pytest.approx(before, rel=1e-5)
    learning.check(trained[1] / min(trained[0], before), threshold=0.8, best=0.0)


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
    window = len(whole[0].context) + len(whole[0].ids) - 2
    (cut,) = token_rows(tokenizer, SUPERVISED[:1], (3,), window=window, truncate_prompts=True)
    assert cut == [whole[0]._replace(context=whole[0].context[2:])]
    with pytest.raises(ContextLengthError, match="example 1 "):
        token_rows(tokenizer, SUPERVISED[:1], (3,), window=window)
    with pytest.raises(ContextLengthError):
        token_rows(tokenizer, SUPERVISED[:1], (3,), window=3, truncate_prompts=True)


def test_a_conversation_beyond_the_window_is_learned_message_by_message() -> None:
    tokenizer = make_tokenizer()
    (rows,) = token_rows(tokenizer, [(TrainingText(CHAT),)], (3,), window=12, truncate_prompts=True)
    assert [learned_tokens(tokenizer, row)[0] for row in rows] == ["fine", "sat", "day"]
    assert max(len(row.context) + len(row.ids) for row in rows) == 12


def test_a_stored_plan_of_an_older_version_trains_as_it_did(plan: FineTuningPlan) -> None:
    values = plan.to_dict()
    for name in ("nll_weight", "freeze_embeddings", "lr_schedule", "truncate_prompts"):
        del values[name]
    del values["trained_weights"], values["last_message_only"]
    assert FineTuningPlan.from_dict(values) == replace(plan, last_message_only=True)
    full = FineTuningPlan.from_dict(values | {"lora_rank": None})
    assert full.trained_weights == "all"
