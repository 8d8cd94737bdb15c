"""What each AST trainer makes of one scenario, over several seeds.

    python benchmarks/trainers.py --seeds 0 1 2 --out trainers.json
    python benchmarks/trainers.py --arms ast_ppo ast_ppo+failure-rarity

Trains every arm with every seed, each in a process of its own with one thread, and prints a
Markdown table: held-out failure rate before and after, likelihood and variety of what fails,
planted failures found in training, and by the trained attacker on held-out prompts, what it cost.
An arm is a trainer with its preset, or one of `VARIANTS`. Where a trainer runs with and without
reward terms, a second table gives what the terms change, seed by seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

from measuring import markdown_table, options_of, tell
from scipy.stats import binomtest, ttest_1samp

TRAINERS = ("ast_dpo", "ast_ipo", "ast_simpo", "ast_ppo", "ast_grpo", "ast_reinforce", "ast_sft")
NOVELTY = (
    "ast_chat.reward.terms=["
    "{_type: self_bleu_novelty, weight: 0.5}, {_type: cosine_novelty, weight: 0.5}]"
)
OF_FAILURES = NOVELTY.replace("weight: 0.5", "weight: 1.0, scaled_by_score: true, min_score: 0.5")
RARITY = "ast_chat.reward.terms=[{_type: failure_rarity, weight: 4.0}]"
WORDS = "ast_chat.reward.terms=[{_type: word_rarity, weight: 1.0}]"
SHARING = WORDS.replace("]", ", {_type: failure_sharing, weight: 4.0}]")
TERMS = {
    "novelty": NOVELTY,
    "novelty-of-failures": OF_FAILURES,
    "failure-rarity": RARITY,
    "word-rarity": WORDS,
    "sharing": SHARING,
}
VARIANTS: Mapping[str, tuple[str, tuple[str, ...]]] = (
    {
        f"{trainer}+{name}": (trainer, (terms,))
        for trainer in TRAINERS
        for name, terms in TERMS.items()
    }
    | {
        f"ast_grpo:{variant}": ("ast_grpo", (f"ast_grpo.variant={variant}",))
        for variant in ("dr_grpo", "dapo", "cispo", "rloo")
    }
    | {
        "ast_grpo:gspo": (
            "ast_grpo",
            # A small model with a large learning rate leaves the range of the paper in one step.
            ("ast_grpo.variant=gspo", "ast_grpo.clip_low=0.03", "ast_grpo.clip_high=0.04"),
        )
    }
)
"""Arms that are a trainer with other parameters than its preset's."""

Run = dict[str, Any]


def train(arm: str, seed: int, scenario: str | None, extra: Sequence[str], folder: Path) -> Run:
    """Train one arm with one seed, and give its figures."""
    trainer, overrides = VARIANTS.get(arm, (arm, ()))
    run_id = f"{arm.replace('+', '-').replace(':', '-')}-{seed}"
    command = [
        *(sys.executable, "-m", "nip_astra", "--trainer", trainer, "--seed", str(seed)),
        *("--runs-dir", str(folder), "--run-id", run_id, "--num-threads", "1"),
        *("--set", "ast_chat.evaluation.use_random_search=false"),
    ]
    command += ["--scenario", scenario] if scenario else []
    for override in [*overrides, *extra]:
        command += ["--set", override]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    return {"arm": arm, "seed": seed, "seconds": seconds, **figures_of(folder / run_id)}


