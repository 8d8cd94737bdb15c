"""Plays a protocol in words, level by level: all requests of a round are in flight together.

Episodes may branch: in every round each of them is continued in several ways, which makes a tree.
Without branching a tree is one conversation.

`rollouts_of` gives the rollouts as a `NestedArrayDict`.

Its batch is the rollouts; a tree of branches has one for each of its ends, and rollouts that share
a beginning hold the same nodes. Keys, with their shapes:

    datapoint_id, seed, y, num_rounds, decision  [N]        decision 2: none
    stance                                       [N, A]     what each prover argues for, y elsewhere
    (datapoint, <column>)                        [N]        the data's own columns
    (node, id), (node, parent)                   [N, R]     missing where the rollout has ended
    padding                                      [N, R]     True there
    (agents, is_active)                          [N, R, A]  who had a turn
    (agents, decision), (agents, reward)         [N, R, A]
    (agents, prompt)                             [N, R, A]  prompt messages, as JSON
    (agents, raw_message)                        [N, R, A]  the answer, without its reasoning
    (agents, reasoning)                          [N, R, A]  missing without a thought
    (agents, message)                            [N, R, A, C]
    (agents, num_retries), (agents, is_cut), (agents, is_filled)  [N, R, A]

Shape suffixes: `N` rollout, `R` round, `A` agent, `C` channel.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nip_astra.errors import CheckpointError, DataError, RunDirectoryError, ServiceError
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatMessage,
    ChatRequest,
    FinishReason,
    reject_long_answer,
)
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.safe_text import valid_text
from nip_astra.scenario_base.text.game import (
    ParsedAnswer,
    RoundOutcome,
    TextEpisode,
    TextGame,
    TurnOptions,
)
from nip_astra.utils.nested_array_dict import (
    BoolArraySpec,
    CompositeSpec,
    FloatArraySpec,
    IntArraySpec,
    NestedArrayDict,
    StringArraySpec,
)
from nip_astra.utils.seeding import derive_seed

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


# ---- responses, kept on arrival, so that a killed run repeats no request


@dataclass(frozen=True)
class StoredResponses:
    """The responses to one request, one per sample.

    `failures` has an empty text where there is a response. `are_final` marks samples whose model
    has retried already; it is empty if none has, and so is `reasonings` without a thought. Tokens
    are those of all samples.
    """

    texts: tuple[str, ...]
    are_cut: tuple[bool, ...]
    failures: tuple[str, ...]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cached: bool = False
    are_final: tuple[bool, ...] = ()
    reasonings: tuple[str | None, ...] = ()


@dataclass
class AnswerJournal:
    """Responses by request id, in memory and, with a `path`, in a file of JSON lines.

    `run_key` names the run at its services. With `is_replayed` every request must be in the
    journal, since the models that answered no longer exist.
    """

    path: Path | None = None
    run_key: str | None = None
    is_replayed: bool = False
    _by_id: dict[str, StoredResponses] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._by_id = dict(self._read(self.path))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> StoredResponses | None:
        """Return the responses to a request; None if it is new."""
        found = self._by_id.get(request_id)
        if found is None and self.is_replayed:
            raise CheckpointError(
                f"{self.path} lacks the answers to {request_id}. Restore the file, or start a new "
                "run."
            )
        return found

    def put(self, request_id: str, answers: StoredResponses) -> None:
        """Store the responses to a request; they are in the file when this returns."""
        self._by_id[request_id] = answers
        if self.path is not None:
            line = json.dumps({"id": request_id, **vars(answers)}, ensure_ascii=False) + "\n"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _append(self.path, line.encode("utf-8", "backslashreplace"))
            except OSError as error:
                raise RunDirectoryError(
                    f"cannot write {self.path}: {error.strerror or error}. Free space or change "
                    "the permissions, and resume the run."
                ) from error

    def tokens(self) -> tuple[int, int]:
        """Return the paid tokens of prompts and of answers."""
        paid = [one for one in self._by_id.values() if not one.is_cached]
        return sum(one.prompt_tokens for one in paid), sum(one.completion_tokens for one in paid)

    def _read(self, path: Path) -> Iterator[tuple[str, StoredResponses]]:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            # A killed process leaves half a line; the next record must begin a new one.
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], start=1):
            try:
                values = json.loads(line)
                request_id = values.pop("id")
                lists = {name: tuple(one) for name, one in values.items() if isinstance(one, list)}
                for name in ("texts", "failures"):
                    lists[name] = tuple(map(valid_text, lists[name]))
                lists["reasonings"] = tuple(
                    None if reasoning is None else valid_text(reasoning)
                    for reasoning in lists.get("reasonings", ())
                )
                yield request_id, StoredResponses(**(values | lists))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"line {number} of {path} is corrupt: {error!r}. Remove the line; its request "
                    "is repeated."
                ) from error


def _append(path: Path, line: bytes) -> None:
    """Append a whole line or nothing, so that the next answer starts a new line."""
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


# ---- sampling


class TextMove(NamedTuple):
    """An agent's move in a round.

    `answer` is empty if `is_filled`: no answer was valid after `num_retries` retries.
    """

    prompt: tuple[ChatMessage, ...]
    answer: str
    parsed: ParsedAnswer
    num_retries: int = 0
    is_cut: bool = False
    is_filled: bool = False
    reasoning: str | None = None


@dataclass(frozen=True, eq=False)
class TextNode:
    """An episode after a round; `parent`, `moves` and `outcome` are empty before the first.

    `node_id` is the parent's and the number of the branch.
    """

    node_id: str
    episode: TextEpisode
    parent: TextNode | None = None
    moves: Mapping[str, TextMove] = field(default_factory=dict)
    outcome: RoundOutcome | None = None

    def path(self) -> list[TextNode]:
        """Return the rounds that lead here, in order, without the start."""
        nodes: list[TextNode] = []
        node: TextNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class TextRolloutSampler:
    """Samples episodes of one game.

    Parameters
    ----------
    speakers : Mapping
        By agent, its `model` and its `parameters`; see `TextAgent`.
    """

    def __init__(self, game: TextGame, speakers: Mapping[str, Any]) -> None:
        self.game = game
        self.speakers = speakers

    async def sample(
        self,
        episodes: Sequence[TextEpisode],
        *,
        key: Sequence[str | int],
        num_branches: int = 1,
        journal: AnswerJournal | None = None,
        after_round: Callable[[int], None] = lambda number: None,
    ) -> list[TextNode]:
        """Sample whole episodes; answers depend on `key`, the episode's index and the models.

        Parameters
        ----------
        key : sequence of str or int
            Request ids and seeds derive from it.
        num_branches : int
            Continuations of each episode in each round.
        journal : AnswerJournal, optional
            Holds earlier answers, and stores new ones.
        after_round : callable
            Called after each round with its number; may raise to stop.

        Returns
        -------
        list of TextNode
            The ends of all branches, by episode and branch.

        Raises
        ------
        ServiceError
            If a service cannot be reached.
        BudgetExhaustedError
            If the budget is spent.
        """
        kept = AnswerJournal() if journal is None else journal
        level = [TextNode(str(place), episode) for place, episode in enumerate(episodes)]
        for number in range(self.game.protocol.max_message_rounds):
            if all(node.episode.is_done for node in level):
                break
            grown = await _all(
                [self._continue(node, num_branches, tuple(key), kept) for node in level]
            )
            before, level = set(level), [child for children in grown for child in children]
            moved = (child.moves for child in level if child not in before)
            warn_of_silence((turn for moves in moved for turn in moves.items()), number + 1)
            after_round(number)
        return level

    async def _continue(
        self, node: TextNode, num_branches: int, key: tuple[str | int, ...], journal: AnswerJournal
    ) -> list[TextNode]:
        """Return the continuations of an episode; the episode itself if it has ended."""
        if node.episode.is_done:
            return [node]
        by_agent = await self.moves(node, num_branches, key, journal)
        children = []
        # Without an active agent all branches would be equal.
        for branch in range(num_branches if by_agent else 1):
            moves = {agent: found[branch] for agent, found in by_agent.items()}
            answered = {agent: (move.answer, move.parsed) for agent, move in moves.items()}
            outcome = self.game.play(node.episode, answered)
            name = f"{node.node_id}.{branch}"
            children.append(TextNode(name, outcome.episode, node, moves, outcome))
        return children

    async def moves(
        self, node: TextNode, num_branches: int, key: tuple[str | int, ...], journal: AnswerJournal
    ) -> dict[str, list[TextMove]]:
        """Return the agents' moves in the next round, by agent and branch; see `sample`."""
        turns = self.game.turns(node.episode)
        found = await _all([self._moves(node, turn, num_branches, key, journal) for turn in turns])
        return {turn.agent: moves for turn, moves in zip(turns, found, strict=True)}

    async def _moves(
        self,
        node: TextNode,
        turn: TurnOptions,
        num_branches: int,
        key: tuple[str | int, ...],
        journal: AnswerJournal,
    ) -> list[TextMove]:
        """Return an agent's moves per branch; invalid answers are retried, unless final."""
        speaker = self.speakers[turn.agent]
        prompt = self.game.messages(node.episode, turn)
        found: dict[int, TextMove] = {}
        missing = list(range(num_branches))
        fault = ""
        num_retries = speaker.parameters.num_invalid_generation_retries
        for attempt in range(1 + num_retries):
            answers = await self._answers(
                (*key, node.node_id, turn.agent, attempt), speaker, prompt, len(missing), journal
            )
            are_final = answers.are_final or (False,) * len(missing)
            reasonings = answers.reasonings or (None,) * len(missing)
            for branch, text, is_cut, failure, is_final, reasoning in zip(
                *(list(missing), answers.texts, answers.are_cut, answers.failures, are_final),
                reasonings,
                strict=True,
            ):
                parsed = ParsedAnswer(fault=failure) if failure else self.game.read(turn, text)
                if parsed.fault:
                    fault = parsed.fault
                    if not is_final:
                        continue
                    found[branch] = TextMove(prompt, "", parsed, attempt, is_filled=True)
                else:
                    found[branch] = TextMove(
                        prompt, text, parsed, attempt, is_cut, reasoning=reasoning
                    )
                missing.remove(branch)
            if not missing:
                break
        silent = TextMove(prompt, "", ParsedAnswer(fault=fault), num_retries, is_filled=True)
        return [found.get(branch, silent) for branch in range(num_branches)]

    async def _answers(
        self,
        key: tuple[str | int, ...],
        speaker: Any,
        prompt: tuple[ChatMessage, ...],
        num_samples: int,
        journal: AnswerJournal,
    ) -> StoredResponses:
        request_id = "/".join(map(str, key))
        request = ChatRequest(
            prompt,
            max_tokens=speaker.parameters.max_tokens,
            temperature=speaker.parameters.temperature,
            top_p=speaker.parameters.top_p,
            # Services take seeds of 32 bits, with a sign.
            seed=derive_seed(*key) % 2**31,
            num_samples=num_samples,
            key=None if journal.run_key is None else f"{journal.run_key}/{request_id}",
        )
        known = journal.get(request_id)
        if known is not None:
            return _without_long_texts(known, request)
        outcome = await speaker.model.answer(request)
        for sample in outcome.samples:
            if isinstance(sample, ChatFailure) and sample.reason.is_of_service:
                place = f" at {speaker.model.place}" if speaker.model.place else ""
                raise ServiceError(
                    f"no response of {speaker.model.name!r}{place} to {request_id}: "
                    f"{sample.reason}, {sample.message}. Resume the run when the service responds."
                )
        # A process that was killed may have been paid for an answer before it was in the journal.
        usage = (now + then for now, then in zip(outcome.usage, outcome.usage_before, strict=True))
        is_free = outcome.is_cached and not any(outcome.usage_before)
        answers = _kept(outcome.samples, *usage, is_cached=is_free)
        if not (answers.are_final and all(answers.are_final)):
            journal.put(request_id, answers)
        return answers


