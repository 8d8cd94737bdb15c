"""What a sweep runs: every combination of trainers, scenarios and values, with every seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from nip_astra.errors import ConfigurationError, ParameterError, UnknownNameError
from nip_astra.evaluation.run_results import read_results
from nip_astra.parameters.content import with_absolute_paths
from nip_astra.parameters.files import parse_overrides, read_yaml_mapping
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.sweep.search_space import Choice, Range, SearchParameters, whole_number
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer

MAX_RUNS = 10_000
"""More combinations are taken for a slip of the pen."""
DEV = "dev/"
"""How the names of dev evaluations' figures begin."""


@dataclass(frozen=True)
class Arm:
    """What the runs of one arm have in common; they differ in their seeds.

    Attributes
    ----------
    values : Mapping[str, str]
        Parameters that the sweep varies, as text for `--set`.
    fixed : Mapping[str, str]
        Parameters that it sets to the same for all arms.
    """

    trainer: str
    scenario: str | None
    values: Mapping[str, str]
    fixed: Mapping[str, str] = field(default_factory=dict)

    @property
    def tags(self) -> list[str]:
        """What tells its runs from others on W&B, which takes 64 letters at most."""
        varied = [f"{path.rpartition('.')[2]}={_short(one)}" for path, one in self.values.items()]
        return [tag[:64] for tag in (self.trainer, *varied)]

    @property
    def name(self) -> str:
        """What the arm is called in tables."""
        parts = [self.trainer, *([self.scenario] if self.scenario else [])]
        parts += [f"{path.rpartition('.')[2]}={_short(one)}" for path, one in self.values.items()]
        return " ".join(parts)

    def run_id(self, seed: int) -> str:
        """The name of a run, equal in every sweep with this arm."""
        values = {**self.fixed, **self.values}
        if self.scenario is None and not values:
            return f"{self.trainer}-s{seed}"
        said = json.dumps([self.scenario, sorted(values.items())])
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
    search: SearchParameters | None = None
    """Search for the best values in place of running all combinations; null runs all."""

    @field_validator("trainers")
    @classmethod
    def _are_names(cls, trainers: list[str]) -> list[str]:
        for name in trainers:
            if not name.isidentifier():
                raise ValueError(f"gives {name!r}, which is no name of a trainer")
        return trainers

    @field_validator("trainers", "scenarios", "seeds")
    @classmethod
    def _are_different(cls, given: list[Any]) -> list[Any]:
        _refuse_repeated(given)
        return given

    @field_validator("grid")
    @classmethod
    def _has_values(cls, grid: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
        for path, values in grid.items():
            _refuse_own_parameter(path)
            if not values:
                raise ValueError(f"gives no value of {path}")
            _refuse_repeated(values, f" of {path}")
        return grid

    @field_validator("overrides")
    @classmethod
    def _are_of_all_runs(cls, overrides: list[str]) -> list[str]:
        for assignment in overrides:
            _refuse_own_parameter(assignment.partition("=")[0])
        return overrides

    @field_validator("search")
    @classmethod
    def _has_different_values(cls, search: SearchParameters | None) -> SearchParameters | None:
        for path, choice in search.space.items() if search else ():
            _refuse_own_parameter(path)
            if isinstance(choice, list):
                _refuse_repeated(choice, f" of {path}")
        return search

    @property
    def arms(self) -> list[Arm]:
        """Every combination, without seeds; those of a search are known when it has ended."""
        varied = {path: given for path, given in self.grid.items() if len(given) > 1}
        values = [[(path, as_text(one)) for one in given] for path, given in varied.items()]
        return [
            Arm(trainer, scenario, dict(chosen), self.fixed)
            for trainer in self.trainers
            for scenario in self.scenarios or [None]  # type: ignore[list-item]
            for chosen in product(*values)
        ]

    @property
    def runs(self) -> list[PlannedRun]:
        """Every run: the first seed of all arms first, so that a sweep says something early."""
        return [PlannedRun(arm, seed) for seed in self.seeds for arm in self.arms]

    @property
    def first_arms(self) -> list[Arm]:
        """One arm of each trainer and scenario, with the first value of all that is tried."""
        return [
            Arm(trainer, scenario, self._first_values(trainer), self.fixed)
            for trainer in self.trainers
            for scenario in self.scenarios or [None]  # type: ignore[list-item]
        ]

    def _first_values(self, trainer: str) -> dict[str, str]:
        tried = self.choices_of(trainer)
        return {path: as_text(_ends_of(one)[0]) for path, one in tried.items()}

    @property
    def choices(self) -> dict[str, Choice]:
        """What a search tries for each parameter; a grid's single values are not searched."""
        listed: dict[str, Choice] = {
            path: values for path, values in self.grid.items() if len(values) > 1
        }
        return listed | dict(self.search.space if self.search else {})

    def choices_of(self, trainer: str) -> dict[str, Choice]:
        """What a search tries with a trainer: no parameters of the other trainers' own."""
        others = {other for other in self.trainers if other != trainer}
        return {
            path: choice
            for path, choice in self.choices.items()
            if path.partition(".")[0] not in others
        }

    @property
    def fixed(self) -> dict[str, str]:
        """Values of the grid that all arms have."""
        return {path: as_text(values[0]) for path, values in self.grid.items() if len(values) == 1}

    def check(self) -> None:
        """Resolve the parameters of every arm, before anything runs; of a search, its ends.

        Raises
        ------
        ConfigurationError
            When a combination is wrong, there are too many, or there is nothing to search by.
        """
        if self.search is not None:
            for arm in self._ends():
                self._check_objective(self.resolve(arm))
            return
        num_runs = len(self.seeds) * len(self.arms)
        if num_runs > MAX_RUNS:
            raise ConfigurationError(
                f"a sweep of {num_runs:,} runs was asked for, and {MAX_RUNS:,} are the most. Give "
                "fewer values, or parts of it by --shard."
            )
        known: dict[str, Arm] = {}
        for arm in self.arms:
            resolved = self.resolve(arm)
            values = resolved.hyper_params.to_dict() | {"scenario": str(resolved.scenario_dir)}
            other = known.setdefault(json.dumps(values, sort_keys=True), arm)
            if other is not arm:
                raise ConfigurationError(
                    f"the arms {other.name!r} and {arm.name!r} are one experiment, and would "
                    "count as two. Leave out one of them."
                )

    def resolve(self, arm: Arm) -> ResolvedExperiment:
        """The parameters of an arm with the first seed."""
        return resolve_experiment(
            trainer=arm.trainer,
            scenario=arm.scenario,
            parameter_file=self.parameters,
            overrides=self.overrides_of(arm),
            seed=self.seeds[0],
            plugins=self.plugins,
        )

    def _ends(self) -> Iterator[Arm]:
        """Trials with the ends of each range and each listed value, one after the other."""
        for arm in self.first_arms:
            yield arm
            for path, choice in self.choices_of(arm.trainer).items():
                for end in _ends_of(choice)[1:]:
                    yield replace(arm, values={**arm.values, path: as_text(end)})

    def _check_objective(self, resolved: ResolvedExperiment) -> None:
        objective = self.objective_of(resolved)
        period = getattr(resolved.hyper_params.training, "eval_period", 0)
        if objective.startswith(DEV) and not period:
            raise ConfigurationError(
                f"a search by {objective} was asked for, but {resolved.hyper_params.trainer} makes "
                "no dev evaluations: training.eval_period is 0. Add --set training.eval_period=2, "
                "or search by a figure after training, for instance --objective failure_rate, "
                "which looks at what the runs are tested on."
            )

    def objective_of(self, resolved: ResolvedExperiment) -> str:
        """The figure that trials of a search are judged by."""
        told = self.search.objective if self.search else None
        metric = getattr(resolved.hyper_params.training, "dev_metric", "mean_reward")
        return told or f"{DEV}{metric}"

    def overrides_of(self, arm: Arm) -> list[str]:
        """Assignments of an arm's runs."""
        values = {**arm.fixed, **arm.values}
        return [*self.overrides, *(f"{path}={value}" for path, value in values.items())]


def _refuse_own_parameter(path: str) -> None:
    """Refuse to vary as a parameter what a sweep varies by fields of its own."""
    option = {"seed": "--seeds", "trainer": "--trainer", "scenario": "--scenario"}.get(path.strip())
    if option is not None:
        raise ValueError(f"gives {path.strip()}, which a sweep varies by {option}; use that")


def _refuse_repeated(values: Sequence[Any], of: str = "") -> None:
    """Refuse two values that are one, as 1e-4 and 0.0001 are."""
    known: list[Any] = []
    for value in values:
        try:
            (read,) = parse_overrides([f"value={as_text(value)}"]).values.values()
        except ParameterError:
            # Whoever resolves the run says what is wrong with it.
            continue
        read = isinstance(read, bool), read
        if read in known:
            raise ValueError(f"gives {as_text(value)}{of} twice, whose runs would be the same")
        known.append(read)


class RequestedFigures:
    """Figures that a sweep shows or searches by, checked against those that its trainers report.

    Parameters
    ----------
    metrics : Sequence[str]
        Figures after training that are shown.

    Raises
    ------
    UnknownNameError
        When no trainer of the sweep reports one of them.
    """

    def __init__(self, plan: SweepPlan, metrics: Sequence[str] = ()) -> None:
        self._undeclared: dict[str, set[str]] = {}
        trainers = {}
        requested = dict.fromkeys(metrics)
        for arm in plan.first_arms:
            resolved = plan.resolve(arm)
            trainers[arm.trainer] = resolved.trainer_class
            if plan.search is not None:
                requested[plan.objective_of(resolved)] = None
        declared = {name: _declared_figures(name, one) for name, one in trainers.items()}
        for name in requested:
            silent = {trainer for trainer, figures in declared.items() if figures is None}
            known = [pattern for figures in declared.values() for pattern in figures or ()]
            if any(fnmatchcase(name, pattern) for pattern in known):
                continue
            if not silent:
                raise _unknown_figure(name, known)
            self._undeclared[name] = silent

    def note(self, run: PlannedRun, folder: Path) -> None:
        """Check the names that trainers had not declared against a run that has ended.

        Raises
        ------
        UnknownNameError
            When it was the last trainer that might have reported one of them.
        """
        for name, trainers in list(self._undeclared.items()):
            if run.arm.trainer not in trainers:
                continue
            found = read_results(folder)
            reported = {*(found.results.get("after") or {}), *(one.name for one in found.figures)}
            reported |= {one for row in found.metrics for one in row if one.startswith(DEV)}
            if name in reported:
                del self._undeclared[name]
                continue
            trainers.discard(run.arm.trainer)
            if not trainers:
                raise _unknown_figure(name, reported)


def _declared_figures(name: str, trainer: type[Trainer]) -> tuple[str, ...] | None:
    """What a trainer declares; a plug-in's may report more than the base that it inherits from."""
    owner = next(one for one in trainer.__mro__ if "figures" in vars(one))
    is_inherited = owner.__module__.startswith("nip_astra.") and not TRAINERS.is_built_in(name)
    return None if is_inherited else trainer.figures


def _unknown_figure(name: str, known: Iterable[str]) -> UnknownNameError:
    advice = "Name one that a trainer of the sweep reports, by --metric or --objective."
    return UnknownNameError("figure", name, sorted(set(known)), advice)


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
        grid[path.strip()] = with_absolute_paths(list(_divided(values)))
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
        low, _, high = part.partition("..")
        first, last = whole_number(low), whole_number(high)
        if first is not None and last is not None and first <= last < first + MAX_RUNS:
            seeds += range(first, last + 1)
        elif (seed := whole_number(part)) is not None:
            seeds.append(seed)
        else:
            raise ConfigurationError(
                f"--seeds {text!r} was to name seeds, but {part!r} is neither a number nor a "
                f"range, from low to high, of at most {MAX_RUNS:,}. Write --seeds 0..4 or "
                "--seeds 0,3,7."
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
    number, count = map(whole_number, shard.partition("/")[::2])
    if number is None or count is None or not 1 <= number <= count:
        raise ConfigurationError(
            f"--shard {shard!r} was to name a part of the runs. Write --shard 2/4 for the second "
            "of four."
        )
    return list(runs)[number - 1 :: count]


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


def _ends_of(choice: Choice) -> list[Any]:
    return [choice.low, choice.high] if isinstance(choice, Range) else choice


def _short(value: str) -> str:
    """A value in a name; numbers that were drawn have more digits than one reads."""
    try:
        return value if len(value) <= 8 else f"{float(value):.4g}"
    except ValueError:
        return value


def as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
