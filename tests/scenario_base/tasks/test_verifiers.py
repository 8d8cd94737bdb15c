"""verifiers' tasksets are played and scored by their own rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, DataError, MissingDependencyError, TaskError
from nip_astra.language_models.message_format import MessageFormat
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import Episode, Task, opening_of, reaction_of, toolbox_of
from nip_astra.scorers.base import Message
from tests.kit.experiments import iterations_of, trainer_of
from tests.kit.learning import Learning
from tests.scenario_base.tasks.test_tasks import task_of as named_task

HAS_VERIFIERS = importlib.util.find_spec("verifiers") is not None

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def is_correct(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def is_short(self, trace: vf.Trace) -> float:
        return 0.5 * float(len(trace.last_reply) < 4)


class SumConfig(vf.TasksetConfig):
    most: int = 9


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.most + 1):
            for b in range(10):
                yield SumTask(
                    SumData(prompt=f"{a}+{b}=", answer=str(a + b), name=f"{a}+{b}"),
                    self.config.task,
                )


__all__ = ["SumTaskset"]
"""
MORE = {
    "protocol": (
        "class SumConfig",
        "class Tools(vf.Toolset[vf.ToolsetConfig]):\n    def register(self, mcp):\n        pass\n"
        "\n\nSumTask.toolsets = classmethod(lambda cls, config: [Tools(vf.ToolsetConfig())])\n\n\n"
        "class SumConfig",
        r"tools of its own protocol \(Tools\)",
    ),
    "elsewhere": (
        "class SumConfig",
        "class Tools(vf.Toolset[vf.ToolsetConfig]):\n    pass\n\n\n"
        "SumTask.toolsets = classmethod(lambda cls, config: [Tools(vf.ToolsetConfig(url='x'))])\n"
        "\n\nclass SumConfig",
        r"tools that run elsewhere \(Tools\)",
    ),
    "runtime": (
        "self, trace: vf.Trace) -> float:\n        return 0.5",
        "self, trace: vf.Trace, runtime: vf.Runtime) -> float:\n        return 0.5",
        r"scores within a runtime \(is_short\)",
    ),
    "container": (
        "class SumTask(vf.Task[SumData]):",
        "class SumTask(vf.Task[SumData]):\n    NEEDS_CONTAINER = True\n",
        "needs a container",
    ),
    "setup": (
        "class SumTask(vf.Task[SumData]):",
        "class SumTask(vf.Task[SumData]):\n    async def setup(self, trace, runtime):\n"
        "        pass\n",
        r"prepares a runtime \(setup\)",
    ),
    "without end": (
        *("    def load(self):", "    INFINITE = True\n\n    def load(self):"),
        r"task\.task\.num_train",
    ),
    "none": ('__all__ = ["SumTaskset"]', "__all__ = []", "exports 0 subclasses"),
    "agents": (
        '__all__ = ["SumTaskset"]',
        "class Two(vf.EnvConfig):\n    a: vf.AgentConfig = vf.AgentConfig()\n"
        "    b: vf.AgentConfig = vf.AgentConfig()\n\n\n"
        'class Own(vf.Env[Two]):\n    pass\n\n\n__all__ = ["SumTaskset", "Own"]',
        r"2 agents \(a, b\)",
    ),
    "finalize": (
        '__all__ = ["SumTaskset"]',
        "class One(vf.EnvConfig):\n    a: vf.AgentConfig = vf.AgentConfig()\n\n\n"
        "class Own(vf.Env[One]):\n    async def finalize(self, task, episode):\n        pass\n\n\n"
        '__all__ = ["SumTaskset", "Own"]',
        "finalize",
    ),
}


@pytest.fixture
def taskset(tmp_path: Path, no_plugins_left: None) -> Path:
    pytest.importorskip("verifiers")
    path = tmp_path / "my_sums.py"
    path.write_text(TASKSET)
    return path


def task_of(path: Path, **options: Any) -> Task:
    return named_task("verifiers", taskset=str(path), **({"num_test": 10, "num_dev": 5} | options))


def rated(task: Task, index: int, answer: str) -> float | None:
    environment = task.environment("train", index)
    episode = Episode(environment, [*environment.reset(), Message("assistant", answer)])
    assert environment.step(answer).is_over
    task.rate([episode])
    return episode.reward


