"""What `evaluate` and `compare` do with runs whose agents are chat models that play a protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.evaluation_commands import EvaluateRequest, refuse_unread
from nip_astra.cli.judging import distinct_labels, gate, show_comparison
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.storage import FIGURES, EvaluationFolder
from nip_astra.evaluation.tables import as_text
from nip_astra.evaluation.text_comparison import TextContender, compare_text_rollouts
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.files import read_yaml_mapping
from nip_astra.report.page import write_report
from nip_astra.report.summary import agent_figures
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.safe_text import to_json
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.trainers.text.analysis import stored_samplings
from nip_astra.trainers.text.evaluation import TextEvaluation, play_evaluation
from nip_astra.trainers.text.rollout_files import ANSWERS, ROLLOUTS
from nip_astra.utils.formatting import format_figure, format_value
from nip_astra.utils.nested_array_dict import NestedArrayDict

VERSION = 1
EPISODES = "episodes.jsonl"
"""A sample of an evaluation's episodes, for reports."""


def is_text_run(path: str | Path) -> bool:
    """Say whether a path is a run of chat models that play a protocol, or an evaluation of one."""
    folder = Path(path)
    if (folder / FIGURES).is_file():
        return (folder / ROLLOUTS).is_file()
    return (folder / HYPER_PARAMETERS).is_file() and bool(stored_samplings(RunDirectory(folder)))


def evaluate_text_runs(request: EvaluateRequest, settings_fields: Mapping[str, Any]) -> None:
    """Let the trained agents of each run play on held-out data, and tell how they did."""
    quieten_libraries()
    refuse_unread(
        request,
        "agents play an interaction protocol in words",
        "there is no target and no scorer. Leave it out; to let a judge rate what was said, use "
        "nip-astra analyse.",
        is_text_run,
        {"overrides": "--set", "batch_size": "--batch-size"},
    )
    split = request.played.split
    if split not in ("train", "test"):
        raise ConfigurationError(
            f"the split {split!r} was asked for, but scenarios in words have train and test. Give "
            "one of them as --split."
        )
    for path in request.runs:
        check_condition(request.judged.fail_if, _shape_of_figures(path))
    everything = []
    for path in request.runs:
        figures, folder = _evaluate(path, request, dict(settings_fields))
        write_report([path])
        if request.judged.as_json:
            say(to_json(figures, indent=2))
        else:
            console = open_console()
            console.print(figures_table(figures))
            console.print(f"evaluation {folder.path}\n", soft_wrap=True)
        everything.append(figures)
    for figures in everything:
        gate(request.judged.fail_if, conditions_of(figures))


def _shape_of_figures(path: str) -> dict[str, Any]:
    """The names of the figures that an evaluation of a run will have: those of its results."""
    run = RunDirectory.open(path)
    results = run.read_json(RESULTS) if (run.path / RESULTS).is_file() else {}
    known = results.get("after") or results.get("before")
    if not known:
        return {}
    depending_on_data = ("accuracy_of_negatives", "accuracy_of_positives", "accuracy_of_accepting")
    return dict.fromkeys((*depending_on_data, "mean_decision")) | conditions_of({"figures": known})


def _evaluate(
    path: str, request: EvaluateRequest, settings_fields: dict[str, Any]
) -> tuple[dict[str, Any], EvaluationFolder]:
    directory = RunDirectory.open(path)
    resolved = resolve_experiment(
        parameter_file=directory.path / HYPER_PARAMETERS,
        plugins=request.code.plugins,
        is_trusted=request.code.is_trusted,
    )
    played, split = request.played, request.played.split
    suffix = "-untrained" if request.is_untrained else ""
    folder = EvaluationFolder.of_run(directory.path, request.judged.name or f"{split}{suffix}")
    seed = resolved.hyper_params.seed if played.seed is None else played.seed
    models = {} if request.is_untrained else models_of_run(directory.path)
    asked = TextEvaluation("test" if split == "test" else "train", played.num_episodes, seed)
    configuration = {**vars(asked), "models": {name: one["model"] for name, one in models.items()}}
    folder.open(configuration, is_overwritten=request.judged.is_overwritten)
    is_whole = (folder.path / FIGURES).is_file()
    before = folder.figures().get("services") if is_whole else None
    settings = ExperimentSettings.from_dict(settings_fields | {"progress": False})
    settings = settings.model_copy(update={"run_directory": RunDirectory(folder.path)})
    trainer = prepare_experiment(resolved, settings).trainer
    assert isinstance(trainer, PureTextRlTrainer)
    found = play_evaluation(trainer, models, asked, folder.path / ANSWERS)
    found.rollouts.save(folder.path / ROLLOUTS)
    lines = [json.dumps(row, ensure_ascii=False) for row in found.rows]
    (folder.path / EPISODES).write_text("\n".join(lines) + "\n", encoding="utf-8")
    figures = {
        "version": VERSION,
        "kind": "interaction_proof",
        "name": folder.path.name,
        "run": directory.run_id,
        "agents": list(trainer.agent_names),
        **configuration,
        "figures": found.figures,
        # Where all answers were kept no model was opened, and what they took is known already.
        **(found.services or ({"services": before} if before else {})),
    }
    folder.write(figures, as_text([figures_table(figures)]))
    return figures, folder


