"""What `nip-astra export` does; imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from nip_astra.cli.curve_exports import export_curves, is_run_without_conversations
from nip_astra.cli.evaluation_loading import RunCode, resolve_run
from nip_astra.cli.stored_evaluations import final_episodes, stored_rows
from nip_astra.cli.terminal import say
from nip_astra.cli.text_exports import TEXT_FORMATS, WEIGHTS, export_text_run, run_of_text
from nip_astra.cli.text_runs import is_text_run
from nip_astra.cli.weight_export import export_weights
from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.evaluation.exports.inspect_log import write_inspect
from nip_astra.evaluation.exports.material import Material, make_folder
from nip_astra.evaluation.exports.tables import write_csv, write_hitlog, write_jsonl
from nip_astra.evaluation.exports.tensorboard import write_tensorboard
from nip_astra.evaluation.measures import judge
from nip_astra.evaluation.rows import read_rows
from nip_astra.evaluation.storage import ROWS, EvaluationFolder
from nip_astra.tracking.run_directory import ENVIRONMENT, RunDirectory

FORMATS: dict[str, Callable[[Material, Path], list[Path]]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "hitlog": write_hitlog,
    "tensorboard": write_tensorboard,
    "inspect": write_inspect,
}
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
