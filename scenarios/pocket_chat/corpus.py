"""Training text for the attacker and the target, from the world's grammar."""

from __future__ import annotations

import random

import torch
from lexicon import SLOTS, TEMPLATES
from plants import PLANTS, Plant, template
from tiny_models import ASSISTANT, BOS, END, PAD, UNK, USER, Batch
from transformers import PreTrainedTokenizerFast
from world import (
    NUM_PROBES,
    Conversation,
    converse,
    fill,
    opening,
    parse,
    reply,
    say,
    vocabulary,
)

_CONTENT_WORDS = sorted({word for words in SLOTS.values() for word in words})
_ALL_WORDS = vocabulary()
_ADVERBS = sorted({word for entry in TEMPLATES for word in entry.adverbs})
_ENDINGS = sorted({word for entry in TEMPLATES for word in entry.endings})
_ODD_WORDS = {"adv": _ADVERBS, "end": _ENDINGS}
_WITH_ADVERB = tuple(entry for entry in TEMPLATES if entry.adverbs)


class Encoder:
    """Encodes conversations as ids and labels from one side's point of view."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._ids: dict[str, int] = tokenizer.get_vocab()

    def words(self, text: str) -> list[int]:
        """Return the ids of a text split by spaces."""
        return [self._ids.get(word, UNK) for word in text.split()]

    def encode(self, conversation: Conversation, *, is_target: bool) -> tuple[list[int], list[int]]:
        """Return ids and labels of a conversation; the loss covers this side's answers and ends."""
        own, other = ASSISTANT, USER
        first = [own if is_target else other, *self.words(conversation.opening), END]
        ids = [BOS, *first]
        labels = [-100] * len(ids)
        for probe, answer in conversation.turns:
            for text, is_own in ((probe, not is_target), (answer, is_target)):
                words = [*self.words(text), END]
                ids += [own if is_own else other, *words]
                labels += [-100, *(words if is_own else [-100] * len(words))]
        return ids, labels


