"""Rollout analyses of a run: a judge's verdicts on agents' messages, as files and figures.

Shape suffixes: `N` rollout, `A` agent, `C` channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.scenario_base.text.analysers import (
    Cast,
    Judgements,
    JudgingParameters,
    RolloutAnalyser,
    Verdict,
    build_rollout_analysers,
    judge_rollouts,
)
from nip_astra.scenarios.pure_text_base import PureTextScenarioInstance
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker
from nip_astra.trainers.text.rollouts import ROLLOUTS
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.nested_array_dict import NestedArrayDict

ANALYSES = "analyses"
"""Folder of a run directory."""
JUDGE = "judge"
"""Name of the judge in request counts."""
VERSION = 1
VERDICTS_SUFFIX = ".verdicts.json"
_WORDS = {
    Verdict.YES: "yes",
    Verdict.NO: "no",
    Verdict.DOES_NOT_APPLY: "does not apply",
    Verdict.UNKNOWN: "unknown",
}
COLUMNS = ("analyser", "split", "rollout", "agent", "channel", "verdict", "reason")
"""Columns of the table of verdicts."""


class Sampling(NamedTuple):
    """The stored rollouts of an iteration; `split` is "train" or "test"."""

    split: str
    iteration: int
    path: Path

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.parent.name


def stored_samplings(run: RunDirectory) -> list[Sampling]:
    """Return all rollouts of a run, by split and iteration."""
    found = []
    for path in sorted(run.rollouts_dir.glob(f"*/{ROLLOUTS}")):
        split, _, number = path.parent.name.rpartition("_")
        if number.isdecimal():
            found.append(Sampling(split, int(number), path))
    return found


class Analysis(NamedTuple):
    """The verdicts of an analyser on the rollouts of an iteration.

    `summary` has plain values, as it is written down; for `verdicts` see `Judgements`.
    """

    summary: dict[str, Any]
    verdicts: NestedArrayDict

    @property
    def figures(self) -> dict[str, float]:
        """Return `<agent>/share_<analyser>`: the share of yes among yes and no."""
        name = self.summary["analyser"]
        shares = self.summary["shares"]
        return {f"{agent}/share_{name}": one["share"] for agent, one in shares.items()}

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """Return the verdicts, in the order of `COLUMNS`."""
        summary = self.summary
        return [
            (summary["analyser"], summary["split"], *(one[name] for name in COLUMNS[2:]))
            for one in summary["judged"]
        ]


class RolloutAnalyses:
    """Lets a judge answer the analysers' questions about rollouts, and stores its verdicts.

    A folder `analyses/<split>_<iteration>` has, for each analyser, `<analyser>.json` with shares
    and all verdicts with their reasons, and `<analyser>.verdicts.json`, a `NestedArrayDict`.
    Without a run directory nothing is kept.
    """

    def __init__(
        self,
        run: RunDirectory | None,
        cast: Cast,
        analysers: Sequence[RolloutAnalyser],
        model: ChatModel,
        how: JudgingParameters,
    ) -> None:
        self.run, self.cast, self.analysers = run, cast, tuple(analysers)
        self.model, self.how = model, how
        names = cast.protocol.agent_names
        for analyser in self.analysers:
            unknown = sorted(set(analyser.parameters.agents or []) - set(names))
            if unknown:
                raise ConfigurationError(
                    f"unknown agent {unknown[0]!r} of the analyser {analyser.name!r}; the protocol "
                    f"has {', '.join(names)}. Leave `agents` out for all of its role."
                )

    def count_requests(self, rollouts: NestedArrayDict) -> dict[str, int]:
        """Return the minimum number of requests of each analyser."""
        return {one.name: len(one.subjects(rollouts, self.cast)) for one in self.analysers}

    def analyse(
        self,
        rollouts: NestedArrayDict,
        split: str,
        iteration: int,
        *,
        is_overwritten: bool = False,
    ) -> list[Analysis]:
        """Judge the rollouts of an iteration with every analyser."""
        folder = None if self.run is None else Path(ANALYSES) / f"{split}_{iteration:04d}"
        if folder is not None and not is_overwritten:
            for analyser in self.analysers:
                self._check_judge(folder / f"{analyser.name}.json")
        analyses = []
        for analyser in self.analysers:
            judged = judge_rollouts(analyser, rollouts, self.cast, self.model, self.how)
            about = {"split": split, "iteration": iteration, "num_rollouts": len(rollouts)}
            analysis = Analysis(self._summary(analyser, judged, about, rollouts), judged.verdicts)
            if folder is not None and self.run is not None:
                (self.run.path / folder).mkdir(parents=True, exist_ok=True)
                judged.verdicts.save(self.run.path / folder / f"{analyser.name}{VERDICTS_SUFFIX}")
                self.run.write_json(str(folder / f"{analyser.name}.json"), analysis.summary)
            analyses.append(analysis)
        return analyses

    @property
    def judge(self) -> dict[str, str]:
        """Name and location of the judge."""
        return {"model": self.model.name, "place": self.model.place}

    def _check_judge(self, name: Path) -> None:
        assert self.run is not None
        if not (self.run.path / name).is_file():
            return
        before = self.run.read_json(str(name)).get("judge")
        if before != self.judge:
            raise ConfigurationError(
                f"{self.run.path / name} holds verdicts of {(before or {}).get('model')!r}, not of "
                f"{self.judge['model']!r}. Give --overwrite (is_overwritten=True) to replace it."
            )

    def _summary(
        self,
        analyser: RolloutAnalyser,
        judged: Judgements,
        about: dict[str, Any],
        rollouts: NestedArrayDict,
    ) -> dict[str, Any]:
        doc = type(analyser).__doc__ or ""
        verdict_NAC = judged.verdicts["verdict"]
        names, channels = self.cast.protocol.agent_names, self.cast.protocol.message_channel_names
        places = np.argwhere(verdict_NAC != Verdict.NOT_REQUESTED).tolist()
        return {
            "version": VERSION,
            "analyser": analyser.name,
            "meaning": doc.strip().partition("\n")[0],
            "judge": self.judge,
            **about,
            "num_requests": judged.num_requests,
            "shares": {
                agent: _share(verdict_NAC[:, a], rollouts["datapoint_id"])
                for a, agent in enumerate(names)
                if (verdict_NAC[:, a] <= Verdict.YES).any()
            },
            "judged": [
                {
                    "rollout": n,
                    "agent": names[a],
                    "channel": channels[c],
                    "verdict": _WORDS[Verdict(int(verdict_NAC[n, a, c]))],
                    "reason": judged.verdicts["reason"][n, a, c],
                }
                for n, a, c in places
            ],
        }


def open_analyses(
    instance: PureTextScenarioInstance, settings: ExperimentSettings
) -> RolloutAnalyses | None:
    """Open the analyses named by an instance's parameters; None without any."""
    if instance.analysis is None:
        return None
    chosen = instance.analysis
    model = open_chat_model(chosen.model, settings, scenario_dir=instance.scenario_dir, label=JUDGE)
    analysers = build_rollout_analysers(chosen.analysers)
    return RolloutAnalyses(settings.run_directory, instance.cast, analysers, model, chosen)


