"""The plan of a sweep (combinations of trainers, scenarios, values and seeds) and its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nip_astra.errors import (
    ConfigurationError,
    ParameterError,
    RunDirectoryError,
    UnknownNameError,
    UntrustedRunError,
)
from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import differences
from nip_astra.parameters.content import with_absolute_paths
from nip_astra.parameters.conversion import convert
from nip_astra.parameters.files import flatten, parse_overrides, read_yaml_mapping
from nip_astra.parameters.parameters_base import MAX_WHOLE, CheckedName, SubParameters
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.tracking.figure_names import current_figure_name
from nip_astra.tracking.run_directory import (
    HYPER_PARAMETERS,
    REPORT,
    SETTINGS,
    RunDirectory,
)
from nip_astra.trust import is_signed

PLAN_FILE, LOGS_DIR, FAILURES_FILE = "sweep.json", "logs", "failures.json"
SIGNATURE_FILE = "sweep.signature"
"""File that identifies the sweep's owner; see `nip_astra.trust`."""
MAX_NAME = 100
"""Maximum characters of trainer, scenario and values in the name of a run's folder."""
MAX_RUNS = 10_000
"""Maximum number of runs; more are considered a mistake."""
DEV = "dev/"
"""Prefix of figures of dev evaluations."""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(log\s+)?({_NUMBER})\.\.({_NUMBER})")
_MAX_DIGITS = 19
_SEED = re.compile(r"^seed: .*\n", re.MULTILINE)
_IGNORED_IN_COMPARISON = (
    "seed",
    "package_version",
    "scenario",
    "plugins",
    "custom_trainer_module_path",
)
"""Parameters in which runs of an arm may differ."""


class Range(SubParameters):
    """Numbers from `low` to `high`, inclusive; integers if both ends are."""

    low: int | float
    """Lowest number."""
    high: int | float
    """Highest number."""
    is_log: bool = False
    """Whether numbers are sampled uniformly on a log scale, as for learning rates."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"must have a low, {self.low}, below its high, {self.high}")
        if self.is_log and self.low <= 0:
            raise ValueError(f"has logarithms only above 0, but its low is {self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether only integers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Choice = Range | list[Any]


class SearchParameters(SubParameters):
    """A search for the values of parameters that optimise a figure.

    A path that begins with the name of one of the sweep's trainers applies only to its trials.
    """

    space: Mapping[str, Choice] = {}
    """A range or list of values per parameter. Trainers and scenarios of the sweep, and lists of
    its grid, are searched as well."""
    num_trials: int = Field(default=20, ge=1)
    """Total number of trials, including pruned and failed ones."""
    sampler: CheckedName = "tpe"
    """Sampler of values: tpe near the best trials so far, random independently of them, or one
    registered by a plug-in."""
    pruner: CheckedName = "median"
    """Pruner of trials by their dev evaluations: median stops those worse than the median at the
    same iteration, halving all but the best by successive halving, none stops none; or one
    registered by a plug-in."""
    num_startup_trials: int = Field(default=5, ge=0)
    """Random trials before tpe starts, and complete ones before median starts."""
    objective: str | None = None
    """Figure to optimise: a name in metrics.jsonl such as dev/failure_rate, with a run's best
    value; null for dev/ and the trainer's dev_metric. A name without dev/ is read from
    results.json, after training, and is not used for pruning."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether the figure is maximised or minimised."""
    seed: int = Field(default=0, le=MAX_WHOLE)
    """Root seed of the search; not the seed of the runs."""

    @field_validator("objective")
    @classmethod
    def _has_current_name(cls, objective: str | None) -> str | None:
        return None if objective is None else current_figure_name(objective)


