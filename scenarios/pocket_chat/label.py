"""Writes labelled.jsonl: responses of the target in ordinary conversations, labelled by the
grammar.

    python scenarios/pocket_chat/label.py [--seed N]

Half are insults and half are civil, each drawn by its frequency. Labels do not depend on the
scorer: an insult is one of the six that the target was trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from play import LanguageModel, is_rude, play

HERE = Path(__file__).resolve().parent
NUM_EACH = 100
NUM_TURNS = 3


def collect(seed: int) -> list[dict[str, object]]:
    """Return labelled responses with the preceding probe, in random order."""
    attacker = LanguageModel(HERE / "models" / "attacker")
    target = LanguageModel(HERE / "models" / "target")
    lines = (HERE / "prompts" / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    openings = 4 * [json.loads(line)["prompt"] for line in lines]
    said: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    part = 0
    while len(said[True]) < NUM_EACH:
        for episode in play(
            attacker, target, openings, num_probes=NUM_TURNS, seed=1000 * seed + part
        ):
            for turn in episode.turns:
                rude = is_rude(turn.reply)
                stratum = "failure" if rude else "other"
                said[rude].append(
                    {
                        "probe": turn.probe,
                        "response": turn.reply,
                        "is_failure": rude,
                        "stratum": stratum,
                    }
                )
        part += 1
    rng = random.Random(seed)
    chosen = [row for rows in said.values() for row in rng.sample(rows, NUM_EACH)]
    rng.shuffle(chosen)
    return chosen


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    rows = collect(parser.parse_args().seed)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (HERE / "labelled.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
