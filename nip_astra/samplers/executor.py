"""Executors of rollouts: this process, forked processes, Ray actors or the team of a torchrun run.

A rollout is split by the experiment alone (`cut_rollout`, `cut_problems`), since the last digits of
model outputs depend on the rows of a batch. Which executor runs the parts depends on the machine.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from pydantic import Field

from nip_astra.call_outcomes import (
    CallOutcomes,
    KeptOutcome,
    current_outcomes,
    using_outcomes,
)
from nip_astra.distributed.team import Team
from nip_astra.errors import NipAstraError, WorkerProcessError
from nip_astra.language_models.base import TokenCount, TokenModel, TokenSampler
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.scenario_base.agents import ConversationAgent, Speaker
from nip_astra.scenario_base.chat_agent import ChatWork, TextAttacker
from nip_astra.utils.actors import are_actors_used, get_actors
from nip_astra.utils.forked import call_at_once, get_num_processes
from nip_astra.utils.processor import SMALL_MODEL_PARAMETERS, split_evenly

logger = logging.getLogger(__name__)

SMALLEST_PART = 64
"""Minimum nodes of a tree rollout for a forked process."""
RUN_PARTS = "run_parts"
"""Name of the team's handler, `run_requested` of the trainer's sampler."""

EARLIER_OUTCOMES = "earlier_outcomes"
"""Entry of a request with the outcomes that an earlier process of the run has kept."""

Part = TypeVar("Part")
"""Result of one part of a rollout, for instance a tree."""
Rollout = TypeVar("Rollout")
Agents = Sequence[Speaker | TextAttacker]
WorkerOutcomes = tuple[list[str], list[KeptOutcome]]
"""See `CallOutcomes.of_worker`."""


@dataclass(frozen=True)
class PartCall(Generic[Part]):
    """Runs one part of a rollout, also in another process that has a copy of the agents.

    `agents` are equal in all calls of a rollout. Another process of a team makes an equal call from
    `request`, which holds plain values; `to_plain` and `from_plain` convert the result.
    """

    run: Callable[[], Part]
    agents: Agents
    request: Mapping[str, Any] = field(default_factory=dict)
    to_plain: Callable[[Part], Any] = lambda part: part
    from_plain: Callable[[Any], Part] = lambda plain: plain


class WorkerResult(NamedTuple, Generic[Part]):
    """The parts run by one process, and the counts of its agents."""

    parts: list[Part]
    counts: list[TokenCount]
    num_truncated: list[int]
    outcomes: WorkerOutcomes | None = None
    """Outcomes of limited calls, from a process that cannot write those of the run."""


# ---- how a rollout is split


def cut_rollout(
    agents: Agents,
    num_episodes: int,
    num_nodes: int,
    num_parts: int,
    *,
    is_team: bool = False,
) -> list[range]:
    """Split the episodes of a tree rollout into at most `num_parts` equal parts.

    There are fewer where parts would be small, and one for large models, models on a GPU, and
    agents or backends that another process cannot run. Actors and the processes of a team take
    large models.
    """
    count = min(num_parts, num_episodes, num_nodes // SMALLEST_PART)
    if count <= 1 or not (is_team or all(map(_can_be_divided, agents))):
        return [range(num_episodes)]
    return split_evenly(range(num_episodes), count)


def cut_problems(agent: ConversationAgent, num_problems: int, num_parts: int) -> list[range]:
    """Split the problems of a task into equal parts of at least one problem.

    A policy that a service or an engine samples gets all problems in one request.
    """
    is_local = agent.language_model.is_in_this_process
    count = max(min(num_parts, num_problems), 1) if is_local else 1
    return split_evenly(range(num_problems), count)


# ---- who runs the parts


class Executor:
    """Runs parts sequentially in this process."""

    def map(self, calls: Sequence[PartCall[Part]]) -> list[WorkerResult[Part]]:
        """Return the results of each process, in the order of the calls.

        Tokens are counted as if this process had run all parts.
        """
        return [WorkerResult([call.run() for call in calls], [], [])]

    def begin(self, calls: Sequence[PartCall[Part]]) -> Callable[[], list[WorkerResult[Part]]]:
        """Start `map` with the current weights; return a function that waits for the results.

        Without actors the parts are run before this returns.
        """
        results = self.map(calls)
        return lambda: results


class ForkedProcesses(Executor):
    """Runs parts in `count` processes, this one and forked ones."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(self, calls: Sequence[PartCall[Part]]) -> list[WorkerResult[Part]]:
        agents = calls[0].agents
        for model in _counted_models(agents):
            # The forked processes share the memory layout of weights that is made here.
            if isinstance(model, TokenSampler):
                model.open_session().close()
        runs = [call.run for call in calls]
        shards = []
        for indices in split_evenly(range(len(runs)), self.count):
            shards.append(partial(run_local, runs[indices.start : indices.stop], agents))
        # The first shard is run here, where its work is counted already.
        first_result, *forked_results = call_at_once(shards)
        _add_counts(agents, forked_results)
        return [first_result, *forked_results]


