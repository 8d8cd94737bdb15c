"""Sampling of a policy in a task's environments, turn by turn, with all episodes of a part
together.

Environments step where their episode runs; all are rated in this process.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import compress, groupby, islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nip_astra.call_outcomes import call_position, using_outcomes
from nip_astra.deadlines import call_in_threads
from nip_astra.distributed.team import Team
from nip_astra.errors import ContextLengthError, WorkerProcessError
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    SamplingOptions,
    TokenModel,
)
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.trajectory import TokenSpan, Trajectory
from nip_astra.samplers.executor import (
    Executor,
    ForkedProcesses,
    PartCall,
    WorkerResult,
    choose_executor,
    cut_problems,
)
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    close_environment,
    environment_of,
    figures_of,
    is_stateless,
    opening_of,
    rate_episodes,
    reaction_of,
    reaction_to_calls,
    toolbox_of,
)
from nip_astra.scenario_base.tasks.tools import NO_TOOLS, Outcome, Toolbox
from nip_astra.utils.seeding import SeedPart, uniform_rows

logger = logging.getLogger(__name__)
Value = TypeVar("Value")

WORTH_A_FORK = 0.06
"""CPU seconds of a part above which a forked process saves time."""

_seconds_of_episode: WeakKeyDictionary[TokenModel, float] = WeakKeyDictionary()
"""CPU seconds per episode when a model last sampled in this process alone; 0 after the first time,
which allocates memory."""
_is_picklable: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


Draw = Callable[[Sequence[Sequence[int]], int, Tensor, SamplingOptions], Generation]
"""Samples continuations, like `TrainingService.sample` and `LanguageModel.generate`."""


@dataclass(frozen=True)
class TaskPlan:
    """Sampling plan of problems: `num_runs` each, with at most `max_turns` turns of the policy.

    An episode that takes longer ends with reward 0, and so does one with a missing answer. `key`,
    which includes the seed, names the randomness. `earlier` are problems sampled before with the
    same key: a problem that comes again has other random numbers and is another group.
    """

    split: Split
    num_runs: int
    max_turns: int
    key: tuple[SeedPart, ...]
    earlier: tuple[int, ...] = ()

    def after(self, problems: Sequence[int]) -> TaskPlan:
        """Return the plan of what follows these problems."""
        return replace(self, earlier=(*self.earlier, *problems))


@dataclass
class PlayedEpisode:
    """An episode before, during or after sampling, not rated yet.

    `spans` has a list per trajectory: one, unless the context lost its oldest turns. `is_over`: the
    environment ended it. `is_cut`: the policy had no room to end a turn, or to begin the next, or
    its last answer is missing (`is_missing`), which ends the episode.
    """

    problem: int
    group_id: str
    run_id: int
    episode: Episode
    spans: list[list[TokenSpan]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    is_over: bool = False
    is_cut: bool = False
    is_missing: bool = False
    num_turns: int = 0
    toolbox: Toolbox = NO_TOOLS

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent environments of this kind."""
        return getattr(self.episode.environment, "concurrency", 1)

    def observe(self, messages: Sequence[Turn], *, has_template: bool) -> list[Turn]:
        """Add messages to the episode; return them as the policy reads them."""
        introduction = ""
        if not self.episode.messages and not has_template:
            # A template shows the tools itself.
            introduction = self.toolbox.introduction()
        self.episode.messages += messages
        turns: list[Turn] = []
        for role, group in groupby(messages, key=lambda message: message.role):
            group_turns = [Turn(role, message.text, calls=message.calls) for message in group]
            if role == "tool" and not has_template:
                # Without a role for tools, all results are one message of the user.
                text = "\n".join(turn.text for turn in group_turns)
                group_turns = [Turn("user", text)]
            turns += group_turns
        if turns and introduction:
            turns[0] = replace(turns[0], text=introduction + turns[0].text)
        return turns

    @property
    def is_answer_begun(self) -> bool:
        """Whether the last of the opening messages is the beginning of the policy's answer."""
        return self.episode.environment.begins_answer and self.num_turns == 0

    def add_answer(self, turn: Turn) -> None:
        """Add the policy's turn to those that later contexts have."""
        if self.is_answer_begun:
            beginning = self.turns.pop()
            text_ids = (*beginning.ids, *turn.ids_without_reasoning)
            turn = replace(
                turn,
                ids=(*beginning.ids, *turn.ids),
                text_ids=text_ids if turn.has_reasoning_ids else None,
                num_reasoning_ids=0,
            )
        self.turns.append(turn)

    def fits(self, agent: ConversationAgent) -> bool:
        """Return whether the last turn leaves the policy room for its next one."""
        chat_format = agent.conversation_format.with_tools(self.toolbox.described)
        try:
            chat_format.fit(self.turns, num_tokens=agent.room)
        except ContextLengthError:
            return False
        return True

    def read(self, context: Sequence[int]) -> None:
        """Continue with a context; start a new trajectory if it does not extend the last."""
        earlier_ids: list[int] = []
        if self.spans:
            for span in self.spans[-1]:
                earlier_ids += span.ids
        if not self.spans or list(context[: len(earlier_ids)]) != earlier_ids:
            self.spans.append([])
            earlier_ids = []
        self.spans[-1].append(TokenSpan(context[len(earlier_ids) :]))


