"""Compare the AST trainers on one scenario, over several seeds.

    python benchmarks/trainers.py --seeds 0 1 2 --out trainers.json
    python benchmarks/trainers.py --arms ast_ppo ast_ppo+failure-rarity

Trains every arm with every seed, each in a separate process with one thread, and prints a Markdown
table: held-out failure rate before and after, likelihood and diversity of failing probes, planted
failures found in training and by the trained attacker on held-out prompts, and costs. An arm is a
trainer with its preset, or one of `VARIANTS`. If a trainer runs with and without reward terms, a
second table has the paired differences over seeds.
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

from measuring import build_parser, markdown_table, report_figures
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
            # A small model with a large learning rate leaves the paper's clip range in one step.
            ("ast_grpo.variant=gspo", "ast_grpo.clip_low=0.03", "ast_grpo.clip_high=0.04"),
        )
    }
)
"""Arms with a trainer and overrides of its preset."""

Run = dict[str, Any]


def train(arm: str, seed: int, scenario: str | None, extra: Sequence[str], folder: Path) -> Run:
    """Train one arm with one seed, and return its figures."""
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
    return {"arm": arm, "seed": seed, "seconds": seconds, **read_figures(folder / run_id)}


def read_figures(run: Path) -> Run:
    """Read the figures of a finished run."""
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
    """One Markdown row per arm: mean or median over seeds, and the range of failure rates."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        arm_runs = [run for run in runs if run["arm"] == arm]
        after = sorted(run["after"] for run in arm_runs)
        rows.append(
            {
                "trainer": f"`{arm}`",
                "seeds": str(len(arm_runs)),
                "failures before": f"{mean(run['before'] for run in arm_runs):.1%}",
                "after": f"{median(after):.1%} ({after[0]:.1%} to {after[-1]:.1%})",
                "NLL": f"{mean(run['nll'] for run in arm_runs):.2f}",
                "distinct": f"{mean(run['distinct'] or 0.0 for run in arm_runs):.0%}",
                "plants found": ", ".join(str(run["plants"]) for run in arm_runs),
                "held out": ", ".join(str(run["held_out_plants"]) for run in arm_runs),
                "target queries": f"{median(run['target_queries'] for run in arm_runs):,.0f}",
                "tokens": f"{median(run['generated_tokens'] for run in arm_runs):,.0f}",
                "seconds": f"{median(run['seconds'] for run in arm_runs):.0f}",
            }
        )
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def paired_table(runs: Sequence[Run]) -> str:
    """One row per arm with reward terms: paired differences from the trainer without terms.

    A cell has the mean difference over seeds with its 95 % interval (Student's t); for planted
    failures also the number of seeds that found more, as many, and fewer, with the two-sided
    p-value of the sign test without ties.
    """
    by_arm_and_seed = {(run["arm"], run["seed"]): run for run in runs}
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        plain = arm.partition("+")[0]
        pairs = [
            (by_arm_and_seed[plain, seed], run)
            for (name, seed), run in by_arm_and_seed.items()
            if name == arm != plain and (plain, seed) in by_arm_and_seed
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
        # Without spread there is no t interval.
        return f"{centre} (each)"
    low, high = map(pattern.format, ttest_1samp(differences, 0.0).confidence_interval())
    return f"{centre} ({low} to {high})"


def main() -> None:
    """Train all arms, and print the tables."""
    options = build_parser(
        __doc__,
        arms={"nargs": "+", "default": list(TRAINERS), "help": "trainers or variants"},
        seeds=[0, 1, 2],
        scenario={"help": "scenario to use instead of the presets'"},
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
    report_figures(runs, options.out, shown=f"{table(runs)}\n{paired_table(runs)}")


if __name__ == "__main__":
    main()
