"""Open files and memory of a process over the iterations of a run, for trainers of every family.

    python benchmarks/growth.py --iterations 500 --out growth.json
    python benchmarks/growth.py --trainers vanilla_ppo --set rl.frames_per_batch=512

Each run is a process of its own with one thread, on the trainer's preset with small iterations. A
tracker counts open files, threads and resident memory at each line of metrics. Growth is the slope
over the second half of the run, in which caches are full. `--set` changes parameters of the
trainers that are measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import build_parser, markdown_table, report_figures

from nip_astra.run import run_experiment
from nip_astra.tracking.tracker import Tracker, register_tracker

HERE = Path(__file__).resolve()
RUN_HERE = "--run-here"
"""First argument of the process that is measured."""
CONVERSATIONS = (
    "training.num_iterations={iterations}",
    "training.num_episodes_per_experience=2",
    "training.eval_period=100",
    "ast_chat.evaluation.use_random_search=false",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.num_dev_episodes=2",
)
TASKS = (
    "training.num_iterations={iterations}",
    "training.num_episodes_per_experience=4",
    "training.minibatch_size=8",
    "training.eval_period=100",
    "task.evaluation.num_problems=4",
    "task.evaluation.num_dev_problems=4",
)
TEXTS = (
    "text_rl.num_iterations={iterations}",
    "text_rl.rollouts_per_iteration=4",
    "text_rl.min_fine_tune_examples=1",
    "text_rl.num_fine_tune_epochs=1",
    "secret_word.num_test=4",
)
PROTOCOLS = ("rl.num_iterations={iterations}", "rl.num_test_iterations=1")
FAMILIES: Mapping[str, Sequence[str]] = {
    "ast_dpo": CONVERSATIONS,
    "ast_ppo": CONVERSATIONS,
    "self_hosted_grpo": TASKS,
    "remote_api_grpo": TASKS,
    "vanilla_ppo": PROTOCOLS,
    "solo_agent": ("solo_agent.num_epochs={iterations}",),
    "pure_text_ei": TEXTS,
    "pure_text_malt": TEXTS,
}
"""Overrides of a preset by trainer."""


@register_tracker("growth")
class GrowthTracker(Tracker):
    """Appends open files, threads and memory of this process to `growth.jsonl`."""

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        assert self.run_directory is not None
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        counted = {
            "step": step,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mib": int(resident.split()[1]) / 1024,
        }
        with (self.run_directory.path / "growth.jsonl").open("a") as file:
            file.write(f"{json.dumps(counted)}\n")


def run_here(trainer: str, num_iterations: int, runs_dir: str, overrides: Sequence[str]) -> None:
    """Run a trainer in this process."""
    family = [override.format(iterations=num_iterations) for override in FAMILIES[trainer]]
    run_experiment(
        trainer=trainer,
        overrides=[*family, *overrides],
        trackers=["growth"],
        runs_dir=runs_dir,
        run_id=trainer,
        num_threads=1,
        progress=False,
    )


def measure(trainer: str, num_iterations: int, overrides: Sequence[str]) -> dict[str, float]:
    """Run a trainer in a process of its own; return its growth."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(HERE), RUN_HERE, trainer, folder, str(num_iterations), *overrides],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = (Path(folder) / trainer / "growth.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    settled = rows[len(rows) // 2 :]
    steps = [row["step"] for row in settled]
    figures: dict[str, float] = {"num_lines": len(rows)}
    for name in ("files", "threads", "mib"):
        values = [row[name] for row in settled]
        slope = np.polyfit(steps, values, 1)[0] if len(set(steps)) > 1 else 0.0
        figures |= {
            f"{name}_first": rows[0][name],
            f"{name}_middle": values[0],
            f"{name}_last": values[-1],
            f"{name}_per_100": float(slope) * 100,
        }
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Measure each trainer and print a table."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [RUN_HERE]:
        _, trainer, runs_dir, num_iterations, *overrides = arguments
        run_here(trainer, int(num_iterations), runs_dir, overrides)
        return
    parser = build_parser(
        __doc__,
        iterations=500,
        trainers=list(FAMILIES),
        set={"action": "append", "default": [], "metavar": "NAME=VALUE"},
    )
    options = parser.parse_args(arguments)
    figures = {
        trainer: measure(trainer, options.iterations, options.set) for trainer in options.trainers
    }
    rows = []
    for trainer, growth in figures.items():
        levels = [
            " / ".join(f"{growth[f'{name}_{when}']:.0f}" for when in ("first", "middle", "last"))
            for name in ("files", "threads", "mib")
        ]
        slopes = [f"{growth['files_per_100']:+.2f}", f"{growth['mib_per_100']:+.2f}"]
        rows.append([trainer, *levels, *slopes])
    heads = ["trainer", "files", "threads", "MiB", "files per 100", "MiB per 100"]
    report_figures(figures, options.out, shown=markdown_table(heads, rows))


if __name__ == "__main__":
    main()
