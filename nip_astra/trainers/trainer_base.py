"""The bases of all trainers.

A trainer takes hyper-parameters, a scenario instance and settings, and `train()` does the whole
job: seed, train loop, test loop, saving the models. Loops decorated with `attach_progress_bar`
share one progress bar, and their number of iterations is known before anything runs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError

from nip_astra.call_outcomes import current_outcomes
from nip_astra.checkpoints.run_state import (
    GENERATORS,
    STATE,
    Part,
    RunState,
    check_is_of_run,
    described_run,
    part_of_object,
    save_generators,
    seed_global_generators,
    set_global_generators,
)
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.checkpoints.weights import load_modules, publish_modules, save_modules
from nip_astra.deadlines import limit_hooks
from nip_astra.distributed.team import Handler, Team
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    NipAstraError,
    RunDirectoryError,
    StopRequested,
    describe_error,
)
from nip_astra.evaluation.outcomes import Known
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.progress import (
    IterationContext,
    ProgressBar,
    attach_progress_bar,
    open_progress,
    total_num_iterations,
)
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.tracking.run_directory import HAS_CHECKPOINTS, MODEL_DIR, RESULTS, RunDirectory
from nip_astra.tracking.tracker import Tracker, flat_figures
from nip_astra.trainers.service_use import last_failure, refuse_unanswered
from nip_astra.utils.devices import threads_for

logger = logging.getLogger(__name__)
T = TypeVar("T")

WEIGHTS_DIR = "weights"
"""Folder of a checkpoint with the models of a trainer with a loop of its own."""

__all__ = ["IterationContext", "TensorDictTrainer", "Trainer", "attach_progress_bar"]


LIMITED_HOOKS = (
    *("flatten", "credit", "prepare", "loss", "step", "collate_fn", "after_backward"),
    *("_prepare_batch", "_prepare_trajectories", "progress_figures", "why_nothing_is_learnt"),
    *("trainer_state", "load_trainer_state", "_stage_create_fine_tune_jobs"),
)
"""Hooks of users' trainers that must return within the run's `call_deadline`, of all families.
Those that sample, measure or build models take as long as these do."""


class Trainer(ABC):
    """Base of all trainers. Subclasses implement `train`.

    Attributes
    ----------
    hyper_params : HyperParameters
        Everything that changes the result.
    parameters : Trainer.Parameters
        This trainer's own section of the hyper-parameters.
    scenario_instance : ScenarioInstance
        The built components.
    settings : ExperimentSettings
        Where and how to run; changes no result, but for last digits of large models by threads.
    tracker : Tracker
        Takes metrics, tables and artifacts; does nothing for a trainer built by hand.
    stop_flag : callable
        Returns the name of the signal that stops the run, or None.
    run_directory : RunDirectory or None
        Where files go; None for a trainer built by hand.
    state : RunState
        Progress of the run, an instance of `State`.
    team : Team
        The processes that train the run together, this one among them.
    results : dict
        Results of the run; filled by `train`.
    """

    State: ClassVar[type[RunState]] = RunState
    trainer_type: ClassVar[str] = "rl"
    """What the factory builds: "rl" agents with policies, "rl_central_critic" the same with value
    functions that observe everything, "solo_agent" supervised ones. Other types must be listed in
    the scenario kind's `trainer_types`."""
    scenario_kinds: ClassVar[tuple[str, ...]] = ()
    """Scenario kinds that this trainer supports; empty for any."""
    parameter_groups: ClassVar[tuple[str, ...] | None] = None
    """Groups of the hyper-parameters, or single ones such as `rl.lr`, that the trainer reads beside
    its own section. Values given to others are refused; None refuses nothing."""
    evaluation_family: ClassVar[str | None] = None
    """Evaluation family of its runs, see `nip_astra.evaluation.families`; None for none."""
    sections_of_others: ClassVar[tuple[str, ...]] = ()
    """Trainers whose sections of the hyper-parameters this trainer also reads."""
    reads_where: ClassVar[Mapping[str, ReadWhere]] = {}
    """Groups or parameters that this trainer reads only under a condition."""
    may_change_on_resume: ClassVar[tuple[str, ...]] = ()
    """Parameters that may differ from those of the checkpoint on resume."""
    learns_in_processes: ClassVar[bool] = False
    """Whether several processes may train one run together."""
    divides_weights: ClassVar[bool] = False
    """Whether the trained weights may be sharded over processes."""
    learns_layer_by_layer: ClassVar[bool] = False
    """Whether it trains a language model, whose layers can be recomputed in the backward pass."""
    plays_on_actors: ClassVar[bool] = False
    """Whether Ray actors may run its rollouts."""
    figures: ClassVar[tuple[str, ...] | None] = None
    """Figures that `results.json` may have after training, and dev evaluations as `dev/<name>`; `*`
    matches any text. A sweep refuses others. None, as for a custom class without any, refuses
    nothing before a run has ended."""
    never_reads: ClassVar[tuple[str, ...]] = ()
    """Groups or parameters that no run of this trainer reads, even if its scenario names them; `*`
    matches any name."""

    class Parameters(SubParameters):
        """The trainer's own parameters; a subclass adds its own."""

    def __init__(
        self,
        hyper_params: HyperParameters,
        scenario_instance: ScenarioInstance,
        settings: ExperimentSettings | None = None,
    ) -> None:
        self.hyper_params = hyper_params
        self.scenario_instance = scenario_instance
        self.settings = settings or ExperimentSettings()
        self.run_directory: RunDirectory | None = self.settings.run_directory
        self.tracker = Tracker()
        self.team: Team = scenario_instance.team
        self.stop_flag: Callable[[], str | None] = lambda: None
        self.progress: ProgressBar | None = None
        self.state: Any = self.State()
        self.results: dict[str, Any] = {}
        self._started, self._seconds_before = time.monotonic(), 0.0
        self._records: dict[str, Any] | None = None
        self._generators: dict[str, Any] | None = None
        section = getattr(hyper_params, hyper_params.trainer, None)
        self.parameters: Any = self.Parameters() if section is None else section
        if self.scenario_kinds and scenario_instance.kind not in self.scenario_kinds:
            raise ConfigurationError(
                f"the trainer {hyper_params.trainer!r} trains on {', '.join(self.scenario_kinds)} "
                f"only, and the scenario {hyper_params.scenario!r} is of kind "
                f"{scenario_instance.kind!r}. Choose another --scenario or --trainer."
            )

        if self.team.size > 1 and not self.learns_in_processes:
            raise ConfigurationError(
                f"the trainer {hyper_params.trainer!r} cannot train in {self.team.size} processes. "
                "Start it without torchrun."
            )
        of_models = "trainers of language models, ast_* and self_hosted_*"
        for text, is_refused, others in (
            (
                f"sharding={self.settings.sharding}",
                self.settings.sharding != "none" and not self.divides_weights,
                f"{of_models}, and of the agents of protocols, vanilla_ppo, mappo and reinforce",
            ),
            (
                "gradient_checkpointing=true",
                self.settings.gradient_checkpointing and not self.learns_layer_by_layer,
                of_models,
            ),
        ):
            if is_refused:
                raise ConfigurationError(
                    f"the setting {text} is for {others}, not for {hyper_params.trainer!r}. Leave "
                    "it out."
                )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        limit_hooks(cls, LIMITED_HOOKS)

    @classmethod
    def declared_figures(cls) -> tuple[str, ...] | None:
        """Return `figures`; None for a custom class that only inherits those of a built-in one."""
        owner = next(one for one in cls.__mro__ if "figures" in vars(one)).__module__
        inherits = owner.startswith("nip_astra.") and not cls.__module__.startswith("nip_astra.")
        return None if inherits else cls.figures

    @abstractmethod
    def train(self) -> None:
        """Run the whole job: seed, train loop, test loop, saving the models."""

    def rerun_tests(self, base_run: Path) -> None:
        """Test the trained agents of another run without training; called instead of `train`.

        `base_run` is its directory; its parameters are this run's. Refused by default.
        """
        raise ConfigurationError(
            f"the trainer {self.hyper_params.trainer!r} cannot test the agents of {base_run} again "
            "without training. Set base_run.base_run_type=parameters to train from scratch."
        )

    def get_total_num_iterations(self) -> int:
        """Return the sum of the iterations of all loops with a progress bar."""
        return total_num_iterations(self)

    @contextmanager
    def _open_progress_bar(self) -> Iterator[None]:
        """Show one progress bar for all loops within the block."""
        self.progress = open_progress(
            self.get_total_num_iterations(),
            enabled=self.settings.progress,
            tqdm_func=self.settings.tqdm_func,
            path=self.settings.progress_path,
            seconds_before=self._elapsed_seconds(),
        )
        try:
            yield
        finally:
            self.progress.close()
            self.progress = None

    def _set_seed(self) -> None:
        """Seed the global generators, for code that uses them; our own code derives its seeds.

        A resumed run restores the states of its checkpoint instead.
        """
        seed_global_generators(self.hyper_params.seed, "global")
        if self._generators is not None:
            set_global_generators(self._generators)

    def _checkpoint_store(self) -> CheckpointStore | None:
        """Return the store of the run's checkpoints; None without a run directory."""
        if self.run_directory is None:
            return None
        return self._store_in(
            self.run_directory.checkpoints_dir, marker=self.run_directory.path / HAS_CHECKPOINTS
        )

    def _store_in(self, directory: Path, *, marker: Path | None = None) -> CheckpointStore:
        """Return a store whose checkpoints include the parameters and the global generators."""
        return CheckpointStore(
            directory,
            self.settings.num_checkpoints_kept,
            about=described_run(self.hyper_params),
            also_write=save_generators,
            marker=marker,
        )

    def _has_checkpoint(self) -> bool:
        """Return whether the run continues from a checkpoint."""
        store = self._checkpoint_store()
        return store is not None and store.latest() is not None

    def resume_from(self, checkpoint: Path) -> None:
        """Restore a checkpoint of this run: the trainer's own state, and the global generators.

        `train` then continues from there.

        Raises
        ------
        CheckpointError
            When it is corrupt, incomplete, of another trainer or of other parameters, or this
            trainer keeps no state to resume from.
        """
        manifest = CheckpointStore(checkpoint.parent).verify(checkpoint)
        check_is_of_run(
            checkpoint, manifest, self.hyper_params, may_differ=self.may_change_on_resume
        )
        try:
            self.resume(checkpoint)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the trainer {self.hyper_params.trainer!r} cannot read {checkpoint}: "
                f"{describe_error(error)}. Resume with the version of nip_astra and the "
                "plug-ins that wrote it."
            ) from error
        self._generators = load_state(checkpoint / GENERATORS)
        # At once as well, for a trainer whose `train` seeds nothing.
        set_global_generators(self._generators)

    # ---- loops of one's own

    def learned_models(self) -> Mapping[str, torch.nn.Module]:
        """Hook: return the trained models by name, where `train` is a loop of one's own.

        They are built in `__init__`. Checkpoints keep them, `load_best_models` restores the best
        ones, and `run_loops` publishes them in `model/`.
        """
        return {}

    def kept_objects(self) -> Mapping[str, object]:
        """Hook: return all else that determines the rest of training, by name.

        That is every optimizer, scheduler, `EpisodeSampler` and generator of one's own; see
        `nip_astra.checkpoints.run_state.STATE_METHODS`. The global generators of Python, NumPy and
        torch are kept anyway.
        """
        return {}

    @contextmanager
    def run_loops(self) -> Iterator[None]:
        """Do in `train` all that surrounds its loops.

        Before the block: seed the global generators, forget the records after the checkpoint from
        which the run is resumed, and show one progress bar. After it: publish `learned_models`, and
        store `results`, whose `after` has the figures after training.
        """
        self._set_seed()
        self._rewind_records()
        with self._open_progress_bar():
            yield
        models = self.learned_models()
        if models:
            self._publish_models(partial(publish_modules, models), role="models")
        self.store_results({"kind": "own_loop", "training": self.training_results()})

    def remaining_iterations(self, iteration_context: IterationContext) -> Iterator[int]:
        """Yield the iterations that are not done yet, until the dev figure no longer improves.

        `end_iteration` ends each. A resumed run continues after its checkpoint.
        """
        for iteration in iteration_context.iterate(self.state.iteration):
            if self.state.has_stopped_early(self.hyper_params.training):
                self.state.log_early_stop(self.hyper_params.training)
                break
            yield iteration
            if self.state.iteration == iteration:
                raise ConfigurationError(
                    f"the trainer {self.hyper_params.trainer!r} did not end iteration "
                    f"{iteration + 1}. Call end_iteration at the end of the loop's body."
                )

    def is_evaluation_due(self) -> bool:
        """Return whether the current iteration ends with a dev evaluation, by `eval_period`."""
        period = self.hyper_params.training.eval_period
        return period > 0 and (self.state.iteration + 1) % period == 0

    def end_iteration(
        self,
        iteration_context: IterationContext,
        metrics: Mapping[str, float],
        *,
        dev: Mapping[str, float] | None = None,
    ) -> None:
        """End an iteration of `remaining_iterations`: log, save if it is due, stop after a signal.

        Parameters
        ----------
        metrics : Mapping
            Numbers to log by name; the progress bar shows the first.
        dev : Mapping, optional
            Figures of a dev evaluation, logged as `dev/<name>`. `training.dev_metric` among them,
            or else the first, selects the best checkpoint: larger is better. After
            `training.early_stopping_patience` evaluations without a better one training ends.

        Raises
        ------
        StopRequested
            After SIGINT or SIGTERM; the iteration is saved.
        """
        self.state.iteration += 1
        is_best = False
        numbers = dict(metrics)
        if dev:
            dev_metric = self.hyper_params.training.dev_metric
            selected_name = dev_metric if dev_metric in dev else next(iter(dev))
            is_best = self.state.count_evaluation(float(dev[selected_name]))
            numbers |= {f"dev/{name}": value for name, value in dev.items()}
        self.tracker.log_metrics(numbers, step=self.state.iteration)
        iteration_context.set_postfix(**numbers)
        is_last = self.state.iteration == iteration_context.num_iterations
        self._checkpoint_or_stop(is_last=is_last, is_best=is_best)

    def load_best_models(self) -> None:
        """Load the models with the best dev evaluation; the last ones stay where none is kept."""
        store = self._checkpoint_store()
        if store is None or self.state.best_dev_value is None:
            return
        best = store.open_best()
        self.load_models(best)
        logger.info("loaded the models of the best checkpoint %s", best.name)

    def training_results(self) -> dict[str, Any]:
        """Return how far training came and the best dev evaluation, for `results`."""
        best_value = self.state.best_dev_value
        training = self.hyper_params.training
        return {
            "num_iterations": self.state.iteration,
            "stopped_early": self.state.has_stopped_early(training),
            "num_optimizer_steps": self.state.num_optimizer_steps,
            "best_dev": None if best_value is None else {"value": best_value},
        }

    # ---- several processes

    def handlers(self) -> dict[str, Handler]:
        """Hook: return the handlers of requests to other processes during `run_on_leader`."""
        return {}

    def run_on_leader(
        self, work: Callable[[], T], handlers: Mapping[str, Handler] = {}
    ) -> T | None:
        """Sample or evaluate in the leading process; then broadcast its counters and trainer state.

        Returns the result in the leader, and None in the others; `handlers` are requests beside
        those of `handlers()`.
        """
        result = self.team.lead(work, {**self.handlers(), **handlers})
        if self.team.size > 1:
            state = {"run": self.state.to_dict(), "trainer": self.trainer_state()}
            state = self.team.broadcast(state)
            if not self.team.is_leader:
                self.state = self.State.from_dict(state["run"])
                self.load_trainer_state(state["trainer"])
        return result

    # ---- checkpoints

    def save_models(self, directory: Path) -> None:
        """Hook: write the models into a checkpoint; `learned_models` by default."""
        models = self.learned_models()
        if models:
            save_modules(models, directory / WEIGHTS_DIR)

    def load_models(self, directory: Path) -> None:
        """Hook: load the models of `save_models`."""
        load_modules(self.learned_models(), directory / WEIGHTS_DIR)

    def trainer_state(self) -> dict[str, Any]:
        """Hook: return further state of the trainer, beside that of its base."""
        return {}

    def load_trainer_state(self, state: Any) -> None:  # noqa: B027 - most have none
        """Hook: restore the state of `trainer_state`."""

    def kept_parts(self) -> dict[str, Part]:
        """Hook: return parts of a checkpoint beside models, state and global generators.

        A family adds its own to those of its base.
        """
        parts = {"trainer": Part(self.trainer_state, self.load_trainer_state)}
        for name, keeper in self.kept_objects().items():
            parts[f"object {name}"] = part_of_object(name, keeper)
        return parts

    def _elapsed_seconds(self) -> float:
        """Return the duration of the run, including that of earlier processes."""
        return self._seconds_before + time.monotonic() - self._started

    def _save_checkpoint(self, *, is_best: bool = False) -> None:
        """Save everything that a new process needs to continue exactly, if there is a store."""
        store = self._checkpoint_store()
        if store is None:
            return
        content = {
            "run": self.state.to_dict(),
            "elapsed_seconds": self._elapsed_seconds(),
            "warnings": self.results.get("warnings", []),
            "tracker": self.tracker.position(),
            "parts": {name: part.save() for name, part in self.kept_parts().items()},
        }

        def write(directory: Path) -> None:
            self.save_models(directory)
            save_state(directory / STATE, content)

        metadata = {
            "trainer": self.hyper_params.trainer,
            "iteration": self.state.iteration,
            "optimizer_steps": self.state.num_optimizer_steps,
        }
        path = store.save(self.state.update_count, write, metadata=metadata, is_best=is_best)
        outcomes = current_outcomes()
        if outcomes is not None:
            outcomes.begin_after(path.name)
        logger.info("saved checkpoint %s at iteration %d", path.name, self.state.iteration)

    def _publish_models(self, write: Callable[[Path], None], *, role: str) -> None:
        """Write the models into `model/`; log them and the checkpoints to the tracker.

        Adds `model_dir` to the results; does nothing without a run directory. `write` writes the
        models into a folder; `role` is their name at the tracker.
        """
        store = self._checkpoint_store()
        if self.run_directory is None or store is None:
            return
        model_dir, run_id = self.run_directory.path / MODEL_DIR, self.run_directory.run_id
        try:
            write(model_dir)
        except NipAstraError:
            # Several are OSErrors too, and a service that is gone is not a full disk.
            raise
        except (OSError, SafetensorError) as error:
            raise RunDirectoryError(
                f"{model_dir} could not be written: {error}. Free space or change the permissions, "
                "and resume the run, which is trained."
            ) from error
        for alias, path in {"latest": store.latest(), "best": store.best()}.items():
            if path is not None:
                self.tracker.log_artifact(
                    path, name=f"checkpoint-{run_id}", type="checkpoint", aliases=[alias]
                )
        self.tracker.log_artifact(model_dir, name=f"{role}-{run_id}", type="model")
        self.results["model_dir"] = str(model_dir)

    def resume(self, checkpoint: Path) -> None:
        """Hook of `resume_from`: restore models, state and parts of a checkpoint."""
        content = load_state(checkpoint / STATE)
        self.load_models(checkpoint)
        self.state = self.State.from_dict(content["run"])
        # Older versions kept none.
        self._seconds_before = content.get("elapsed_seconds", 0.0)
        # Building the trainer has warned as in the earlier process.
        warnings = [*content.get("warnings", []), *self.results.get("warnings", [])]
        if warnings:
            self.results["warnings"] = list(dict.fromkeys(warnings))
        for name, part in self.kept_parts().items():
            if part.is_memory and name not in content["parts"]:
                logger.warning(
                    "the checkpoint %s was saved by code without %s: %s",
                    checkpoint.name,
                    name,
                    part.if_missing,
                )
            else:
                part.load(content["parts"][name])
        self._records = content["tracker"]

    def _rewind_records(self) -> None:
        """Forget the records after the checkpoint from which the run continues, if any."""
        if self._records is not None:
            self.tracker.rewind(self._records)

    # ---- whether anything was measured

    def services(self) -> Mapping[str, RetryingChatModel]:
        """Hook of a family: return the run's chat models by role."""
        return self.scenario_instance.services

    def known_of(self, figures: Mapping[str, Any]) -> Known | None:
        """Hook of a family: return the units with and without a result.

        None where every unit has a result.
        """
        return None

    def _refuse_nothing(self, where: str, figures: Mapping[str, Any]) -> None:
        """End the run if a measurement has no result, or every request to a chat model failed."""
        refuse_unanswered(self.services())
        known = self.known_of(figures)
        if known is not None:
            known.refuse_nothing(where, last_failure(self.services()))

    def _check_iteration(self, figures: Mapping[str, Any], *, is_last: bool) -> None:
        """Warn of an iteration without a result; end the run if no iteration or request has one."""
        refuse_unanswered(self.services())
        known = self.known_of(figures)
        if known is None or not known.is_nothing:
            self.state.num_measured_iterations += 1
            return
        if is_last and not self.state.num_measured_iterations:
            known.refuse_nothing("every iteration of training", last_failure(self.services()))
        logger.warning(
            "iteration %d measured nothing: %s", self.state.iteration + 1, known,
            extra={"is_repeated_at_end": True},
        )  # fmt: skip

    def store_results(self, results: Mapping[str, Any]) -> None:
        """Add to `results`, write them, and log the figures of each measurement.

        `results` have the `kind` of the experiment, figures `before` and `after` training (None
        where not measured), and `training` with `num_iterations` and `num_optimizer_steps`.
        """
        self.results |= results
        # Last, also in a resumed run, which begins with those of its checkpoint.
        self.results["warnings"] = self.results.pop("warnings", [])
        for when in ("before", "after", "random_search"):
            self.tracker.log_summary(flat_figures(self.results.get(when) or {}, f"{when}/"))
        if self.run_directory is not None:
            self.run_directory.write_json(RESULTS, self.results)

    def dry_run(self) -> dict[str, Any]:
        """Run the smallest possible step and return the estimated cost of a whole run."""
        return {"num_iterations": self.get_total_num_iterations()}

    def components_to_time(self) -> dict[str, Callable[[], object]]:
        """Return repeatable parts of an iteration by name, for `nip-astra time`."""
        return {}

    def _checkpoint_or_stop(self, *, is_last: bool, is_best: bool = False) -> None:
        """Save after an iteration if a checkpoint is due, or if a signal stops the run."""
        every = self.settings.checkpoint_period
        is_due = is_last or is_best or (every > 0 and self.state.iteration % every == 0)
        if is_due:
            self._save_checkpoint(is_best=is_best)
        try:
            self._raise_if_stopped()
        except StopRequested:
            if not is_due:
                self._save_checkpoint()
            raise

    def _raise_if_stopped(self) -> None:
        """Raise `StopRequested` after a stop signal."""
        if signal_name := self.stop_flag():
            raise StopRequested(signal_name)


class TensorDictTrainer(Trainer):
    """Base of trainers of local models. Subclasses implement `train`, usually as two loops.

    `_build_train_context` and `_build_test_context` fill an `ExitStack` with the torch
    configuration in which the loops run.
    """

    def _build_train_context(self, stack: ExitStack) -> None:
        """Enter the configuration for training: thread count, gradients on."""
        stack.enter_context(self._threads())
        stack.enter_context(torch.enable_grad())

    def _build_test_context(self, stack: ExitStack) -> None:
        """Enter the configuration for testing: thread count, no gradients."""
        stack.enter_context(self._threads())
        stack.enter_context(torch.no_grad())

    @contextmanager
    def train_context(self) -> Iterator[None]:
        """Enter the configuration for training."""
        with ExitStack() as stack:
            self._build_train_context(stack)
            yield

    @contextmanager
    def test_context(self) -> Iterator[None]:
        """Enter the configuration for testing."""
        with ExitStack() as stack:
            self._build_test_context(stack)
            yield

    @contextmanager
    def _threads(self) -> Iterator[None]:
        with threads_for(self.scenario_instance.num_parameters, self.settings.num_threads):
            yield
