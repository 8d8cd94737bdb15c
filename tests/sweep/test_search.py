"""Searches: proposals, pruning, resuming, and a sweep page's description of its arms."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from nip_astra import errors
from nip_astra.cli import sweep as sweeping
from nip_astra.sweep import runner
from nip_astra.sweep.plan import FinishedRun, RunStatus, SweepPlan, read_stored_plan, space_of
from nip_astra.sweep.results import SweepResults, as_csv, read_sweep
from nip_astra.sweep.runner import Job, Launcher, RunSpec, SweepOptions, SweepRunner
from nip_astra.sweep.search import StudyQueue, TrialRecord, read_trials
from nip_astra.tracking.run_lock import run_lock
from nip_astra.utils.formatting import decimal
from tests.kit.command_line import plugins_forgotten_after
from tests.kit.messages import says

DEV = "dev/mean_reward"


class PlayedRun(Job):
    """A run of five dev evaluations, one per poll."""

    def __init__(self, spec: RunSpec, course: Callable[[float, int], float]) -> None:
        self.folder = Path(spec.folder)
        self.folder.mkdir(exist_ok=True)
        words = [word for word in spec.begin if word.startswith("training.lr=")]
        self.lr = float(words[-1].partition("=")[2])
        self.course = course
        (self.folder / "hyper_parameters.yaml").write_text(f"training: {{lr: {self.lr}}}\n")
        self.is_stopped, self.step = False, 0

    def has_ended(self) -> bool:
        if self.is_stopped:
            return True
        self.step += 1
        value = self.course(self.lr, self.step)
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": self.step, DEV: value, "loss": -value}) + "\n")
        if self.step < 5:
            return False
        (self.folder / "results.json").write_text(json.dumps({"after": {"mean_reward": value}}))
        (self.folder / "report.html").write_text("")
        return True

    def stop(self) -> None:
        self.is_stopped = True


class Stage(Launcher):
    """Plays runs in this process, and can be killed after a given number of starts."""

    def __init__(
        self, course: Callable[[float, int], float], num_at_once: int = 1, kill_at: int = 10**9
    ) -> None:
        self.num_at_once = num_at_once
        self.course, self.kill_at = course, kill_at
        self.specs: list[RunSpec] = []

    @property
    def begun(self) -> list[str]:
        return [Path(spec.folder).name for spec in self.specs]

    def start(self, spec: RunSpec) -> Job:
        if len(self.specs) == self.kill_at:
            raise KeyboardInterrupt
        self.specs.append(spec)
        return PlayedRun(spec, self.course)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nip_astra.sweep.runner.POLL_SECONDS", 0.0)


def peak(lr: float, step: int) -> float:
    """Best at a learning rate of 1e-3, and better with each step."""
    return step / 5 - abs(math.log10(lr) + 3)


def plan_of(**search: Any) -> SweepPlan:
    rates = {"training.lr": {"low": 1e-5, "high": 1e-1, "is_log": True}}
    given = {"space": rates, "num_trials": 9, "num_startup_trials": 3, "pruner": "none"}
    values = {"trainers": ["ast_dpo"], "seeds": [0], "overrides": ["training.eval_period=1"]}
    return SweepPlan.from_dict({**values, "search": given | search})


def rate_of(trial: TrialRecord) -> float:
    return float(trial.arm.values["training.lr"])


def search(plan: SweepPlan, folder: Path, stage: Stage) -> list[FinishedRun]:
    return SweepRunner(plan, folder, launcher=stage).run()


def test_ranges_are_whole_even_or_by_their_logarithm() -> None:
    assert space_of(["a=1..8", "b=log 1e-5..1e-3", "c = 0..0.5"]) == {
        "a": {"low": 1, "high": 8, "is_log": False},
        "b": {"low": 1e-5, "high": 1e-3, "is_log": True},
        "c": {"low": 0, "high": 0.5, "is_log": False},
    }
    for wrong in (["a"], ["a=1,2"], ["=1..2"], ["a=1..2", "a=1..3"]):
        with pytest.raises(errors.ConfigurationError, match="--search"):
            space_of(wrong)
    with pytest.raises(
        errors.ConfigurationError, match=r"search\.space\.training\.lr: .*below its high"
    ):
        plan_of(space={"training.lr": {"low": 2.0, "high": 1.0}})


def test_a_search_finds_and_reports_the_best_values(tmp_path: Path) -> None:
    plan = plan_of()
    search(plan, tmp_path, Stage(peak))
    trials = read_trials(tmp_path, plan)
    assert [one.number for one in trials] == list(range(9))
    assert {one.state for one in trials} == {"complete"}
    values = [peak(rate_of(one), 5) for one in trials]
    assert [one.value for one in trials] == pytest.approx(values)
    swept = read_sweep(tmp_path)
    best = max(trials, key=lambda one: one.value or -math.inf)
    assert swept.arms[0] == best.arm
    assert abs(math.log10(rate_of(best)) + 3) < 0.5
    assert swept.selected_by is None
    swept.write()
    page = (tmp_path / "report.html").read_text()
    assert "Trials" in page
    assert best.arm.name in page


def test_a_search_by_a_test_metric_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(objective="mean_reward", num_trials=2)
    search(plan, tmp_path, Stage(peak))
    swept = read_sweep(tmp_path)
    assert swept.selected_by == "mean_reward"
    assert {row["selected_by"] for row in (*swept.rows, *swept.summary())} == {"mean_reward"}
    swept.write()
    assert "mean_reward on the test data" in (tmp_path / "report.html").read_text()
    capsys.readouterr()
    sweeping._show(swept, [], as_json=False)
    assert "selected by mean_reward" in capsys.readouterr().out
    sweeping._show(swept, [], as_json=True)
    assert '"selected_by": "mean_reward"' in capsys.readouterr().out


def test_a_killed_search_goes_on_with_the_trials_that_it_would_have_made(tmp_path: Path) -> None:
    plan = plan_of(num_trials=3, num_startup_trials=1).model_copy(update={"seeds": [0, 1]})
    whole, halted = Stage(peak), Stage(peak, kill_at=3)
    search(plan, tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        search(plan, tmp_path / "halted", halted)
    # The third run, the first seed of the second trial, had ended; the second had begun.
    again = Stage(peak)
    search(plan, tmp_path / "halted", again)
    assert whole.begun == halted.begun + again.begun
    assert read_trials(tmp_path / "halted", plan) == read_trials(tmp_path / "whole", plan)


def test_a_trial_that_is_worse_than_the_median_is_stopped(tmp_path: Path) -> None:
    plan = plan_of(pruner="median", num_startup_trials=1, sampler="random", num_trials=4)
    finished = search(plan, tmp_path, Stage(peak))
    trials = read_trials(tmp_path, plan)
    pruned = [one for one in trials if one.state == "pruned"]
    kept = [one for one in trials if one.state == "complete"]
    assert {one.value for one in pruned} == {None}, "some are pruned"
    assert max(trials, key=lambda one: peak(rate_of(one), 5)) in kept
    for one in pruned:
        better = sum(peak(rate_of(other), 5) > peak(rate_of(one), 5) for other in kept)
        assert 2 * better >= len([other for other in kept if other.number < one.number])
    assert [one.status for one in finished].count(RunStatus.PRUNED) == len(pruned)


def test_a_failed_trial_does_not_end_the_search(tmp_path: Path) -> None:
    def course(lr: float, step: int) -> float:
        return math.nan if lr > 1e-2 else peak(lr, step)

    plan = plan_of(num_trials=5, sampler="random", direction="minimize")
    search(plan, tmp_path, Stage(course, num_at_once=3))
    states = {(one.state, rate_of(one) > 1e-2) for one in read_trials(tmp_path, plan)}
    assert states == {("complete", False), ("fail", True)}


def test_a_study_of_another_space_is_not_gone_on_with(tmp_path: Path) -> None:
    search(plan_of(num_trials=1), tmp_path, Stage(peak))
    other = plan_of(space={"training.lr": {"low": 1e-6, "high": 1e-1, "is_log": True}})
    with pytest.raises(errors.RunDirectoryError, match="of another space"):
        search(other, tmp_path, Stage(peak))
    with run_lock(tmp_path), pytest.raises(errors.RunDirectoryError, match="in use"):
        search(other, tmp_path, Stage(peak))
    assert read_stored_plan(tmp_path) == plan_of(num_trials=1), "the refused plan is not stored"
    more = Stage(peak)
    search(plan_of(num_trials=2), tmp_path, more)
    assert len(more.begun) == 1


def test_a_search_without_dev_evaluations_is_refused() -> None:
    plan = plan_of().model_copy(update={"overrides": []})
    with pytest.raises(errors.ConfigurationError, match="eval_period=2"):
        plan.check()
    plan_of().check()
    plan_of(objective="failure_rate").check()


def test_parameters_of_one_trainer_are_not_searched_with_another() -> None:
    grid = {"ast_dpo.beta": [0.1, 0.2], "training.num_epochs": [2]}
    search = {"space": {"training.lr": {"low": 1e-5, "high": 1e-3}}}
    plan = SweepPlan.from_dict({"trainers": ["ast_dpo", "ast_ipo"], "grid": grid, "search": search})
    assert set(plan.choices_of("ast_dpo")) == {"ast_dpo.beta", "training.lr"}
    assert set(plan.choices_of("ast_ipo")) == {"training.lr"}
    assert plan.fixed == {"training.num_epochs": "2"}


def test_a_page_compares_arms_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"training.lr": ["1e-3", "1e-2", "1e-1"], "training.num_epochs": ["2"]}
    plan = SweepPlan(trainers=["ast_dpo"], seeds=[0, 1, 2], grid=grid)

    class Failing(Stage):
        def start(self, spec: RunSpec) -> Job:
            job = super().start(spec)
            if "training.lr=1e-1" in spec.begin:
                Path(spec.log).write_text("Traceback\nit broke <here>\n")
                job.stop()
            return job

    noise = iter(range(100))
    played = Failing(lambda lr, step: 3 + peak(lr, step) + next(noise) % 7 / 50)
    finished = search(plan, tmp_path, played)
    assert [one.status for one in finished].count(RunStatus.FAILED) == 3
    again = search(plan, tmp_path, Failing(peak))
    times = {one.status: one.seconds == 0.0 for one in again}
    assert times == {RunStatus.ENDED: True, RunStatus.FAILED: False}
    swept = read_sweep(tmp_path)
    swept.write()
    page = (tmp_path / "report.html").read_text()
    assert says(page, "B less A", "it broke &lt;here&gt;", "training.lr")
    assert page.count('class="area') >= 2
    rows = swept.summary(["mean_reward"])
    assert [row["arm"] for row in rows] == ["ast_dpo lr=1e-3", "ast_dpo lr=1e-2"]
    assert rows[1]["p_holm"] == rows[1]["p"] is not None
    assert rows[1]["less_first"] == pytest.approx(rows[1]["mean"] - rows[0]["mean"])
    assert "less_first_low" in as_csv(rows)
    values = [float(value) for value in rows[0]["values"].split()]
    assert len(set(values)) == 3
    assert ", ".join(map(decimal, values)) in page
    (caution,) = swept.cautions(["mean_reward"])
    assert caution.partition("'")[0] in page
    capsys.readouterr()
    sweeping._show(swept, ["mean_reward"], as_json=False)
    output = capsys.readouterr().out
    assert {f"{value:.3g}" for value in values} <= set(output.replace(",", " ").split())
    assert " ".join(caution.split()) in " ".join(output.split())
    assert (tmp_path / "summary.csv").read_bytes().decode() == as_csv(swept.summary())
    frame = pytest.importorskip("pandas").read_parquet(tmp_path / "table.parquet")
    assert frame["value"].tolist() == [row["value"] for row in swept.rows]


def test_runs_are_grouped_and_tagged_by_their_differences(tmp_path: Path) -> None:
    grid = {"training.lr": ["1e-3", "1e-2"], "training.num_epochs": ["2"]}
    plan = SweepPlan(trainers=["ast_dpo"], seeds=[0], grid=grid)
    stage, options = Stage(peak), SweepOptions(settings={"wandb_tags": ["mine"]})
    SweepRunner(plan, tmp_path / "rates", options, launcher=stage).run()
    for spec, rate in zip(stage.specs, grid["training.lr"], strict=True):
        given = {f'wandb_tags=["mine", "ast_dpo", "lr={rate}"]', 'wandb_group="rates"'}
        assert given <= {*spec.begin} & {*spec.resume}
        assert "training.num_epochs=2" in spec.begin


PLUGIN = """
import nip_astra as na
from tests.sweep.test_search import Stage, peak

