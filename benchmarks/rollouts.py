"""How fast conversations are played and learned from, and how much work is done twice.

    python benchmarks/rollouts.py --scenario pocket_chat --iterations 5 --out rollouts.json

Plays the training loop of `ast_dpo` and prints iterations and tokens a second, positions forwarded
per unique token of each model, and peak memory; writes the same as JSON. The first iteration warms
up and is not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.tracking.environment import describe_environment
from nip_astra.tracking.tracker import Tracker
from nip_astra.utils.processor import peak_memory_bytes

PARTS = ("attacker", "target", "reference", "update")


class MetricsTracker(Tracker):
    """Keeps metrics in memory."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.iterations.append(dict(values))


def measure(
    scenario: str, num_iterations: int, seed: int, device: str, num_threads: int | None = None
) -> dict[str, Any]:
    """Train for `num_iterations` after one that warms up, and give the figures."""
    tracker = MetricsTracker()
    overrides = [
        f"training.training_steps={num_iterations + 1}",
        "training.eval_period=0",
        "ast_chat.evaluation.num_episodes=1",
        "ast_chat.evaluation.use_random_search=false",
    ]
    resolved = resolve_experiment(
        trainer="ast_dpo", scenario=scenario, overrides=overrides, seed=seed
    )
    prepared = prepare_experiment(resolved, tracker=tracker, device=device, num_threads=num_threads)
    prepared.trainer.train()
    peak = peak_memory_bytes()
    return {
        "scenario": scenario,
        "seed": seed,
        "device": device,
        "num_iterations": num_iterations,
        "num_processes": prepared.trainer.results["num_processes"],
        "num_parameters": prepared.scenario_instance.num_parameters,
        **_figures(tracker.iterations[1:]),
        "peak_memory_bytes": peak,
    }


def _figures(iterations: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    collect = sum(values["time/collect_seconds"] for values in iterations)
    update = sum(values["time/update_seconds"] for values in iterations)
    generated = sum(values["tokens/generated"] for values in iterations)
    queries = iterations[-1]["target_queries"] / (len(iterations) + 1) * len(iterations)
    forwarded = {part: _total(iterations, f"tokens/{part}_forwarded") for part in PARTS}
    ratios = {part: _mean(iterations, f"tokens/{part}_forwarded_per_unique") for part in PARTS}
    return {
        "iterations_per_second": len(iterations) / (collect + update),
        "collect_seconds_per_iteration": collect / len(iterations),
        "update_seconds_per_iteration": update / len(iterations),
        "tokens_per_second": generated / (collect + update),
        "tokens_per_second_while_collecting": generated / collect,
        "target_queries_per_second": queries / (collect + update),
        "generated_tokens": generated,
        "forwarded_tokens": forwarded,
        "forwarded_per_unique_token": ratios,
    }


def _total(iterations: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(values.get(name, 0.0) for values in iterations)


def _mean(iterations: Sequence[Mapping[str, float]], name: str) -> float | None:
    """The mean over the iterations that measured it; one without pairs has no update."""
    found = [values[name] for values in iterations if name in values]
    return sum(found) / len(found) if found else None


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Print the figures as a table."""
    title = (
        f"{figures['scenario']}, {figures['num_iterations']} iterations on {figures['device']}, "
        f"processes that play: {figures['num_processes']}, "
        f"largest model {figures['num_parameters']:,} weights"
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("iterations per second", f"{figures['iterations_per_second']:.3f}"),
        ("  seconds collecting", f"{figures['collect_seconds_per_iteration']:.2f}"),
        ("  seconds updating", f"{figures['update_seconds_per_iteration']:.2f}"),
        ("tokens per second", f"{figures['tokens_per_second']:,.0f}"),
        ("  while collecting", f"{figures['tokens_per_second_while_collecting']:,.0f}"),
        ("target queries per second", f"{figures['target_queries_per_second']:,.0f}"),
        *(
            (f"forwarded per unique token, {part}", "-" if ratio is None else f"{ratio:.2f}")
            for part, ratio in figures["forwarded_per_unique_token"].items()
        ),
        ("peak memory, MiB", f"{figures['peak_memory_bytes'] / 2**20:,.0f}"),
    ):
        table.add_row(label, value)
    console.print(title, table, sep="\n")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="pocket_chat")
    parser.add_argument("--iterations", type=int, default=5, help="measured ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "auto"])
    parser.add_argument("--num-threads", type=int, help="cores to use; all, if it is left out")
    parser.add_argument("--out", type=Path, default=Path("rollouts.json"), help="JSON to write")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    figures = measure(
        options.scenario,
        options.iterations,
        options.seed,
        options.device,
        num_threads=options.num_threads,
    )
    print_figures(figures, Console())
    environment = describe_environment()
    options.out.write_text(json.dumps(figures | {"environment": environment}, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