def figures_of(run: Path) -> Run:
    """The figures of a finished run."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    before, after = results["before"], results["after"]
    return {
        "before": before["failure_rate"],
        "after": after["failure_rate"],
        "nll": after["probe_nll"],
        "distinct": after["distinct_share"],
        "plants": results["training"]["plants_found"],
        "held_out_plants": after["plants_found"],
        "target_queries": results["training"]["target_queries"],
        "generated_tokens": int(sum(row.get("tokens/generated", 0) for row in metrics)),
        "iterations": results["training"]["num_iterations"],
    }


def table(runs: Sequence[Run]) -> str:
    """One Markdown row an arm: means over seeds, failure rates as their range."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        of_arm = [run for run in runs if run["arm"] == arm]
        after = sorted(run["after"] for run in of_arm)
        rows.append(
            {
                "trainer": f"`{arm}`",
                "seeds": str(len(of_arm)),
                "failures before": f"{mean(run['before'] for run in of_arm):.1%}",
                "after": f"{median(after):.1%} ({after[0]:.1%} to {after[-1]:.1%})",
                "NLL": f"{mean(run['nll'] for run in of_arm):.2f}",
                "distinct": f"{mean(run['distinct'] or 0.0 for run in of_arm):.0%}",
                "plants found": ", ".join(str(run["plants"]) for run in of_arm),
                "held out": ", ".join(str(run["held_out_plants"]) for run in of_arm),
                "target queries": f"{median(run['target_queries'] for run in of_arm):,.0f}",
                "tokens": f"{median(run['generated_tokens'] for run in of_arm):,.0f}",
                "seconds": f"{median(run['seconds'] for run in of_arm):.0f}",
            }
        )
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def paired_table(runs: Sequence[Run]) -> str:
    """One row an arm with reward terms: what these change against the trainer without.

    Differences are taken within a seed. A cell holds their mean with its 95 % interval (Student's
    t over seeds); for plants also how many seeds found more, as many, and fewer, with the two-sided
    p-value of the sign test without ties.
    """
    known = {(run["arm"], run["seed"]): run for run in runs}
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        plain = arm.partition("+")[0]
        pairs = [
            (known[plain, seed], run)
            for (name, seed), run in known.items()
            if name == arm != plain and (plain, seed) in known
        ]
        if len(pairs) < 2:
            continue
        row = {"arm": f"`{arm}`", "seeds": str(len(pairs))}
        for title, name in {"training": "plants", "held out": "held_out_plants"}.items():
            plants = _changes(pairs, name)
            row[f"plants, {title}"] = _mean_interval(plants, "{:+.1f}")
            row[f"more, same, fewer, {title}"] = _signs(plants)
        row["failures"] = _mean_interval(_changes(pairs, "after"), "{:+.1%}")
        row["distinct"] = _mean_interval(_changes(pairs, "distinct"), "{:+.0%}")
        row["NLL"] = _mean_interval(_changes(pairs, "nll"), "{:+.2f}")
        rows.append(row)
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""


def _signs(differences: Sequence[float]) -> str:
    more, fewer = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    p_value = binomtest(more, more + fewer).pvalue if more + fewer else 1.0
    return f"{more}, {len(differences) - more - fewer}, {fewer} (p = {p_value:.3f})"


def _changes(pairs: Sequence[tuple[Run, Run]], name: str) -> list[float]:
    return [(new[name] or 0.0) - (old[name] or 0.0) for old, new in pairs]


def _mean_interval(differences: Sequence[float], pattern: str) -> str:
    centre = pattern.format(mean(differences))
    if len(set(differences)) == 1:
        # No spread is no certainty: there is no interval to give.
        return f"{centre} (each)"
    low, high = map(pattern.format, ttest_1samp(differences, 0.0).confidence_interval())
    return f"{centre} ({low} to {high})"


def main() -> None:
    """Train all arms and print the table."""
    options = options_of(
        __doc__,
        arms={"nargs": "+", "default": list(TRAINERS), "help": "trainers or variants"},
        seeds=[0, 1, 2],
        scenario={"help": "another scenario than the presets'"},
        set={"action": "append", "default": [], "dest": "overrides", "metavar": "A.B=C"},
        jobs={"type": int, "default": 2, "help": "runs at a time"},
    ).parse_args()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(train, arm, seed, options.scenario, options.overrides, Path(folder))
            for arm in options.arms
            for seed in options.seeds
        ]
        runs = [job.result() for job in waiting]
    tell(runs, options.out, shown=f"{table(runs)}\n{paired_table(runs)}")


if __name__ == "__main__":
    main()
