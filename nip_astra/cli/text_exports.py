"""What `nip-astra export` writes of runs whose agents are chat models that play a protocol."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nip_astra.cli.evaluation_loading import RunCode
from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.evaluation.exports.material import make_folder
from nip_astra.evaluation.exports.text_rollouts import (
    TextMaterial,
    TextSampling,
    write_text_csv,
    write_text_inspect,
    write_text_jsonl,
    write_text_parquet,
    write_text_tensorboard,
)
from nip_astra.evaluation.rows import read_rows
from nip_astra.evaluation.storage import FIGURES, EvaluationFolder
from nip_astra.language_models.sources import is_model_folder
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenario_base.text.models import models_of_run
from nip_astra.tracking.run_directory import (
    ENVIRONMENT,
    HYPER_PARAMETERS,
    RESULTS,
    RunDirectory,
)
from nip_astra.trainers.text.analysis import stored_samplings
from nip_astra.trainers.text.rollout_files import ROLLOUTS
from nip_astra.utils.nested_array_dict import NestedArrayDict

WEIGHTS = "huggingface"
"""The format that writes what has been trained, in the layout of transformers."""
TEXT_FORMATS: dict[str, Callable[[TextMaterial, Path], list[Path]]] = {
    "csv": write_text_csv,
    "jsonl": write_text_jsonl,
    "parquet": write_text_parquet,
    "tensorboard": write_text_tensorboard,
    "inspect": write_text_inspect,
}
"""Formats of rollouts in words."""


def run_of_text(path: Path) -> Path:
    """The run directory of a text run, or of an evaluation of one."""
    return path.parent.parent if (path / FIGURES).is_file() else path


def export_text_run(path: Path, form: str, folder: Path, code: RunCode) -> list[Path]:
    """Write the rollouts of a run or of an evaluation, or its trained models.

    Raises
    ------
    ConfigurationError
        When the format is none of rollouts in words, or there is no model to write.
    """
    if form != WEIGHTS and form not in TEXT_FORMATS:
        raise ConfigurationError(
            f"an export of {path} as {form!r} was asked for, but its agents play an interaction "
            "protocol in words: there is no target whose failures could be listed. Take one of "
            f"{', '.join([*TEXT_FORMATS, WEIGHTS])}."
        )
    if form == WEIGHTS:
        return _write_models(run_of_text(path), folder)
    make_folder(folder)
    return TEXT_FORMATS[form](_material(path, code), folder)


def _material(path: Path, code: RunCode) -> TextMaterial:
    run = run_of_text(path)
    directory = RunDirectory.open(run)
    resolved = resolve_experiment(
        parameter_file=run / HYPER_PARAMETERS, plugins=code.plugins, is_trusted=code.is_trusted
    )
    protocol = build_protocol_handler(resolved.hyper_params)
    is_evaluation = run != path
    samplings, figures = _evaluation(path) if is_evaluation else _run(directory)
    source = path / (ROLLOUTS if is_evaluation else HYPER_PARAMETERS)
    has_environment = (run / ENVIRONMENT).is_file()
    return TextMaterial(
        run_id=directory.run_id,
        name=path.resolve().name if is_evaluation else directory.run_id,
        created=datetime.fromtimestamp(source.stat().st_mtime, UTC).isoformat(timespec="seconds"),
        samplings=samplings,
        agent_names=protocol.agent_names,
        channel_names=protocol.message_channel_names,
        verifier_names=protocol.verifier_names,
        figures=figures,
        metrics=read_rows(run / "metrics.jsonl"),
        hyper_params=resolved.hyper_params.to_dict(),
        environment=directory.read_json(ENVIRONMENT) if has_environment else {},
    )


def _evaluation(path: Path) -> tuple[list[TextSampling], Mapping[str, Any]]:
    told = EvaluationFolder(path).figures()
    rollouts = NestedArrayDict.load(path / ROLLOUTS)
    return [TextSampling(str(told.get("split", "test")), None, rollouts)], told["figures"]


def _run(directory: RunDirectory) -> tuple[list[TextSampling], Mapping[str, Any]]:
    """All rollouts that a run has kept, and what its last test has found; nothing before one."""
    samplings = [
        TextSampling(one.split, one.iteration, NestedArrayDict.load(one.path))
        for one in stored_samplings(directory)
    ]
    has_results = (directory.path / RESULTS).is_file()
    after = directory.read_json(RESULTS).get("after") if has_results else None
    return sorted(samplings, key=lambda one: (one.iteration or 0, one.split == "test")), after or {}


def _write_models(run: Path, folder: Path) -> list[Path]:
    """Copy the trained model of each group, with its tokenizer, to `models/<group>`."""
    models = {name: state["model"] for name, state in models_of_run(run).items()}
    trained = {name: model for name, model in models.items() if model is not None}
    if not trained:
        raise ConfigurationError(
            f"the trained models of {run} were asked for, but its jobs have trained none: its "
            "agents speak through the models that they began with. Take those where its "
            "hyper_parameters.yaml says, or export a run that has trained."
        )
    elsewhere = [name for name, model in trained.items() if not is_model_folder(Path(model))]
    if elsewhere:
        raise ConfigurationError(
            f"the trained models of {run} were asked for, but that of the group {elsewhere[0]!r} "
            f"is {trained[elsewhere[0]]!r} at the service that trained it, and its weights are not "
            "here. Ask the service for them, or speak to it under that name; runs with _type: "
            "local keep theirs in their folder jobs."
        )
    written = []
    for name, model in trained.items():
        target = folder / "models" / name
        try:
            shutil.copytree(model, target, dirs_exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{target} was to be written, but {error}. Give a folder that you may write to as "
                "--output."
            ) from error
        written.append(target)
    return written
