"""Evaluate, score, compare and export runs of any family, from a script, a notebook or a shell."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nip_astra.checkpoints.store import BEST, LATEST
from nip_astra.errors import (
    ConfigurationError,
    NothingMeasuredError,
    RunDirectoryError,
    UnknownNameError,
    nearest_names,
)
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.exports import EXPORT_FORMATS, export_material
from nip_astra.evaluation.families.base import (
    CHAT_FILES,
    FAMILIES,
    Evaluation,
    EvaluationFamily,
    EvaluationRequest,
    as_list,
    family_of_run,
    is_text_attacker,
    refuse_without_effect,
    run_of,
    run_of_stored,
)
from nip_astra.evaluation.run_results import Estimate, estimates_of, frame_of, plot_estimates
from nip_astra.evaluation.storage import EVALUATIONS, FIGURES, EvaluationFolder, reading
from nip_astra.evaluation.tables import Printable, comparison_tables, matrix_tables
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin
from nip_astra.progress import showing
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory, finite

if TYPE_CHECKING:
    import pandas as pd

PathLike = str | Path
WEIGHTS = "huggingface"
"""Export format of trained weights, in the layout of transformers."""
EXPORTS = "exports"
"""Default folder of exports in a run's directory."""
TRANSFER = "transfer"
OF_STORED = frozenset({"plugins", "is_trusted", "fail_if"})
"""Options of functions that read stored evaluations."""
OF_RATING = frozenset({"name", "scorers", "threshold", "labelled", "embedder", "overwrite"})
"""Further options of `score`."""


@dataclass(frozen=True)
class Matrix(Printable):
    """Several evaluations, stored in `path`; for attackers and targets a transfer matrix."""

    evaluations: list[Evaluation]
    path: Path | None = None

    def __iter__(self) -> Iterator[Evaluation]:
        return iter(self.evaluations)

    def __len__(self) -> int:
        return len(self.evaluations)

    def __getitem__(self, place: int) -> Evaluation:
        return self.evaluations[place]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per evaluation: its `label`, and figures as columns `a.b`."""
        return frame_of([{"label": one.label, **one.values} for one in self.evaluations])

    def plot(self) -> Any:
        """Plot the figures that have an interval, one panel per evaluation."""
        named = ((one.label, estimates_of(one.values)) for one in self.evaluations)
        found = [one._replace(label=f"{label}: {one.label}") for label, own in named for one in own]
        return plot_estimates(found, "evaluations")

    def tables(self) -> list[Any]:
        """Return the transfer matrix for a terminal; without one, the tables of each evaluation."""
        if self.path is None:
            return [part for one in self.evaluations for part in one.tables()]
        cells = RunDirectory(self.path.parent).read_json(self.path.name)["cells"]
        return matrix_tables(cells)


@dataclass(frozen=True)
class Comparison(Printable):
    """Unit-by-unit comparison of evaluations with the first.

    Attributes
    ----------
    baseline : str
        Label of the first.
    comparisons : dict
        By label of each other one: `num_pairs`, and by metric both means, the difference with its
        interval, and p-values without (`p_value`) and with (`p_holm`) Holm's adjustment.
    warnings : list of str
        Units without a partner, conditions that differ, and the evaluations' own warnings.
    evaluations : dict
        All of them, by label.
    """

    baseline: str
    comparisons: dict[str, dict[str, Any]]
    warnings: list[str]
    evaluations: dict[str, Evaluation] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with NaN as null."""
        names = ("baseline", "comparisons", "warnings")
        found: dict[str, Any] = finite({name: getattr(self, name) for name in names})
        return found

    def values(self, label: str) -> dict[str, Any]:
        """Return an evaluation's figures for conditions: its own, `baseline.*`, `comparison.*`."""
        baseline = self.evaluations[self.baseline].values
        compared = {"baseline": baseline, "comparison": self.comparisons[label]}
        return self.evaluations[label].values | compared

    def _metrics(self) -> Iterator[dict[str, Any]]:
        for label, metrics in self.comparisons.items():
            for name, metric in metrics.items():
                if isinstance(metric, Mapping):
                    yield {"label": label, "metric": name, **metric}

    def to_frame(self) -> pd.DataFrame:
        """Return one row per metric and evaluation."""
        return frame_of([*self._metrics()])

    def plot(self) -> Any:
        """Plot each metric's difference from the first evaluation, with its interval."""
        found = [
            Estimate(f"{one['label']}: {one['metric']}", one["difference"], one["low"], one["high"])
            for one in self._metrics()
        ]
        return plot_estimates(found, f"difference from {self.baseline}", zero=True)

    def tables(self) -> list[Any]:
        """Return one line per metric and evaluation, and the warnings, for a terminal."""
        return comparison_tables(vars(self))


