"""Weights & Biases: mirrors the run directory, and reads finished runs."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from nip_astra.errors import ConfigurationError, NipAstraError, TrackingError
from nip_astra.safe_text import safe_text, to_json
from nip_astra.tracking.run_directory import ENVIRONMENT, RunDirectory
from nip_astra.tracking.tracker import Tracker, grouped, grouped_figures, register_tracker
from nip_astra.trust import SIGNATURE, read_variable

STEP = "iteration"
"""Name of the step in W&B's history; W&B's own step cannot decrease, as a resumed run's may."""
ENVIRONMENT_KEY = "environment"
"""Key of the run's environment in W&B's config, beside the parameters."""
DEFAULT_PROJECT = "nip_astra"


@register_tracker("wandb")
class WandbTracker(Tracker):
    """Sends config, environment, metrics by step, tables, artifacts and the report to W&B.

    All of W&B's local folders are in the run directory. Code, git remotes and command lines, which
    may contain secrets, are not sent. Metric names are `grouped`.

    Parameters
    ----------
    settings : Mapping
        The setting `wandb` is the mode: "offline" needs neither network nor account (upload later
        with `wandb sync`), anything else is "online". `wandb_project`, `wandb_entity`,
        `wandb_group` and `wandb_tags` that are empty come from W&B's own variables.
    """

    def __init__(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(run_directory)
        mode: Literal["offline", "online"] = (
            "offline" if settings["wandb"] == "offline" else "online"
        )
        self._mode = mode
        if mode == "online":
            _require_credentials("use --wandb offline")
        root = run_directory.path.resolve()
        self._environment_before = _set_environment(root, mode)
        import wandb

        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=settings["wandb_project"]
                or read_variable("WANDB_PROJECT")
                or DEFAULT_PROJECT,
                entity=settings["wandb_entity"],
                group=settings["wandb_group"],
                tags=list(settings["wandb_tags"]) or None,
                id=run_directory.run_id,
                name=run_directory.run_id,
                mode=mode,
                dir=str(root),
                config=dict(config) | _environment(run_directory),
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    init_timeout=30,
                    disable_code=True,
                    disable_git=True,
                    x_disable_meta=True,
                ),
            )
        except Exception as error:
            self._restore_environment()
            raise TrackingError(
                f"W&B ({mode}) cannot start: {error}. Check the network and `wandb login`, or use "
                "--wandb offline or --wandb disabled."
            ) from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._run.log({**grouped_figures(values), STEP: step})

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        table = self._wandb.Table(columns=list(columns), data=[_cells(row) for row in rows])
        self._run.log({f"rollouts/{name}": table, STEP: step})

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        artifact = self._wandb.Artifact(name=name, type=type)
        artifact.add_dir(str(path))
        self._run.log_artifact(artifact, aliases=list(aliases) or None)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update({grouped(name): value for name, value in values.items()})

    def log_report(self, path: Path) -> None:
        # The page is self-contained; W&B shows it in a separate frame.
        self._run.log({"report": self._wandb.Html(str(path), inject=False)})

    def stored_entries(self) -> set[tuple[int, str]] | None:
        """Return the entries on the server; offline, remove the data of earlier processes."""
        assert self.run_directory is not None
        if self._mode == "offline":
            current_folder = Path(self._run.dir).resolve().parent
            for folder in offline_runs(self.run_directory.path):
                if folder.resolve() != current_folder:
                    shutil.rmtree(folder, ignore_errors=True)
            return set()
        if not self._run.resumed:
            return set()
        history = self._wandb.Api().run(self._run.path).scan_history()
        return {
            (int(row[STEP]), name)
            for row in history
            if row.get(STEP) is not None
            for name, value in row.items()
            if value is not None
        }

    def finish(self, *, success: bool) -> None:
        try:
            self._run.finish(exit_code=0 if success else 1)
        finally:
            self._restore_environment()

    def _restore_environment(self) -> None:
        for name, value in self._environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _environment(run_directory: RunDirectory) -> dict[str, Any]:
    """Return the run's environment, git state and device, as an entry of the config."""
    if not (run_directory.path / ENVIRONMENT).is_file():
        return {}
    environment = run_directory.read_json(ENVIRONMENT)
    environment.pop(SIGNATURE, None)  # meaningful on this machine only
    return {ENVIRONMENT_KEY: environment}


