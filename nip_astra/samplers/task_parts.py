"""Rollouts of tasks, cut into parts of whole problems: who plays them, and how they come together.

Where a rollout is cut depends on the experiment alone. Its parts are played one after another in
this process, or at once by forked processes, by actors of Ray, or by the processes that train the
run together. Environments step where their episode is played; all are rated in this process.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch

from nip_astra.distributed.team import Team
from nip_astra.errors import WorkerProcessError
from nip_astra.language_models.base import TokenModel
from nip_astra.rollouts.trajectory import TokenSpan
from nip_astra.samplers.parts import (
    Played,
    are_played_by_actors,
    begin_parts,
    can_be_forked,
    play_here,
    play_parts,
)
from nip_astra.samplers.task_episodes import (
    Opening,
    PlayedEpisode,
    Sample,
    TaskPlan,
    TaskRollout,
    openings_of,
    play_episodes,
    rated,
)
from nip_astra.samplers.together import play_on_team, told_of
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Task,
    opening_of,
    reaction_of,
)
from nip_astra.scorers.base import Message
from nip_astra.utils.cutting import cut_evenly
from nip_astra.utils.forked import get_num_processes

logger = logging.getLogger(__name__)

PLAY_TASK = "play_task"
"""Name of the handler that plays a shard of a task's rollout."""
WORTH_A_FORK = 0.06
"""Seconds of processor of a part for which a forked process takes less time than it costs."""

_seconds_of_episode: WeakKeyDictionary[TokenModel, float] = WeakKeyDictionary()
"""What an episode took of the processor when a model last played in this process alone; 0 for the
first time, in which memory is yet to be had."""
_can_be_sent: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
"""Whether environments of a class come whole out of a forked process."""


def play_task(
    agent: ConversationAgent,
    task: Task,
    problems: Sequence[int],
    plan: TaskPlan,
    *,
    num_parts: int = 1,
    team: Team | None = None,
    sample: Sample | None = None,
) -> TaskRollout:
    """Play several runs of each problem, and rate them.

    Parameters
    ----------
    num_parts : int
        Parts into which the problems are cut, where the agent's own model is in this process.
    team : Team, optional
        Processes that have an agent and a task equal to these, whose handler `PLAY_TASK` is
        `play_task_shard`; they play parts while they may be asked.
    sample : Sample, optional
        What draws in place of the agent's own model; then all is played here, together.

    Raises
    ------
    WorkerProcessError
        When another process could not play its parts.
    """
    if sample is not None:
        openings = openings_of(task, problems, plan)
        return rated(task, play_episodes(agent, openings, plan, sample))
    pieces = cut_problems(agent, len(problems), num_parts)
    if team is not None and team.may_ask and len(pieces) > 1:
        played = _play_on_team(agent, task, problems, plan, pieces, team)
    else:
        played = _play_in_parts(agent, task, problems, plan, pieces)
    episodes = [one for some in played for part in some.parts for one in part]
    return rated(task, episodes)


def cut_problems(agent: ConversationAgent, num_problems: int, num_parts: int) -> list[range]:
    """Cut problems into equal parts, as many as asked for, and at most one a problem.

    What draws elsewhere, a service or an engine, is asked about all of them at once.
    """
    is_here = agent.language_model.is_in_this_process
    return cut_evenly(range(num_problems), max(min(num_parts, num_problems), 1) if is_here else 1)


def _play_in_parts(
    agent: ConversationAgent,
    task: Task,
    problems: Sequence[int],
    plan: TaskPlan,
    pieces: Sequence[range],
) -> list[Played[list[PlayedEpisode]]]:
    openings = [openings_of(task, problems[piece.start : piece.stop], plan) for piece in pieces]
    plays = [partial(play_episodes, agent, some, plan) for some in openings]
    if are_played_by_actors([agent]):
        return begin_parts(plays, [agent])()
    # While rollouts are played ahead, the main thread computes: a fork would inherit its locks.
    is_alone = threading.current_thread() is threading.main_thread()
    if not (is_alone and can_be_forked([agent])):
        return play_parts(plays, [agent], 1)
    model = agent.language_model
    smallest = min(len(piece) for piece in pieces) * plan.num_runs
    environments = [one.environment for some in openings for one in some]
    is_worth_a_fork = _seconds_of_episode.get(model, 0.0) * smallest >= WORTH_A_FORK
    may_fork = get_num_processes() > 1 and len(pieces) > 1
    if may_fork and is_worth_a_fork and _are_sent_whole(environments):
        return play_parts(plays, [agent], len(pieces))
    started = time.process_time()
    played = play_parts(plays, [agent], 1)
    spent = (time.process_time() - started) / max(len(problems) * plan.num_runs, 1)
    _seconds_of_episode[model] = spent if model in _seconds_of_episode else 0.0
    if may_fork:
        # What was played may hold more than what is yet to be.
        _kinds_kept_here(environments)
    return played