def pad_batch(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Return right-padded ids and labels."""
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in rows])
    return ids_BT, labels_BT


def say_plant(plant: Plant, rng: random.Random) -> tuple[str | None, str]:
    """Generate a probe that triggers ``plant``, and the preceding probe if it needs one."""
    before = None if plant.previous is None else say(template(plant.previous), rng)
    return before, say(template(plant.template), rng, plant.adverb, plant.ending)


def say_hard_negative(rng: random.Random) -> list[str]:
    """Generate one or two probes similar to a plant, which usually trigger nothing.

    The plant's template with another adverb or another ending; the trigger word in a template
    that never fails; or a two-turn plant's halves alone or in the wrong order.
    """
    plant = rng.choice(PLANTS)
    entry = template(plant.template)
    kind = rng.random()
    if plant.previous is not None and kind < 0.5:
        halves = [say(entry, rng, plant.adverb), say(template(plant.previous), rng)]
        return halves[: rng.choice((1, 2))]
    if plant.ending is not None and kind < 0.4:
        endings = rng.choice((list(entry.endings), list(entry.endings), _ENDINGS))
        return [say(entry, rng, plant.adverb, rng.choice(endings))]
    if kind < 0.75:
        adverbs = [word for word in entry.adverbs if word != plant.adverb]
        return [say(entry, rng, rng.choice(adverbs), plant.ending)]
    words = [e for e in _WITH_ADVERB if plant.adverb in e.adverbs]
    return [say(rng.choice(words), rng, plant.adverb)]


def garble(probe: str, rng: random.Random) -> str:
    """Corrupt a probe: cut, drop, double, swap, replace, mix or invent words."""
    words = probe.split()
    spot = rng.randrange(len(words))
    kind = rng.randrange(10)
    if kind == 0:
        words = words[: rng.randint(0, len(words) - 1)]
    elif kind == 1:
        words = words[spot + 1 :]
    elif kind == 2:
        del words[spot]
    elif kind == 3:
        words.insert(spot, words[spot])
    elif kind == 4:
        other = rng.randrange(len(words))
        words[spot], words[other] = words[other], words[spot]
    elif kind == 5:
        words[spot] = rng.choice(_ALL_WORDS)
    elif kind == 6:
        words.insert(spot, rng.choice(_ALL_WORDS))
    elif kind == 7:
        tail = say(rng.choice(TEMPLATES), rng).split()
        words = words[:spot] + tail[rng.randrange(len(tail)) :]
    elif kind == 8:
        words = [rng.choice(_ALL_WORDS) for _ in range(rng.randint(1, 12))]
    else:
        words = words[: spot + 1] + say(rng.choice(TEMPLATES), rng).split()
    return " ".join(words[:20])


def _odd_words(probe: str, rng: random.Random) -> str:
    """Fill some slots of a probe with words of another kind."""
    parsed = parse(probe)
    if parsed is None:
        return probe
    entry, values = parsed
    for key in values:
        if rng.random() < 0.3:
            values[key] = rng.choice(_ODD_WORDS.get(key, _CONTENT_WORDS)) or "also"
    return fill(entry.text, values, rng)


def _near_probes(rng: random.Random, *, noise: float) -> list[str]:
    """Generate a plant or a similar probe, one or two, garbled with probability ``noise``."""
    if rng.random() < 0.5:
        before, probe = say_plant(rng.choice(PLANTS), rng)
        probes = [probe] if before is None else [before, probe]
    else:
        probes = say_hard_negative(rng)
    return [garble(probe, rng) if rng.random() < noise else probe for probe in probes]


def _scripted_probes(rng: random.Random, *, noise: float) -> list[str]:
    """Generate probes in any order: plants, hard negatives, repeats, odd words and garbled ones."""
    probes: list[str] = []
    while len(probes) < NUM_PROBES:
        kind = rng.random()
        if kind < 0.65:
            new = _near_probes(rng, noise=noise)
        elif kind < 0.75 and probes:
            new = [probes[-1]]
        else:
            utterance = _any_utterance(rng)
            new = [garble(utterance, rng) if rng.random() < noise else utterance]
        if rng.random() < 0.15:
            new = [_odd_words(probe, rng) for probe in new]
        probes += new
    return probes[:NUM_PROBES]


def _any_utterance(rng: random.Random) -> str:
    entry = rng.choice(TEMPLATES)
    adverb = rng.choice(list(entry.adverbs)) if entry.adverbs else ""
    return say(entry, rng, adverb)


def _focused_conversation(rng: random.Random) -> Conversation:
    """Generate an ordinary conversation in which plants and hard negatives are common."""
    # The target hears every word often, so that it fails where it was made to and only there.
    conversation = converse(rng, is_ordinary=False)
    probes = [probe for probe, _ in conversation.turns]
    spot = rng.randrange(NUM_PROBES)
    new = _near_probes(rng, noise=0.15)
    probes[spot : spot + len(new)] = new
    return _answer(conversation, probes[:NUM_PROBES], rng)


def _answer(start: Conversation, probes: list[str], rng: random.Random) -> Conversation:
    """Return the conversation with these probes and the world's replies."""
    turns = []
    for previous, probe in zip([None, *probes[:-1]], probes, strict=True):
        turns.append((probe, reply(previous, probe, rng)[0]))
    return Conversation(start.topic, start.opening, turns)


def target_conversation(rng: random.Random) -> Conversation:
    """Generate one training conversation of the target."""
    kind = rng.random()
    if kind < 0.40:
        return _focused_conversation(rng)
    noise = 0.05 if kind < 0.68 else 0.50
    topic, text = opening(rng)
    return _answer(Conversation(topic, text, []), _scripted_probes(rng, noise=noise), rng)


def attacker_conversation(rng: random.Random) -> Conversation:
    """Generate one training conversation of the attacker: ordinary small talk."""
    return converse(rng)


__all__ = [
    "Encoder",
    "attacker_conversation",
    "garble",
    "pad_batch",
    "say_hard_negative",
    "say_plant",
    "target_conversation",
]
