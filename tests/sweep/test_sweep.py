"""Sweeps: their runs, their resumption, their tables and their bar."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from nip_astra.cli.sweep import _table
from nip_astra.errors import ConfigurationError, ParameterError, RunDirectoryError, UnknownNameError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.sweep.plan import (
    MAX_RUNS,
    Arm,
    FinishedRun,
    PlannedRun,
    RequestedFigures,
    RunStatus,
    SweepPlan,
    grid_of,
    read_failures,
    read_plan,
    seeds_of,
    shard_of,
)
from nip_astra.sweep.results import SweepResults, read_sweep
from nip_astra.sweep.runner import (
    FIRST_GUESS,
    Job,
    LocalProcesses,
    RunSpec,
    SweepBar,
    SweepOptions,
    SweepRunner,
    _Process,
    check_sweep,
    run_sweep,
)
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.utils.children import start_program
from tests.kit.bars import Bars
from tests.kit.command_line import CommandLine, plugins_forgotten_after
from tests.kit.messages import says
from tests.kit.serving import wait_until

ROOT = Path(__file__).parents[2]


def test_every_combination_is_run_and_every_arm_comes_before_the_next_seed() -> None:
    plan = SweepPlan(
        trainers=["ast_dpo", "ast_ipo"], seeds=[3, 4], grid={"training.lr": ["1e-4", "1e-5"]}
    )
    names = [(run.arm.name, run.seed) for run in plan.runs]
    arms = ["ast_dpo lr=1e-4", "ast_dpo lr=1e-5", "ast_ipo lr=1e-4", "ast_ipo lr=1e-5"]
    assert names == [(arm, seed) for seed in (3, 4) for arm in arms]
    assert len({run.run_id for run in plan.runs}) == 8
    more = plan.model_copy(update={"grid": {"training.lr": ["1e-3", "1e-4", "1e-5"]}})
    assert {run.run_id for run in plan.runs} < {run.run_id for run in more.runs}


def test_folders_are_named_by_the_swept_values_and_older_names_are_kept(tmp_path: Path) -> None:
    given: dict[str, Any] = {"trainers": ["ast_dpo"], "seeds": [3]}
    grid = {"training.lr": ["1e-4", "1e-5"], "ast_dpo.x": ["a/../b " * 50]}
    plan = SweepPlan(**given, grid=grid, overrides=["training.num_iterations=2"])
    names = [run.folder_in(tmp_path).name for run in plan.runs]
    assert len(set(names)) == 2
    for name, value in zip(names, grid["training.lr"], strict=True):
        assert name.startswith(f"ast_dpo-lr_{value}")
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}", name), "safe as a run id"
    # A sweep over only one of them has the same runs, in the same folders.
    (tmp_path / names[0]).mkdir()
    less = SweepPlan(**given, grid=grid | {"training.lr": ["1e-4"]}, overrides=plan.overrides)
    assert [run.folder_in(tmp_path).name for run in less.runs] == names[:1]
    # Before 0.1.0 the name was the id.
    (tmp_path / plan.runs[1].run_id).mkdir()
    assert plan.runs[1].folder_in(tmp_path).name == plan.runs[1].run_id
    assert SweepPlan(**given).runs[0].folder_in(tmp_path).name == "ast_dpo-s3"


def test_values_seeds_and_shards_are_parsed() -> None:
    assert grid_of(["a.b=1,2", "c=[1,2],[3]", "d='x,y',z"]) == {
        "a.b": ["1", "2"],
        "c": ["[1,2]", "[3]"],
        "d": ["'x,y'", "z"],
    }
    assert seeds_of("0..2,7") == [0, 1, 2, 7]
    runs = SweepPlan(trainers=["ast_dpo"], seeds=list(range(7))).runs
    parts = [shard_of(runs, f"{k}/3") for k in (1, 2, 3)]
    assert sorted(run.seed for part in parts for run in part) == list(range(7))
    assert [len(part) for part in parts] == [3, 2, 2]


DIGITS = ("\N{SUPERSCRIPT TWO}", "0..\N{SUPERSCRIPT TWO}", "9" * 5000)
"""Digits that are no number."""


@pytest.mark.parametrize(
    ("parse", "option", "wrong"),
    [
        *((grid_of, "--set", one) for one in (["a"], ["=1"], ["a=1", "a=2"])),
        *((seeds_of, "--seeds", one) for one in ("x", "2..0", "", "1.5", f"0..{MAX_RUNS}")),
        *((seeds_of, "--seeds", one) for one in DIGITS),
        *((partial(shard_of, []), "--shard", one) for one in ("0/3", "4/3", "2", "a/b")),
        *((partial(shard_of, []), "--shard", f"{one}/4") for one in DIGITS),
    ],
)
def test_malformed_text_is_refused(parse: Callable[[Any], object], option: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=option):
        parse(wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"seeds": [1, 1]}, "1"),
        ({"seeds": [0, -1]}, r"seeds\.1"),
        ({"trainers": ["ast_dpo", "ast_dpo"]}, "ast_dpo"),
        ({"scenarios": ["pocket_chat", "pocket_chat"]}, "pocket_chat"),
        ({"grid": {"training.lr": ["1e-4", "0.0001"]}}, r"training\.lr"),
        ({"search": {"space": {"training.lr": [0.001, "1e-3"]}}}, r"training\.lr"),
        ({"search": {"space": {"training.lr": []}}}, r"training\.lr"),
        ({"grid": {"a.b": [1, 2]}, "search": {"space": {"a.b": [3, 4]}}}, r"a\.b"),
        ({"grid": {"seed": [1, 2]}}, "--seeds"),
        ({"grid": {" trainer": ["ast_ipo"]}}, "--trainer"),
        ({"overrides": ["scenario=pocket_chat"]}, "--scenario"),
        ({"search": {"space": {"seed": {"low": 0, "high": 9}}}}, "--seeds"),
    ],
)
def test_copies_of_a_run_do_not_count_as_seeds_or_arms(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        SweepPlan.from_dict({"trainers": ["ast_dpo"]} | wrong)


def test_a_sweep_continues_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "mine.yaml"):
        (tmp_path / name).touch()
    plan = read_plan(
        None, {"trainers": "mine", "plugin": ["mine.py", "json"], "parameters": "mine.yaml"}
    )
    assert plan.plugins == [str(tmp_path / "mine.py"), "json"]
    assert plan.parameters == str(tmp_path / "mine.yaml")


def test_arms_that_resolve_to_one_experiment_are_refused() -> None:
    scenarios = ["pocket_chat", str(ROOT / "scenarios" / "pocket_chat")]
    with pytest.raises(ConfigurationError, match="ast_dpo pocket_chat"):
        SweepPlan(trainers=["ast_dpo"], scenarios=scenarios).check()


def test_figures_that_no_trainer_reports_are_refused_before_the_first_run() -> None:
    plan = SweepPlan(trainers=["ast_dpo", "solo_agent"], seeds=[0])
    RequestedFigures(plan, ["failure_rate", "verifier/test_accuracy"])
    with pytest.raises(UnknownNameError, match="failure_rate"):
        check_sweep(plan, SweepOptions(metrics=["failur_rate"]))
    search = {"space": {"training.lr": {"low": 1e-5, "high": 1e-3}}, "objective": "dev/failure"}
    values = {"trainers": ["ast_dpo"], "overrides": ["training.eval_period=1"], "search": search}
    searching = SweepPlan.from_dict(values)
    with pytest.raises(UnknownNameError, match="dev/failure_rate"):
        RequestedFigures(searching)


def test_figures_of_a_plugin_are_checked_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import nip_astra as na\n"
        "@na.register_trainer('mine')\n"
        "class Mine(na.AstDpoTrainer):\n"
        "    pass\n"
    )
    results = {"after": {"wonders": 3.0, "nothing": None, "failure_rate": 0.5}}
    with plugins_forgotten_after():
        plan = SweepPlan(trainers=["mine"], seeds=[0], plugins=[str(plugin)])

        def play_one(runner: SweepRunner, *, on_end: Any, **_: Any) -> None:
            folder = plan.runs[0].folder_in(runner.directory)
            folder.mkdir(parents=True)
            (folder / HYPER_PARAMETERS).write_text("")
            (folder / "results.json").write_text(json.dumps(results))
            on_end(FinishedRun(plan.runs[0], RunStatus.ENDED, 1.0))

        monkeypatch.setattr(SweepRunner, "run", play_one)
        options = SweepOptions(metrics=["wonders", "nothing", "failur_rate"])
        with pytest.raises(UnknownNameError, match=r"'failur_rate'.*'failure_rate'"):
            run_sweep(tmp_path / "sweep", options=options, **plan.to_dict())


def test_a_sweep_takes_values_of_numpy(tmp_path: Path) -> None:
    grid = {"training.num_iterations": np.arange(1, 3), "training.lr": [np.float32(0.5)]}
    options = SweepOptions(place="nowhere")
    with pytest.raises(UnknownNameError, match="nowhere"):
        run_sweep(tmp_path, options=options, trainers=("ast_dpo",), seeds=np.arange(2), grid=grid)


def test_a_wrong_combination_is_reported_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("trainers: [ast_dpo]\ngrid: {training.lr: [1e-5, fast]}\n")
    with pytest.raises(ParameterError, match=r"training\.lr"):
        read_plan(file).check()
    file.write_text("trainer: ast_dpo\n")
    with pytest.raises(ParameterError, match="trainers"):
        read_plan(file)


def test_runs_that_began_with_other_parameters_are_not_counted_again(tmp_path: Path) -> None:
    def plan(*overrides: str, seeds: Sequence[int] = (0,)) -> SweepPlan:
        return SweepPlan(trainers=["ast_dpo"], seeds=list(seeds), overrides=list(overrides))

    first = plan("training.lr=1e-4")
    (arm,) = first.arms
    run = RunDirectory.create(tmp_path, arm.folder_in(tmp_path, 0).name)
    hyper_params = first.resolve(arm).hyper_params.to_dict()
    # A parameter that a later version adds is unknown.
    run.write_yaml(HYPER_PARAMETERS, {n: v for n, v in hyper_params.items() if n != "text_rl"})
    run.write_yaml("settings.yaml", {"test_run": False})
    first.check(tmp_path)
    plan("training.lr=1e-4", seeds=(1, 0)).check(tmp_path)
    plan("training.lr=2e-4", seeds=(1,)).check(tmp_path)
    with pytest.raises(ConfigurationError, match=r"training\.lr: 0\.0001 there, 0\.0002 now"):
        plan("training.lr=2e-4", seeds=(1, 0)).check(tmp_path)
    with pytest.raises(ConfigurationError, match=r"settings\.test_run: false there, true now"):
        check_sweep(first, SweepOptions(settings={"test_run": True}), tmp_path)


def test_the_runs_of_a_sweep_are_listed_as_json(cli: CommandLine) -> None:
    command = ("sweep", "--trainer", "ast_dpo", "--seeds", "3,4", "--dry-run", "--json")
    listed = json.loads(cli.ok(*command).out)
    assert (listed["plan"]["trainers"], listed["plan"]["seeds"]) == (["ast_dpo"], [3, 4])
    runs = [(one["run_id"], one["status"]) for one in listed["runs"]]
    assert runs == [("ast_dpo-s3", "new"), ("ast_dpo-s4", "new")]


def rows_of(
    plan: SweepPlan, folder: Path, value: Callable[[PlannedRun], float], name: str
) -> list[dict[str, Any]]:
    """Rows of a single metric, as a sweep reads them from its folder."""
    same = {"when": "after", "name": name, "counts": ""}
    return [
        {**same, "run_id": run.folder_in(folder).name, "seed": run.seed, "value": value(run)}
        for run in plan.runs
    ]


@pytest.mark.parametrize(
    ("values", "has_caution"),
    [
        ([0.8, 0.81, 0.79, 0.8, 0.82], True),
        # A failed seed is seen, and makes the interval wide.
        ([0.8, 0.81, 0.79, 0.8, 0.1], False),
        ([0.8, 0.81, 0.1], True),
        ([0.8 + 0.001 * seed for seed in range(10)], True),
        ([0.8 + 0.001 * seed for seed in range(29)], False),
    ],
)
def test_a_caution_about_seeds_follows_their_spread(
    tmp_path: Path, values: list[float], has_caution: bool
) -> None:
    plan = SweepPlan(trainers=["ast_dpo"], seeds=list(range(len(values))))
    rows = rows_of(plan, tmp_path, lambda run: values[run.seed], "failure_rate")
    cautions = SweepResults(plan, tmp_path, rows).cautions(["failure_rate"])
    assert bool(cautions) is has_caution
    if has_caution:
        assert f"{0.9 ** len(values):.0%}" in cautions[0]


def test_means_and_differences_are_those_of_student(tmp_path: Path) -> None:
    plan = SweepPlan(trainers=["ast_dpo", "ast_ipo"], seeds=[0, 1, 2])
    values = {"ast_dpo": [0.2, 0.4, 0.9], "ast_ipo": [0.3, 0.7, 0.8]}
    rows = rows_of(plan, tmp_path, lambda run: values[run.arm.name][run.seed], "failure_rate")
    swept = SweepResults(plan, tmp_path, rows)
    one, two = plan.arms
    mean = swept.over_seeds(one, "failure_rate")
    assert mean is not None
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem(values["ast_dpo"]))
    # A rate is at least 0 and at most 1.
    assert (low, high) < (0.0, 1.5)
    assert (mean.mean, mean.low, mean.high) == pytest.approx((0.5, 0.0, 1.0))
    rewards = SweepResults(plan, tmp_path, [row | {"name": "mean_reward"} for row in rows])
    assert rewards.over_seeds(one, "mean_reward")[1:4] == pytest.approx((0.5, low, high))  # type: ignore[index]
    assert "3 seeds" in swept.cautions(["failure_rate"])[0]
    assert rewards.summary()[0]["values"] == "0.2 0.4 0.9"
    beside = swept.difference(two, one, "failure_rate")
    assert beside is not None
    expected = stats.ttest_rel(values["ast_ipo"], values["ast_dpo"]).pvalue
    assert (beside.mean, beside.p) == pytest.approx((0.1, float(expected)))
    opposite = {"ast_dpo": (0.0, 0.0, 1.0), "ast_ipo": (1.0, 1.0, 0.0)}
    apart = rows_of(plan, tmp_path, lambda run: opposite[run.arm.name][run.seed], "failure_rate")
    wide = SweepResults(plan, tmp_path, apart)
    # Two rates differ by 1 at most.
    assert wide.difference(two, one, "failure_rate")[1:3] == (-1.0, 1.0)  # type: ignore[index]
    same = SweepResults(plan, tmp_path, [row | {"value": 0.5} for row in rows])
    assert same.over_seeds(one, "failure_rate")[1:4] == (0.5, None, None)  # type: ignore[index]


@pytest.mark.parametrize("values", [(0.1, 0.3), (0.7, 12345.1)])
def test_equal_differences_are_no_evidence(values: tuple[float, float], tmp_path: Path) -> None:
    plan = SweepPlan(trainers=["ast_dpo", "ast_ipo"], seeds=[0, 1])
    one, two = plan.arms
    more = {one.name: 0.0, two.name: 0.1}
    rows = rows_of(plan, tmp_path, lambda run: values[run.seed] + more[run.arm.name], "mean_reward")
    swept = SweepResults(plan, tmp_path, rows).difference(two, one, "mean_reward")
    assert swept is not None
    assert swept.mean == pytest.approx(0.1)
    assert (swept.low, swept.high, swept.p) == (None, None, None)


def test_rates_have_their_counts_beside_them(tmp_path: Path) -> None:
    plan = SweepPlan(trainers=["self_hosted_grpo"], scenarios=["arithmetic"], seeds=[0, 1])
    (tmp_path / "sweep.json").write_text(json.dumps(plan.to_dict()))
    for run, num_correct in zip(plan.runs, (111, 290), strict=True):
        folder = run.folder_in(tmp_path)
        folder.mkdir(parents=True)
        (folder / HYPER_PARAMETERS).write_text("")
        counts = {"num_correct": num_correct, "num_answers": 300, "mean_reward": 0.25}
        results = {"after": {"accuracy": num_correct / 300, **counts}}
        (folder / "results.json").write_text(json.dumps(results))
    swept = read_sweep(tmp_path)
    stream = StringIO()
    Console(file=stream, width=200).print(_table(swept, "accuracy"))
    assert says(stream.getvalue(), "111 of 300", "290 of 300")
    swept.write()
    assert "290 of 300" in (tmp_path / "report.html").read_text()
    rows = csv.DictReader((tmp_path / "table.csv").open())
    of_name = {row["name"]: row["counts"] for row in rows if row["seed"] == "1"}
    assert (of_name["accuracy"], of_name["mean_reward"]) == ("290 of 300", "")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sweep.json", b"3"),
        ("sweep.json", b"[" * 100_000),
        ("sweep.json", b'{"trainers": ["../../elsewhere"]}'),
        ("sweep.json", b'{"trainers": ["ast_dpo"], "seeds": [' + b"9" * 5000 + b"]}"),
        ("trials.json", b"[" * 100_000),
        ("trials.json", b'[{"number": 0, "state": "complete", "value": "x"}]'),
        (
            "trials.json",
            b'[{"number": 0, "state": "fail", "value": null, "trainer": "../x", "scenario": null}]',
        ),
    ],
)
def test_broken_files_of_a_sweep_are_reported(file: str, content: bytes, tmp_path: Path) -> None:
    search = {"space": {"training.lr": [1e-3, 1e-2]}}
    plan = SweepPlan.from_dict({"trainers": ["ast_dpo"], "search": search})
    with pytest.raises(RunDirectoryError, match="folder of a sweep"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps(plan.to_dict()))
    (tmp_path / "failures.json").write_bytes(b"[1]")
    assert read_failures(tmp_path) == {}
    (tmp_path / file).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=file):
        read_sweep(tmp_path).write()


def test_a_bar_foresees_the_runs_that_have_not_begun(tmp_path: Path) -> None:
    bars = Bars()
    bar = SweepBar(4, lambda run_id: tmp_path / run_id, tqdm_func=bars)
    (drawn,) = bars.opened
    assert drawn.total == 4 * FIRST_GUESS
    runs = [PlannedRun(Arm("ast_dpo", None, {}), seed) for seed in range(4)]
    ids = [run.run_id for run in runs]
    (tmp_path / ids[0]).write_text("3 20\n")
    bar.poll(ids[:2])
    assert (drawn.n, drawn.total) == (3, 80)
    assert drawn.description == "0 of 4 runs, 2 at work"
    bar.note(FinishedRun(runs[0], RunStatus.ENDED, 5.0))
    assert (drawn.n, drawn.total) == (20, 80)
    (tmp_path / ids[1]).write_text("6 40\n")
    bar.poll(ids[1:2])
    assert (drawn.n, drawn.total) == (26, 20 + 40 + 2 * 30)
    bar.note(FinishedRun(runs[1], RunStatus.PRUNED, 5.0))
    assert (drawn.n, drawn.total) == (26, 20 + 6 + 2 * 13)
    bar.note(FinishedRun(runs[2], RunStatus.FAILED, 1.0))
    # Progress before the start does not enter the rate.
    bar.note(FinishedRun(runs[3], RunStatus.ENDED, 0.0))
    assert drawn.n == drawn.total
    assert drawn.initial > 0
    bar.poll([])
    assert drawn.description == "4 of 4 runs, 0 at work, 1 failed"


SMALL = [
    "training.num_iterations=3",
    "training.eval_period=1",
    "training.num_episodes_per_experience=2",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.use_random_search=false",
]


def count_of(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def assert_table_of_single_runs(directory: Path, scenario: Path, alone: Path) -> None:
    """Each row of the table equals the result of a separate run."""
    results = read_sweep(directory)
    assert results.num_ended == len(results.plan.runs)
    assert (directory / "table.csv").read_bytes().decode() == results.to_csv()
    for run in results.plan.runs:
        resolved = resolve_experiment(
            trainer=run.arm.trainer, scenario=str(scenario), overrides=SMALL, seed=run.seed
        )
        folder = run.folder_in(directory)
        run_experiment(resolved, runs_dir=str(alone), run_id=folder.name, progress=False)
        own = alone / folder.name
        swept, single = (json.loads((one / "results.json").read_text()) for one in (folder, own))
        whens = ("before", "after")
        assert [swept[when] for when in whens] == [single[when] for when in whens]
        rows = [row for row in results.rows if row["run_id"] == folder.name]
        rewards = {row["value"] for row in rows if row["name"] == "mean_reward"}
        assert rewards == {single[when]["mean_reward"] for when in whens}
        assert (folder / "metrics.jsonl").read_text() == (own / "metrics.jsonl").read_text()


def test_a_killed_run_is_reported_with_its_signal(tmp_path: Path) -> None:
    class Killed(LocalProcesses):
        def start(self, spec: RunSpec) -> Job:
            code = "import os; os.kill(os.getpid(), 9)"
            return _Process(start_program("a run", ["-c", code], log=Path(spec.log)))

    runner = SweepRunner(
        SweepPlan(trainers=["ast_dpo"], seeds=[0]), tmp_path, launcher=Killed(SweepOptions())
    )
    (finished,) = runner.run()
    assert (finished.status, "SIGKILL" in finished.message) == (RunStatus.FAILED, True)
    read_sweep(tmp_path).write()
    assert "SIGKILL" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_killed_sweep_has_the_table_of_single_runs(tiny_scenario: Path, tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    command = [sys.executable, str(ROOT / "run.py"), "sweep", "--sweep-dir", str(directory)]
    command += ["--trainer", "ast_dpo,ast_ipo,ast_grpo", "--seeds", "0..1", "--num-processes", "2"]
    command += ["--scenario", str(tiny_scenario)]
    for one in SMALL:
        command += ["--set", one]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for num_ended in (1, 3):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

        def has_ended(count: int = num_ended, process: Any = process) -> bool:
            assert process.poll() is None, "it ended before it was killed"
            return count_of(directory, "*/results.json") >= count

        wait_until(has_ended, 300)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[6/6]" in done.stdout
    assert_table_of_single_runs(directory, tiny_scenario, tmp_path / "alone")


@pytest.mark.slow
def test_a_run_survives_the_kill_of_its_ray_worker(tiny_scenario: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    directory = tmp_path / "sweep"
    killed: list[int] = []

    def kill_a_worker() -> None:
        wait_until(lambda: count_of(directory, "*/metrics.jsonl") > 0, 300)
        run = next(directory.glob("*/metrics.jsonl")).parent
        wait_until(lambda: count_of(run, "checkpoints/*/*") > 0, 300)
        process = json.loads((run / ".lock").read_text())["pid"]
        status = Path(f"/proc/{process}/status").read_text()
        worker = int(status.partition("PPid:")[2].split()[0])
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    plan = SweepPlan(
        trainers=["ast_dpo"], scenarios=[str(tiny_scenario)], seeds=[0, 1], overrides=SMALL
    )
    settings = {"checkpoint_period": 1}
    results = run_sweep(
        directory,
        options=SweepOptions(settings=settings, place="ray", num_processes=2, num_cpus=1),
        progress=False,
        **plan.to_dict(),
    )
    killer.join()
    assert killed
    assert results.num_ended == 2
    assert_table_of_single_runs(directory, tiny_scenario, tmp_path / "alone")
    logs = "".join(log.read_text() for log in (directory / "logs").glob("*.txt"))
    assert "SIGTERM" in logs, "the run's own process saved its work"