def _are_sent_whole(environments: Sequence[Environment]) -> bool:
    """Say whether a forked process can send environments back; warn of those that it cannot."""
    kinds = _kinds_kept_here(environments)
    if kinds:
        _warn_once(", ".join(kinds))
    return not kinds


def _kinds_kept_here(environments: Sequence[Environment]) -> list[str]:
    """The classes of environments that cannot be sent; one of each is tried, once."""
    found = []
    for kind, one in {type(one): one for one in reversed(environments)}.items():
        if kind not in _can_be_sent:
            try:
                pickle.loads(pickle.dumps(one))
                _can_be_sent[kind] = True
            except Exception:  # whatever an environment's own code raises
                _can_be_sent[kind] = False
        if not _can_be_sent[kind]:
            found.append(kind.__qualname__)
    return sorted(found)


@cache
def _warn_once(kinds: str) -> None:
    logger.warning(
        "rollouts are played in this process alone, with the same numbers but more slowly, since "
        "environments of the class %s cannot be pickled. Keep functions, generators, open files "
        "and connections out of them, or set task.num_rollout_parts to 1",
        kinds,
    )


def _play_on_team(
    agent: ConversationAgent,
    task: Task,
    problems: Sequence[int],
    plan: TaskPlan,
    pieces: Sequence[range],
    team: Team,
) -> list[Played[list[PlayedEpisode]]]:
    asked = {
        "problems": [int(problem) for problem in problems],
        "split": plan.split,
        "num_runs": plan.num_runs,
        "max_turns": plan.max_turns,
        "key": list(plan.key),
    }

    def read(plain: Any, piece: range) -> list[PlayedEpisode]:
        openings = openings_of(task, problems[piece.start : piece.stop], plan)
        return _from_plain(task, openings, plain)

    return play_on_team(team, PLAY_TASK, asked, pieces, [agent], read)


@torch.no_grad()
def play_task_shard(
    agent: ConversationAgent, task: Task, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Play what the leader has asked this process for, in plain values."""

    def play() -> Played[list[PlayedEpisode]]:
        plan = TaskPlan(asked["split"], asked["num_runs"], asked["max_turns"], tuple(asked["key"]))
        problems = asked["problems"]
        plays = [
            partial(play_episodes, agent, openings_of(task, problems[start:stop], plan), plan)
            for start, stop in asked["pieces"]
        ]
        return play_here(plays, [agent])

    return told_of(play, _to_plain)


def _to_plain(episodes: Sequence[PlayedEpisode]) -> dict[str, Any]:
    """All but the environments: nothing is unpickled that another machine has sent."""
    spans = [span for one in episodes for some in one.spans for span in some]
    said = [span.logprobs for span in spans if span.logprobs is not None]
    return {
        "ids": torch.tensor([token for span in spans for token in span.ids], dtype=torch.long),
        "logprobs": torch.tensor([one for some in said for one in some], dtype=torch.float64),
        "episodes": [
            vars(one)
            | {
                "episode": None,
                "messages": [list(message) for message in one.episode.messages],
                "reward": None if one.episode.reward is None else float(one.episode.reward),
                "spans": [
                    [[len(span.ids), span.logprobs is not None] for span in some]
                    for some in one.spans
                ],
            }
            for one in episodes
        ],
    }


def _from_plain(
    task: Task, openings: Sequence[Opening], plain: Mapping[str, Any]
) -> list[PlayedEpisode]:
    """Take what `_to_plain` gave of these episodes."""
    ids, logprobs = iter(plain["ids"].tolist()), iter(plain["logprobs"].tolist())

    def span(length: int, is_said: bool) -> TokenSpan:
        tokens = list(islice(ids, length))
        return TokenSpan(tokens, list(islice(logprobs, length)) if is_said else None)

    found = []
    for opening, fields in zip(openings, plain["episodes"], strict=True):
        messages = [Message(role, text) for role, text in fields.pop("messages")]
        fields["episode"] = Episode(opening.environment, messages, fields.pop("reward"))
        fields["spans"] = [[span(*one) for one in some] for some in fields["spans"]]
        one = PlayedEpisode(**fields)
        if one.is_over and one.episode.reward is None:
            # The task is to rate it, and may ask its environment.
            _say_again(task, one.episode)
        found.append(one)
    return found


def _say_again(task: Task, episode: Episode) -> None:
    """Bring a new environment to where that of another process was.

    Raises
    ------
    WorkerProcessError
        When it reacts otherwise.
    """
    environment = episode.environment
    heard = opening_of(environment)
    while len(heard) < len(episode.messages):
        said = episode.messages[len(heard)]
        reaction = reaction_of(environment, said.text)
        heard += [said, *reaction.messages]
    if heard != episode.messages:
        raise WorkerProcessError(
            f"an episode of the task {type(task).__name__} was played by another process and is "
            "rated by this one, but its environment reacted otherwise when the same was said to it "
            "again. Have its reactions depend on the problem and on what was said alone, or set "
            "task.num_rollout_parts to 1, so that the first process plays."
        )
