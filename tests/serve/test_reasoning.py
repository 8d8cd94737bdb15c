"""A policy reads the same of its earlier turns in training and where it is served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nip_astra.language_models.base import Generation, SamplingOptions, pad_right
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from tests.kit.tiny import CPU, make_language_model, make_thinking_tokenizer
from tests.serve.running import running

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("opens_thought", [False, True])
@pytest.mark.parametrize("ends_with", ["user", "tool"])
def test_the_service_renders_what_training_reads(
    tmp_path: Path, opens_thought: bool, ends_with: str
) -> None:
    openai = pytest.importorskip("openai")
    tokenizer = make_thinking_tokenizer(opens_thought=opens_thought)
    ends = (tokenizer.eos_token_id,)
    model: Any = SimpleNamespace(tokenizer=tokenizer, context_window=4096, end_ids=ends)
    agent = ConversationAgent("policy", model, ChatFormat(tokenizer), SamplingOptions(64))
    opening = "" if opens_thought else "<think>\n"
    sampled = tokenizer.encode(f"{opening}Hm.\n</think>\n\nWait.<end>", add_special_tokens=False)
    ids, mask = pad_right([sampled], CPU)
    (own,) = agent.read_turns(Generation(ids, mask, mask * -0.5))
    first, last = agent.tokenize([Turn("user", "hello"), Turn(ends_with, "more")])  # type: ignore[arg-type]
    (read,) = agent.contexts([[first, own, last]])
    answer = {"role": "assistant", "content": own.text, "reasoning_content": own.reasoning}
    after: dict[str, Any] = {"role": ends_with, "content": "more"}
    if ends_with == "tool":
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        answer["tool_calls"] = [call]
        after["tool_call_id"] = "call_1"
    make_language_model(tmp_path, window=1024, tokenizer=tokenizer)
    with (
        running({"thinking": str(tmp_path)}) as service,
        openai.OpenAI(base_url=service.base_url, api_key="any", max_retries=0) as client,
    ):
        served = client.chat.completions.create(
            model="thinking",
            messages=[{"role": "user", "content": "hello"}, answer, after],
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
    shown = tokenizer.decode(served.prompt_token_ids)
    if ends_with == "tool":
        written = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
        assert written in shown
        shown = shown.replace(written, "")
    assert shown == tokenizer.decode(read)
    # After a message of the user the template leaves the thought out, after a tool's it stays.
    assert ("Hm." in shown) is (ends_with == "tool")
