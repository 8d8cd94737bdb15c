"""Results of learning and their thresholds: asserted in tests, and tabulated over seeds.

`python -m tests.kit.learning` runs every test with the fixture `learning`, or those of the given
files, with ten seeds on an emulated processor without vector units and with three seeds on others,
and prints for each result how far the worst seed is from the threshold to the best possible value.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

MIN_MARGIN = 0.25
"""Minimum distance of the worst seed from the threshold, as a share of that to the best value."""


@dataclass(frozen=True)
class Learned:
    """A result of a test; it may be better when larger or when smaller."""

    test: str
    seed: int
    value: float
    threshold: float
    best: float

    @property
    def margin(self) -> float:
        """0 at the threshold, 1 at the best possible value."""
        return (self.value - self.threshold) / (self.best - self.threshold)


class Learning:
    """The seed of a learning test, and the check of its results.

    Parameters
    ----------
    test : str
        Name of the test, with its parameters.
    seed : int
        Root seed of the test's experiment.
    margins_path : Path, optional
        File to which results are appended instead of being asserted.
    """

    def __init__(self, test: str, seed: int, margins_path: Path | None = None) -> None:
        self.test = test
        self.seed = seed
        self._margins_path = margins_path

    def check(self, value: float, *, threshold: float, best: float) -> None:
        """Assert that a result is beyond its threshold, on the side of the best possible value."""
        learned = Learned(self.test, self.seed, float(value), threshold, best)
        if self._margins_path is None:
            assert learned.margin > 0, learned
            return
        with self._margins_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(learned)) + "\n")


class Setting(NamedTuple):
    """An emulated processor, with a number of threads and of seeds."""

    num_seeds: int
    num_threads: int = 1
    onednn: str | None = None
    """`ONEDNN_MAX_CPU_ISA`."""
    aten: str | None = None
    """`ATEN_CPU_CAPABILITY`."""
    gains_from_bfloat16: bool | None = None
    """Answer of `sources.gains_from_bfloat16`; its own by default."""

    def __str__(self) -> str:
        bfloat16 = {None: "", True: ", bfloat16", False: ", no bfloat16"}[self.gains_from_bfloat16]
        return (
            f"oneDNN {self.onednn or 'all'}, ATen {self.aten or 'all'}, "
            f"{self.num_threads} threads{bfloat16}"
        )

    def options(self, margins_path: Path) -> list[str]:
        """Return options of pytest."""
        options = [f"--margins={margins_path}", f"--seeds={self.num_seeds}"]
        options.append(f"--threads={self.num_threads}")
        if self.gains_from_bfloat16 is not None:
            options.append(f"--bfloat16={'yes' if self.gains_from_bfloat16 else 'no'}")
        return options

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the emulated processor."""
        variables = {"ONEDNN_MAX_CPU_ISA": self.onednn, "ATEN_CPU_CAPABILITY": self.aten}
        return {name: value for name, value in variables.items() if value is not None}


WEAKEST = Setting(10, onednn="SSE41", aten="default", gains_from_bfloat16=False)
OTHERS = (
    Setting(3),
    Setting(3, num_threads=2),
    *(
        Setting(3, num_threads, onednn, aten, False)
        for onednn, aten in (("AVX2", "avx2"), ("AVX512_CORE", "avx512"), ("SSE41", "default"))
        for num_threads in (1, 2)
    ),
)


def measure(setting: Setting, arguments: Sequence[str]) -> list[Learned]:
    """Run the learning tests in a new process.

    Parameters
    ----------
    arguments : sequence of str
        Further arguments of pytest, such as files.
    """
    with tempfile.TemporaryDirectory() as folder:
        margins_path = Path(folder) / "margins.jsonl"
        margins_path.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n0", *setting.options(margins_path)]
        environment = os.environ | setting.environment()
        subprocess.run([*command, *arguments], env=environment, check=False)
        lines = margins_path.read_text(encoding="utf-8").splitlines()
    return [Learned(**json.loads(line)) for line in lines]


def table(results: Iterable[Learned]) -> list[str]:
    """Return a line for each result: margin, worst value, threshold, best possible value, test."""
    by_check: dict[tuple[str, float, float], list[Learned]] = defaultdict(list)
    for learned in results:
        by_check[learned.test, learned.threshold, learned.best].append(learned)
    lines = []
    for (test, threshold, best), group in by_check.items():
        worst = min(group, key=lambda learned: learned.margin)
        mark = "" if worst.margin >= MIN_MARGIN else "  <-- too close"
        lines.append(
            f"{worst.margin:6.2f}  {worst.value:.3f} (seed {worst.seed} of {len(group)})  "
            f"{threshold:.3f}  {best:.3f}  {test}{mark}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weakest", action="store_true", help="only the weakest setting")
    parser.add_argument("arguments", nargs="*", help="files and options of pytest")
    options = parser.parse_args()
    for setting in (WEAKEST,) if options.weakest else (WEAKEST, *OTHERS):
        results = measure(setting, options.arguments or ["tests"])
        print(f"\n{setting}: margin, worst value, threshold, best possible value", flush=True)
        print("\n".join(table(results)), flush=True)


if __name__ == "__main__":
    main()
