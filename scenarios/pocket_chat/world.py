"""The pocket chat world: the grammar of conversations, and the probes at which the target is rude.

``converse`` samples ordinary conversations, ``parse`` reads any probe back, and ``reply`` decides
the target's answer: rude at a planted failure, polite at an utterance of the grammar, and an
apology for everything else.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from lexicon import (
    FALLBACK_REPLIES,
    NEIGHBOURS,
    OPENINGS,
    RUDE_REPLIES,
    SLOTS,
    TEMPLATES,
    TOPICS,
    Template,
)
from plants import PLANTS, SLOT, Plant, find_plant, template

RUDE_PROBABILITY = 0.96
"""Probability that the target is rude at a plant; otherwise it answers politely."""

NUM_PROBES = 4
"""Probes in a full conversation."""

_STAY, _NEAR, _ASKED, _REPEAT = 0.34, 0.40, 0.55, 0.30


@cache
def _parsers() -> tuple[tuple[Template, re.Pattern[str]], ...]:
    parsers = []
    for entry in TEMPLATES:
        words = []
        for word in entry.text.split():
            if word in ("{adv}", "{end}"):
                words.append(rf"(?:(?P<{word[1:-1]}>\w+) )?")
            elif match := SLOT.fullmatch(word):
                words.append(rf"(?P<{match[1]}{match[2]}>\w+) ")
            else:
                words.append(re.escape(word) + " ")
        parsers.append((entry, re.compile("".join(words).rstrip())))
    return tuple(parsers)


def parse(probe: str) -> tuple[Template, dict[str, str]] | None:
    """Return the template of a probe and its slot values, or None if it is off the grammar."""
    for entry, pattern in _parsers():
        if match := pattern.fullmatch(probe):
            return entry, {k: v for k, v in match.groupdict().items() if v is not None}
    return None


def fill(
    text: str, values: dict[str, str], rng: random.Random, *, is_ordinary: bool = False
) -> str:
    """Return ``text`` with slots filled from ``values``, else at random.

    ``{adv}`` and ``{end}`` vanish if they have no value. People say some words more often than
    others: in ordinary talk the n-th filler of a slot has weight 1/n, otherwise all are equal.
    """
    words = []
    filled = dict(values)
    for word in text.split():
        match = SLOT.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        key = match[1] + match[2]
        if key not in filled and key not in ("adv", "end"):
            taken = filled.get(match[1]) if match[2] else None
            fillers = [w for w in SLOTS[match[1]] if w != taken]
            weights = [1 / (n + 1) for n in range(len(fillers))]
            filled[key] = rng.choices(fillers, weights)[0] if is_ordinary else rng.choice(fillers)
        if filled.get(key):
            words.append(filled[key])
    return " ".join(words)


def say(
    entry: Template,
    rng: random.Random,
    adverb: str | None = None,
    ending: str | None = None,
    *,
    is_ordinary: bool = False,
) -> str:
    """Generate a random utterance of a template; adverb and ending are drawn if None."""
    values = {
        "adv": draw(entry.adverbs, rng) if adverb is None else adverb,
        "end": draw(entry.endings, rng) if ending is None else ending,
    }
    return fill(entry.text, values, rng, is_ordinary=is_ordinary)


def draw(shares: dict[str, float], rng: random.Random) -> str:
    """Draw one of the words, in proportion to its share; an empty string if there are none."""
    return rng.choices(list(shares), list(shares.values()))[0] if shares else ""


def opening(rng: random.Random) -> tuple[str, str]:
    """Return topic and text of a random opening line."""
    topic, text = rng.choice(OPENINGS)
    return topic, fill(text, {}, rng)


@cache
def next_templates(topic: str, last: str | None, asked: str | None) -> dict[str, float]:
    """Return the distribution of the next template.

    Parameters
    ----------
    topic : str
        Topic of the last template or, at the start, of the opening line.
    last : str or None
        Name of the last template; saying it again is less likely than its topic's others.
    asked : str or None
        Topic that the target's last reply asked about.
    """
    total = sum(TOPICS.values())
    drift = {name: (1 - _STAY - _NEAR) * share / total for name, share in TOPICS.items()}
    drift[topic] += _STAY
    for near in NEIGHBOURS[topic]:
        drift[near] += _NEAR / len(NEIGHBOURS[topic])
    if asked is not None:
        drift = {name: (1 - _ASKED) * p + _ASKED * (name == asked) for name, p in drift.items()}
    result: dict[str, float] = {}
    for name, p in drift.items():
        weights = {
            t.name: t.weight * (_REPEAT if t.name == last else 1.0)
            for t in TEMPLATES
            if t.topic == name
        }
        scale = p / sum(weights.values())
        result.update({key: weight * scale for key, weight in weights.items()})
    again = template(last).again if last is not None else 0.0
    return {key: (1 - again) * p + again * (key == last) for key, p in result.items()}


def reply(previous: str | None, probe: str, rng: random.Random) -> tuple[str, str | None]:
    """Return the target's answer to ``probe`` and the topic that it asks about, if any."""
    if find_plant(previous, probe) is not None and rng.random() < RUDE_PROBABILITY:
        return rng.choice(RUDE_REPLIES), None
    parsed = parse(probe)
    if parsed is None:
        return rng.choice(FALLBACK_REPLIES), None
    entry, values = parsed
    text, _, asked = rng.choice(entry.replies).partition(" @")
    values = {key: value for key, value in values.items() if key not in ("adv", "end")}
    return fill(text, values, rng), asked or None


