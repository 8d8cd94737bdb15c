"""Decoding with fixed shapes equals decoding with changing shapes, replayed or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import SamplingOptions
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.sampling import ConstrainedSampler
from nip_astra.language_models.tree_engine import decode_graphs, sessions
from nip_astra.language_models.tree_engine.attention import TrieAttention
from nip_astra.language_models.tree_engine.decode_graphs import (
    FixedSteps,
    bucket,
    build_fixed_steps,
)
from nip_astra.language_models.tree_engine.decoder import Decoder
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import live_weights
from tests.kit.tiny import CPU, load_backend
from tests.language_models.tree_engine.test_sessions import assert_same, grow

CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5], [2, 4, 9, 10, 11, 12, 3, 5]]


class Recorder:
    """A stand-in for a CUDA graph: replays recorded operations on the same memory."""

    def __init__(self, *, is_counter: bool = False) -> None:
        self.count = 0
        self.is_counter = is_counter

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        # A capture also runs the function to warm up.
        function()
        if self.is_counter:
            return function
        recorded = make_fx(lambda: function())()
        return lambda: recorded()


def fix(model: HuggingFaceLanguageModel, capture: Callable | None, **how: bool) -> None:
    model._steps = FixedSteps(model._decoder, capture, is_required=how.get("is_required", False))
    model._snapshot = model._new_snapshot()


@pytest.mark.parametrize(
    ("fold_tokens", "is_captured", "check_period"), [(0, True, 2), (400, False, 1)]
)
def test_a_tree_is_the_same_with_fixed_shapes(
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    fold_tokens: int,
    is_captured: bool,
    check_period: int,
) -> None:
    monkeypatch.setattr("nip_astra.language_models.tree_engine.kv_cache.FOLD_TOKENS", fold_tokens)
    monkeypatch.setattr(sessions, "CHECK_PERIOD", check_period)
    monkeypatch.setattr(decode_graphs, "SMALLEST_LENGTH", 4)
    plain = grow(tiny_model)
    recorder = Recorder() if is_captured else None
    fix(tiny_model, recorder)
    with tiny_model.counting() as spent:
        assert_same(grow(tiny_model), plain)
    assert recorder is None or recorder.count > 0
    assert spent.forwarded > 0


def test_a_step_is_captured_once_and_uses_updated_weights(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    recorder = Recorder()
    fix(tiny_model, recorder)
    before = grow(tiny_model)
    count = recorder.count
    assert count == 3, "eight, 32 and 128 rows"
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    after = grow(tiny_model)
    assert recorder.count == count
    assert [level.turns for level in after] != [level.turns for level in before]
    tiny_model._steps = None
    tiny_model._snapshot = tiny_model._new_snapshot()
    assert_same(grow(tiny_model), after)


def test_a_step_that_cannot_be_captured_is_computed_with_a_warning(
    tiny_model: HuggingFaceLanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = grow(tiny_model)
    fix(tiny_model, fail)
    with caplog.at_level(logging.WARNING):
        assert_same(grow(tiny_model), plain)
    assert [r.message for r in caplog.records] == [
        "decoding steps are not captured: operation not permitted when stream is capturing"
    ]
    fix(tiny_model, fail, is_required=True)
    with pytest.raises(ConfigurationError, match="decode_graphs is always, but a step of 8"):
        grow(tiny_model)


def test_a_level_too_large_for_fixed_shapes_is_decoded_without(
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = grow(tiny_model)
    monkeypatch.setattr(decode_graphs, "max_bytes", lambda device: 1000)
    recorder = Recorder()
    fix(tiny_model, recorder)
    with caplog.at_level(logging.INFO):
        assert_same(grow(tiny_model), plain)
    assert recorder.count == 0
    assert caplog.text.count("are decoded without fixed shapes") == 1


def test_sizes_used_longest_ago_are_forgotten(
    tiny_model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numbers of a token's keys and values, tokens of 8 and 128 rows, bytes of a number.
    limit = 2 * 2 * 2 * 8 * ((8 + 128) * 128) * 4
    monkeypatch.setattr(decode_graphs, "max_bytes", lambda device: limit)
    recorder = Recorder(is_counter=True)
    fix(tiny_model, recorder)
    for _ in range(2):
        # Of 8, 32 and 128 rows, the last leave no room for any used before.
        grow(tiny_model)
        assert [num_rows for num_rows, _ in tiny_model._steps._steps] == [128]
    assert recorder.count == 6


def test_padding_is_less_than_half() -> None:
    assert [bucket(n, 4) for n in (1, 4, 5, 6, 7, 9, 13, 17, 25)] == [
        *(4, 4, 6, 6, 8, 12, 16, 24, 32)
    ]
    assert bucket(129, 128) == 192


def test_graphs_demanded_without_a_gpu_are_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="decode_graphs is always, but"):
        load_backend(tiny_model_dir, decode_graphs="always")
    with pytest.raises(ConfigurationError, match="Llama-like"):
        build_fixed_steps(None, torch.device("cuda"), "always")
    assert build_fixed_steps(None, torch.device("cuda"), "auto") is None


@pytest.mark.parametrize("mode", ["auto", "never", "always"])
def test_the_device_and_the_mode_decide(tiny_model: HuggingFaceLanguageModel, mode: str) -> None:
    assert build_fixed_steps(tiny_model._decoder, CPU, "auto") is None
    steps = build_fixed_steps(tiny_model._decoder, torch.device("cuda"), mode)
    assert steps is not None
    assert steps.capture is (None if mode == "never" else decode_graphs.capture_cuda_graph)


META = torch.device("meta")
"""Tensors without numbers: whoever mixes in one of the CPU, or wants to know a number, fails."""


@pytest.fixture
def _without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    # Up to 5.0 transformers asks torch about its "meta" device too, which torch refuses.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


@pytest.mark.usefixtures("_without_autocast")
@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (None, 0.9), (5, 0.9)])
def test_no_decoding_step_waits_for_the_device_or_takes_tensors_of_another(
    top_k: int | None,
    top_p: float,
    is_fixed: bool,
    tiny_model: HuggingFaceLanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "CHECK_PERIOD", 100)
    tiny_model._decoder = Decoder(tiny_model.module.to(META))
    banned_ids = tiny_model.token_sampler.banned_ids.tolist()
    tiny_model.token_sampler = ConstrainedSampler(banned_ids, tiny_model.end_ids, META)
    fix(tiny_model, None)
    session: Any = tiny_model.open_session()
    *_, last = session._forward_contexts(CONTEXTS, 1, 6)
    lengths = [6, 5, 8]
    fixed = session.steps.begin(session.weights, session._tree, lengths, 6) if is_fixed else None
    options = SamplingOptions(7, min_new_tokens=1, temperature=0.7, top_k=top_k, top_p=top_p)
    uniforms = torch.rand(3, 7, device=META)
    drawn = session._sample_turns(fixed, last.last_hidden(), lengths, uniforms, options)
    assert {drawn.ids_BT.device, drawn.mask_BT.device, drawn.logprobs_BT.device} == {META}
    if is_fixed:
        assert fixed.num_steps == 6


@pytest.mark.usefixtures("_without_autocast")
def test_scores_of_a_tree_are_computed_where_the_weights_are(
    tiny_model: HuggingFaceLanguageModel,
) -> None:
    module = tiny_model.module.to(META)
    trie = build_trie(CONTEXTS).to(META)
    weights = live_weights(module, torch.bfloat16, use_adapter=False)
    where = trie.ids_N, trie.positions_N, TrieAttention(trie, torch.bfloat16)
    hidden_NX = Decoder(module).hidden(weights, *where, num_positions=8)
    assert hidden_NX.device == META
    weights.head(hidden_NX).sum().backward()
    assert {weight.grad.device for weight in module.parameters()} == {META}