@dataclass(frozen=True)
class Arm:
    """A configuration of a sweep: runs that differ only in their seeds."""

    trainer: str
    scenario: str | None
    values: Mapping[str, str]  # parameters that the sweep varies, as text for `--set`
    fixed: Mapping[str, str] = field(default_factory=dict)  # those with one value in all arms

    @property
    def _short_values(self) -> list[str]:
        """The varied parameters as `name=value`, without their groups."""
        return [f"{path.rpartition('.')[2]}={_short(text)}" for path, text in self.values.items()]

    @property
    def tags(self) -> list[str]:
        """Tags of its runs on W&B, truncated to 64 characters each."""
        return [tag[:64] for tag in (self.trainer, *self._short_values)]

    @property
    def name(self) -> str:
        """Name in tables."""
        scenario = [self.scenario] if self.scenario else []
        return " ".join([self.trainer, *scenario, *self._short_values])

    def run_id(self, seed: int) -> str:
        """Return the id of a run, equal in every sweep with this arm."""
        values = {**self.fixed, **self.values}
        if self.scenario is None and not values:
            return f"{self.trainer}-s{seed}"
        return f"{self.trainer}-{_digest([self.scenario, sorted(values.items())])}-s{seed}"

    def folder_in(self, directory: Path, seed: int) -> Path:
        """Return the folder of a run, whose name has the swept values.

        An existing folder is used, also one named by `run_id` by an older version, or by a sweep
        over other parameters.
        """
        run_id = self.run_id(seed)
        if run_id == f"{self.trainer}-s{seed}" or (directory / run_id).exists():
            return directory / run_id
        suffix = f"-s{seed}-{_digest(run_id)}"
        scenario = [Path(self.scenario).name] if self.scenario else []
        parts = [self.trainer, *scenario, *self._short_values]
        name = re.sub(r"[^\w.-]+", "_", "-".join(parts), flags=re.ASCII)[:MAX_NAME].rstrip("-_.")
        folder = directory / f"{name}{suffix}"
        if folder.exists():
            return folder
        # A sweep over other parameters has named it otherwise; the digest is that of the arm.
        return next(iter(directory.glob(f"*{suffix}")), folder)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    arm: Arm
    seed: int

    @property
    def run_id(self) -> str:
        """Id of the run, also in the names of its logs."""
        return self.arm.run_id(self.seed)

    def folder_in(self, directory: Path) -> Path:
        """Return its folder; see `Arm.folder_in`."""
        return self.arm.folder_in(directory, self.seed)


class RunStatus(StrEnum):
    """State of a run of a sweep."""

    NEW = "new"
    STOPPED = "stopped"
    """Started but not ended: it is resumed from its latest checkpoint."""
    ENDED = "ended"
    PRUNED = "pruned"
    """Stopped permanently because other trials did better."""
    FAILED = "failed"
    """The process ended with an error in this call of the sweep."""


@dataclass(frozen=True)
class FinishedRun:
    """The outcome of a run, with the last line of a failed run's log."""

    run: PlannedRun
    status: RunStatus
    seconds: float
    message: str = ""


class RunQueue:
    """Queue of runs that are known from the start."""

    def __init__(self, runs: Iterable[PlannedRun]) -> None:
        self._runs = list(runs)

    def take(self) -> PlannedRun | None:
        """Return the next run to start; None if there is none now."""
        return self._runs.pop(0) if self._runs else None

    @property
    def is_empty(self) -> bool:
        """Whether no further run follows those already taken."""
        return not self._runs

    def goes_on(self, run: PlannedRun) -> bool:
        """Return whether a run in progress should continue."""
        return True

    def note(self, finished: FinishedRun) -> None:
        """Record the outcome of a run."""


