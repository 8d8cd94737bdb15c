"""Hyper-parameter search with Optuna, with pruned and resumable trials."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nip_astra.errors import RunDirectoryError, reason_of
from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import read_rows
from nip_astra.lazy import import_extra
from nip_astra.registry import Registry
from nip_astra.sweep.plan import (
    DEV,
    Arm,
    Choice,
    FinishedRun,
    PlannedRun,
    Range,
    RunQueue,
    RunStatus,
    SearchParameters,
    SweepPlan,
    as_text,
)
from nip_astra.tracking.figure_names import current_figure_name
from nip_astra.tracking.run_directory import write_atomically
from nip_astra.tracking.tracker import METRICS_FILE
from nip_astra.utils.seeding import derive_seed

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

STUDY_FILE, TRIALS_FILE = "study.db", "trials.json"
STEPS_OF_A_SEED = 1_000_000
"""Optuna's step of iteration i of the k-th seed is i + k times this."""
SamplerFactory = Callable[[SearchParameters, int], "BaseSampler"]
PrunerFactory = Callable[[SearchParameters], "BasePruner"]
SWEEP_SAMPLERS: Registry[SamplerFactory] = Registry("sweep_sampler")
PRUNERS: Registry[PrunerFactory] = Registry("pruner")


def register_sweep_sampler(name: str) -> Callable[[SamplerFactory], SamplerFactory]:
    """Register `(search, seed) -> Optuna sampler`, called for each trial with its own seed."""
    return SWEEP_SAMPLERS.register(name)


def register_pruner(name: str) -> Callable[[PrunerFactory], PrunerFactory]:
    """Register `(search) -> Optuna pruner`."""
    return PRUNERS.register(name)


@register_sweep_sampler("tpe")
def _tpe(search: SearchParameters, seed: int) -> BaseSampler:
    """Sample values near the best trials so far (tree-structured Parzen estimator)."""
    from optuna.samplers import TPESampler

    # `constant_liar` keeps trials apart that run at the same time.
    return TPESampler(seed=seed, n_startup_trials=search.num_startup_trials, constant_liar=True)


@register_sweep_sampler("random")
def _random(search: SearchParameters, seed: int) -> BaseSampler:
    """Sample values independently of other trials."""
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


@register_pruner("median")
def _median(search: SearchParameters) -> BasePruner:
    """Stop trials that are worse than the median of the others at the same iteration."""
    from optuna.pruners import MedianPruner

    return MedianPruner(n_startup_trials=search.num_startup_trials)


@register_pruner("halving")
def _halving(search: SearchParameters) -> BasePruner:
    """Stop all but the best trials by successive halving."""
    from optuna.pruners import SuccessiveHalvingPruner

    return SuccessiveHalvingPruner()


@register_pruner("none")
def _none(search: SearchParameters) -> BasePruner:
    """Stop no trial."""
    from optuna.pruners import NopPruner

    return NopPruner()


@dataclass(frozen=True)
class TrialRecord:
    """The stored state of a trial."""

    number: int
    state: str  # running, complete, pruned or fail
    value: float | None  # the objective, its mean over seeds, once complete
    arm: Arm


@dataclass
class _OpenTrial:
    """A trial in progress, with the objective of its ended runs by seed."""

    trial: Trial
    arm: Arm
    objective: str
    waiting: list[PlannedRun]
    values: dict[int, float] = field(default_factory=dict)
    at_work: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    is_pruned: bool = False
    has_failed: bool = False


