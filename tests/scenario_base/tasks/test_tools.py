"""Tools within an episode: calls, wrong calls, masks and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field

from nip_astra.errors import ConfigurationError, SandboxUnavailableError, TaskError
from nip_astra.language_models.base import SamplingOptions
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.message_format import MessageFormat
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.samplers.tasks import TaskPlan, play_task
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from nip_astra.scenario_base.tasks import tools
from nip_astra.scenario_base.tasks.base import Environment, Episode, Reaction, Task
from nip_astra.scenario_base.tasks.library import calculator
from nip_astra.scenario_base.tasks.rewards import episode_figures
from nip_astra.scenario_base.tasks.tools import (
    Tool,
    ToolParameters,
    ToolUseParameters,
    build_tools,
    python,
    tool_of,
)
from nip_astra.scorers.base import Message
from nip_astra.utils import sandbox
from tests.kit.tiny import load_backend, make_byte_tokenizer, make_language_model

# As in Qwen 2.5's template, results of one turn stand together.
TEMPLATE = """
{%- if tools %}{{- '<start>system\\n# Tools' }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}{{- "<end>\\n" }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role != "tool" or loop.first or messages[loop.index0 - 1].role != "tool" %}
        {{- '<start>' + (m.role if m.role != "tool" else "user") + '\\n' }}
    {%- endif %}
    {%- if m.role == "tool" %}
        {{- '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}{{- m.content }}{%- endif %}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {%- if m.role != "tool" or loop.last or messages[loop.index0 + 1].role != "tool" %}
        {{- '<end>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start>assistant\\n' }}{%- endif %}
"""
PLAIN_TEMPLATE = (
    "{%- for m in messages %}{{- '<start>' + {'user': 'u', 'assistant': 'a'}[m.role] + "
    "m.content + '<end>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start>a' }}{%- endif %}"
)
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: Annotated[int, Field(description="First number.")], b: int = 1) -> int:
    """Sum of two
    numbers.

    Not for the policy.
    """
    return a + b


class Sums(Environment):
    """A sum, with tools; one tool ends the episode."""

    def __init__(self) -> None:
        self.tools = [add, self.submit, self.shout]
        self.log: list[str] = []

    def reset(self) -> Sequence[Message]:
        return [Message("user", "2+3?")]

    def step(self, message: str) -> Reaction:
        return Reaction(reward=float(message == "5"))

    def submit(self, number: int) -> Reaction:
        """Give the answer."""
        return Reaction(reward=float(number == 5))

    def shout(self, text: str, times: int = 1) -> str:
        """Repeat a text."""
        if times < 0:
            raise ValueError("times is negative")
        self.log.append(text)
        return text.upper() * times


class SumTask(Task):
    """The sum."""

    def environment(self, split: object, index: int) -> Environment:
        return Sums()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceLanguageModel:
    """A random model with a token per byte."""
    folder = tmp_path_factory.mktemp("tools")
    return load_backend(make_language_model(folder, window=4096, tokenizer=make_byte_tokenizer()))


@pytest.fixture
def play(model: HuggingFaceLanguageModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays an episode in which the model writes the given text."""

    def run(
        *turns: str, template: str = TEMPLATE, offered: Sequence[Tool] = (), **options: Any
    ) -> tuple[Episode, Trajectory]:
        tokenizer = model.tokenizer
        tokenizer.chat_template = template
        end = tokenizer.eos_token_id
        queue = iter([token for turn in turns for token in (*tokenizer.encode(turn), end)])

        def draw(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            token = torch.tensor([next(queue)])
            return token, logits.log_softmax(1)[0, token]

        monkeypatch.setattr(model.token_sampler, "draw", draw)
        task = SumTask(None, seed=0, device=torch.device("cpu"), scenario_dir=None)
        plan = TaskPlan("train", 1, options.pop("max_turns", 5), key=(0,))
        task.tools, task.tool_use = offered, ToolUseParameters(**options)
        agent = ConversationAgent("policy", model, ChatFormat(tokenizer), SamplingOptions(400))
        with torch.no_grad():
            rollout = play_task(agent, task, [0], plan)
        return rollout.episodes[0], rollout.trajectories[0]

    return run


def texts(episode: Episode) -> list[str]:
    """Tool results in the policy's context."""
    return [item.text for item in episode.messages if item.role == "tool"]


def test_a_function_is_described_by_its_docstring_and_type_hints() -> None:
    tool = tool_of(add)
    assert (tool.name, tool.description) == ("add", "Sum of two numbers.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "First number."},
            "b": {"type": "integer", "default": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert "self" not in tool_of(Sums().shout).parameters["properties"]


def test_options_are_keyword_only_arguments() -> None:
    def scale(number: int, *, factor: int = 2) -> int:
        return factor * number

    tool = tool_of(scale, "triple", {"factor": 3})
    assert tool.function(number=2) == 6
    assert list(tool.parameters["properties"]) == ["number"]
    for options in ({"factor": "x"}, {"number": 1}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            tool_of(scale, options=options)


def test_a_function_without_a_schema_is_not_a_tool() -> None:
    async def later(a: int) -> int:
        return a

    for function in (lambda *numbers: 0, lambda a, **more: 0, later):
        with pytest.raises(ConfigurationError, match="schema"):
            tool_of(function)
    with pytest.raises(TaskError, match="'add'"):
        tools.Toolbox.of([add, tool_of(calculator, "add")])
    broken = Tool("broken", "", {"type": "nothing"}, add)
    with pytest.raises(TaskError, match="broken"):
        broken.fault_of({})


def test_calls_go_through_the_chat_template_and_results_are_not_learnt(
    play: Any, model: HuggingFaceLanguageModel
) -> None:
    calls = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n' + ADD
    with model.counting() as spent:
        episode, trajectory = play(calls, "5")
    tokenizer = model.tokenizer
    called = [{"name": "add", "arguments": arguments} for arguments in ({"a": 2}, {"a": 2, "b": 3})]
    expected = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "2+3?"},
            {
                "role": "assistant",
                "content": "Hm.",
                "tool_calls": [{"function": function} for function in called],
            },
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "5"},
        ],
        tools=[json.loads(tool_of(f).described) for f in (add, Sums().submit, Sums().shout)],
        tokenize=False,
    )
    assert tokenizer.decode(trajectory.tokens) == expected.removesuffix("\n")
    own = tokenizer.decode(trajectory.tokens[trajectory.loss_mask])
    assert own == f"{calls}<end>5<end>"
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 2)
    roles = [role for role, _ in episode.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    # Each token except the last is forwarded once.
    assert spent.forwarded == len(trajectory) - 1
    first, rest = trajectory.tokens[None, :1], trajectory.tokens[None, 1:]
    are_read = torch.ones_like(first).bool(), torch.ones_like(rest).bool()
    recomputed = model.logprobs(first, are_read[0], rest, are_read[1])[0].detach()
    own_T = trajectory.loss_mask
    torch.testing.assert_close(trajectory.logprobs[own_T], recomputed[own_T[1:]], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("message", "kind", "fact"),
    [
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "unknown", "add, submit"),
        ('<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>', "malformed", "arguments"),
        ('<tool_call>{"name": "add"}</tool_call>', "malformed", "arguments"),
        ('<tool_call>{"name": "add", "arguments": {"a": "2"}}</tool_call>', "arguments", "'2'"),
        ('<tool_call>{"name": "add", "arguments": {"c": 2}}</tool_call>', "arguments", "'c'"),
        ('{"name": "shout", "arguments": {"text": "a", "times": -1}}', "failed", "ValueError: ti"),
        ('{"name": "shout", "arguments": {"text": "ab", "times": 99}}', "long", "198"),
        (ADD * 5, "many", "4 of 5"),
    ],
)
def test_a_wrong_call_is_answered_and_counted_and_the_episode_goes_on(
    play: Any, message: str, kind: str, fact: str
) -> None:
    episode, _ = play(message, "5", max_calls=4, max_result_tokens=100)
    answers = texts(episode)
    assert fact in answers[-1]
    assert len(answers) == (5 if kind == "many" else 1)
    assert episode.reward == 1.0
    figures = episode_figures([episode])
    assert figures["tools/calls_mean"] == len(answers)
    assert figures[f"tools/{kind}_share"] == figures["tools/error_share"] == 1 / len(answers)


def test_half_a_surrogate_pair_of_a_tool_or_an_environment_is_replaced(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(fails: bool) -> str:
        """Half a pair."""
        if fails:
            raise ValueError("\ud800")
        return "\ud800"

    monkeypatch.setattr(Sums, "reset", lambda _: [Message("user", "2+\ud800?")])
    calls = [json.dumps({"name": "half", "arguments": {"fails": fails}}) for fails in (True, False)]
    episode, _ = play(*calls, "5", offered=[tool_of(half)])
    assert episode.messages[0].text == "2+\ufffd?"
    assert texts(episode) == ["Error: ValueError: \ufffd", "\ufffd"]


def test_methods_keep_state_and_may_end_the_episode(play: Any) -> None:
    shout = '{"name": "shout", "arguments": {"text": "hey"}}'
    episode, _ = play(shout, '{"name": "submit", "arguments": {"number": 5}}')
    assert episode.environment.log == ["hey"]
    assert texts(episode) == ["HEY"]
    assert (episode.reward, episode.tool_counts) == (1.0, {"calls": 2})


def test_a_reward_of_a_tool_is_checked(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: Sums, number: int) -> Reaction:
        """Give the answer."""
        return Reaction(reward=float("nan"))

    monkeypatch.setattr(Sums, "submit", submit)
    with pytest.raises(TaskError, match="a tool of Sums"):
        play('{"name": "submit", "arguments": {"number": 5}}')


def test_calls_take_turns(play: Any) -> None:
    episode, _ = play(ADD, ADD, "5", max_turns=2)
    assert (episode.reward, texts(episode)) == (0.0, ["5", "5"])


def test_a_template_without_tools_has_them_in_text(
    play: Any, model: HuggingFaceLanguageModel
) -> None:
    plain = {"template": PLAIN_TEMPLATE, "offered": [tool_of(calculator, "calc")]}
    turns = ("calc(2+3*4)", 'add({"a": 4})', "add(4)", "shout()", "5")
    episode, trajectory = play(*turns, **plain)
    answers = texts(episode)
    assert answers[:2] == ["14", "5"]
    assert all(answer.startswith("Error: ") for answer in answers[2:])
    assert episode.tool_counts == {"calls": 4, "malformed": 1, "arguments": 1}
    turn = Turn("assistant", f"add({'[' * 9999})")
    (deep,) = tools.Toolbox.of([add]).calls_in(turn, MessageFormat())
    assert isinstance(deep, tools.WrongCall)
    assert episode.reward == 1.0
    text = model.tokenizer.decode(trajectory.tokens)
    assert "calc(expression): Value of" in text
    assert text.count("calc(expression)") == 1
    assert "<start>u14<end>" in text
    # An answer may look like a call of a tool that does not exist.
    episode, trajectory = play("f(5)", **plain, describe=False)
    assert not texts(episode)
    text = model.tokenizer.decode(trajectory.tokens)
    assert text == "<start>u2+3?<end><start>af(5)<end>"


@pytest.mark.parametrize("has_bubblewrap", [True, False])
def test_programs_run_in_the_sandbox_or_the_interpreter(
    has_bubblewrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_bubblewrap and sandbox.why_no_bubblewrap():
        pytest.skip(sandbox.why_no_bubblewrap())
    if not has_bubblewrap:
        pytest.importorskip("pydantic_monty")
        monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "there is no `bwrap`")
    run = ToolParameters(function="python", options={"cpu_seconds": 1})
    (tool,) = build_tools(ToolUseParameters(offered={"run": run}), None)
    assert list(tool.parameters["properties"]) == ["code"]
    assert tool.concurrency > 1
    box = tools.Toolbox.of([tool])
    outcomes = [
        box.execute(tools.ToolCall("run", {"code": code}))
        for code in ("print(6 * 7)", "print(1)\n1 / 0", "while True: pass")
    ]
    assert outcomes[0] == ("42\n", "")
    assert [part.error for part in outcomes[1:]] == ["failed", "failed"]
    assert "ZeroDivisionError" in outcomes[1].value


def test_without_any_sandbox_programs_are_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "why_no_bubblewrap", lambda: "there is no `bwrap`")
    monkeypatch.setattr(sandbox, "why_no_interpreter", lambda: "pydantic-monty is missing")
    offered = ToolUseParameters(offered={"run": ToolParameters(function="python")})
    with pytest.raises(SandboxUnavailableError):
        build_tools(offered, None)
    with pytest.raises(SandboxUnavailableError):
        python("print(1)")


def test_tools_are_named_by_file_or_registered_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(n: float) -> float:\n    return n / 2\n")
    offered = {
        "halve": ToolParameters(function=f"{tmp_path}/mine.py:half"),
        "calc": ToolParameters(function="calculator"),
    }
    halve, calc = build_tools(ToolUseParameters(offered=offered), None)
    assert (halve.name, halve.function(n=3.0)) == ("halve", 1.5)
    assert calc.function(expression="2*(3-1)") == "4"
    with pytest.raises(Exception, match="calculator"):
        build_tools(ToolUseParameters(offered={"x": ToolParameters(function="calculate")}), None)