def conditions_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as `--fail-if` names them: `accuracy.low`, `prover.mean_episode_reward`."""
    values: dict[str, Any] = {}
    for name, value in figures["figures"].items():
        agent, _, figure = name.rpartition("/")
        (values.setdefault(agent, {}) if agent else values)[figure] = value
    low, high = values.pop("mean_accuracy_interval")
    return values | {"accuracy": {"value": values["mean_accuracy"], "low": low, "high": high}}


def compare_text_runs(
    paths: Sequence[str], *, fail_if: str | None, out: str | None, as_json: bool
) -> None:
    """Compare every other run or evaluation with the first, pair by pair."""
    labels = distinct_labels([_label(Path(path)) for path in paths])
    first, *others = [
        _contender(Path(path), label) for path, label in zip(paths, labels, strict=True)
    ]
    found = compare_text_rollouts(first, others)
    show_comparison(found, out=out, as_json=as_json)
    for other in others:
        values = {**other.figures, "baseline": first.figures}
        gate(fail_if, values | {"comparison": found["comparisons"][other.label]})


def _label(path: Path) -> str:
    found = path.resolve()
    return f"{found.parent.parent.name}/{found.name}" if (found / FIGURES).is_file() else found.name


def _contender(path: Path, label: str) -> TextContender:
    """The rollouts of an evaluation, or of a run's last test."""
    if (path / FIGURES).is_file():
        figures = EvaluationFolder(path).figures()
        rollouts = NestedArrayDict.load(path / ROLLOUTS)
        conditions = _conditions(path.resolve().parent.parent, figures["split"], figures["seed"])
        return TextContender(label, rollouts, figures["agents"], conditions_of(figures), conditions)
    directory = RunDirectory.open(path)
    tests = [one for one in stored_samplings(directory) if one.split == "test"]
    if not tests or not directory.has_ended:
        raise DataError(
            f"the tests of {path} were to be compared, but it has made none or has not ended. "
            f"Evaluate it first: nip-astra evaluate {path}, and compare "
            f"{path / 'evaluations'}/<name>."
        )
    results = directory.read_json(RESULTS)
    rollouts = NestedArrayDict.load(tests[-1].path)
    figures = conditions_of({"figures": results["after"]})
    conditions = _conditions(path, "test", None)
    return TextContender(label, rollouts, results["agents"], figures, conditions)


def _conditions(run: Path, split: str, seed: int | None) -> dict[str, Any]:
    """What should be alike where runs are compared: split, seed, and models before training."""
    values = read_yaml_mapping(run / HYPER_PARAMETERS)
    sections = [values, *(one for one in values.values() if isinstance(one, Mapping))]
    agents = {
        name: agent["model"]
        for section in sections
        for name, agent in (section.get("agents") or {}).items()
        if isinstance(agent, Mapping) and "model" in agent
    }
    return {"split": split, "seed": values["seed"] if seed is None else seed, "models": agents}


def figures_table(figures: Mapping[str, Any]) -> Table:
    """The figures of an evaluation, for all rollouts and by agent."""
    found = agent_figures(figures["figures"])
    agents = figures["agents"]
    table = plain_table(f"{figures['run']}: {figures['name']}", "", "all", *agents)
    for name in found.overall:
        if not name.startswith("std_") and not name.endswith(("_interval", "num_episodes")):
            value = format_figure(found.overall, name)
            table.add_row(Text(name.replace("_", " ")), value, *("" for _ in agents))
    own = dict.fromkeys(name for agent in agents for name in found.by_agent.get(agent, {}))
    for name in own:
        cells = [format_value(name, found.by_agent.get(agent, {}).get(name)) for agent in agents]
        table.add_row(Text(name.replace("_", " ")), "", *cells)
    return table
