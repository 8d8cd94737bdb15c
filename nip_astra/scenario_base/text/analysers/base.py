"""What a rollout analyser is, and what it reads of a stored rollout.

Shape suffixes: `N` rollout, `R` round, `A` agent, `C` channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from nip_astra.parameters.parameters_base import ComponentRegistry, PlainText, PolymorphicParameters
from nip_astra.parameters.types import RolloutAnalyserType
from nip_astra.protocols.protocol_base import ProtocolHandler
from nip_astra.samplers.text_rollouts import active_turns
from nip_astra.scenario_base.text.parsing import DECISION_WORDS
from nip_astra.utils.nested_array_dict import NestedArrayDict

Role = Literal["prover", "verifier"]


class Line(NamedTuple):
    """A message of a conversation.

    Attributes
    ----------
    round : int
        The first is 0.
    name : str
        What its author is called.
    """

    round: int
    agent: str
    channel: str
    text: str
    name: str


@dataclass(frozen=True)
class Cast:
    """Who played, and where they spoke.

    Attributes
    ----------
    protocol : ProtocolHandler
        Its declaration, by which rollouts are arranged.
    human_names : Mapping of str
        What agents call each other, by agent; those left out go by their names in the protocol.
    hidden_columns : tuple of str
        Columns of the data that nobody is told, a judge neither.
    """

    protocol: ProtocolHandler
    human_names: Mapping[str, str] = field(default_factory=dict)
    hidden_columns: tuple[str, ...] = ()

    def role(self, agent: str) -> Role:
        """What an agent is."""
        return "verifier" if agent in self.protocol.verifier_names else "prover"

    def name(self, agent: str) -> str:
        """What an agent is called."""
        return self.human_names.get(agent, agent)

    def seen_channels(self, agent: str) -> set[str]:
        """The channels that an agent reads."""
        names = self.protocol.message_channel_names
        return {names[place] for place in self.protocol.visible_channels(agent)}


@dataclass(frozen=True)
class Subject:
    """What an agent sent in one channel of a rollout, amid all that it read.

    Attributes
    ----------
    place : tuple of int
        Rollout, agent and channel in the arrays.
    name : str
        What the agent is called.
    role : str
        "prover" or "verifier".
    stance : str
        What a prover argued for, "accept" or "reject"; empty for a verifier.
    datapoint : Mapping
        The columns of the data, without the label and what nobody is told.
    lines : tuple of Line
        The messages of all channels that the agent reads, in order.
    """

    place: tuple[int, int, int]
    agent: str
    channel: str
    name: str
    role: Role
    stance: str
    datapoint: Mapping[str, Any]
    lines: tuple[Line, ...]

    @property
    def own(self) -> tuple[Line, ...]:
        """What the agent sent in the channel, which is to be judged."""
        return tuple(line for line in self.lines if self.is_own(line))

    def is_own(self, line: Line) -> bool:
        """Whether a message is one of those that are to be judged."""
        return (line.agent, line.channel) == (self.agent, self.channel)

    def heard_before(self, line: Line) -> tuple[Line, ...]:
        """What others had said in the channel when a message was written."""
        return tuple(
            one
            for one in self.lines
            if one.agent != self.agent and one.channel == line.channel and one.round < line.round
        )


class RolloutAnalyser(ABC):
    """A yes-or-no question about what an agent sent in a channel of a rollout.

    A subclass gives `question`, and may say by `role` and `is_relevant` whom it is about.

    Attributes
    ----------
    role : "prover", "verifier" or None
        Who is judged; None for all agents.
    """

    role: ClassVar[Role | None] = None

    class Parameters(PolymorphicParameters):
        """Whom the analyser is about."""

        type_name: ClassVar[str] = ""

        agents: list[PlainText] | None = None
        """Names of the agents that are judged; null judges all of the analyser's role."""

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = self.Parameters() if parameters is None else parameters

    @property
    def name(self) -> str:
        """Under which it is registered."""
        return str(self.parameters.type_name) or type(self).__name__

    @abstractmethod
    def question(self, subject: Subject) -> str:
        """What the judge is asked. "Yes" is what shares count."""

    def is_relevant(self, subject: Subject) -> bool:
        """Whether the question has an answer here; a judge may still say that it has not."""
        return True

    def subjects(self, rollouts: NestedArrayDict, cast: Cast) -> list[Subject]:
        """Everything in rollouts that the judge is asked about, in order."""
        chosen = self.parameters.agents
        return [
            subject
            for subject in subjects_of(rollouts, cast)
            if (
                subject.agent in chosen if chosen is not None else self.role in (None, subject.role)
            )
            and self.is_relevant(subject)
        ]


def subjects_of(rollouts: NestedArrayDict, cast: Cast) -> Iterator[Subject]:
    """What each agent sent in each channel, where it sent something; by rollout, agent, channel."""
    names, channels = cast.protocol.agent_names, cast.protocol.message_channel_names
    columns = rollouts.get("datapoint")
    for n in range(len(rollouts)):
        said = _lines(rollouts, n, cast)
        row = _row(columns, n)
        values = {key: value for key, value in row.items() if key not in cast.hidden_columns}
        for a, agent in enumerate(names):
            seen = cast.seen_channels(agent)
            role = cast.role(agent)
            stance = DECISION_WORDS[int(rollouts["stance"][n, a])] if role == "prover" else ""
            for c, channel in enumerate(channels):
                if any((line.agent, line.channel) == (agent, channel) for line in said):
                    lines = tuple(line for line in said if line.channel in seen)
                    yield Subject(
                        (n, a, c), agent, channel, cast.name(agent), role, stance, values, lines
                    )


def _lines(rollouts: NestedArrayDict, place: int, cast: Cast) -> list[Line]:
    names, channels = cast.protocol.agent_names, cast.protocol.message_channel_names
    found = []
    for _, r, a in active_turns(rollouts[place : place + 1]):
        texts = rollouts["agents", "message"][place, r, a]
        for channel, text in zip(channels, texts, strict=True):
            if text is not None:
                found.append(Line(r, names[a], channel, str(text), cast.name(names[a])))
    return found


def _row(columns: NestedArrayDict | None, place: int) -> dict[str, Any]:
    """A datapoint as plain values, by column."""
    found = {}
    for name, array in () if columns is None else columns.items():
        value = array[place]
        found[str(name)] = value.item() if hasattr(value, "item") else value
    return found


Cls = TypeVar("Cls", bound=type[RolloutAnalyser])

ROLLOUT_ANALYSERS: ComponentRegistry[type[RolloutAnalyser]] = ComponentRegistry(
    "rollout_analyser",
    package="nip_astra.scenario_base.text.analysers",
    members=RolloutAnalyserType,
    modules=dict.fromkeys(RolloutAnalyserType, "library"),
)


def register_rollout_analyser(name: str) -> Callable[[Cls], Cls]:
    """Register a `RolloutAnalyser` subclass under the name that selects it."""
    return ROLLOUT_ANALYSERS.register(name)  # type: ignore[return-value]  # gives back its argument


def build_rollout_analysers(chosen: Iterable[str | Any]) -> list[RolloutAnalyser]:
    """Analysers by names, or by their parameters.

    Raises
    ------
    UnknownNameError
        For a name that nothing is registered under.
    """
    found = []
    for one in chosen:
        name = one if isinstance(one, str) else one.type_name
        cls = ROLLOUT_ANALYSERS.get(name)
        found.append(cls(cls.Parameters() if isinstance(one, str) else one))
    return found
