"""What an agent's answer means: a decision, or messages to channels.

A decision is written `Decision: accept` or `Decision: reject`, anywhere, in any case. An agent that
may send in several channels heads each message with `To <channel>:`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nip_astra.protocols.protocol_base import ACCEPT, CONTINUE, REJECT

DECISION_WORDS = {REJECT: "reject", ACCEPT: "accept"}
"""How decisions are written."""
_DECISION = re.compile(r"\bdecision\W{0,4}\s*:\W*(accept|reject)\b", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer means to the protocol.

    Attributes
    ----------
    messages : dict of str
        Text by channel; empty where the agent decides.
    decision : int
        0 reject, 1 accept, 2 none.
    fault : str
        Why the answer cannot be used; empty where it can.
    """

    messages: dict[str, str] = field(default_factory=dict)
    decision: int = CONTINUE
    fault: str = ""


def decision_text(decision: int) -> str:
    """A decision in the words that `parse_answer` reads."""
    return f"Decision: {DECISION_WORDS[decision]}"


def channel_title(channel: str) -> str:
    """What a channel is called where agents read and write."""
    return channel.removesuffix("_channel").replace("_", " ")


def parse_answer(
    text: str, channels: Sequence[str], *, may_decide: bool, must_decide: bool = False
) -> ParsedAnswer:
    """What an answer means.

    Parameters
    ----------
    channels : sequence of str
        Those in which the agent may send; with more than one, each message needs its heading.
    may_decide, must_decide : bool
        Whether a decision counts, and whether nothing else will do.
    """
    words = {match.lower() for match in _DECISION.findall(text)}
    if len(words) > 1:
        return ParsedAnswer(fault="it decides both ways")
    if words:
        if not may_decide:
            return ParsedAnswer(fault="it decides where it cannot")
        decided = words.pop()
        return ParsedAnswer(decision=ACCEPT if decided == DECISION_WORDS[ACCEPT] else REJECT)
    if must_decide:
        return ParsedAnswer(fault="it holds no decision, in the last turn")
    return parse_messages(text, channels)


def parse_messages(text: str, channels: Sequence[str]) -> ParsedAnswer:
    """What the answer of an agent means that does not decide: a decision in it is a quotation."""
    if not text.strip():
        return ParsedAnswer(fault="it is empty")
    if len(channels) == 1:
        return ParsedAnswer({channels[0]: text.strip()})
    messages = _split(text, channels)
    return ParsedAnswer(messages, fault="" if messages else "it names no channel to send in")


def _split(text: str, channels: Sequence[str]) -> dict[str, str]:
    """The text below each heading; what stands above the first is for nobody."""
    by_title = {channel_title(channel).lower(): channel for channel in channels}
    longest_first = sorted(by_title, key=len, reverse=True)
    titles = "|".join(re.escape(title).replace(r"\ ", r"[ _]") for title in longest_first)
    heading = re.compile(rf"(?<!\w)to ({titles})[ \t*]*:", re.IGNORECASE)
    found = list(heading.finditer(text))
    messages: dict[str, str] = {}
    ends = [match.start() for match in found[1:]] + [len(text)]
    for number, match in enumerate(found):
        said = text[match.end() : ends[number]].strip(" \t\n*#")
        channel = by_title[match[1].lower().replace("_", " ")]
        if said:
            messages[channel] = f"{messages[channel]}\n{said}" if channel in messages else said
    return messages
