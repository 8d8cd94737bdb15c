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
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
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
from nip_astra.tracking.run_directory import append_line
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

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> StoredResponses:
        """Return responses from the fields of a line of JSON."""
        values = dict(fields)
        # JSON has no tuples.
        for name, field_value in fields.items():
            if isinstance(field_value, list):
                values[name] = tuple(field_value)
        for name in ("texts", "failures"):
            values[name] = tuple(map(valid_text, values[name]))
        # Older lines have no reasoning.
        values["reasonings"] = tuple(
            None if reasoning is None else valid_text(reasoning)
            for reasoning in values.get("reasonings", ())
        )
        return cls(**values)


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
        responses = self._by_id.get(request_id)
        if responses is None and self.is_replayed:
            raise CheckpointError(
                f"{self.path} lacks the answers to {request_id}. Restore the file, or start a new "
                "run."
            )
        return responses

    def put(self, request_id: str, answers: StoredResponses) -> None:
        """Store the responses to a request; they are in the file when this returns."""
        self._by_id[request_id] = answers
        if self.path is not None:
            line = json.dumps({"id": request_id, **vars(answers)}, ensure_ascii=False) + "\n"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_line(self.path, line.encode("utf-8", "backslashreplace"))
            except OSError as error:
                raise RunDirectoryError(
                    f"cannot write {self.path}: {error.strerror or error}. Free space or change "
                    "the permissions, and resume the run."
                ) from error

    def tokens(self) -> tuple[int, int]:
        """Return the paid tokens of prompts and of answers."""
        prompt_tokens = completion_tokens = 0
        for responses in self._by_id.values():
            if not responses.is_cached:
                prompt_tokens += responses.prompt_tokens
                completion_tokens += responses.completion_tokens
        return prompt_tokens, completion_tokens

    def _read(self, path: Path) -> Iterator[tuple[str, StoredResponses]]:
        content = path.read_bytes()
        whole_length = content.rfind(b"\n") + 1
        if whole_length < len(content):
            # A killed process leaves half a line; the next record must begin a new one.
            with path.open("r+b") as file:
                file.truncate(whole_length)
        lines = content[:whole_length].split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                request_id = fields.pop("id")
                yield request_id, StoredResponses.from_plain(fields)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"line {number} of {path} is corrupt: {error!r}. Remove the line; its request "
                    "is repeated."
                ) from error


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
        if journal is None:
            journal = AnswerJournal()
        level = [TextNode(str(index), episode) for index, episode in enumerate(episodes)]
        for number in range(self.game.protocol.max_message_rounds):
            if all(node.episode.is_done for node in level):
                break
            children_by_node = await _gather_all(
                [self._continue(node, num_branches, tuple(key), journal) for node in level]
            )
            next_level: list[TextNode] = []
            turns: list[tuple[str, TextMove]] = []
            for node, children in zip(level, children_by_node, strict=True):
                next_level += children
                for child in children:
                    # An episode that has ended is its own continuation.
                    if child is not node:
                        turns += child.moves.items()
            warn_of_silence(turns, number + 1)
            level = next_level
            after_round(number)
        return level

    async def _continue(
        self, node: TextNode, num_branches: int, key: tuple[str | int, ...], journal: AnswerJournal
    ) -> list[TextNode]:
        """Return the continuations of an episode; the episode itself if it has ended."""
        if node.episode.is_done:
            return [node]
        moves_by_agent = await self.moves(node, num_branches, key, journal)
        if not moves_by_agent:
            # Without an active agent all branches would be equal.
            num_branches = 1
        children = []
        for branch in range(num_branches):
            moves = {agent: agent_moves[branch] for agent, agent_moves in moves_by_agent.items()}
            answers = {agent: (move.answer, move.parsed) for agent, move in moves.items()}
            outcome = self.game.play(node.episode, answers)
            node_id = f"{node.node_id}.{branch}"
            children.append(TextNode(node_id, outcome.episode, node, moves, outcome))
        return children

    async def moves(
        self, node: TextNode, num_branches: int, key: tuple[str | int, ...], journal: AnswerJournal
    ) -> dict[str, list[TextMove]]:
        """Return the agents' moves in the next round, by agent and branch; see `sample`."""
        turns = self.game.turns(node.episode)
        moves_by_turn = await _gather_all(
            [self._request_moves(node, turn, num_branches, key, journal) for turn in turns]
        )
        return {turn.agent: moves for turn, moves in zip(turns, moves_by_turn, strict=True)}

    async def _request_moves(
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
        moves: dict[int, TextMove] = {}
        missing_branches = list(range(num_branches))
        last_fault = ""
        num_retries = speaker.parameters.num_invalid_generation_retries
        for attempt in range(1 + num_retries):
            attempt_key = (*key, node.node_id, turn.agent, attempt)
            # One request with a sample for each branch that has no valid answer yet.
            responses = await self._request_responses(
                attempt_key, speaker, prompt, len(missing_branches), journal
            )
            still_missing = []
            for sample, branch in enumerate(missing_branches):
                failure = responses.failures[sample]
                text = responses.texts[sample]
                parsed = ParsedAnswer(fault=failure) if failure else self.game.read(turn, text)
                if not parsed.fault:
                    moves[branch] = TextMove(
                        prompt,
                        text,
                        parsed,
                        attempt,
                        responses.are_cut[sample],
                        reasoning=responses.reasonings[sample] if responses.reasonings else None,
                    )
                    continue
                last_fault = parsed.fault
                if responses.are_final and responses.are_final[sample]:
                    moves[branch] = TextMove(prompt, "", parsed, attempt, is_filled=True)
                else:
                    still_missing.append(branch)
            missing_branches = still_missing
            if not missing_branches:
                break
        for branch in missing_branches:
            silence = ParsedAnswer(fault=last_fault)
            moves[branch] = TextMove(prompt, "", silence, num_retries, is_filled=True)
        return [moves[branch] for branch in range(num_branches)]

    async def _request_responses(
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
        stored = journal.get(request_id)
        if stored is not None:
            return _without_long_texts(stored, request)
        outcome = await speaker.model.answer(request)
        for sample in outcome.samples:
            if isinstance(sample, ChatFailure) and sample.reason.is_of_service:
                location = f" at {speaker.model.place}" if speaker.model.place else ""
                raise ServiceError(
                    f"no response of {speaker.model.name!r}{location} to {request_id}: "
                    f"{sample.reason}, {sample.message}. Resume the run when the service responds."
                )
        # A process that was killed may have been paid for an answer before it was in the journal.
        prompt_tokens = outcome.usage.prompt_tokens + outcome.usage_before.prompt_tokens
        completion_tokens = outcome.usage.completion_tokens + outcome.usage_before.completion_tokens
        responses = _to_responses(
            outcome.samples,
            prompt_tokens,
            completion_tokens,
            is_cached=outcome.is_cached and not any(outcome.usage_before),
        )
        # Final failures are requested again by a resumed run.
        has_only_final_failures = bool(responses.are_final) and all(responses.are_final)
        if not has_only_final_failures:
            journal.put(request_id, responses)
        return responses


def warn_of_silence(turns: Iterable[tuple[str, TextMove]], round_number: int) -> None:
    """Warn of the agents' turns, in a round counted from 1, in which no answer was valid."""
    moves_by_agent: dict[str, list[TextMove]] = defaultdict(list)
    for agent, move in turns:
        moves_by_agent[agent].append(move)
    for agent, moves in moves_by_agent.items():
        silent_moves = [move for move in moves if move.is_filled]
        if silent_moves:
            logger.warning(
                "%s sends nothing in %d of %d turns of round %d, because no answer is valid; the "
                "first, after %d retries: %s",
                agent,
                len(silent_moves),
                len(moves),
                round_number,
                silent_moves[0].num_retries,
                silent_moves[0].parsed.fault,
            )


async def _gather_all(requests: Sequence[Coroutine[object, object, Result]]) -> list[Result]:
    """Return the results; raise errors after all have ended, so that the journal is complete."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # no error is among them


def _to_responses(
    samples: Sequence[ChatAnswer | ChatFailure],
    prompt_tokens: int,
    completion_tokens: int,
    *,
    is_cached: bool,
) -> StoredResponses:
    texts: list[str] = []
    are_cut: list[bool] = []
    failures: list[str] = []
    are_final: list[bool] = []
    reasonings: list[str | None] = []
    for sample in samples:
        if isinstance(sample, ChatFailure):
            texts.append("")
            are_cut.append(False)
            failures.append(f"{sample.reason}: {sample.message}")
            are_final.append(sample.reason.is_final)
            reasonings.append(None)
        else:
            texts.append(sample.text)
            are_cut.append(sample.finish_reason == FinishReason.LENGTH)
            failures.append(_find_fault(sample))
            are_final.append(False)
            reasonings.append(sample.reasoning)
    return StoredResponses(
        texts=tuple(texts),
        are_cut=tuple(are_cut),
        failures=tuple(failures),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        is_cached=is_cached,
        are_final=tuple(are_final) if any(are_final) else (),
        reasonings=tuple(reasonings) if any(r is not None for r in reasonings) else (),
    )


def _find_fault(answer: ChatAnswer) -> str:
    """Return why an answer of a service is none of the agent; empty if it is one."""
    if answer.refusal:
        return f"the model refused: {answer.refusal}"
    if answer.is_missing:
        return "it ended before its first word"
    if answer.finish_reason == FinishReason.CONTENT_FILTER:
        return "the service withheld it"
    return ""


def _without_long_texts(responses: StoredResponses, request: ChatRequest) -> StoredResponses:
    """Return stored responses with a failure for each that is far longer than requested.

    Other versions stored responses of any length.
    """
    texts = list(responses.texts)
    failures = list(responses.failures)
    for index, text in enumerate(texts):
        sample = reject_long_answer(ChatAnswer(text), request)
        if isinstance(sample, ChatFailure):
            texts[index] = ""
            failures[index] = f"{sample.reason}: {sample.message}"
    return replace(responses, texts=tuple(texts), failures=tuple(failures))


# ---- rollouts as arrays


def rollout_spec(game: TextGame, num_rollouts: int) -> CompositeSpec:
    """Return keys, types and shapes of rollouts, without the data's own columns."""
    protocol = game.protocol
    shape_NR = (num_rollouts, protocol.max_message_rounds)
    shape_NRA = (*shape_NR, protocol.num_agents)
    shape_NRAC = (*shape_NRA, protocol.num_channels)
    move = {
        "is_active": BoolArraySpec(shape_NRA),
        "decision": IntArraySpec(shape_NRA),
        "reward": FloatArraySpec(shape_NRA),
        "prompt": StringArraySpec(shape_NRA),
        "raw_message": StringArraySpec(shape_NRA),
        "reasoning": StringArraySpec(shape_NRA),
        "message": StringArraySpec(shape_NRAC),
        "num_retries": IntArraySpec(shape_NRA),
        "is_cut": BoolArraySpec(shape_NRA),
        "is_filled": BoolArraySpec(shape_NRA),
    }
    shape_N = (num_rollouts,)
    return CompositeSpec(
        {
            "datapoint_id": IntArraySpec(shape_N),
            "seed": IntArraySpec(shape_N),
            "y": IntArraySpec(shape_N),
            "num_rounds": IntArraySpec(shape_N),
            "decision": IntArraySpec(shape_N),
            "stance": IntArraySpec((num_rollouts, protocol.num_agents)),
            "node": {"id": StringArraySpec(shape_NR), "parent": StringArraySpec(shape_NR)},
            "padding": BoolArraySpec(shape_NR),
            "agents": move,
        },
        shape_N,
    )


def rollouts_of(game: TextGame, ends: Sequence[TextNode]) -> NestedArrayDict:
    """Return the rollouts that end in these nodes."""
    rollouts = rollout_spec(game, len(ends)).zero()
    rollouts["agents", "decision"][:] = CONTINUE
    rollouts["decision"][:] = CONTINUE
    rollouts["padding"][:] = True
    # Looked up by key once, not for every entry.
    arrays = dict(rollouts.items(True, True))
    for n, end in enumerate(ends):
        _fill_rollout(arrays, n, game, end)
    columns = list(ends[0].episode.datapoint) if ends else []
    for column in columns:
        if column != "y":
            rollouts["datapoint", column] = [end.episode.datapoint[column] for end in ends]
    return rollouts


def _fill_rollout(rollouts: Mapping[Any, Any], n: int, game: TextGame, end: TextNode) -> None:
    episode, agents = end.episode, game.protocol.agent_names
    rollouts["datapoint_id"][n] = episode.datapoint_id
    rollouts["seed"][n] = episode.seed
    rollouts["y"][n] = episode.datapoint["y"]
    rollouts["num_rounds"][n] = episode.round
    rollouts["stance"][n] = [game.stance(agent, episode.datapoint) for agent in agents]
    for r, node in enumerate(end.path()):
        assert node.outcome is not None
        assert node.parent is not None
        rollouts["padding"][n, r] = False
        rollouts["node", "id"][n, r] = node.node_id
        rollouts["node", "parent"][n, r] = node.parent.node_id
        rollouts["agents", "reward"][n, r] = node.outcome.rewards
        if node.outcome.decision != CONTINUE:
            rollouts["decision"][n] = node.outcome.decision
        for a, agent in enumerate(agents):
            if agent in node.moves:
                _fill_move(rollouts, (n, r, a), game, node.moves[agent])


def _fill_move(
    rollouts: Mapping[Any, Any], index: tuple[int, int, int], game: TextGame, move: TextMove
) -> None:
    rollouts["agents", "is_active"][index] = True
    rollouts["agents", "decision"][index] = move.parsed.decision
    rollouts["agents", "prompt"][index] = json.dumps(move.prompt, ensure_ascii=False)
    rollouts["agents", "raw_message"][index] = move.answer
    rollouts["agents", "reasoning"][index] = move.reasoning
    rollouts["agents", "num_retries"][index] = move.num_retries
    rollouts["agents", "is_cut"][index] = move.is_cut
    rollouts["agents", "is_filled"][index] = move.is_filled
    for channel, text in move.parsed.messages.items():
        c = game.protocol.message_channel_names.index(channel)
        rollouts["agents", "message"][(*index, c)] = text


def read_prompt(text: str) -> tuple[ChatMessage, ...]:
    """Parse the messages in an entry of `(agents, prompt)`."""
    messages = []
    for message in json.loads(text):
        messages.append(ChatMessage(role=message["role"], content=message["content"]))
    return tuple(messages)


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
    # Lists are indexed much faster than arrays.
    messages = agents["message"].tolist()
    decisions = agents["decision"].tolist()
    answers = agents["raw_message"].tolist()
    rewards = agents["reward"].tolist()
    plain_rollouts: list[dict[str, Any]] = []
    for datapoint_id, y, decision in zip(
        rollouts["datapoint_id"].tolist(),
        rollouts["y"].tolist(),
        rollouts["decision"].tolist(),
        strict=True,
    ):
        plain_rollouts.append(
            {
                "datapoint_id": int(datapoint_id),
                "y": int(y),
                "decision": int(decision),
                "turns": [],
            }
        )
    for n, r, a in active_turns(rollouts):
        sent = {}
        for channel, text in zip(channel_names, messages[n][r][a], strict=True):
            if text is not None:
                sent[channel] = text
        plain_rollouts[n]["turns"].append(
            {
                "round": r,
                "agent": agent_names[a],
                "messages": sent,
                "decision": int(decisions[n][r][a]),
                "raw_message": answers[n][r][a],
                "reward": float(rewards[n][r][a]),
            }
        )
    return plain_rollouts
