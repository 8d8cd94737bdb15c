"""Kinds of failure: clusters of failing probes, their number, and recall of planted failures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.storage import Episode, Row, number
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure

MAX_CLUSTERED = 2000
"""Largest number of distinct probes to cluster, the most frequent ones; all distances are held."""


class _Failing(NamedTuple):
    """A turn on which the target failed, the planted failures that it meets, and its query."""

    row: Row
    plants: list[PlantedFailure]
    query: int


def failing_turns(episodes: Sequence[Episode]) -> list[Row]:
    """Return the rows of all turns on which the target failed."""
    return [turn.row for turn in _failing(episodes, ())]


def cluster_failures(
    episodes: Sequence[Episode],
    embed: Callable[[Sequence[str]], Tensor],
    *,
    distance: float,
    planted: Sequence[PlantedFailure] = (),
) -> dict[str, Any]:
    """Cluster failing probes, and return the clusters, largest first.

    Distinct probes are joined bottom-up by the mean cosine distance between groups (average
    linkage) as long as it stays below `distance`.

    Parameters
    ----------
    embed : Callable
        Gives a row of unit length for each text.
    distance : float
        Larger gives fewer clusters; 0 to 2.
    """
    turns = _failing(episodes, planted)
    counts = Counter(str(turn.row["probe"]) for turn in turns)
    texts = [text for text, _ in counts.most_common(MAX_CLUSTERED)]
    if not texts:
        return {"num_clusters": 0, "clusters": [], "num_left_out": 0}
    vectors = np.asarray(embed(texts), dtype=np.float64)
    label_of = dict(zip(texts, _labels(vectors, distance), strict=True))
    members: dict[int, list[int]] = defaultdict(list)
    for place, label in enumerate(label_of.values()):
        members[label].append(place)
    own: dict[int, list[_Failing]] = defaultdict(list)
    for turn in turns:
        if str(turn.row["probe"]) in label_of:
            own[label_of[str(turn.row["probe"])]].append(turn)
    clusters = []
    for label, places in members.items():
        medoid = _medoid(vectors[places], [counts[texts[place]] for place in places])
        clusters.append(_describe(own[label], texts[places[medoid]]))
    clusters.sort(key=lambda cluster: -cluster["size"])
    return {
        "num_clusters": len(clusters),
        "clusters": clusters,
        "num_left_out": len(counts) - len(texts),
    }


def reference_to(row: Row) -> dict[str, Any]:
    """Return the columns of a row that are shown to readers."""
    names = ("episode", "depth", "prompt", "probe", "response")
    figures = ("response_score", "probe_nll", "reference_logprob")
    return {name: row.get(name) for name in (*names, *figures)}


def likelihood(row: Row) -> float:
    """Return a probe's log-probability under the reference; minus infinity if unknown."""
    known = number(row, "reference_logprob")
    known = -number(row, "probe_nll") if np.isnan(known) else known
    return -np.inf if np.isnan(known) else known


MIN_SIGHTINGS = 100
"""Number of units with a kind, summed over kinds, below which Chao's interval covers too seldom. In
simulations (2 to 50 equally frequent, Zipf-distributed or half rare kinds; 10 to 300 prompts)
nominal 95 % cover 43 to 49 % with up to 5 sightings, 72 to 90 % with 6 to 20, 74 to 99 % with 21 to
100, and 94 to 100 % with more."""


def chao2(num_units_by_kind: Sequence[int], num_units: int, *, level: float) -> dict[str, Any]:
    """Return a lower bound on the number of kinds of failure, seen and unseen, with an interval.

    Chao's bias-corrected estimator for incidences (Chao 1987, often called Chao2). Of m sampled
    units (opening prompts), S kinds were seen, Q1 of them in one unit only and Q2 in two:

        S + (m - 1) / m * Q1 (Q1 - 1) / (2 (Q2 + 1)).

    The interval starts at S. Its upper end is Chao's, with a log-normal number of unseen kinds; if
    the estimate is S, it is that of Colwell et al. (2012, eq. 14). With less than `MIN_SIGHTINGS`
    there is neither an upper end nor a level: there are at least so many kinds. No sample shows
    kinds that are far rarer than one in its sightings.

    Parameters
    ----------
    num_units_by_kind : Sequence[int]
        For each seen kind the units with it, at least 1.
    num_units : int
        All units, including those without any kind.
    """
    seen = len(num_units_by_kind)
    counts = Counter(num_units_by_kind)
    once, twice = counts[1], counts[2]
    share = (num_units - 1) / num_units if num_units else 0.0
    unseen = share * once * (once - 1) / (2 * (twice + 1))
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    has_level = sum(num_units_by_kind) >= MIN_SIGHTINGS
    high: float | None
    if not has_level:
        high = None
    elif unseen > 0.0:
        spread = math.log1p(_variance(seen + unseen, once, twice, share) / unseen**2)
        high = seen + unseen * math.exp(z * math.sqrt(spread))
    else:
        high = _bound_of_seen(counts, num_units, z)
    return {
        "seen": seen,
        "seen_once": once,
        "seen_twice": twice,
        "value": seen + unseen,
        "low": float(seen),
        "high": high,
        "level": level if has_level else None,
        "num_units": num_units,
        "num_sightings": sum(num_units_by_kind),
        "method": "Chao2 over opening prompts; a lower bound",
    }


