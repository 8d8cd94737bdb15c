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
from nip_astra.scenario_base.tasks.base import Environment, Episode, Split, Task
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
        Opening(problem, run, task.environment(plan.split, problem))
        for problem in problems
        for run in range(plan.num_runs)
    ]


@dataclass
class PlayedEpisode:
    """An episode that was played and is yet to be rated.

    Attributes
    ----------
    trajectories : list of Trajectory
        Without rewards; one, unless the context lost its oldest turns.
    is_over : bool
        Whether its environment ended it.
    """

    episode: Episode
    trajectories: list[Trajectory]
    is_over: bool


@dataclass
class _Run:
    """One episode in progress."""

    opening: Opening
    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    parts: list[list[TokenSpan]] = field(default_factory=list)
    is_over: bool = False
    is_cut: bool = False
    num_turns: int = 0

    @property
    def known(self) -> list[int]:
        """The tokens of the trajectory in progress."""
        return [token for span in self.parts[-1] for token in span.ids] if self.parts else []

    def read(self, context: Sequence[int]) -> None:
        """Go on from a context; a new trajectory begins where it does not continue the last."""
        known = self.known
        if not self.parts or list(context[: len(known)]) != known:
            self.parts.append([])
            known = []
        self.parts[-1].append(TokenSpan(context[len(known) :]))


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
    """Play episodes, all of them together; what is said hangs on key, problem and run alone.

    Parameters
    ----------
    openings : Sequence[Opening]
        As `openings_of` gives them: all runs of a problem beside each other.
    sample : Sample, optional
        What draws; the agent's own model by default.
    """
    runs = [_Run(opening, Episode(opening.environment)) for opening in openings]
    for run in runs:
        _hear(run, agent, run.episode.environment.reset())
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
        active = [run for run in active if not run.is_over]
        if not active:
            break
    return [PlayedEpisode(run.episode, _trajectories(run, plan.split), run.is_over) for run in runs]


def rated(task: Task, played: Sequence[PlayedEpisode]) -> TaskRollout:
    """What was played, with the rewards of the environments, or else of the task."""
    for one in played:
        if not one.is_over:
            one.episode.reward = 0.0
    task.rate([one.episode for one in played if one.episode.reward is None])
    for one in played:
        reward = one.episode.reward
        for trajectory in one.trajectories:
            trajectory.reward = None if reward is None else float(reward)
    return TaskRollout(
        [trajectory for one in played for trajectory in one.trajectories],
        [one.episode for one in played],
    )


def _hear(run: _Run, agent: ConversationAgent, messages: Sequence[Message]) -> None:
    for message in messages:
        run.episode.messages.append(message)
        is_own = message.role == "assistant"
        run.turns.append(Turn(is_own, agent.conversation_format.encode(message.text)))


def _speak(runs: Sequence[_Run], agent: ConversationAgent, said: Generation) -> None:
    """Let each run's environment react to what the policy said."""
    contents = agent.content_ids(said)
    lengths = said.mask_BT.sum(dim=1).tolist()
    ids, logprobs = said.ids_BT.tolist(), said.logprobs_BT.tolist()
    for index, (run, text) in enumerate(zip(runs, agent.decode(contents), strict=True)):
        length = lengths[index]
        run.parts[-1].append(TokenSpan(ids[index][:length], logprobs[index][:length]))
        run.turns.append(Turn(True, contents[index]))
        run.is_cut |= length == len(contents[index])
        run.num_turns += 1
        run.episode.messages.append(Message("assistant", text))
        reaction = run.episode.environment.step(text)
        run.is_over = reaction.is_over
        if reaction.is_over:
            run.episode.reward = reaction.reward
        _hear(run, agent, reaction.messages)


def _trajectories(run: _Run, split: Split) -> list[Trajectory]:
    group = f"{split}-{run.opening.problem}"
    return [
        Trajectory.from_spans(
            spans,
            group_id=group,
            run_id=f"{group}-{run.opening.run}",
            problem=run.opening.problem,
            num_turns=run.num_turns,
            is_cut=int(run.is_cut),
        )
        for spans in run.parts
    ]
