"""One evaluation for every family of runs, and the interface of a family."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import RenderableType

from nip_astra.checkpoints.store import BEST, LATEST, MANIFEST, CheckpointStore
from nip_astra.errors import ConfigurationError, DataError, UnknownNameError
from nip_astra.evaluation.conditions import check_condition
from nip_astra.evaluation.exports import Material
from nip_astra.evaluation.run_results import (
    estimates_of,
    frame_of,
    plot_estimates,
    results_of,
)
from nip_astra.evaluation.storage import EVALUATIONS, FIGURES, EvaluationFolder, Row, read_rows
from nip_astra.evaluation.tables import Printable, as_text
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.parameters_base import MAX_COUNT, MAX_WHOLE
from nip_astra.parameters.types import ScenarioType, TrainerType
from nip_astra.registry import Registry
from nip_astra.scenario_base.conversation.prompts import DEFAULT_COLUMN
from nip_astra.tracking.run_directory import (
    ENVIRONMENT,
    HYPER_PARAMETERS,
    MODEL_DIR,
    RunDirectory,
)

if TYPE_CHECKING:
    import pandas as pd

    from nip_astra.evaluation.comparison import ComparedRun
    from nip_astra.resolving.resolution import ResolvedExperiment


RANGES = {
    "seed": (0, MAX_WHOLE),
    "num_episodes": (1, 1_000_000),
    "num_turns": (1, 1_000),
    "probability_episodes": (0, 1_000_000),
    "batch_size": (1, MAX_COUNT),
}
"""Smallest and largest values of the whole numbers in `EvaluationRequest`."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Options of `evaluate` and `score`; None takes the run's own value.

    Attributes
    ----------
    targets : Sequence[str]
        Models, or runs whose target is evaluated; the scenario's own if empty.
    scorers : Sequence[str]
        Registered names, YAML files, or "own"; the first decides.
    name : str, optional
        Folder in `RUN/evaluations`; derived from the options by default.
    threshold : float, optional
        Score from which a response fails, in (0, 1].
    labelled : str, optional
        File of labelled responses, or "none".
    embedder : str, optional
        Groups failing probes: "ngram", or an encoder's model.
    untrained, overwrite : bool
        Evaluate the model before training; start over instead of continuing.
    overrides : Sequence[str]
        Assignments "a.b=c" to the run's parameters.
    scenario, parameters, column : str, optional
        The scenario of an attacker that is not a run, and the column of a list of probes.
    fail_if : str, optional
        Condition on the figures; checked before anything is played.
    plugins, is_trusted
        As in `resolve_experiment`.
    """

    targets: Sequence[str] = ()
    scorers: Sequence[str] = ()
    name: str | None = None
    split: str = "test"
    seed: int | None = None
    num_episodes: int | None = None
    num_turns: int | None = None
    probability_episodes: int | None = None
    importance_sampling: bool = True
    batch_size: int | None = None
    threshold: float | None = None
    labelled: str | None = None
    embedder: str | None = None
    untrained: bool = False
    overwrite: bool = False
    overrides: Sequence[str] = ()
    scenario: str | None = None
    parameters: str | None = None
    column: str = DEFAULT_COLUMN
    fail_if: str | None = None
    plugins: Sequence[str] = ()
    is_trusted: bool = False

    def __post_init__(self) -> None:
        for name in ("targets", "scorers", "overrides", "plugins"):
            object.__setattr__(self, name, as_list(getattr(self, name)))
        check_condition(self.fail_if)
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if value is not None and not (is_whole and low <= value <= high):
                raise ConfigurationError(
                    f"{name} (--{name.replace('_', '-')}) is {value!r}. Give a whole number from "
                    f"{low} to {high:,}."
                )
            object.__setattr__(self, name, None if value is None else int(value))
        # NaN is in no range.
        if self.threshold is not None and not 0.0 < self.threshold <= 1.0:
            raise ConfigurationError(
                f"threshold (--threshold) {self.threshold:g} is not in (0, 1]; scores lie between "
                "0 and 1. Give for instance 0.5."
            )

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        defaults = vars(EvaluationRequest())
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


OF_ATTACKERS = frozenset(
    {
        *("targets", "scorers", "labelled", "embedder", "threshold", "num_turns", "column"),
        *("probability_episodes", "importance_sampling", "scenario", "parameters"),
    }
)
"""Options about attackers and targets."""
OPTION_NAMES = {
    "targets": "--target",
    "scorers": "--scorer",
    "importance_sampling": "--monte-carlo-only",
    "overrides": "--set",
    "plugins": "--plugin",
    "is_trusted": "--trust",
}
"""Options of the command line whose names differ from those of `EvaluationRequest`."""


@dataclass(frozen=True)
class Evaluation(Printable):
    """One evaluation of a run.

    Attributes
    ----------
    path : Path
        Its folder; for the test at the end of a run, the run directory.
    figures : dict
        Content of `evaluation.json`.
    configuration : dict
        Everything that determines the result; empty if unknown.
    """

    path: Path
    family: EvaluationFamily = field(repr=False)
    figures: dict[str, Any] = field(repr=False)
    configuration: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """Read a stored evaluation, also of an older version."""
        folder = EvaluationFolder(path)
        figures = folder.figures()
        return cls(path, family_of_figures(figures), figures, folder.configuration())

    @property
    def name(self) -> str:
        """Name of the evaluation."""
        return self.path.resolve().name

    @property
    def run(self) -> Path:
        """Directory of the run."""
        is_run = (self.path / HYPER_PARAMETERS).is_file()
        return self.path if is_run else self.path.resolve().parent.parent

    @property
    def label(self) -> str:
        """Run and evaluation, as comparisons call it."""
        return self.name if self.run == self.path else f"{self.run.name}/{self.name}"

    @cached_property
    def rows(self) -> list[Row]:
        """One row per turn, episode of a protocol, or run of a problem."""
        return self.family.rows(self)

    @cached_property
    def parts(self) -> list[dict[str, Any]]:
        """Costs of each part of the work."""
        return EvaluationFolder(self.path).parts()

    @property
    def values(self) -> dict[str, Any]:
        """The figures as conditions name them: `failure_rate.high`, `accuracy.low`."""
        return self.family.values(self.figures)

    def tables(self) -> list[RenderableType]:
        """Return the figures as tables for a terminal."""
        return self.family.tables(self.figures)

    def plot(self) -> Any:
        """Plot the figures that have an interval, with matplotlib."""
        return plot_estimates(estimates_of(self.values), self.label)

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a frame; groups in a row become columns `a.b`."""
        return frame_of(self.rows)