def evaluate(
    runs: PathLike | Sequence[PathLike],
    *,
    settings: ExperimentSettings | Mapping[str, Any] | None = None,
    progress: bool = True,
    on_evaluation: Callable[[Evaluation], None] = lambda _: None,
    **options: Any,
) -> Evaluation | Matrix:
    """Evaluate runs of one family on held-out data, or resume an interrupted evaluation.

    Parameters
    ----------
    runs : path or sequence of paths
        Run ids, run directories or checkpoints. Attackers may also be model folders, lists of
        probes and YAML files of chat models.
    settings : ExperimentSettings or Mapping, optional
        Device, threads, `runs_dir` and limits of services.
    on_evaluation : callable
        Called with each evaluation when it is finished.
    **options
        See `EvaluationRequest`.

    Returns
    -------
    Evaluation or Matrix
        Of one run (with one target) an `Evaluation`, else a `Matrix` of them.

    Raises
    ------
    ConfigurationError
        Before anything is played: an option has no effect, or runs differ in their family.
    NothingMeasuredError
        When no unit has a verdict.
    """
    settings, request = _settings(settings), _request(options)
    paths = [str(locate(run, settings)) for run in as_list(runs)]
    if not paths:
        raise ConfigurationError("evaluate needs a run. Give its id or path.")
    families = [_family_of(path, request) for path in paths]
    family = families[0]
    _require_one_family(paths, families)
    family.check(paths, request)
    if request.fail_if is not None:
        for path in paths:
            check_condition(request.fail_if, family.shape(Path(path), request))
    found: list[Evaluation] = []
    from nip_astra.report.page import write_report

    for path in paths:
        evaluations = _evaluated(family, Path(path), request, settings, progress)
        for evaluation in _with_bar(evaluations, "Evaluating", enabled=progress):
            if (evaluation.run / HYPER_PARAMETERS).is_file():
                write_report([evaluation.run])
            found.append(evaluation)
            on_evaluation(evaluation)
    if len(paths) == 1 and len(found) == 1 and isinstance(runs, str | Path):
        return found[0]
    file = _keep_matrix(found, request) if "target" in found[0].figures and len(found) > 1 else None
    return Matrix(found, file)


def _evaluated(
    family: EvaluationFamily,
    run: Path,
    request: EvaluationRequest,
    settings: ExperimentSettings,
    progress: bool,
) -> Iterator[Evaluation]:
    """Evaluate each subject of a run, or resume an interrupted evaluation."""
    for subject in family.load(run, request, settings):
        with subject.work:
            configuration = family.units(subject, request)
            folder = EvaluationFolder.of_run(subject.place, subject.name)
            with folder.opened(configuration, is_overwritten=request.overwrite) as is_new:
                subject.is_new = is_new
                total = family.num_units(subject) or None
                with showing(subject.label, total, enabled=progress) as bar:
                    try:
                        played = family.play(subject, folder, request, bar.step)
                        figures = family.figures(subject, folder, played)
                    except NothingMeasuredError:
                        # The same command starts over.
                        folder.forget_rows()
                        raise
        yield family.store(folder, figures)


def _with_bar(
    evaluations: Iterator[Evaluation], what: str, *, enabled: bool
) -> Iterator[Evaluation]:
    """Show a bar while the next evaluation is awaited, for instance while models are loaded."""
    while True:
        with showing(what, enabled=enabled):
            found = next(evaluations, None)
        if found is None:
            return
        yield found


