"""What `nip-astra export` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.cli.evaluation_loading import RunCode, resolve_run, run_of
from nip_astra.cli.stored_evaluations import final_episodes, stored_rows
from nip_astra.cli.task_runs import is_task_run
from nip_astra.cli.terminal import say
from nip_astra.cli.text_exports import TEXT_FORMATS, WEIGHTS, export_text_run, run_of_text
from nip_astra.cli.text_runs import is_text_run
from nip_astra.errors import ConfigurationError, RunDirectoryError, UnknownNameError
from nip_astra.evaluation.exports.curves import export_curves, write_tensorboard
from nip_astra.evaluation.exports.inspect_log import write_inspect
from nip_astra.evaluation.exports.material import Material, make_folder
from nip_astra.evaluation.exports.tables import write_csv, write_hitlog, write_jsonl
from nip_astra.evaluation.measures import judge
from nip_astra.evaluation.rows import read_rows
from nip_astra.evaluation.storage import ROWS, EvaluationFolder
from nip_astra.language_models.saved_weights import write_joined
from nip_astra.language_models.sources import is_model_folder
from nip_astra.tracking.run_directory import ENVIRONMENT, HYPER_PARAMETERS, RunDirectory

FORMATS: dict[str, Callable[[Material, Path], list[Path]]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "hitlog": write_hitlog,
    "tensorboard": write_tensorboard,
    "inspect": write_inspect,
}
ROLLOUTS = Path("rollouts") / "evaluation.jsonl"
EXPORTS = "exports"
"""Folder in a run's directory, unless another is asked for."""


def export(path: str, *, form: str, output: str | None, code: RunCode) -> None:
    """Write a run's newest evaluation, or the one given, in a format of others."""
    known = sorted({*FORMATS, *TEXT_FORMATS, WEIGHTS})
    if form not in known:
        raise UnknownNameError("format", form, known, "Give one of them as --format.")
    if is_text_run(path):
        folder = run_of_text(Path(path)) / EXPORTS if output is None else Path(output)
        files = export_text_run(Path(path), form, folder, code)
    elif form == WEIGHTS:
        files = [export_weights(path, None if output is None else Path(output))]
    elif is_run_without_conversations(path):
        folder = Path(path) / EXPORTS if output is None else Path(output)
        files = export_curves(Path(path), form, folder)
    else:
        files = _export_conversations(Path(path), form, output, code)
    for written in files:
        say(f"export     {written}")


def is_run_without_conversations(path: str | Path) -> bool:
    """Say whether a path is a run whose stored rollouts are no turns of an attacker."""
    run = Path(path)
    if not (run / HYPER_PARAMETERS).is_file():
        return False
    values = RunDirectory(run).read_yaml(HYPER_PARAMETERS)
    has_protocol = isinstance(values, Mapping) and values.get("interaction_protocol") is not None
    if has_protocol or is_task_run(run):
        return True
    if not (run / ROLLOUTS).is_file():
        return False
    return not all("probe" in row for row in read_rows(run / ROLLOUTS)[:1])


def export_weights(path: str, output: Path | None) -> Path:
    """Write the model of a run's newest checkpoint, or of the one given, with its parts joined.

    Parameters
    ----------
    output : Path, optional
        Folder to write to; `exports/<checkpoint>` of the run.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    RunDirectoryError
        When there is no checkpoint, or none with a language model.
    CheckpointError
        When it is not as it was saved.
    """
    run, checkpoint = run_of(path)
    checkpoint = checkpoint or CheckpointStore(run / "checkpoints").latest()
    if checkpoint is None:
        raise RunDirectoryError(
            f"the weights of {path} were to be exported, but it holds no checkpoint. Give a run "
            "that has saved one, or a checkpoint, such as runs/<run id>/checkpoints/latest."
        )
    CheckpointStore(checkpoint.parent).verify(checkpoint)
    found = [folder for folder in sorted(checkpoint.iterdir()) if is_model_folder(folder)]
    if len(found) != 1:
        raise RunDirectoryError(
            f"the weights of {checkpoint} were to be exported, but it holds {len(found)} language "
            "models, and one is written. Give a checkpoint of a trainer of language models."
        )
    folder = output or run / "exports" / checkpoint.name
    write_joined(found[0], folder)
    return folder


def _export_conversations(path: Path, form: str, output: str | None, code: RunCode) -> list[Path]:
    """Write what an attacker and a target said."""
    material, run = _material(path, code)
    if form not in FORMATS:
        raise ConfigurationError(
            f"an export of {path} as {form!r} was asked for, but that format is of runs whose "
            f"agents are chat models that play a protocol. Take one of {', '.join(FORMATS)}."
        )
    folder = run / EXPORTS if output is None else Path(output)
    make_folder(folder)
    return FORMATS[form](material, folder)


def _material(path: Path, code: RunCode) -> tuple[Material, Path]:
    source, run = stored_rows(path)
    folder = EvaluationFolder(source.parent) if source.name == ROWS else None
    figures = folder.figures() if folder is not None else {}
    resolved = resolve_run(run, code)
    section = getattr(resolved.hyper_params, resolved.kind)
    threshold = float(figures.get("failure_threshold", section.failure_threshold))
    episodes = final_episodes(source, run)
    judge(episodes, threshold)
    directory = RunDirectory(run)
    has_environment = (run / ENVIRONMENT).is_file()
    written = datetime.fromtimestamp(source.stat().st_mtime, UTC)
    material = Material(
        run_id=directory.run_id,
        name=str(figures.get("name", source.stem)),
        created=written.isoformat(timespec="seconds"),
        threshold=threshold,
        episodes=episodes,
        figures=figures,
        configuration=folder.configuration() if folder is not None else {},
        metrics=read_rows(run / "metrics.jsonl"),
        hyper_params=resolved.hyper_params.to_dict(),
        environment=directory.read_json(ENVIRONMENT) if has_environment else {},
    )
    return material, run
