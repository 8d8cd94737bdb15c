"""Check of exact resumption: kill a run at a file operation, resume it, and compare the results.

Processes are forked from one that has run once, so that a kill costs one run.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, deserialize

from nip_astra.checkpoints.store import CheckpointStore, inspect_folder
from nip_astra.errors import ConfigurationError, RunDirectoryError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.progress import loops_cut_to
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.tracking.run_directory import HAS_CHECKPOINTS, REPORT, RESULTS
from nip_astra.tracking.run_lock import LOCK
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.forked import blocked_signals, fork
from nip_astra.utils.seeding import derive_seed

MAX_ITERATIONS = 4
"""Default maximum iterations of every loop of a run: a fault may first show two iterations after a
checkpoint."""
IDLE_SECONDS = 300.0
"""A run is killed and reported if it has not used the processor for so long."""
SETTINGS: Mapping[str, Any] = {"progress": False, "wandb": "disabled", "checkpoint_period": 1}
"""Settings of all runs of a check."""
RUN = "run"
"""Name of every run, each in its own folder."""
_WATCHED = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "truncate", "ftruncate")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_END_OF_CHECKPOINT = re.compile(r"replace .*checkpoints/latest'")
"""The operation after which a run is resumed from a new checkpoint."""
_GENERATED_NAME = re.compile(r"\bjob-[0-9a-f]{16}\b|\bftjob-\w+|\bft:[\w.:/-]+")
"""Names that services give to jobs and models."""
_PROCESS_KEYS = ("services", "run_key", "timings.jsonl")
"""Entries that depend on time or process."""

KillPlan = Callable[[Sequence[str]], Iterable[int]]
"""Chooses the numbers of operations, counted from 1, before which runs are killed."""


class KilledRun(NamedTuple):
    """A run that was killed and resumed.

    Attributes
    ----------
    number, operation : int, str
        The file operation before which it was killed, counted from 1.
    difference : str
        The first file and name that differ from the uninterrupted run; empty if all are equal.
    num_resumed_iterations : int
        Iterations that were trained after a checkpoint, or stages of a staged trainer. 0 if the
        run began again or had been trained, which tests no state.
    """

    number: int
    operation: str
    difference: str
    num_resumed_iterations: int


class ResumeCheck(NamedTuple):
    """The result of a check.

    Attributes
    ----------
    num_operations : int
        File operations of the uninterrupted run.
    unlike : str
        The first difference of two uninterrupted runs; then nothing is killed.
    kills : list of KilledRun
        The killed runs, by the number of the operation.
    """

    num_operations: int
    unlike: str
    kills: list[KilledRun]

    @property
    def is_equal(self) -> bool:
        """Whether all runs are equal."""
        return not self.unlike and not any(kill.difference for kill in self.kills)

    @property
    def num_resumed(self) -> int:
        """Number of kills after which at least one iteration was trained from a checkpoint."""
        return sum(kill.num_resumed_iterations > 0 for kill in self.kills)


def spread_kills(num_kills: int, seed: int) -> KillPlan:
    """Return a plan that samples distinct operations, equally many between any two checkpoints.

    Most operations of a run are those of its beginning and its end, after which nothing is resumed.
    """

    def choose_numbers(operations: Sequence[str]) -> list[int]:
        generator = random.Random(derive_seed(seed, "kills"))
        intervals: list[list[int]] = [[]]
        for number, operation in enumerate(operations, start=1):
            intervals[-1].append(number)
            if _END_OF_CHECKPOINT.match(operation):
                intervals.append([])
        for interval in intervals:
            generator.shuffle(interval)
        # The first of each interval, then the second of each, and so on; short ones give None.
        numbers: list[int] = []
        for round_numbers in zip_longest(*intervals):
            numbers += [number for number in round_numbers if number is not None]
        return sorted(numbers[:num_kills])

    return choose_numbers


def check_resume(
    experiment: HyperParameters | ResolvedExperiment,
    folder: str | Path,
    *,
    num_kills: int = 10,
    plan: KillPlan | None = None,
    max_iterations: int | None = MAX_ITERATIONS,
    on_kill: Callable[[KilledRun], object] = lambda _: None,
    **settings_fields: Any,
) -> ResumeCheck:
    """Kill short runs of an experiment at random file operations, resume and compare them.

    Metrics, results without seconds, rollouts, models and the contents of the newest checkpoint
    must equal those of two uninterrupted runs.

    Parameters
    ----------
    folder : str or Path
        Gets one folder per run (`whole` for the uninterrupted one, else the kill's number)
        and the output of each process as `<number>.txt`.
    plan : Callable, optional
        From the operations of a run to those to kill at; random ones, spread over the intervals
        between checkpoints, by default.
    max_iterations : int or None
        Iterations to which every loop is cut; None cuts none.
    on_kill : Callable
        Called with each killed run after its comparison.
    **settings_fields
        Settings of all runs, except those that a check sets itself.

    Raises
    ------
    ConfigurationError
        When processes cannot be forked here, or a setting is one that a check sets itself.
    WorkerProcessError
        When an uninterrupted run fails in a process of its own, or makes no progress.
    """
    fixed_settings = {*SETTINGS, "run_id", "runs_dir", "test_run"}
    rejected = sorted(settings_fields.keys() & fixed_settings)
    if rejected:
        raise ConfigurationError(f"check-resume sets {', '.join(rejected)} itself. Leave it out.")
    if not hasattr(os, "fork"):
        raise ConfigurationError(
            f"check-resume forks processes, which {sys.platform} cannot. Run it on Linux."
        )
    settings = {"num_threads": 1, **settings_fields, **SETTINGS}
    if settings["num_threads"] != 1:
        raise ConfigurationError(
            f"check-resume cannot use {settings['num_threads']} threads: its processes are forked, "
            "and keep to one. Leave num_threads out."
        )
    resolved = experiment
    if isinstance(resolved, HyperParameters):
        resolved = resolve_experiment(hyper_params=resolved)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = partial(_run, resolved, settings, folder)
    with loops_cut_to(max_iterations), _one_thread():
        in_process = _can_be_forked(resolved, settings)
        for name in ("first", "whole"):
            _run_uninterrupted(partial(run, name), folder / f"{name}.txt", in_process=in_process)
        operations: list[str] = json.loads((folder / "whole.json").read_text())
        expected = read_run_contents(folder / "whole" / RUN)
        unlike = find_difference(read_run_contents(folder / "first" / RUN), expected)
        if unlike:
            return ResumeCheck(len(operations), unlike, [])
        kills: list[KilledRun] = []
        choose_numbers = plan or spread_kills(num_kills, resolved.hyper_params.seed)
        for number in choose_numbers(operations):
            run_to_kill = partial(run, str(number), number)
            resume = partial(resume_or_restart, resolved, folder / str(number), settings)
            operation = operations[number - 1]
            kill = _kill_and_compare(run_to_kill, resume, folder, number, operation, expected)
            kills.append(kill)
            on_kill(kill)
    return ResumeCheck(len(operations), unlike, kills)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the block with one torch thread, so that this process begins none of OpenMP's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _can_be_forked(resolved: ResolvedExperiment, settings: Mapping[str, Any]) -> bool:
    """Return whether this process can fork after a run, which devices and Ray prevent."""
    run_settings = ExperimentSettings.from_dict({**resolved.settings.to_dict(), **settings})
    return resolve_device(run_settings.device).type == "cpu" and not run_settings.num_actors


def _run(
    resolved: ResolvedExperiment,
    settings: Mapping[str, Any],
    folder: Path,
    name: str,
    number: int = 0,
) -> None:
    """Run to the end and record the operations, or be killed before one of them."""
    with killed_at(number) as operations:
        run_experiment(resolved, runs_dir=str(folder / name), run_id=RUN, **settings)
    (folder / f"{name}.json").write_text(json.dumps(operations))


def _run_uninterrupted(run: Callable[[], None], log: Path, *, in_process: bool) -> None:
    if in_process:
        _seed_generators()
        # Later processes inherit its imports.
        run()
    elif status := in_a_fork(run, log, name=f"the run of {log.stem}"):
        raise WorkerProcessError(
            f"an uninterrupted run ended with {status}: {_last_line(log)}. Run it without "
            "check-resume first."
        )


def _kill_and_compare(
    run: Callable[[], None],
    resume: Callable[[], None],
    folder: Path,
    number: int,
    operation: str,
    expected: Mapping[str, bytes],
) -> KilledRun:
    """Kill a run, resume it, and compare it."""
    log = folder / f"{number}.txt"
    num_resumed = 0
    try:
        status = in_a_fork(run, log, name=f"the run to be killed at operation {number}")
        num_before = _trained_iterations(folder / str(number) / RUN)
        resumed_status = in_a_fork(resume, log, name=f"the run resumed after operation {number}")
    except WorkerProcessError as error:
        return KilledRun(number, operation, str(error), num_resumed)
    if num_before is not None:
        num_resumed = (_trained_iterations(folder / "whole" / RUN) or 0) - num_before
    difference = find_fault(folder / str(number), expected)
    if resumed_status:
        difference = f"the resumed run ended with {resumed_status}: {_last_line(log)}"
    elif status != -signal.SIGKILL:
        difference = f"the run ended with {status} and was not killed. {difference}"
    return KilledRun(number, operation, difference, num_resumed)


def _trained_iterations(run: Path) -> int | None:
    """Return the iterations, or stages, in a run's newest checkpoint; None without one."""
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    if checkpoint is None:
        return None
    manifest, _ = inspect_folder(checkpoint)
    return int(manifest.get("step", 0))


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Record this process's file operations, and kill it before operation `number` (0: never)."""
    process = os.getpid()
    operations: list[str] = []
    originals: list[tuple[Any, str, Any]] = []

    def watch(module: Any, name: str, is_write: Callable[..., bool]) -> None:
        original = getattr(module, name)
        originals.append((module, name, original))

        def watched(*args: Any, **kwargs: Any) -> Any:
            # Processes that were forked from this one inherit the watch.
            if os.getpid() == process and is_write(*args, **kwargs):
                operations.append(f"{name} {args[:2]}")
                if len(operations) == number:
                    os.kill(process, signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, watched)

    for name in _WATCHED:
        watch(os, name, lambda *_, **__: True)
    watch(os, "open", lambda _path, flags, *_, **__: bool(flags & _WRITING))
    for module in (io, builtins):
        watch(module, "open", _writes)
    try:
        yield operations
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _writes(_file: object, mode: str = "r", *_: object, **__: object) -> bool:
    return any(letter in mode for letter in "wax+")


def in_a_fork(
    work: Callable[[], object], log: Path | None = None, *, name: str = "a forked process"
) -> int:
    """Do the work in a forked process and return its exit status; `log` receives its output.

    Raises
    ------
    WorkerProcessError
        When it has not used the processor for `IDLE_SECONDS`; it is killed.
    """
    with blocked_signals():
        child = fork(name, is_worker=False)
    if child is None:
        _work_and_exit(work, log)
    try:
        if not child.wait_while_working(IDLE_SECONDS):
            raise WorkerProcessError(
                f"{name} (process {child.pid}) did nothing for {IDLE_SECONDS:g} s and was killed. "
                f"Read its output in {log}, or run it without check-resume."
            )
    finally:
        child.kill()
    assert child.code is not None
    return child.code


def _work_and_exit(work: Callable[[], object], log: Path | None) -> NoReturn:
    """Do the work and end this forked process."""
    try:
        _seed_generators()
        if log is not None:
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        work()
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(1)


def _seed_generators() -> None:
    """Seed every process equally, since a fork reseeds Python's generator."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2] if log.exists() else ""


def resume_or_restart(
    resolved: ResolvedExperiment, runs_dir: Path, settings: Mapping[str, Any] = SETTINGS
) -> None:
    """Resume a killed run; restart it if it has no directory yet."""
    path = runs_dir / RUN
    if not path.exists():
        run_experiment(resolved, runs_dir=str(runs_dir), run_id=RUN, **settings)
        return
    has_ended = (path / RESULTS).exists() and (path / REPORT).exists()
    try:
        resume_experiment(path, progress=False)
    except RunDirectoryError:
        if not has_ended:
            raise


def find_fault(runs_dir: Path, expected: Mapping[str, bytes]) -> str:
    """Return the first difference to an uninterrupted run; empty if there is none."""
    path = runs_dir / RUN
    if not (path / REPORT).exists():
        return f"{REPORT} is missing"
    if difference := find_difference(read_run_contents(path), expected):
        return difference
    # Temporary files have names with a leading dot, as have two files that a run keeps.
    hidden = {file.relative_to(runs_dir).as_posix() for file in runs_dir.rglob(".*")}
    leftovers = sorted(hidden - {f"{RUN}/{LOCK}", f"{RUN}/{HAS_CHECKPOINTS}"})
    return f"left over: {', '.join(leftovers)}" if leftovers else ""


def read_run_contents(run: Path) -> dict[str, bytes]:
    """Return the contents that must not depend on kills, by file.

    Names given by processes and services are replaced by numbers in order of occurrence.
    """
    texts = _RunTexts(run)
    latest = run / "checkpoints" / "latest"
    checkpoint = run / "checkpoints" / (latest.read_text().strip() if latest.is_file() else "none")
    # Without the revision of a step that was saved again, as after a kill before `latest` named it.
    step = checkpoint.name.partition("_r")[0]
    contents = {
        RESULTS: texts.read_json(run / RESULTS),
        f"{step}/state.json": texts.read_json(checkpoint / "state.json"),
    }
    paths = [run / "metrics.jsonl", *run.glob("model/**/*.safetensors")]
    paths += [*run.glob("rollouts/**/*.jsonl"), *run.glob("rollouts/**/*.json")]
    paths += [path for path in checkpoint.rglob("*") if path.name not in _COMPARED_SEPARATELY]
    for job in texts.numbered_names:
        paths += run.glob(f"jobs/{job}/model/*.safetensors")
    for file in sorted(path for path in paths if path.is_file()):
        content = file.read_bytes()
        if file.name == "answers.jsonl":
            # The order of answers is random.
            content = b"".join(sorted(content.splitlines(keepends=True)))
        if file.suffix in (".json", ".jsonl"):
            content = texts.neutralize(content.decode(errors="replace")).encode()
        name = str(file.relative_to(run)).replace(checkpoint.name, step)
        contents[texts.neutralize(name)] = content
    return {name: content for name, content in contents.items() if content}


_COMPARED_SEPARATELY = ("state.json", "manifest.json")
"""Files of a checkpoint; the manifest has the digests of all others."""


class _RunTexts:
    """Replaces what depends on the process in a run's texts: its path, its key, generated names.

    Attributes
    ----------
    numbered_names : dict
        A number in order of occurrence for each generated name.
    """

    def __init__(self, run: Path) -> None:
        spellings = {str(run), str(run.absolute()), str(run.resolve())}
        # The longest first: one may be part of another.
        self._run_paths = sorted(spellings, key=len, reverse=True)
        self.numbered_names: dict[str, str] = {}
        self._run_key = ""

    def read_json(self, path: Path) -> bytes:
        """Return the content of a JSON file without times and costs of services."""
        if not path.is_file():
            return b""
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            self._run_key = content.get("run", {}).get("run_key") or self._run_key
        return self.neutralize(json.dumps(_drop_process_keys(content), indent=1)).encode()

    def neutralize(self, text: str) -> str:
        """Return a text without the run's path and the names of its jobs."""
        for run_path in self._run_paths:
            text = text.replace(run_path, "RUN")
        if self._run_key:
            text = text.replace(self._run_key, "KEY")
        return _GENERATED_NAME.sub(self._number_name, text)

    def _number_name(self, match: re.Match[str]) -> str:
        return self.numbered_names.setdefault(match[0], f"NAME-{len(self.numbered_names)}")


def _drop_process_keys(content: Any) -> Any:
    """Return nested JSON values without entries that depend on time or process."""
    if isinstance(content, list):
        return [_drop_process_keys(member) for member in content]
    if not isinstance(content, dict):
        return content
    return {
        name: _drop_process_keys(member)
        for name, member in content.items()
        if name not in _PROCESS_KEYS and "seconds" not in name
    }


def find_difference(contents: Mapping[str, bytes], expected: Mapping[str, bytes]) -> str:
    """Return the first file that differs, and the first name in it; empty if all are equal."""
    for file in sorted(contents.keys() | expected.keys()):
        content, expected_content = contents.get(file), expected.get(file)
        if content == expected_content:
            continue
        if content is None:
            return f"{file} is missing"
        if expected_content is None:
            return f"{file} is only in this run"
        values = _read_values(file, content)
        expected_values = _read_values(file, expected_content)
        for name in sorted(values.keys() | expected_values.keys()):
            if values.get(name) != expected_values.get(name):
                return f"{file}: {name}" if name else file
        return file
    return ""


def _read_values(file: str, content: bytes) -> dict[str, Any]:
    """Return the values of a file by name; of JSON lines, by line and name."""
    if file.endswith(".safetensors"):
        return _read_tensors(content)
    text = content.decode(errors="replace")
    if not file.endswith(".jsonl"):
        return _read_json_values(text)
    values: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        for name, value in _read_json_values(line).items():
            values[f"line {number}, {name}"] = value
    return values


def _read_json_values(text: str) -> dict[str, Any]:
    """Return the values of a JSON object by dotted name; those of any other text without a name."""
    try:
        content = json.loads(text)
    except ValueError:
        content = text
    values = dict(flatten(content)) if isinstance(content, dict) else {"": content}
    return {name: json.dumps(value) for name, value in values.items()}


def _read_tensors(content: bytes) -> dict[str, Any]:
    try:
        tensors = deserialize(content)  # type: ignore[no-untyped-call]  # of safetensors
    except SafetensorError:
        return {}
    return {name: (tensor["shape"], bytes(tensor["data"])) for name, tensor in tensors}