class StudyQueue(RunQueue):
    """The runs requested by an Optuna study; a trial runs the seeds of the plan in sequence.

    The study is stored in the sweep's folder. A trial that was in progress when the sweep was
    killed continues with its runs.
    """

    def __init__(self, plan: SweepPlan, directory: Path) -> None:
        assert plan.search is not None
        self.plan, self.search, self.directory = plan, plan.search, directory
        self._optuna = import_extra("optuna", "a search", "sweep")
        self._study = self._open_study()
        self._open: list[_OpenTrial] = []
        self._objectives: dict[tuple[str, str | None], str] = {}
        states = self._optuna.trial.TrialState
        for unfinished in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            trial = self._optuna.trial.Trial(self._study, unfinished._trial_id)
            # A step that an earlier process has reported stays as it was.
            self._begin(trial).reported.update(unfinished.intermediate_values)
        self._num_suggested = len(self._study.get_trials(deepcopy=False))
        self._write_trials()

    @property
    def is_empty(self) -> bool:
        """Whether all trials are done."""
        return not self._open and self._num_suggested >= self.search.num_trials

    def take(self) -> PlannedRun | None:
        for trial in self._open:
            # One seed after the other, so that a pruned trial has not cost all of them.
            if trial.waiting and not trial.at_work:
                return self._hand_out(trial)
        if self._num_suggested >= self.search.num_trials:
            return None
        # Named by number, so that a study that was killed proposes what it would have.
        seed = derive_seed(self.search.seed, "trial", self._num_suggested) % 2**32
        self._study.sampler = SWEEP_SAMPLERS.get(self.search.sampler)(self.search, seed)
        self._num_suggested += 1
        return self._hand_out(self._begin(self._study.ask()))

    def goes_on(self, run: PlannedRun) -> bool:
        """Report new dev evaluations to Optuna; False if its pruner stops the trial."""
        open_trial = self._find_trial(run)
        if not open_trial.objective.startswith(DEV) or self.search.pruner == "none":
            return True
        first_step = self.plan.seeds.index(run.seed) * STEPS_OF_A_SEED
        has_news = False
        for iteration, value in self._history(run, open_trial.objective):
            step = first_step + iteration
            # Optuna accepts each step once, and no NaN.
            if step not in open_trial.reported and math.isfinite(value):
                open_trial.trial.report(value, step)
                open_trial.reported.add(step)
                has_news = True
        if has_news and open_trial.trial.should_prune():
            open_trial.is_pruned = True
        return not open_trial.is_pruned

    def note(self, finished: FinishedRun) -> None:
        """Record a run's objective; the trial ends with its last seed."""
        run, status = finished.run, finished.status
        trial = self._find_trial(run)
        trial.at_work.discard(run.seed)
        if status is RunStatus.STOPPED:
            return
        value = self._value(run, trial.objective) if status is RunStatus.ENDED else None
        if value is not None:
            trial.values[run.seed] = value
        trial.has_failed |= value is None and status is not RunStatus.PRUNED
        if status is RunStatus.PRUNED or trial.has_failed or not trial.waiting:
            self._end(trial, is_pruned=status is RunStatus.PRUNED)

    def _hand_out(self, trial: _OpenTrial) -> PlannedRun:
        run = trial.waiting.pop(0)
        trial.at_work.add(run.seed)
        return run

    def _find_trial(self, run: PlannedRun) -> _OpenTrial:
        """Return the trial of a run in progress; several may have equal arms."""
        for trial in self._open:
            if trial.arm == run.arm and run.seed in trial.at_work:
                return trial
        raise LookupError(f"no open trial has the run {run.run_id}")

    def _begin(self, trial: Trial) -> _OpenTrial:
        arm = self._arm(trial)
        key = arm.trainer, arm.scenario
        if key not in self._objectives:
            self._objectives[key] = self.plan.objective_of(self.plan.resolve(arm))
        runs = [PlannedRun(arm, seed) for seed in self.plan.seeds]
        open_trial = _OpenTrial(trial, arm, self._objectives[key], runs)
        self._open.append(open_trial)
        self._write_trials()
        return open_trial

    def _arm(self, trial: Trial) -> Arm:
        trainer = _suggest_name(trial, "trainer", self.plan.trainers)
        scenarios = self.plan.scenarios
        scenario = _suggest_name(trial, "scenario", scenarios) if scenarios else None
        values = {
            path: _suggest_value(trial, path, choice)
            for path, choice in self.plan.choices_of(trainer).items()
        }
        trial.set_user_attr("arm", {"trainer": trainer, "scenario": scenario, "values": values})
        return Arm(trainer, scenario, values, self.plan.fixed)

    def _end(self, ended: _OpenTrial, *, is_pruned: bool) -> None:
        states = self._optuna.trial.TrialState
        self._open.remove(ended)
        if is_pruned:
            self._study.tell(ended.trial, state=states.PRUNED)
        elif ended.has_failed or not ended.values:
            self._study.tell(ended.trial, state=states.FAIL)
        else:
            mean_over_seeds = sum(ended.values.values()) / len(ended.values)
            self._study.tell(ended.trial, mean_over_seeds)
        self._write_trials()

    def _history(self, run: PlannedRun, name: str) -> list[tuple[int, float]]:
        rows = read_rows(run.folder_in(self.directory) / METRICS_FILE)
        return [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]

    def _value(self, run: PlannedRun, objective: str) -> float | None:
        """Return a run's objective, of dev figures the best; None without a finite value."""
        if objective.startswith(DEV):
            values = [value for _, value in self._history(run, objective)]
        else:
            figures = read_results(run.folder_in(self.directory)).figures
            values = [
                figure.value
                for figure in figures
                if figure.when == "after" and figure.name == objective
            ][:1]
        finite_values = [value for value in values if math.isfinite(value)]
        choose_best = max if self.search.direction == "maximize" else min
        return choose_best(finite_values, default=None)

    def _open_study(self) -> Study:
        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            study: Study = optuna.create_study(
                storage=f"sqlite:///{(self.directory / STUDY_FILE).absolute()}",
                study_name="sweep",
                direction=self.search.direction,
                pruner=PRUNERS.get(self.search.pruner)(self.search),
                load_if_exists=True,
            )
        except Exception as error:
            raise RunDirectoryError(
                f"the study {self.directory / STUDY_FILE} cannot be read: {reason_of(error)}. "
                "Restore the file, or give another --sweep-dir."
            ) from error
        identity = _identity(self.plan, self.search)
        stored_identity = study.user_attrs.get("asked")
        if stored_identity is None:
            study.set_user_attr("asked", identity)
        elif _with_current_objective(stored_identity) != identity:
            raise RunDirectoryError(
                f"the study in {self.directory} is of another space, objective or direction. Give "
                "another --sweep-dir; only --num-trials may change."
            )
        return study

    def _write_trials(self) -> None:
        """Store the trials so that reading the sweep does not need Optuna."""
        states = self._optuna.trial.TrialState
        records = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                # Optuna takes the last evaluation for the value of a pruned trial.
                "value": trial.value if trial.state is states.COMPLETE else None,
                **trial.user_attrs["arm"],
            }
            for trial in self._study.get_trials(deepcopy=False)
            if "arm" in trial.user_attrs
        ]
        write_atomically(self.directory / TRIALS_FILE, json.dumps(records, indent=1) + "\n")


