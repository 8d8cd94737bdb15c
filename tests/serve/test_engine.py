"""Requests that run together get the same answers as alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from nip_astra.errors import ModelLoadError
from nip_astra.language_models import sequences
from nip_astra.language_models.adapters import LoraParameters, add_adapter
from nip_astra.language_models.batch_engine import BatchEngine, EngineLimits, draw_tokens
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from nip_astra.language_models.tree_engine.routed_weights import read_adapter
from nip_astra.serve.served_models import Engine, load_engine
from tests.kit.tiny import make_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    engine = load_engine(str(tiny_model_dir), device=CPU, limits=EngineLimits())
    yield engine
    engine.close()


def request_of(number: int, **changes: Any) -> dict[str, Any]:
    prompt = (2, *(6 + (7 * number + 3 * i) % 15 for i in range(3 + number % 40)))
    options = {"prompt": prompt, "max_tokens": 8 + number % 20, "seed": number}
    return options | {"temperature": 0.0 if number % 2 else 1.0, "num_top": 0} | changes


def answers(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[list[sequences.Progress]]:
    """The last progress of each answer to requests that run together."""
    ended: SimpleQueue[sequences.Progress] = SimpleQueue()

    def listen(progress: Sequence[sequences.Progress]) -> None:
        for one in progress:
            if one.finish_reason:
                ended.put(one)

    given = [sequences.GenerationRequest(**request, listener=listen) for request in requests]
    for request in given:
        engine.submit(request)
    last = [ended.get(timeout=60) for request in given for _ in range(request.num_samples)]
    last.sort(key=lambda one: one.index)
    return [[one for one in last if one.request is request] for request in given]


def answer_together(engine: Engine, requests: Sequence[dict[str, Any]]) -> list[sequences.Progress]:
    return [one for (one,) in answers(engine, requests)]


def answer(engine: Engine, **request: Any) -> list[sequences.Progress]:
    return answers(engine, [request])[0]


def assert_same(one: sequences.Progress, other: sequences.Progress, *, atol: float = 3e-5) -> None:
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    assert all(a.token == b.token for a, b in pairs)
    # The first token of an echoed prompt has none.
    apart = [abs(a.logprob - b.logprob) for a, b in pairs if not math.isnan(a.logprob)]
    assert max(apart, default=0) < atol


def test_an_answer_does_not_depend_on_other_requests(engine: Engine) -> None:
    requests = [request_of(number) for number in range(40)]
    lone = [answer(engine, **request)[0] for request in requests]
    for one, other in zip(answer_together(engine, requests), lone, strict=True):
        assert_same(one, other)
    assert len({one.text for one in lone}) > 20


def test_long_prompts_are_read_in_parts(engine: Engine, tiny_model_dir: Path) -> None:
    requests = [request_of(number, echo=number % 2 == 0) for number in range(30, 40)]
    limits = EngineLimits(max_read_tokens=7, max_rows=3, max_kept_bytes=0)
    slow = load_engine(str(tiny_model_dir), device=CPU, limits=limits)
    for one, request in zip(answer_together(slow, requests), requests, strict=True):
        assert_same(one, answer(engine, **request)[0])
    slow.close()


def test_many_answers_to_one_request_keep_to_the_limit_of_the_batch(
    engine: Engine, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, sizes = BatchEngine._draw, []

    def noted(batch: BatchEngine, hidden_RX: torch.Tensor) -> list[sequences.Progress]:
        sizes.append(len(batch.rows))
        return draw(batch, hidden_RX)

    requests = [request_of(n, num_samples=10, echo=n == 12) for n in (2, 12)] + [request_of(4)]
    expected = answers(engine, requests)
    monkeypatch.setattr(BatchEngine, "_draw", noted)
    limited = load_engine(str(tiny_model_dir), device=CPU, limits=EngineLimits(max_rows=3))
    found = answers(limited, requests)
    limited.close()
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    assert max(sizes) == 3


def test_a_closed_engine_answers_that_it_is(tiny_model_dir: Path) -> None:
    engine = load_engine(str(tiny_model_dir), device=CPU, limits=EngineLimits())
    engine.close()
    engine.close()
    samples = answer(engine, **request_of(1), num_samples=2)
    assert [(one.index, one.finish_reason) for one in samples] == [(0, "error"), (1, "error")]
    assert samples[0].error == "the service is shutting down"


class Bytes:
    """A tokenizer of single bytes, as those of real models fall back to."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_characters_are_sent_complete_and_stop_texts_across_tokens_are_found() -> None:
    texts = sequences.IncrementalDetokenizer(Bytes(), ("END",))
    parts = [texts.push(byte) for byte in "é E\u20acE".encode()]
    assert parts == ["", "é", " ", "", "", "", "E\u20ac", ""]
    assert [texts.push(byte) for byte in b"ND tail"][:2] == ["", ""]
    assert texts.is_stopped
    partial = sequences.IncrementalDetokenizer(Bytes(), ("END",))
    assert "".join(partial.push(byte) for byte in b"the EN") == "the "
    assert partial.finish() == "EN"


