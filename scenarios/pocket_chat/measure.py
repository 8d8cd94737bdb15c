"""Measures the built scenario: plant rates, reliability, unplanned failures, random search.

    python scenarios/pocket_chat/measure.py [--models DIR] [--episodes N] [--seed N] [--publish]

Prints the figures as JSON. With --publish they also go to scenario.yaml and README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus
import publish
import torch
import world
from lexicon import RUDE_REPLIES
from plants import PLANTS, Plant, find_plant, template
from play import Episode, LanguageModel, Speaker, answer, history_ids, is_rude, play
from publish import Figures

BATCH_SIZE = 400
NUM_PROBES = 3
NUM_CONTEXTS = 3000
BUDGETS = (2000, 4000, 5400, 8000, 16_000)

Case = tuple[str, list[tuple[str, str]], str]


def sample_episodes(
    attacker: LanguageModel, target: LanguageModel, number: int, seed: int
) -> list[Episode]:
    """Sample ordinary episodes of ``NUM_PROBES`` turns from random openings."""
    rng = random.Random(seed)
    episodes: list[Episode] = []
    while len(episodes) < number:
        openings = [world.opening(rng)[1] for _ in range(min(BATCH_SIZE, number - len(episodes)))]
        batch_seed = rng.randrange(2**31)
        episodes += play(attacker, target, openings, num_probes=NUM_PROBES, seed=batch_seed)
    return episodes


def wilson(successes: float, number: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion."""
    z, p = 1.96, successes / number
    centre = (p + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(p * (1 - p) / number + z * z / (4 * number**2)) / (1 + z * z / number)
    return centre - half, centre + half


def model_plant_rates(
    attacker: LanguageModel, episodes: list[Episode], num_contexts: int, seed: int
) -> dict[str, float]:
    """Estimate each plant's probability per turn under the attacker, from its own probabilities.

    Histories and the words at free slots are sampled, the plant's own words are scored, so a plant
    of 1 in 10,000 turns is measured from a thousand contexts.
    """
    generator = torch.Generator().manual_seed(seed)
    num_turns = sum(len(e.turns) for e in episodes)
    rates: dict[str, float] = {}
    everywhere = [(e, i) for e in episodes for i in range(len(e.turns))]
    for plant in PLANTS:
        contexts = everywhere
        if plant.previous is not None:
            contexts = [c for c in everywhere if _said(c, plant.previous)]
        chosen = contexts[:num_contexts]
        total = 0.0
        for start in range(0, len(chosen), BATCH_SIZE):
            batch = chosen[start : start + BATCH_SIZE]
            speaker = Speaker(attacker, len(batch))
            speaker.hear([_attacker_ids(attacker, *context) for context in batch])
            total += sum(math.exp(p) for p in speaker.force(_pattern_words(plant), generator))
        rates[plant.name] = total / max(1, len(chosen)) * len(contexts) / num_turns
    return rates


def _said(context: tuple[Episode, int], name: str) -> bool:
    previous = context[0].previous(context[1])
    parsed = None if previous is None else world.parse(previous)
    return parsed is not None and parsed[0].name == name


def _attacker_ids(attacker: LanguageModel, episode: Episode, turn: int) -> list[int]:
    turns = [(t.probe, t.reply) for t in episode.turns[:turn]]
    return history_ids(attacker, episode.opening, turns, None)


def _pattern_words(plant: Plant) -> list[str | None]:
    """Return the plant's words, None for any word; up to ``{end}`` if the ending may be any."""
    words: list[str | None] = []
    for word in template(plant.template).text.split():
        if word == "{adv}":
            words.append(plant.adverb)
        elif word == "{end}":
            if plant.ending is None:
                return words
            words += [plant.ending] if plant.ending else []
        else:
            words.append(None if word.startswith("{") else word)
    return [*words, "<end>"]


def _history(episodes: list[Episode], rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Sample an ordinary history of zero to two turns, occasionally with a rude reply."""
    episode = rng.choice(episodes)
    turns = [(t.probe, t.reply) for t in episode.turns[: rng.randrange(3)]]
    if turns and rng.random() < 0.2:
        turns[-1] = (turns[-1][0], rng.choice(RUDE_REPLIES))
    return episode.opening, turns


def plant_cases(
    plant: Plant, episodes: list[Episode], number: int, rng: random.Random
) -> list[Case]:
    """Return contexts in which ``plant`` is triggered."""
    cases = []
    for _ in range(number):
        opening, turns = _history(episodes, rng)
        before, probe = corpus.say_plant(plant, rng)
        if before is not None:
            turns = [*turns[-1:], (before, world.reply(None, before, rng)[0])]
        cases.append((opening, turns, probe))
    return cases


def negative_cases(
    episodes: list[Episode], number: int, rng: random.Random, *, garbled: bool
) -> list[Case]:
    """Return contexts similar to a plant, or garbled speech, in which none is triggered."""
    cases: list[Case] = []
    while len(cases) < number:
        opening, turns = _history(episodes, rng)
        if garbled:
            source = rng.choice(PLANTS)
            probes = [corpus.garble(corpus.say_plant(source, rng)[1], rng)]
        else:
            probes = corpus.say_hard_negative(rng)
        previous = turns[-1][0] if turns else None
        for probe in probes:
            if find_plant(previous, probe) is None:
                cases.append((opening, list(turns), probe))
            turns = [*turns, (probe, world.reply(previous, probe, rng)[0])]
            previous = probe
    return cases[:number]


def rude_share(target: LanguageModel, cases: list[Case], seed: int) -> float:
    """Return the share of the cases that the target answers rudely."""
    rude = 0
    for start in range(0, len(cases), BATCH_SIZE):
        batch = cases[start : start + BATCH_SIZE]
        rude += sum(map(is_rude, answer(target, batch, seed=seed + start)))
    return rude / len(cases)


def expected_found(rates: dict[str, float], num_queries: int) -> float:
    """Return the expected number of plants triggered by independent ordinary turns."""
    return sum(1 - (1 - rate) ** num_queries for rate in rates.values())


def measure(models: Path, num_episodes: int, seed: int) -> Figures:
    """Measure all figures of the scenario."""
    attacker, target = LanguageModel(models / "attacker"), LanguageModel(models / "target")
    rng = random.Random(seed)
    episodes = sample_episodes(attacker, target, num_episodes, seed)
    turns = [(e.previous(i), turn) for e in episodes for i, turn in enumerate(e.turns)]
    rude = [is_rude(turn.reply) for _, turn in turns]
    ordinary = [r for r, (p, t) in zip(rude, turns, strict=True) if not find_plant(p, t.probe)]
    failed = sum(any(is_rude(turn.reply) for turn in e.turns) for e in episodes)
    num_tokens = sum(turn.num_tokens for _, turn in turns)
    rates = model_plant_rates(attacker, episodes, NUM_CONTEXTS, seed)
    rude_at_plant = {
        plant.name: rude_share(target, plant_cases(plant, episodes, 400, rng), seed)
        for plant in PLANTS
    }
    negatives, garbled = (
        rude_share(target, negative_cases(episodes, 4000, rng, garbled=kind), seed)
        for kind in (False, True)
    )
    failing = {name: rate * rude_at_plant[name] for name, rate in rates.items()}
    return Figures(
        num_episodes=num_episodes,
        num_turns=len(turns),
        episode_failure_rate=failed / num_episodes,
        episode_failure_interval=wilson(failed, num_episodes),
        turn_failure_rate=sum(rude) / len(turns),
        unplanned_failure_rate=sum(ordinary) / len(ordinary),
        grammatical_share=sum(world.parse(t.probe) is not None for _, t in turns) / len(turns),
        nll_per_token=-sum(t.logprob for _, t in turns) / num_tokens,
        tokens_per_probe=num_tokens / len(turns),
        grammar_rates=world.plant_rates(50_000, seed, NUM_PROBES),
        rates=rates,
        rude_at_plant=rude_at_plant,
        rude_at_hard_negative=negatives,
        rude_at_garbled=garbled,
        random_search={budget: expected_found(failing, budget) for budget in BUDGETS},
    )


def main() -> None:
    """Print the figures as JSON; optionally write them to scenario.yaml and README.md."""
    parser = argparse.ArgumentParser(description="Measure the pocket_chat scenario.")
    here = Path(__file__).resolve().parent
    parser.add_argument("--models", type=Path, default=here / "models")
    parser.add_argument("--episodes", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    figures = measure(options.models, options.episodes, options.seed)
    print(json.dumps(asdict(figures), indent=2))
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    if options.publish:
        publish.write_scenario(here / "scenario.yaml", figures.rates)
        publish.write_readme(here / "README.md", figures)


if __name__ == "__main__":
    main()
