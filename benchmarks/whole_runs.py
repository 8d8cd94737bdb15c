"""CPU time by layer of whole runs of two checkouts, in interleaved rounds.

    python benchmarks/whole_runs.py --base ../base --rounds 5
    python benchmarks/whole_runs.py --base ../base --rounds 3 --trainer pure_text_ei

Each run is a separate process with one thread; the user and system time of all its threads counts.
The metrics of each round are compared.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from golden import drop_times
from measuring import (
    build_parser,
    interleaved,
    markdown_table,
    median_by_name,
    ratio,
    report_figures,
)

HERE = Path(__file__).resolve()
TREE = HERE.parents[1]
START, REST = "start", "rest"
LAYERS = {
    "_run_before_loop": "evaluation",
    "_run_test_loop": "evaluation",
    "_run_random_search_loop": "random search",
    "_collect": "rollouts of training",
    "_update": "updates",
    "_play": "rollouts",
    "_keep": "files of rollouts",
    "keep": "files of rollouts",
    "_stage_await_fine_tune_jobs": "fine-tuning",
}
"""Layer of each timed method of trainers and of their files; older checkouts have `_keep`."""


def run_and_measure(words: list[str], out: Path) -> None:
    """Run the program in this process, and write the CPU seconds by layer."""
    spent: dict[str, float] = {}
    last = 0.0
    layer = START

    def enter(next_layer: str) -> str:
        """Charge the time so far to the current layer, enter the next, and return the previous."""
        nonlocal last, layer
        now = time.process_time()
        spent[layer] = spent.get(layer, 0.0) + now - last
        before, last, layer = layer, now, next_layer
        return before

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                enter(before)

        return call

    import nip_astra.run as runner

    train, write_report = runner._train, runner._write_report

    def begin(trainer: Any, *args: Any) -> Any:
        files = getattr(trainer, "files", None)
        for owner in (*type(trainer).__mro__, *type(files).__mro__):
            for name in LAYERS.keys() & vars(owner).keys():
                setattr(owner, name, timed(vars(owner)[name], LAYERS[name]))
        enter(REST)
        return train(trainer, *args)

    patched: Any = runner
    patched._train, patched._write_report = begin, timed(write_report, "report")
    sys.argv = ["run.py", *words]
    try:
        runpy.run_path("run.py", run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    enter(REST)
    out.write_text(json.dumps(spent))


def measure_run(checkout: Path, words: list[str]) -> dict[str, Any]:
    """CPU seconds by layer and metrics of a run of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "spent.json"
        options = ["--num-threads", "1", "--runs-dir", folder, "--run-id", "run"]
        paths = os.pathsep.join([str(checkout.resolve()), str(HERE.parent)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, str(HERE), "--measure", str(out), "--words", *words, *options],
            cwd=checkout,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        spent: dict[str, float] = json.loads(out.read_text())
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = drop_times([json.loads(line) for line in lines])
    return {"spent": spent | {"whole": sum(spent.values())}, "metrics": metrics}


def main() -> int:
    """Measure both checkouts, and compare their metrics."""
    parser = build_parser(
        __doc__,
        base=TREE,
        tree=TREE,
        trainer="ast_dpo",
        rounds=5,
        measure={"type": Path, "help": "internal: output file"},
        words={"nargs": "...", "default": [], "help": "internal"},
    )
    options = parser.parse_args()
    if options.measure:
        run_and_measure(options.words, options.measure)
        return 0
    words = ["--trainer", options.trainer]
    checkouts = {"base": options.base, "tree": options.tree}
    variants = {name: partial(measure_run, checkout, words) for name, checkout in checkouts.items()}
    runs = interleaved(variants, options.rounds)
    spent = {name: [run["spent"] for run in rounds] for name, rounds in runs.items()}
    medians = {name: median_by_name(rounds) for name, rounds in spent.items()}
    rows = [[layer, medians["base"][layer], medians["tree"][layer]] for layer in medians["tree"]]
    report_figures(spent, options.out, shown=markdown_table(["CPU, s", "base", "tree"], rows))
    whole = [[layers["whole"] for layers in spent[name]] for name in ("tree", "base")]
    is_equal = all(a["metrics"] == b["metrics"] for a, b in zip(*runs.values(), strict=True))
    print(f"ratio {ratio(*whole):.3f}; metrics {'equal' if is_equal else 'different'}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