def warn_of_silence(turns: Iterable[tuple[str, TextMove]], round_number: int) -> None:
    """Warn of the agents' turns, in a round counted from 1, in which no answer was valid."""
    by_agent: dict[str, list[TextMove]] = defaultdict(list)
    for agent, move in turns:
        by_agent[agent].append(move)
    for agent, moves in by_agent.items():
        silent = [move for move in moves if move.is_filled]
        if silent:
            logger.warning(
                "%s sends nothing in %d of %d turns of round %d, because no answer is valid; the "
                "first, after %d retries: %s",
                *(agent, len(silent), len(moves), round_number),
                *(silent[0].num_retries, silent[0].parsed.fault),
            )


async def _all(requests: Sequence[Coroutine[object, object, Result]]) -> list[Result]:
    """Return the results; raise errors after all have ended, so that the journal is complete."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results  # type: ignore[return-value]  # no error is among them


def _kept(
    samples: Sequence[ChatAnswer | ChatFailure],
    prompt_tokens: int,
    completion_tokens: int,
    *,
    is_cached: bool,
) -> StoredResponses:
    texts, cuts, failures = [], [], []
    reasonings = [sample.reasoning for sample in samples if isinstance(sample, ChatAnswer)]
    for sample in samples:
        if isinstance(sample, ChatFailure):
            text, is_cut, failure = "", False, f"{sample.reason}: {sample.message}"
        else:
            text, is_cut = sample.text, sample.finish_reason == FinishReason.LENGTH
            is_withheld = sample.finish_reason == FinishReason.CONTENT_FILTER
            failure = "the service withheld it" if is_withheld else ""
            failure = "it ended before its first word" if sample.is_missing else failure
            failure = f"the model refused: {sample.refusal}" if sample.refusal else failure
        texts.append(text)
        cuts.append(is_cut)
        failures.append(failure)
    are_final = [isinstance(sample, ChatFailure) and sample.reason.is_final for sample in samples]
    return StoredResponses(
        *(tuple(texts), tuple(cuts), tuple(failures), prompt_tokens, completion_tokens, is_cached),
        are_final=tuple(are_final) if any(are_final) else (),
        reasonings=tuple(
            sample.reasoning if isinstance(sample, ChatAnswer) else None for sample in samples
        )
        if any(reasoning is not None for reasoning in reasonings)
        else (),
    )


def _without_long_texts(answers: StoredResponses, request: ChatRequest) -> StoredResponses:
    """Return stored responses with a failure for each that is far longer than requested.

    Other versions stored responses of any length.
    """
    texts, failures = list(answers.texts), list(answers.failures)
    for index, text in enumerate(texts):
        sample = reject_long_answer(ChatAnswer(text), request)
        if isinstance(sample, ChatFailure):
            texts[index], failures[index] = "", f"{sample.reason}: {sample.message}"
    return replace(answers, texts=tuple(texts), failures=tuple(failures))


# ---- rollouts as arrays


def rollout_spec(game: TextGame, num_rollouts: int) -> CompositeSpec:
    """Return keys, types and shapes of rollouts, without the data's own columns."""
    n, r = num_rollouts, game.protocol.max_message_rounds
    a, c = game.protocol.num_agents, game.protocol.num_channels
    move = {
        "is_active": BoolArraySpec((n, r, a)),
        "decision": IntArraySpec((n, r, a)),
        "reward": FloatArraySpec((n, r, a)),
        "prompt": StringArraySpec((n, r, a)),
        "raw_message": StringArraySpec((n, r, a)),
        "reasoning": StringArraySpec((n, r, a)),
        "message": StringArraySpec((n, r, a, c)),
        "num_retries": IntArraySpec((n, r, a)),
        "is_cut": BoolArraySpec((n, r, a)),
        "is_filled": BoolArraySpec((n, r, a)),
    }
    whole = ("datapoint_id", "seed", "y", "num_rounds", "decision")
    return CompositeSpec(
        {
            **{name: IntArraySpec((n,)) for name in whole},
            "stance": IntArraySpec((n, a)),
            "node": {"id": StringArraySpec((n, r)), "parent": StringArraySpec((n, r))},
            "padding": BoolArraySpec((n, r)),
            "agents": move,
        },
        (n,),
    )