class JoinedBytes(Bytes):
    """Decodes as tokenizers with a fallback to bytes do: all of a run of bytes, or none."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_characters_before_a_cut_one_are_kept(is_streamed: bool) -> None:
    ids = "\u1208\u12e8\u20ac".encode()[:-1]
    request = sequences.GenerationRequest((1,), max_tokens=len(ids), is_streamed=is_streamed)
    row = sequences.RunningSequence(request, 0, JoinedBytes(), frozenset(), device=CPU)
    parts = []
    for byte in ids:
        row.append(sequences.TokenRecord(byte, math.nan))
        parts.append(row.take_progress())
    text = "".join(one.text for one in parts if one is not None)
    assert text.rstrip("\ufffd") == "\u1208\u12e8"


def test_adapters_are_served_beside_their_base(tiny_model_dir: Path, tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        module = add_adapter(load_causal_lm(str(tiny_model_dir), None), LoraParameters(rank=4))
        torch.manual_seed(seed)
        for name, weight in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
        folder = tmp_path / str(seed)
        module.save_pretrained(folder)
        module.merge_and_unload().save_pretrained(tmp_path / f"merged{seed}")
        load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path / f"merged{seed}")
        folders.append(folder)
    engine = load_engine(str(tiny_model_dir), device=CPU, limits=EngineLimits())
    adapters = [None, *(read_adapter(folder, torch.float32, CPU) for folder in folders)]
    requests = [request_of(n, adapter=adapters[n % 3]) for n in range(12)]
    together = answer_together(engine, requests)
    engine.close()
    for index, path in enumerate([tiny_model_dir, tmp_path / "merged1", tmp_path / "merged2"]):
        alone = load_engine(str(path), device=CPU, limits=EngineLimits())
        for number in range(index, 12, 3):
            # Merging rounds once more.
            assert_same(together[number], answer(alone, **request_of(number))[0], atol=2e-4)
        alone.close()


def test_a_model_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"GPT2LMHeadModel is not of the Llama family"):
        load_engine(str(tmp_path), device=CPU, limits=EngineLimits())


def drawn(engine: Engine, logits: torch.Tensor, banned: Sequence[int], **options: Any) -> list[Any]:
    """Draw from each row of logits, with its own seed."""
    requests = [
        sequences.GenerationRequest(**request_of(0, seed=n, **options)) for n in range(len(logits))
    ]
    given = (0, engine.tokenizer, frozenset())
    rows = [sequences.RunningSequence(request, *given, device=CPU) for request in requests]
    return list(draw_tokens(logits.clone(), rows, torch.tensor(banned, dtype=torch.long)))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.75)])
def test_tokens_are_drawn_by_probability(engine: Engine, temperature: float, top_p: float) -> None:
    logits = torch.tensor([0.0, -0.5, -1.0, -2.0, -4.0, 3.0])
    expected = (logits[:5] / temperature).softmax(dim=0)
    if top_p < 1:
        expected[3:] = 0.0  # 0.50, 0.30 and 0.18 reach 0.75
        expected[2 if expected[:2].sum() >= top_p else 3] = 0.0
        expected /= expected.sum()
    count = 4000
    samples = drawn(engine, logits.repeat(count, 1), [5], temperature=temperature, top_p=top_p)
    counted = torch.bincount(torch.tensor([one.token for one in samples]), minlength=6) / count
    assert counted[5] == 0  # banned
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((counted[:5] - expected).abs() <= 4 * deviation + 1e-9).all()
    raw = logits.log_softmax(dim=0)
    assert samples[0].logprob == pytest.approx(float(raw[samples[0].token]))


def test_draws_do_not_depend_on_the_last_digits_of_logits(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 20_000, generator=generator)
    noisy = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    first, second = ([one.token for one in drawn(engine, given, [])] for given in (logits, noisy))
    assert first == second


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 2}])
def test_one_logit_that_is_not_finite_is_noticed(
    engine: Engine, fault: float, cut: dict[str, Any]
) -> None:
    whole, broken = [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, fault, 3.0]
    first, second = drawn(engine, torch.tensor([whole, broken]), [], **cut)
    assert (first is None, second) == (False, None)
