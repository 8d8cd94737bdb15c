"""The vLLM backend, with a stand-in that computes as vLLM does."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from nip_astra.errors import (
    ConfigurationError,
    ContextLengthError,
    MissingDependencyError,
    ModelLoadError,
)
from nip_astra.language_models import sources, vllm
from nip_astra.language_models.base import LanguageModel, SamplingOptions, pad_left
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.vllm import VllmLanguageModel
from nip_astra.language_models.vllm_backend import remote_engines
from nip_astra.language_models.vllm_backend.engine import derive_row_seed, sampling_arguments
from tests.kit.tiny import CPU, load_backend, make_language_model, uniforms_of
from tests.language_models import fake_vllm

CONTEXTS = [[2, 4, 6, 7, 3, 5], [2, 4, 8, 3, 5], [2, 4, 9, 10, 11, 12, 3, 5]]
OPTIONS = SamplingOptions(max_new_tokens=6)
ROWS = (*pad_left(CONTEXTS, CPU), torch.full((3, 2), 7), torch.ones(3, 2, dtype=torch.bool))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_language_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def load(model_dir: Path, *, trainable: bool = True, **given: Any) -> VllmLanguageModel:
    parameters = VllmLanguageModel.Parameters(model=str(model_dir), **given)
    torch.manual_seed(0)
    return VllmLanguageModel.load(parameters, device=CPU, scenario_dir=None, trainable=trainable)


def uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return uniforms_of(rows, 6, seed=seed)


def llm() -> fake_vllm.LLM:
    return fake_vllm.LLM.started[-1]


def greedy(model: LanguageModel) -> torch.Tensor:
    options = SamplingOptions(max_new_tokens=6, min_new_tokens=2, temperature=0.0)
    return model.generate(CONTEXTS, 1, uniforms(3), options).ids_BT


def change(model: VllmLanguageModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)


@pytest.mark.parametrize("name", fake_vllm.METHODS)
def test_every_version_of_vllm_has_the_methods_of_the_stand_in(name: str) -> None:
    arguments = list(inspect.signature(getattr(fake_vllm.LLM, name)).parameters)[1:]
    fake_vllm.check_names(f"LLM.{name}", {*arguments} - {"given"})


def test_a_turn_depends_on_its_own_random_numbers_only(model_dir: Path) -> None:
    model = load(model_dir)
    numbers = uniforms(6)
    together, other = (model.generate(CONTEXTS, 2, n, OPTIONS) for n in (numbers, 1 - numbers))
    alone = model.generate(CONTEXTS[1:2], 2, numbers[2:4], OPTIONS)
    assert torch.equal(together.ids_BT[2:4], alone.ids_BT)
    assert not torch.equal(together.ids_BT, other.ids_BT)
    assert len({derive_row_seed(row) for row in numbers}) == 6


def test_turns_are_drawn_from_the_same_distribution(model_dir: Path) -> None:
    model = load(model_dir)
    options = SamplingOptions(max_new_tokens=1, temperature=0.7, top_k=5, top_p=0.8)
    numbers = uniforms_of(900, 1, seed=3)
    counts = [
        torch.bincount(m.generate(CONTEXTS[:1], 900, numbers, options).ids_BT[:, 0], minlength=32)
        for m in (model, model.scorer)
    ]
    assert torch.equal(counts[0] > 0, counts[1] > 0)
    assert float((counts[0] - counts[1]).abs().sum()) / 1800 < 0.06


@pytest.mark.parametrize(
    ("temperature", "num_banned", "named"),
    [(0.001, 0, "0.001"), (2.5, 0, "2.5"), (1.0, 1025, "1025")],
)
def test_options_that_vllm_does_not_support_are_refused(
    temperature: float, num_banned: int, named: str
) -> None:
    options = SamplingOptions(max_new_tokens=1, temperature=temperature)
    with pytest.raises(ConfigurationError, match=named):
        sampling_arguments(options, end_ids=(), banned_ids=range(num_banned))


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_policies_sample_with_current_weights_and_references_with_initial_weights(
    model_dir: Path, tmp_path: Path, lora: Any
) -> None:
    model = load(model_dir, lora=lora)
    reference = model.frozen_reference()
    before = greedy(model)
    greedy(model)
    assert llm().calls.count("reset_prefix_cache") == (lora is not None)
    change(model)
    after = greedy(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, greedy(model.scorer))
    assert torch.equal(greedy(reference), before)
    assert list(reference.parameters()) == []
    assert torch.equal(greedy(model), after)
    model.save(tmp_path)
    again = load(model_dir, lora=lora)
    again.restore(tmp_path)
    assert torch.equal(greedy(again), after)
    # Updates that raise no version, as of fused and 8-bit optimizers, are sampled from too.
    model.logprobs(*ROWS)
    versions = [parameter._version for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    assert [parameter._version for parameter in model.parameters()] == versions
    greedy(model)
    assert model.take_metrics()["sampler_gap/largest"] < 1e-4


def test_weights_travel_in_the_precision_of_the_engine(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(model_dir, dtype="bfloat16")
    sent: list[tuple[str, torch.Tensor]] = []
    load_weights = fake_vllm._Inner.load_weights

    def noted(self: Any, weights: Any) -> set[str]:
        sent.extend(weights)
        return load_weights(self, sent)

    monkeypatch.setattr(fake_vllm._Inner, "load_weights", noted)
    change(model)
    greedy(model)
    own = dict(model.scorer.module.named_parameters())
    assert {item.dtype for item in own.values()} == {torch.float32}
    assert {item.dtype for _, item in sent} == {torch.bfloat16}
    # As the engine rounds float32 weights.
    for name, held in llm().module.named_parameters():
        assert torch.equal(held, own[name].detach().to(torch.bfloat16))


def test_adapters_get_new_numbers_and_leave_no_folder_behind(model_dir: Path) -> None:
    model = load(model_dir, lora={"rank": 4})
    folders = []
    for _ in range(3):
        change(model)
        model.generate(CONTEXTS, 1, uniforms(3), OPTIONS)
        folders.append(Path(model.engine._adapter.request.lora_path))
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert list(llm().adapters) == [3]
    assert llm().given["max_lora_rank"] == 8


def test_a_frozen_model_is_scored_by_vllm_alone(model_dir: Path) -> None:
    model = load(model_dir, trainable=False)
    assert model.scorer is None
    reference = load_backend(model_dir, trainable=False)
    rows = (*pad_left(CONTEXTS, CPU), torch.tensor([[7, 8], [9, 0], [3, 6]]))
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    expected = reference.logprobs(*rows, mask)
    with model.counting() as spent:
        assert torch.allclose(model.logprobs(*rows, mask), expected, atol=1e-5)
    assert spent.forwarded >= spent.scored > 0
    spans = [(2, 4), (3, 5), (1, 8)]
    result = model.open_session().generate(CONTEXTS, 1, uniforms(3), OPTIONS, spans=spans)
    same = reference.open_session().generate(CONTEXTS, 1, uniforms(3), OPTIONS, spans=spans)
    assert torch.allclose(result.span_logprobs_CT, same.span_logprobs_CT, atol=1e-5)
    assert model.num_parameters() == reference.num_parameters()
    with pytest.raises(ModelLoadError, match="its weights are in vLLM only"):
        model.save(Path("nowhere"))
    with pytest.raises(ModelLoadError, match="gives no entropies"):
        model.token_scores(*rows, mask, needs_entropy=True)


def test_a_target_of_the_same_weights_shares_the_engine(model_dir: Path) -> None:
    attacker = load(model_dir, lora={"rank": 4})
    same = VllmLanguageModel.Parameters(model=str(model_dir))
    target = attacker.base_for(same)
    assert target.engine is attacker.engine
    change(attacker)
    greedy(attacker)
    assert torch.equal(greedy(target), greedy(load(model_dir, trainable=False)))
    assert target.token_count.forwarded > 0
    assert load(model_dir).base_for(same) is None
    by_huggingface = HuggingFaceLanguageModel.Parameters(model=str(model_dir))
    assert isinstance(attacker.base_for(by_huggingface), HuggingFaceLanguageModel)


def test_the_engine_sleeps_while_weights_are_trained(model_dir: Path) -> None:
    model = load(model_dir, sleep_during_updates=True)
    model.generate(CONTEXTS, 1, uniforms(3), OPTIONS)
    llm().calls.clear()
    for _ in range(2):
        model.logprobs(*ROWS).sum().backward()
    change(model)
    model.generate(CONTEXTS, 1, uniforms(3), OPTIONS)
    expected = ["sleep", "wake_up weights", "load_weights", "wake_up kv_cache"]
    assert llm().calls == [*expected, "reset_prefix_cache", "generate"]


def test_log_probabilities_are_the_trainers_and_the_gap_is_logged(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(model_dir, dtype="float32")
    # As if a sync had been skipped.
    change(model)
    model.engine.note_weights(model.weights.version)
    with model.counting() as spent:
        result = model.generate(CONTEXTS, 2, uniforms(6), OPTIONS)
    assert (spent.scored, spent.rescored > 0) == (0, True)
    empty = model.generate([], 2, torch.zeros(0, 6), OPTIONS)
    assert empty.ids_BT.shape == empty.mask_BT.shape == empty.logprobs_BT.shape == (0, 6)
    rows = pad_left([c for c in CONTEXTS for _ in range(2)], CPU)
    scored = model.scorer.logprobs(*rows, result.ids_BT, result.mask_BT)
    assert torch.equal(result.logprobs_BT, scored.detach())
    with caplog.at_level(logging.WARNING):
        metrics = model.take_metrics()
    assert metrics["sampler_gap/mean"] > 0.1
    assert metrics["sampler_gap/kl"] > 0
    assert len(caplog.records) == 1
    assert model.take_metrics() == {}


@pytest.mark.parametrize("max_padded", [1 << 24, 60])
def test_turns_of_a_conversation_are_scored_again_in_one_pass(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, max_padded: int
) -> None:
    monkeypatch.setattr(vllm, "MAX_PADDED", max_padded)
    model = load(model_dir, dtype="float32")
    session, rows, contexts, drawn = model.open_session(), [[2, 4, 6], [2, 4, 7]], [], []
    for turn in range(6):
        width = 2 if turn == 0 else 1
        options = SamplingOptions(max_new_tokens=6 - turn % 2, min_new_tokens=2)
        result = session.generate(rows, width, uniforms(4, seed=turn), options).generation
        rows = [row for row in rows for _ in range(width)]
        contexts.append(rows)
        drawn.append(result)
        rows = [
            [*row, *ids[mask].tolist(), 8, 5]
            for row, ids, mask in zip(rows, result.ids_BT, result.mask_BT, strict=True)
        ]
    with model.counting() as spent:
        settled = session.settle(drawn)
    for before, result, raw in zip(contexts, settled, drawn, strict=True):
        rows_before = pad_left(before, CPU)
        alone = model.scorer.logprobs(*rows_before, result.ids_BT, result.mask_BT).detach()
        assert torch.equal(result.ids_BT, raw.ids_BT)
        assert torch.equal(result.mask_BT, raw.mask_BT)
        assert torch.allclose(result.logprobs_BT, alone, atol=1e-5)
        assert torch.allclose(result.logprobs_BT, raw.logprobs_BT, atol=1e-4)
    num_tokens = sum(map(len, rows))
    if max_padded > 60:
        # Turn by turn it would be about 3.5 times as much.
        assert spent.rescored < num_tokens
    assert model.take_metrics()["sampler_gap/largest"] < 1e-4


def test_a_context_that_does_not_fit_is_refused_before_sampling(model_dir: Path) -> None:
    model = load(model_dir, max_model_len=12)
    assert model.context_window == 12
    with pytest.raises(ContextLengthError, match="window of 12"):
        model.generate(CONTEXTS, 1, uniforms(3), OPTIONS)
    assert "generate" not in llm().calls


SLEEPY = {"trainable": False, "sleep_during_updates": True}


class OtherTokens(fake_vllm.LLM):
    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.tokenizer.add_tokens(["new"])


@pytest.mark.parametrize(
    ("engine", "given", "error", "named"),
    [
        (None, {}, MissingDependencyError, r"nip_astra\[vllm\]"),
        (Mock(side_effect=ValueError("No available memory")), {}, ModelLoadError, "No available"),
        (OtherTokens, {}, ModelLoadError, "tokenizer"),
        (fake_vllm.LLM, {"lora": {"rank": 513}}, ConfigurationError, "512"),
        (fake_vllm.LLM, SLEEPY, ConfigurationError, "sleep_during_updates"),
    ],
)
def test_an_engine_that_cannot_start_is_a_typed_error(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    given: dict[str, Any],
    error: type[Exception],
    named: str,
) -> None:
    package = engine and SimpleNamespace(**vars(sys.modules["vllm"]) | {"LLM": engine})
    monkeypatch.setitem(sys.modules, "vllm", package)
    with pytest.raises(error, match=named):
        load(model_dir, **given)


@pytest.mark.parametrize("last", [7, 4])
def test_a_text_that_fills_the_window_is_scored(model_dir: Path, last: int) -> None:
    tight, wide = (load(model_dir, trainable=False, max_model_len=n) for n in (8, 20))
    rows = (*pad_left(CONTEXTS[:2], CPU), torch.tensor([[6, last], [9, 0]]))
    mask = torch.tensor([[True, True], [True, False]])
    assert torch.allclose(tight.logprobs(*rows, mask), wide.logprobs(*rows, mask), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        *({"max_model_len": 64}, {"gpu_memory_utilization": 0.2}, {"decode_graphs": "never"}),
        {"dtype": "bfloat16"},
    ],
)
def test_a_target_with_other_engine_options_gets_its_own(
    model_dir: Path, options: dict[str, Any]
) -> None:
    target = VllmLanguageModel.Parameters(model=str(model_dir), **options)
    same = VllmLanguageModel.Parameters(model=str(model_dir))
    given = {"max_model_len": 40, "gpu_memory_utilization": 0.3, "lora": {"rank": 4}}
    assert load(model_dir, **given).base_for(target) is None
    assert load(model_dir, **given).base_for(same) is not None
    assert load(model_dir, **{**given, **options}).base_for(target) is not None


def test_a_config_without_a_vocabulary_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.PretrainedConfig(max_position_embeddings=8)
    module = type("Module", (), {"generation_config": None})()
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: module)
    with pytest.raises(ModelLoadError, match=r"could not be loaded: .*vocab_size"):
        sources.describe_model(str(model_dir))


class RayHere:
    """A stand-in for Ray, whose actors are objects of this process and can be replaced."""

    exceptions = SimpleNamespace(
        RayTaskError=ValueError, GetTimeoutError=TimeoutError, RayError=OSError
    )

    def __init__(self) -> None:
        self.values: list[object] = []
        self.actors: list[_ActorHere] = []

    def put(self, value: object) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        is_value = isinstance(reference, int)
        return self.values[reference] if is_value else [call() for call in reference]

    def remote(self, **options: Any) -> Any:
        def start(kind: type, *given: Any) -> _ActorHere:
            self.actors.append(_ActorHere(partial(kind, *given)))
            return self.actors[-1]

        return lambda kind: SimpleNamespace(remote=partial(start, kind))


class _ActorHere:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._own = make, make()

    def die(self) -> None:
        self._own = self._make()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: partial(getattr(self._own, name), *given))


@pytest.fixture
def ray_here(monkeypatch: pytest.MonkeyPatch) -> RayHere:
    ray = RayHere()
    monkeypatch.setattr(remote_engines, "open_ray", lambda: ray)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.parametrize(
    ("lora", "num_engines"), [(None, 2), ({"rank": 4, "target_modules": ["q_proj"]}, 3)]
)
def test_engines_in_actors_sample_like_an_engine_in_this_process_even_if_one_dies(
    model_dir: Path, ray_here: RayHere, lora: Any, num_engines: int
) -> None:
    here = load(model_dir, lora=lora)
    there = load(model_dir, lora=lora, num_engines=num_engines)
    assert len(ray_here.actors) == num_engines
    for number in range(3):
        if number:
            for model in (here, there):
                torch.manual_seed(number)
                change(model)
        if number == 2:
            ray_here.actors[0].die()
        expected = here.generate(CONTEXTS, 2, uniforms(6), OPTIONS)
        for _ in ("sent", "held"):
            drawn = there.generate(CONTEXTS, 2, uniforms(6), OPTIONS)
            assert torch.equal(drawn.ids_BT, expected.ids_BT)
            assert torch.allclose(drawn.logprobs_BT, expected.logprobs_BT, atol=1e-6)
    assert len(ray_here.values) == (2 if lora is None else 3), "weights are sent once an update"


def test_engines_in_actors_with_other_tokens_are_refused(
    model_dir: Path, ray_here: RayHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engines.EngineActor, "vocabulary", lambda self: (7, {}))
    with pytest.raises(ModelLoadError, match="vocabulary of 7 rows"):
        load(model_dir, num_engines=2)


def test_a_target_on_an_engine_with_an_adapter_does_not_score_its_contexts(model_dir: Path) -> None:
    attacker = load(model_dir, lora={"rank": 4, "target_modules": ["q_proj"]})
    target = attacker.base_for(VllmLanguageModel.Parameters(model=str(model_dir)))
    assert not target.can_score_contexts
    assert load(model_dir, trainable=False).can_score_contexts
    spans = [(1, 2)] * 3
    with pytest.raises(ConfigurationError, match="likelihood_model to reference"):
        target.open_session().generate(CONTEXTS, 1, uniforms(3), OPTIONS, spans=spans)
