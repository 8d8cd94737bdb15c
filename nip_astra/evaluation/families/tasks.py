"""Policies that answer the problems of a task."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import ConfigurationError, counted
from nip_astra.evaluation.comparison import ComparedRun, metric_of
from nip_astra.evaluation.exports import Material, Sample
from nip_astra.evaluation.families.base import (
    Evaluation,
    EvaluationFamily,
    EvaluationRequest,
    OnPart,
    Subject,
    closing_services,
    refuse_unread_overrides,
    register_evaluation_family,
    resolve_stored,
    run_of,
    service_settings,
    trained_of,
)
from nip_astra.evaluation.storage import (
    TASK_ROWS,
    EvaluationFolder,
    Row,
    RowFile,
    weights_hash,
)
from nip_astra.evaluation.tables import figure_rows, plain_table, services_table
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.types import ScenarioType
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.utils.formatting import mapping

KIND = str(ScenarioType.TASK)
MATTERS = ("split", "num_runs", "success_reward", "task", "seed")
"""Parts of an evaluation that should be equal where policies are compared."""


class _Problem(NamedTuple):
    """A policy on a problem: means over the runs with a reward, and their number."""

    problem_hash: str
    accuracy: float | None
    mean_reward: float | None
    num_runs: int


@dataclass
class TaskSubject(Subject):
    """A policy, its checkpoint (None: untrained), and the problems that it answers."""

    checkpoint: Path | None = None
    trainer: Any = None
    resolved: Any = None
    problems: Sequence[int] = ()
    num_runs: int = 1


@register_evaluation_family("task")
class Tasks(EvaluationFamily):
    """Runs whose policy answers problems."""

    name = "task"
    kind = KIND
    unit = "problems"
    row_file = TASK_ROWS
    row_unit = "problem"
    splits = ("train", "dev", "test")

    def load(
        self, run: Path, request: EvaluationRequest, settings: ExperimentSettings
    ) -> Iterator[TaskSubject]:
        from nip_astra.run import prepare_experiment

        run, checkpoint, suffix = trained_of(run, request, _best_of)
        resolved = _resolve(run, request)
        name = request.name or "-".join(filter(None, (request.split, suffix)))
        settings = service_settings(settings.model_copy(update={"progress": False}), run)
        trainer: Any = prepare_experiment(resolved, settings).trainer
        options = trainer.options.evaluation
        is_dev = request.split == "dev"
        count = options.num_dev_problems if is_dev else options.num_problems
        wanted = request.num_episodes
        problems = trainer.held_out(request.split, count if wanted is None else wanted)
        if wanted is not None and wanted > len(problems):
            runs = "num_dev_runs" if is_dev else "num_runs"
            raise ConfigurationError(
                f"num_episodes (--num-episodes) is {wanted}, but the {request.split} data has "
                f"{counted(len(problems), 'problem')}. For several runs of each: --set "
                f"task.evaluation.{runs}=4"
            )
        yield TaskSubject(
            run,
            name,
            f"{RunDirectory(run).run_id}: {name}",
            closing_services(trainer.scenario_instance.services),
            checkpoint=checkpoint,
            trainer=trainer,
            resolved=resolved,
            problems=problems,
            num_runs=options.num_dev_runs if is_dev else options.num_runs,
        )

    def units(self, subject: TaskSubject, request: EvaluationRequest) -> dict[str, Any]:
        trainer = subject.trainer
        return {
            "split": request.split,
            "seed": subject.resolved.hyper_params.seed,
            "num_problems": len(subject.problems),
            "num_runs": subject.num_runs,
            "success_reward": trainer.options.evaluation.success_reward,
            "policy": _described(subject),
            "task": _task_parameters(trainer),
        }

    def num_units(self, subject: TaskSubject) -> int:
        return len(subject.problems)

    def play(
        self,
        subject: TaskSubject,
        folder: EvaluationFolder,
        request: EvaluationRequest,
        on_part: OnPart,
    ) -> dict[str, Any]:
        from nip_astra.language_models.services.retrying import resume_usage
        from nip_astra.trainers.service.metrics import ANSWER_COLUMNS, answer_rows
        from nip_astra.trainers.service_use import services_used

        trainer, problems, num_runs = subject.trainer, subject.problems, subject.num_runs
        services = trainer.scenario_instance.services
        resume_usage(services, f"evaluation {folder.path.name}", is_new=subject.is_new)
        if subject.checkpoint is not None:
            trainer.load_models(subject.checkpoint)
        options = trainer.options.evaluation
        size = options.batch_size
        file = RowFile(folder.path / TASK_ROWS, size * num_runs)
        num_done = len(problems)
        if len(file.read()) < len(problems) * num_runs:
            num_done = file.recover() * size
        on_part(num_done)
        if num_done < len(problems):
            with trainer.measuring():
                for start in range(num_done, len(problems), size):
                    some = problems[start : start + size]
                    rollout = trainer.play_held_out(request.split, some, num_runs)
                    played = answer_rows(rollout, some, options.success_reward)
                    file.append([dict(zip(ANSWER_COLUMNS, row, strict=False)) for row in played])
                    on_part(len(some))
        figures = _figures(trainer, file.read(), num_runs, folder.path.name)
        return {**self.units(subject, request), "figures": figures, **services_used(services)}

    def pair_key(self, unit: _Problem) -> Hashable:
        return unit.problem_hash

    def shape(self, run: Path, request: EvaluationRequest) -> dict[str, Any]:
        from nip_astra.trainers.service.metrics import Tally

        options = getattr(_resolve(run_of(run)[0], request).hyper_params, KIND).evaluation
        num_runs = options.num_dev_runs if request.split == "dev" else options.num_runs
        tally = Tally(1.0, [0] * num_runs, [1.0] * num_runs, num_runs, [True] * num_runs)
        return self.values({"figures": tally.report(num_runs)})

    def compared_run(self, evaluation: Evaluation, label: str) -> ComparedRun:
        figures = evaluation.figures
        problems = _problems(evaluation.rows)
        is_single = all(one.num_runs <= 1 for one in problems)
        limit = figures.get("success_reward")
        possible = [] if limit is None else [float(limit)]
        accuracy = metric_of(lambda one: one.accuracy, is_binary=is_single)
        # Without a limit, rewards above 1 have no accuracy.
        has_accuracy = "accuracy" in mapping(figures.get("figures"))
        return ComparedRun(
            label,
            problems,
            [self.pair_key(one) for one in problems],
            {
                **({"accuracy": accuracy} if has_accuracy else {}),
                "mean_reward": metric_of(
                    lambda one: one.mean_reward, "observed", possible=possible
                ),
            },
            figures,
            {name: figures.get(name) for name in MATTERS},
        )

    def tables(self, figures: Mapping[str, Any]) -> list[RenderableType]:
        problems = counted(figures["num_problems"], f"{figures['split']} problem")
        runs = f", {figures['num_runs']} runs of each" if figures["num_runs"] > 1 else ""
        table = plain_table(f"{figures['run']}: {figures['name']}, {problems}{runs}", "", "value")
        for label, cell in figure_rows(figures):
            table.add_row(Text(label), cell)
        services = figures.get("services")
        return [table, *([services_table(services)] if services else [])]

    def material(self, path: Path, request: EvaluationRequest) -> Material:
        return replace(super().material(path, request), sample=_sample)


def _sample(row: Row) -> Sample:
    """Return an answer as shown by Inspect."""
    reward = row["reward"]
    scores = {} if reward is None else {"reward": (float(reward), str(row["answer"]))}
    messages = [
        ("assistant" if role == "assistant" else "user", text) for role, text, *_ in row["messages"]
    ]
    named = {name: row[name] for name in ("problem", "run", "is_correct")}
    return Sample(messages, str(row["answer"]), scores, named, str(row["solution"]))


def _best_of(run: Path) -> Path | None:
    """Return the final weights of a finished run: those best on dev problems."""
    return CheckpointStore(run / "checkpoints").best() if RunDirectory(run).has_ended else None


def _resolve(run: Path, request: EvaluationRequest) -> Any:
    """Resolve the experiment of a run, with changes to how its policy is measured."""
    trainer = str(RunDirectory.open(run).read_yaml(HYPER_PARAMETERS).get("trainer"))
    refuse_unread_overrides(request.overrides, (f"{KIND}.", f"{trainer}.train_service."), str(run))
    size = request.batch_size
    batches = [] if size is None else [f"{KIND}.evaluation.batch_size={size}"]
    overrides = [*request.overrides, *batches]
    return resolve_stored(run, request, overrides=overrides, seed=request.seed)


def _described(subject: TaskSubject) -> dict[str, Any]:
    """Return the weights that answer: a checkpoint's, over a model's, here or at a service."""
    stored = subject.resolved.hyper_params.to_dict()
    section = stored.get(subject.resolved.hyper_params.trainer) or {}
    found = {
        "checkpoint": None,
        "weights": None,
        "language_model": stored[KIND]["policy"]["language_model"],
        "train_service": section.get("train_service"),
    }
    checkpoint = subject.checkpoint
    if checkpoint is not None:
        found["checkpoint"] = checkpoint.name
        found["weights"] = weights_hash(checkpoint / subject.trainer.policy_role)
    return found


def _task_parameters(trainer: Any) -> dict[str, Any]:
    """Return the task, and how the policy is prompted and sampled, without the weights' source."""
    found: dict[str, Any] = trainer.options.to_dict()
    sampled = {name: one for name, one in found["policy"].items() if name != "language_model"}
    return {"policy": sampled, "task": found["task"], "max_turns": found["max_turns"]}


