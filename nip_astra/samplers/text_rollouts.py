"""Plays a protocol in words, level by level: all requests of a round are in flight together.

Episodes may branch: in every round each of them is continued in several ways, which makes a tree.
Without branching a tree is one conversation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from nip_astra.errors import ServiceError
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatMessage,
    ChatModel,
    ChatRequest,
    FailureReason,
    FinishReason,
)
from nip_astra.samplers.answer_journal import AnswerJournal, StoredResponses
from nip_astra.scenario_base.text.game import (
    ParsedAnswer,
    RoundOutcome,
    TextEpisode,
    TextGame,
    TurnOptions,
)
from nip_astra.utils.seeding import derive_seed

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_OF_THE_SERVICE = {FailureReason.TIMEOUT, FailureReason.UNAVAILABLE, FailureReason.RATE_LIMITED}
"""Failures that are none of the request's: the run stops, and goes on when it is resumed."""


class Speaker(Protocol):
    """What the sampler needs of an agent."""

    @property
    def model(self) -> ChatModel:
        """The model that speaks for it at present."""

    @property
    def temperature(self) -> float:
        """Of sampling."""

    @property
    def top_p(self) -> float:
        """Of sampling."""

    @property
    def max_tokens(self) -> int:
        """Longest answer."""

    @property
    def num_invalid_generation_retries(self) -> int:
        """Further answers in place of one that cannot be used."""


class TextMove(NamedTuple):
    """What an agent did in a round.

    Attributes
    ----------
    prompt : tuple of ChatMessage
        What it was asked.
    answer : str
        As it was given; empty where no answer could be used.
    parsed : ParsedAnswer
        What it means.
    num_retries : int
        Answers before it that could not be used.
    is_cut : bool
        Whether it ended for its length.
    is_filled : bool
        Whether no answer could be used, so that it says nothing.
    """

    prompt: tuple[ChatMessage, ...]
    answer: str
    parsed: ParsedAnswer
    num_retries: int = 0
    is_cut: bool = False
    is_filled: bool = False


