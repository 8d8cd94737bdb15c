"""Reward functions by TRL's conventions, and their weighted sum."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError, TaskError
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.prompts import Prompt
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.scenario_base.tasks.base import Episode, Task, TrainingProgress, rate_episodes
from nip_astra.scenario_base.tasks.dataset import DatasetTask, RowEnvironment, hold_out
from nip_astra.scenario_base.tasks.rewards import REWARDS, episode_figures
from nip_astra.scorers.base import Message
from tests.kit.messages import says
from tests.scenario_base.tasks.test_tasks import task_of, write

CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


# ---- functions as on TRL's page on rewards


def by_length_of_ids(completion_ids: Any, **kwargs: Any) -> Any:
    return [float(len(ids)) for ids in completion_ids]


def by_length(completions: Any, **kwargs: Any) -> Any:
    return [float(len(completion)) for completion in completions]


def by_format(completions: Any, **kwargs: Any) -> Any:
    return [float(completion[0]["content"].endswith("</answer>")) for completion in completions]


def by_box(completions: Any, ground_truth: Any, **kwargs: Any) -> Any:
    pairs = zip(completions, ground_truth, strict=True)
    return [float(f"\\boxed{{{truth}}}" in completion) for completion, truth in pairs]


def for_math(prompts: Any, completions: Any, task: Any, **kwargs: Any) -> Any:
    return [
        (1.0 if str(eval(p)) in c else -1.0) if t == "math" else None
        for p, c, t in zip(prompts, completions, task, strict=True)
    ]


async def later(prompts: Any, completions: Any, **kwargs: Any) -> Any:
    async def item(completion: str) -> float:
        await asyncio.sleep(0.0)
        return float(completion.startswith("y"))

    return await asyncio.gather(*(item(completion) for completion in completions))


def with_logs(completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any) -> Any:
    log_metric("step", trainer_state.global_step)
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_extra("upper", [item.upper() for item in completions])
    log_extra("places", torch.arange(len(completions)))
    return torch.arange(len(completions))


FUNCTIONS = [by_length_of_ids, by_length, by_format, by_box, for_math, later, with_logs]


@pytest.fixture(autouse=True)
def _registered(no_plugins_left: None) -> None:
    for function in FUNCTIONS:
        REWARDS.register(function.__name__)(function)


def dataset(folder: Path, rows: list[dict[str, Any]], *names: str, **weights: float) -> Task:
    file = write(folder, "rows.jsonl", *rows)
    functions = {name: {"function": name, "weight": weights.get(name, 1.0)} for name in names}
    return task_of("dataset", train=file, reward="functions", functions=functions)


def rated(task: Task, *answers: str) -> list[Episode]:
    episodes = []
    for index, answer in enumerate(answers):
        environment = task.environment("train", index)
        messages = [*environment.reset(), Message("assistant", answer)]
        ids = tuple(range(len(answer.split())))
        episodes.append(Episode(environment, messages, completion_ids=ids))
    rate_episodes(task, episodes)
    return episodes


def test_functions_of_trl_get_the_same_arguments(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1 + 1", "ground_truth": "2", "task": "math"},
        {"prompt": "2 + 1", "ground_truth": "5", "task": "other"},
    ]
    plain = ("by_length_of_ids", "by_length", "by_box", "for_math", "later", "with_logs")
    task = dataset(tmp_path, rows, *plain, by_length=0.5, for_math=2.0)
    task.progress = TrainingProgress(3, 12)
    first, second = rated(task, "\\boxed{2} so 2", "yes")
    assert first.rewards == dict(zip(plain, [3.0, 14.0, 1.0, 1.0, 0.0, 0.0], strict=True))
    assert first.is_correct(3.0) is True
    assert first.is_correct(3.5) is False
    assert first.reward == 3.0 + 0.5 * 14.0 + 1.0 + 2.0
    assert second.rewards["for_math"] is None
    assert second.reward == 1.0 + 0.5 * 3.0 + 0.0 + 1.0 + 1.0
    assert json.dumps(first.extra) == json.dumps({"upper": "\\BOXED{2} SO 2", "places": 0})
    assert second.extra == {"upper": "YES", "places": 1}
    figures = episode_figures([first, second])
    assert (figures["step"], figures["progress"]) == (3.0, 0.25)
    assert (figures["rewards/for_math/mean"], figures["rewards/by_length/mean"]) == (1.0, 8.5)
    assert figures["rewards/by_length/std"] == pytest.approx(math.sqrt(60.5))


def test_conversational_rows_give_conversational_completions(tmp_path: Path) -> None:
    task = dataset(tmp_path, [{"prompt": CONVERSATION}], "by_format")
    environment = task.environment("train", 0)
    assert environment.reset() == [Message("system", "Be brief."), Message("user", "1+1=")]
    (episode,) = rated(task, "<think>x</think><answer>2</answer>")
    assert episode.reward == 1.0


def test_columns_keep_the_values_of_the_dataset(tmp_path: Path) -> None:
    seen: list[Any] = []

    def columns(completions: Any, tags: Any, other: Any, **_: Any) -> list[None]:
        seen.extend((tags, other))
        return [None] * len(completions)

    REWARDS.register("columns")(columns)
    rows = [{"prompt": "a", "tags": [1, {"x": 2}]}, {"prompt": "b", "other": 1}]
    task = dataset(tmp_path, rows, "columns")
    assert [item.reward for item in rated(task, "x", "y")] == [None, None]
    assert seen == [[[1, {"x": 2}], None], [None, 1]]


def test_answers_are_compared_only_where_a_row_has_one(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": None}]
    first, second = rated(dataset(tmp_path, rows, "exact", "contains"), "so 4", "None")
    assert first.rewards == {"exact": 0.0, "contains": 1.0}
    assert (second.reward, second.rewards) == (None, {"exact": None, "contains": None})


WRONG = [[math.inf, 0.0], [math.nan, 0.0], ["high", 0.0], [1.0], [[1.0], [2.0, 3.0]], None]


@pytest.mark.parametrize("wrong", [*WRONG, KeyError("answer")], ids=str)
@pytest.mark.parametrize("is_async", [False, True])
def test_wrong_values_and_failures_are_refused_by_the_name_of_the_function(
    tmp_path: Path, wrong: Any, is_async: bool
) -> None:
    def plain(completions: Any) -> Any:
        if isinstance(wrong, KeyError):
            raise wrong
        return wrong

    async def waiting(completions: Any) -> Any:
        return plain(completions)

    REWARDS.register("wrong")(waiting if is_async else plain)
    task = dataset(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], "wrong")
    with pytest.raises(TaskError) as caught:
        rated(task, "x", "y")
    assert says(caught.value, "'wrong'", *["KeyError: 'answer'"] * isinstance(wrong, KeyError))


@pytest.mark.parametrize(
    ("reward", "fact"),
    [
        ({"function": "by_box"}, "ground_truth"),
        ({}, "'mine'"),
        ({"function": "exact", "scorer": {"_type": "profanity"}}, "'mine'"),
    ],
)
def test_an_argument_that_nothing_gives_and_other_than_a_function_or_a_scorer_are_refused(
    tmp_path: Path, reward: dict[str, Any], fact: str
) -> None:
    rows = write(tmp_path, "rows.jsonl", {"prompt": "a"})
    with pytest.raises(ConfigurationError, match=fact):
        task_of("dataset", train=rows, reward="functions", functions={"mine": reward})


def test_a_scorer_is_a_reward_beside_functions(tmp_path: Path) -> None:
    rows = write(tmp_path, "rows.jsonl", {"prompt": "a"}, {"prompt": "b"})
    source = "def f(completions):\n    return [0.25 if 'x' in one else None for one in completions]"
    (tmp_path / "own.py").write_text(source)
    scorer = {"_type": "python", "function": f"{tmp_path / 'own.py'}:f"}
    functions = {"own": {"scorer": scorer, "weight": -2.0}, "later": {"function": "later"}}
    task = task_of("dataset", train=rows, reward="functions", functions=functions)
    assert isinstance(task, DatasetTask)
    assert len(task.scorers) == 1
    first, second = rated(task, "yx", "y")
    assert (first.reward, second.reward) == (1.0 - 0.5, 1.0)


# ---- held-out problems


def test_a_part_of_the_prompts_is_held_out_by_the_seed() -> None:
    rows = [Prompt(f"p{index % 40}", (("n", index),)) for index in range(80)]
    train, test = hold_out(rows, 0.1, 0)
    assert len({*test}) == 8
    assert len(test) == 16
    assert not {*train} & {*test}
    assert sorted(map(str, train + test)) == sorted(map(str, rows))
    assert hold_out(rows, 0.1, 0)[1] == test
    assert hold_out(rows, 0.1, 1)[1] != test
    assert len({*hold_out([Prompt(str(n)) for n in range(10_000)], 0.1, 0)[1]}) == 512
    sixteen = [Prompt(str(n)) for n in range(16)]
    assert [len(part) for part in hold_out(sixteen, 0.99, 0)] == [1, 15]
    few = [Prompt(str(n)) for n in range(15)]
    assert hold_out(few, 0.5, 0) == (few, [])


def test_the_answers_of_rows_are_not_read_where_functions_reward(tmp_path: Path) -> None:
    task = dataset(tmp_path, [{"prompt": f"p{n}"} for n in range(20)], "by_length")
    assert task.num_problems("test") == 8
    assert task.num_problems("dev") == 8
    assert isinstance(task.environment("test", 0), RowEnvironment)
    with pytest.raises(DataError, match="empty"):
        dataset(tmp_path, [{"prompt": "a"}])


# ---- conversational prompts


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "y"}]}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_wrong_messages_are_refused_with_their_line(tmp_path: Path, prompt: list[Any]) -> None:
    file = write(tmp_path, "rows.jsonl", {"prompt": "fine"}, {"prompt": prompt})
    with pytest.raises(DataError, match="line 2"):
        read_prompts(file, None)


def test_rows_of_parquet_are_those_of_jsonl(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": CONVERSATION, "answer": "2"}, {"prompt": CONVERSATION[1:], "answer": "3"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    write(tmp_path, "rows.jsonl", *rows)
    parquet, jsonl = (
        read_prompts(str(tmp_path / f"rows.{end}"), None) for end in ("parquet", "jsonl")
    )
    assert parquet == jsonl == ["system: Be brief.\n\nuser: 1+1=", "1+1="]
    assert [item.messages for item in parquet] == [item.messages for item in jsonl]
    assert [item.row for item in parquet] == [{"answer": "2"}, {"answer": "3"}]


def test_columns_that_a_function_cannot_read_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text("def f(completions, **columns): return [0] * 2\n")
    row = {"prompt": "a", "answer": "1", "prompts": "hidden", "log_metric": 3}
    file = write(tmp_path, "rows.jsonl", row)
    function = {"function": f"{tmp_path / 'mine.py'}:f"}
    task_of("dataset", train=file, reward="functions", functions={"mine": function})
    assert says(caplog.text, "prompts, log_metric", "mine.py")
    caplog.clear()
    dataset(tmp_path, [row], "exact")
    assert "log_metric" not in caplog.text


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def unreadable(completions: Any, **_: Any) -> Any:
    raise Unreadable


def test_a_failure_without_a_readable_text_names_the_function(tmp_path: Path) -> None:
    REWARDS.register("unreadable")(unreadable)
    task = dataset(tmp_path, [{"prompt": "a"}], "unreadable")
    with pytest.raises(TaskError) as caught:
        rated(task, "x")
    assert says(caught.value, "'unreadable'", "Unreadable")


def test_rewards_get_texts_without_reasoning_and_can_read_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reads(completions: Any, reasonings: Any) -> list[float]:
        seen.append((completions, reasonings))
        return [float(bool(text)) for text in reasonings]

    REWARDS.register("reads")(reads)
    rows = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": CONVERSATION, "answer": "2"}]
    task = dataset(tmp_path, rows, "exact", "contains", "reads")
    environments = [task.environment("train", index) for index in range(2)]
    answers = [Turn("assistant", "2", reasoning="It is 2."), Turn("assistant", "3")]
    episodes = [
        Episode(environment, [*environment.reset(), answer])
        for environment, answer in zip(environments, answers, strict=True)
    ]
    rate_episodes(task, episodes)
    assert episodes[0].rewards == {"exact": 1.0, "contains": 1.0, "reads": 1.0}
    assert episodes[1].rewards == {"exact": 0.0, "contains": 0.0, "reads": 0.0}
    ((completions, reasonings),) = seen
    assert completions == ["2", [{"role": "assistant", "content": "3"}]]
    assert reasonings == ["It is 2.", None]
    exchange = episodes[0].exchange()
    assert (exchange.text, exchange.reasoning) == ("2", "It is 2.")