def read_trials(directory: Path, plan: SweepPlan) -> list[TrialRecord]:
    """Read the trials of a search, in the order of their proposal."""
    path = directory / TRIALS_FILE
    if not path.exists():
        return []
    try:
        return [
            TrialRecord(
                number=int(record["number"]),
                state=str(record["state"]),
                value=None if record["value"] is None else float(record["value"]),
                arm=_stored_arm(record, plan),
            )
            for record in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunDirectoryError(
            f"{TRIALS_FILE} of {directory} is broken: {error}. Continue the sweep to rewrite it."
        ) from error


def _stored_arm(stored: Mapping[str, Any], plan: SweepPlan) -> Arm:
    trainer, scenario = stored["trainer"], stored["scenario"]
    scenarios: list[str | None] = [*plan.scenarios] or [None]
    if trainer not in plan.trainers or scenario not in scenarios:
        raise ValueError(f"the sweep has no trials of {trainer!r} on {scenario!r}")
    values = {str(path): str(value) for path, value in stored["values"].items()}
    return Arm(trainer, scenario, values, plan.fixed)


def _identity(plan: SweepPlan, search: SearchParameters) -> dict[str, Any]:
    """Return the values that all trials of a study have in common."""
    search_values = search.to_dict()
    return {
        "space": search_values["space"],
        "objective": search_values["objective"],
        "direction": search_values["direction"],
        "trainers": plan.trainers,
        "scenarios": plan.scenarios,
        "seeds": plan.seeds,
        "grid": {path: [as_text(value) for value in values] for path, values in plan.grid.items()},
        "overrides": plan.overrides,
        "parameters": plan.parameters,
    }


def _with_current_objective(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a study, perhaps of an earlier version, with its current objective."""
    objective = identity.get("objective")
    return {**identity, "objective": objective and current_figure_name(objective)}


def _suggest_name(trial: Trial, name: str, values: list[str]) -> str:
    # A choice of one would be a parameter of the study, which then could not get a second.
    return str(trial.suggest_categorical(name, values)) if len(values) > 1 else values[0]


def _suggest_value(trial: Trial, path: str, choice: Choice) -> str:
    if not isinstance(choice, Range):
        return str(trial.suggest_categorical(path, [as_text(value) for value in choice]))
    if choice.is_whole:
        return as_text(
            trial.suggest_int(path, int(choice.low), int(choice.high), log=choice.is_log)
        )
    return as_text(trial.suggest_float(path, choice.low, choice.high, log=choice.is_log))


def best_first(trials: list[TrialRecord], direction: str) -> list[TrialRecord]:
    """Sort complete trials before the others, the best first."""
    sign = -1.0 if direction == "maximize" else 1.0

    def rank(trial: TrialRecord) -> tuple[bool, float, int]:
        if trial.state != "complete" or trial.value is None:
            return True, 0.0, trial.number
        return False, sign * trial.value, trial.number

    return sorted(trials, key=rank)
