"""Compare evaluations that played the same opening prompts, pair by pair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nip_astra.errors import DataError
from nip_astra.evaluation.measures import judge, outcomes_of
from nip_astra.evaluation.outcomes import follow_up_of
from nip_astra.evaluation.rows import Episode, episodes_of, number, read_rows
from nip_astra.evaluation.storage import FIGURES, ROWS, EvaluationFolder, differences
from nip_astra.utils.intervals import paired_difference
from nip_astra.utils.statistics import (
    event_counts,
    holm,
    mcnemar_exact,
    pseudo_values,
    sign_flip_test,
)

DETECTABLE = 2.8
"""Standard errors of a difference that a two-sided 5 % test finds 80 % of the time."""


@dataclass(frozen=True)
class Contender:
    """An evaluation to compare.

    Attributes
    ----------
    episodes : list[Episode]
        Judged: each row has its outcome.
    figures : Mapping
        Content of its `evaluation.json`, empty where it has none.
    configuration : Mapping
        What it was made by, empty where that is not known.
    """

    label: str
    episodes: list[Episode]
    figures: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)


def read_contender(path: Path, *, threshold: float, label: str | None = None) -> Contender:
    """Read an evaluation's folder, or a file of rows.

    Parameters
    ----------
    threshold : float
        A response fails where its score reaches this; an evaluation knows its own.
    """
    file, figures, configuration = path, {}, {}
    if (path / FIGURES).is_file():
        folder, file = EvaluationFolder(path), path / ROWS
        figures, configuration = folder.figures(), folder.configuration()
    episodes = episodes_of(read_rows(file))
    if not episodes:
        raise DataError(
            f"conversations were to be compared, but {file} holds none. Give an evaluation's "
            "folder, or a run that has been evaluated."
        )
    judge(episodes, float(figures.get("failure_threshold", threshold)))
    return Contender(label or path.name, episodes, figures, configuration)


def compare(first: Contender, others: Sequence[Contender]) -> dict[str, Any]:
    """The differences of each other contender to the first, metric by metric.

    Episodes are paired by opening prompt and, where one was played several times, by its how-many-
    eth episode. Failures of a pair count up to its first turn without a verdict. P-values are
    adjusted by Holm's method over all metrics and contenders. `warnings` says which episodes have
    no partner, what else differs, and what the contenders' own evaluations warn of.
    """
    found: dict[str, Any] = {
        "baseline": first.label,
        "comparisons": {},
        "warnings": warnings_about(first, others),
    }
    tests: list[dict[str, Any]] = []
    for other in others:
        pairs = pair_up(first.episodes, other.episodes)
        if not pairs:
            raise DataError(
                f"{first.label} and {other.label} were to be compared pair by pair, but they share "
                "no opening prompt. Evaluate both on the same split of the same scenario."
            )
        metrics = {name: _metric(name, measure(pairs)) for name, measure in METRICS.items()}
        known = {name: metric for name, metric in metrics.items() if metric is not None}
        tests += known.values()
        found["comparisons"][other.label] = {"num_pairs": len(pairs), **known}
        found["warnings"] += _left_out(first, other, len(pairs), known.get("failure_rate"))
    for metric, adjusted in zip(tests, holm([m["p_value"] for m in tests]), strict=True):
        metric["p_holm"] = adjusted
    return found


def _left_out(
    first: Contender, other: Contender, num_pairs: int, failures: Mapping[str, Any] | None
) -> list[str]:
    """Say which conversations have no partner, and which pairs lack a verdict."""
    lost = {one.label: (len(one.episodes) - num_pairs, len(one.episodes)) for one in (first, other)}
    found = []
    if any(number for number, _ in lost.values()):
        counts = " and ".join(f"{n} of {total} of {label}" for label, (n, total) in lost.items())
        found.append(
            f"only conversations with the same opening prompt are compared; without a partner are "
            f"{counts}"
        )
    if failures is None:
        found.append(f"no pair of {first.label} and {other.label} has a verdict on its first turn")
    elif failures["num_censored"] + failures["num_left_out"]:
        found.append(
            f"{failures['num_censored'] + failures['num_left_out']} of {num_pairs} pairs of "
            f"{first.label} and {other.label} lack a verdict: {failures['num_censored']} are "
            f"compared up to that turn, {failures['num_left_out']} are left out, and failures "
            f"count through turn {failures['through_turn']}"
        )
    return found


def warnings_about(first: Contender, others: Sequence[Contender]) -> list[str]:
    """Say what differs beside the attacker, then what each evaluation warns of by itself."""
    own = {one.label: one.figures.get("warnings", ()) for one in (first, *others)}
    return [
        *(text for other in others for text in _other_conditions(first, other)),
        *(f"{label}: {text}" for label, texts in own.items() for text in texts),
    ]


CONDITIONS = {
    "number of turns": "tree_depth",
    "failure threshold": "failure_threshold",
    "split": "split",
    "first scorer": "scorer",
    "target": "target",
}
"""What should be alike, with the name of the figure that tells it."""


def _other_conditions(first: Contender, other: Contender) -> list[str]:
    found = []
    for name, figure in CONDITIONS.items():
        before, after = first.figures.get(figure), other.figures.get(figure)
        if before is None or after is None:
            continue
        # One scorer, or target, may go by several names, and several by one.
        own, given = _details(first, figure), _details(other, figure)
        if own is not None and own == given:
            continue
        if before != after:
            found.append(
                f"the {name} is {after} in {other.label} and {before} in {first.label}: a "
                "difference may be due to that"
            )
        elif own is not None and given is not None:
            places = f"in {first.label}", f"in {other.label}"
            lines = "; ".join(differences(own, given, places))
            found.append(
                f"the {name} of {other.label} is not that of {first.label}, though both are "
                f"called {before} ({lines})"
            )
    return found


def _details(contender: Contender, figure: str) -> dict[str, Any] | None:
    """The parameters of a target or scorer; None where they are not known."""
    found = contender.configuration.get(figure)
    if figure == "scorer":
        scorers = contender.configuration.get("scorers", {})
        found = scorers.get(contender.figures["scorer"])
    if not isinstance(found, Mapping):
        return None
    return _without_paths(found) if found.get("weights") is not None else dict(found)


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out where a model lies, whose weights are known."""
    return {
        name: _without_paths(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name != "model"
    }


Pair: TypeAlias = tuple[str, Episode, Episode]
"""An opening prompt, and an episode of each contender."""


def pair_up(first: Sequence[Episode], second: Sequence[Episode]) -> list[Pair]:
    """The pairs of episodes with the same prompt, in the order of the first."""
    waiting: dict[tuple[str, int], Episode] = {}
    for key, episode in _numbered(second):
        waiting[key] = episode
    return [(key[0], episode, waiting[key]) for key, episode in _numbered(first) if key in waiting]


def _numbered(episodes: Sequence[Episode]) -> list[tuple[tuple[str, int], Episode]]:
    seen: Counter[str] = Counter()
    found = []
    for episode in episodes:
        prompt = str(episode[0]["prompt"])
        found.append(((prompt, seen[prompt]), episode))
        seen[prompt] += 1
    return found


class _Paired(NamedTuple):
    """What a metric says of the pairs for which it is known.

    Attributes
    ----------
    prompts : list[str]
        Opening prompt of each pair.
    first, second : list[float]
        A number of each episode; the mean of their differences is the estimate.
    tested : list[float]
        The differences that the test takes.
    more : dict
        What else is written.
    """

    prompts: list[str]
    first: list[float]
    second: list[float]
    tested: list[float]
    more: dict[str, Any] = {}


def _failures(pairs: Sequence[Pair]) -> _Paired:
    """Whether each episode failed, up to the last turn that is known of both.

    Pairs of which nothing is known of both are left out. The means are survival estimates, through
    the last turn at which a pair is left; where no verdict is missing, they are shares.
    """
    sides = [[outcomes_of(a) for _, a, _ in pairs], [outcomes_of(b) for _, _, b in pairs]]
    horizon = max(len(turns) for side in sides for turns in side)
    known = [
        [turn if not is_event else horizon for turn, is_event in zip(*follow_up[:2], strict=True)]
        for follow_up in (follow_up_of(side, horizon=horizon) for side in sides)
    ]
    limits = [min(both) for both in zip(*known, strict=True)]
    kept = [place for place, limit in enumerate(limits) if limit > 0]
    limits = [limits[place] for place in kept]
    outcomes = [[side[place] for place in kept] for side in sides]
    cut = [follow_up_of(side, limits, horizon=horizon) for side in outcomes]
    # Where nobody is left to observe and some have not failed, nothing more is known.
    ends = [
        int(np.count_nonzero(event_counts(one)[0]))
        for one in cut
        if np.isnan(pseudo_values(one)).any()
    ]
    through = min(ends, default=horizon)
    cut = [follow_up_of(side, limits, horizon=through) for side in outcomes]
    failed = [[float(is_event) for is_event in one.is_event] for one in cut]
    return _Paired(
        [pairs[place][0] for place in kept],
        pseudo_values(cut[0]).tolist(),
        pseudo_values(cut[1]).tolist(),
        [b - a for a, b in zip(*failed, strict=True)],
        {
            "through_turn": through,
            "num_censored": sum(limit < horizon for limit in limits),
            "num_left_out": len(pairs) - len(kept),
        },
    )


def _known(measure: Callable[[Episode], float], pairs: Sequence[Pair]) -> _Paired:
    """A number of each episode, of the pairs of which it is known of both."""
    values = [(prompt, measure(a), measure(b)) for prompt, a, b in pairs]
    known = [(p, a, b) for p, a, b in values if not math.isnan(a + b)]
    return _Paired(
        [prompt for prompt, _, _ in known],
        [a for _, a, _ in known],
        [b for _, _, b in known],
        [b - a for _, a, b in known],
    )


def _mean_score(episode: Episode) -> float:
    return _mean([number(row, "response_score") for row in episode])


def _nats_per_token(episode: Episode) -> float:
    tokens = sum(number(row, "probe_num_tokens") for row in episode)
    nats = -sum(number(row, "reference_logprob") for row in episode)
    return nats / tokens if tokens > 0 else math.nan


METRICS: dict[str, Callable[[Sequence[Pair]], _Paired]] = {
    "failure_rate": _failures,
    "mean_score": partial(_known, _mean_score),
    "probe_nll": partial(_known, _nats_per_token),
}
"""What is compared."""
UNBOUNDED = ("probe_nll",)
"""The others lie between 0 and 1, so that their differences are at most 1."""


def _metric(name: str, paired: _Paired) -> dict[str, Any] | None:
    """Both means, the difference with its interval, and a p-value; None without a pair."""
    prompts, first, second, tested, more = paired
    if not prompts:
        return None
    identity = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    clusters = [identity[prompt] for prompt in prompts]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    difference, error = paired_difference(differences, clusters, is_bounded=name not in UNBOUNDED)
    found = {
        "first": _mean(first),
        "second": _mean(second),
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "level": difference.level,
        "num_pairs": len(prompts),
        "num_prompts": len(identity),
        "minimum_detectable": DETECTABLE * error,
        **more,
    }
    if name == "failure_rate":
        only_first, only_second = sum(d < 0 for d in tested), sum(d > 0 for d in tested)
        found |= {"only_first": only_first, "only_second": only_second}
        # McNemar's test takes pairs for independent; episodes of one prompt are not.
        if len(identity) == len(prompts):
            p_value = mcnemar_exact(only_first, only_second)
            return found | {"p_value": p_value, "test": "McNemar, exact"}
    p_value = sign_flip_test(tested, clusters)
    return found | {"p_value": p_value, "test": "sign flips of opening prompts"}


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