@dataclass
class Subject:
    """A loaded model to evaluate, with its options resolved.

    Attributes
    ----------
    place, name : Path, str
        The run, or the folder beside an attacker's file; and the evaluation's name.
    label : str
        For a progress bar.
    work : AbstractContextManager
        Entered while the subject is played; closes what was opened.
    is_new : bool
        Whether the evaluation begins, and does not continue.
    """

    place: Path
    name: str
    label: str = ""
    work: AbstractContextManager[Any] = field(default_factory=nullcontext)
    is_new: bool = True


OnPart = Callable[[int], None]
"""Called with the number of units that were played."""
OpenProgress = Callable[[str, int], AbstractContextManager[Any]]
"""Opens a progress bar with a label and a total."""


class EvaluationFamily(ABC):
    """Base of evaluations of one family of runs. Subclasses implement the abstract methods.

    Attributes
    ----------
    name : str
        As registered; a trainer names it as `evaluation_family`.
    kind : str
        The kind of run in `evaluation.json`.
    unit : str
        What pairs of a comparison share, in the plural.
    row_file, row_unit : str
        The file of rows in the folder of an evaluation, and the kind of a row in exports.
    splits : tuple of str
        Splits that can be evaluated; empty if the scenario decides.
    unread : frozenset of str
        Options of `EvaluationRequest` that have no effect, and are refused.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = ""
    unit: ClassVar[str] = "datapoints"
    row_file: ClassVar[str] = ""
    row_unit: ClassVar[str] = "row"
    splits: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[frozenset[str]] = OF_ATTACKERS

    @abstractmethod
    def load(
        self, run: Path, request: EvaluationRequest, settings: ExperimentSettings
    ) -> Iterator[Any]:
        """Load the subjects of a run: one, or an attacker with each target."""

    @abstractmethod
    def units(self, subject: Any, request: EvaluationRequest) -> dict[str, Any]:
        """Return the configuration: the units to play, and all else that determines the result."""

    @abstractmethod
    def play(
        self, subject: Any, folder: EvaluationFolder, request: EvaluationRequest, on_part: OnPart
    ) -> Any:
        """Play what the folder does not hold yet, and return what `figures` takes."""

    @abstractmethod
    def pair_key(self, unit: Any) -> Hashable:
        """Return the key of a unit; units of equal keys are paired."""

    @abstractmethod
    def tables(self, figures: Mapping[str, Any]) -> list[RenderableType]:
        """Return the figures for a terminal."""

    @abstractmethod
    def compared_run(self, evaluation: Evaluation, label: str) -> ComparedRun:
        """Return the evaluation's units, keys, metrics and conditions, for a comparison."""

    def figures(self, subject: Any, folder: EvaluationFolder, played: Any) -> dict[str, Any]:
        """Return the content of `evaluation.json`; by default that which was played, with a head.

        Raises
        ------
        NothingMeasuredError
            When no unit has a verdict.
        """
        head = {"version": 1, "kind": self.kind}
        if _KINDS.get(self.kind) != self.name:
            head["family"] = self.name
        return {
            **head,
            "name": folder.path.name,
            "run": RunDirectory(subject.place).run_id,
            **played,
        }

    def rows(self, evaluation: Evaluation) -> list[Row]:
        """Return the rows of a stored evaluation."""
        return read_rows(evaluation.path / self.row_file)

    def material(self, path: Path, request: EvaluationRequest) -> Material:
        """Return the exportable content of a run or evaluation.

        By default results, curves, and the newest evaluation's rows.
        """
        run, evaluation = run_of_stored(path), None
        if run != path or evaluations_of(path):
            evaluation = newest_evaluation(path) if run == path else Evaluation.read(path)
        directory = RunDirectory(run)
        results = results_of(directory)
        rates = {f"after/{name}": value for name, value in (results.get("after") or {}).items()}
        rows: Sequence[Row] = []
        if evaluation is not None:
            rows, own = evaluation.rows, evaluation.figures["figures"]
            rates |= {f"evaluation/{evaluation.name}/{name}": value for name, value in own.items()}
        return Material(
            **run_fields(run, run / HYPER_PARAMETERS),
            name=directory.run_id if evaluation is None else evaluation.name,
            unit=self.row_unit,
            rows=rows,
            tables={f"{self.row_unit}s": rows} if rows else {},
            figures=results if evaluation is None or path == run else evaluation.figures,
            head={} if evaluation is None else {"configuration": evaluation.configuration},
            hyper_params=directory.read_yaml(HYPER_PARAMETERS),
            rates={name: float(v) for name, v in rates.items() if isinstance(v, int | float)},
        )

    def store(self, folder: EvaluationFolder, figures: Mapping[str, Any]) -> Evaluation:
        """Write the figures and their table, and return the evaluation."""
        folder.write(figures, as_text(self.tables(figures)))
        return Evaluation.read(folder.path)

    def num_units(self, subject: Any) -> int:
        """Return the number of units to play, for a progress bar."""
        return 0

    def values(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures under their names in conditions."""
        return values_of(figures["figures"])

    def check(self, runs: Sequence[str], request: EvaluationRequest) -> None:
        """Refuse options without effect and unknown splits, before anything is loaded."""
        unread = [name for name in request.given() if name in self.unread]
        refuse_without_effect(unread, f"{runs[0]}, a {self.name} run")
        if self.splits and request.split not in self.splits:
            raise UnknownNameError("split", request.split, self.splits, "Give one as --split.")

    def shape(self, run: Path, request: EvaluationRequest) -> dict[str, Any]:
        """Return the names of values of a future evaluation, nested; empty allows any."""
        return {}

    def stored(self, run: Path, request: EvaluationRequest) -> Evaluation:
        """Return the evaluation used to compare a run: the newest."""
        return newest_evaluation(run)

    def score(
        self,
        path: Path,
        request: EvaluationRequest,
        settings: ExperimentSettings,
        open_progress: OpenProgress,
    ) -> Evaluation:
        """Rate stored texts by other scorers, without a language model."""
        raise ConfigurationError(
            f"{path} has no texts that scorers could rate, since it is a {self.name} run."
        )


FAMILIES: Registry[type[EvaluationFamily]] = Registry("evaluation_family")
"""Families by name; a trainer names its own as `evaluation_family`."""

register_evaluation_family = FAMILIES.register

_OF_SCENARIOS = {
    ScenarioType.AST_CHAT: "conversation",
    ScenarioType.TASK: "task",
    ScenarioType.CODE_VALIDATION: "text_protocol",
    ScenarioType.SECRET_WORD: "text_protocol",
    ScenarioType.GRAPH_ISOMORPHISM: "protocol",
    ScenarioType.IMAGE_CLASSIFICATION: "protocol",
}
"""Families of built-in trainers by scenario kind; a trainer's own module imports torch."""
_KINDS = {"interaction_proof": "text_protocol", "task": "task"}
"""Families of evaluations, by their `kind`, written before `family` was."""


def family_of_figures(figures: Mapping[str, Any]) -> EvaluationFamily:
    """Return the family of a stored evaluation."""
    name = figures.get("family") or _KINDS.get(str(figures.get("kind")), "conversation")
    return FAMILIES.get(name)()


def family_of_run(run: Path, request: EvaluationRequest) -> EvaluationFamily:
    """Return the family of a run: that of its newest evaluation, or the one named by its trainer.

    Raises
    ------
    ConfigurationError
        When runs of that trainer cannot be evaluated.
    """
    directory = RunDirectory.open(run)
    newest = evaluations_of(run)
    if newest:
        return family_of_figures(EvaluationFolder(newest[0]).figures())
    stored = directory.read_yaml(HYPER_PARAMETERS)
    trainer, name = str(stored.get("trainer")), None
    if trainer not in list(TrainerType):
        name = resolve_stored(run, request).trainer_class.evaluation_family
    elif trainer != TrainerType.SOLO_AGENT:
        name = next((family for kind, family in _OF_SCENARIOS.items() if kind in stored), None)
        if name is None:
            from nip_astra.trainers.registry import TRAINERS

            name = TRAINERS.get(trainer).evaluation_family
    if name is None:
        raise ConfigurationError(
            f"runs of the trainer {trainer!r} cannot be evaluated again. Read what {run} measured "
            f"at its end: nip-astra report {run}"
        )
    return FAMILIES.get(name)()


def resolve_stored(run: Path, request: EvaluationRequest, **changes: Any) -> ResolvedExperiment:
    """Resolve the experiment of a run directory, with changes; see `resolve_experiment`."""
    from nip_astra.resolving.resolution import resolve_experiment

    return resolve_experiment(
        parameter_file=RunDirectory.open(run).path / HYPER_PARAMETERS,
        plugins=request.plugins,
        is_trusted=request.is_trusted,
        **changes,
    )


def run_fields(run: Path, source: Path) -> dict[str, Any]:
    """Return the fields of `Material` that describe a run, and when a file of it was written."""
    directory = RunDirectory(run)
    written = datetime.fromtimestamp(source.stat().st_mtime, UTC)
    has_environment = (run / ENVIRONMENT).is_file()
    return {
        "run_id": directory.run_id,
        "created": written.isoformat(timespec="seconds"),
        "metrics": read_rows(run / "metrics.jsonl"),
        "environment": directory.read_json(ENVIRONMENT) if has_environment else {},
    }


def evaluations_of(run: Path) -> list[Path]:
    """Return the folders of a run's finished evaluations, newest first."""
    found = (run / EVALUATIONS).glob(f"*/{FIGURES}")
    newest = sorted(found, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return [file.parent for file in newest]


def newest_evaluation(run: Path, *, is_played: bool = False) -> Evaluation:
    """Return the newest evaluation of a run; with `is_played` only those not rescored.

    Raises
    ------
    DataError
        When there is none.
    """
    found = evaluations_of(run)
    if is_played:
        found = [one for one in found if not is_rescored(one)] or found
    if not found:
        raise DataError(f"{run} was not evaluated. Evaluate it first: nip-astra evaluate {run}")
    return Evaluation.read(found[0])


def is_rescored(folder: Path) -> bool:
    """Return whether an evaluation rated again what another one played."""
    return "scored_from" in EvaluationFolder(folder).configuration()


def run_of_stored(path: Path) -> Path:
    """Return the run directory of an evaluation, or of a run, that directory itself."""
    return path.resolve().parent.parent if (path / FIGURES).is_file() else path


def run_of(path: str | Path) -> tuple[Path, Path | None]:
    """Return the run of a run directory or checkpoint, and the checkpoint.

    A run's `model` means the run, and a checkpoint's `attacker` or `policy` the checkpoint.
    """
    found = Path(path)
    if (found.parent / HYPER_PARAMETERS).is_file() and found.name == MODEL_DIR:
        return found.parent, None
    if (found.parent / MANIFEST).is_file() and found.name in (ATTACKER_DIR, POLICY_DIR):
        found = found.parent
    store = CheckpointStore(found.parent)
    checkpoint: Path | None = found
    if found.name in (LATEST, BEST) and not found.is_dir():
        checkpoint = store.latest() if found.name == LATEST else store.best()
    if checkpoint is not None and (checkpoint / MANIFEST).is_file():
        # Resolved, since a link has another name than its checkpoint.
        return checkpoint.resolve().parent.parent, checkpoint.resolve()
    return found, None


def trained_of(
    path: Path, request: EvaluationRequest, finished: Callable[[Path], Path | None]
) -> tuple[Path, Path | None, str]:
    """Return the run, the folder of its trained weights (None: untrained), and a name suffix.

    `finished` gives the folder that a run has at its end, if any; otherwise it is the checkpoint
    that was given, or the newest.

    Raises
    ------
    ConfigurationError
        When it has no trained weights, or untrained ones of a checkpoint were requested.
    """
    run, checkpoint = run_of(path)
    if request.untrained:
        if checkpoint is not None:
            raise ConfigurationError(
                f"{path} is a checkpoint, so it is trained. Give {run} with --untrained, or the "
                "checkpoint without."
            )
        return run, None, "untrained"
    store = CheckpointStore(run / "checkpoints")
    found = checkpoint or finished(run) or store.latest()
    if found is None:
        raise ConfigurationError(
            f"{path} has no trained weights yet. Resume the run, or give --untrained."
        )
    if (found / MANIFEST).is_file():
        store.verify(found)
    return run, found, "" if checkpoint is None else checkpoint.name


def model_dir_of(run: Path) -> Path | None:
    """Return the folder of a run's final model, if there is one."""
    return run / MODEL_DIR if (run / MODEL_DIR).is_dir() else None


_PROBE_FILES = (".csv", ".tsv", ".jsonl", ".json", ".txt")
CHAT_FILES = (".yaml", ".yml")
_DATASET = re.compile(r"[\w.-]+/[\w.-]+:[^/]+")


def is_text_attacker(spec: str | Path) -> bool:
    """Return whether an attacker is a file of probes or of a chat model, or a dataset's split."""
    path = Path(spec)
    if path.is_dir():
        return False
    return path.suffix in (*_PROBE_FILES, *CHAT_FILES) or _DATASET.fullmatch(str(spec)) is not None


def place_of(spec: str | Path) -> Path:
    """Return the folder of an attacker's evaluations: its run, or one beside its file."""
    if not is_text_attacker(spec):
        return run_of(spec)[0]
    is_file = Path(spec).suffix in (*_PROBE_FILES, *CHAT_FILES)
    return Path(spec).with_suffix("") if is_file else Path(re.sub(r"[^\w.-]", "_", str(spec)))


def target_label(target: Mapping[str, Any]) -> str:
    """Return the name of a target, from its parameters."""
    model = target.get("chat_model") or target["language_model"]
    return Path(str(model.get("model", "target"))).name


def no_attacker(run: Path) -> ConfigurationError:
    """Return the error for a run without an attacker."""
    return ConfigurationError(
        f"{run} has no attacker that talks to a target. Give a run of an ast_* trainer."
    )


ATTACKER_DIR, POLICY_DIR = "attacker", "policy"
"""Folders of a checkpoint with the weights of an attacker, and of a policy."""


def values_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat figures nested by agent; those with an interval have `value`, `low`, `high`.

    `prover/mean_episode_reward` becomes `prover.mean_episode_reward`.
    """
    values: dict[str, Any] = {}
    for name, value in figures.items():
        agent, _, figure = name.rpartition("/")
        group = values.setdefault(agent, {}) if agent else values
        if name.endswith("_interval"):
            continue
        if figure.startswith("num_"):
            group[figure] = value
            continue
        low, high = figures.get(f"{name}_interval") or (None, None)
        group[figure] = {"value": value, "low": low, "high": high}
    if "mean_accuracy" in values:
        values.setdefault("accuracy", values["mean_accuracy"])
    return values


def service_settings(settings: ExperimentSettings, run: Path) -> ExperimentSettings:
    """Return settings with which chat models reuse the run's answers and count from 0."""
    from nip_astra.language_models.services.retrying import CACHE_FILE

    remembered = settings.service_cache or str(run / CACHE_FILE)
    places = {"run_directory": RunDirectory(run / EVALUATIONS), "service_cache": remembered}
    return settings.model_copy(update=places)


@contextmanager
def closing_services(services: Mapping[str, Any]) -> Iterator[None]:
    """Close chat models after the block."""
    from nip_astra.language_models.services.chat import close_all

    try:
        yield
    finally:
        close_all(list(services.values()))


def refuse_without_effect(unread: Sequence[str], where: str) -> None:
    """Raise a `ConfigurationError` that names options which have no effect there, if any."""
    if unread:
        names = (OPTION_NAMES.get(name, f"--{name.replace('_', '-')}") for name in unread)
        raise ConfigurationError(f"{', '.join(names)} has no effect on {where}. Leave it out.")


def refuse_unread_overrides(overrides: Sequence[str], readable: tuple[str, ...], path: str) -> None:
    """Refuse assignments outside `readable`: groups, each with its dot, and single parameters."""
    for one in overrides:
        name = one.partition("=")[0].strip()
        if not any(f"{name}.".startswith(f"{group.removesuffix('.')}.") for group in readable):
            known = " and ".join(f"{one}*" if one.endswith(".") else one for one in readable)
            raise ConfigurationError(
                f"--set {one} has no effect on the evaluation of {path}, which reads {known}. "
                "Leave it out."
            )


def as_list(value: Any) -> list[Any]:
    """Return a single value as a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str | Path) else list(value)
