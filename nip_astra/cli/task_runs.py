"""What `evaluate` and `compare` do with runs whose policy answers the problems of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.evaluation_commands import EvaluateRequest, refuse_unread
from nip_astra.cli.evaluation_loading import (
    refuse_unread_overrides,
    run_of,
    with_service_files,
)
from nip_astra.cli.judging import distinct_labels, gate, show_comparison
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.rows import read_rows
from nip_astra.evaluation.storage import (
    FIGURES,
    TASK_ROWS,
    EvaluationFolder,
    find_evaluation,
    weights_hash,
)
from nip_astra.evaluation.tables import (
    as_text,
    services_table,
)
from nip_astra.evaluation.task_comparison import TaskContender, compare_task_rows
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.asking import close_all
from nip_astra.language_models.services.patience import open_accounts
from nip_astra.parameters.types import ScenarioType
from nip_astra.progress import open_progress
from nip_astra.report.page import write_report
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.safe_text import to_json
from nip_astra.scenario_base.tasks.base import Split
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.trainers.service.evaluation import evaluation_of, play_task_evaluation
from nip_astra.trainers.service.measuring import Tally
from nip_astra.trainers.service_base import ServiceTrainer
from nip_astra.trainers.service_use import services_used
from nip_astra.utils.formatting import format_value

VERSION = 1
KIND = str(ScenarioType.TASK)
SPLITS: dict[str, Split] = {"train": "train", "dev": "dev", "test": "test"}


class _Policy(NamedTuple):
    """Whose answers are measured.

    Attributes
    ----------
    checkpoint : Path or None
        Where its weights lie; None before training.
    suffix : str
        What it adds to the name of an evaluation; empty for the run's own result.
    """

    run: Path
    checkpoint: Path | None
    suffix: str


def is_task_run(path: str | Path) -> bool:
    """Say whether a path is a run whose policy answers problems, its checkpoint or evaluation."""
    folder = Path(path)
    if (folder / FIGURES).is_file():
        return (folder / TASK_ROWS).is_file()
    run, _ = run_of(folder)
    if not (run / HYPER_PARAMETERS).is_file():
        return False
    stored = RunDirectory(run).read_yaml(HYPER_PARAMETERS)
    section = stored.get(KIND) if isinstance(stored, Mapping) else None
    return isinstance(section, Mapping) and {"policy", "task"} <= section.keys()


def evaluate_task_runs(request: EvaluateRequest, settings_fields: Mapping[str, Any]) -> None:
    """Let the policy of each run answer held-out problems, and tell how it did."""
    quieten_libraries()
    _check(request)
    for path in request.runs:
        _check_condition(path, request)
    everything = []
    for path in request.runs:
        figures, folder = _evaluate(path, request, dict(settings_fields))
        write_report([folder.path.parent.parent])
        if request.judged.as_json:
            say(to_json(figures, indent=2))
        else:
            console = open_console()
            for part in task_tables(figures):
                console.print(part)
            console.print(f"evaluation {folder.path}\n", soft_wrap=True)
        everything.append(figures)
    for figures in everything:
        gate(request.judged.fail_if, conditions_of(figures))


def _check(request: EvaluateRequest) -> None:
    """Refuse what means nothing for the problems of a task."""
    refuse_unread(
        request,
        "policy answers the problems of a task",
        "there is no attacker, no target and no scorer to choose. Leave it out; parameters of the "
        "task are changed by --set task.a=b.",
        is_task_run,
    )
    if request.played.split not in SPLITS:
        raise ConfigurationError(
            f"the split {request.played.split!r} was asked for, but a task has "
            f"{', '.join(SPLITS)}. Give one of them as --split."
        )


def _check_condition(path: str, request: EvaluateRequest) -> None:
    """Refuse a condition on figures that the evaluation of a run will not have."""
    if request.judged.fail_if is None:
        return
    resolved = _resolve(run_of(path)[0], request)
    options = getattr(resolved.hyper_params, KIND).evaluation
    is_dev = SPLITS[request.played.split] == "dev"
    num_runs = options.num_dev_runs if is_dev else options.num_runs
    figures = Tally(1.0, [0] * num_runs, [1.0] * num_runs, num_runs).report(num_runs)
    check_condition(request.judged.fail_if, conditions_of({"figures": figures}))


def _policy_of(path: str, *, is_untrained: bool) -> _Policy:
    """Whose weights a path means: a run's last word, or a checkpoint's."""
    run, checkpoint = run_of(path)
    if is_untrained and checkpoint is not None:
        raise ConfigurationError(
            f"the policy of {path} was to be evaluated as it was before training (--untrained), "
            "but that is a checkpoint. Give the run with --untrained, or the checkpoint without."
        )
    if is_untrained:
        return _Policy(run, None, "untrained")
    store = CheckpointStore(run / "checkpoints")
    if checkpoint is not None:
        store.verify(checkpoint)
        return _Policy(run, checkpoint, checkpoint.name)
    # A run that has ended was left with the weights that did best on dev problems, if any did.
    found = store.best() if RunDirectory(run).has_ended else None
    found = found or store.latest()
    if found is None:
        raise ConfigurationError(
            f"the policy of {path} was to be evaluated, but the run has no checkpoint: nothing was "
            "trained yet, or checkpoints were removed. Give --untrained for the policy before "
            "training, or resume the run."
        )
    store.verify(found)
    return _Policy(run, found, "")


def _resolve(run: Path, request: EvaluateRequest) -> ResolvedExperiment:
    """The experiment of a run, with what changes how its policy is measured."""
    directory = RunDirectory.open(run)
    trainer = str(directory.read_yaml(HYPER_PARAMETERS).get("trainer"))
    refuse_unread_overrides(request.overrides, (f"{KIND}.", f"{trainer}.train_service."), str(run))
    size = request.played.batch_size
    batches = [] if size is None else [f"{KIND}.evaluation.batch_size={size}"]
    return resolve_experiment(
        parameter_file=directory.path / HYPER_PARAMETERS,
        overrides=[*request.overrides, *batches],
        seed=request.played.seed,
        plugins=request.code.plugins,
        is_trusted=request.code.is_trusted,
    )


def _evaluate(
    path: str, request: EvaluateRequest, settings_fields: dict[str, Any]
) -> tuple[dict[str, Any], EvaluationFolder]:
    policy = _policy_of(path, is_untrained=request.is_untrained)
    resolved = _resolve(policy.run, request)
    split = SPLITS[request.played.split]
    suffix = f"-{policy.suffix}" if policy.suffix else ""
    name = request.judged.name or f"{split}{suffix}"
    folder = EvaluationFolder.of_run(policy.run, name)
    settings = ExperimentSettings.from_dict(settings_fields | {"progress": False})
    settings = with_service_files(settings, policy.run)
    prepared = prepare_experiment(resolved, settings)
    trainer, services = prepared.trainer, prepared.scenario_instance.services
    assert isinstance(trainer, ServiceTrainer)
    try:
        asked = evaluation_of(trainer, split, request.played.num_episodes)
        configuration = {
            "split": split,
            "seed": resolved.hyper_params.seed,
            "num_problems": len(asked.problems),
            "num_runs": asked.num_runs,
            "success_reward": trainer.options.evaluation.success_reward,
            "policy": _described(policy, trainer, resolved),
            "task": _task_parameters(trainer),
        }
        is_new = folder.open(configuration, is_overwritten=request.judged.is_overwritten)
        open_accounts(services, f"evaluation {name}", is_new=is_new)
        if policy.checkpoint is not None:
            trainer.load_models(policy.checkpoint)
        progress = open_progress(len(asked.problems), enabled=not request.judged.as_json)
        progress.set_description(f"{RunDirectory(policy.run).run_id}: {name}")
        try:
            found = play_task_evaluation(trainer, asked, folder.path / TASK_ROWS, progress.step)
        finally:
            progress.close()
        used = services_used(services)
    finally:
        close_all(list(services.values()))
    figures = {
        "version": VERSION,
        "kind": KIND,
        "name": name,
        "run": RunDirectory(policy.run).run_id,
        **configuration,
        "figures": found,
        **used,
    }
    folder.write(figures, as_text(task_tables(figures)))
    return figures, folder


def _described(
    policy: _Policy, trainer: ServiceTrainer, resolved: ResolvedExperiment
) -> dict[str, Any]:
    """Whose weights answer: those of a checkpoint, over a model's, here or at a service."""
    stored = resolved.hyper_params.to_dict()
    section = stored.get(resolved.hyper_params.trainer) or {}
    found = {
        "checkpoint": None,
        "weights": None,
        "language_model": stored[KIND]["policy"]["language_model"],
        "train_service": section.get("train_service"),
    }
    if policy.checkpoint is not None:
        found["checkpoint"] = policy.checkpoint.name
        found["weights"] = weights_hash(policy.checkpoint / trainer.policy_role)
    return found


