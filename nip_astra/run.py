"""Preparation, execution and resumption of experiments."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nip_astra.call_outcomes import FOLDER as CALL_OUTCOMES
from nip_astra.call_outcomes import CallOutcomes, current_outcomes, using_outcomes
from nip_astra.checkpoints.run_state import seeded_global_generators
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.deadlines import using_deadline
from nip_astra.distributed.team import Team, open_team
from nip_astra.errors import (
    CallDeadlineError,
    CheckpointError,
    ConfigurationError,
    NipAstraError,
    RunDirectoryError,
    StopRequested,
    TrackingError,
    UnexpectedExitError,
    WorkerProcessError,
    reason_of,
)
from nip_astra.evaluation.run_results import RunResults, read_results
from nip_astra.evaluation.tables import Shown
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.language_models.services.chat import ChatModel, close_all
from nip_astra.language_models.services.retrying import keeping_service_files
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.progress import only_own_bars, showing
from nip_astra.report.page import write_report
from nip_astra.resolving.data_files import check_data_unchanged, write_data_digests
from nip_astra.resolving.resolution import (
    RERUN_TESTS,
    ResolvedExperiment,
    fetch_base_run,
    never_read,
    resolve_experiment,
)
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking import run_directory as files
from nip_astra.tracking.environment import (
    describe_environment,
    note_computation,
    warn_of_changed_plugins,
)
from nip_astra.tracking.run_directory import RunDirectory, log_file, new_run_id
from nip_astra.tracking.run_lock import run_lock
from nip_astra.tracking.tracker import Tracker, flat_figures, open_tracker, read_records
from nip_astra.trainers.service_use import services_used
from nip_astra.trainers.trainer_base import Trainer
from nip_astra.trust import (
    SETTINGS_SIGNATURE,
    SIGNATURE,
    StoredSource,
    is_own,
    on_behalf_of,
    sign,
)
from nip_astra.utils.actors import refuse_actors_without_device
from nip_astra.utils.devices import resolve_device

logger = logging.getLogger(__name__)

StopFlag = Callable[[], str | None]

OF_THE_EXPERIMENT = ("trainer", "scenario", "parameter_file", "overrides", "seed", "plugins")
"""Arguments of `resolve_experiment` that `run_experiment` accepts beside settings."""


@dataclass(frozen=True)
class PreparedExperiment:
    """A built experiment; `total_num_iterations` is the sum over all loops with a progress bar."""

    scenario_instance: ScenarioInstance
    trainer: Trainer
    total_num_iterations: int


@dataclass(frozen=True)
class ExperimentResult(Shown):
    """A finished run."""

    run_directory: RunDirectory
    results: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return str(self.read())

    def plot(self, *names: str) -> Any:
        """Plot metrics by iteration; see `RunResults.plot`."""
        return self.read().plot(*names)

    def read(self) -> RunResults:
        """Return everything that the run recorded, as objects and frames."""
        return read_results(self.run_directory.path)


def prepare_experiment(
    experiment: HyperParameters | ResolvedExperiment | None = None,
    settings: ExperimentSettings | None = None,
    *,
    team: Team | None = None,
    **fields: Any,
) -> PreparedExperiment:
    """Build all components and the trainer; write nothing.

    Parameters
    ----------
    experiment : HyperParameters or ResolvedExperiment, optional
        Hyper-parameters are completed as on the command line; see `resolve_experiment`.
    settings : ExperimentSettings, optional
        In place of `settings` in the parameter file.
    team : Team, optional
        The processes that train together; this one alone without it.
    **fields
        Arguments of `resolve_experiment` (`trainer`, `scenario`, `overrides`, `seed`, ...), and
        single settings by name.
    """
    resolved = _resolved(experiment, fields)
    settings = _settings(settings or resolved.settings, fields)
    team = team or Team()
    refuse_idle_actors(resolved.trainer_class, settings, team)
    loading = showing("Loading", enabled=settings.progress)
    # Our own components derive their seeds; those of a plug-in may draw from global generators.
    seeded = seeded_global_generators(resolved.hyper_params.seed, "building")
    with loading, on_behalf_of(resolved.source), _within_memory(), seeded:
        instance = build_scenario_instance(
            resolved.hyper_params,
            settings,
            kind=resolved.kind,
            scenario_dir=resolved.scenario_dir,
            trainer_type=resolved.trainer_class.trainer_type,
        )
        instance.team = team
        refuse_unfinished(resolved.trainer_class)
        trainer = resolved.trainer_class(resolved.hyper_params, instance, settings)
        refuse_half_built(trainer)
    return PreparedExperiment(instance, trainer, trainer.get_total_num_iterations())


@contextmanager
def _within_memory() -> Iterator[None]:
    """Raise a `ConfigurationError` if memory cannot hold the components."""
    try:
        yield
    except NipAstraError:
        raise
    except (MemoryError, OverflowError, RuntimeError) as error:
        reason = reason_of(error)
        is_size = not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)
        if not is_size and not re.search("allocate memory|overflow", reason):
            raise
        raise ConfigurationError(
            f"the models and data of this experiment do not fit into memory: {reason}. Use smaller "
            "ones, for instance fewer layers or datapoints."
        ) from error


def run_experiment(
    experiment: HyperParameters | ResolvedExperiment | None = None,
    settings: ExperimentSettings | None = None,
    *,
    stop_flag: StopFlag | None = None,
    **fields: Any,
) -> ExperimentResult:
    """Run an experiment in a new run directory.

    Other parameters are as in `prepare_experiment`.

    Parameters
    ----------
    stop_flag : callable, optional
        Returns the reason for which the run should stop after its step, or None.

    Raises
    ------
    ConfigurationError
        When a parameter or setting is wrong, or nothing in the run reads it.
    StopRequested
        When SIGINT or SIGTERM stopped the run; its work is saved.
    """
    resolved = _resolved(experiment, fields)
    settings = _settings(settings or resolved.settings, fields)
    with _team_of(settings) as team:
        refuse_idle_settings(settings, team)
        if team.is_leader:
            return _begin(resolved, settings, team, stop_flag)
        return _take_part(resolved, settings, team)


def _begin(
    resolved: ResolvedExperiment,
    settings: ExperimentSettings,
    team: Team,
    stop_flag: StopFlag | None,
) -> ExperimentResult:
    """Create a run directory, and train."""
    hyper_params = resolved.hyper_params
    device = resolve_device(settings.device).type
    run_id = settings.run_id
    if run_id is None:
        run_id = new_run_id(hyper_params.trainer, hyper_params.scenario)

    def write(new: RunDirectory) -> None:
        written = new.write_yaml(files.HYPER_PARAMETERS, hyper_params.to_dict())
        unread = never_read(resolved)
        sources = {path: one for path, one in resolved.sources.items() if path not in unread}
        new.write_json(files.PARAMETER_SOURCES, sources)
        chosen = new.write_yaml(files.SETTINGS, settings.to_dict() | {"run_id": run_id})
        signed = {
            "device": device,
            SIGNATURE: sign(written.read_bytes()),
            SETTINGS_SIGNATURE: sign(chosen.read_bytes()),
        }
        new.write_json(files.ENVIRONMENT, describe_environment() | signed)
        write_data_digests(new, resolved)

    directory = RunDirectory.create(settings.runs_dir, run_id, write)
    built: list[Trainer] = []
    with run_lock(directory.path):
        try:
            return _run(resolved, settings, directory, team, stop_flag, built=built)
        except StopRequested:
            raise
        except BaseException:
            if not built:
                # A fault of building, such as a missing model: the run id is free again.
                directory.discard()
            raise


def resume_experiment(
    run: str | Path,
    *,
    plugins: Sequence[str] = (),
    is_trusted: bool = False,
    allow_changed_data: bool = False,
    stop_flag: StopFlag | None = None,
    **settings_fields: Any,
) -> ExperimentResult:
    """Continue a run from its latest checkpoint, in its directory.

    A run without a checkpoint starts again; one with results but no report gets its report.

    Parameters
    ----------
    run : str or Path
        The run directory, or its name in `runs_dir`.
    plugins : Sequence[str]
        Python files that replace those of the same name that the run loaded, or modules.
    is_trusted : bool
        Load code that the run names although the run is not the user's own.
    allow_changed_data : bool
        Continue although data files have changed since the run began.
    stop_flag : callable, optional
        See `run_experiment`.
    **settings_fields
        Settings that differ from those of the run's start.

    Raises
    ------
    RunDirectoryError
        When it is not a run, the run has ended, or another process is running it.
    CheckpointError
        When the latest checkpoint is corrupt or of other parameters, or all are lost.
    UntrustedRunError
        When the run is not the user's own and names code, or anything else outside of its folder.
    ChangedDataError
        When a data file has changed since the run began.
    """
    runs_dir = settings_fields.get("runs_dir", ExperimentSettings().runs_dir)
    directory = RunDirectory.find(run, runs_dir)
    if settings_fields.get("run_id") not in (None, directory.path.name):
        raise ConfigurationError("a resumed run keeps its run_id. Leave it out.")
    stored = ExperimentSettings.from_dict(directory.read_yaml(files.SETTINGS))
    # The file of processes belongs to the first start, and the run may have moved.
    here = {"process_store": None, "runs_dir": str(directory.path.parent)}
    stored = stored.model_copy(update=here)
    if not is_trusted:
        _check_settings(directory, stored, {"runs_dir": runs_dir} | settings_fields)
    settings = _settings(stored, settings_fields)
    with _team_of(settings) as team:
        refuse_idle_settings(settings, team, settings_fields)
        if team.is_leader:
            with run_lock(directory.path):
                if directory.has_ended:
                    return _finish_ended(directory, settings)
                resolved = _resolved_again(directory, plugins, is_trusted)
                checkpoint = _latest_checkpoint(directory)
                if checkpoint is None:
                    logger.warning(
                        "the run %s has no checkpoint, so it starts from the beginning",
                        directory.run_id,
                    )
                    # With the data as they are.
                    write_data_digests(directory, resolved)
                else:
                    check_data_unchanged(directory, resolved, allow_changed_data=allow_changed_data)
                return _run(resolved, settings, directory, team, stop_flag, checkpoint=checkpoint)
        return _take_part(_resolved_again(directory, plugins, is_trusted), settings, team)


def _resolved_again(
    directory: RunDirectory, plugins: Sequence[str], is_trusted: bool
) -> ResolvedExperiment:
    return resolve_experiment(
        parameter_file=directory.path / files.HYPER_PARAMETERS,
        plugins=plugins,
        is_trusted=is_trusted,
    )


def _check_settings(
    directory: RunDirectory, stored: ExperimentSettings, given: Mapping[str, Any]
) -> None:
    """Request approval for settings of an untrusted run that affect more than its folder."""
    path = directory.path / files.SETTINGS
    outside = {name: value for name, value in stored.outside().items() if name not in given}
    StoredSource(str(path), is_own(path, SETTINGS_SIGNATURE), outside=outside).check_outside()


@contextmanager
def _team_of(settings: ExperimentSettings) -> Iterator[Team]:
    """Connect the processes of a launcher; all but the leader ignore signals."""
    with open_team(resolve_device(settings.device), settings.process_store) as team:
        if team.is_leader:
            yield team
            return
        with signals_left_to_leader():
            yield team


def _take_part(
    resolved: ResolvedExperiment, settings: ExperimentSettings, team: Team
) -> ExperimentResult:
    """Train as a non-leading process: write, track and show nothing."""
    shared = team.broadcast({"run": "", "checkpoint": ""})
    settings = settings.model_copy(update={"progress": False})
    trainer = prepare_experiment(resolved, settings, team=team).trainer
    if trainer.hyper_params.base_run.base_run_type != RERUN_TESTS:
        if shared["checkpoint"]:
            trainer.resume_from(Path(shared["checkpoint"]))
        trainer.train()
    return ExperimentResult(RunDirectory(Path(shared["run"])), trainer.results)


def _finish_ended(directory: RunDirectory, settings: ExperimentSettings) -> ExperimentResult:
    """Do what a run lacks that was killed after its results: its report, records at trackers."""
    results = directory.read_json(files.RESULTS)
    is_tracked = (directory.path / files.IS_TRACKED).exists()
    if (directory.path / files.REPORT).exists() and not is_tracked:
        raise RunDirectoryError(
            f"the run {directory.run_id!r} has ended; {directory.path / files.RESULTS} holds its "
            "results. Start a new run."
        )
    _remove_leftovers(directory)
    tracker = None
    if is_tracked:
        config = directory.read_yaml(files.HYPER_PARAMETERS)
        tracker = open_tracker(settings.to_dict(), directory, config, writes_files=False)
        steps = [record.step for record in read_records(directory)]
        tracker.rewind({"step": max(steps, default=0)})
        for when in ("before", "after", "random_search"):
            tracker.log_summary(flat_figures(results.get(when) or {}, f"{when}/"))
    _write_report(directory, tracker)
    if tracker is not None:
        tracker.finish(success=True)
        (directory.path / files.IS_TRACKED).unlink()
    return ExperimentResult(directory, results)


def _latest_checkpoint(directory: RunDirectory) -> Path | None:
    """Return the newest checkpoint; None if the run stopped before its first one."""
    store = CheckpointStore(directory.checkpoints_dir)
    checkpoint = store.latest()
    if checkpoint is None and (directory.path / files.HAS_CHECKPOINTS).exists():
        raise CheckpointError(
            f"the checkpoints of the run {directory.run_id!r} are lost: {store.directory} is "
            "empty. Restore that folder, or start a new run."
        )
    return checkpoint


def _remove_leftovers(directory: RunDirectory) -> None:
    """Remove unfinished files of a killed process."""
    directory.remove_leftovers()
    CheckpointStore(directory.checkpoints_dir).remove_leftovers()


def _run(
    resolved: ResolvedExperiment,
    settings: ExperimentSettings,
    directory: RunDirectory,
    team: Team,
    own_flag: StopFlag | None,
    *,
    checkpoint: Path | None = None,
    built: list[Trainer] | None = None,
) -> ExperimentResult:
    """Build and train; append the trainer to `built`."""
    with (
        log_file(directory),
        only_own_bars(),
        keeping_service_files(directory.path),
        using_deadline(settings.call_deadline, on_stuck=partial(_record_stuck_call, directory)),
        using_outcomes(_outcomes_since(checkpoint, directory)),
        stop_on_signals() as name_of_signal,
    ):

        def stop_flag() -> str | None:
            return name_of_signal() or (own_flag() if own_flag else None)

        _remove_leftovers(directory)
        tracker = open_tracker(settings.to_dict(), directory, resolved.hyper_params.to_dict())
        if len(tracker.trackers) > 1:
            (directory.path / files.IS_TRACKED).touch()
        is_done = False
        services: list[ChatModel] = []
        try:
            latest = "" if checkpoint is None else str(checkpoint.absolute())
            team.broadcast({"run": str(directory.path.absolute()), "checkpoint": latest})
            settings = settings.model_copy(update={"run_directory": directory})
            prepared = prepare_experiment(resolved, settings, team=team)
            prepared.trainer.tracker, prepared.trainer.stop_flag = tracker, stop_flag
            if built is not None:
                built.append(prepared.trainer)
            services += prepared.scenario_instance.services.values()
            note_computation(
                directory,
                {
                    "device": resolve_device(settings.device).type,
                    "layers": prepared.scenario_instance.layers,
                },
            )
            _train(prepared.trainer, directory, checkpoint)
            is_done = True
            _write_report(directory, tracker)
        except (StopRequested, KeyboardInterrupt) as stopped:
            is_at_once = isinstance(stopped, KeyboardInterrupt)
            name = "SIGINT" if isinstance(stopped, KeyboardInterrupt) else stopped.signal_name
            is_saved = CheckpointStore(directory.checkpoints_dir).latest() is not None
            raise StopRequested(
                stop_flag() or name, str(directory.path), is_saved, is_at_once=is_at_once
            ) from None
        except WorkerProcessError as error:
            logger.error("the run failed: %s", error)
            raise type(error)(f"{error} {_how_to_resume(directory)}") from error
        except SystemExit as error:
            logger.error("the run failed: sys.exit(%r) was called", error.code)
            raise UnexpectedExitError(error.code) from error
        except Exception as error:
            logger.error("the run failed: %s", error)
            raise
        finally:
            close_all(services)
            tracker.finish(success=is_done)
            if is_done:
                (directory.path / files.IS_TRACKED).unlink(missing_ok=True)
    return ExperimentResult(directory, prepared.trainer.results)


def _outcomes_since(checkpoint: Path | None, directory: RunDirectory) -> CallOutcomes:
    """Return the outcomes of limited calls that follow a checkpoint."""
    name = None if checkpoint is None else checkpoint.name
    return CallOutcomes(directory.path / CALL_OUTCOMES, checkpoint=name)


def _write_failure(directory: RunDirectory, trainer: Trainer, error: Exception) -> None:
    """Record the failure in `results.json`; checkpoints stay."""
    if directory.has_ended:
        return
    failure = {
        "status": files.FAILED,
        "error": {"type": type(error).__name__, "message": str(error)},
        "before": trainer.state.before,
        "warnings": trainer.results.get("warnings", []),
        **services_used(trainer.services()),
    }
    # The error that ends the run is more important than one of the disk.
    with suppress(NipAstraError):
        directory.write_json(files.RESULTS, failure)


def _record_stuck_call(directory: RunDirectory, error: CallDeadlineError) -> None:
    """Record, in another thread, that a call cannot be interrupted; the process ends then."""
    text = f"{error} The call cannot be interrupted, so the process ends."
    logger.error("the run failed: %s", text)
    failure = {
        "status": files.FAILED,
        "error": {"type": type(error).__name__, "message": text},
        "warnings": [],
    }
    with suppress(NipAstraError):
        if not directory.has_ended:
            directory.write_json(files.RESULTS, failure)
    _write_at_once(f"error: {text} {_how_to_resume(directory)}")


def _how_to_resume(directory: RunDirectory) -> str:
    latest = CheckpointStore(directory.checkpoints_dir).latest()
    if latest is None:
        return "It had saved nothing yet: start it again."
    return f"Its work is saved in {latest.name}; continue: `nip-astra resume {directory.path}`."


def _train(trainer: Trainer, directory: RunDirectory, checkpoint: Path | None) -> None:
    """Train from the beginning or from a checkpoint, or test a base run again."""
    if checkpoint is None:
        logger.info("there is no checkpoint; starting from the beginning")
        trainer.tracker.rewind({})
    else:
        logger.info("resuming from %s", checkpoint.name)
        warn_of_changed_plugins(directory)
        trainer.resume_from(checkpoint)
    if not directory.has_ended:
        # The reason of an earlier failure.
        (directory.path / files.RESULTS).unlink(missing_ok=True)
    base_run = trainer.hyper_params.base_run
    try:
        if base_run.base_run_type == RERUN_TESTS:
            trainer.rerun_tests(fetch_base_run(base_run, directory.path / "base_run"))
        else:
            trainer.train()
    except (StopRequested, WorkerProcessError, CheckpointError, TrackingError):
        # The run is in the state of its last checkpoint.
        raise
    except Exception as error:
        _write_failure(directory, trainer, error)
        outcomes = current_outcomes()
        if outcomes is not None:
            # Otherwise a service that has failed for a while would fail again in every resumed run.
            outcomes.forget()
        raise
    if not (directory.path / files.RESULTS).exists():
        directory.write_json(files.RESULTS, trainer.results)
    if base_run.base_run_type != RERUN_TESTS and _latest_checkpoint(directory) is None:
        logger.warning(
            "the trainer %r saves no checkpoint, so a stopped run begins again. Name its models in "
            "learned_models and its optimizers in kept_objects, and call end_iteration",
            trainer.hyper_params.trainer,
            extra={"is_repeated_at_end": True},
        )


def _write_report(directory: RunDirectory, tracker: Tracker | None = None) -> None:
    """Write report.html; a failed report does not fail a completed run."""
    try:
        path = write_report([directory.path])
        if tracker is not None:
            tracker.log_report(path)
    except NipAstraError as error:
        logger.warning("the report was not written: %s", error)


def _resolved(
    experiment: HyperParameters | ResolvedExperiment | None, fields: dict[str, Any]
) -> ResolvedExperiment:
    """Return the resolved experiment; its own fields are removed from those of the settings."""
    own = {name: fields.pop(name) for name in OF_THE_EXPERIMENT if name in fields}
    if not isinstance(experiment, ResolvedExperiment):
        return resolve_experiment(hyper_params=experiment, **own)
    if own:
        raise ConfigurationError(
            f"the experiment is resolved, so {', '.join(own)} cannot change it. Give "
            f"{'it' if len(own) == 1 else 'them'} to resolve_experiment."
        )
    return experiment


def _settings(base: ExperimentSettings, fields: dict[str, Any]) -> ExperimentSettings:
    if not fields:
        return base
    runtime = {
        name: getattr(base, name)
        for name, field in ExperimentSettings.model_fields.items()
        if field.exclude
    }
    return ExperimentSettings.from_dict(base.to_dict() | runtime | fields)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], str | None]]:
    """Yield a function that names a received SIGINT or SIGTERM; a second one stops at once."""
    received: list[str] = []

    def note(number: int, _frame: Any) -> None:
        name = signal.Signals(number).name
        if received:
            _write_at_once(f"{name} again: stopping without saving")
            raise KeyboardInterrupt
        received.append(name)
        _write_at_once(
            f"{name}: finishing the step, then stopping; once more stops at once, without saving"
        )

    with signals_handled_by(note):
        yield lambda: received[0] if received else None


@contextmanager
def signals_left_to_leader() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: the leading process stops all others."""
    with signals_handled_by(signal.SIG_IGN):
        yield


