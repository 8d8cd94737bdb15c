"""How long the matrix products alone take of what `ast_speed.py` measured: the least there can be.

    python benchmarks/ast_speed.py --model smollm2 --precision fp32,bf16 --out ast_speed.json
    python benchmarks/ast_floor.py ast_speed.json

Times the products of a Llama with the shapes of SmolLM2-135M, each layer with weights of its own,
for the numbers of rows that each step of a rollout or an update has, or a step beside TRL's, by the
faster of torch and packed oneDNN. Attention, norms, sampling and adapters are left out. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ast_work import Setting
from measuring import markdown_table
from torch import Tensor

from nip_astra.language_models.tree_engine.kernels import (
    LinearMap,
    dense_linear,
    has_onednn,
    packed_linear,
)

NUM_LAYERS, VOCABULARY, WIDTH = 30, 49152, 576
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of a layer's joined matrices."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPETITIONS = 5


class Products:
    """The products of a forward pass in one precision.

    Parameters
    ----------
    kernel : Callable
        Gives a product with a matrix.
    """

    def __init__(self, dtype: torch.dtype, kernel: Callable[[Tensor, None], LinearMap]) -> None:
        self.dtype = dtype
        self._layers = [
            [(shape, kernel(torch.randn(shape, dtype=dtype) / 24, None)) for shape in LAYER]
            for _ in range(NUM_LAYERS)
        ]
        self._head = kernel(torch.randn(VOCABULARY, WIDTH, dtype=dtype) / 24, None)

    @torch.no_grad()
    def seconds(self, num_rows: int, num_head_rows: int) -> float:
        """The median time of a pass with so many rows, of which the head reads some."""
        rows = {size: torch.randn(num_rows, size, dtype=self.dtype) for size in (576, 1536)}
        times = []
        for _ in range(REPETITIONS + 1):
            started = time.perf_counter()
            for layer in self._layers:
                for (_, num_inputs), linear in layer:
                    linear(rows[num_inputs])
            for part in rows[576][:num_head_rows].split(256):
                self._head(part)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])


class Floor:
    """The least time of a pass, by the faster kernel."""

    def __init__(self, dtype: torch.dtype) -> None:
        can_pack = has_onednn(torch.device("cpu"), dtype)
        kernels = (packed_linear, dense_linear) if can_pack else (dense_linear,)
        self._ways = [Products(dtype, kernel) for kernel in kernels]
        self.seconds = cache(self._seconds)

    def _seconds(self, num_rows: int, num_head_rows: int) -> float:
        return min(way.seconds(num_rows, num_head_rows) for way in self._ways) if num_rows else 0.0

    def of_turns(self, setting: Setting, role: str, work: Mapping[str, int]) -> float:
        """The floor of one model's share of a rollout.

        Each level reads what is new of all contexts in one pass, then decodes one token a row and
        step; the last token of a turn is not read.
        """
        num_tokens = setting.turn_tokens_of(role)
        levels = [setting.episodes * setting.width**level for level in range(1, setting.depth + 1)]
        read = work["forwarded"] - (num_tokens - 1) * sum(levels)
        scored = work["head_rows"] - num_tokens * sum(levels)
        decoding = sum((num_tokens - 1) * self.seconds(rows, rows) for rows in levels)
        reading = sum(
            self.seconds(read * rows // sum(levels), scored * rows // sum(levels) + rows)
            for rows in levels
        )
        return decoding + reading

    def of_update(self, work: Mapping[str, int]) -> float:
        """The floor of a pass with its derivatives in what is read, weights being frozen."""
        return 2 * self.seconds(work["forwarded"], work["head_rows"])

    def of_learning(self, iteration: Mapping[str, Any]) -> float:
        """The floor of an iteration's steps, and of the reference's pass before them."""
        reference, steps = iteration["work"]["reference"], iteration["num_steps"]
        attacker = iteration["work_of_updates"]["attacker"]
        of_step = {name: attacker[name] // steps for name in ("forwarded", "head_rows")}
        read = self.seconds(reference["forwarded"], reference["head_rows"])
        return read + steps * self.of_update(of_step)

    def of_online_dpo(self, step: Mapping[str, Any], target: Floor) -> float:
        """The floor of a step beside TRL's: two samples a prompt, rated, read and learnt from.

        Parameters
        ----------
        target : Floor
            Of the model that reads the samples; what it says is one token.
        """
        prompts = step["num_prompts"] * step["prompt_tokens"]
        num_rows, said = 2 * step["num_prompts"], 2 * step["num_prompts"] * step["new_tokens"]
        sampling = self.seconds(prompts, step["num_prompts"])
        sampling += (step["new_tokens"] - 1) * self.seconds(num_rows, num_rows)
        # The reference reads what was said once, the update is two passes over it.
        learning = 3 * self.seconds(prompts + said, said)
        return sampling + learning + target.seconds(prompts + said, said + num_rows)


def rows_of(measured: Mapping[str, Any], floors: Mapping[str, Floor]) -> list[list[object]]:
    """A row of the table for each part of a setting that was measured.

    Where rollouts were not measured by themselves, those within iterations stand for them.
    """
    setting = Setting(**{name: measured["setting"][name] for name in _names_of_setting(measured)})
    if setting.model != "smollm2":
        raise SystemExit(
            f"{setting.model} was measured, but only the products of smollm2 are known."
        )
    parts = measured["parts"]
    measured_as = {"rollout": "rollout" if "rollout" in parts else "iteration", "update": "update"}
    found: list[list[object]] = []
    least: dict[tuple[str, str], float] = {}
    for part, name in measured_as.items():
        ways = parts.get(name, {})
        for precision in [precision for precision in DTYPES if precision in ways]:
            work, floor = ways[precision]["work"], floors[precision]
            if part == "update":
                seconds = floor.of_update(work["attacker"])
            else:
                # The target, which is under test, stays in float32.
                seconds = floor.of_turns(setting, "attacker", work["attacker"])
                seconds += floors["fp32"].of_turns(setting, "target", work["target"])
            least[part, precision] = seconds
            plain, ours = (ways[way]["phases"][part] for way in ("plain", precision))
            found.append(_row(part, precision, plain, ours, seconds))
    for precision, way in parts.get("iteration", {}).items():
        if precision in DTYPES:
            seconds = least["rollout", precision] + floors[precision].of_learning(way)
            plain, ours = (
                sum(parts["iteration"][one]["phases"][part] for part in ("rollout", "update"))
                for one in ("plain", precision)
            )
            found.append(_row("iteration", precision, plain, ours, seconds))
    return found


def _row(part: str, precision: str, plain: float, ours: float, least: float) -> list[object]:
    return [part, precision, plain, ours, least, plain / ours, plain / least, least / ours]


def _names_of_setting(measured: Mapping[str, Any]) -> list[str]:
    return [name for name in Setting.__dataclass_fields__ if name in measured["setting"]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measured", type=Path, help="JSON of ast_speed.py, with rollout or update")
    options = parser.parse_args()
    torch.manual_seed(0)
    document = json.loads(options.measured.read_text(encoding="utf-8"))
    settings = document["settings"]
    header = ["part", "precision", "plain, s", "ours, s", "products, s", "ratio", "most", "share"]
    for measured in settings:
        torch.set_num_threads(measured["setting"]["num_threads"])
        floors = {name: Floor(dtype) for name, dtype in DTYPES.items()}
        print(f"\n{measured['label']}\n")
        print(markdown_table(header, rows_of(measured, floors)))
    for step in document.get("trl", ()):
        torch.set_num_threads(document["environment"]["num_threads"])
        floors = {name: Floor(dtype) for name, dtype in DTYPES.items()}
        least = floors[step["precision"]].of_online_dpo(step, floors["fp32"])
        row = _row("step", step["precision"], step["trl_seconds"], step["our_seconds"], least)
        print("\nTRL's OnlineDPO\n")
        print(markdown_table([*header[:2], "TRL, s", *header[3:]], [row]))


if __name__ == "__main__":
    main()
