"""Let a judge answer questions about the rollouts that a run has stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.families.scorers import read_mapping
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenario_base.text.analysers import (
    AnalysisParameters,
    JudgingParameters,
    build_rollout_analysers,
)
from nip_astra.scenario_base.text.models import ChatModelParameters
from nip_astra.scenarios.pure_text_base import PureTextScenario, cast_of
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.tracking.tracker import Tracker, open_tracker
from nip_astra.trainers.text.analysis import (
    JUDGE,
    Analysis,
    RolloutAnalyses,
    Sampling,
    log_analyses,
    log_analyses_artifact,
    stored_samplings,
)
from nip_astra.trust import on_behalf_of
from nip_astra.utils.nested_array_dict import NestedArrayDict


@dataclass(frozen=True)
class AnalysisRequest:
    """What is to be asked about which rollouts; None takes the run's own value.

    Attributes
    ----------
    analysers : sequence of str, or of their parameters
        Empty takes those of the run's parameters, and where these name none all that ship.
    model : ChatModel or ChatModel.Parameters
        The judge.
    split : str
        "train", "test" or "all".
    iteration : int
        The first is 0; None takes all that there are.
    is_overwritten : bool
        Whether what another judge has said is replaced.
    plugins, is_trusted
        As for `resume_experiment`.
    """

    analysers: Sequence[Any] = ()
    model: Any = None
    split: str = "test"
    iteration: int | None = None
    is_overwritten: bool = False
    plugins: Sequence[str] = ()
    is_trusted: bool = False


def analyse_run(
    run: str | Path,
    analysers: Sequence[Any] = (),
    model: Any = None,
    *,
    settings: ExperimentSettings | None = None,
    **request: Any,
) -> list[Analysis]:
    """Judge the stored rollouts of a run, and keep what is found in its folder `analyses`.

    Answers are remembered in the run directory, so that nothing is paid for twice.

    Parameters
    ----------
    run : str or Path
        Run directory of a trainer of chat models.
    analysers, model, **request
        See `AnalysisRequest`.
    settings : ExperimentSettings, optional
        Budget, device, and whether W&B is to show what is found.

    Raises
    ------
    ConfigurationError
        When there is no judge, its run is of another kind, or another judge has been there before.
    DataError
        When the run has no such rollouts.
    ServiceError
        When the judge cannot be reached; what it answered is remembered.
    """
    asked = AnalysisRequest(analysers, model, **request)
    opened = _OpenedRun.of(Path(run), asked, settings)
    found = []
    with opened.tracker() as tracker:
        for sampling in opened.samplings:
            new = opened.analyses.analyse(
                NestedArrayDict.load(sampling.path),
                sampling.split,
                sampling.iteration,
                is_overwritten=asked.is_overwritten,
            )
            log_analyses(new, tracker, step=sampling.iteration + 1)
            figures = [item for one in new for item in one.figures.items()]
            tracker.log_summary({f"{sampling.split}_{name}": value for name, value in figures})
            found += new
        log_analyses_artifact(tracker, opened.directory)
    return found


class JudgeFile(SubParameters):
    """A judge, as a file describes it."""

    model: ChatModelParameters  # type: ignore[valid-type]
    """The chat model."""


def read_judge(path: str) -> Any:
    """The parameters of the chat model in a YAML file.

    Raises
    ------
    DataError
        When it cannot be read, or holds no mapping.
    """
    values = read_mapping(path, "a chat model, for instance _type: openai and model: gpt-4o-mini")
    return JudgeFile.from_dict({"model": values}).model


def count_analysis(
    run: str | Path,
    analysers: Sequence[Any] = (),
    model: Any = None,
    *,
    settings: ExperimentSettings | None = None,
    **request: Any,
) -> dict[str, dict[str, int]]:
    """How many requests each analyser would make, by sampling; asks and writes nothing."""
    opened = _OpenedRun.of(Path(run), AnalysisRequest(analysers, model, **request), settings)
    return {
        one.name: opened.analyses.count_requests(NestedArrayDict.load(one.path))
        for one in opened.samplings
    }


@dataclass(frozen=True)
class _OpenedRun:
    """A run whose rollouts are to be judged."""

    directory: RunDirectory
    hyper_params: HyperParameters
    settings: ExperimentSettings
    analyses: RolloutAnalyses
    samplings: list[Sampling]

    @classmethod
    def of(
        cls, path: Path, asked: AnalysisRequest, settings: ExperimentSettings | None
    ) -> _OpenedRun:
        directory = RunDirectory.open(path)
        resolved = resolve_experiment(
            parameter_file=directory.path / HYPER_PARAMETERS,
            plugins=asked.plugins,
            is_trusted=asked.is_trusted,
        )
        scenario = SCENARIOS.get(resolved.kind)
        if not issubclass(scenario, PureTextScenario):
            raise ConfigurationError(
                f"the rollouts of {path} were to be analysed, but its scenario is of the kind "
                f"{resolved.kind!r}, whose agents do not play in words. Give a run of a trainer of "
                "chat models."
            )
        section = getattr(resolved.hyper_params, resolved.kind)
        chosen = settings or ExperimentSettings()
        chosen = chosen.model_copy(update={"run_directory": directory})
        own = section.analysis
        if resolved.source is not None and asked.model is None:
            resolved.source.check_outside(f"{resolved.kind}.analysis")
        with on_behalf_of(resolved.source):
            analyses = RolloutAnalyses(
                directory,
                cast_of(
                    section,
                    build_protocol_handler(resolved.hyper_params),
                    scenario.hidden_columns,
                ),
                build_rollout_analysers(asked.analysers or _analysers_of(own)),
                _judge(path, asked.model, own, chosen, resolved.scenario_dir),
                own or JudgingParameters(),
            )
        return cls(
            directory, resolved.hyper_params, chosen, analyses, _chosen_samplings(directory, asked)
        )

    @contextmanager
    def tracker(self) -> Iterator[Tracker]:
        """The trackers that the settings name; files are written without them."""
        config = self.hyper_params.to_dict()
        settings = self.settings.to_dict()
        tracker = open_tracker(settings, self.directory, config, writes_files=False)
        is_done = False
        try:
            yield tracker
            is_done = True
        finally:
            tracker.finish(success=is_done)


def _analysers_of(own: AnalysisParameters | None) -> Sequence[Any]:
    return list(RolloutAnalyserType) if own is None else own.analysers


def _judge(
    path: Path,
    given: Any,
    own: AnalysisParameters | None,
    settings: ExperimentSettings,
    scenario_dir: Path | None,
) -> ChatModel:
    if isinstance(given, ChatModel):
        return given
    parameters = given if given is not None else getattr(own, "model", None)
    if parameters is None:
        raise ConfigurationError(
            f"the rollouts of {path} were to be analysed, but its parameters name no judge. Give "
            "one: on the command line --judge FILE, a YAML file such as {_type: openai, model: "
            "gpt-4o-mini, api_key_variable: OPENAI_API_KEY}; in Python, a chat model or its "
            "parameters."
        )
    return open_chat_model(parameters, settings, scenario_dir=scenario_dir, label=JUDGE)


def _chosen_samplings(directory: RunDirectory, asked: AnalysisRequest) -> list[Sampling]:
    stored = stored_samplings(directory)
    found = [
        one
        for one in stored
        if asked.split in ("all", one.split) and asked.iteration in (None, one.iteration)
    ]
    if not found:
        which = "" if asked.iteration is None else f" of iteration {asked.iteration}"
        raise DataError(
            f"rollouts{which} of the split {asked.split!r} were to be analysed, but "
            f"{directory.rollouts_dir} has {', '.join(one.name for one in stored) or 'none'}. "
            "Name a split (train, test or all) and an iteration, the first being 0, that it has."
        )
    return found
