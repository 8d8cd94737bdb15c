"""What a sweep runs: every combination of trainers, scenarios and values, with every seed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.loading import read_yaml_mapping
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.resolving.resolution import resolve_experiment

MAX_RUNS = 10_000
"""More combinations are taken for a slip of the pen."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Arm:
    """What the runs of one arm have in common; they differ in their seeds.

    Attributes
    ----------
    values : Mapping[str, str]
        Parameters that the sweep varies, as text for `--set`.
    """

    trainer: str
    scenario: str | None
    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """What the arm is called in tables."""
        parts = [self.trainer, *([self.scenario] if self.scenario else [])]
        parts += [f"{path.rpartition('.')[2]}={value}" for path, value in self.values.items()]
        return " ".join(parts)

    def run_id(self, seed: int) -> str:
        """The name of a run, equal in every sweep with this arm."""
        if self.scenario is None and not self.values:
            return f"{self.trainer}-s{seed}"
        said = json.dumps([self.scenario, sorted(self.values.items())])
        return f"{self.trainer}-{hashlib.sha256(said.encode()).hexdigest()[:8]}-s{seed}"


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    arm: Arm
    seed: int

    @property
    def run_id(self) -> str:
        """Its name, and that of its folder in the sweep's."""
        return self.arm.run_id(self.seed)


class SweepPlan(SubParameters):
    """What a sweep runs, as a file says it."""

    trainers: list[str] = Field(min_length=1)
    """Trainers that are compared."""
    scenarios: list[str] = []
    """Scenarios that each is run on; none for those of the presets."""
    seeds: list[int] = Field(default=[0, 1, 2, 3, 4], min_length=1)
    """Seeds of each combination. More give narrower intervals."""
    grid: Mapping[str, list[Any]] = {}
    """Values of parameters by their names; every combination is run."""
    overrides: list[str] = []
    """Assignments `a.b=c` that hold for all runs."""
    parameters: str | None = None
    """Parameter file that all runs start from, in place of the trainers' presets."""
    plugins: list[str] = []
    """Files or modules with code of one's own."""

    @field_validator("seeds")
    @classmethod
    def _are_different(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("names a seed twice, whose runs would be the same")
        return seeds

    @field_validator("grid")
    @classmethod
    def _has_values(cls, grid: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
        for path, values in grid.items():
            if not values:
                raise ValueError(f"gives no value of {path}")
        return grid

    @property
    def arms(self) -> list[Arm]:
        """Every combination, without seeds."""
        values = [[(path, _as_text(one)) for one in given] for path, given in self.grid.items()]
        return [
            Arm(trainer, scenario, dict(chosen))
            for trainer in self.trainers
            for scenario in self.scenarios or [None]  # type: ignore[list-item]
            for chosen in product(*values)
        ]

    @property
    def runs(self) -> list[PlannedRun]:
        """Every run: the first seed of all arms first, so that a sweep says something early."""
        return [PlannedRun(arm, seed) for seed in self.seeds for arm in self.arms]

    def check(self) -> None:
        """Resolve the parameters of every arm, before anything runs.

        Raises
        ------
        ConfigurationError
            When a combination is wrong, or there are too many.
        """
        num_runs = len(self.seeds) * len(self.arms)
        if num_runs > MAX_RUNS:
            raise ConfigurationError(
                f"a sweep of {num_runs:,} runs was asked for, and {MAX_RUNS:,} are the most. Give "
                "fewer values, or parts of it by --shard."
            )
        for arm in self.arms:
            resolve_experiment(
                trainer=arm.trainer,
                scenario=arm.scenario,
                parameter_file=self.parameters,
                overrides=self.overrides_of(arm),
                seed=self.seeds[0],
                plugins=self.plugins,
            )

    def overrides_of(self, arm: Arm) -> list[str]:
        """Assignments of an arm's runs."""
        return [*self.overrides, *(f"{path}={value}" for path, value in arm.values.items())]


def read_plan(path: str | Path) -> SweepPlan:
    """The plan that a YAML file holds.

    Raises
    ------
    ConfigurationError
        When there is no such file or it holds no plan.
    """
    return SweepPlan.from_dict(read_yaml_mapping(Path(path)))


def grid_of(assignments: Sequence[str]) -> dict[str, list[str]]:
    """Values by parameter of `a.b=1,2,3`; commas within brackets or quotes divide nothing.

    Raises
    ------
    ConfigurationError
        When one is no assignment or a parameter is given twice.
    """
    grid: dict[str, list[str]] = {}
    for assignment in assignments:
        path, equals, values = assignment.partition("=")
        if not equals or not path.strip() or path.strip() in grid:
            raise ConfigurationError(
                f"--set {assignment!r} was to give values of one parameter each, but it "
                f"{'names a parameter again' if path.strip() in grid else 'is no assignment'}. "
                "Write --set training.lr=1e-5,1e-4."
            )
        grid[path.strip()] = list(_divided(values))
    return grid


def seeds_of(text: str) -> list[int]:
    """Seeds of `0..4` (both ends are seeds) or `0,3,7`.

    Raises
    ------
    ConfigurationError
        When it is neither.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found and int(found[1]) <= int(found[2]) < int(found[1]) + MAX_RUNS:
            seeds += range(int(found[1]), int(found[2]) + 1)
        elif part.strip().isdigit():
            seeds.append(int(part))
        else:
            raise ConfigurationError(
                f"--seeds {text!r} was to name seeds, but {part!r} is neither a number nor a "
                "range. Write --seeds 0..4 or --seeds 0,3,7."
            )
    return seeds


def shard_of(runs: Sequence[PlannedRun], shard: str | None) -> list[PlannedRun]:
    """The runs of a shard `2/4`: the second of four parts that differ by one run at most.

    Raises
    ------
    ConfigurationError
        When it is no such shard.
    """
    if shard is None:
        return list(runs)
    number, _, count = shard.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ConfigurationError(
            f"--shard {shard!r} was to name a part of the runs. Write --shard 2/4 for the second "
            "of four."
        )
    return list(runs)[int(number) - 1 :: int(count)]


def _divided(values: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(values):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            yield values[start:place].strip()
            start = place + 1
    yield values[start:].strip()


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