@na.register_sweep_sampler("fixed")
def fixed(search, seed):
    from optuna.samplers import PartialFixedSampler, RandomSampler
    return PartialFixedSampler({"training.lr": 1e-2}, RandomSampler(seed=seed))

@na.register_pruner("strict")
def strict(search):
    from optuna.pruners import ThresholdPruner
    return ThresholdPruner(lower=10.0)

@na.register_launcher("here")
class Here(Stage):
    def __init__(self, options):
        super().__init__(peak, options.num_processes)
"""


def test_a_plug_in_registers_a_sampler_a_pruner_and_a_launcher(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    plan = plan_of(sampler="fixed", pruner="strict", num_trials=2)
    with plugins_forgotten_after():
        runner.run_sweep(
            tmp_path / "sweep",
            options=SweepOptions(place="here", num_processes=2),
            progress=False,
            **plan.to_dict() | {"plugins": [str(plugin)]},
        )
    trials = read_trials(tmp_path / "sweep", plan)
    assert [one.arm.values["training.lr"] for one in trials] == ["0.01", "0.01"]
    assert [one.state for one in trials] == ["pruned", "pruned"]


@pytest.mark.parametrize(
    ("search", "place", "nearest"),
    [
        ({"sampler": "tpee"}, "processes", "tpe"),
        ({"pruner": "medial"}, "processes", "median"),
        ({}, "rai", "ray"),
    ],
)
def test_unknown_parts_of_a_sweep_are_refused(
    search: dict[str, str], place: str, nearest: str
) -> None:
    with pytest.raises(errors.UnknownNameError, match=f"Did you mean '{nearest}'"):
        runner.check_sweep(plan_of(**search), SweepOptions(place=place))


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'nip_astra\[sweep\]'"):
        StudyQueue(plan_of(), tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'nip_astra\[sweep\]'"):
        SweepResults(plan_of(), tmp_path, []).write_parquet(tmp_path / "table.parquet")