def load_verdicts(run: RunDirectory, split: str, iteration: int, analyser: str) -> NestedArrayDict:
    """Load the stored verdicts of an analysis."""
    folder = run.path / ANALYSES / f"{split}_{iteration:04d}"
    return NestedArrayDict.load(folder / f"{analyser}{VERDICTS_SUFFIX}")


def log_analyses(analyses: Sequence[Analysis], tracker: Tracker, *, step: int) -> None:
    """Log all verdicts as a table of a tracker."""
    rows = [row for one in analyses for row in one.rows]
    if rows:
        tracker.log_table(ANALYSES, COLUMNS, rows, step=step)


def log_analyses_artifact(tracker: Tracker, run: RunDirectory) -> None:
    """Log all analyses of a run as an artifact of a tracker."""
    if (run.path / ANALYSES).is_dir():
        tracker.log_artifact(run.path / ANALYSES, name=f"analyses-{run.run_id}", type="analyses")


def _share(
    verdict_NC: np.ndarray[Any, np.dtype[np.int64]],
    datapoint_N: np.ndarray[Any, np.dtype[np.int64]],
) -> dict[str, float]:
    """Return how often the answer is yes, with a 95 % interval clustered by datapoint."""
    places, channels = np.nonzero(verdict_NC <= Verdict.YES)
    yes = verdict_NC[places, channels] == Verdict.YES
    estimate = rate_estimate(yes.astype(float).tolist(), datapoint_N[places].tolist())
    counts = {
        f"num_{word.replace(' ', '_')}": int((verdict_NC == verdict).sum())
        for verdict, word in _WORDS.items()
    }
    return {"share": float(yes.mean()), "low": estimate.low, "high": estimate.high, **counts}
