"""Plays a policy in the environments of a task, all episodes together, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from nip_astra.language_models.base import Generation, SamplingOptions
from nip_astra.rollouts.trajectory import TokenSpan, Trajectory
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Split,
    Task,
    environment_of,
    opening_of,
    rate_episodes,
    reaction_of,
)
from nip_astra.scorers.base import Message
from nip_astra.utils.seeding import SeedPart, uniform_rows


class Sample(Protocol):
    """Draws continuations, as `TrainingService.sample` and `LanguageModel.generate` do."""

    def __call__(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
        /,
    ) -> Generation: ...


@dataclass(frozen=True)
class TaskPlan:
    """How problems are played.

    Attributes
    ----------
    num_runs : int
        Of each problem; a problem is a group, and each of its runs a run.
    max_turns : int
        Turns of the policy after which an episode is ended with reward 0.
    key : tuple
        Names the randomness, with the seed in it.
    """

    split: Split
    num_runs: int
    max_turns: int
    key: tuple[SeedPart, ...]


class Opening(NamedTuple):
    """An episode that is yet to be played: the problem, which of its runs, and where."""

    problem: int
    run: int
    environment: Environment


def openings_of(task: Task, problems: Sequence[int], plan: TaskPlan) -> list[Opening]:
    """All runs of problems, those of a problem beside each other."""
    return [
        Opening(problem, run, environment_of(task, plan.split, problem))
        for problem in problems
        for run in range(plan.num_runs)
    ]


@dataclass
class PlayedEpisode:
    """An episode that is being played, or was and is yet to be rated.

    Attributes
    ----------
    group_id : str
        Name of the problem.
    run_id : int
        Number of the run among those of the problem, from 0.
    spans : list of list
        What was read and said in each trajectory: one, unless the context lost its oldest turns.
    is_over : bool
        Whether its environment ended it.
    is_cut : bool
        Whether the policy had no room to end a turn.
    """

    problem: int
    group_id: str
    run_id: int
    episode: Episode
    spans: list[list[TokenSpan]] = field(default_factory=list)
    is_over: bool = False
    is_cut: bool = False
    num_turns: int = 0

    def trajectories(self) -> list[Trajectory]:
        """What is learnt from, with the reward that the episode has now."""
        return [
            Trajectory.from_spans(
                spans,
                reward=self.episode.reward,
                group_id=self.group_id,
                run_id=self.run_id,
                problem=self.problem,
                num_turns=self.num_turns,
                is_cut=int(self.is_cut),
            )
            for spans in self.spans
        ]


@dataclass
class _Run:
    """One episode in progress, and what its next context is made of."""

    opening: Opening
    played: PlayedEpisode
    turns: list[Turn] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        """The tokens of the trajectory in progress."""
        spans = self.played.spans
        return [token for span in spans[-1] for token in span.ids] if spans else []

    def read(self, context: Sequence[int]) -> None:
        """Go on from a context; a new trajectory begins where it does not continue the last."""
        known, spans = self.known, self.played.spans
        if not spans or list(context[: len(known)]) != known:
            spans.append([])
            known = []
        spans[-1].append(TokenSpan(context[len(known) :]))


@dataclass(frozen=True)
class TaskRollout:
    """What playing gave.

    Attributes
    ----------
    trajectories : list of Trajectory
        Of all episodes in order; one an episode, unless its context lost its oldest turns. Extras:
        `problem`, `num_turns` and `is_cut` (1 where the policy had no room to end its turn).
    episodes : list of Episode
        What was said, a problem's runs beside each other.
    """

    trajectories: list[Trajectory]
    episodes: list[Episode]


def play_episodes(
    agent: ConversationAgent,
    openings: Sequence[Opening],
    plan: TaskPlan,
    sample: Sample | None = None,
) -> list[PlayedEpisode]:
    """Play episodes, all of them together; what is said depends on key, problem and run alone.

    Parameters
    ----------
    openings : Sequence[Opening]
        As `openings_of` gives them: all runs of a problem beside each other.
    sample : Sample, optional
        What draws; the agent's own model by default.
    """
    runs = [_Run(opening, _unplayed(opening, plan.split)) for opening in openings]
    for run in runs:
        _hear(run, agent, opening_of(run.opening.environment))
    active = runs
    for turn in range(plan.max_turns):
        # At first the runs of a problem have one context, which is read once.
        shared = plan.num_runs if turn == 0 else 1
        contexts = agent.contexts([run.turns for run in active[::shared]])
        rows = uniform_rows(
            [(*plan.key, plan.split, run.opening.problem, run.opening.run, turn) for run in active],
            agent.sampling.max_new_tokens,
        )
        draw = sample or agent.token_sampler.generate
        said = draw(contexts, shared, rows, agent.sampling)
        for index, run in enumerate(active):
            run.read(contexts[index // shared])
        _speak(active, agent, said)
        active = [run for run in active if not run.played.is_over]
        if not active:
            break
    return [run.played for run in runs]


def rated(task: Task, played: Sequence[PlayedEpisode]) -> TaskRollout:
    """What was played, with the rewards of the environments, or else of the task."""
    for one in played:
        if not one.is_over:
            one.episode.reward = 0.0
    rate_episodes(task, [one.episode for one in played if one.episode.reward is None])
    return TaskRollout(
        [trajectory for one in played for trajectory in one.trajectories()],
        [one.episode for one in played],
    )


def _unplayed(opening: Opening, split: Split) -> PlayedEpisode:
    group = f"{split}-{opening.problem}"
    episode = Episode(opening.environment)
    return PlayedEpisode(opening.problem, group, opening.run, episode)


def _hear(run: _Run, agent: ConversationAgent, messages: Sequence[Message]) -> None:
    for message in messages:
        run.played.episode.messages.append(message)
        is_own = message.role == "assistant"
        run.turns.append(Turn(is_own, agent.conversation_format.encode(message.text)))


def _speak(runs: Sequence[_Run], agent: ConversationAgent, said: Generation) -> None:
    """Let each run's environment react to what the policy said."""
    contents = agent.content_ids(said)
    lengths = said.mask_BT.sum(dim=1).tolist()
    ids, logprobs = said.ids_BT.tolist(), said.logprobs_BT.tolist()
    for index, (run, text) in enumerate(zip(runs, agent.decode(contents), strict=True)):
        played, length = run.played, lengths[index]
        played.spans[-1].append(TokenSpan(ids[index][:length], logprobs[index][:length]))
        run.turns.append(Turn(True, contents[index]))
        played.is_cut |= length == len(contents[index])
        played.num_turns += 1
        played.episode.messages.append(Message("assistant", text))
        reaction = reaction_of(run.opening.environment, text)
        played.is_over = reaction.is_over
        if reaction.is_over:
            played.episode.reward = reaction.reward
        _hear(run, agent, reaction.messages)