def observe_together(
    agent: ConversationAgent,
    episodes: Sequence[PlayedEpisode],
    messages: Sequence[Sequence[Turn]],
) -> None:
    """Add messages to episodes and to their next contexts; each text is encoded once."""
    has_template = agent.conversation_format.supports_tools
    observed = [
        episode.observe(episode_messages, has_template=has_template)
        for episode, episode_messages in zip(episodes, messages, strict=True)
    ]
    turns = agent.tokenize([turn for episode_turns in observed for turn in episode_turns])
    start = 0
    for episode, episode_turns in zip(episodes, observed, strict=True):
        stop = start + len(episode_turns)
        episode.turns += turns[start:stop]
        start = stop


def build_trajectories(played: Sequence[PlayedEpisode]) -> list[Trajectory]:
    """Return the trajectories with the episodes' current rewards."""
    spans: list[list[TokenSpan]] = []
    columns: list[dict[str, Any]] = []
    for episode in played:
        for trajectory_spans in episode.spans:
            spans.append(trajectory_spans)
            columns.append(
                {
                    "reward": episode.episode.reward,
                    "group_id": episode.group_id,
                    "run_id": episode.run_id,
                    "problem": episode.problem,
                    "num_turns": episode.num_turns,
                    "is_cut": int(episode.is_cut),
                }
            )
    return Trajectory.all_from_spans(spans, columns)


def new_episodes(task: Task, problems: Sequence[int], plan: TaskPlan) -> list[PlayedEpisode]:
    """Create all runs of problems, those of a problem adjacent; see `Environment.is_stateless`."""
    episodes = []
    num_occurrences = Counter(plan.earlier)
    for problem in problems:
        occurrence = num_occurrences[problem]
        num_occurrences[problem] += 1
        group_id = f"{plan.split}-{problem}"
        if occurrence:
            group_id += f"-{occurrence}"
        environment = environment_of(task, plan.split, problem)
        toolbox = toolbox_of(task, environment)
        for run in range(plan.num_runs):
            if run > 0 and not is_stateless(environment):
                environment = environment_of(task, plan.split, problem)
                toolbox = toolbox_of(task, environment)
            # Runs of a problem that comes again have other random numbers.
            run_id = occurrence * plan.num_runs + run
            episode = Episode(environment)
            episodes.append(PlayedEpisode(problem, group_id, run_id, episode, toolbox=toolbox))
    return episodes


@dataclass(frozen=True)
class TaskRollout:
    """The episodes in order, runs of a problem adjacent, and their trajectories.

    There is one trajectory per episode, unless its context lost its oldest turns. Extras:
    `problem`, `num_turns` and `is_cut` (1 if the policy had no room to end a turn).
    """

    trajectories: list[Trajectory]
    episodes: list[Episode]


def play_episodes(
    agent: ConversationAgent,
    episodes: Sequence[PlayedEpisode],
    plan: TaskPlan,
    sample: Draw | None = None,
) -> list[PlayedEpisode]:
    """Sample the episodes of `new_episodes` together; turns depend only on key, problem and run.

    `sample` replaces the agent's own model.
    """
    batch_size = max(len(episodes), 1)
    for played in episodes:
        max_open = getattr(played.episode.environment, "max_open", None)
        if max_open is not None:
            batch_size = min(batch_size, max_open)
    for start in range(0, len(episodes), batch_size):
        _play_together(agent, episodes[start : start + batch_size], plan, sample)
    for played in episodes:
        # The tools may be functions that cannot be sent to another process.
        played.turns = []
        played.toolbox = NO_TOOLS
        played.episode.figures = figures_of(played.episode.environment)
    return list(episodes)


