"""Is this program right? Provers and a verifier talk about solutions of programming problems."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from nip_astra.errors import DataError
from nip_astra.parameters.types import ScenarioType
from nip_astra.scenarios.pure_text_base import PureTextScenario, TextDatasets
from nip_astra.scenarios.registry import register_scenario
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.seeding import derive_seed

PROBLEMS = "problems.jsonl"
"""The problems, in the scenario's folder, unless the parameters say otherwise."""


@register_scenario(ScenarioType.CODE_VALIDATION)
class CodeValidationScenario(PureTextScenario):
    """A problem and a candidate solution, which is right (1) or subtly wrong (0).

    Columns of the data: `question`, `solution`, `name` of the problem, its `level` from 1, and for
    a wrong solution what was changed, `mutation`, which nobody should be told. A solution is right
    where it passes every test of its problem; that was found out when the data was made.
    """

    kind: ClassVar[str] = str(ScenarioType.CODE_VALIDATION)
    groupings: ClassVar[tuple[str, ...]] = ("level",)
    hidden_columns: ClassVar[tuple[str, ...]] = ("mutation", "name", "level")

    class Parameters(PureTextScenario.Parameters):
        """Which problems, and which of their solutions."""

        problems: str = PROBLEMS
        """File of problems, in the scenario's folder or an absolute path: JSON lines with `name`,
        `level`, `question` and `solutions`, of which each has `code`, `is_correct` and
        `mutation`."""
        levels: list[int] = []
        """Levels of the problems that are used; with none, all of them."""
        num_wrong_solutions: int = Field(default=1, ge=1)
        """Wrong solutions of a problem at most; the right one comes as often, so that a guess is
        right half of the time."""
        test_share: float = Field(default=0.25, gt=0, lt=1)
        """Share of the problems that are kept for the test data, with all of their solutions."""

    @classmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        path = (scenario_dir or Path()) / parameters.problems
        problems = [
            one
            for one in read_problems(path)
            if not parameters.levels or one["level"] in parameters.levels
        ]
        num_test = max(round(parameters.test_share * len(problems)), 1)
        if len(problems) <= num_test:
            raise DataError(
                f"{path} has only {len(problems)} problems of levels={parameters.levels}, too few "
                "to train and test. Give other levels, or none for all."
            )
        random.Random(derive_seed(seed, "code_validation", "split")).shuffle(problems)
        num_wrong = parameters.num_wrong_solutions
        return TextDatasets(
            _datapoints(problems[num_test:], num_wrong, seed),
            _datapoints(problems[:num_test], num_wrong, seed),
        )


def read_problems(path: Path) -> list[dict[str, Any]]:
    """Problems with their solutions."""
    problems: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read problems from {path}: {error}. Give a file of JSON lines, relative to "
            "the scenario's folder."
        ) from error
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            problem = json.loads(line)
            kinds = {bool(one["is_correct"]) for one in problem["solutions"] if str(one["code"])}
            wanted = {"name": str, "question": str, "level": int}
            wrong = [key for key, kind in wanted.items() if not isinstance(problem[key], kind)]
            if kinds != {True, False} or wrong:
                raise DataError(f"{wrong or 'solutions'} is not as it should be")
        except (ValueError, KeyError, TypeError, DataError) as error:
            raise DataError(
                f"line {number} of {path} was to hold a problem, but: {error!r}. Give it a name, a "
                "level, a question, and right and wrong solutions."
            ) from error
        problems.append(problem)
    return problems


def _datapoints(problems: list[dict[str, Any]], num_wrong: int, seed: int) -> NestedArrayDict:
    """Right and wrong solutions of each problem, as many of both."""
    rows = []
    for problem in problems:
        generator = random.Random(derive_seed(seed, "code_validation", problem["name"]))
        right = [one for one in problem["solutions"] if one["is_correct"]]
        wrong = [one for one in problem["solutions"] if not one["is_correct"]]
        for one in generator.sample(wrong, min(num_wrong, len(wrong))):
            rows += [(problem, generator.choice(right)), (problem, one)]
    return NestedArrayDict(
        {
            "y": [int(solution["is_correct"]) for _, solution in rows],
            "question": [problem["question"] for problem, _ in rows],
            "solution": [solution["code"] for _, solution in rows],
            "name": [problem["name"] for problem, _ in rows],
            "level": [problem["level"] for problem, _ in rows],
            "mutation": [solution.get("mutation", "") for _, solution in rows],
        },
        len(rows),
    )