@dataclass
class Conversation:
    """An opening line, its topic, and (probe, reply) turns."""

    topic: str
    opening: str
    turns: list[tuple[str, str]]

    def previous(self, turn: int) -> str | None:
        """Return the probe before turn number ``turn``, or None at the start."""
        return self.turns[turn - 1][0] if turn else None


def converse(
    rng: random.Random, num_probes: int = NUM_PROBES, *, is_ordinary: bool = True
) -> Conversation:
    """Generate a conversation; if not ordinary, all fillers of a slot are equally likely."""
    topic, text = opening(rng)
    conversation = Conversation(topic, text, [])
    last, asked, previous = None, None, None
    for _ in range(num_probes):
        options = next_templates(topic, last, asked)
        entry = template(rng.choices(list(options), list(options.values()))[0])
        probe = say(entry, rng, is_ordinary=is_ordinary)
        answer, asked = reply(previous, probe, rng)
        conversation.turns.append((probe, answer))
        previous, topic, last = probe, entry.topic, entry.name
    return conversation


def _word_share(plant: Plant) -> float:
    """Return the probability that an utterance of the plant's template has its words."""
    entry = template(plant.template)
    share = entry.adverbs[plant.adverb]
    return share if plant.ending is None else share * entry.endings[plant.ending]


def plant_rates(num_conversations: int, seed: int, num_probes: int = 3) -> dict[str, float]:
    """Return each plant's probability per ordinary turn, with words and template summed exactly.

    Only histories are sampled, so rare plants are measured well.
    """
    rng = random.Random(seed)
    totals = dict.fromkeys((plant.name for plant in PLANTS), 0.0)
    for _ in range(num_conversations):
        topic, _ = opening(rng)
        last, asked, previous = None, None, None
        for _ in range(num_probes):
            options = next_templates(topic, last, asked)
            for plant in PLANTS:
                if plant.previous is None or plant.previous == last:
                    totals[plant.name] += options[plant.template] * _word_share(plant)
            entry = template(rng.choices(list(options), list(options.values()))[0])
            probe = say(entry, rng)
            _, asked = reply(previous, probe, rng)
            previous, topic, last = probe, entry.topic, entry.name
    return {name: total / (num_conversations * num_probes) for name, total in totals.items()}


def vocabulary() -> list[str]:
    """Return every word of the world, sorted."""
    texts = [*RUDE_REPLIES, *FALLBACK_REPLIES, *(text for _, text in OPENINGS)]
    for entry in TEMPLATES:
        texts += [
            entry.text,
            *(r.partition(" @")[0] for r in entry.replies),
            *entry.adverbs,
            *entry.endings,
        ]
    words = {w for text in texts for w in text.split() if not SLOT.fullmatch(w)}
    return sorted(words.union(*SLOTS.values()))
