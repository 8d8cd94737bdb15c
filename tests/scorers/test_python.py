"""A function is a scorer: its inputs, its valid outputs, and error messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, ScorerError
from nip_astra.scorers.base import Exchange
from nip_astra.scorers.python import PythonScorer
from tests.kit.messages import says
from tests.kit.scorers import HISTORY, scorer_on_cpu

pytestmark = pytest.mark.usefixtures("no_plugins_left")


def build(folder: Path, text: str, name: str = "f", **parameters: Any) -> PythonScorer:
    path = folder / "mine.py"
    path.write_text(text)
    return scorer_of(f"{path}:{name}", **parameters)


def scorer_of(function: str, scenario_dir: Path | None = None, **parameters: Any) -> PythonScorer:
    return scorer_on_cpu(PythonScorer, scenario_dir, function=function, **parameters)


def test_it_gets_the_turn_before_and_the_text(tmp_path: Path) -> None:
    rated = "[len(p) / 10 + len(c) / 100 for p, c in zip(prompts, completions)]"
    scorer = build(tmp_path, f"def f(prompts, completions): return {rated}")
    ratings = scorer.rate([Exchange("abc", HISTORY), Exchange("abc")])
    assert ratings.scores_N.tolist() == pytest.approx([0.93, 0.03])
    assert scorer.reads_history is True
    (tmp_path / "alone").mkdir()
    text = "def f(completions, *, top=0.5): return [None, top]"
    alone = build(tmp_path / "alone", text, batch_size=2)
    assert alone.reads_history is False
    assert alone.score(["a", "b"]).nan_to_num(-1).tolist() == [-1, 0.5]


def test_it_gets_all_columns_where_it_takes_any(tmp_path: Path) -> None:
    scorer = build(
        tmp_path, "seen = []\ndef f(**columns):\n    seen.append(columns)\n    return [0]"
    )
    scorer.rate([Exchange("fine", HISTORY, "assistant")])
    turns = [*HISTORY, ("assistant", "fine")]
    assert scorer._function.function.__globals__["seen"] == [
        {
            "completions": ["fine"],
            "prompts": ["hello you"],
            "conversations": [[{"role": role, "content": text} for role, text in turns]],
            "roles": ["assistant"],
            "columns": [{}],
            "reasonings": [None],
        }
    ]


@pytest.mark.parametrize(("size", "expected"), [(None, [5]), (2, [2, 2, 1]), (9, [5])])
def test_it_is_called_for_a_batch_at_a_time(
    tmp_path: Path, size: int | None, expected: list[int]
) -> None:
    text = "n = []\ndef f(completions):\n    n.append(len(completions))\n    return [0] * n[-1]"
    scorer = build(tmp_path, text, batch_size=size)
    scorer.score(list("abcde"))
    assert scorer._function.function.__globals__["n"] == expected


ASYNC = """
import asyncio

loops = []

async def rate(text):
    await asyncio.sleep(0)
    if asyncio.get_running_loop() not in loops:
        loops.append(asyncio.get_running_loop())
    return len(loops) * len(text) / 10

async def f(completions):
    return await asyncio.gather(*map(rate, completions))

class Rater:
    async def __call__(self, completions):
        return await f(completions)

g = Rater()
"""


@pytest.mark.parametrize("name", ["f", "g"])
def test_an_async_function_runs_in_its_own_loop_also_beside_a_running_loop(
    tmp_path: Path, name: str
) -> None:
    scorer = build(tmp_path, ASYNC, name)
    assert scorer.score(["a", "bb"]).tolist() == pytest.approx([0.1, 0.2])

    async def notebook() -> list[float]:
        scores: list[float] = scorer.score(["ccc"]).tolist()
        return scores

    # A second loop would double it.
    assert asyncio.run(notebook()) == pytest.approx([0.3])


class Table:
    @staticmethod
    def rate(completions: list[str]) -> list[float]:
        return [0.25] * len(completions)


def test_an_attribute_of_a_module_and_a_file_of_the_scenario_are_functions(tmp_path: Path) -> None:
    assert scorer_of(f"{__name__}:Table.rate").score(["a"]).item() == 0.25
    (tmp_path / "mine.py").write_text("def f(completions): return [0.5]")
    assert scorer_of("scenario://mine.py:f", tmp_path).score(["a"]).item() == 0.5


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("def f(completions): 1 / 0", "ZeroDivisionError: division by"),
        ("async def f(completions): 1 / 0", "ZeroDivisionError: division by"),
        ("def f(completions): return [0.5]", "1 values for 2 texts"),
    ],
)
def test_exceptions_and_too_few_values_are_reported(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(ScorerError, match=fact):
        build(tmp_path, text).score(["a", "b"])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("def g(completions): return []", ("mine.py", "'f'", "g")),
        ("def f(completions, weights): ...", (": weights. ",)),
        ("def f(prompts): ...", (": completions. ",)),
        ("def f(a, /, completions): ...", (": a. ",)),
        ("f = max", ()),
    ],
)
def test_a_missing_function_and_one_that_cannot_be_called_are_reported(
    tmp_path: Path, text: str, facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(tmp_path, text)
    assert says(caught.value, *facts)
