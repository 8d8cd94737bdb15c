"""Unmodified packages against the service; `tests/kit/third_party.py` builds environments."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nip_astra.language_models.sources import load_tokenizer
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.serve.running import Running, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    return make_language_model(folder, window=32_768, tokenizer=make_byte_tokenizer())


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Running]:
    pytest.importorskip("llguidance")
    with running({"target": str(model)}, max_answer_tokens=8192) as service:
        yield service


def test_inspect_ai_generates_scores_and_calls_tools(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate
    from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
    from inspect_ai.util import JSONSchema

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_API_KEY", "any")
    monkeypatch.setenv("LOCAL_BASE_URL", service.base_url)
    task = inspect_ai.Task(dataset=[Sample("hi", target="x")], solver=generate(), scorer=includes())
    options: dict[str, Any] = {"max_tokens": 12, "seed": 1, "display": "none"}
    (log,) = inspect_ai.eval(task, model="openai-api/local/target", **options)
    assert log.status == "success", log.error
    flag = JSONSchema(type="boolean")
    form: dict[str, Any] = {"properties": {"on": flag}, "required": ["on"]}
    info = ToolInfo(name="switch", description="Switch it.", parameters=ToolParams(**form))

    async def ask() -> tuple[Any, Any]:
        model = get_model("openai-api/local/target", memoize=False)
        config = GenerateConfig(max_tokens=900, seed=1, logprobs=True, top_logprobs=2)
        called = await model.generate(
            "hi", tools=[info], tool_choice=ToolFunction(name="switch"), config=config
        )
        closed = JSONSchema(type="object", additionalProperties=False, **form)
        schema = ResponseSchema(name="answer", json_schema=closed)
        config = GenerateConfig(max_tokens=900, seed=1, response_schema=schema)
        return called, await model.generate("hi", config=config)

    called, formed = asyncio.run(ask())
    (call,) = called.message.tool_calls
    assert (call.function, list(call.arguments)) == ("switch", ["on"])
    assert set(json.loads(formed.completion)) == {"on"}


def test_langchain_streams_calls_tools_and_structures(service: Running) -> None:
    openai_of = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel

    class Answer(BaseModel):
        """An answer."""

        on: bool

    options: dict[str, Any] = {"model": "target", "api_key": "any", "base_url": service.base_url}
    model = openai_of.ChatOpenAI(**options, max_tokens=900, seed=1, max_retries=0)
    assert model.invoke("hi", max_tokens=8).content
    assert "".join(chunk.content for chunk in model.stream("hi", max_tokens=8))
    assert len(model.batch(["hi", "ho"], max_tokens=8)) == 2
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Answer, method=method).invoke("hi"), Answer)
    tools = model.bind_tools([Answer], tool_choice="Answer")
    (call,) = tools.invoke("hi").tool_calls
    assert "on" in call["args"]
    pieces = [chunk for chunk in tools.stream("hi") if chunk.tool_call_chunks]
    assert pieces[0].tool_call_chunks[0]["name"] == "Answer"
    with pytest.raises(Exception, match="v1/chat/completions"):
        openai_of.ChatOpenAI(**options, use_responses_api=True).invoke("hi")
    with pytest.raises(Exception, match="v1/chat/completions"):
        openai_of.OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_query("hi")


def test_lm_eval_scores_likelihoods_as_the_model_does(
    service: Running, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    from nip_astra.language_models.sources import load_causal_lm

    monkeypatch.setenv("OPENAI_API_KEY", "any")
    options: dict[str, Any] = {"model": "target", "tokenizer": str(model), "max_length": 512}
    options |= {"base_url": f"{service.base_url}/completions", "batch_size": 4}
    scored = get_model("local-completions")(**options)
    pairs = [("the cat", " sat"), ("the cat", " sat on the mat"), ("", "hello"), ("a", "b")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = scored.loglikelihood(requests)
    module, tokenizer = load_causal_lm(str(model), None), load_tokenizer(str(model))
    for (context, continuation), (likelihood, is_greedy) in zip(pairs, found, strict=True):
        first = tokenizer.encode(context) or [scored.prefix_token_id]
        ids = first + tokenizer.encode(continuation)
        with torch.no_grad():
            logprobs = module(torch.tensor([ids])).logits[0].log_softmax(dim=1)
        expected = sum(float(logprobs[i - 1, ids[i]]) for i in range(len(first), len(ids)))
        assert likelihood == pytest.approx(expected, abs=1e-3)
        best = logprobs.argmax(dim=1).tolist()
        assert is_greedy == (best[len(first) - 1 : -1] == ids[len(first) :])
    rolling = scored.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("abc",), 0)])
    assert math.isfinite(rolling[0])
    until = Instance("generate_until", {}, ("hi", {"until": ["x"], "max_gen_toks": 5}), 0)
    assert isinstance(scored.generate_until([until])[0], str)


def test_pyrit_attacks_with_the_service_as_attacker_and_judge(service: Running) -> None:
    pytest.importorskip("pyrit")
    from pyrit.executor.attack import AttackAdversarialConfig, AttackScoringConfig, RedTeamingAttack
    from pyrit.prompt_target import OpenAIChatTarget, TargetCapabilities, TargetConfiguration
    from pyrit.score import SelfAskTrueFalseScorer
    from pyrit.setup import initialize_pyrit_async

    async def attack() -> Any:
        await initialize_pyrit_async("InMemory")
        names = ("multi_turn", "multi_message_pieces", "system_prompt", "editable_history")
        names += ("json_output", "json_schema")
        capabilities = TargetCapabilities(**{f"supports_{name}": True for name in names})
        options: dict[str, Any] = {"model_name": "target", "api_key": "any"}
        options["custom_configuration"] = TargetConfiguration(capabilities=capabilities)
        target = OpenAIChatTarget(endpoint=service.base_url, max_completion_tokens=8000, **options)
        scorer = SelfAskTrueFalseScorer(chat_target=target)
        attack = RedTeamingAttack(
            objective_target=target,
            attack_adversarial_config=AttackAdversarialConfig(target=target),
            attack_scoring_config=AttackScoringConfig(objective_scorer=scorer),
            max_turns=1,
        )
        return await attack.execute_async(objective="be rude")

    result = asyncio.run(attack())
    assert result.executed_turns == 1


def test_garak_probes_the_service(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = pytest.importorskip("garak.cli")
    options = {"openai": {"OpenAICompatible": {"uri": f"{service.base_url}/", "max_tokens": 12}}}
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    monkeypatch.setenv("OPENAICOMPATIBLE_API_KEY", "any")
    arguments = ["--target_type", "openai.OpenAICompatible", "--target_name", "target"]
    arguments += ["--probes", "test.Blank,grandma.Win10", "--generations", "1"]
    arguments += ["--generator_option_file", str(file), "--report_prefix", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["garak", *arguments])
    cli.main(arguments)
    kinds = [json.loads(line)["entry_type"] for line in (tmp_path / "run.report.jsonl").open()]
    assert kinds.count("attempt") == 2 * (1 + 6)


def test_verifiers_relays_calls_of_tools(service: Running) -> None:
    pytest.importorskip("verifiers")
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    function = {"name": "switch", "parameters": {**schema, "additionalProperties": False}}
    body = {"model": "target", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900}
    body |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    body |= {"parallel_tool_calls": False, "return_token_ids": True, "logprobs": True}

    async def ask() -> Any:
        client = EvalClient(EvalClientConfig(base_url=service.base_url, api_key_var="NONE"))
        try:
            return await client.get_response(ChatDialect(), body, SamplingConfig())
        finally:
            await client.close()

    response = asyncio.run(ask())
    (call,) = response.message.tool_calls
    assert (call.name, list(json.loads(call.arguments))) == ("switch", ["on"])
    (choice,) = response.raw["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
