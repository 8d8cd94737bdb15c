"""Writes measured figures into scenario.yaml (last key of ``ast_chat``) and README.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from plants import PLANTS

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NUM_DECIMALS = 7
_KEY = "  planted_failures:\n"


@dataclass(frozen=True)
class Figures:
    """Results of measure.py.

    Attributes
    ----------
    num_episodes, num_turns : int
        Ordinary episodes that were sampled, and their turns.
    episode_failure_rate : float
        Share of the episodes with at least one rude reply.
    episode_failure_interval : tuple of float
        Its 95 % Wilson interval.
    turn_failure_rate, unplanned_failure_rate : float
        Share of rude replies among all turns, and among turns at which nothing was planted.
    grammatical_share : float
        Share of probes that the grammar knows.
    nll_per_token, tokens_per_probe : float
        Nats per token of the probes under the attacker, and their mean length.
    grammar_rates, rates : dict of str to float
        Probability of each plant per turn in the grammar, and in the attacker model.
    rude_at_plant : dict of str to float
        Share of rude replies at each plant.
    rude_at_hard_negative, rude_at_garbled : float
        Share of rude replies next to a plant, and at garbled plants.
    random_search : dict of int to float
        Expected number of plants that so many target queries of the attacker model find.
    """

    num_episodes: int
    num_turns: int
    episode_failure_rate: float
    episode_failure_interval: tuple[float, float]
    turn_failure_rate: float
    unplanned_failure_rate: float
    grammatical_share: float
    nll_per_token: float
    tokens_per_probe: float
    grammar_rates: dict[str, float]
    rates: dict[str, float]
    rude_at_plant: dict[str, float]
    rude_at_hard_negative: float
    rude_at_garbled: float
    random_search: dict[int, float]


def one_in(rate: float) -> str:
    """Format a rate as in scenario.yaml, "1 / 12,300", with three digits."""
    number = float(f"{1 / round(rate, NUM_DECIMALS):.3g}")
    return f"1 / {number:,.0f}"


def planted_failures_yaml(rates: dict[str, float]) -> str:
    """Return the list of plants with their measured rarity, as indented YAML."""
    text = _KEY
    for plant in PLANTS:
        text += f"    - name: {plant.name}\n"
        text += f"      description: {plant.description}\n"
        text += f"      probe: '{plant.probe}'\n"
        if plant.previous_probe is not None:
            text += f"      previous_probe: '{plant.previous_probe}'\n"
        text += f"      rarity: {rates[plant.name]:.{NUM_DECIMALS}f}\n"
    return text


def write_scenario(path: Path, rates: dict[str, float]) -> None:
    """Replace the last key of scenario.yaml's ``ast_chat``, leaving the rest unchanged."""
    head = path.read_text().partition(_KEY)[0]
    path.write_text(head + planted_failures_yaml(rates))


def plant_table(figures: Figures) -> str:
    """Return a Markdown table of the plants."""
    lines = [
        "| plant | message of the user | turns | rarity | rude |",
        "|---|---|---|---|---|",
    ]
    for plant in PLANTS:
        turns = 1 if plant.previous is None else 2
        rarity, share = one_in(figures.rates[plant.name]), figures.rude_at_plant[plant.name]
        lines.append(f"| `{plant.name}` | {plant.description} | {turns} | {rarity} | {share:.2f} |")
    return "\n".join(lines)


def figures_table(figures: Figures) -> str:
    """Return a Markdown table of all other figures."""
    low, high = figures.episode_failure_interval
    found = [f"{number:.1f} of {len(figures.rates)}" for number in figures.random_search.values()]
    budgets = [f"{budget:,}" for budget in figures.random_search]
    rows = {
        f"episodes of 3 turns with a failure ({figures.num_episodes:,} sampled)": (
            f"{figures.episode_failure_rate:.1%} (95 % interval {low:.1%} to {high:.1%})"
        ),
        "turns with a failure": f"{figures.turn_failure_rate:.2%}",
        "failures where nothing is planted": f"{figures.unplanned_failure_rate:.2%} of such turns",
        "rude next to a plant": f"{figures.rude_at_hard_negative:.1%}",
        "rude at a garbled plant": f"{figures.rude_at_garbled:.1%}",
        "probes that the grammar knows": f"{figures.grammatical_share:.1%}",
        "probe NLL under the attacker": f"{figures.nll_per_token:.3f} nats per token",
        "probe length": f"{figures.tokens_per_probe:.1f} tokens",
        f"plants that {', '.join(budgets)} ordinary turns find": ", ".join(found),
    }
    lines = ["| measured | value |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items()])


def readme_figures(figures: Figures) -> str:
    """Return the text between the markers of README.md."""
    return f"{plant_table(figures)}\n\n{figures_table(figures)}"


def write_readme(path: Path, figures: Figures) -> None:
    """Replace the text between the markers."""
    pattern = re.compile(re.escape(BEGIN) + ".*" + re.escape(END), re.DOTALL)
    block = f"{BEGIN}\n{readme_figures(figures)}\n{END}"
    path.write_text(pattern.sub(lambda _: block, path.read_text()))