def rollouts_of(game: TextGame, ends: Sequence[TextNode]) -> NestedArrayDict:
    """Return the rollouts that end in these nodes."""
    rollouts = rollout_spec(game, len(ends)).zero()
    rollouts["agents", "decision"][:] = CONTINUE
    rollouts["decision"][:] = CONTINUE
    rollouts["padding"][:] = True
    arrays = dict(rollouts.items(True, True))
    for place, end in enumerate(ends):
        _fill(arrays, place, game, end)
    columns = list(ends[0].episode.datapoint) if ends else []
    for column in columns:
        if column != "y":
            rollouts["datapoint", column] = [end.episode.datapoint[column] for end in ends]
    return rollouts


def _fill(rollouts: Mapping[Any, Any], place: int, game: TextGame, end: TextNode) -> None:
    episode, agents = end.episode, game.protocol.agent_names
    rollouts["datapoint_id"][place] = episode.datapoint_id
    rollouts["seed"][place] = episode.seed
    rollouts["y"][place] = episode.datapoint["y"]
    rollouts["num_rounds"][place] = episode.round
    rollouts["stance"][place] = [game.stance(agent, episode.datapoint) for agent in agents]
    for number, node in enumerate(end.path()):
        assert node.outcome is not None
        assert node.parent is not None
        at = (place, number)
        rollouts["padding"][at] = False
        rollouts["node", "id"][at] = node.node_id
        rollouts["node", "parent"][at] = node.parent.node_id
        rollouts["agents", "reward"][at] = node.outcome.rewards
        if node.outcome.decision != CONTINUE:
            rollouts["decision"][place] = node.outcome.decision
        for a, agent in enumerate(agents):
            if agent in node.moves:
                _fill_move(rollouts, (*at, a), game, node, agent)


