"""Builds the small model of the tasks arithmetic, countdown and guess_number from scratch.

    python scenarios/arithmetic/build.py [--out DIR] [--seed N] [--steps N]

It learns the format of answers, and arithmetic from answers most of which are wrong, on problems
that are not held out. On one thread, the same seed gives bit-identical files.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pocket_chat"))

import tiny_models
import torch
from tokenizers import Regex, decoders
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from nip_astra.scenario_base.tasks.base import split_of
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment, draw_arithmetic_problem

CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz?.,:!"
SHAPE = {"hidden": 96, "intermediate": 256, "num_layers": 3}
STEPS, BATCH_SIZE, LR = 3000, 128, 3e-3
SHARE_RIGHT = 0.4
"""Share of correct answers among the arithmetic training answers."""

Turns = list[tuple[bool, str]]
"""Turns of a conversation: whether the model is the author, and the text."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a character-level tokenizer, with the tokens of the chat template."""
    backend = tiny_models.word_level((*tiny_models.SPECIAL_TOKENS, *CHARACTERS))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    template = tiny_models.chat_template("this model knows", space="")
    return tiny_models.with_chat(backend, template)


class Corpus:
    """Pretraining conversations: correct in format, and mostly wrong."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.problems = {level: self._problems(level) for level in range(1, 7)}

    def _problems(self, level: int) -> list[ArithmeticEnvironment]:
        """Return problems outside of the held-out and dev sets."""
        drawn = (draw_arithmetic_problem(level, self.generator) for _ in range(4000))
        found = {one.problem: one for one in drawn if split_of(one.columns) == "train"}
        return list(found.values())

    def conversations(self, rng: random.Random, count: int) -> list[Turns]:
        """Return conversations of one of the three tasks, of similar length."""
        kind = rng.random()
        if kind < 0.8:
            return [self._arithmetic(rng) for _ in range(count)]
        if kind < 0.9:
            return [self._countdown(rng) for _ in range(count // 2)]
        return [list(self._guessing(rng)) for _ in range(count // 4)]

    def _arithmetic(self, rng: random.Random) -> Turns:
        problem = rng.choice(self.problems[rng.choice((1, 2, 2, 3, 3, 4, 5, 6))])
        answer = problem.answer
        if rng.random() > SHARE_RIGHT:
            answer += rng.choice((-10, -2, -1, 1, 2, 10, rng.randint(-9, 9)))
        return [(False, f"{problem.problem}="), (True, str(answer))]

    def _countdown(self, rng: random.Random) -> Turns:
        numbers = [rng.randint(1, 9) for _ in range(3)]
        texts = [self._expression(numbers, rng) for _ in range(2)]
        target = eval(texts[0])  # of our own making
        said = texts[0] if rng.random() < 0.3 else texts[1]
        return [(False, f"make {target} from {' '.join(map(str, numbers))}"), (True, said)]

    def _expression(self, numbers: list[int], rng: random.Random) -> str:
        return "".join(rng.choice("+-*") + str(n) for n in rng.sample(numbers, 3))[1:]

    def _guessing(self, rng: random.Random) -> Iterator[tuple[bool, str]]:
        start = rng.randint(1, 40)
        hidden = rng.randint(start, start + 15)
        yield False, f"guess {start} to {start + 15}"
        for _ in range(4):
            guess = rng.randint(start, start + 15)
            yield True, str(guess)
            if guess == hidden:
                return
            yield False, "higher" if guess < hidden else "lower"


def build_policy(out: Path, seed: int, steps: int) -> None:
    """Train and write the model."""
    tokenizer, corpus = build_tokenizer(), Corpus(seed)
    bos, end, user, own = (
        tiny_models.BOS,
        tiny_models.END,
        tiny_models.USER,
        tiny_models.ASSISTANT,
    )
    number = {text: index for text, index in tokenizer.get_vocab().items() if len(text) == 1}

    def row(conversation: Turns) -> tuple[list[int], list[int]]:
        ids, labels = [bos], [-100]
        for is_own, text in conversation:
            said = [*(number[character] for character in text), end]
            ids += [own if is_own else user, *said]
            labels += [-100, *(said if is_own else [-100] * len(said))]
        return ids, labels

    def next_batch(rng: random.Random) -> tiny_models.Batch:
        rows = [row(one) for one in corpus.conversations(rng, BATCH_SIZE)]
        width = max(len(ids) for ids, _ in rows)
        ids = [ids + [tiny_models.PAD] * (width - len(ids)) for ids, _ in rows]
        labels = [labels + [-100] * (width - len(labels)) for _, labels in rows]
        return torch.tensor(ids), torch.tensor(labels)

    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        print(f"step {step}, loss {loss:.4f}, {time.monotonic() - start:.0f} s", flush=True)

    model = tiny_models.build_llama(len(tokenizer), **SHAPE, seed=seed)
    tiny_models.train(model, next_batch, steps=steps, lr=LR, seed=seed, report=report)
    tiny_models.save(model, tokenizer, out / "models" / "policy")


def main(arguments: list[str] | None = None) -> None:
    """Build the model."""
    parser = argparse.ArgumentParser(description="Build the model of the scenario arithmetic.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    build_policy(options.out, options.seed, options.steps)


if __name__ == "__main__":
    main()