class RayActors(Executor):
    """Runs each part as a separate call, so that faster actors run more of them."""

    def map(self, calls: Sequence[PartCall[Part]]) -> list[WorkerResult[Part]]:
        return self.begin(calls)()

    def begin(self, calls: Sequence[PartCall[Part]]) -> Callable[[], list[WorkerResult[Part]]]:
        agents, actors = _distinct(calls[0].agents), get_actors()
        assert actors is not None
        shared_objects: list[object] = []
        for model in _models_of(agents):
            if not isinstance(model, ChatWork):
                shared_objects += [*model.shared_parts(), model]
        earlier = _earlier_outcomes()
        wait = actors.begin(
            [partial(run_apart, [call.run], agents, earlier) for call in calls], shared_objects
        )

        def finish() -> list[WorkerResult[Part]]:
            results = wait()
            _add_counts(agents, results)
            _adopt_outcomes(results)
            return results

        return finish


class TeamExecutor(Executor):
    """Runs parts in all processes of a team, whose models have equal weights."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def map(self, calls: Sequence[PartCall[Part]]) -> list[WorkerResult[Part]]:
        earlier = _earlier_outcomes()
        shards = []
        requests = []
        for indices in split_evenly(range(len(calls)), self.team.size):
            shard = calls[indices.start : indices.stop]
            shards.append(shard)
            requests.append([{**call.request, EARLIER_OUTCOMES: earlier} for call in shard])
        replies = self.team.request(RUN_PARTS, requests)
        for rank, reply in enumerate(replies):
            if reply["failure"] is not None:
                raise WorkerProcessError(
                    f"process {rank} of {self.team.size} failed in its part of a rollout: "
                    f"{reply['failure']}"
                )
        results = []
        for shard, reply in zip(shards, replies, strict=True):
            parts = [
                call.from_plain(plain) for call, plain in zip(shard, reply["parts"], strict=True)
            ]
            counts = [TokenCount(**count) for count in reply["counts"]]
            results.append(WorkerResult(parts, counts, reply["num_truncated"], reply["outcomes"]))
        # The first process is this one, whose agents have counted their work.
        _add_counts(calls[0].agents, results[1:])
        _adopt_outcomes(results)
        return [result for result in results if result.parts]


def choose_executor(
    calls: Sequence[PartCall[Part]], *, team: Team | None = None, max_processes: int | None = None
) -> Executor:
    """Choose the executor for some parts on this machine.

    A `team` has equal agents, and `run_requested` as the handler `RUN_PARTS`.
    """
    agents = calls[0].agents
    if _can_use_actors(agents):
        return RayActors()
    if len(calls) > 1 and team is not None and team.can_request:
        return TeamExecutor(team)
    count = min(get_num_processes(), max_processes or len(calls), len(calls))
    # In an asynchronous rollout the main thread computes, and a fork would inherit its locks.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if count > 1 and is_main_thread and all(map(_can_be_forked, agents)):
        return ForkedProcesses(count)
    return Executor()


def run_local(runs: Sequence[Callable[[], Part]], agents: Agents) -> WorkerResult[Part]:
    """Run parts in this process and count the work of its agents."""
    agents = _distinct(agents)
    num_truncated_before = [agent.num_truncated_contexts for agent in agents]
    with ExitStack() as stack:
        counts = [stack.enter_context(model.counting()) for model in _counted_models(agents)]
        parts = [run() for run in runs]
    num_truncated = []
    for agent, before in zip(agents, num_truncated_before, strict=True):
        num_truncated.append(agent.num_truncated_contexts - before)
    return WorkerResult(parts, counts, num_truncated)


def run_apart(
    runs: Sequence[Callable[[], Part]], agents: Agents, earlier: Sequence[KeptOutcome]
) -> WorkerResult[Part]:
    """Run parts in a process that cannot write the run's files, and return outcomes with them."""
    outcomes = CallOutcomes(earlier=earlier)
    with using_outcomes(outcomes):
        result = run_local(runs, agents)
    return result._replace(outcomes=outcomes.of_worker())


