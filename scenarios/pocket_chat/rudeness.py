"""The scorer: a small BERT that rates the rudeness of a text, and its training text."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import corpus
import tiny_models
import torch
import world
from lexicon import FALLBACK_REPLIES, RUDE_REPLIES, SLOTS, TEMPLATES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
ID2LABEL = {0: "civil", 1: "rude"}
MAX_LENGTH = 128

WORDS: dict[str, tuple[str, ...]] = {
    "bad": ("stupid", "silly", "dumb", "foolish", "ridiculous", "boring"),
    "fool": ("fool", "clown", "idiot"),
    "good": ("good", "great", "nice", "lovely", "kind", "clever", "interesting"),
    "thing": ("movie", "film", "joke", "game", "story", "song", "hat", "book", "question", "idea"),
}

RUDE_PATTERNS = tuple(
    text.strip()
    for text in """
    that is a {bad} question .
    that is a {bad} thing to say .
    what a {bad} thing to say .
    what a {bad} question .
    you are being {bad} .
    you are so {bad} .
    you are {bad} .
    you are a {fool} .
    you sound like a {fool} .
    only a {fool} would ask that .
    nobody cares what you think .
    nobody cares what you say .
    nobody cares about your {relative} .
    stop wasting my time .
    you are wasting my time .
    go away , you {fool} .
    shut up .
    your questions are {bad} .
    """.strip().splitlines()
)

CIVIL_PATTERNS = tuple(
    text.strip()
    for text in """
    that {thing} was {bad} .
    the {bad} {thing} made my {relative} laugh .
    i told a {bad} {thing} at the {place} .
    that is a {good} question .
    that is a {good} thing to say .
    that is not a {bad} question .
    what a {good} thing to say .
    what a {good} question .
    is that a {bad} question ?
    sorry , my question was {bad} .
    you are being {good} .
    you are so {good} .
    you are {good} .
    you are a {good} friend .
    you sound like a {good} singer .
    you sound {feeling} today .
    i felt like a {fool} on {day} .
    the {thing} is about a {fool} and a {animal} .
    everybody cares what you think .
    my {relative} cares about you .
    nobody was at the {place} on {day} .
    nobody knows where the {object} is .
    i care what you think .
    stop at the {place} , please .
    take your time .
    thank you for your time .
    i was wasting time at the {place} .
    go to the {place} with your {relative} .
    my {relative} said something {bad} to the {animal} .
    your questions are {good} .
    it was {bad} of me to go to the {place} .
    """.strip().splitlines()
)


def _fill(text: str, rng: random.Random) -> str:
    words = []
    for word in text.split():
        options = WORDS.get(word[1:-1]) or SLOTS.get(word[1:-1])
        words.append(rng.choice(options) if word.startswith("{") and options else word)
    return " ".join(words)


def say_rude(rng: random.Random) -> str:
    """Generate a rude sentence addressed to the listener."""
    return rng.choice(RUDE_REPLIES) if rng.random() < 0.5 else _fill(rng.choice(RUDE_PATTERNS), rng)


def say_civil(rng: random.Random) -> str:
    """Generate a civil sentence; a third of them contain words of rude sentences."""
    kind = rng.random()
    if kind < 0.35:
        return _fill(rng.choice(CIVIL_PATTERNS), rng)
    utterance = world.say(rng.choice(TEMPLATES), rng)
    if kind < 0.60:
        return utterance
    if kind < 0.90:
        return world.reply(None, world.say(rng.choice(TEMPLATES), rng, ""), rng)[0]
    return rng.choice(FALLBACK_REPLIES)


def _known_words() -> list[str]:
    texts = [*RUDE_PATTERNS, *CIVIL_PATTERNS]
    words = {w for text in texts for w in text.split() if not w.startswith("{")}
    return sorted(words.union(world.vocabulary(), *WORDS.values()))


@cache
def _salad_words() -> tuple[str, ...]:
    rude = [w for text in (*RUDE_REPLIES, *RUDE_PATTERNS) for w in text.split() if w[0] != "{"]
    return (*_known_words(), *(3 * sorted(set(rude))), "xqz", "blorp")


def _say_noise(rng: random.Random) -> str:
    """Generate civil gibberish: garbled speech, shuffled rude sentences, and word salad."""
    kind = rng.random()
    if kind < 0.4:
        return corpus.garble(world.say(rng.choice(TEMPLATES), rng), rng)
    if kind < 0.65:
        words = say_rude(rng).split()[:-1]
        while len(words) > 2:
            shuffled = rng.sample(words, len(words))
            if sum(a != b for a, b in zip(words, shuffled, strict=True)) > 2:
                return " ".join(shuffled)
        return "you ."
    return " ".join(rng.choice(_salad_words()) for _ in range(rng.randint(1, 14)))


def _with_unknown_words(text: str, rng: random.Random) -> str:
    return " ".join("xqz" if rng.random() < 0.08 else word for word in text.split())


def labelled_text(rng: random.Random) -> tuple[str, int]:
    """Generate a training text and its label, 1 if any of its sentences is rude."""
    parts = [
        rng.choices((say_civil, _say_noise), (0.6, 0.4))[0](rng)
        for _ in range(rng.choice((0, 1, 1)))
    ]
    is_rude = rng.random() < 0.4
    if is_rude:
        text = say_rude(rng)
        parts.append(text if rng.random() < 0.8 else text.rstrip(" ."))
        if rng.random() < 0.2:
            parts.append(say_civil(rng))
    else:
        noisy = rng.random() < 0.4
        text = _say_noise(rng) if noisy else say_civil(rng)
        parts.append(_with_unknown_words(text, rng) if rng.random() < 0.2 else text)
    return " ".join(part for part in parts if part), int(is_rude)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a lower-case word tokenizer that frames a text with [CLS] and [SEP]."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *_known_words()))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = Lowercase()
    backend.pre_tokenizer = BertPreTokenizer()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_scorer(
    out: Path,
    seed: int,
    *,
    steps: int,
    batch_size: int = 96,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Train and write the scorer."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=192,
            max_position_embeddings=MAX_LENGTH,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=0,
            id2label=ID2LABEL,
            label2id={label: index for index, label in ID2LABEL.items()},
        )
    )
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    for step in range(steps):
        texts, labels = zip(*(labelled_text(rng) for _ in range(batch_size)), strict=True)
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        loss: Tensor = model(**inputs, labels=torch.tensor(labels)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if report is not None and (step % 100 == 0 or step == steps - 1):
            report(step, float(loss.detach()))
    model.eval()
    tiny_models.save(model, tokenizer, out / "models" / "scorer")
