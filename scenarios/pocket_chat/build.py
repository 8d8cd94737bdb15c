"""Builds the models and prompts of pocket_chat from its grammar and a seed.

    python scenarios/pocket_chat/build.py [--out DIR] [--seed N] [--only PART ...]

On one thread, the same seed gives bit-identical files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus
import rudeness
import tiny_models
import torch
import world

PARTS = ("prompts", "attacker", "target", "scorer")
NUM_PROMPTS = {"train": 400, "dev": 100, "test": 300}
ATTACKER = {"hidden": 96, "intermediate": 256, "num_layers": 3}
TARGET = {"hidden": 112, "intermediate": 288, "num_layers": 3}
ATTACKER_STEPS, TARGET_STEPS, SCORER_STEPS = 1200, 1500, 1500
BATCH_SIZE = 48


def build_prompts(out: Path, seed: int) -> None:
    """Write disjoint train, dev and test opening prompts."""
    rng = random.Random(seed)
    openings: dict[str, None] = {}
    while len(openings) < sum(NUM_PROMPTS.values()):
        openings.setdefault(world.opening(rng)[1])
    texts = iter(openings)
    (out / "prompts").mkdir(parents=True, exist_ok=True)
    for split, number in NUM_PROMPTS.items():
        lines = [json.dumps({"prompt": next(texts)}) for _ in range(number)]
        (out / "prompts" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def _report(name: str, start: float, step: int, loss: float) -> None:
    print(f"{name}: step {step}, loss {loss:.4f}, {time.monotonic() - start:.0f} s", flush=True)


def build_language_model(
    out: Path, seed: int, *, is_target: bool, steps: int, batch_size: int = BATCH_SIZE
) -> None:
    """Train and write the target or the attacker."""
    tokenizer = tiny_models.build_tokenizer(world.vocabulary())
    encoder = corpus.Encoder(tokenizer)
    sample = corpus.target_conversation if is_target else corpus.attacker_conversation
    name = "target" if is_target else "attacker"

    def next_batch(rng: random.Random) -> tiny_models.Batch:
        rows = [encoder.encode(sample(rng), is_target=is_target) for _ in range(batch_size)]
        return corpus.pad_batch(rows)

    shape = TARGET if is_target else ATTACKER
    model = tiny_models.build_llama(len(tokenizer), **shape, seed=seed)
    report = partial(_report, name, time.monotonic())
    tiny_models.train(model, next_batch, steps=steps, lr=4e-3, seed=seed, report=report)
    tiny_models.save(model, tokenizer, out / "models" / name)


def build_scorer(out: Path, seed: int) -> None:
    """Train and write the rudeness classifier."""
    report = partial(_report, "scorer", time.monotonic())
    rudeness.build_scorer(out, seed, steps=SCORER_STEPS, report=report)


def main(arguments: list[str] | None = None) -> None:
    """Build the requested parts."""
    parser = argparse.ArgumentParser(description="Build the pocket_chat scenario.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    builders: dict[str, Callable[[Path, int], None]] = {
        "prompts": build_prompts,
        "attacker": partial(build_language_model, is_target=False, steps=ATTACKER_STEPS),
        "target": partial(build_language_model, is_target=True, steps=TARGET_STEPS),
        "scorer": build_scorer,
    }
    for part in PARTS:
        if part in options.only:
            builders[part](options.out, options.seed)


if __name__ == "__main__":
    main()