def _play_together(
    agent: ConversationAgent,
    episodes: Sequence[PlayedEpisode],
    plan: TaskPlan,
    sample: Draw | None,
) -> None:
    # Runs of a problem may share an environment, which is opened once.
    first_by_key: dict[int, PlayedEpisode] = {}
    keys = []
    for played in episodes:
        environment = played.episode.environment
        key = id(environment) if is_stateless(environment) else id(played)
        keys.append(key)
        first_by_key.setdefault(key, played)
    environments = [played.episode.environment for played in first_by_key.values()]
    concurrencies = [played.concurrency for played in first_by_key.values()]
    try:
        openings = _in_threads(concurrencies, lambda index: opening_of(environments[index]))
        opening_by_key = dict(zip(first_by_key, openings, strict=True))
        observe_together(agent, episodes, [opening_by_key[key] for key in keys])
        _take_turns(agent, episodes, plan, sample)
    finally:
        _in_threads(concurrencies, lambda index: close_environment(environments[index]))


def _take_turns(
    agent: ConversationAgent,
    episodes: Sequence[PlayedEpisode],
    plan: TaskPlan,
    sample: Draw | None,
) -> None:
    active = list(episodes)
    session = None if sample is not None else agent.token_sampler.open_session()
    # The turns of each call, and the span of each row, whose log-probabilities are settled later.
    sampled: list[tuple[Generation, list[TokenSpan]]] = []
    for turn in range(plan.max_turns):
        # At first the runs of a problem have one context, which is read once.
        is_shared = turn == 0 and _begin_alike(active, plan.num_runs)
        runs_per_context = plan.num_runs if is_shared else 1
        first_runs = active[::runs_per_context]
        contexts = agent.contexts(
            [played.turns for played in first_runs],
            [played.toolbox.described for played in first_runs],
            [played.is_answer_begun for played in first_runs],
        )
        keys = [(*plan.key, plan.split, played.problem, played.run_id, turn) for played in active]
        uniforms_RT = uniform_rows(keys, agent.sampling.max_new_tokens)
        if sample is not None:
            generation = sample(contexts, runs_per_context, uniforms_RT, agent.sampling)
        else:
            assert session is not None
            generation = session.generate(
                contexts, runs_per_context, uniforms_RT, agent.sampling
            ).generation
        for index, played in enumerate(active):
            played.read(contexts[index // runs_per_context])
        _act(active, agent, generation, plan)
        sampled.append((generation, [played.spans[-1][-1] for played in active]))
        if turn + 1 == plan.max_turns:
            break
        are_open = []
        for played in active:
            has_ended = played.is_over or played.is_missing
            is_open = not has_ended and played.fits(agent)
            # An episode that ends otherwise than by its environment is cut.
            played.is_cut |= not (is_open or played.is_over)
            are_open.append(is_open)
        active = list(compress(active, are_open))
        if not active:
            break
        if session is not None:
            session.keep(are_open)
    if session is not None:
        _settle(session, sampled)


def _settle(
    session: GenerationSession, sampled: Sequence[tuple[Generation, Sequence[TokenSpan]]]
) -> None:
    """Set the final log-probabilities of the tokens of spans."""
    settled = session.settle([generation for generation, _ in sampled])
    for final, (generation, spans) in zip(settled, sampled, strict=True):
        if final is generation:
            # The session's log-probabilities were final from the start.
            continue
        for span, logprobs_T in zip(spans, final.logprobs_BT.tolist(), strict=True):
            assert isinstance(span.logprobs, list)
            span.logprobs[:] = logprobs_T[: len(span.ids)]


def _begin_alike(episodes: Sequence[PlayedEpisode], num_runs: int) -> bool:
    """Return whether all runs of a problem have the same context."""
    if len(episodes) % num_runs:
        return False
    for index, played in enumerate(episodes):
        first = episodes[index - index % num_runs]
        # Identity first, which is cheaper than to compare descriptions.
        has_same_tools = (
            played.toolbox is first.toolbox or played.toolbox.described == first.toolbox.described
        )
        if played.turns != first.turns or not has_same_tools:
            return False
    return True


def _in_threads(concurrencies: Sequence[int], call: Callable[[int], Value]) -> list[Value]:
    """Return results of a call by index; those with a concurrency above 1 run in threads."""
    parallel = [index for index, concurrency in enumerate(concurrencies) if concurrency > 1]
    results: dict[int, Value] = {}
    if len(parallel) > 1:
        parallel_calls = [partial(call, index) for index in parallel]
        parallel_results = call_in_threads(parallel_calls, max(concurrencies))
        results = dict(zip(parallel, parallel_results, strict=True))
    # The others one after the other, in order.
    return [
        results[index] if index in results else call(index) for index in range(len(concurrencies))
    ]


def _act(
    episodes: Sequence[PlayedEpisode],
    agent: ConversationAgent,
    generation: Generation,
    plan: TaskPlan,
) -> None:
    """Let each environment, or the called tools, react to the policy's turn."""
    schemas = [played.toolbox.argument_schemas for played in episodes]
    turns = agent.read_turns(generation, schemas)
    lengths = generation.mask_BT.sum(dim=1).tolist()
    ids, logprobs = generation.ids_BT.tolist(), generation.logprobs_BT.tolist()
    for index, (played, turn) in enumerate(zip(episodes, turns, strict=True)):
        length = lengths[index]
        played.spans[-1].append(TokenSpan(ids[index][:length], logprobs[index][:length]))
        played.add_answer(turn)
        played.is_missing = turn.is_missing
        # Without an end token the turn fills all of its room.
        has_no_end = length == len(turn.ids)
        played.is_cut |= turn.is_missing or has_no_end
        played.num_turns += 1
        played.episode.messages.append(turn.without_tokens())
    answered = [played for played in episodes if not played.is_missing]
    answers = [played.episode.messages[-1] for played in answered]
    key = (*plan.key, plan.split)
    observing: list[PlayedEpisode] = []
    messages: list[Sequence[Turn]] = []
    reactions = _reactions(answered, answers, agent, key)
    for played, (reaction, counts) in zip(answered, reactions, strict=True):
        if counts:
            played.episode.tool_counts.update(counts)
        played.is_over = reaction.is_over
        if reaction.is_over:
            played.episode.reward = reaction.reward
        if reaction.messages:
            observing.append(played)
            messages.append(reaction.messages)
    observe_together(agent, observing, messages)


def _reactions(
    episodes: Sequence[PlayedEpisode],
    turns: Sequence[Turn],
    agent: ConversationAgent,
    key: tuple[SeedPart, ...],
) -> list[tuple[Reaction, Counter[str]]]:
    """Return reactions to the policy's messages, and counts of its tool calls.

    `key` names the sampling of these episodes.
    """
    calls = [
        played.toolbox.calls_in(turn, agent.message_format)
        for played, turn in zip(episodes, turns, strict=True)
    ]
    # Of stateless environments, by the environment and the message.
    stateless_reactions: dict[tuple[int, str], Reaction] = {}

    def react(index: int) -> Reaction | list[Outcome]:
        played, text = episodes[index], turns[index].text
        with call_position(*key, played.problem, played.run_id, played.num_turns):
            if calls[index]:
                return [played.toolbox.execute(call) for call in calls[index]]
            environment = played.episode.environment
            if not is_stateless(environment):
                return reaction_of(environment, text)
            reaction_key = id(environment), text
            if reaction_key not in stateless_reactions:
                stateless_reactions[reaction_key] = reaction_of(environment, text)
            return stateless_reactions[reaction_key]

    concurrencies = []
    for played, episode_calls in zip(episodes, calls, strict=True):
        if episode_calls:
            concurrencies.append(played.toolbox.concurrency(episode_calls))
        else:
            concurrencies.append(played.concurrency)
    reactions: list[tuple[Reaction, Counter[str]]] = []
    for played, reacted in zip(episodes, _in_threads(concurrencies, react), strict=True):
        if isinstance(reacted, Reaction):
            reactions.append((reacted, Counter()))
        else:
            environment, toolbox = played.episode.environment, played.toolbox
            reactions.append(reaction_to_calls(environment, toolbox, reacted, agent))
    return reactions


def rated(task: Task, played: Sequence[PlayedEpisode]) -> TaskRollout:
    """Rate episodes with the rewards of the environments, or else of the task."""
    unrated: list[Episode] = []
    for played_episode in played:
        episode = played_episode.episode
        if not played_episode.is_over:
            episode.reward = 0.0
        # The tokens of the policy's last message: other spans have no log-probabilities.
        for spans in played_episode.spans:
            for span in spans:
                if span.logprobs is not None:
                    episode.completion_ids = span.ids
        if episode.reward is None:
            unrated.append(episode)
    rate_episodes(task, unrated)
    return TaskRollout(
        build_trajectories(played),
        [played_episode.episode for played_episode in played],
    )


# ---- who runs the parts


def play_task(
    agent: ConversationAgent,
    task: Task,
    problems: Sequence[int],
    plan: TaskPlan,
    *,
    num_parts: int = 1,
    team: Team | None = None,
    sample: Draw | None = None,
) -> TaskRollout:
    """Run several episodes of each problem and rate them in this process.

    If this process holds the agent's model, the problems are split into `num_parts`. The processes
    of a `team` have an equal agent and task, and `run_requested` of `requested_part` as
    `RUN_PARTS`. `sample` replaces the agent's own model; then all episodes are sampled together.
    """
    if sample is not None:
        return rated(task, play_episodes(agent, new_episodes(task, problems, plan), plan, sample))
    parts: list[list[PlayedEpisode]] = []
    calls = []
    for piece in cut_problems(agent, len(problems), num_parts):
        part_plan = plan.after(problems[: piece.start])
        part = new_episodes(task, problems[piece.start : piece.stop], part_plan)
        parts.append(part)
        calls.append(_part_call(agent, task, part, part_plan))
    executor = choose_executor(calls, team=team)
    if isinstance(executor, ForkedProcesses):
        environments = [played.episode.environment for part in parts for played in part]
        smallest = min(map(len, parts))
        results = _fork_if_worth_it(executor, calls, environments, smallest, agent.language_model)
    else:
        results = executor.map(calls)
    played = [episode for result in results for part in result.parts for episode in part]
    return rated(task, played)


def _part_call(
    agent: ConversationAgent, task: Task, episodes: Sequence[PlayedEpisode], plan: TaskPlan
) -> PartCall[list[PlayedEpisode]]:
    problems = [int(played.problem) for played in episodes[:: plan.num_runs]]
    # In the order of the fields of a plan, which `requested_part` reads.
    plain_plan = [plan.split, plan.num_runs, plan.max_turns, list(plan.key), list(plan.earlier)]
    return PartCall(
        partial(play_episodes, agent, episodes, plan),
        [agent],
        request={"problems": problems, "plan": plain_plan},
        to_plain=_to_plain,
        from_plain=partial(_from_plain, agent, task, episodes),
    )


def requested_part(
    agent: ConversationAgent, task: Task, request: Mapping[str, Any]
) -> PartCall[list[PlayedEpisode]]:
    """Return the call that the leader of a team requests."""
    split, num_runs, max_turns, key, earlier = request["plan"]
    plan = TaskPlan(split, num_runs, max_turns, tuple(key), tuple(earlier))
    return _part_call(agent, task, new_episodes(task, request["problems"], plan), plan)


def _fork_if_worth_it(
    forks: ForkedProcesses,
    calls: Sequence[PartCall[list[PlayedEpisode]]],
    environments: Sequence[Environment],
    smallest: int,
    model: TokenModel,
) -> list[WorkerResult[list[PlayedEpisode]]]:
    """Fork if the smallest part takes long enough and its environments can be pickled."""
    expected_seconds = _seconds_of_episode.get(model, 0.0) * smallest
    if expected_seconds >= WORTH_A_FORK:
        class_names = _find_unpicklable(environments)
        if not class_names:
            return forks.map(calls)
        _warn_about_unpicklable(", ".join(class_names))
    started = time.process_time()
    results = Executor().map(calls)
    seconds_per_episode = (time.process_time() - started) / len(environments)
    is_first_time = model not in _seconds_of_episode
    _seconds_of_episode[model] = 0.0 if is_first_time else seconds_per_episode
    # An environment may hold more after its episode than before.
    _find_unpicklable(environments)
    return results


def _find_unpicklable(environments: Sequence[Environment]) -> list[str]:
    """Return the classes of environments that cannot be pickled; one of each is tried, once."""
    first_by_class: dict[type, Environment] = {}
    for environment in environments:
        first_by_class.setdefault(type(environment), environment)
    unpicklable = []
    for environment_class, environment in first_by_class.items():
        if environment_class not in _is_picklable:
            try:
                pickle.loads(pickle.dumps(environment))
                _is_picklable[environment_class] = True
            except Exception:  # of the environment's own code
                _is_picklable[environment_class] = False
        if not _is_picklable[environment_class]:
            unpicklable.append(environment_class.__qualname__)
    return sorted(unpicklable)


@cache
def _warn_about_unpicklable(kinds: str) -> None:
    logger.warning(
        "rollouts run in this process alone: environments of %s cannot be pickled. Keep functions, "
        "generators, files and connections out of them, or set task.num_rollout_parts to 1",
        kinds,
    )


# ---- results of other processes


def _to_plain(episodes: Sequence[PlayedEpisode]) -> dict[str, Any]:
    """Return everything but the environments: data of other machines is never unpickled."""
    # Tokens and log-probabilities of all episodes are one tensor each.
    ids: list[int] = []
    logprobs: list[float] = []
    plain_episodes = []
    for played in episodes:
        plain_spans = []
        for spans in played.spans:
            for span in spans:
                ids += span.ids
                logprobs += span.logprobs or ()
            plain_spans.append([[len(span.ids), span.logprobs is not None] for span in spans])
        episode = played.episode
        plain_episodes.append(
            vars(played)
            | {
                "episode": None,
                "messages": [message.to_plain() for message in episode.messages],
                "toolbox": None,
                "tool_counts": dict(episode.tool_counts),
                "figures": episode.figures,
                "reward": None if episode.reward is None else float(episode.reward),
                "spans": plain_spans,
            }
        )
    return {
        "ids": torch.tensor(ids, dtype=torch.long),
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
        "episodes": plain_episodes,
    }


def _from_plain(
    agent: ConversationAgent,
    task: Task,
    episodes: Sequence[PlayedEpisode],
    plain: Mapping[str, Any],
) -> list[PlayedEpisode]:
    """Return the episodes of `_to_plain`."""
    ids = iter(plain["ids"].tolist())
    logprobs = iter(plain["logprobs"].tolist())

    def read_span(length: int, has_logprobs: bool) -> TokenSpan:
        span_ids = list(islice(ids, length))
        return TokenSpan(span_ids, list(islice(logprobs, length)) if has_logprobs else None)

    played_episodes = []
    for unplayed, fields in zip(episodes, plain["episodes"], strict=True):
        messages = [Turn.from_plain(message) for message in fields.pop("messages")]
        fields["episode"] = Episode(
            unplayed.episode.environment,
            messages,
            fields.pop("reward"),
            tool_counts=Counter(fields.pop("tool_counts")),
            figures=fields.pop("figures"),
        )
        fields["toolbox"] = unplayed.toolbox
        fields["spans"] = [
            [read_span(length, has_logprobs) for length, has_logprobs in spans]
            for spans in fields["spans"]
        ]
        played = PlayedEpisode(**fields)
        if task.reads_state and played.is_over and played.episode.reward is None:
            # What the task rates is in an environment of the other process.
            _replay(agent, task, played)
        played_episodes.append(played)
    return played_episodes


def _replay(agent: ConversationAgent, task: Task, played: PlayedEpisode) -> None:
    """Bring a new environment to the state of that in another process."""
    expected, environment = played.episode.messages, played.episode.environment
    try:
        messages = opening_of(environment)
        while len(messages) < len(expected):
            answer = expected[len(messages)]
            # Outcomes of calls were kept in the other process.
            with using_outcomes(None):
                ((reaction, _),) = _reactions([played], [answer], agent, ())
            messages += [answer, *reaction.messages]
    finally:
        close_environment(environment)
    # Programs that run in tools may be random.
    if _without_results(messages) != _without_results(expected):
        raise WorkerProcessError(
            f"an environment of the task {type(task).__name__} reacts to the same messages "
            "differently in another process. Make reactions depend on problem and messages only, "
            "or set task.num_rollout_parts to 1."
        )


def _without_results(messages: Sequence[Turn]) -> list[Turn]:
    return [replace(turn, text="") if turn.role == "tool" else turn for turn in messages]