def test_tasks_are_split_and_scored_by_their_own_weighted_rewards(taskset: Path) -> None:
    taskset.write_text(TASKSET.replace("name=f", 'system_prompt="Add.", name=f'))
    task = task_of(taskset)
    counts = [task.num_problems(split) for split in ("test", "dev", "train")]
    assert counts == [10, 5, 85]
    assert task.environment("test", 0).reset() == [Message("user", "Add.\n\n0+0=")]
    assert task.environment("train", 0).reset() == [Message("user", "Add.\n\n1+5=")]
    assert [rated(task, 0, answer) for answer in ("6", " 6", "66666", "7")] == [2.5, 2.5, 0.0, 0.5]


def test_options_are_those_of_the_taskset(taskset: Path) -> None:
    assert task_of(taskset, options={"most": 1}).num_problems("train") == 5
    assert task_of(taskset, num_train=7).num_problems("train") == 7
    with pytest.raises(ConfigurationError, match=r"task\.task\.options"):
        task_of(taskset, options={"least": 1})
    with pytest.raises(DataError, match=r"(?s)10 .*task\.task\.num_test"):
        task_of(taskset, options={"most": 0})


@pytest.mark.parametrize("name", MORE)
def test_unsupported_tasksets_are_refused(name: str, taskset: Path) -> None:
    old, new, message = MORE[name]
    assert old in TASKSET
    taskset.write_text(TASKSET.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=message):
        task_of(taskset)


TOOLS = """
class SumState(vf.State):
    calls: int = 0


class Adding(vf.Toolset[vf.ToolsetConfig, SumState]):
    async def setup_task(self, task):
        self.limit = int(task.answer)

    @vf.tool
    async def add(self, a: int, b: int = 0) -> int:
        \"\"\"Sum of two numbers.\"\"\"
        self.state.calls += 1
        if a + b > 2 * self.limit:
            raise ValueError("too large")
        return a + b


class SumTask(vf.Task[SumData, SumState]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]

    @vf.reward
    async def is_correct(self, task: SumData, trace: vf.Trace) -> float:
        assert [m.content for m in trace.tool_messages][:1] == ["3"]
        assert trace.assistant_messages[0].tool_calls[0].name == "adding_add"
        return float(trace.last_reply == task.answer) / trace.state.calls
"""
ENV = """
class OneConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guessing(vf.Env[OneConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while segment.last_reply != task.data.answer:
                if segment.last_reply == "?":
                    raise RuntimeError("no question")
                segment = await interaction.turn("no")
        interaction.trace.record_reward("turns", -float(interaction.trace.num_turns))


__all__ = ["SumTaskset", "Guessing"]
"""


def test_tools_of_a_taskset_run_in_this_process_with_its_state(taskset: Path) -> None:
    start, end = TASKSET.index("class SumTask(vf"), TASKSET.index("class SumConfig")
    taskset.write_text(TASKSET[:start] + TOOLS.lstrip() + "\n\n" + TASKSET[end:])
    task = task_of(taskset)
    environment = task.environment("train", 0)
    box = toolbox_of(task, environment)
    (tool,) = box.tools.values()
    assert (tool.name, tool.description) == ("adding_add", "Sum of two numbers.")
    assert tool.parameters["required"] == ["a"]
    messages = [*environment.reset()]
    for a in (3, 99):
        call = f'<tool_call>{{"name": "adding_add", "arguments": {{"a": {a}}}}}</tool_call>'
        calls = MessageFormat().parse(call, tools=box.argument_schemas).calls
        (result,) = box.calls_in(Turn("assistant", calls=calls), MessageFormat())
        outcome = box.execute(result)
        messages += [Message("assistant", calls=calls), Message("tool", outcome.value)]
    assert outcome.error == "failed"
    other = task.environment("train", 0)
    other.reset()
    episode = Episode(environment, [*messages, Message("assistant", "6")])
    task.rate([episode])
    assert episode.reward == 0.5
    assert other.state.calls == 0


