"""Environments reward right answers, and training and held-out problems are disjoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import DataError, ParameterError
from nip_astra.scenario_base.tasks.base import TASKS, Episode, Reaction, Split, Task, build_task
from nip_astra.scenario_base.tasks.library import (
    CountdownEnvironment,
    GuessNumberEnvironment,
    PigLatinEnvironment,
    parse_expression,
    pig_latin,
)
from nip_astra.scorers.base import Message
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says

SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def task_of(name: str, *, seed: int = 0, folder: Path | None = None, **options: Any) -> Task:
    parameters = TASKS.get(name).Parameters(**options)
    return build_task(parameters, seed=seed, device=torch.device("cpu"), scenario_dir=folder)


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "guess_number", "pig_latin"])
def test_generated_problems_come_back_by_number_and_splits_are_disjoint(name: str) -> None:
    task = task_of(name)
    columns = {s: {task.environment(s, i).columns for i in range(60)} for s in SPLITS}
    assert not columns["train"] & columns["test"]
    assert not columns["dev"] & columns["test"]
    again = task_of(name)
    assert again.environment("train", 7).columns == task.environment("train", 7).columns
    other = task_of(name, seed=1)
    assert {other.environment("train", i).columns for i in range(60)} != columns["train"]
    assert {other.environment("test", i).columns for i in range(60)} == columns["test"]


def test_pig_latin_moves_the_first_consonants_and_rewards_the_share_of_words() -> None:
    words = ("brenka", "ida", "shop", "hm", "a")
    assert [pig_latin(word) for word in words] == ["enkabray", "idaway", "opshay", "hmay", "away"]
    environment = PigLatinEnvironment(["blot", "ida"])
    assert environment.solution == "otblay idaway"
    answers = ("otblay idaway", " otblay  x", "otblay", "otblay idaway idaway")
    assert [environment.step(answer).reward for answer in answers] == [1.0, 0.5, 0.0, 0.0]
    words = task_of("pig_latin", num_words=3, most_syllables=1).environment("train", 0)
    assert len(words.reset()[0].text.split()) == 3


def test_arithmetic_rewards_the_number_and_nothing_else() -> None:
    for level in range(1, 7):
        task = task_of("arithmetic", levels=[level])
        for index in range(20):
            environment = task.environment("train", index)
            right = eval(environment.reset()[0].text.rstrip("="))
            assert environment.solution == str(right)
            assert environment.step(f" {right} ") == Reaction(reward=1.0)
            for wrong in (str(right + 1), f"{right}.", f"{right} {right}", "", "\u0663"):
                assert environment.step(wrong) == Reaction(reward=0.0)
    with pytest.raises(ParameterError, match=r"levels\.0"):
        task_of("arithmetic", levels=[9])


@pytest.mark.parametrize(
    ("expression", "reward"),
    [
        *[("(2+3)*4", 1.0), (" 4 * (3 + 2) ", 1.0), ("2+3+4", 0.25)],
        *((wrong, 0.0) for wrong in ("4*5", "2*3*4-4", "2+3*", "20", "2**3+4", "2 3 4", "23+4")),
        *((wrong, 0.0) for wrong in ("__import__('os')", "(" * 150)),
    ],
)
def test_countdown_reads_expressions_and_runs_nothing(expression: str, reward: float) -> None:
    environment = CountdownEnvironment([2, 3, 4], 20, "(2+3)*4", valid_reward=0.25)
    assert environment.step(expression).reward == reward


def test_countdown_has_a_solution_where_products_bind_before_sums_and_from_the_left() -> None:
    task = task_of("countdown", num_numbers=4)
    for index in range(30):
        environment = task.environment("train", index)
        assert environment.step(environment.solution or "").reward == 1.0
    assert parse_expression("8-3-2*2") == (1, [8, 3, 2, 2])
    assert parse_expression("2 3") is None


def test_a_number_is_guessed_in_turns_that_cost() -> None:
    environment = GuessNumberEnvironment(hidden=7, start=1, most=16, max_turns=4)
    assert environment.reset()[0].text == "guess 1 to 16"
    for guess, answer in (("3", "higher"), ("12", "lower"), ("x", "number?")):
        assert environment.step(guess).messages == [Message("user", answer)]
    last = environment.step("7")
    assert (last.reward, last.is_over, list(last.messages)) == (1 - 3 / 8, True, [])
    environment.reset()
    assert environment.step("7").reward == 1.0
    environment.reset()
    assert [environment.step("1").reward for _ in range(4)] == [None, None, None, 0.0]


# ---- a custom data set


def write(folder: Path, name: str, *rows: dict[str, object]) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def test_rows_are_rated_by_their_answers(tmp_path: Path) -> None:
    train = write(tmp_path, "train.jsonl", {"prompt": "capital of France", "answer": "Paris"})
    test = write(tmp_path, "test.jsonl", {"prompt": "of Italy", "answer": "Rome"})
    exact = task_of("dataset", train=train, test=test)
    environment = exact.environment("train", 5)
    assert environment.reset()[0].text == "capital of France"
    assert environment.solution == "Paris"
    answers = ("Paris", " Paris\n", "It is Paris", "Rome")
    assert [environment.step(answer).reward for answer in answers] == [1, 1, 0, 0]
    assert exact.num_problems("train") == 1
    assert exact.environment("dev", 0).reset() == [Message("user", "of Italy")]
    holds = task_of("dataset", train=train, test=test, reward="contains")
    environment = holds.environment("train", 0)
    assert [environment.step(answer).reward for answer in answers] == [1, 1, 1, 0]


def test_rows_are_rated_by_a_function_that_reads_all_columns(tmp_path: Path) -> None:
    train = write(tmp_path, "train.jsonl", {"prompt": "short", "most": 3})
    test = write(tmp_path, "test.jsonl", {"prompt": "shorter", "most": 2})
    (tmp_path / "rate.py").write_text(
        "def f(completions, columns, **_):\n"
        "    return [float(len(t) <= c['most']) for t, c in zip(completions, columns)]\n"
    )
    scorer = {"_type": "python", "function": f"{tmp_path}/rate.py:f"}
    task = task_of("dataset", train=train, test=test, reward="scorer", scorer=scorer)
    environment = task.environment("train", 0)
    assert environment.step("abc").reward is None
    episodes = [
        Episode(environment, [Message("user", "short"), Message("assistant", text)])
        for text in ("abc", "abcd")
    ]
    task.rate(episodes)
    assert [episode.reward for episode in episodes] == [1.0, 0.0]


ROW, WITHOUT = {"prompt": "c", "answer": "d"}, {"prompt": "a", "solution": "b"}
LONG = {"prompt": "1+" * 5000, "answer": "4"}


@pytest.mark.parametrize(
    ("train", "test", "options", "fact"),
    [
        (WITHOUT, ROW, {}, r"'answer'.* solution.*task\.task\.answer_column"),
        (ROW, ROW, {}, "'c'"),
        (LONG, LONG, {}, r"'1\+1"),
        (WITHOUT, ROW, {"reward": "scorer"}, r"task\.task\.scorer"),
        (LONG, {"prompt": "c", "answer": " "}, {"reward": "contains"}, "'c'"),
    ],
    ids=["no answer", "a problem in both", "a long one in both", "no scorer", "an empty answer"],
)
def test_unusable_data_are_reported_by_their_prompts(
    train: dict[str, Any], test: dict[str, Any], options: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    files = {"train": write(tmp_path, "a.jsonl", train), "test": write(tmp_path, "b.jsonl", test)}
    with pytest.raises(DataError, match=fact) as caught:
        task_of("dataset", **files, **options)
    assert len(str(caught.value)) < 400


def test_a_prompt_that_does_not_fit_is_reported_before_it_is_drawn(cli: CommandLine) -> None:
    cli.write("train.jsonl", json.dumps({"prompt": "2+2=", "answer": "4"}))
    cli.write("test.jsonl", json.dumps({"prompt": "1+" * 500, "answer": "4"}))
    cli.write(
        "data.yaml",
        """
        trainer: self_hosted_grpo
        scenario: arithmetic
        task: {task: {_type: dataset, train: train.jsonl, test: test.jsonl}}
        """,
    )
    assert says(refused(cli("--parameters", "data.yaml")), "'1+1+", "test.jsonl")