def offline_runs(run_path: Path) -> list[Path]:
    """Return the folders of a run's offline W&B data, in order, for `wandb sync`."""
    return sorted((run_path / "wandb").glob("offline-run-*"))


def _cells(row: Sequence[Any]) -> list[Any]:
    """Return a row with nested values as JSON; W&B requires equal nested types."""
    return [
        to_json(cell)
        if isinstance(cell, Mapping | list | tuple)
        else safe_text(cell)
        if isinstance(cell, str)
        else cell
        for cell in row
    ]


def _set_environment(root: Path, mode: str) -> dict[str, str | None]:
    """Move W&B's folders below `root/wandb`; return the previous variables."""
    folders = {
        # W&B itself adds the `wandb`.
        "WANDB_DIR": root,
        "WANDB_DATA_DIR": root / "wandb" / "data",
        "WANDB_CACHE_DIR": root / "wandb" / "cache",
    }
    if mode == "offline":
        # Online, settings in the user's folder may name the server.
        folders["WANDB_CONFIG_DIR"] = root / "wandb" / "config"
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    changes = {name: str(folder) for name, folder in folders.items()} | {"WANDB_SILENT": "true"}
    before = {name: read_variable(name) for name in changes}
    os.environ.update(changes)
    return before


def has_credentials() -> bool:
    """Return whether W&B may find an API key."""
    if read_variable("WANDB_API_KEY") or read_variable("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    chosen_path = read_variable("NETRC")
    for path in [chosen_path] if chosen_path else ["~/.netrc", "~/_netrc"]:
        try:
            # The host that W&B contacts depends on settings that only W&B reads.
            if netrc.netrc(os.path.expanduser(path)).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


SCHEME = "wandb://"
"""Prefix of references to runs on W&B."""
Answer = TypeVar("Answer")


class WandbReference(NamedTuple):
    """A run on W&B."""

    entity: str
    project: str
    run_id: str

    @property
    def path(self) -> str:
        """The run's path on W&B."""
        return "/".join(self)


def parse_reference(reference: str) -> WandbReference:
    """Parse `wandb://entity/project/run_id`."""
    parts = reference.removeprefix(SCHEME).split("/")
    if not reference.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise ConfigurationError(
            f"{reference!r} does not name entity, project and run. Write "
            "wandb://entity/project/run_id."
        )
    return WandbReference(*parts)


def read_config(reference: str) -> dict[str, Any]:
    """Return the recorded parameters of a run."""
    run = _find_run(reference)
    config: dict[str, Any] = _ask(reference, lambda: dict(run.config))
    # The hardware is stored beside the parameters.
    config.pop(ENVIRONMENT_KEY, None)
    return config


def download_model(reference: str, folder: Path, version: str = "latest") -> None:
    """Download a model logged by a run, by version or alias, into a folder."""
    run = _find_run(reference)
    artifacts = _ask(reference, lambda: list(run.logged_artifacts()))
    models = [artifact for artifact in artifacts if artifact.type == "model"]
    if not models:
        raise TrackingError(
            f"{reference} has no trained model: only a run that has ended logs one. Name another "
            "run."
        )
    model_by_name: dict[str, Any] = {}
    for model in reversed(models):
        model_by_name |= dict.fromkeys([model.version, *model.aliases], model)
    # An alias is set some time after the model is logged.
    model_by_name.setdefault("latest", models[-1])
    if version not in model_by_name:
        versions = ", ".join(str(model.version) for model in models)
        raise TrackingError(
            f"{reference} has no trained model {version!r}, only {versions}. Give one of them as "
            "checkpoint_version, or latest."
        )
    _ask(reference, lambda: model_by_name[version].download(root=str(folder)))


def _require_credentials(alternative: str) -> None:
    """Raise without an API key, for which W&B itself would prompt at a terminal."""
    if not has_credentials():
        raise TrackingError(
            "there is no W&B key on this machine. Log in with `wandb login`, set WANDB_API_KEY, or "
            f"{alternative}."
        )


def open_api() -> Any:
    """Return W&B's public API."""
    _require_credentials("give a run directory")
    import wandb

    return wandb.Api()


def _find_run(reference: str) -> Any:
    path = parse_reference(reference).path
    return _ask(reference, lambda: open_api().run(path))


def _ask(reference: str, question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except NipAstraError:
        raise
    except Exception as error:
        # W&B has an error class for each layer of its client.
        raise TrackingError(
            f"{reference} cannot be read from W&B: {error}. Check the name and the network, or "
            "give a run directory."
        ) from error
