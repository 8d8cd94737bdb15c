"""Take conversations that another evaluation of the run has played, and rate them anew.

A conversation depends on who talks, on the opening prompts, on the turns and on the seed, and
neither on who rates it nor on how many others there are. So a second evaluation with another scorer
asks nobody anything but that scorer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.errors import NipAstraError
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rating import rate_anew, rate_by_others
from nip_astra.evaluation.rows import Episode, Row, episodes_of
from nip_astra.evaluation.storage import CONFIGURATION, EvaluationFolder
from nip_astra.scorers.base import Scorer

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class _Played:
    """Conversations of another evaluation, and who rated them."""

    name: str
    episodes: list[Episode]
    ordinary: list[Episode]
    scorers: Mapping[str, Any]


def reuse_conversations(
    folder: EvaluationFolder,
    configuration: Mapping[str, Any],
    scorers: Mapping[str, Scorer],
    options: EvaluationOptions,
) -> Reused | None:
    """Fill an empty evaluation with another one's conversations; None where none has any.

    Ratings are kept of scorers with the same name, parameters and code, but not in conversations
    in which one of them failed. An evaluation that cannot be read is passed over with a warning.

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
    played = _longest(folder, configuration, length)
    if played is None:
        return None
    episodes, ordinary = played.episodes[: options.num_episodes], played.ordinary
    calls = _rate(episodes, ordinary, scorers, configuration["scorers"], played.scorers)
    for file, chains in ((own, episodes), (own_probability, ordinary)):
        if chains:
            file.append([row for chain in chains for row in chain])
    reused = Reused(played.name, len(episodes), len(ordinary))
    folder.note_part(
        {
            "table": "reused",
            "reused_from": played.name,
            "num_episodes": len(episodes) + len(ordinary),
            "reused_queries": sum(map(len, [*episodes, *ordinary])),
            "scorer_calls": calls,
        }
    )
    return reused


def _longest(
    folder: EvaluationFolder, configuration: Mapping[str, Any], length: int
) -> _Played | None:
    """The most conversations that another evaluation has; None where none has any."""
    longest: _Played | None = None
    for path in sorted(folder.path.parent.glob(f"*/{CONFIGURATION}")):
        if path.parent == folder.path:
            continue
        try:
            played = _read(EvaluationFolder(path.parent), configuration, length)
        except NipAstraError as error:
            logger.warning(
                "the conversations of the evaluation %s are not used again: %s",
                path.parent.name,
                error,
            )
            continue
        if longest is None or len(played.episodes) >= len(longest.episodes):
            longest = played
    return longest if longest is not None and longest.episodes else None


def _read(other: EvaluationFolder, configuration: Mapping[str, Any], length: int) -> _Played:
    """Read another evaluation; without conversations where they are others."""
    stored = other.configuration()
    episodes: list[Episode] = []
    ordinary: list[Episode] = []
    if _kept(stored, KEYS) == _kept(configuration, KEYS):
        episodes = _whole(other.rows(length).read(), length)
        if _kept(stored, PROBABILITY_KEYS) == _kept(configuration, PROBABILITY_KEYS):
            ordinary = _whole(other.probability_rows(length).read(), length)
    return _Played(other.path.name, episodes, ordinary, stored.get("scorers", {}))


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
    rated = [episode for episode in episodes if not _has_error(episode)]
    failed = [episode for episode in episodes if _has_error(episode)]
    failed_ordinary = [episode for episode in ordinary if _has_error(episode)]
    calls = rate_by_others(rated, {one: scorers[one] for one in others if one not in known})
    if failed or failed_ordinary:
        calls += rate_anew(failed, failed_ordinary, scorers)
    return calls


def _has_error(episode: Episode) -> bool:
    """Say whether a scorer failed on a turn."""
    ratings = (one for row in episode for one in (row, *row.get("scores", {}).values()))
    return any(rating.get("is_error") for rating in ratings)


def _whole(rows: Sequence[Row], length: int) -> list[Episode]:
    return episodes_of(rows[: len(rows) // length * length])


def _kept(configuration: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any] | None:
    """What conversations depend on; None for conversations that were not played but rated."""
    if "options" not in configuration or "scored_from" in configuration:
        return None
    own = {name: configuration["options"].get(name) for name in options}
    return {name: configuration.get(name) for name in SPEAKERS} | own