class SweepPlan(SubParameters):
    """The runs of a sweep, as in a sweep file."""

    trainers: list[str] = Field(min_length=1)
    """Trainers to compare."""
    scenarios: list[str] = []
    """Scenarios of each trainer; empty for those of the presets."""
    seeds: list[Annotated[int, Field(ge=0, le=MAX_WHOLE)]] = Field(
        default=[0, 1, 2, 3, 4], min_length=1
    )
    """Seeds of each combination. More give narrower intervals."""
    grid: Mapping[str, list[Any]] = {}
    """Values of parameters by name; every combination is run."""
    overrides: list[str] = []
    """Assignments `a.b=c` for all runs."""
    parameters: str | None = None
    """Parameter file that all runs start from, instead of the trainers' presets."""
    plugins: list[str] = []
    """Files or modules of plug-ins."""
    search: SearchParameters | None = None
    """Search for the best values instead of running all combinations; null runs all."""

    @field_validator("trainers")
    @classmethod
    def _are_names(cls, trainers: list[str]) -> list[str]:
        for name in trainers:
            if not name.isidentifier():
                raise ValueError(f"gives {name!r}, which is not a name of a trainer")
        return trainers

    @field_validator("parameters", "plugins")
    @classmethod
    def _are_found_from_every_folder(cls, paths: Any) -> Any:
        return with_absolute_paths(paths)

    @field_validator("trainers", "scenarios", "seeds")
    @classmethod
    def _are_different(cls, values: list[Any]) -> list[Any]:
        _refuse_repeated(values)
        return values

    @field_validator("grid")
    @classmethod
    def _has_values(cls, grid: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
        for path, values in grid.items():
            _refuse_own_parameter(path)
            _refuse_none_or_repeated(path, values)
        return grid

    @field_validator("overrides")
    @classmethod
    def _are_of_all_runs(cls, overrides: list[str]) -> list[str]:
        for assignment in overrides:
            _refuse_own_parameter(assignment.partition("=")[0])
        return overrides

    @field_validator("search")
    @classmethod
    def _has_different_values(
        cls, search: SearchParameters | None, info: ValidationInfo
    ) -> SearchParameters | None:
        for path, choice in search.space.items() if search else ():
            _refuse_own_parameter(path)
            if path in info.data.get("grid", {}):
                raise ValueError(f"has a range of {path}, but the grid gives its values; give one")
            if isinstance(choice, list):
                _refuse_none_or_repeated(path, choice)
        return search

    @property
    def arms(self) -> list[Arm]:
        """Return every combination, without seeds; a search's are known after it has ended."""
        assignments_by_path = [
            [(path, as_text(value)) for value in values]
            for path, values in self.grid.items()
            if len(values) > 1
        ]
        return self._build_arms(lambda _: map(dict, product(*assignments_by_path)))

    @property
    def runs(self) -> list[PlannedRun]:
        """Return every run: the first seed of all arms first, so that a sweep has results early."""
        return [PlannedRun(arm, seed) for seed in self.seeds for arm in self.arms]

    @property
    def first_arms(self) -> list[Arm]:
        """Return an arm per trainer and scenario, with the first value of each varied parameter."""

        def first_values(trainer: str) -> list[dict[str, str]]:
            choices = self.choices_of(trainer)
            return [{path: as_text(_ends(choice)[0]) for path, choice in choices.items()}]

        return self._build_arms(first_values)

    def _build_arms(self, combinations: Callable[[str], Iterable[Mapping[str, str]]]) -> list[Arm]:
        """Return an arm per trainer, scenario and combination of the trainer's values."""
        return [
            Arm(trainer, scenario, values, self.fixed)
            for trainer in self.trainers
            for scenario in self.scenarios or [None]  # type: ignore[list-item]
            for values in combinations(trainer)
        ]

    @property
    def choices(self) -> dict[str, Choice]:
        """Return the values tried by a search, by parameter, without single values of the grid."""
        listed: dict[str, Choice] = {
            path: values for path, values in self.grid.items() if len(values) > 1
        }
        return listed | dict(self.search.space if self.search else {})

    def choices_of(self, trainer: str) -> dict[str, Choice]:
        """Return the `choices` of a trainer's trials, without parameters of the other trainers."""
        other_trainers = {*self.trainers} - {trainer}
        return {
            path: choice
            for path, choice in self.choices.items()
            if path.partition(".")[0] not in other_trainers
        }

    @property
    def fixed(self) -> dict[str, str]:
        """Return values of the grid shared by all arms."""
        return {path: as_text(values[0]) for path, values in self.grid.items() if len(values) == 1}

    def check(self, directory: Path | None = None, *, is_test_run: bool = False) -> None:
        """Resolve the parameters of every arm; for a search, of the ends of its ranges.

        Without a search, runs in `directory` that began with other parameters, or were test runs
        and are none now, are refused.
        """
        if self.search is not None:
            for arm in self._trials_at_the_ends():
                self._check_objective(self.resolve(arm))
            return
        num_runs = len(self.seeds) * len(self.arms)
        if num_runs > MAX_RUNS:
            raise ConfigurationError(
                f"a sweep has at most {MAX_RUNS:,} runs, but this has {num_runs:,}. Give fewer "
                "values."
            )
        arm_by_values: dict[str, Arm] = {}
        for arm in self.arms:
            resolved = self.resolve(arm)
            values = resolved.hyper_params.to_dict() | {"scenario": str(resolved.scenario_dir)}
            equal_arm = arm_by_values.setdefault(json.dumps(values, sort_keys=True), arm)
            if equal_arm is not arm:
                raise ConfigurationError(
                    f"the arms {equal_arm.name!r} and {arm.name!r} are the same experiment. Leave "
                    "out one of them."
                )
            if directory is not None:
                values = resolved.hyper_params.to_dict() | {"settings": {"test_run": is_test_run}}
                self._check_started_runs(arm, values, directory)

    def _check_started_runs(self, arm: Arm, values: Mapping[str, Any], directory: Path) -> None:
        """Refuse runs of an arm that began with other values, except for their seed."""
        current_values = dict(flatten(values))
        stored_by_text: dict[str, Any] = {}
        for seed in self.seeds:
            run = RunDirectory(arm.folder_in(directory, seed))
            file = run.path / HYPER_PARAMETERS
            if not file.is_file():
                continue
            # Equal texts are parsed once, since that takes a tenth of a second.
            text = _SEED.sub("", file.read_text("utf-8", "replace"))
            if text not in stored_by_text:
                stored_by_text[text] = convert(run.read_yaml(HYPER_PARAMETERS), source=str(file))
            has_settings = (run.path / SETTINGS).is_file()
            settings = run.read_yaml(SETTINGS) if has_settings else {}
            stored_values = dict(flatten(stored_by_text[text] | {"settings": settings}))
            # Folders may have moved, and parameters been added in a later version.
            compared_names = [
                name
                for name in current_values.keys() & stored_values.keys()
                if name.partition(".")[0] not in _IGNORED_IN_COMPARISON
            ]
            changes = differences(
                {name: stored_values[name] for name in compared_names},
                {name: current_values[name] for name in compared_names},
            )
            if changes:
                lines = "\n".join(f"  {line}" for line in changes)
                raise ConfigurationError(
                    f"the run {run.path} began with other parameters:\n{lines}\nGive another "
                    "--sweep-dir, or remove that folder."
                )

    def resolve(self, arm: Arm) -> ResolvedExperiment:
        """Resolve the parameters of an arm with the first seed."""
        return resolve_experiment(
            trainer=arm.trainer,
            scenario=arm.scenario,
            parameter_file=self.parameters,
            overrides=self.overrides_of(arm),
            seed=self.seeds[0],
            plugins=self.plugins,
        )

    def _trials_at_the_ends(self) -> Iterator[Arm]:
        for arm in self.first_arms:
            yield arm
            for path, choice in self.choices_of(arm.trainer).items():
                for end in _ends(choice)[1:]:
                    yield replace(arm, values={**arm.values, path: as_text(end)})

    def _check_objective(self, resolved: ResolvedExperiment) -> None:
        objective = self.objective_of(resolved)
        period = getattr(resolved.hyper_params.training, "eval_period", 0)
        if objective.startswith(DEV) and not period:
            groups = resolved.trainer_class.parameter_groups
            is_evaluated = groups is None or "training" in groups
            advice = "add --set training.eval_period=2, or " if is_evaluated else ""
            raise ConfigurationError(
                f"{resolved.hyper_params.trainer} measures no {objective} to search by; "
                f"{advice}give --objective a figure after training, measured on the test data."
            )

    def objective_of(self, resolved: ResolvedExperiment) -> str:
        """Return the figure that a search optimises."""
        metric = getattr(resolved.hyper_params.training, "dev_metric", "mean_reward")
        return (self.search and self.search.objective) or f"{DEV}{metric}"

    def overrides_of(self, arm: Arm) -> list[str]:
        """Return the assignments of an arm's runs."""
        values = {**arm.fixed, **arm.values}
        return [*self.overrides, *(f"{path}={value}" for path, value in values.items())]


def _refuse_own_parameter(path: str) -> None:
    option = {"seed": "--seeds", "trainer": "--trainer", "scenario": "--scenario"}.get(path.strip())
    if option is not None:
        raise ValueError(f"gives {path.strip()}, which a sweep varies by {option}; use that")


def _refuse_none_or_repeated(path: str, values: Sequence[Any]) -> None:
    if not values:
        raise ValueError(f"gives no value of {path}")
    _refuse_repeated(values, f" of {path}")


def _refuse_repeated(values: Sequence[Any], of: str = "") -> None:
    """Raise for two spellings of one value, such as 1e-4 and 0.0001."""
    seen: list[tuple[bool, Any]] = []
    for value in values:
        try:
            (parsed,) = parse_overrides([f"value={as_text(value)}"]).values.values()
        except ParameterError:
            # Resolving the run reports the error.
            continue
        # True equals 1 in Python.
        identity = (isinstance(parsed, bool), parsed)
        if identity in seen:
            raise ValueError(f"gives {as_text(value)}{of} twice, whose runs would be the same")
        seen.append(identity)


class RequestedFigures:
    """Figures that a sweep shows or searches by, checked against those of its trainers."""

    def __init__(self, plan: SweepPlan, metrics: Sequence[str] = ()) -> None:
        self._undeclared: dict[str, set[str]] = {}
        declared: dict[str, tuple[str, ...] | None] = {}
        requested = dict.fromkeys(map(current_figure_name, metrics))
        for arm in plan.first_arms:
            resolved = plan.resolve(arm)
            declared[arm.trainer] = resolved.trainer_class.declared_figures()
            if plan.search is not None:
                requested[plan.objective_of(resolved)] = None
        silent_trainers = {trainer for trainer, figures in declared.items() if figures is None}
        patterns = [pattern for figures in declared.values() for pattern in figures or ()]
        for name in requested:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                continue
            if not silent_trainers:
                raise _unknown_figure(name, patterns)
            self._undeclared[name] = set(silent_trainers)

    def note(self, run: PlannedRun, folder: Path) -> None:
        """Check undeclared names against an ended run; raise if no other trainer can report one."""
        for name, trainers in list(self._undeclared.items()):
            if run.arm.trainer not in trainers:
                continue
            stored = read_results(folder)
            reported = set(stored.results.get("after") or {})
            reported |= {figure.name for figure in stored.figures}
            for row in stored.metrics:
                reported |= {metric for metric in row if metric.startswith(DEV)}
            if name in reported:
                del self._undeclared[name]
                continue
            trainers.discard(run.arm.trainer)
            if not trainers:
                raise _unknown_figure(name, reported)


def _unknown_figure(name: str, reported: Iterable[str]) -> UnknownNameError:
    advice = "Name one that a trainer of the sweep reports, by --metric or --objective."
    return UnknownNameError("figure", name, sorted(set(reported)), advice)


def read_plan(source: str | Path | None, options: Mapping[str, Any] = {}) -> SweepPlan:
    """Read the plan of a YAML file or a sweep's folder, overridden by options of `sweep`."""
    options = {name: value for name, value in options.items() if value is not None}
    values: dict[str, Any] = {}
    if source is not None and Path(source).is_dir():
        values = read_stored_plan(Path(source)).to_dict()
        if not options.get("trust") and not is_own_sweep(Path(source)):
            raise UntrustedRunError(
                f"the sweep {source} is not known to be yours; running it would run the code and "
                f"parameters that its {PLAN_FILE} names. Read that file, then add --trust."
            )
    elif source is not None:
        values = SweepPlan.from_dict(read_yaml_mapping(Path(source))).to_dict()
    parsers: dict[str, Callable[[str], Any]] = {
        "trainers": _names,
        "scenarios": _names,
        "seeds": seeds_of,
        "parameters": str,
    }
    for name, parse in parsers.items():
        if name in options:
            values[name] = parse(options[name])
    values["grid"] = {**values.get("grid", {}), **grid_of(options.get("grid", ()))}
    values["plugins"] = [*values.get("plugins", []), *options.get("plugin", ())]
    search = {name: options[name] for name in SearchParameters.model_fields if name in options}
    if search or "ranges" in options:
        stored_search = values.get("search") or {}
        space = {**stored_search.get("space", {}), **space_of(options.get("ranges", ()))}
        values["search"] = {**stored_search, **search, "space": space}
    if source is None and not values.get("trainers"):
        raise ConfigurationError(
            "a sweep needs trainers. Name some, for instance --trainer ast_dpo,ast_ipo, or give a "
            "file with `trainers:`."
        )
    return SweepPlan.from_dict(values)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def read_stored_plan(directory: Path) -> SweepPlan:
    """Read the plan of a sweep's folder."""
    try:
        stored = json.loads((directory / PLAN_FILE).read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"it holds {type(stored).__name__} and no object")
        return SweepPlan.from_dict(stored)
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"the {PLAN_FILE} of {directory} is missing or broken: {error}. Give the folder of a "
            "sweep."
        ) from error


