"""Trained models are loaded completely: adapters over their base, and tokenizers from it."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nip_astra.errors import ModelLoadError
from nip_astra.language_models import sources
from nip_astra.language_models.adapters import LoraParameters, add_adapter, has_adapter
from nip_astra.language_models.sources import (
    TOKENIZER_FILES,
    computing_dtype,
    find_tokenizer,
    gguf_read_once,
    load_model,
    load_tokenizer,
)
from tests.kit.tiny import CPU, load_backend, make_gpt2, make_language_model, make_tokenizer

BASE = "base_model_name_or_path"
IDS = torch.tensor([[6, 7, 8, 9]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_language_model(tmp_path / "base", seed=1)


@pytest.fixture
def adapted(base: Path) -> Any:
    module = add_adapter(AutoModelForCausalLM.from_pretrained(base), LoraParameters(rank=2))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return module.eval()


def without_tokenizer(folder: Path) -> Path:
    for name in (*TOKENIZER_FILES, "chat_template.jinja", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def test_an_adapter_is_added_into_the_base_that_it_names(
    base: Path, adapted: Any, tmp_path: Path
) -> None:
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), None, None)
    plain = load_model(str(base), None, None)
    torch.testing.assert_close(loaded(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)
    assert (loaded(IDS).logits - plain(IDS).logits).abs().max() > 0.01
    assert not has_adapter(loaded)
    assert all(p.requires_grad for p in loaded.parameters()), "it can be trained on"
    tokenizer = find_tokenizer(str(tmp_path / "adapter"), None, None)
    assert len(tokenizer) == len(load_tokenizer(str(base)))


def test_a_base_that_moved_is_given(base: Path, adapted: Any, tmp_path: Path) -> None:
    adapted.save_pretrained(tmp_path / "adapter")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(str(tmp_path / "adapter"), None, None)
    model = load_backend(tmp_path / "adapter", base_model=str(moved))
    torch.testing.assert_close(model.module(IDS).logits, adapted(IDS).logits, rtol=1e-4, atol=1e-4)
    assert model.tokenizer.encode("hello good") == [6, 7]
    assert len(list(model.parameters())) > 0


def test_an_adapter_of_another_model_or_without_all_weights_is_refused(
    adapted: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    make_gpt2(tmp_path / "other")
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel"):
        load_model(str(folder), str(tmp_path / "other"), None)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[::2]), folder / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="lora_"):
        load_model(str(folder), None, None)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_model(str(folder), None, None)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {BASE: None}))
    with pytest.raises(ModelLoadError, match="base_model"):
        load_model(str(folder), None, None)


def test_a_missing_tokenizer_comes_from_the_base_or_is_an_error(base: Path, tmp_path: Path) -> None:
    own = shutil.copytree(base, tmp_path / "own")
    bare = without_tokenizer(shutil.copytree(base, tmp_path / "bare"))
    result = find_tokenizer(str(bare), str(base), None)
    assert result.chat_template == load_tokenizer(str(base)).chat_template
    with pytest.raises(ModelLoadError, match=r"bare .*attacker_base_model_id"):
        find_tokenizer(str(bare), None, None)
    assert find_tokenizer(str(own), "nowhere", None).encode("hello") == [6]


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    without_tokenizer(make_gpt2(tmp_path / "gpt2"))
    # transformers creates a tokenizer for this kind of model if there is none.
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(str(tmp_path / "gpt2"))


def test_a_gguf_file_is_parsed_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    parsed: list[str] = []
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed.append(path) or object())
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with gguf_read_once():
        assert gguf.GGUFReader("a.gguf") is gguf.GGUFReader("a.gguf")
        gguf.GGUFReader("b.gguf")
    assert parsed == ["a.gguf", "b.gguf"]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


@pytest.mark.parametrize(
    ("dtype", "trainable", "gains", "expected"),
    [
        ("auto", False, True, torch.float32),
        ("auto", True, True, torch.bfloat16),
        ("fastest", False, True, torch.bfloat16),
        ("fastest", True, False, torch.float32),
        ("bfloat16", False, False, torch.bfloat16),
    ],
)
def test_bfloat16_is_taken_where_it_gains(
    monkeypatch: pytest.MonkeyPatch, dtype: str, trainable: bool, gains: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(sources, "gains_from_bfloat16", lambda module, device: gains)
    module = Mock()
    module.num_parameters.return_value = 1
    result = computing_dtype(module, dtype, CPU, trainable=trainable)
    assert result == expected


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("num_parameters", [1000, 10**9])
def test_a_slow_precision_is_named_with_its_factor_where_a_large_model_asks_for_it(
    gains: bool,
    num_parameters: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources._warn_about_slow_bfloat16.cache_clear()
    monkeypatch.setattr(sources, "gains_from_bfloat16", lambda *_: gains)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    module = Mock()
    module.num_parameters.return_value = num_parameters
    for _ in range(2):
        computed = computing_dtype(module, "bfloat16", CPU, trainable=False)
        assert computed == torch.bfloat16
        computing_dtype(module, "float32", CPU, trainable=False)
    is_slow = not gains and num_parameters == 10**9
    assert len(caplog.records) == is_slow
    assert ("4 times" in caplog.text) is is_slow


@pytest.mark.parametrize("name", ["my model", "modèle", "a--b", "\udce9"])
def test_what_cannot_be_the_name_of_a_model_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match="hub"):
        sources.resolve_model(name, None)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_hub_out_of_reach_is_noticed_before_the_hub_tries_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    cached = "config.json" if is_cached else None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setattr(sources, "_hub_problem", cache(sources._hub_problem.__wrapped__))
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=OSError("no route")))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: cached)
    if is_cached:
        assert sources.resolve_model("owner/model", None) == ("owner/model", None)
    else:
        with pytest.raises(ModelLoadError, match="no route"):
            sources.resolve_model("owner/model", None)
    assert constants.HF_HUB_OFFLINE is is_cached


def test_a_gguf_file_is_converted_once_for_each_content(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    load, loaded = sources.load_causal_lm, []

    def load_in_its_place(name: str, gguf_file: str | None) -> Any:
        loaded.append(gguf_file)
        return load(str(tiny_model_dir), None)

    monkeypatch.setattr(sources, "load_causal_lm", load_in_its_place)
    monkeypatch.setattr(sources, "load_tokenizer", lambda *_: make_tokenizer())
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF one")
    first = sources.converted_gguf(file, tmp_path / "kept")
    assert sources.converted_gguf(file, tmp_path / "kept") == first
    assert loaded == ["model.gguf"]
    weights = [load(str(folder), None).state_dict() for folder in (first, tiny_model_dir)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])

    file.write_bytes(b"GGUF two")
    assert sources.converted_gguf(file, tmp_path / "kept") != first
    (tmp_path / "a file").write_text("")
    with pytest.raises(ModelLoadError, match="a file"):
        sources.converted_gguf(file, tmp_path / "a file")