def _figures(trainer: Any, rows: Sequence[Row], num_runs: int, name: str) -> dict[str, Any]:
    """Return the figures of all answers, whose reward may be missing."""
    from nip_astra.trainers.service.metrics import Tally
    from nip_astra.utils.intervals import paired_difference

    known = [row for row in rows if row["reward"] is not None]
    tally = Tally(
        trainer.options.evaluation.success_reward,
        [row["problem"] for row in known],
        [row["reward"] for row in known],
        len(rows),
        [row["is_correct"] for row in known],
    )
    figures = tally.report(num_runs)
    has_accuracy = "num_correct" in figures
    trainer._refuse_nothing(f"the evaluation {name}", figures)
    num_missing = sum(_is_missing(row) for row in rows)
    if num_missing:
        # They end their episode with reward 0, as answers that are cut.
        figures["num_missing"] = num_missing
    num_unknown = len(rows) - len(known)
    if num_unknown and has_accuracy:
        # What the rate would be if all missing rewards were failures, or successes.
        num_correct = figures["num_correct"]
        figures["accuracy_if_unknown_failed"] = num_correct / len(rows)
        figures["accuracy_if_unknown_passed"] = (num_correct + num_unknown) / len(rows)
    spread = paired_difference(tally.rewards, tally.problems, is_bounded=False).estimate
    if math.isfinite(spread.low):
        figures["mean_reward_interval"] = [spread.low, spread.high]
    return figures


def _is_missing(row: Row) -> bool:
    """Return whether the policy's last answer ended before its text began."""
    _, _, *more = row["messages"][-1]
    return bool(more and more[0].get("is_missing"))


def _problems(rows: Sequence[Row]) -> list[_Problem]:
    """Return the problems in order; those without a reward have no numbers."""
    runs: dict[int, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["problem"], []).append(row)
    found = []
    for own in runs.values():
        known = [row for row in own if row["reward"] is not None]
        count = len(known)
        is_correct = [row["is_correct"] for row in known]
        accuracy = sum(is_correct) / count if count and None not in is_correct else None
        reward = sum(row["reward"] for row in known) / count if count else None
        found.append(_Problem(str(own[0]["problem_hash"]), accuracy, reward, count))
    return found
