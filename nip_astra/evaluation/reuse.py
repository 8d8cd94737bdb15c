"""Take conversations that another evaluation of the run has played, and rate them anew.

A conversation depends on who talks, on the opening prompts, on the turns and on the seed, and
neither on who rates it nor on how many others there are. So a second evaluation with another scorer
asks nobody anything but that scorer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rating import rate_anew, rate_by_others
from nip_astra.evaluation.rows import Episode, Row, episodes_of
from nip_astra.evaluation.storage import CONFIGURATION, EvaluationFolder
from nip_astra.scorers.base import Scorer

SPEAKERS = ("attacker", "target", "prompts", "reward")
"""Parts of a configuration that conversations, or columns beside them, depend on."""
KEYS = ("split", "seed", "num_turns")
"""Options that each conversation depends on."""
PROBABILITY_KEYS = ("num_probability_episodes", "use_importance_sampling")
"""Options that those for the probability of failure depend on as well."""


@dataclass(frozen=True)
class Reused:
    """What was taken from another evaluation.

    Attributes
    ----------
    num_episodes, num_probability_episodes : int
        Conversations of the attacker, and for the probability of failure.
    """

    source: str
    num_episodes: int
    num_probability_episodes: int


def reuse_conversations(
    folder: EvaluationFolder,
    configuration: Mapping[str, Any],
    scorers: Mapping[str, Scorer],
    options: EvaluationOptions,
) -> Reused | None:
    """Fill an empty evaluation with another one's conversations; None where none has any.

    Ratings are kept of scorers with the same name and parameters.

    Parameters
    ----------
    folder : EvaluationFolder
        Open, with this configuration.
    scorers : Mapping[str, Scorer]
        By name, the one that decides first.
    """
    length = options.num_turns
    own, own_probability = folder.rows(length), folder.probability_rows(length)
    if own.recover() or own_probability.recover():
        return None
    wanted = _kept(configuration, KEYS)
    found = []
    for path in folder.path.parent.glob(f"*/{CONFIGURATION}"):
        other = EvaluationFolder(path.parent)
        stored = other.configuration()
        if path.parent != folder.path and _kept(stored, KEYS) == wanted:
            found.append((other.rows(length).count(), other.path.name, other, stored))
    if not found or not max(found)[0]:
        return None
    _, name, other, stored = max(found, key=lambda one: one[:2])
    episodes = _whole(other.rows(length).read(), length)[: options.num_episodes]
    ordinary: list[Episode] = []
    if _kept(stored, PROBABILITY_KEYS) == _kept(configuration, PROBABILITY_KEYS):
        ordinary = _whole(other.probability_rows(length).read(), length)
    calls = _rate(episodes, ordinary, scorers, configuration["scorers"], stored["scorers"])
    for file, chains in ((own, episodes), (own_probability, ordinary)):
        if chains:
            file.append([row for chain in chains for row in chain])
    reused = Reused(name, len(episodes), len(ordinary))
    folder.note_part(
        {
            "table": "reused",
            "reused_from": name,
            "reused_queries": sum(map(len, [*episodes, *ordinary])),
            "scorer_calls": calls,
        }
    )
    return reused


def _rate(
    episodes: list[Episode],
    ordinary: list[Episode],
    scorers: Mapping[str, Scorer],
    wanted: Mapping[str, Any],
    stored: Mapping[str, Any],
) -> int:
    """Let scorers rate what they have not rated, and give the number of texts."""
    (first, *others), (first_before, *others_before) = scorers, stored
    is_same = {name for name in wanted if stored.get(name) == wanted[name]}
    if first != first_before or first not in is_same:
        return rate_anew(episodes, ordinary, scorers)
    known = is_same & set(others) & set(others_before)
    for row in (row for episode in episodes for row in episode):
        ratings = row.pop("scores", {})
        if known:
            row["scores"] = {name: ratings[name] for name in known}
    return rate_by_others(episodes, {one: scorers[one] for one in others if one not in known})


def _whole(rows: Sequence[Row], length: int) -> list[Episode]:
    return episodes_of(rows[: len(rows) // length * length])


def _kept(configuration: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any] | None:
    """Give what conversations depend on; None for conversations that were not played but rated."""
    if "options" not in configuration or "scored_from" in configuration:
        return None
    own = {name: configuration["options"].get(name) for name in options}
    return {name: configuration.get(name) for name in SPEAKERS} | own
