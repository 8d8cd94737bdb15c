"""What `nip-astra export --format huggingface` does; imported when it runs."""

from __future__ import annotations

from pathlib import Path

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.cli.evaluation_loading import run_of
from nip_astra.errors import RunDirectoryError
from nip_astra.language_models.saved_weights import write_joined
from nip_astra.language_models.sources import is_model_folder


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
