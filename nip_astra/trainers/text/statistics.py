"""Figures of rollouts in words. Shape suffixes: `N` rollout, `R` round, `A` agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT
from nip_astra.utils.intervals import rate_estimate
from nip_astra.utils.nested_array_dict import NestedArrayDict

CLASSES = {REJECT: "negatives", ACCEPT: "positives"}
"""Names of the datapoints of a label in figures."""


def episode_returns(rollouts: NestedArrayDict) -> npt.NDArray[np.float64]:
    """Each agent's return in each rollout, `[N, A]`."""
    returns_NA: npt.NDArray[np.float64] = rollouts["agents", "reward"].sum(axis=1)
    return returns_NA


def rollout_statistics(
    rollouts: NestedArrayDict, agent_names: Sequence[str], groupings: Sequence[str] = ()
) -> dict[str, float]:
    """Figures of all rollouts, and of each agent as `<agent>/<figure>`.

    A rollout without a decision counts as wrong. Figures without any data are left out. `groupings`
    are columns of the data, by each value of which the accuracy is added.
    """
    y_N, decision_N, datapoint_N = (rollouts[key] for key in ("y", "decision", "datapoint_id"))
    is_right_N = decision_N == y_N
    found = {
        "mean_accuracy": float(is_right_N.mean()),
        "share_undecided": float((decision_N == CONTINUE).mean()),
        "mean_episode_length": float(rollouts["num_rounds"].mean()),
        "worst_datapoint_accuracy": min(
            float(is_right_N[datapoint_N == one].mean()) for one in np.unique(datapoint_N).tolist()
        ),
    }
    for label, name in CLASSES.items():
        if (y_N == label).any():
            found[f"accuracy_of_{name}"] = float(is_right_N[y_N == label].mean())
    if (decision_N != CONTINUE).any():
        found["mean_decision"] = float(decision_N[decision_N != CONTINUE].mean())
    if (decision_N == ACCEPT).any():
        found["accuracy_of_accepting"] = float(is_right_N[decision_N == ACCEPT].mean())
    for column in groupings:
        values_N = rollouts["datapoint", column]
        for value in sorted(set(values_N.tolist())):
            found[f"accuracy_where_{column}_{value}"] = float(is_right_N[values_N == value].mean())
    returns_NA = episode_returns(rollouts)
    for number, name in enumerate(agent_names):
        found |= {
            f"{name}/{figure}": value
            for figure, value in _of_agent(rollouts, number, returns_NA[:, number]).items()
        }
    return found


def statistics_with_interval(
    rollouts: NestedArrayDict, agent_names: Sequence[str], groupings: Sequence[str] = ()
) -> dict[str, Any]:
    """The same with the number of episodes and a 95 % interval of the accuracy, by datapoint."""
    found: dict[str, Any] = dict(rollout_statistics(rollouts, agent_names, groupings))
    is_right_N = rollouts["decision"] == rollouts["y"]
    estimate = rate_estimate(is_right_N.tolist(), rollouts["datapoint_id"].tolist())
    found["mean_accuracy_interval"] = [estimate.low, estimate.high]
    found["num_episodes"] = float(len(rollouts))
    return found


def _of_agent(
    rollouts: NestedArrayDict, number: int, returns_N: npt.NDArray[np.float64]
) -> dict[str, float]:
    found = {
        "mean_episode_reward": float(returns_N.mean()),
        "std_episode_reward": float(returns_N.std()),
    }
    had_turn_NR = rollouts["agents", "is_active"][:, :, number]
    messages = rollouts["agents", "message"][:, :, number][had_turn_NR]
    lengths = [len(text.split()) for text in messages.ravel() if text is not None]
    if lengths:
        found["mean_message_words"] = sum(lengths) / len(lengths)
    if had_turn_NR.any():
        retries_NR = rollouts["agents", "num_retries"][:, :, number]
        found["share_retried"] = float((retries_NR[had_turn_NR] > 0).mean())
        for figure, key in (("share_cut", "is_cut"), ("share_silent", "is_filled")):
            found[figure] = float(rollouts["agents", key][:, :, number][had_turn_NR].mean())
    return found