@contextmanager
def signals_handled_by(handler: Any) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `handler`, in the main thread."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for stopped, before in previous.items():
            signal.signal(stopped, before)


def _write_at_once(text: str) -> None:
    """Write a line to file descriptor 2: in a signal handler, streams may be in use."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


# ---- checks of the trainer against the settings


def refuse_idle_actors(
    trainer_class: type[Trainer], settings: ExperimentSettings, team: Team
) -> None:
    """Refuse actors that a trainer would not play on, or that could not hold its models."""
    if not settings.num_actors:
        return
    refuse_actors_without_device(settings)
    in_a_team = team.size > 1
    if in_a_team or not trainer_class.plays_on_actors:
        reason = (
            "several processes train this run and play their own"
            if in_a_team
            else f"the trainer {trainer_class.__name__} plays no rollouts that they could"
        )
        raise ConfigurationError(
            f"num_actors={settings.num_actors}, but {reason}. Trainers of language models (ast_*, "
            "self_hosted_*, ...) in one process play on actors; leave num_actors 0 for others."
        )


def refuse_idle_settings(
    settings: ExperimentSettings, team: Team, given: Container[str] | None = None
) -> None:
    """Refuse settings that nothing in this run reads.

    `given` are the names that were given now, where others are those of a stored run; None for all.
    """
    if settings.run_directory is not None:
        raise ConfigurationError("a run makes its own run_directory. Set runs_dir and run_id.")
    for is_met, need, names in (
        (team.size > 1, "several processes", ("sharding", "process_store")),
        (settings.num_actors, "num_actors above 0", ("ray_address", "actor_cpus", "actor_gpus")),
    ):
        idle = [
            f"{name}={getattr(settings, name)}"
            for name in names
            if not is_met
            and (given is None or name in given)
            and getattr(settings, name) != ExperimentSettings.model_fields[name].default
        ]
        if idle:
            raise ConfigurationError(
                f"the settings {', '.join(idle)} need {need}, and nothing here reads them. Leave "
                "them out."
            )


def refuse_unfinished(trainer_class: type[Trainer]) -> None:
    """Refuse a class without its base class's abstract methods, or with another constructor."""
    missing = sorted(getattr(trainer_class, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(
            f"the trainer {trainer_class.__name__} lacks {', '.join(missing)}. Define what its "
            "base class requires."
        )
    # A decorated constructor is called as its wrapper is.
    constructor = inspect.signature(trainer_class.__init__, follow_wrapped=False)
    try:
        constructor.bind("self", "hyper_params", "scenario_instance", "settings")
    except TypeError as error:
        raise ConfigurationError(
            f"the trainer {trainer_class.__name__} cannot be built: {error}. Its __init__ must "
            "take (hyper_params, scenario_instance, settings)."
        ) from error


def refuse_half_built(trainer: Trainer) -> None:
    """Refuse a trainer whose own constructor leaves out that of its base class."""
    if "state" not in vars(trainer):
        name = type(trainer).__name__
        raise ConfigurationError(
            f"__init__ of the trainer {name} does not call that of its base class. Begin it with "
            "super().__init__(hyper_params, scenario_instance, settings)."
        )
