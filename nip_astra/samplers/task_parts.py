"""Rollouts of tasks, cut into parts of whole problems: who plays them, and how they come together.

Where a rollout is cut hangs on the experiment alone. Its parts are played one after another in this
process, or at once by forked processes, by actors of Ray, or by the processes that train the run
together. Environments step where their episode is played; all are rated in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nip_astra.distributed.team import Team
from nip_astra.errors import WorkerProcessError
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.samplers.parts import (
    Played,
    are_played_by_actors,
    begin_parts,
    pays_to_fork,
    play_here,
    play_parts,
)
from nip_astra.samplers.task_episodes import (
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
from nip_astra.scenario_base.tasks.base import Episode, Task
from nip_astra.scorers.base import Message
from nip_astra.utils.cutting import cut_evenly

PLAY_TASK = "play_task"
"""Name of the handler that plays a shard of a task's rollout."""


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
    return cut_evenly(range(num_problems), min(num_parts, num_problems) if is_here else 1)


def _play_in_parts(
    agent: ConversationAgent,
    task: Task,
    problems: Sequence[int],
    plan: TaskPlan,
    pieces: Sequence[range],
) -> list[Played[list[PlayedEpisode]]]:
    plays = [
        partial(
            play_episodes,
            agent,
            openings_of(task, problems[piece.start : piece.stop], plan),
            plan,
        )
        for piece in pieces
    ]
    if are_played_by_actors([agent]):
        return begin_parts(plays, [agent])()
    smallest = min(len(piece) for piece in pieces) * plan.num_runs
    # While rollouts are played ahead, the main thread computes: a fork would inherit its locks.
    is_alone = threading.current_thread() is threading.main_thread()
    is_forked = is_alone and pays_to_fork([agent], smallest)
    return play_parts(plays, [agent], len(pieces) if is_forked else 1)


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
        return [
            _from_plain(task, Episode(opening.environment), one)
            for opening, one in zip(openings, plain, strict=True)
        ]

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

    return told_of(play, lambda episodes: [_to_plain(one) for one in episodes])


def _to_plain(played: PlayedEpisode) -> dict[str, Any]:
    """All but the environment: nothing is unpickled that another machine has sent."""
    episode = played.episode
    return {
        "messages": [list(message) for message in episode.messages],
        "reward": None if episode.reward is None else float(episode.reward),
        "is_over": played.is_over,
        "trajectories": [one.to_plain() for one in played.trajectories],
    }


def _from_plain(task: Task, episode: Episode, plain: Mapping[str, Any]) -> PlayedEpisode:
    """Take what `_to_plain` gave; `episode` is a new one of the problem."""
    episode.messages = [Message(role, text) for role, text in plain["messages"]]
    episode.reward = plain["reward"]
    if plain["is_over"] and episode.reward is None:
        # The task is to rate it, and may ask its environment.
        _say_again(task, episode)
    trajectories = [Trajectory(**fields) for fields in plain["trajectories"]]
    return PlayedEpisode(episode, trajectories, plain["is_over"])


def _say_again(task: Task, episode: Episode) -> None:
    """Bring a new environment to where that of another process was.

    Raises
    ------
    WorkerProcessError
        When it reacts otherwise.
    """
    environment = episode.environment
    heard = list(environment.reset())
    while len(heard) < len(episode.messages):
        said = episode.messages[len(heard)]
        reaction = environment.step(said.text)
        heard += [said, *reaction.messages]
    if heard != episode.messages:
        raise WorkerProcessError(
            f"an episode of the task {type(task).__name__} was played by another process and is "
            "rated by this one, but its environment reacted otherwise when the same was said to it "
            "again. Have its reactions hang on the problem and on what was said alone, or set "
            "task.num_rollout_parts to 1, so that the first process plays."
        )
