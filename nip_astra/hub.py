"""Publishing of a run's trained models on the Hugging Face hub, with a model card."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nip_astra.errors import (
    ConfigurationError,
    RunDirectoryError,
    ServiceRequestError,
    reason_of,
)
from nip_astra.evaluation.api import locate
from nip_astra.evaluation.families.base import run_of
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.content import HUB
from nip_astra.parameters.conversion import set_value
from nip_astra.parameters.files import flatten
from nip_astra.report import summary
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    TASK,
    RunRecord,
    items,
    mapping,
    read_run,
    text,
)
from nip_astra.report.sections import all_warnings
from nip_astra.report.sections import parameters as report_parameters
from nip_astra.safe_text import safe_line
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, MODEL_DIR, write_atomically
from nip_astra.utils.formatting import NOTHING

CARD = "README.md"
PARAMETERS = "nip_astra.yaml"
"""File with the parameters of the run that differ from what the trainer and scenario supply."""
_TRAINED_ROLES = ("attacker", "policy", "prover", "verifier")
_CAUTIONS = {
    CONVERSATION: " It was trained to make another model fail: do not use it outside such tests.",
    TASK: "",
    PROTOCOL: " A prover may have learned to convince a verifier of what is false.",
}
"""Further sentence of a card on the intended use, by the kind of experiment."""
FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "groups.json"),
)
"""Files of a model that are published; no other file of a run is."""
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+ -]*[\w.@+-])+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MARKUP = re.compile(r"[\\`*_\[\]()<>&!|#~]")
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

    Weights, tokenizer, card and the parameters that the user set are published, and no token,
    absolute path, text of a model or other file of the run. The hub's own login is used:
    `hf auth login`, or HF_TOKEN.

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
    record = read_run(run, has_tables=False)
    card = model_card(record, folders, license)
    parameters = yaml.safe_dump(reproduction(record).parameters, sort_keys=False)
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
        write_atomically(target / PARAMETERS, parameters)
        write_atomically(target / CARD, card)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{target} cannot be written: {error}.") from error


class Reproduction(NamedTuple):
    """What a reader of a model card needs to train the model again."""

    command: str
    parameters: dict[str, Any]
    """Contents of `PARAMETERS`: the values that neither the trainer nor the scenario supplies."""
    local_files: list[str]
    """Names of files and folders that only the author has."""


def reproduction(run: RunRecord) -> Reproduction:
    """Return the command that trains a published model again, with the parameters that it reads.

    Paths keep their last part: the command is meant for a folder with the published parameters and
    the author's files.
    """
    local_files: dict[str, None] = {}

    def publish(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: publish(item) for name, item in value.items()}
        if isinstance(value, list):
            return [publish(item) for item in value]
        if not isinstance(value, str):
            return value
        path, separator, attribute = value.partition(":")
        if _is_local(path):
            name = _file_name(path)
            local_files[name] = None
            return f"{name}{separator}{attribute}"
        return _redact(value)

    parameters: dict[str, Any] = {}
    for name in ("trainer", "scenario", "seed"):
        parameters[name] = publish(run.hyper_params.get(name))
    values = dict(flatten(run.hyper_params))
    for parameter in report_parameters(run):
        is_supplied = run.sources and not (parameter.is_given or parameter.is_of_file)
        if parameter.path not in ("plugins", *parameters) and not is_supplied:
            set_value(parameters, parameter.path, publish(values[parameter.path]))
    plugins = [publish(text(plugin)) for plugin in items(run.hyper_params.get("plugins"))]
    options = "".join(f" --plugin {shlex.quote(plugin)}" for plugin in plugins)
    return Reproduction(f"nip-astra --parameters {PARAMETERS}{options}", parameters, [*local_files])


def _is_local(path: str) -> bool:
    """Return whether a value names a file of the author's machine."""
    if _PATH.fullmatch(path):
        return True
    try:
        return ("/" in path or "." in path) and Path(path).expanduser().exists()
    except (OSError, ValueError):
        return False


def _file_name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _redact(value: str) -> str:
    """Reduce absolute paths in a text to their last part, and remove likely tokens."""
    return _TOKEN.sub("[removed]", _PATH.sub(lambda path: _file_name(path[0]), value))


