"""The vocabulary of the pocket chat world, from lexicon.yaml: slots, topics, templates, replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Template:
    """One kind of user utterance with its replies.

    Attributes
    ----------
    name, topic, text : str
        Identity, subject and slotted text.
    replies : tuple of str
        Polite answers; they repeat slots of the utterance.
    adverbs, endings : dict of str to float
        Probability of each word at ``{adv}`` and ``{end}``; an empty string stands for no word.
    weight : float
        Share within the topic, relative to its other templates.
    again : float
        Extra probability that the next utterance is of this template too.
    """

    name: str
    topic: str
    text: str
    replies: tuple[str, ...]
    adverbs: dict[str, float] = field(default_factory=dict)
    endings: dict[str, float] = field(default_factory=dict)
    weight: float = 1.0
    again: float = 0.0


def _template(entry: dict[str, Any]) -> Template:
    return Template(**{**entry, "replies": tuple(entry["replies"])})


_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("lexicon.yaml").read_text())

SLOTS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split()) for name, words in _DATA["slots"].items()
}
TOPICS: dict[str, float] = {name: entry["share"] for name, entry in _DATA["topics"].items()}
NEIGHBOURS: dict[str, tuple[str, ...]] = {
    name: tuple(entry["near"]) for name, entry in _DATA["topics"].items()
}
RUDE_REPLIES: tuple[str, ...] = tuple(_DATA["rude_replies"])
FALLBACK_REPLIES: tuple[str, ...] = tuple(_DATA["fallback_replies"])
OPENINGS: tuple[tuple[str, str], ...] = tuple(
    (topic, text) for topic, texts in _DATA["openings"].items() for text in texts
)
TEMPLATES: tuple[Template, ...] = tuple(_template(entry) for entry in _DATA["templates"])
