"""Publishing of a run's trained models on the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nip_astra.errors import (
    ConfigurationError,
    RunDirectoryError,
    ServiceRequestError,
    reason_of,
)
from nip_astra.evaluation.api import locate
from nip_astra.evaluation.families.base import run_of
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.report import summary
from nip_astra.report.records import RunRecord, mapping, read_run, text
from nip_astra.report.sections import all_warnings, commands
from nip_astra.safe_text import safe_text
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, MODEL_DIR, write_atomically
from nip_astra.utils.formatting import NOTHING

CARD = "README.md"
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "groups.json"),
)
"""Files of a model that are published; no other file of a run is."""
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+ -]*[\w.@+-])+")
_TOKEN = re.compile(r"\b(?:hf|sk|wandb)[_-][A-Za-z0-9_-]{16,}")


def push_to_hub(
    run: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    license: str | None = None,  # noqa: A002 - the hub's word
    folder: str | Path | None = None,
    dry_run: bool = False,
    settings: ExperimentSettings | None = None,
) -> str:
    """Publish the trained model of a run with a model card, and return its address.

    Weights, tokenizer and card are published, and no token, absolute path, text of a model or
    other file of the run. The hub's own login is used: `hf auth login`, or HF_TOKEN.

    Parameters
    ----------
    run : str or Path
        A run id or run directory.
    repo_id : str
        `user/name` on the hub; created if it does not exist.
    private : bool
        Whether a new repository is private.
    license : str, optional
        Its name on the hub, for instance "apache-2.0"; by default the card states none.
    folder : str or Path, optional
        Where the published files are written too; it must not exist, or be empty.
    dry_run : bool
        Write `folder` and publish nothing; returns the folder.

    Raises
    ------
    ConfigurationError
        When `repo_id` is not a valid name, or `folder` is missing or not empty.
    RunDirectoryError
        When the run has no trained language model.
    ServiceRequestError
        When the hub refuses it or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # lazy export

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigurationError(f"{repo_id!r} is not a name on the hub: {error}") from error
    if dry_run and folder is None:
        raise ConfigurationError("a dry run needs a folder (--output) to write to.")
    path = run_of(locate(run, settings))[0]
    if not (path / HYPER_PARAMETERS).is_file():
        raise RunDirectoryError(f"{run} is not a run directory. Give for instance runs/<run id>.")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "model" if folder is None else Path(folder)
        write_model_folder(path, target, license=license)
        if dry_run:
            return str(target)
        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            found = api.upload_folder(
                repo_id=repo_id,
                folder_path=target,
                commit_message=f"Trained with nip_astra: run {path.resolve().name}",
            )
        except Exception as error:  # the errors of its HTTP library have no common base class
            raise ServiceRequestError(
                f"{repo_id} could not be published: {reason_of(error)}. Log in with `hf auth "
                "login`, or check the name and the network."
            ) from error
    return str(getattr(found, "repo_url", None) or f"{api.endpoint}/{repo_id}")


def write_model_folder(run: Path, target: Path, *, license: str | None = None) -> None:  # noqa: A002
    """Write the published files of a run: its models (several in separate folders) and the card."""
    from nip_astra.language_models.sources import is_model_folder

    model = run / MODEL_DIR
    folders = (
        [model] if is_model_folder(model) else sorted(filter(is_model_folder, model.glob("*")))
    )
    if not folders:
        raise RunDirectoryError(
            f"{run} has no trained language model in {MODEL_DIR}/. Give a finished run of a "
            "trainer of language models."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is not an empty folder. Give another --output.")
    card = model_card(read_run(run, has_tables=False), folders, license)
    try:
        for folder in folders:
            own = target / folder.relative_to(model)
            own.mkdir(parents=True, exist_ok=True)
            for file in sorted({file for pattern in FILES for file in folder.glob(pattern)}):
                # A link may point to another user's file.
                if file.is_symlink() or not file.is_file():
                    continue
                if file.suffix == ".json":
                    plain = _public(json.loads(file.read_text(encoding="utf-8")), file.name)
                    text = json.dumps(plain, indent=2, ensure_ascii=False)
                    (own / file.name).write_text(text, encoding="utf-8")
                else:
                    shutil.copyfile(file, own / file.name)
        write_atomically(target / CARD, card)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{target} cannot be written: {error}.") from error


def model_card(run: RunRecord, folders: list[Path], license: str | None) -> str:  # noqa: A002
    """Return the model card of a run in Markdown, with the hub's fields."""
    from huggingface_hub import ModelCardData

    values = run.hyper_params
    trainer, scenario = (Path(text(values.get(name))).name for name in ("trainer", "scenario"))
    is_adapter = (folders[0] / "adapter_config.json").is_file()
    data = ModelCardData(
        license=license,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["nip_astra", "reinforcement-learning", trainer.replace("_", "-")],
    )
    packages = mapping(run.environment.get("packages"))
    versions = {"python": run.environment.get("python"), **packages}
    found = mapping(run.environment.get("git")).get("commit")
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {run.run_id}\n",
        f"Trained with nip_astra by `{trainer}` on the scenario `{scenario}`, seed "
        f"{text(values.get('seed'))}.\n",
        "## Figures\n",
        " ".join(summary.verdict(run)) + "\n",
        *_table(run),
        *(f"- Warning: {_line(one)}" for one in all_warnings(run)),
        "\n## Data\n",
        *_data(run),
        "\n## Intended use\n",
        "Research on training models against and with each other. An attacker of a stress test was "
        "trained to make another model fail: do not use it outside such tests.\n",
        "## Licence\n",
        f"{license}."
        if license
        else "Not stated by its author; that of the base model applies too.",
        "\n## How it was trained\n",
        f"```sh\n{_line(commands(run)[-1][1])}\n```\n",
        "Versions: " + ", ".join(f"{name} {one}" for name, one in versions.items() if one),
        *([f"Commit of nip_astra: {found}"] if found else []),
    ]
    # Paths keep their last part only, and likely tokens are removed.
    card = _PATH.sub(lambda path: re.split(r"[/\\]", path[0])[-1], "\n".join(lines))
    return _TOKEN.sub("[removed]", card) + "\n"


def _table(run: RunRecord) -> Iterator[str]:
    headings, rows = summary.main_table(run)
    if rows:
        yield f"| | {' | '.join(headings)} |\n|---|{'---|' * len(headings)}"
        for row in rows:
            cells = (cell if cell != NOTHING else "" for cell in row.cells)
            yield f"| {_line(row.label)} | {' | '.join(cells)} |"
        yield "\nBrackets: 95 % intervals. Figures are of held-out data.\n"


def _data(run: RunRecord) -> Iterator[str]:
    """Yield the data sets named by the parameters."""
    found = mapping(mapping(run.hyper_params.get("task")).get("task"))
    named = {
        name: one for name, one in found.items() if name in ("train", "dev", "test", "dataset")
    }
    for name, one in named.items():
        if one:
            yield f"- {name}: `{_line(one)}`"
    if not any(named.values()):
        yield "That of the scenario."


def _public(value: Any, name: str) -> Any:
    """Return a configuration without absolute paths; a tokenizer's texts are unchanged."""
    if name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        return value
    if isinstance(value, Mapping):
        return {key: _public(one, name) for key, one in value.items() if key != "token"}
    if isinstance(value, list):
        return [_public(one, name) for one in value]
    is_path = isinstance(value, str) and _PATH.fullmatch(value) is not None
    return re.split(r"[/\\]", value)[-1] if is_path else value


def _line(value: object) -> str:
    return safe_text(value).replace("\n", " ").replace("|", "\\|")