def _variance(estimate: float, once: int, twice: int, share: float) -> float:
    pairs, more = once * (once - 1), twice + 1
    found = share * pairs / (2 * more) + share**2 * once * (2 * once - 1) ** 2 / (4 * more**2)
    if twice:
        return found + share**2 * twice * pairs**2 / (4 * more**4)
    return found - share**2 * once**4 / (4 * estimate)


def _bound_of_seen(counts: Counter[int], num_units: int, z: float) -> float:
    """Return the interval's upper end if no kind is estimated to be unseen."""
    seen = sum(counts.values())
    missed = sum(number * math.exp(-units) for units, number in counts.items()) / seen
    variance = sum(
        number * (math.exp(-units) - math.exp(-2 * units)) for units, number in counts.items()
    )
    mean = sum(units * math.exp(-units) * number for units, number in counts.items())
    spread = math.sqrt(max(variance - mean**2 / num_units, 0.0))
    middle = seen / (1.0 - missed)
    return middle + z * spread / (1.0 - missed)


def _failing(episodes: Sequence[Episode], planted: Sequence[PlantedFailure]) -> list[_Failing]:
    failing, query = [], 0
    for episode in episodes:
        for previous, row in zip([None, *episode[:-1]], episode, strict=True):
            query += 1
            if row["outcome"] == Outcome.FAILURE:
                before = None if previous is None else str(previous["probe"])
                plants = [one for one in planted if one.matches(str(row["probe"]), before)]
                failing.append(_Failing(row, plants, query))
    return failing


def _labels(vectors: Any, distance: float) -> list[int]:
    if len(vectors) == 1:
        return [0]
    # Texts without a vector (an empty probe) have no direction: cosine distance 1 to all.
    apart = np.clip(1.0 - vectors @ vectors.T, 0.0, 2.0)
    np.fill_diagonal(apart, 0.0)
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    merges = linkage(squareform((apart + apart.T) / 2.0, checks=False), method="average")
    labels: list[int] = fcluster(merges, t=distance, criterion="distance").tolist()
    return labels


def _medoid(vectors: Any, counts: Sequence[int]) -> int:
    """Return the member nearest to all others, weighted by their counts."""
    return int((vectors @ (vectors * np.asarray(counts)[:, None]).sum(axis=0)).argmax())


def _describe(turns: Sequence[_Failing], medoid: str) -> dict[str, Any]:
    most_likely = max(turns, key=lambda turn: likelihood(turn.row))
    met = Counter(plant.name for turn in turns for plant in turn.plants)
    return {
        "size": len(turns),
        "num_distinct": len({turn.row["probe"] for turn in turns}),
        "num_prompts": len({turn.row["prompt"] for turn in turns}),
        "first_query": min(turn.query for turn in turns),
        "medoid": reference_to(next(t.row for t in turns if t.row["probe"] == medoid)),
        "most_likely": reference_to(most_likely.row),
        "shortest": reference_to(
            min(turns, key=lambda turn: (len(turn.row["probe"].split()), turn.row["probe"])).row
        ),
        "plants": [name for name, _ in met.most_common()],
        "turns": [[turn.row.get("episode"), turn.row.get("depth")] for turn in turns],
    }


def tokens_of(row: Row) -> int:
    """Return the number of tokens of a turn's probe and response; 0 if unknown."""
    return int(row.get("probe_num_tokens") or 0) + int(row.get("response_num_tokens") or 0)


def find_plants(
    episodes: Sequence[Episode], planted: Sequence[PlantedFailure]
) -> dict[str, Any] | None:
    """Return recall of planted failures against tokens of probes and responses, or None.

    A planted failure is found when a probe meets it and the target fails on that probe.
    """
    if not planted:
        return None
    tokens = [tokens_of(row) for episode in episodes for row in episode]
    first: dict[str, dict[str, int]] = {}
    by_tokens: list[list[int]] = []
    for turn in _failing(episodes, planted):
        new = [plant.name for plant in turn.plants if plant.name not in first]
        if new:
            spent = {"tokens": sum(tokens[: turn.query]), "target_queries": turn.query}
            first |= {name: dict(spent) for name in new}
            by_tokens.append([spent["tokens"], len(first)])
    return {
        "found": len(first),
        "total": len(planted),
        "recall": len(first) / len(planted),
        "by_tokens": by_tokens,
        "tokens": sum(tokens),
        "first": {plant.name: first.get(plant.name) for plant in planted},
    }