def model_card(run: RunRecord, folders: list[Path], license: str | None) -> str:  # noqa: A002
    """Return the model card of a run in Markdown, with the hub's fields."""
    from huggingface_hub import ModelCardData

    values = run.hyper_params
    trainer, scenario = (Path(text(values.get(name))).name for name in ("trainer", "scenario"))
    is_adapter = (folders[0] / "adapter_config.json").is_file()
    data = ModelCardData(
        base_model=_base_models(run) or None,
        datasets=_hub_datasets(run) or None,
        license=license,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["nip_astra", "reinforcement-learning", trainer.replace("_", "-")],
    )
    packages = mapping(run.environment.get("packages"))
    versions = {"python": run.environment.get("python"), **packages}
    commit = mapping(run.environment.get("git")).get("commit")
    again = reproduction(run)
    lines = [
        f"# {_prose(run.run_id)}\n",
        f"Trained with nip_astra by {_code(trainer)} on the scenario {_code(scenario)}, seed "
        f"{_prose(text(values.get('seed')))}.\n",
        "## Figures\n",
        _prose(" ".join(summary.verdict(run))) + "\n",
        *_table(run),
        *(f"- Warning: {_prose(warning)}" for warning in all_warnings(run)),
        "\n## Data\n",
        *_data(run),
        "\n## Intended use\n",
        f"Research on training models against and with each other.{_CAUTIONS[run.kind]}\n",
        "## Licence\n",
        f"{_prose(license)}."
        if license
        else "Not stated by its author; that of the base model applies too.",
        "\n## How it was trained\n",
        f"In a folder with `{PARAMETERS}` of this repository{_listed(again.local_files)}:\n",
        f"```sh\n{_redact(safe_line(again.command)).replace('```', '')}\n```\n",
        "Versions: "
        + ", ".join(f"{name} {_prose(version)}" for name, version in versions.items() if version),
        *([f"Commit of nip_astra: {_prose(commit)}"] if commit else []),
    ]
    # The hub's fields contain names of the hub alone.
    return f"---\n{data.to_yaml()}\n---\n\n" + _redact("\n".join(lines)) + "\n"


def _listed(local_files: Sequence[str]) -> str:
    if not local_files:
        return ""
    return f" and these of its author: {', '.join(map(_code, local_files))}"


def _base_models(run: RunRecord) -> list[str]:
    """Return the ids on the hub of the models that were trained."""
    sections = [mapping(section) for section in run.hyper_params.values()]
    agents = [mapping(section.get(role)) for section in sections for role in _TRAINED_ROLES]
    models = [mapping(agent.get("language_model")).get("model") for agent in agents]
    return _hub_ids(map(text, models))


def _hub_datasets(run: RunRecord) -> list[str]:
    """Return the ids on the hub of the data sets that were read."""
    names = [name.removeprefix(HUB).partition(":")[0] for _, name in _named_data(run)]
    return _hub_ids(names)


def _hub_ids(names: Iterable[str]) -> list[str]:
    distinct = dict.fromkeys(name.removeprefix(HUB) for name in names)
    return [name for name in distinct if _HUB_ID.fullmatch(name)]


def _table(run: RunRecord) -> Iterator[str]:
    headings, rows = summary.main_table(run)
    if rows:
        yield f"| | {' | '.join(map(_prose, headings))} |\n|---|{'---|' * len(headings)}"
        for row in rows:
            cells = (_prose(cell) if cell != NOTHING else "" for cell in row.cells)
            yield f"| {_prose(row.label)} | {' | '.join(cells)} |"
        yield "\nBrackets: 95 % intervals. Figures are of held-out data.\n"


def _named_data(run: RunRecord) -> list[tuple[str, str]]:
    """Return the use and the name of each data set in the parameters."""
    task = mapping(mapping(run.hyper_params.get("task")).get("task"))
    uses = ("train", "dev", "test", "dataset")
    return [(use, text(task.get(use))) for use in uses if task.get(use)]


def _data(run: RunRecord) -> Iterator[str]:
    """Yield the data sets named by the parameters."""
    named = _named_data(run)
    for use, name in named:
        yield f"- {use}: {_code(_file_name(name) if _is_local(name) else name)}"
    if not named:
        yield "That of the scenario."


def _public(value: Any, name: str) -> Any:
    """Return a configuration without absolute paths; a tokenizer's texts are unchanged."""
    if name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        return value
    if isinstance(value, Mapping):
        return {key: _public(item, name) for key, item in value.items() if key != "token"}
    if isinstance(value, list):
        return [_public(item, name) for item in value]
    is_path = isinstance(value, str) and _PATH.fullmatch(value) is not None
    return _file_name(value) if is_path else value


def _prose(value: object) -> str:
    """Return a text in one line in which Markdown and HTML have no meaning."""
    return _MARKUP.sub(_escape_markup, safe_line(value))


def _escape_markup(sign: re.Match[str]) -> str:
    return html.escape(sign[0]) if sign[0] in "<>&" else f"\\{sign[0]}"


def _code(value: object) -> str:
    """Return a text in one line as code."""
    line = safe_line(value).replace("`", "'")
    return f"`{line}`" if line else "none"