def _fill_move(
    rollouts: Mapping[Any, Any],
    at: tuple[int, int, int],
    game: TextGame,
    node: TextNode,
    agent: str,
) -> None:
    move = node.moves[agent]
    rollouts["agents", "is_active"][at] = True
    rollouts["agents", "decision"][at] = move.parsed.decision
    rollouts["agents", "prompt"][at] = json.dumps(move.prompt, ensure_ascii=False)
    rollouts["agents", "raw_message"][at] = move.answer
    rollouts["agents", "reasoning"][at] = move.reasoning
    rollouts["agents", "num_retries"][at] = move.num_retries
    rollouts["agents", "is_cut"][at] = move.is_cut
    rollouts["agents", "is_filled"][at] = move.is_filled
    for channel, text in move.parsed.messages.items():
        place = (*at, game.protocol.message_channel_names.index(channel))
        rollouts["agents", "message"][place] = text


def read_prompt(text: str) -> tuple[ChatMessage, ...]:
    """Parse the messages in an entry of `(agents, prompt)`."""
    return tuple(ChatMessage(role=one["role"], content=one["content"]) for one in json.loads(text))


class ActiveTurn(NamedTuple):
    """An agent's turn in a stored rollout."""

    rollout: int
    round: int
    agent: int


def active_turns(rollouts: NestedArrayDict, agent: int | None = None) -> Iterator[ActiveTurn]:
    """Yield the turns of all agents or of one, by rollout, round and agent."""
    for n, r, a in np.argwhere(rollouts["agents", "is_active"]).tolist():
        if agent is None or a == agent:
            yield ActiveTurn(n, r, a)


def transcripts(
    rollouts: NestedArrayDict, agent_names: Sequence[str], channel_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return each rollout's turns as plain values: agent, messages by channel, decision, answer."""
    agents = rollouts["agents"]
    names = ("message", "decision", "raw_message", "reward")
    messages, decisions, answers, rewards = (agents[name].tolist() for name in names)
    whole = zip(
        *(rollouts[name].tolist() for name in ("datapoint_id", "y", "decision")), strict=True
    )
    found: list[dict[str, Any]] = [
        {"datapoint_id": int(datapoint), "y": int(y), "decision": int(decision), "turns": []}
        for datapoint, y, decision in whole
    ]
    for n, r, a in active_turns(rollouts):
        texts = zip(channel_names, messages[n][r][a], strict=True)
        found[n]["turns"].append(
            {
                "round": r,
                "agent": agent_names[a],
                "messages": {name: text for name, text in texts if text is not None},
                "decision": int(decisions[n][r][a]),
                "raw_message": answers[n][r][a],
                "reward": float(rewards[n][r][a]),
            }
        )
    return found