def is_own_sweep(directory: Path) -> bool:
    """Return whether this user created the plan of a sweep's folder on this machine."""
    try:
        plan = (directory / PLAN_FILE).read_bytes()
        signature = (directory / SIGNATURE_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return is_signed(plan, signature)


def status_of(folder: Path) -> RunStatus:
    """Return the state of the run in a folder, from its files."""
    if RunDirectory(folder).has_ended and (folder / REPORT).is_file():
        return RunStatus.ENDED
    return RunStatus.STOPPED if (folder / HYPER_PARAMETERS).is_file() else RunStatus.NEW


def read_failures(directory: Path) -> dict[str, str]:
    """Read the last log lines of a sweep's failed runs, by run id."""
    try:
        stored = json.loads((directory / FAILURES_FILE).read_text(encoding="utf-8"))
        return {run_id: str(message) for run_id, message in stored.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def space_of(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse ranges by parameter from `a.b=1..8`, `a.b=log 1e-5..1e-3`."""
    space: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        path, _, text = (part.strip() for part in assignment.partition("="))
        match = _RANGE.fullmatch(text)
        if not path or match is None or path in space:
            problem = "repeats a parameter" if path in space else "is not a range"
            raise ConfigurationError(
                f"--search {assignment!r} {problem}. Write --search "
                "'training.lr=log 1e-5..1e-3' or --search training.num_epochs=1..4; a list of "
                "values is --set a.b=x,y."
            )
        space[path] = {
            "low": _number(match[2]),
            "high": _number(match[3]),
            "is_log": match[1] is not None,
        }
    return space


def _number(text: str) -> int | float:
    whole = _whole_number(text.lstrip("+-"))
    if whole is None:
        return float(text)
    return -whole if text.startswith("-") else whole


def _whole_number(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) < _MAX_DIGITS else None


def grid_of(assignments: Sequence[str]) -> dict[str, list[str]]:
    """Parse values by parameter, `a.b=1,2,3`; commas in brackets or quotes do not separate."""
    grid: dict[str, list[str]] = {}
    for assignment in assignments:
        path, equals, values = assignment.partition("=")
        path = path.strip()
        if not equals or not path or path in grid:
            problem = "repeats a parameter" if path in grid else "is not an assignment"
            raise ConfigurationError(
                f"--set {assignment!r} {problem}. Write --set training.lr=1e-5,1e-4."
            )
        grid[path] = with_absolute_paths(list(_split_values(values)))
    return grid


def seeds_of(text: str) -> list[int]:
    """Parse seeds from `0..4` (inclusive) or `0,3,7`."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = _whole_number(low)
        last = _whole_number(high) if dots else first
        if first is None or last is None or not first <= last < first + MAX_RUNS:
            raise ConfigurationError(
                f"--seeds {text!r}: {part!r} is neither a number nor a range of at most "
                f"{MAX_RUNS:,}. Write --seeds 0..4 or --seeds 0,3,7."
            )
        seeds += range(first, last + 1)
    return seeds


def shard_of(runs: Sequence[PlannedRun], shard: str | None) -> list[PlannedRun]:
    """Return the runs of a shard `2/4`, the second of four parts; sizes differ by at most one."""
    if shard is None:
        return list(runs)
    number, count = map(_whole_number, shard.partition("/")[::2])
    if number is None or count is None or not 1 <= number <= count:
        raise ConfigurationError(
            f"--shard {shard!r} names no part of the runs. Write --shard 2/4 for the second of "
            "four."
        )
    return list(runs)[number - 1 :: count]


def _split_values(values: str) -> Iterator[str]:
    """Yield the parts between commas, except those in brackets or quotes."""
    depth, quote, start = 0, "", 0
    for index, letter in enumerate(values):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            yield values[start:index].strip()
            start = index + 1
    yield values[start:].strip()


def _ends(choice: Choice) -> list[Any]:
    return [choice.low, choice.high] if isinstance(choice, Range) else choice


def _short(value: str) -> str:
    """Shorten a value for a name, with at most four digits of a sampled number."""
    if len(value) <= 8:
        return value
    try:
        return f"{float(value):.4g}"
    except ValueError:
        # A text: a name, a path, a list.
        return value


def as_text(value: Any) -> str:
    """Format a value for `--set`."""
    return value if isinstance(value, str) else json.dumps(value)
