"""Code validation: is a solution of a programming problem correct?"""

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

COLUMNS = ("y", "question", "solution", "name", "level", "mutation")
PROBLEMS = "problems.jsonl"
"""Default file of problems, in the scenario's folder."""


@register_scenario(ScenarioType.CODE_VALIDATION)
class CodeValidationScenario(PureTextScenario):
    """A problem and a candidate solution, which is correct (1) or subtly wrong (0).

    Columns of the data: `question`, `solution`, `name` of the problem, its `level` from 1, and
    `mutation`, the change of a wrong solution. A correct solution passed every test of its problem
    when the data were made.
    """

    kind: ClassVar[str] = str(ScenarioType.CODE_VALIDATION)
    groupings: ClassVar[tuple[str, ...]] = ("level",)
    hidden_columns: ClassVar[tuple[str, ...]] = ("mutation", "name", "level")

    class Parameters(PureTextScenario.Parameters):
        """Problems and solutions."""

        problems: str = PROBLEMS
        """File of problems, an absolute path or relative to the scenario's folder: JSON lines with
        `name`, `level`, `question` and `solutions`, each with `code`, `is_correct`, `mutation`."""
        levels: list[int] = []
        """Levels of the problems; empty for all."""
        num_wrong_solutions: int = Field(default=1, ge=1)
        """Maximum number of wrong solutions per problem; the correct one is as frequent, so that
        guessing is correct half of the time."""
        test_share: float = Field(default=0.25, gt=0, lt=1)
        """Fraction of the problems, with all of their solutions, in the test data."""

    @classmethod
    def build_datasets(
        cls, parameters: Any, *, seed: int, scenario_dir: Path | None
    ) -> TextDatasets:
        path = (scenario_dir or Path()) / parameters.problems
        problems = read_problems(path)
        if parameters.levels:
            problems = [problem for problem in problems if problem["level"] in parameters.levels]
        num_test = max(round(parameters.test_share * len(problems)), 1)
        if len(problems) <= num_test:
            raise DataError(
                f"{path} has {len(problems)} problems of levels={parameters.levels}, of which "
                f"test_share={parameters.test_share} leaves none for training. Change these."
            )
        # By problems, not by solutions: a test problem is unknown to the agents.
        random.Random(derive_seed(seed, "code_validation", "split")).shuffle(problems)
        num_wrong = parameters.num_wrong_solutions
        return TextDatasets(
            _make_datapoints(problems[num_test:], num_wrong, seed),
            _make_datapoints(problems[:num_test], num_wrong, seed),
        )


def read_problems(path: Path) -> list[dict[str, Any]]:
    """Read problems with their solutions."""
    problems: list[dict[str, Any]] = []
    try:
        # Not splitlines: a text may contain rarer line separators of Unicode.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read problems from {path}: {error}. Give a file of JSON lines, relative to "
            "the scenario's folder."
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
            solutions = [solution for solution in problem["solutions"] if str(solution["code"])]
            verdicts = {bool(solution["is_correct"]) for solution in solutions}
            types = {"name": str, "question": str, "level": int}
            invalid = [key for key, kind in types.items() if not isinstance(problem[key], kind)]
            if verdicts != {True, False} or invalid:
                raise DataError(f"{invalid or 'solutions'} is invalid")
        except (ValueError, KeyError, TypeError, DataError) as error:
            raise DataError(
                f"line {number} of {path} is not a problem: {error!r}. Give a name, a level, a "
                "question, and correct and wrong solutions."
            ) from error
        problems.append(problem)
    return problems


def _make_datapoints(problems: list[dict[str, Any]], num_wrong: int, seed: int) -> NestedArrayDict:
    """Return equal numbers of correct and wrong solutions of each problem."""
    rows = []
    for problem in problems:
        generator = random.Random(derive_seed(seed, "code_validation", problem["name"]))
        correct = [solution for solution in problem["solutions"] if solution["is_correct"]]
        wrong = [solution for solution in problem["solutions"] if not solution["is_correct"]]
        for wrong_solution in generator.sample(wrong, min(num_wrong, len(wrong))):
            for solution in (generator.choice(correct), wrong_solution):
                row = {
                    "y": int(solution["is_correct"]),
                    "question": problem["question"],
                    "solution": solution["code"],
                    "name": problem["name"],
                    "level": problem["level"],
                    "mutation": solution.get("mutation", ""),
                }
                rows.append(row)
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    return NestedArrayDict(columns, len(rows))
