"""A stand-in for vLLM that computes with transformers, as simply as possible.

It refuses any argument that the real one lacks in one of the versions of `vllm_names.json`, it does
not sample while asleep, and it reads prefixes with the weights of the time when it first saw them
until its cache is reset. The names are read from wheels of vLLM:

pip download --no-deps vllm==0.26.0 -d wheels
python -m tests.language_models.fake_vllm wheels/*.whl > tests/language_models/vllm_names.json
"""

from __future__ import annotations

import ast
import copy
import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = Path(__file__).with_name("vllm_names.json")
CLASSES = {
    "SamplingParams": "vllm/sampling_params.py",
    "EngineArgs": "vllm/engine/arg_utils.py",
    "LoRARequest": "vllm/lora/request.py",
}
METHODS = ("generate", "apply_model", "reset_prefix_cache", "sleep", "wake_up")
"""Methods of `LLM` that the fake has."""


def check_names(what: str, given: Iterable[str]) -> None:
    for version, names in json.loads(NAMES.read_text()).items():
        unknown = set(given) - set(names[what])
        assert not unknown, f"vLLM {version}: {what} takes no {sorted(unknown)}"


class SamplingParams:
    """Defaults and checks of the real class, as far as they matter here."""

    def __init__(self, **given: Any) -> None:
        check_names("SamplingParams", given)
        unset = ("logit_bias", "allowed_token_ids", "logprobs", "seed", "prompt_logprobs")
        numbers = {"max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        self.__dict__ |= numbers | {"stop_token_ids": [], "ignore_eos": False}
        self.__dict__ |= dict.fromkeys([*unset, "skip_reading_prefix_cache"]) | given
        assert 0.0 <= self.temperature <= 2.0
        assert self.temperature == 0.0 or self.temperature >= 0.01
        assert self.ignore_eos, "the real one would add ends of its own"


class LoRARequest:
    def __init__(self, **given: Any) -> None:
        check_names("LoRARequest", given)
        self.lora_name: str = given["lora_name"]
        self.lora_int_id: int = given["lora_int_id"]
        self.lora_path: str = given["lora_path"]
        assert self.lora_int_id > 0


class _Inner:
    """The object that `apply_model` passes: loads weights by their names in the checkpoint."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own, given = dict(self.module.named_parameters()), dict(weights)
        assert given.keys() == own.keys(), "a weight is missing"
        for name, weight in given.items():
            own[name].copy_(weight)
        return set(given)


class LLM:
    started: list[LLM] = []

    def __init__(self, model: str, **given: Any) -> None:
        check_names("EngineArgs", given)
        assert given["logprobs_mode"] == "raw_logprobs"
        assert given["generation_config"] == "vllm"
        self.given = given
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[given["dtype"]]
        self.module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
        torch.manual_seed(given["seed"])
        self.adapters: dict[int, tuple[str, Any]] = {}
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        self.prefixes: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        config = SimpleNamespace(get_vocab_size=lambda: self.module.config.vocab_size)
        self.llm_engine = SimpleNamespace(
            model_config=config, add_lora=self._add_lora, remove_lora=self._remove_lora
        )
        LLM.started.append(self)

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        assert "weights" not in self.asleep, "weights were loaded into memory that was given back"
        self.calls.append("load_weights")
        return [func(_Inner(self.module))]

    def _add_lora(self, request: LoRARequest) -> bool:
        from peft import PeftModel

        assert self.given["enable_lora"]
        assert "weights" not in self.asleep
        assert request.lora_int_id not in self.adapters, "vLLM would keep the old adapter"
        assert len(self.adapters) < self.given["max_loras"]
        module = PeftModel.from_pretrained(copy.deepcopy(self.module), request.lora_path)
        assert module.peft_config["default"].r <= self.given["max_lora_rank"]
        self.adapters[request.lora_int_id] = (request.lora_name, module.eval())
        self.calls.append("add_lora")
        return True

    def _remove_lora(self, lora_id: int) -> bool:
        del self.adapters[lora_id]
        return True

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        self.prefixes.clear()
        return True

    def sleep(self, level: int = 1) -> None:
        assert self.given["enable_sleep_mode"]
        assert level == 1
        self.calls.append("sleep")
        self.prefixes.clear()
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.calls.append(f"wake_up {' '.join(tags)}")
        self.asleep -= set(tags)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[dict[str, Any]], sampling_params: Sequence[Any], **given: Any
    ) -> list[Any]:
        check_names("LLM.generate", given)
        assert not self.asleep, "an engine that sleeps cannot sample"
        assert given["use_tqdm"] is False
        request = given["lora_request"]
        adapter = ("", self.module) if request is None else self.adapters[request.lora_int_id]
        self.calls.append("generate")
        pairs = zip(prompts, sampling_params, strict=True)
        return [self._one(*adapter, p["prompt_token_ids"], params) for p, params in pairs]

    def _one(self, name: str, module: Any, context: list[int], params: SamplingParams) -> Any:
        assert len(context) + params.max_tokens <= self.given["max_model_len"]
        generator = torch.Generator().manual_seed(params.seed)
        ids: list[int] = []
        logprobs = []
        key = (name, tuple(context))
        prompt_logprobs, num_cached = None, 0
        if params.prompt_logprobs is not None:
            assert params.skip_reading_prefix_cache, "cached prefixes have no log-probabilities"
            rows = module(torch.tensor([context])).logits[0].float().log_softmax(dim=-1)
            prompt_logprobs = [None] + [
                {token: SimpleNamespace(logprob=float(rows[place, token]))}
                for place, token in enumerate(context[1:])
            ]
        while True:
            if not ids and key in self.prefixes and not params.skip_reading_prefix_cache:
                logits, num_cached = self.prefixes[key], len(context) - 1
            else:
                logits = module(torch.tensor([[*context, *ids]])).logits[0, -1].float()
            if not ids:
                self.prefixes[key] = logits
            token = _draw(logits, params, len(ids), generator)
            logprobs.append({token: SimpleNamespace(logprob=float(logits.log_softmax(-1)[token]))})
            ids.append(token)
            is_end = token in params.stop_token_ids
            if is_end or len(ids) == params.max_tokens:
                break
        output = SimpleNamespace(
            token_ids=ids, logprobs=logprobs, finish_reason="stop" if is_end else "length"
        )
        return SimpleNamespace(
            outputs=[output], prompt_logprobs=prompt_logprobs, num_cached_tokens=num_cached
        )


def _draw(logits: torch.Tensor, params: SamplingParams, step: int, generator: Any) -> int:
    logits = logits.clone()
    if step < params.min_tokens:
        logits[params.stop_token_ids] = float("-inf")
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[params.allowed_token_ids] = False
        logits[others] = float("-inf")
    if params.temperature == 0.0:
        return int(logits.argmax())
    logits = logits / params.temperature
    if params.top_k > 0:
        logits[logits < logits.topk(params.top_k).values[-1]] = float("-inf")
    rising, order = logits.softmax(-1).sort()
    cut = rising.cumsum(-1) <= 1.0 - params.top_p
    cut[-1] = False
    logits[order[cut]] = float("-inf")
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, lora, request = (ModuleType(n) for n in ("vllm", "vllm.lora", "vllm.lora.request"))
    monkeypatch.setattr(LLM, "started", [])
    vllm.LLM, vllm.SamplingParams, request.LoRARequest = (  # type: ignore[attr-defined]
        LLM,
        SamplingParams,
        LoRARequest,
    )
    for module in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def _body_of(wheel: zipfile.ZipFile, file: str, name: str) -> list[ast.stmt]:
    tree = ast.walk(ast.parse(wheel.read(file)))
    return next(n.body for n in tree if isinstance(n, ast.ClassDef) and n.name == name)


def read_wheel(path: str) -> dict[str, list[str]]:
    """The fields of each class and the arguments of each method."""
    names = {}
    with zipfile.ZipFile(path) as wheel:
        for name, file in CLASSES.items():
            fields = [n for n in _body_of(wheel, file, name) if isinstance(n, ast.AnnAssign)]
            names[name] = sorted(n.target.id for n in fields if isinstance(n.target, ast.Name))
        for node in _body_of(wheel, "vllm/entrypoints/llm.py", "LLM"):
            if isinstance(node, ast.FunctionDef) and node.name in METHODS:
                arguments = [*node.args.args, *node.args.kwonlyargs]
                names[f"LLM.{node.name}"] = [a.arg for a in arguments if a.arg != "self"]
    return names


if __name__ == "__main__":
    versions = []
    for path in sys.argv[1:]:
        rows = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in read_wheel(path).items())
        versions.append(f'"{Path(path).name.split("-")[1]}": {{\n' + ",\n".join(rows) + "\n}")
    print("{\n" + ",\n".join(versions) + "\n}")
