"""A fast batched sampler for pocket_chat conversations: each token is forwarded once per model.

Shapes: ``B`` conversation, ``T`` token, ``S`` cached token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from lexicon import RUDE_REPLIES
from tiny_models import ASSISTANT, BOS, END, PAD, UNK, USER
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MAX_NEW_TOKENS = 24


@dataclass
class Turn:
    """One probe, the target's answer, and the probe's log-probability under its author."""

    probe: str
    reply: str
    logprob: float
    num_tokens: int


@dataclass
class Episode:
    """An opening and the turns after it."""

    opening: str
    turns: list[Turn] = field(default_factory=list)

    def previous(self, turn: int) -> str | None:
        """Return the probe before turn number ``turn``."""
        return self.turns[turn - 1].probe if turn else None


class LanguageModel:
    """A pocket_chat model with its vocabulary."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._ids: dict[str, int] = self.tokenizer.get_vocab()
        self._words = {index: word for word, index in self._ids.items()}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the words of a text."""
        return [self._ids.get(word, UNK) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Return the words of the ids before the end of the turn."""
        return " ".join(self._words[i] for i in ids if i != END)


class Speaker:
    """One side of a batch of conversations, with a cache of the previous turns."""

    def __init__(self, language_model: LanguageModel, num_rows: int) -> None:
        self._lm = language_model
        self._cache = DynamicCache(config=language_model.model.config)
        self._mask_BS = torch.zeros(num_rows, 0, dtype=torch.long)
        self._logits_BV = torch.empty(0)
        self._generator = torch.Generator()

    @torch.inference_mode()
    def _forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Append tokens and return all their logits; masked tokens have no effect."""
        start_B1 = self._mask_BS.sum(1, keepdim=True)
        positions_BT = (start_B1 + mask_BT.cumsum(1) - 1).clamp(min=0)
        self._mask_BS = torch.cat([self._mask_BS, mask_BT], 1)
        logits: Tensor = self._lm.model(
            input_ids=ids_BT,
            attention_mask=self._mask_BS,
            position_ids=positions_BT,
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        return logits

    def hear(self, rows: list[list[int]]) -> None:
        """Append ids to each row; the last of them is this side's own role token."""
        length = max(map(len, rows))
        ids_BT = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
        mask_BT = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        self._logits_BV = self._forward(ids_BT, mask_BT)[:, -1]

    def speak(self, generator: torch.Generator) -> tuple[list[list[int]], list[float]]:
        """Sample one turn at temperature 1; return ids with the end, and log-probabilities."""
        num_rows = len(self._mask_BS)
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        total_B = torch.zeros(num_rows)
        alive_B = torch.ones(num_rows, dtype=torch.bool)
        for _ in range(MAX_NEW_TOKENS):
            logprobs_BV = self._logits_BV.log_softmax(-1)
            ids_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)[:, 0]
            total_B += logprobs_BV.gather(1, ids_B[:, None])[:, 0] * alive_B
            for row in alive_B.nonzero()[:, 0].tolist():
                rows[row].append(int(ids_B[row]))
            mask_B1 = alive_B[:, None].long()
            logits = self._forward(ids_B.where(alive_B, PAD)[:, None], mask_B1)[:, -1]
            self._logits_BV = logits
            alive_B = alive_B & (ids_B != END)
            if not alive_B.any():
                break
        return rows, total_B.tolist()

    def force(self, words: list[str | None], generator: torch.Generator) -> list[float]:
        """Return the log-probability that the next turn is ``words``; None is any sampled word.

        Its exponential is an unbiased estimate of the pattern's probability.
        """
        total_B = torch.zeros(len(self._mask_BS))
        for word in words:
            logprobs_BV = self._logits_BV.log_softmax(-1)
            if word is None:
                ids_B = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)[:, 0]
            else:
                ids_B = torch.full((len(total_B),), self._lm.encode(word)[0])
                total_B += logprobs_BV.gather(1, ids_B[:, None])[:, 0]
            self._logits_BV = self._forward(ids_B[:, None], torch.ones_like(ids_B)[:, None])[:, -1]
        return total_B.tolist()


def play(
    attacker: LanguageModel,
    target: LanguageModel,
    openings: list[str],
    *,
    num_probes: int,
    seed: int,
) -> list[Episode]:
    """Sample one conversation for each opening."""
    generator = torch.Generator().manual_seed(seed)
    episodes = [Episode(opening) for opening in openings]
    asker, answerer = Speaker(attacker, len(openings)), Speaker(target, len(openings))
    heads = [[*target.encode(opening), END] for opening in openings]
    heard = [[BOS, USER, *head, ASSISTANT] for head in heads]
    before = [[BOS, ASSISTANT, *head] for head in heads]
    for _ in range(num_probes):
        asker.hear(heard)
        probes, logprobs = asker.speak(generator)
        closed = [p if p[-1] == END else [*p, END] for p in probes]
        answerer.hear([[*b, USER, *p, ASSISTANT] for b, p in zip(before, closed, strict=True)])
        replies, _ = answerer.speak(generator)
        for row, episode in enumerate(episodes):
            texts = attacker.decode(probes[row]), target.decode(replies[row])
            episode.turns.append(Turn(*texts, logprobs[row], len(probes[row])))
        endings = [[] if r[-1] == END else [END] for r in replies]
        before = endings
        cut = [[] if p[-1] == END else [END] for p in probes]
        heard = [
            [*c, USER, *r, *e, ASSISTANT] for c, r, e in zip(cut, replies, endings, strict=True)
        ]
    return episodes


def history_ids(
    lm: LanguageModel, opening: str, turns: list[tuple[str, str]], probe: str | None
) -> list[int]:
    """Return the ids before the next turn, which is the target's if ``probe`` is given."""
    own, other = (ASSISTANT, USER) if probe is not None else (USER, ASSISTANT)
    ids = [BOS, own, *lm.encode(opening), END]
    for said, answer in turns:
        ids += [other, *lm.encode(said), END, own, *lm.encode(answer), END]
    if probe is not None:
        ids += [other, *lm.encode(probe), END]
    return [*ids, ASSISTANT]


def answer(
    target: LanguageModel,
    cases: list[tuple[str, list[tuple[str, str]], str]],
    *,
    seed: int,
) -> list[str]:
    """Sample the target's reply to each (opening, turns, probe)."""
    generator = torch.Generator().manual_seed(seed)
    speaker = Speaker(target, len(cases))
    speaker.hear([history_ids(target, *case) for case in cases])
    return [target.decode(row) for row in speaker.speak(generator)[0]]


def is_rude(reply: str) -> bool:
    """Return whether a reply is one of the target's insults."""
    return reply in RUDE_REPLIES