def _task_parameters(trainer: ServiceTrainer) -> dict[str, Any]:
    """What the policy is asked, and how it speaks; not where its weights came from."""
    found: dict[str, Any] = trainer.options.to_dict()
    speaks = {name: one for name, one in found["policy"].items() if name != "language_model"}
    return {"policy": speaks, "task": found["task"], "max_turns": found["max_turns"]}


def conditions_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as `--fail-if` names them: `accuracy.low`, `mean_reward.value`."""
    told = figures["figures"]
    values: dict[str, Any] = {}
    for name, value in told.items():
        if name.startswith("num_"):
            values[name] = value
        elif not name.endswith("_interval"):
            low, high = told.get(f"{name}_interval") or (None, None)
            values[name] = {"value": value, "low": low, "high": high}
    return values


def compare_task_runs(
    paths: Sequence[str], *, fail_if: str | None, out: str | None, as_json: bool
) -> None:
    """Compare every other run or evaluation with the first, problem by problem."""
    others = [path for path in paths if not is_task_run(path)]
    if others:
        raise ConfigurationError(
            f"{', '.join(paths)} were to be compared, but {others[0]} is no run of a task whose "
            "policy answers problems, and no evaluation of one, as another of them is. Give runs "
            "of one kind: nip-astra compare runs/a runs/b"
        )
    folders = [find_evaluation(path) for path in paths]
    labels = distinct_labels([f"{one.path.parent.parent.name}/{one.path.name}" for one in folders])
    first, *second = [
        TaskContender(label, read_rows(one.path / TASK_ROWS), one.figures())
        for label, one in zip(labels, folders, strict=True)
    ]
    found = compare_task_rows(first, second)
    show_comparison(found, out=out, as_json=as_json)
    baseline = conditions_of(first.figures)
    for one in second:
        values = conditions_of(one.figures) | {"baseline": baseline}
        gate(fail_if, values | {"comparison": found["comparisons"][one.label]})


def task_tables(figures: Mapping[str, Any]) -> list[Table]:
    """The figures of an evaluation with their intervals, and what services took."""
    told = figures["figures"]
    problems = f"{figures['num_problems']:,} {figures['split']} problems"
    runs = f", {figures['num_runs']} runs of each" if figures["num_runs"] > 1 else ""
    heading = f"{figures['run']}: {figures['name']}, {problems}{runs}"
    table = plain_table(heading, "", "value", "95 % interval")
    for name, value in told.items():
        if name.endswith("_interval"):
            continue
        write = _count if name.startswith("num_") else partial(format_value, name)
        bounds = told.get(f"{name}_interval")
        interval = f"[{write(bounds[0])}, {write(bounds[1])}]" if bounds else ""
        table.add_row(Text(name.replace("_", " ")), write(value) + _counts(name, told), interval)
    services = figures.get("services")
    return [table, *([services_table(services)] if services else [])]


def _counts(name: str, told: Mapping[str, Any]) -> str:
    """Of how many answers, or problems with a reward for every run, a share is."""
    if name == "accuracy":
        return f", {told['num_right']:,} of {told['num_answers']:,}"
    return f" of {told['num_complete_problems']:,}" if name.startswith("pass_at_") else ""


def _count(value: float | None) -> str:
    return f"{value:,.0f}"