@pytest.mark.parametrize("has_environment", [False, True])
def test_answers_in_a_prompt_are_not_the_policys(has_environment: bool, taskset: Path) -> None:
    examples = ["user", "1+1=", "assistant", "2", "user"]
    pairs = zip(examples[::2], [*examples[1::2], "{a}+{b}="], strict=True)
    prompt = ", ".join(f"dict(role={role!r}, content=f{text!r})" for role, text in pairs)
    text = TASKSET.replace('f"{a}+{b}=", answer', f"[{prompt}], answer")
    text = text.replace("float(len(trace.last_reply) < 4)", "trace.num_turns")
    if has_environment:
        text = text.replace('__all__ = ["SumTaskset"]', ENV.strip())
    taskset.write_text(text)
    task = task_of(taskset)
    environment = task.environment("train", 0)
    opening = opening_of(environment)
    assert [message.role for message in opening] == ["user", "assistant", "user"]
    episode = Episode(environment, [*opening, Message("assistant", "6")])
    episode.reward = reaction_of(environment, "6").reward
    if not has_environment:
        task.rate([episode])
    # Its environment subtracts the number of turns.
    assert episode.reward == 2.5 - has_environment


def test_an_environment_of_a_taskset_requests_turns_from_the_policy(taskset: Path) -> None:
    taskset.write_text(TASKSET.replace('__all__ = ["SumTaskset"]', ENV.strip()))
    task = task_of(taskset)
    environment = task.environment("train", 0)
    assert opening_of(environment) == [Message("user", "1+5=")]
    assert reaction_of(environment, "5") == ([Message("user", "no")], None, False)
    over = reaction_of(environment, "6")
    # The task's rewards, and the environment's.
    assert (over.is_over, over.reward) == (True, 2.5 - 2)
    environment.close()
    # An unfinished exchange is ended.
    opening_of(environment)
    running = environment._player._running
    environment.close()
    assert running.cancelled()
    opening_of(environment)
    with pytest.raises(TaskError, match="no question"):
        reaction_of(environment, "?")


@pytest.mark.parametrize(
    ("name", "options", "fact"),
    [
        ("harbor", {}, "container|finalize"),
        ("nemo_gym", {"dataset": "rows.jsonl"}, "with start"),
        ("textarena", {"game": "Hangman-v0"}, "nltk"),
    ],
)
def test_shipped_tasksets_that_cannot_run_are_refused_by_name(
    name: str, options: dict[str, str], fact: str
) -> None:
    pytest.importorskip("verifiers")
    # textarena without its package or nltk's data.
    with pytest.raises(ConfigurationError, match=fact) as caught:
        task_of(Path(name), num_train=5, options=options)
    assert name in str(caught.value)


def test_images_are_refused(taskset: Path) -> None:
    image = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'
    taskset.write_text(TASKSET.replace('f"{a}+{b}=", answer', f"{image}, answer"))
    with pytest.raises(DataError, match="image"):
        task_of(taskset).environment("train", 0).reset()


def test_a_reward_that_fails_is_reported(taskset: Path) -> None:
    taskset.write_text(TASKSET.replace("float(trace.last_reply == task.answer)", "1 / 0"))
    with pytest.raises(DataError, match="ZeroDivisionError"):
        rated(task_of(taskset), 0, "6")


def test_a_policy_learns_a_taskset(taskset: Path, learning: Learning) -> None:
    trainer = trainer_of(
        "self_hosted_grpo",
        *("training.num_episodes_per_experience=16", "training.num_iterations=25"),
        *("training.minibatch_size=128", "training.lr=1e-3"),
        *("task.task.num_test=10", "task.task.num_dev=5", f"seed={learning.seed}"),
        scenario=f"verifiers:{taskset}",
    )
    rewards = [row["rollout/reward_mean"] for row in iterations_of(trainer, 25)]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    # A right and short answer earns 2 + 0.5.
    learning.check((last - first) / (2.5 - first), threshold=0.15, best=1.0)


@pytest.mark.skipif(HAS_VERIFIERS, reason="verifiers is installed")
def test_without_verifiers_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'nip_astra\[verifiers\]'"):
        task_of(Path("my_sums.py"))


def test_a_scenario_names_its_taskset() -> None:
    resolved = resolve_experiment(trainer="self_hosted_grpo", scenario="verifiers:gsm8k")
    assert resolved.hyper_params.scenario == "verifiers"
    assert resolved.hyper_params.get("task.task.taskset") == "gsm8k"
    with pytest.raises(ConfigurationError, match=r"task\.task\.taskset"):
        resolve_experiment(trainer="self_hosted_grpo", scenario="verifiers")
