"""Rate stored conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from nip_astra.evaluation.rows import Episode, Row
from nip_astra.rollouts.prompts import columns_of_record
from nip_astra.scorers.base import Exchange, Message, Scorer


def rate_anew(
    episodes: Sequence[Episode], ordinary: Sequence[Episode], scorers: Mapping[str, Scorer]
) -> int:
    """Replace all ratings in rows, and give the number of texts rated.

    Parameters
    ----------
    ordinary : Sequence[Episode]
        Those for the probability of failure, which the first scorer alone rates.
    scorers : Mapping[str, Scorer]
        By name, the one that decides first.
    """
    for row in (row for episode in [*episodes, *ordinary] for row in episode):
        # The reward rests on the ratings as well.
        for column in ("outcome", "reward", "scores"):
            row.pop(column, None)
    (_, first), *others = scorers.items()
    num_calls = rate_responses(episodes, first) + rate_by_others(episodes, dict(others))
    return num_calls + (rate_responses(ordinary, first) if ordinary else 0)


def rate_responses(episodes: Sequence[Episode], scorer: Scorer) -> int:
    """Write response, combined and probe scores into rows, and give the number of texts rated.

    As a rollout does it: a scorer that reads the history has seen the probe when it rates the
    response, so that the combined score is the response's.
    """
    turns = list(_turns(episodes))
    responses = [_response(row, before) for row, before in turns]
    rated = scorer.rate(responses)
    combined = rated
    if not scorer.reads_history:
        combined = scorer.rate([Exchange(f"{row['probe']} {row['response']}") for row, _ in turns])
    errors = (rated.is_error_N | combined.is_error_N).tolist()
    scores = zip(rated.scores_N.tolist(), combined.scores_N.tolist(), errors, strict=True)
    for (row, _), (response_score, combined_score, is_error) in zip(turns, scores, strict=True):
        row["response_score"] = _known(response_score)
        row["combined_score"] = _known(combined_score)
        row["is_error"] = is_error
    return len(turns) * (1 if scorer.reads_history else 2) + rate_probes(episodes, scorer)


def rate_probes(episodes: Sequence[Episode], scorer: Scorer) -> int:
    """Write the scores of the probes themselves into rows, and give the number of texts rated."""
    turns = list(_turns(episodes))
    probes = [Exchange(row["probe"], b, "user", columns_of_record(row)) for row, b in turns]
    rated = scorer.rate(probes)
    for (row, _), score in zip(turns, rated.scores_N.tolist(), strict=True):
        row["probe_score"] = _known(score)
    return len(turns)


def rate_by_others(episodes: Sequence[Episode], scorers: Mapping[str, Scorer]) -> int:
    """Write the response's score by each further scorer into the column `scores`."""
    turns = list(_turns(episodes))
    for name, scorer in scorers.items():
        exchanges = [_response(row, before) for row, before in turns]
        rated = scorer.rate(exchanges)
        values = zip(rated.scores_N.tolist(), rated.is_error_N.tolist(), strict=True)
        for (row, _), (score, is_error) in zip(turns, values, strict=True):
            row.setdefault("scores", {})[name] = {"score": _known(score), "is_error": is_error}
    return len(turns) * len(scorers)


def scored_by(name: str) -> Callable[[Row], Row]:
    """A view of a row as a further scorer sees it."""

    def view(row: Row) -> Row:
        own = row["scores"][name]
        return row | {"response_score": own["score"], "is_error": own["is_error"]}

    return view


def _response(row: Row, before: tuple[Message, ...]) -> Exchange:
    history = (*before, Message("user", row["probe"]))
    return Exchange(row["response"], history, columns=columns_of_record(row))


def _turns(episodes: Sequence[Episode]) -> Iterator[tuple[Row, tuple[Message, ...]]]:
    """Each row with what was said before its probe."""
    for episode in episodes:
        before: tuple[Message, ...] = (Message("assistant", str(episode[0]["prompt"])),)
        for row in episode:
            yield row, before
            before = (
                *before,
                Message("user", str(row["probe"])),
                Message("assistant", str(row["response"])),
            )


def _known(score: float) -> float | None:
    return None if math.isnan(score) else score