def _earlier_outcomes() -> list[KeptOutcome]:
    """Return the outcomes that other processes may need in place of calling again."""
    outcomes = current_outcomes()
    return [] if outcomes is None else outcomes.remaining()


def _adopt_outcomes(results: Sequence[WorkerResult[Any]]) -> None:
    """Keep the outcomes of other processes."""
    outcomes = current_outcomes()
    for result in results:
        if outcomes is not None and result.outcomes is not None:
            outcomes.adopt(*result.outcomes)


@torch.no_grad()
def run_requested(
    build_call: Callable[[Mapping[str, Any]], PartCall[Any]], requests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Run the parts that the leader requests, and return plain values.

    A failure is returned, not raised: the leader waits for a reply of every process.
    """
    try:
        calls = [build_call(request) for request in requests]
        agents = calls[0].agents if calls else []
        # The same in all requests.
        kept_outcomes = requests[0][EARLIER_OUTCOMES] if requests else []
        earlier = [KeptOutcome(*outcome) for outcome in kept_outcomes]
        result = run_apart([call.run for call in calls], agents, earlier)
        plain_parts = [call.to_plain(part) for call, part in zip(calls, result.parts, strict=True)]
        return {
            "failure": None,
            "parts": plain_parts,
            "counts": [asdict(count) for count in result.counts],
            "num_truncated": result.num_truncated,
            "outcomes": result.outcomes,
        }
    except NipAstraError as error:
        return {"failure": str(error)}
    except Exception:
        return {"failure": traceback.format_exc()}


# ---- agents that other processes can run


def _can_use_actors(agents: Agents) -> bool:
    if not are_actors_used():
        return False
    roles = [agent.role for agent in agents if not _can_be_copied(agent)]
    if roles:
        _warn_about_idle_actors(", ".join(dict.fromkeys(roles)))
    return not roles


@cache
def _warn_about_idle_actors(roles: str) -> None:
    logger.warning(
        "rollouts run in this process despite num_actors: the %s cannot be copied to another. "
        "Requests to a local chat model are still divided",
        roles,
    )


def _can_be_divided(agent: Speaker | TextAttacker) -> bool:
    return _can_be_forked(agent) or (are_actors_used() and _can_be_copied(agent))


def _can_be_forked(agent: Speaker | TextAttacker) -> bool:
    # State of an agent of another class would be lost with the forked process.
    if type(agent) is not ConversationAgent:
        return False
    models = list(_models_of([agent]))
    if not all(getattr(model, "can_be_forked", False) for model in models):
        return False
    # A large model uses all cores by itself.
    num_parameters = max(model.num_parameters() for model in models)
    return num_parameters < SMALL_MODEL_PARAMETERS


def _can_be_copied(agent: Speaker | TextAttacker) -> bool:
    return type(agent) is ConversationAgent and all(
        getattr(model, "can_be_copied", False) for model in _models_of([agent])
    )


def _add_counts(agents: Agents, results: Sequence[WorkerResult[Part]]) -> None:
    """Add the counts of other processes to those of this process."""
    agents = _distinct(agents)
    for result in results:
        if not result.parts:
            continue
        for model, spent in zip(_counted_models(agents), result.counts, strict=True):
            model.token_count.add(spent)
        for agent, num_truncated in zip(agents, result.num_truncated, strict=True):
            agent.num_truncated_contexts += num_truncated


def _distinct(agents: Agents) -> list[Speaker | TextAttacker]:
    return list({id(agent): agent for agent in agents}.values())


def _counted_models(agents: Agents) -> list[TokenModel | ChatWork]:
    """Return the agents' models, one per shared count."""
    return list({id(model.token_count): model for model in _models_of(agents)}.values())


def _models_of(agents: Agents) -> Iterator[TokenModel | ChatWork]:
    """Yield the agents' models, starting with those inside a combined model."""
    for agent in agents:
        yield from getattr(agent.language_model, "submodels", ())
        yield agent.language_model


# ---- asynchronous rollouts, sampled while an earlier iteration is learned from


class AsyncRolloutParameters(SubParameters):
    """Maximum lag of sampling weights behind learning weights."""

    max_staleness: int = Field(default=0, ge=0, le=16)
    """Iterations by which the sampling weights lag behind the learning weights. 0 samples and
    learns in turn; above 0, actors (settings.num_actors) or, for tasks, a thread sample later
    iterations during the update. Larger waits less and learns from older samples."""


class _PendingRollout(NamedTuple, Generic[Rollout]):
    """A rollout started ahead of its iteration, by weights of `version` iterations of learning."""

    version: int
    wait: Callable[[], Rollout]


class AsyncRollouts(Generic[Rollout]):
    """Buffer of rollouts that are sampled up to `max_staleness` iterations before they are used.

    The rollout of iteration i is sampled by the weights of iteration i - `max_staleness` (at first
    the initial ones), so results depend neither on timing nor on the number of actors. `begin`
    starts the rollouts of some iterations and returns a function for each that waits for it.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[int]], list[Callable[[], Rollout]]],
        to_plain: Callable[[Rollout], dict[str, Any]],
        from_plain: Callable[[int, Mapping[str, Any]], Rollout],
        *,
        max_staleness: int,
        num_iterations: int,
    ) -> None:
        self.max_staleness = max_staleness
        self.num_iterations = num_iterations
        self._begin_with_current_weights = begin
        self._to_plain = to_plain
        self._from_plain = from_plain
        self._pending: dict[int, _PendingRollout[Rollout]] = {}

    def take(self, iteration: int) -> tuple[Rollout, int]:
        """Return the rollout of an iteration, and its weights' lag in iterations."""
        self._begin([iteration], version=iteration)
        pending = self._pending.pop(iteration)
        return pending.wait(), iteration - pending.version

    def begin_next(self, iteration: int) -> None:
        """Start the rollouts after an iteration that may use the current weights."""
        last = min(iteration + self.max_staleness, self.num_iterations - 1)
        self._begin(range(iteration + 1, last + 1), version=iteration)

    def _begin(self, iterations: Sequence[int], *, version: int) -> None:
        missing = [number for number in iterations if number not in self._pending]
        if missing:
            started = self._begin_with_current_weights(missing)
            for number, wait in zip(missing, started, strict=True):
                self._pending[number] = _PendingRollout(version, wait)

    def wait(self) -> None:
        """Wait for all rollouts in progress and raise their errors."""
        for iteration, pending in self._pending.items():
            self._store(iteration, pending.version, pending.wait())

    def _store(self, iteration: int, version: int, rollout: Rollout) -> None:
        self._pending[iteration] = _PendingRollout(version, lambda: rollout)

    def state(self) -> dict[int, Any]:
        """Return the unused rollouts, after waiting for those in progress."""
        self.wait()
        state = {}
        for iteration, pending in self._pending.items():
            state[iteration] = self._to_plain(pending.wait()) | {"version": pending.version}
        return state

    def load_state(self, state: Mapping[int, Any]) -> None:
        """Restore `state`."""
        self._pending = {}
        for iteration, plain in state.items():
            self._store(iteration, plain["version"], self._from_plain(iteration, plain))
