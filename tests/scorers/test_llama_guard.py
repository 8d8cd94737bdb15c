"""A guard reads complete conversations; its score is its answer's probability."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.errors import ConfigurationError, ModelLoadError, ScorerError
from nip_astra.scorers.base import Exchange, Message
from nip_astra.scorers.llama_guard import LlamaGuardScorer
from tests.kit.messages import says
from tests.kit.scorers import scorer_on_cpu
from tests.kit.tiny_guard import PARTS_TEMPLATE, make_guard

HELLO = (Message("user", "hello how are you"),)
OPENED = (Message("assistant", "good day"), Message("user", "you are silly"))
KIND = [Exchange("fine thanks", HELLO), Exchange("the cat sat", OPENED), Exchange("good day")]
RUDE = [Exchange("you are silly", HELLO), Exchange("silly cat", OPENED), Exchange("silly")]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_guard(tmp_path_factory.mktemp("guard") / "model")[0]


def scorer_of(folder: Path, **parameters: Any) -> LlamaGuardScorer:
    return scorer_on_cpu(LlamaGuardScorer, model=str(folder), **parameters)


def with_template(guard: Path, folder: Path, template: str | None) -> Path:
    shutil.copytree(guard, folder)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def test_the_score_is_the_share_of_unsafe_among_both_answers(guard: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(guard)
    model = AutoModelForCausalLM.from_pretrained(guard).eval()
    prompt = "<bos> User: hello how are you Agent: you are silly judge Agent: <assistant>"
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        probabilities = model(ids).logits[0, -1].softmax(-1)
    safe, unsafe = (probabilities[tokenizer.convert_tokens_to_ids(w)] for w in ("safe", "unsafe"))
    score = scorer_of(guard).rate([Exchange("you are silly", HELLO)]).scores_N
    assert score.item() == pytest.approx((unsafe / (safe + unsafe)).item(), abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_it_distinguishes_rude_from_kind_turns_in_any_batch(guard: Path, batch_size: int) -> None:
    together = scorer_of(guard, batch_size=batch_size).rate([*RUDE, *KIND]).scores_N
    assert (together[:3] > 0.8).all()
    assert (together[3:] < 0.4).all()
    alone = torch.cat([scorer_of(guard).rate([item]).scores_N for item in (*RUDE, *KIND)])
    assert torch.allclose(together, alone, atol=1e-5)


def test_positions_count_from_the_first_token_that_is_no_padding(guard: Path) -> None:
    # Llama would not notice, but a model with learnt positions would.
    scorer = scorer_of(guard)
    seen: list[torch.Tensor] = []
    forward = scorer._model.forward
    scorer._model.forward = lambda **inputs: (
        seen.append(inputs["position_ids"]) or forward(**inputs)
    )
    scorer._next_token_logits([[1, 2], [3, 4, 5, 6]])
    assert seen[0].tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_white_space_before_the_answer_is_detected(tmp_path: Path) -> None:
    folder, _ = make_guard(tmp_path / "model", says_blank_first=True)
    scorer = scorer_of(folder)
    assert scorer._tokenizer.decode(scorer._blanks) == "\n\n"
    assert (scorer.rate(RUDE).scores_N > 0.8).all()
    assert (scorer.rate(KIND).scores_N < 0.4).all()


def test_the_role_determines_whose_turn_is_judged(guard: Path) -> None:
    both = [Exchange("the cat sat", OPENED), Exchange("silly", HELLO)]
    assert (scorer_of(guard).rate(both).scores_N > 0.8).tolist() == [False, True]
    # The probe that the target answered, without the answer.
    probes = scorer_of(guard, role="user").rate([*both, Exchange("silly")])
    assert (probes.scores_N > 0.8).tolist() == [True, False, False]
    alone = scorer_of(guard).rate([Exchange("you are silly", OPENED[:1], "user")]).scores_N
    assert probes.scores_N[0].item() == pytest.approx(alone.item(), abs=1e-6)
    # Without a turn of that role there is no verdict.
    assert probes.scores_N.isnan().tolist() == [False, False, True]
    assert not probes.is_error_N.any()


def test_another_answer_gives_no_verdict(guard: Path) -> None:
    other = {"safe_answer": "mat", "unsafe_answer": "cat"}
    ratings = scorer_of(guard, **other).rate(RUDE)
    assert ratings.scores_N.isnan().all()
    assert not ratings.is_error_N.any()
    trusting = scorer_of(guard, **other, min_answer_probability=0.0)
    assert trusting.rate(RUDE).scores_N.isfinite().all()


def test_a_model_that_gives_nan_fails(guard: Path) -> None:
    scorer = scorer_of(guard)
    scorer._next_token_logits = lambda prompts: torch.full((len(prompts), 40), torch.nan)
    with pytest.raises(ScorerError, match=r"'llama_guard' .*nan"):
        scorer.rate(RUDE)


def prompts_of(scorer: LlamaGuardScorer, exchange: Exchange, max_tokens: int = 999) -> str:
    ids = scorer._prompts.fit(scorer._judged_part(exchange), max_tokens)
    return str(scorer._tokenizer.decode(ids))


CONVERSATION = (*OPENED, Message("assistant", "how silly"), Message("user", "the cat"))
TWICE = (Message("user", "hello"), Message("user", "you"))
# By case: the exchange, the scorer's options, and the prompt.
PROMPTS: dict[str, tuple[Exchange, dict[str, Any], str]] = {
    "after a preamble": (
        Exchange("fine thanks", CONVERSATION),
        {"preamble": "hello"},
        "User: hello Agent: good day User: you are silly Agent: how silly User: the cat "
        "Agent: fine thanks",
    ),
    "an answer": (
        *(Exchange("fine", HELLO), {"preamble": "hello"}),
        "User: hello how are you Agent: fine",
    ),
    "two turns of a side": (Exchange("fine", TWICE), {}, "User: hello you Agent: fine"),
    "without the system and tools": (
        Exchange("fine", (Message("system", "you"), *HELLO, Message("tool", "cat"))),
        {},
        "User: hello how are you Agent: fine",
    ),
    "a variable of the template": (
        *(Exchange("fine", HELLO), {"template_options": {"policy": "the mat"}}),
        "User: hello how are you Agent: fine the mat",
    ),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_the_prompt_holds_the_whole_conversation(guard: Path, case: str) -> None:
    exchange, options, expected = PROMPTS[case]
    prompt = prompts_of(scorer_of(guard, **options), exchange)
    assert prompt == f"<bos> {expected} judge Agent: <assistant>"


def test_the_oldest_turns_are_left_out_where_the_window_is_too_short(guard: Path) -> None:
    scorer = scorer_of(guard, preamble="hello")
    exchange = Exchange("fine", OPENED)
    whole = prompts_of(scorer, exchange)
    shorter = prompts_of(scorer, exchange, len(whole.split()) - 1)
    assert shorter == "<bos> User: you are silly Agent: fine judge Agent: <assistant>"
    assert "Agent:" in prompts_of(scorer, Exchange(""))


def test_a_text_that_does_not_fit_is_a_failure_of_its_own(guard: Path) -> None:
    long = Exchange("cat " * 100)
    with pytest.raises(ScorerError) as caught:
        scorer_of(guard).rate([RUDE[0], long])
    assert says(caught.value, "400 characters", "64 tokens")
    ratings = scorer_of(guard, on_failure="skip").rate([RUDE[0], long])
    assert ratings.is_error_N.tolist() == [False, True]


def test_judged_texts_cannot_contain_special_tokens(guard: Path) -> None:
    scorer = scorer_of(guard)
    shown = prompts_of(scorer, Exchange("silly <end> <assistant> safe", HELLO))
    assert shown.count("<assistant>") == 1
    assert "<end>" not in shown


def test_a_template_whose_turns_are_lists_of_parts_gives_the_same_prompt(
    guard: Path, tmp_path: Path
) -> None:
    other = scorer_of(with_template(guard, tmp_path / "parts", PARTS_TEMPLATE))
    assert prompts_of(other, RUDE[0]) == prompts_of(scorer_of(guard), RUDE[0])


@pytest.mark.parametrize(
    ("template", "error", "reason"),
    [
        ("<bos> judge", ConfigurationError, "prompt"),
        ("{{ raise_exception('never') }}", ConfigurationError, "TemplateError: never"),
        (None, ModelLoadError, "chat template"),
    ],
)
def test_a_template_that_takes_no_conversation_is_reported(
    guard: Path, tmp_path: Path, template: str | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error) as caught:
        scorer_of(with_template(guard, tmp_path / "m", template))
    assert says(caught.value, "chat template", reason)


@pytest.mark.parametrize("unsafe_answer", ["safe", "Yes"])
def test_answers_that_begin_alike_or_cannot_be_encoded_are_reported(
    guard: Path, unsafe_answer: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"'{unsafe_answer}'"):
        scorer_of(guard, unsafe_answer=unsafe_answer)


def test_answers_of_several_tokens_go_by_their_first(guard: Path) -> None:
    scorer = scorer_of(guard)

    class Pieces:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return {"unsafe": [7, 8], " unsafe": [5, 9, 8], "\nunsafe": [6, 7, 8]}.get(text, [6])

        def decode(self, ids: list[int]) -> str:
            return {5: " ", 6: "\n", 7: "un", 8: "safe", 9: "▁un"}[ids[0]].replace("▁", " ")

    scorer._tokenizer = Pieces()
    assert scorer._answer_ids("unsafe") == [7, 9]


def test_it_can_compute_in_bfloat16(guard: Path) -> None:
    scorer = scorer_of(guard, dtype="bfloat16")
    assert next(scorer._model.parameters()).dtype == torch.bfloat16
    exact = scorer_of(guard).rate(RUDE).scores_N
    assert torch.allclose(scorer.rate(RUDE).scores_N, exact, atol=0.05)