def score(
    run: PathLike,
    scorers: str | Sequence[str] = (),
    *,
    settings: ExperimentSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Evaluation:
    """Rate the stored texts of a run or evaluation by other scorers, without a language model.

    Parameters
    ----------
    run : path
        A run id, run directory or evaluation.
    scorers : str or sequence of str
        Registered names, YAML files, or "own"; the first decides.
    settings, **options
        As in `evaluate`: `name`, `threshold`, `labelled`, `embedder`, `overwrite`, `plugins` and
        `is_trusted`.

    Raises
    ------
    ConfigurationError
        When the run has no such texts, or an option has no effect.
    """
    settings = _settings(settings)
    request = _request({**options, "scorers": scorers}, OF_STORED | OF_RATING)
    path = locate(run, settings)
    family = _stored_family(path, request)
    with showing("Rating", enabled=settings.progress):
        open_bar = partial(showing, counts_requests=True, enabled=settings.progress)
        evaluation = family.score(path, request, settings, open_bar)
    from nip_astra.report.page import write_report

    if (evaluation.run / HYPER_PARAMETERS).is_file():
        write_report([evaluation.run])
    return evaluation


def compare(
    first: PathLike | Sequence[PathLike],
    *others: PathLike,
    settings: ExperimentSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Compare evaluations, or the newest ones of runs, with the first, unit by unit.

    Parameters
    ----------
    first, *others : path
        Run ids, run directories or evaluations; or one sequence of them.
    settings, **options
        As in `evaluate`; `plugins` and `is_trusted` are read.

    Raises
    ------
    ConfigurationError
        When fewer than two are given, or their families differ.
    DataError
        When two share no unit.
    """
    settings, request = _settings(settings), _request(options, OF_STORED)
    given = [*as_list(first), *others]
    paths = [locate(one, settings) for one in given]
    if len(paths) < 2:
        raise ConfigurationError("compare needs two or more runs or evaluations.")
    twice = next((path for place, path in enumerate(paths) if path in paths[:place]), None)
    if twice is not None:
        raise ConfigurationError(f"{twice} is given twice. Give different runs to compare.")
    # After the paths were checked: it needs scipy.
    from nip_astra.evaluation import comparison

    with reading(*paths):
        evaluations = [_stored_evaluation(path, request) for path in paths]
        family = evaluations[0].family
        own = [one.label for one in evaluations]
        _require_one_family(own, [one.family for one in evaluations])
        labels = comparison.distinct_labels(own)
        first_run, *other_runs = map(family.compared_run, evaluations, labels)
        found = comparison.compare(first_run, other_runs, unit=family.unit)
    return Comparison(**found, evaluations=dict(zip(labels, evaluations, strict=True)))


def export(
    run: PathLike,
    form: str,
    output: PathLike | None = None,
    *,
    settings: ExperimentSettings | Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Path]:
    """Write rows, figures and curves, or trained weights, in the format of another tool.

    Parameters
    ----------
    run : path
        A run id, run directory, evaluation, or checkpoint.
    form : str
        A registered format, or "huggingface" for weights.
    output : path, optional
        Folder to write to; `RUN/exports` by default.

    Returns
    -------
    list of Path
        Written files, or folders of weights.

    Raises
    ------
    UnknownNameError
        When no format has that name.
    ConfigurationError
        When the run has nothing for it.
    """
    settings, request = _settings(settings), _request(options)
    known = [*EXPORT_FORMATS.names(), WEIGHTS]
    if form not in known:
        raise UnknownNameError("format", form, known, "Give one as --format.")
    path = locate(run, settings)
    with showing(f"Exporting {form}", enabled=settings.progress):
        if form == WEIGHTS:
            return _export_weights(path, None if output is None else Path(output))
        if not (path / FIGURES).is_file():
            # Rows and curves of a checkpoint are those of its run.
            path, _ = run_of(path)
        family = _stored_family(path, request)
        with reading(path):
            material = family.material(path, request)
        folder = run_of_stored(path) / EXPORTS if output is None else Path(output)
        return export_material(material, form, folder)


def locate(run: PathLike, settings: ExperimentSettings | None = None) -> Path:
    """Return the path of a run, evaluation or model, given as a path or relative to `runs_dir`.

    Raises
    ------
    RunDirectoryError
        When there is none.
    """
    path = Path(run)
    runs_dir = Path((settings or ExperimentSettings()).runs_dir)
    for place in (path, runs_dir / path):
        # The links of checkpoints may be lost.
        is_checkpoint = place.name in (LATEST, BEST) and place.parent.is_dir()
        if place.exists() or place.is_symlink() or is_checkpoint:
            return place
    if is_text_attacker(run) and path.suffix not in CHAT_FILES:
        return path
    names = [one.parent.name for one in runs_dir.glob(f"[!.]*/{HYPER_PARAMETERS}")]
    near = nearest_names(str(run), sorted(names), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RunDirectoryError(
        f"there is no run or file {str(run)!r}, here or in {runs_dir}.{hint} Give the path of a "
        "run directory, or the name of one of its runs."
    )


def _request(
    options: Mapping[str, Any], readable: frozenset[str] | None = None
) -> EvaluationRequest:
    """Return the options as a request, after loading plug-ins; refuse those that are not read."""
    request = EvaluationRequest(**options)
    if readable is not None:
        unread = [name for name in request.given() if name not in readable]
        refuse_without_effect(unread, "stored evaluations")
    for spec in request.plugins:
        load_plugin(spec)
    return request


def _require_one_family(names: Sequence[str], families: Sequence[EvaluationFamily]) -> None:
    """Check that all runs are of one family."""
    for name, family in zip(names, families, strict=True):
        if family.name != families[0].name:
            raise ConfigurationError(
                f"{names[0]} is a {families[0].name} run, and {name} a {family.name} run. Give "
                "runs of one family."
            )


def _settings(settings: ExperimentSettings | Mapping[str, Any] | None) -> ExperimentSettings:
    if isinstance(settings, ExperimentSettings):
        return settings
    return ExperimentSettings.from_dict(dict(settings or {}))


def _family_of(path: str, request: EvaluationRequest) -> EvaluationFamily:
    """Return the family of the evaluated run or model."""
    run, _ = run_of(path)
    if (run / HYPER_PARAMETERS).is_file():
        return family_of_run(run, request)
    # Attackers are models, files of probes, and chat models.
    return FAMILIES.get("conversation")()


def _stored_family(path: Path, request: EvaluationRequest) -> EvaluationFamily:
    """Return the family of a run or of a stored evaluation."""
    if (path / FIGURES).is_file():
        return Evaluation.read(path).family
    return _family_of(str(path), request)


def _stored_evaluation(path: Path, request: EvaluationRequest) -> Evaluation:
    """Return the evaluation at a path, or the one used to compare the run there."""
    if (path / FIGURES).is_file():
        return Evaluation.read(path)
    if not (path / HYPER_PARAMETERS).is_file():
        raise RunDirectoryError(
            f"{path} is neither a run nor an evaluation. Give RUN or RUN/{EVALUATIONS}/<name>."
        )
    return family_of_run(path, request).stored(path, request)


def _export_weights(path: Path, output: Path | None) -> list[Path]:
    """Write the model of a checkpoint with its shards joined, or a run's trained models."""
    from nip_astra.checkpoints.store import CheckpointStore
    from nip_astra.language_models.adapters import write_joined
    from nip_astra.language_models.sources import is_model_folder

    run, checkpoint = run_of(run_of_stored(path))
    is_run = (run / HYPER_PARAMETERS).is_file() and checkpoint is None
    if is_run and family_of_run(run, EvaluationRequest()).name == "text_protocol":
        return _export_trained_groups(run, output or run / EXPORTS)
    checkpoint = checkpoint or CheckpointStore(run / "checkpoints").latest()
    if checkpoint is None:
        raise RunDirectoryError(
            f"{path} holds no checkpoint. Give a run that has saved one, or a checkpoint, such as "
            "runs/<run id>/checkpoints/latest."
        )
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    models = [folder for folder in sorted(checkpoint.iterdir()) if is_model_folder(folder)]
    if len(models) != 1:
        raise RunDirectoryError(
            f"{checkpoint} holds {len(models)} language models, and one can be exported. Give a "
            "checkpoint of a trainer of language models."
        )
    folder = output or run / EXPORTS / checkpoint.name
    write_joined(models[0], folder)
    return [folder]


def _export_trained_groups(run: Path, folder: Path) -> list[Path]:
    """Copy models trained by jobs to `models/<group>`."""
    from nip_astra.language_models.sources import is_model_folder
    from nip_astra.scenario_base.text.models import models_of_run

    trained = {n: one["model"] for n, one in models_of_run(run).items() if one["model"]}
    if not trained:
        raise ConfigurationError(
            f"the jobs of {run} have trained no model. Its agents' models are named in "
            "hyper_parameters.yaml."
        )
    written = []
    for name, model in trained.items():
        if not is_model_folder(Path(model)):
            raise ConfigurationError(
                f"the model of the group {name!r} is {model!r} at the service that trained it. Use "
                "it under that name; runs with _type: local keep theirs in jobs/."
            )
    for name, model in trained.items():
        target = folder / "models" / name
        try:
            shutil.copytree(model, target, dirs_exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{target} cannot be written: {error}. Give another --output."
            ) from error
        written.append(target)
    return written


def _keep_matrix(evaluations: Sequence[Evaluation], request: EvaluationRequest) -> Path:
    """Store the transfer matrix beside the first run's evaluations."""
    from nip_astra.evaluation.families.conversations import file_name
    from nip_astra.evaluation.summary import VERSION

    kept = ("failure_rate", "turn_failure_rate", "probability_of_failure", "name", "warnings")
    cells: list[dict[str, Any]] = []
    for one in evaluations:
        cell = {"attacker": one.figures["attacker"], "target": one.figures["target"]}
        cell |= {"configuration": one.configuration["sha256"]}
        cell |= {name: one.figures[name] for name in kept}
        # Two runs may have the same id in different folders.
        pairs = [(other["attacker"], other["target"]) for other in cells]
        if (cell["attacker"], cell["target"]) in pairs:
            cell["attacker"] = str(one.run)
        cells.append(cell)
    folder = RunDirectory(evaluations[0].path.parent)
    stem = TRANSFER if request.name is None else f"{TRANSFER}-{file_name(request.name)}"
    name, number = f"{stem}.json", 2
    # A matrix of other evaluations is kept.
    while (folder.path / name).is_file() and not request.overwrite:
        if _identities(folder.read_json(name).get("cells", [])) == _identities(cells):
            break
        name, number = f"{stem}-{number}.json", number + 1
    return folder.write_json(name, {"version": VERSION, "cells": cells})


def _identities(cells: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    names = ("attacker", "target", "name", "configuration")
    return [[cell.get(name) for name in names] for cell in cells]
