"""Chat models that play an interaction protocol: their evaluations, scores and exports.

Shape suffixes: `N` rollout, `R` round, `A` agent.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nip_astra.scorers.base import Scorer

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.exports import Material, Sample
from nip_astra.evaluation.families.base import (
    Evaluation,
    EvaluationRequest,
    OnPart,
    OpenProgress,
    Subject,
    evaluations_of,
    is_rescored,
    register_evaluation_family,
    resolve_stored,
    run_fields,
    run_of_stored,
    service_settings,
)
from nip_astra.evaluation.families.protocols import (
    DECISIONS,
    EPISODES,
    EpisodeFamily,
    bounds_of_undecided,
)
from nip_astra.evaluation.outcomes import reaches
from nip_astra.evaluation.run_results import results_of
from nip_astra.evaluation.storage import FIGURES, EvaluationFolder, Row, text_hash
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.nested_array_dict import NestedArrayDict

ROLLOUTS = "rollouts.json"
ANSWERS = "answers.jsonl"
SCORES = "scores.jsonl"
"""One line per answer, with its scores."""
DEFAULT_THRESHOLD = 0.5
"""Score from which an answer counts among the high ones."""


@dataclass
class TextSubject(Subject):
    """Chat models of a run, before or after training."""

    resolved: Any = None
    settings: ExperimentSettings | None = None
    models: Mapping[str, Any] | None = None
    seed: int = 0


@register_evaluation_family("text_protocol")
class TextProtocols(EpisodeFamily):
    """Runs whose agents are chat models that play an interaction protocol."""

    name = "text_protocol"

    def load(
        self, run: Path, request: EvaluationRequest, settings: ExperimentSettings
    ) -> Iterator[TextSubject]:
        from nip_astra.scenario_base.text.models import models_of_run

        resolved = resolve_stored(run, request)
        name = request.name or f"{request.split}{'-untrained' * request.untrained}"
        folder = EvaluationFolder.of_run(run, name)
        settings = settings.model_copy(
            update={"run_directory": RunDirectory(folder.path), "progress": False}
        )
        models = {} if request.untrained else models_of_run(run)
        seed = resolved.hyper_params.seed if request.seed is None else request.seed
        yield TextSubject(run, name, resolved=resolved, settings=settings, models=models, seed=seed)

    def units(self, subject: TextSubject, request: EvaluationRequest) -> dict[str, Any]:
        return {
            "split": request.split,
            "num_episodes": request.num_episodes,
            "seed": subject.seed,
            "models": {name: one["model"] for name, one in (subject.models or {}).items()},
        }

    def play(
        self,
        subject: TextSubject,
        folder: EvaluationFolder,
        request: EvaluationRequest,
        on_part: OnPart,
    ) -> dict[str, Any]:
        from nip_astra.run import prepare_experiment
        from nip_astra.samplers.text_rollouts import AnswerJournal, rollouts_of
        from nip_astra.trainers.protocol.statistics import COLUMNS
        from nip_astra.trainers.service_use import services_used
        from nip_astra.trainers.text.rollouts import (
            episode_rows,
            held_out_episodes,
            train_episodes,
        )

        trainer: Any = prepare_experiment(subject.resolved, subject.settings).trainer
        instance, count, seed = trainer.instance, request.num_episodes, subject.seed
        if request.split == "test":
            episodes = list(held_out_episodes(instance, seed=seed, count=count))
        else:
            size = len(instance.train_data) if count is None else count
            episodes = list(train_episodes(instance, seed=seed, iteration=0, count=size))
        if count is not None and count > len(episodes):
            raise ConfigurationError(
                f"num_episodes (--num-episodes) is {count}, but the test data has {len(episodes)} "
                "datapoints, each played once."
            )
        # A finished evaluation knows what its stored answers took.
        is_whole = (folder.path / FIGURES).is_file()
        before = folder.figures().get("services") if is_whole else None
        trainer.take_up_models(subject.models)
        try:
            ends = trainer.sample_text(
                episodes,
                key=(seed, "evaluation", request.split),
                journal=AnswerJournal(folder.path / ANSWERS),
            )
            services = services_used(trainer.services())
        finally:
            trainer.close()
        rollouts = rollouts_of(trainer.game, ends)
        rollouts.save(folder.path / ROLLOUTS)
        step = trainer.text_rl.num_iterations
        whole = len(rollouts)
        found = episode_rows(rollouts, trainer.game, num_episodes=whole, step=step, seed=seed)
        rows = ({"step": step} | dict(zip(COLUMNS, row, strict=True)) for row in found)
        folder.write_rows(EPISODES, rows)
        played = list(rollout_rows(rollouts, trainer.agent_names))
        return {
            "agents": list(trainer.agent_names),
            **self.units(subject, request),
            "figures": trainer.figures_of(rollouts) | bounds_of_undecided(played),
            **(services or ({"services": before} if before else {})),
        }

    def rows(self, evaluation: Evaluation) -> list[Row]:
        rollouts = NestedArrayDict.load(_rollouts_file(evaluation))
        return list(rollout_rows(rollouts, evaluation.figures["agents"]))

    def shape(self, run: Path, request: EvaluationRequest) -> dict[str, Any]:
        results = results_of(RunDirectory(run))
        known = results.get("after") or results.get("before")
        if not known:
            return {}
        of_data = ("accuracy_of_negatives", "accuracy_of_positives", "accuracy_of_accepting")
        return dict.fromkeys((*of_data, "mean_decision")) | self.values({"figures": known})

    def stored(self, run: Path, request: EvaluationRequest) -> Evaluation:
        """Return the test at the end of a run."""
        _last_test(run)
        directory = RunDirectory(run)
        results = directory.read_json(RESULTS)
        figures = {"run": directory.run_id, "agents": results["agents"], "split": "test"}
        return Evaluation(run, self, figures | {"figures": results["after"]})

    def score(
        self,
        path: Path,
        request: EvaluationRequest,
        settings: ExperimentSettings,
        open_progress: OpenProgress,
    ) -> Evaluation:
        """Rate every answer of stored rollouts by scorers."""
        from nip_astra.evaluation.families.scorers import load_scorers, rating_anew
        from nip_astra.trainers.service_use import services_used

        if request.labelled or request.embedder:
            raise ConfigurationError(
                f"--labelled and --embedder have no effect on {path}, a run of a text protocol. "
                "Leave them out."
            )
        if not request.scorers or "own" in request.scorers:
            raise ConfigurationError(
                f"{path} has no scorer of its own. Give one, for instance --scorer detoxify, or a "
                "YAML file with _type: judge and a rubric."
            )
        run = run_of_stored(path)
        resolved = resolve_stored(run, request)
        settings = service_settings(settings, run)
        scorers = load_scorers(request.scorers, None, settings, resolved.scenario_dir)
        # The evaluation at the path, or the newest of the run that was played.
        played = [path] if path != run else [f for f in evaluations_of(run) if not is_rescored(f)]
        source = Evaluation.read(played[0]) if played else self.stored(run, request)
        file = _rollouts_file(source)
        origin = source.name if played else "test"
        threshold = DEFAULT_THRESHOLD if request.threshold is None else request.threshold
        name = request.name or f"{origin}-{'-'.join(scorers)}"
        folder = EvaluationFolder.of_run(run, name)
        configuration = {
            "scored_from": origin,
            "rollouts": text_hash([file.read_text(encoding="utf-8")]),
            "scorers": {key: scorer.parameters.to_dict() for key, scorer in scorers.items()},
            "threshold": threshold,
        }
        parts = folder, configuration, scorers, settings, request
        with rating_anew(*parts, source=source.path) as services:
            rollouts = NestedArrayDict.load(file)
            answers = rate_answers(rollouts, source.figures["agents"], scorers, open_progress)
        folder.write_rows(SCORES, answers)
        # With its rollouts it can be compared, shown and exported as the evaluation that it scores.
        shutil.copyfile(file, folder.path / ROLLOUTS)
        if (file.parent / EPISODES).is_file():
            shutil.copyfile(file.parent / EPISODES, folder.path / EPISODES)
        scored = score_figures(answers, list(scorers), threshold=threshold)
        own = {
            **configuration,
            "figures": {**source.figures["figures"], **scored},
            **services_used(services),
        }
        figures = {**source.figures, **self.figures(Subject(run, name), folder, own)}
        return self.store(folder, figures)

    def material(self, path: Path, request: EvaluationRequest) -> Material:
        from nip_astra.protocols.registry import build_protocol_handler
        from nip_astra.trainers.text.analysis import stored_samplings

        run = run_of_stored(path)
        directory = RunDirectory.open(run)
        resolved = resolve_stored(run, request)
        protocol = build_protocol_handler(resolved.hyper_params)
        samplings: list[tuple[str, int | None, Path]]
        if run != path:
            figures = EvaluationFolder(path).figures()
            samplings = [(str(figures.get("split", "test")), None, path / ROLLOUTS)]
            figures, source = figures["figures"], path / ROLLOUTS
        else:
            found = [(one.split, one.iteration, one.path) for one in stored_samplings(directory)]
            samplings = [*sorted(found, key=lambda one: (one[1], one[0] == "test"))]
            figures = results_of(directory).get("after") or {}
            source = path / HYPER_PARAMETERS
        rows = [
            {"run": directory.run_id, "split": split, "iteration": iteration, **row}
            for split, iteration, file in samplings
            for row in rollout_rows(
                NestedArrayDict.load(file),
                protocol.agent_names,
                protocol.message_channel_names,
                protocol.verifier_names,
            )
        ]
        turns = []
        for row in rows:
            place = {name: row[name] for name in ("split", "iteration", "rollout")}
            turns += [
                place | {name: value for name, value in turn.items() if name != "prompt"}
                for turn in row["turns"]
            ]
        flat = [{name: one for name, one in row.items() if name != "turns"} for row in rows]
        accuracy = figures.get("mean_accuracy")
        name = path.resolve().name if run != path else directory.run_id
        return Material(
            **run_fields(run, source),
            name=name,
            unit="rollout",
            rows=rows,
            tables={"rollouts": flat, "turns": turns},
            figures=figures,
            head={
                "name": name,
                "agents": list(protocol.agent_names),
                "channels": list(protocol.message_channel_names),
            },
            hyper_params=resolved.hyper_params.to_dict(),
            rates={} if accuracy is None else {f"evaluation/{name}/accuracy": float(accuracy)},
            scores={"accuracy": sum(row["is_correct"] for row in rows) / max(len(rows), 1)},
            sample=_sample,
            model=directory.run_id,
            metadata={"agents": list(protocol.agent_names)},
        )


def _sample(row: Row) -> Sample:
    """Return a rollout as shown by Inspect."""
    datapoint = "\n\n".join(f"{name}: {value}" for name, value in row["datapoint"].items())
    messages = [("user", datapoint)]
    for turn in row["turns"]:
        role = "assistant" if turn["role"] == "verifier" else "user"
        messages.append((role, f"{turn['agent']}: {turn['answer']}"))
    decision = row["decision"] or "none"
    named = ("split", "iteration", "datapoint_id", "num_rounds", "rewards")
    scores = {"accuracy": (float(row["is_correct"]), decision)}
    metadata = {name: row[name] for name in named}
    return Sample(messages, decision, scores, metadata, DECISIONS[row["y"]])


def rollout_rows(
    rollouts: NestedArrayDict,
    agent_names: Sequence[str],
    channel_names: Sequence[str] = (),
    verifier_names: Sequence[str] = (),
) -> Iterator[Row]:
    """Return a row for each rollout, with its turns and their prompts.

    Parameters
    ----------
    channel_names, verifier_names : sequence of str
        Of the protocol; without them turns have no messages and roles.
    """
    turns: list[list[Row]] = [[] for _ in range(len(rollouts))]
    for n, r, a in np.argwhere(rollouts["agents", "is_active"]).tolist():
        turns[n].append(_turn(rollouts, (n, r, a), agent_names[a], channel_names, verifier_names))
    returns_NA = rollouts["agents", "reward"].sum(axis=1)
    for n, own in enumerate(turns):
        y, decision = int(rollouts["y"][n]), int(rollouts["decision"][n])
        yield {
            "rollout": n,
            "datapoint_id": int(rollouts["datapoint_id"][n]),
            "y": y,
            "decision": DECISIONS.get(decision),
            "is_correct": decision == y,
            "num_rounds": int(rollouts["num_rounds"][n]),
            "datapoint": dict(_datapoint(rollouts, n)),
            "rewards": dict(zip(agent_names, returns_NA[n].tolist(), strict=True)),
            "turns": own,
        }


def _turn(
    rollouts: NestedArrayDict,
    at: tuple[int, int, int],
    agent: str,
    channel_names: Sequence[str],
    verifier_names: Sequence[str],
) -> Row:
    parts = rollouts["agents"]
    decides = agent in verifier_names
    reasoning = _reasoning(rollouts, at)
    channels = zip(channel_names, parts["message"][at], strict=True) if channel_names else ()
    return {
        "round": at[1],
        "agent": agent,
        "role": "verifier" if decides else "prover",
        # A list, since tables would give every turn every channel.
        "messages": [
            {"channel": name, "text": text} for name, text in channels if text is not None
        ],
        "answer": parts["raw_message"][at],
        **({} if reasoning is None else {"reasoning": reasoning}),
        "decision": DECISIONS.get(int(parts["decision"][at])) if decides else None,
        "reward": float(parts["reward"][at]),
        "num_retries": int(parts["num_retries"][at]),
        "is_cut": bool(parts["is_cut"][at]),
        "is_filled": bool(parts["is_filled"][at]),
        "prompt": json.loads(parts["prompt"][at]),
    }


def _reasoning(rollouts: NestedArrayDict, at: tuple[int, int, int]) -> str | None:
    """Return what an agent thought before its answer; rollouts of earlier versions have none."""
    reasonings = rollouts["agents"].get("reasoning")
    reasoning: str | None = None if reasonings is None else reasonings[at]
    return reasoning


def _datapoint(rollouts: NestedArrayDict, place: int) -> tuple[tuple[str, Any], ...]:
    columns = rollouts.get("datapoint")
    if columns is None:
        return ()
    plain = ((str(name), array[place]) for name, array in columns.items())
    return tuple((name, one.item() if hasattr(one, "item") else one) for name, one in plain)


# ---- scores

Answer = dict[str, Any]
"""An answer: rollout, round, agent, datapoint_id, text, and `scores` by scorer, each a number, None
where the scorer returned no verdict, or "error"."""


def rate_answers(
    rollouts: NestedArrayDict,
    agent_names: Sequence[str],
    scorers: Mapping[str, Scorer],
    open_progress: OpenProgress,
) -> list[Answer]:
    """Rate every answer of an agent with its history.

    An agent takes the target's place: it is the assistant, and everything it reads is the user.

    Raises
    ------
    ScorerError
        When a scorer fails and is not to be skipped.
    """
    from nip_astra.rollouts.messages import Turn
    from nip_astra.scorers.base import Exchange

    answers: list[Answer] = []
    exchanges = []
    for n, r, a in np.argwhere(rollouts["agents", "is_active"]).tolist():
        text = rollouts["agents", "raw_message"][n, r, a]
        if rollouts["agents", "is_filled"][n, r, a]:
            continue
        history = tuple(
            Turn("assistant" if one["role"] == "assistant" else "user", one["content"])
            for one in json.loads(rollouts["agents", "prompt"][n, r, a])
            if one["role"] != "system"
        )
        reasoning = _reasoning(rollouts, (n, r, a))
        exchanges.append(
            Exchange(text, history, columns=_datapoint(rollouts, n), reasoning=reasoning)
        )
        answers.append(
            {
                "rollout": n,
                "round": r,
                "agent": agent_names[a],
                "datapoint_id": int(rollouts["datapoint_id"][n]),
                "text": text,
                "scores": {},
            }
        )
    with open_progress("Rating", len(exchanges) * len(scorers)):
        ratings = {name: scorer.rate(exchanges) for name, scorer in scorers.items()}
    for name, (scores_N, is_error_N) in ratings.items():
        rated = zip(answers, scores_N.tolist(), is_error_N.tolist(), strict=True)
        for answer, score, is_error in rated:
            unknown = "error" if is_error else None
            answer["scores"][name] = unknown if math.isnan(score) else score
    return answers


def score_figures(
    answers: Sequence[Answer], scorers: Sequence[str], *, threshold: float
) -> dict[str, Any]:
    """Return `<agent>/mean_<scorer>`, and the share of scores from the threshold on, by agent.

    Answers without a verdict are left out. Intervals are 95 % ones over datapoints.
    """
    figures: dict[str, Any] = {}
    for agent in dict.fromkeys(answer["agent"] for answer in answers):
        own = [answer for answer in answers if answer["agent"] == agent]
        for name in scorers:
            rated = [one for one in own if isinstance(one["scores"][name], float)]
            figures[f"{agent}/num_{name}"] = len(rated)
            if rated:
                scores = np.array([one["scores"][name] for one in rated])
                is_high = [float(reaches(score, threshold)) for score in scores]
                share = rate_estimate(is_high, [one["datapoint_id"] for one in rated])
                figures[f"{agent}/mean_{name}"] = float(scores.mean())
                figures[f"{agent}/share_{name}"] = share.value
                figures[f"{agent}/share_{name}_interval"] = [share.low, share.high]
    return figures


# ---- files


def _rollouts_file(evaluation: Evaluation) -> Path:
    is_run = evaluation.run == evaluation.path
    return _last_test(evaluation.path) if is_run else evaluation.path / ROLLOUTS


def _last_test(run: Path) -> Path:
    """Return the file with the rollouts of a run's last test."""
    from nip_astra.trainers.text.analysis import stored_samplings

    directory = RunDirectory.open(run)
    tests = [one for one in stored_samplings(directory) if one.split == "test"]
    if not tests or not directory.has_ended:
        raise DataError(
            f"{run} has not ended, or made no test. Resume it, or evaluate it: nip-astra evaluate "
            f"{run}, then give {run / 'evaluations'}/<name>."
        )
    return tests[-1].path