@dataclass(frozen=True, eq=False)
class TextNode:
    """An episode after a round, and how it came there.

    Attributes
    ----------
    node_id : str
        Names it within its sampling: that of its parent and the number of the branch.
    episode : TextEpisode
        As it is now.
    parent : TextNode or None
        The round before; None before the first.
    moves : Mapping of TextMove
        What agents did in the round, by agent; empty before the first.
    outcome : RoundOutcome or None
        What the round came to; None before the first.
    """

    node_id: str
    episode: TextEpisode
    parent: TextNode | None = None
    moves: Mapping[str, TextMove] = field(default_factory=dict)
    outcome: RoundOutcome | None = None

    def path(self) -> list[TextNode]:
        """The rounds that lead here, the first first; without the start."""
        nodes: list[TextNode] = []
        node: TextNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class TextRolloutSampler:
    """Plays episodes of one game.

    Parameters
    ----------
    game : TextGame
        The rules.
    speakers : Mapping of Speaker
        By agent.
    """

    def __init__(self, game: TextGame, speakers: Mapping[str, Speaker]) -> None:
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
        """Play episodes to their ends.

        Answers depend on `key`, the episode's place and the models alone.

        Parameters
        ----------
        key : sequence of str or int
            Names the sampling; requests have ids and seeds of it.
        num_branches : int
            Ways in which each episode is continued in each round.
        journal : AnswerJournal, optional
            What was answered before, and takes what is answered now.
        after_round : callable
            Called after each round with its number; may raise to stop.

        Returns
        -------
        list of TextNode
            The ends of all branches, by episode and branch.

        Raises
        ------
        ServiceError
            When a service cannot be reached; what it has answered is in the journal.
        BudgetExhaustedError
            When the budget is spent; what was answered is in the journal.
        """
        kept = AnswerJournal() if journal is None else journal
        level = [TextNode(str(place), episode) for place, episode in enumerate(episodes)]
        for number in range(self.game.protocol.max_message_rounds):
            if all(node.episode.is_done for node in level):
                break
            grown = await _all(
                [self._continue(node, num_branches, tuple(key), kept) for node in level]
            )
            level = [child for children in grown for child in children]
            after_round(number)
        return level

    async def _continue(
        self, node: TextNode, num_branches: int, key: tuple[str | int, ...], journal: AnswerJournal
    ) -> list[TextNode]:
        """The ways in which an episode goes on; itself where it has ended."""
        if node.episode.is_done:
            return [node]
        by_agent = await self.moves(node, num_branches, key, journal)
        children = []
        # Where nobody has a turn all branches would be one.
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
        """What agents do in the next round, in each branch, by agent; see `sample`."""
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
        """An agent's moves in each branch; answers that cannot be used are asked for again.

        What the model itself has asked for again is not.
        """
        speaker = self.speakers[turn.agent]
        prompt = self.game.messages(node.episode, turn)
        found: dict[int, TextMove] = {}
        missing = list(range(num_branches))
        fault = ""
        for attempt in range(1 + speaker.num_invalid_generation_retries):
            answers = await self._answers(
                (*key, node.node_id, turn.agent, attempt), speaker, prompt, len(missing), journal
            )
            are_final = answers.are_final or (False,) * len(missing)
            for branch, text, is_cut, failure, is_final in zip(
                *(list(missing), answers.texts, answers.are_cut, answers.failures, are_final),
                strict=True,
            ):
                parsed = ParsedAnswer(fault=failure) if failure else self.game.read(turn, text)
                if parsed.fault:
                    fault = parsed.fault
                    if not is_final:
                        continue
                    found[branch] = TextMove(prompt, "", ParsedAnswer(), attempt, is_filled=True)
                else:
                    found[branch] = TextMove(prompt, text, parsed, attempt, is_cut)
                missing.remove(branch)
            if not missing:
                break
        if missing or any(move.is_filled for move in found.values()):
            logger.warning(
                "%s gave no answer that can be used in %d attempts, and says nothing in round %d: "
                "the last one failed since %s",
                turn.agent,
                attempt + 1,
                node.episode.round + 1,
                fault,
            )
        tried = speaker.num_invalid_generation_retries
        silent = TextMove(prompt, "", ParsedAnswer(), tried, is_filled=True)
        return [found.get(branch, silent) for branch in range(num_branches)]

    async def _answers(
        self,
        key: tuple[str | int, ...],
        speaker: Speaker,
        prompt: tuple[ChatMessage, ...],
        num_samples: int,
        journal: AnswerJournal,
    ) -> StoredResponses:
        request_id = "/".join(map(str, key))
        known = journal.get(request_id)
        if known is not None:
            return known
        outcome = await speaker.model.answer(
            ChatRequest(
                prompt,
                max_tokens=speaker.max_tokens,
                temperature=speaker.temperature,
                top_p=speaker.top_p,
                # Services take seeds of 32 bits, with a sign.
                seed=derive_seed(*key) % 2**31,
                num_samples=num_samples,
                key=None if journal.run_key is None else f"{journal.run_key}/{request_id}",
            )
        )
        for sample in outcome.samples:
            if isinstance(sample, ChatFailure) and sample.reason in _OF_THE_SERVICE:
                place = f" at {speaker.model.place}" if speaker.model.place else ""
                raise ServiceError(
                    f"the model {speaker.model.name!r}{place} gave no answer to {request_id}: "
                    f"{sample.reason}, {sample.message}. Resume the run when the service "
                    "answers; nothing that was answered is asked again."
                )
        # A process that was killed may have been paid for an answer before it was in the journal.
        usage = (now + then for now, then in zip(outcome.usage, outcome.usage_before, strict=True))
        is_free = outcome.is_cached and not any(outcome.usage_before)
        answers = _kept(outcome.samples, *usage, is_cached=is_free)
        if not (answers.are_final and all(answers.are_final)):
            journal.put(request_id, answers)
        return answers


async def _all(requests: Sequence[Coroutine[object, object, Result]]) -> list[Result]:
    """What all of them give; an error is raised when none is in flight, so that all is kept."""
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
    for sample in samples:
        if isinstance(sample, ChatFailure):
            text, is_cut, failure = "", False, f"{sample.reason}: {sample.message}"
        else:
            text, is_cut = sample.text, sample.finish_reason == FinishReason.LENGTH
            is_withheld = sample.finish_reason == FinishReason.CONTENT_FILTER
            failure = "the service withheld it" if is_withheld else ""
            failure = f"the model refused: {sample.refusal}" if sample.refusal else failure
        texts.append(text)
        cuts.append(is_cut)
        failures.append(failure)
    are_final = [isinstance(one, ChatFailure) and one.reason.may_pass for one in samples]
    return StoredResponses(
        *(tuple(texts), tuple(cuts), tuple(failures), prompt_tokens, completion_tokens, is_cached),
        are_final=tuple(are_final) if any(are_final) else (),
    )
