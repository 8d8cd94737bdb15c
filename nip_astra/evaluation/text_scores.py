"""What scorers say of the answers in stored rollouts in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nip_astra.samplers.text_arrays import active_turns, read_prompt
from nip_astra.scorers.base import Exchange, Message, Scorer
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.nested_array_dict import NestedArrayDict

Answer = dict[str, Any]
"""An answer: rollout, round, agent, datapoint_id, text, and `scores` by scorer, each a number, None
where the scorer could not tell, or "error"."""


def exchanges_of(
    rollouts: NestedArrayDict, agent_names: Sequence[str]
) -> tuple[list[Answer], list[Exchange]]:
    """Every answer that an agent gave, and what it had read and said before, for scorers.

    An agent stands where a target does: it is the assistant, and all that it was told the user.
    """
    answers, exchanges = [], []
    for n, r, a in active_turns(rollouts):
        text = rollouts["agents", "raw_message"][n, r, a]
        if rollouts["agents", "is_filled"][n, r, a]:
            continue
        asked = read_prompt(rollouts["agents", "prompt"][n, r, a])
        history = tuple(
            Message("assistant" if one["role"] == "assistant" else "user", one["content"])
            for one in asked
            if one["role"] != "system"
        )
        exchanges.append(Exchange(text, history, columns=_columns(rollouts, n)))
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
    return answers, exchanges


def rate_answers(
    rollouts: NestedArrayDict, agent_names: Sequence[str], scorers: Mapping[str, Scorer]
) -> list[Answer]:
    """Let scorers rate every answer.

    Raises
    ------
    ScorerError
        When a scorer fails and is not to be skipped.
    """
    answers, exchanges = exchanges_of(rollouts, agent_names)
    for name, scorer in scorers.items():
        scores_N, is_error_N = scorer.rate(exchanges)
        told = zip(answers, scores_N.tolist(), is_error_N.tolist(), strict=True)
        for answer, score, is_error in told:
            unknown = "error" if is_error else None
            answer["scores"][name] = unknown if math.isnan(score) else score
    return answers


def score_figures(
    answers: Sequence[Answer], scorers: Sequence[str], *, threshold: float
) -> dict[str, Any]:
    """Figures by agent: `<agent>/mean_<scorer>`, and the share of scores from the threshold on.

    `<agent>/share_<scorer>` has its 95 % interval under `<agent>/share_<scorer>_interval`, which
    allows for answers about the same datapoint.
    """
    figures: dict[str, Any] = {}
    for agent in dict.fromkeys(answer["agent"] for answer in answers):
        own = [answer for answer in answers if answer["agent"] == agent]
        for name in scorers:
            rated = [one for one in own if isinstance(one["scores"][name], float)]
            figures[f"{agent}/num_{name}"] = len(rated)
            if rated:
                scores = np.array([one["scores"][name] for one in rated])
                is_high = (scores >= threshold).astype(np.float64)
                share = rate_estimate(is_high, [one["datapoint_id"] for one in rated])
                figures[f"{agent}/mean_{name}"] = float(scores.mean())
                figures[f"{agent}/share_{name}"] = share.value
                figures[f"{agent}/share_{name}_interval"] = [share.low, share.high]
    return figures


def _columns(rollouts: NestedArrayDict, place: int) -> tuple[tuple[str, Any], ...]:
    columns = rollouts.get("datapoint")
    if columns is None:
        return ()
    plain = ((str(name), array[place]) for name, array in columns.items())
    return tuple((name, one.item() if hasattr(one, "item") else one) for name, one in plain)
