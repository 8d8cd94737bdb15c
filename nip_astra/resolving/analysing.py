"""Analysis of a run's stored rollouts by a judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.families.scorers import read_mapping
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel, ChatModelParameters
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.progress import showing
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenario_base.text.analysers import (
    AnalysisParameters,
    JudgingParameters,
    build_rollout_analysers,
)
from nip_astra.scenarios.pure_text_base import PureTextScenario, cast_of
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.tracking.tracker import open_tracker
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


def analyse_run(
    run: str | Path,
    analysers: Sequence[Any] = (),
    model: Any = None,
    *,
    settings: ExperimentSettings | None = None,
    is_overwritten: bool = False,
    **request: Any,
) -> list[Analysis]:
    """Analyse the stored rollouts of a run with a judge; results go to its folder `analyses`.

    Answers are stored in the run directory, so that a repeated analysis does not pay for them.

    Parameters
    ----------
    run : str or Path
        Run directory of a trainer of chat models.
    analysers : sequence of str, or of their parameters
        Empty takes those of the run's parameters, or all that ship if it names none.
    model : ChatModel or ChatModel.Parameters
        The judge; None takes the run's own.
    settings : ExperimentSettings, optional
        Budget, device, and whether W&B shows the results.
    is_overwritten : bool
        Whether the answers of another judge are replaced.
    **request
        `split` ("test" by default, "train" or "all"), `iteration` (from 0; None for all), and
        `plugins` and `is_trusted` as for `resume_experiment`.

    Raises
    ------
    ConfigurationError
        If there is no judge, the run is of another kind, or another judge has analysed it.
    DataError
        If the run has no such rollouts.
    ServiceError
        If the judge cannot be reached; its earlier answers are kept.
    """
    opened = _open_run(Path(run), analysers, model, settings, **request)
    results = []
    # Without the tracker that writes the run's own files.
    tracker = open_tracker(
        opened.settings.to_dict(), opened.directory, opened.config, writes_files=False
    )
    is_done = False
    total = sum(sum(counts.values()) for counts in opened.num_requests().values())
    bar = showing("Judging", total, counts_requests=True, enabled=opened.settings.progress)
    try:
        with bar:
            for sampling in opened.samplings:
                new = opened.analyses.analyse(
                    NestedArrayDict.load(sampling.path),
                    sampling.split,
                    sampling.iteration,
                    is_overwritten=is_overwritten,
                )
                log_analyses(new, tracker, step=sampling.iteration + 1)
                figures = [item for analysis in new for item in analysis.figures.items()]
                prefixed = {f"{sampling.split}_{name}": value for name, value in figures}
                tracker.log_summary(prefixed)
                results += new
        log_analyses_artifact(tracker, opened.directory)
        is_done = True
    finally:
        tracker.finish(success=is_done)
    return results


def count_analysis(
    run: str | Path,
    analysers: Sequence[Any] = (),
    model: Any = None,
    *,
    settings: ExperimentSettings | None = None,
    is_overwritten: bool = False,
    **request: Any,
) -> dict[str, dict[str, int]]:
    """Return the number of requests of each analyser, by sampling, without sending any."""
    return _open_run(Path(run), analysers, model, settings, **request).num_requests()


class JudgeFile(SubParameters):
    """A YAML file with a judge."""

    model: ChatModelParameters  # type: ignore[valid-type]
    """The chat model."""


def read_judge(path: str) -> Any:
    """Read the parameters of a chat model from a YAML file."""
    values = read_mapping(path, "a chat model, for instance _type: openai and model: gpt-4o-mini")
    return JudgeFile.from_dict({"model": values}).model


@dataclass(frozen=True)
class _OpenedRun:
    directory: RunDirectory
    config: dict[str, Any]
    settings: ExperimentSettings
    analyses: RolloutAnalyses
    samplings: list[Sampling]

    def num_requests(self) -> dict[str, dict[str, int]]:
        """Return the number of requests of each analyser, by sampling."""
        return {
            sampling.name: self.analyses.count_requests(NestedArrayDict.load(sampling.path))
            for sampling in self.samplings
        }


def _open_run(
    path: Path,
    analysers: Sequence[Any],
    model: Any,
    settings: ExperimentSettings | None,
    *,
    split: str = "test",
    iteration: int | None = None,
    plugins: Sequence[str] = (),
    is_trusted: bool = False,
) -> _OpenedRun:
    directory = RunDirectory.open(path)
    resolved = resolve_experiment(
        parameter_file=directory.path / HYPER_PARAMETERS, plugins=plugins, is_trusted=is_trusted
    )
    scenario = SCENARIOS.get(resolved.kind)
    if not issubclass(scenario, PureTextScenario):
        raise ConfigurationError(
            f"the scenario of {path} is of the kind {resolved.kind!r}, whose rollouts are not text "
            "to analyse. Give a run of a trainer of chat models."
        )
    section = getattr(resolved.hyper_params, resolved.kind)
    analysis_parameters: AnalysisParameters | None = section.analysis
    run_settings = settings or ExperimentSettings()
    run_settings = run_settings.model_copy(update={"run_directory": directory})
    if resolved.source is not None and model is None:
        resolved.source.check_outside(f"{resolved.kind}.analysis")
    shipped: Sequence[Any] = list(RolloutAnalyserType)
    with on_behalf_of(resolved.source):
        analyses = RolloutAnalyses(
            directory,
            cast_of(
                section, build_protocol_handler(resolved.hyper_params), scenario.hidden_columns
            ),
            build_rollout_analysers(
                analysers
                or (shipped if analysis_parameters is None else analysis_parameters.analysers)
            ),
            _judge(
                path,
                getattr(analysis_parameters, "model", None) if model is None else model,
                run_settings,
                resolved.scenario_dir,
            ),
            analysis_parameters or JudgingParameters(),
        )
    samplings = _samplings(directory, split, iteration)
    return _OpenedRun(directory, resolved.hyper_params.to_dict(), run_settings, analyses, samplings)


def _judge(
    path: Path, given: Any, settings: ExperimentSettings, scenario_dir: Path | None
) -> ChatModel:
    if isinstance(given, ChatModel):
        return given
    if given is None:
        raise ConfigurationError(
            f"the parameters of {path} name no judge. Give --judge FILE, a YAML file such as "
            "{_type: openai, model: gpt-4o-mini, api_key_variable: OPENAI_API_KEY}; in Python, a "
            "chat model or its parameters."
        )
    return open_chat_model(given, settings, scenario_dir=scenario_dir, label=JUDGE)


def _samplings(directory: RunDirectory, split: str, iteration: int | None) -> list[Sampling]:
    stored = stored_samplings(directory)
    samplings = [
        sampling
        for sampling in stored
        if split in ("all", sampling.split) and iteration in (None, sampling.iteration)
    ]
    if not samplings:
        which = "" if iteration is None else f" of iteration {iteration}"
        names = ", ".join(sampling.name for sampling in stored) or "none"
        raise DataError(
            f"{directory.rollouts_dir} has no rollouts{which} of the split {split!r}, only "
            f"{names}. Name a split (train, test or all) and an iteration, from 0."
        )
    return samplings
