"""How much faster conversations are played and learned from than in the plain way.

    python benchmarks/ast_speed.py --model tiny --parts rollout,update,iteration
    python benchmarks/ast_speed.py --model smollm2 --precision fp32,bf16 --memory

The plain way (`plain_ast.py`) and ours do the same work in turns: the same opening prompts, chat
formats, tree and turns of one length. Before updates are timed, loss and gradients of both are
compared on the same pairs. Writes JSON, and Markdown with the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import trl_online_dpo
from ast_contest import (
    PARTS,
    PLAIN,
    Effort,
    Figures,
    measure,
    measure_memory,
)
from ast_report import markdown, ratios
from ast_work import Setting
from measuring import shown_command
from our_ast import PRECISIONS

from nip_astra.tracking.environment import describe_environment

_NUM_THREADS = torch.get_num_threads()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = _parser().parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(options.seed)
    if options.memory_of is not None:
        _limit_threads(options, _setting(options).model)
        overrides = [*PRECISIONS[_only(options.precision)], *options.override]
        figures = measure_memory(_setting(options), options.memory_of, overrides)
        print(json.dumps(figures))
        return
    Measurement(options, shown_command("ast_speed.py", arguments)).run()


@dataclass
class Measurement:
    """One call of this script: what was measured so far, written after each setting."""

    options: argparse.Namespace
    command: str
    settings: list[Figures] = field(default_factory=list)
    memory: list[Figures] = field(default_factory=list)
    trl: list[Figures] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Measure all that was asked for."""
        options = self.options
        setting = _setting(options)
        _limit_threads(options, setting.model)
        self._measure(setting)
        if options.memory:
            self._measure_memory(setting)
        if options.trl:
            self._measure_trl(setting)
        self._write()
        print(f"written to {options.out} and {options.markdown}")

    def _variants(self) -> dict[str, list[str]]:
        return {
            name: [*PRECISIONS[name], *self.options.override] for name in self.options.precision
        }

    def _measure(self, setting: Setting) -> None:
        parts = [part for part in PARTS if part in self.options.parts]
        if not parts:
            return
        record = measure(setting, self._variants(), _effort(self.options), parts)
        self.settings.append(record)
        for row in ratios(record):
            print(
                f"{setting.label}, ours in {row['precision']}: {row['part']} "
                f"{row['plain_seconds']:.3g} s against {row['our_seconds']:.3g} s, "
                f"{row['ratio']:.1f}x",
                flush=True,
            )
        self._write()

    def _measure_memory(self, setting: Setting) -> None:
        """Let each way run one iteration in a process of its own."""
        ways = {}
        for who, precision in [(PLAIN, "fp32"), *((name, name) for name in self._variants())]:
            child = [sys.executable, __file__, *_as_arguments(setting), "--memory-of", who]
            child += ["--precision", precision, "--override", *self.options.override]
            child += ["--threads", str(torch.get_num_threads())]
            paths = os.pathsep.join(path for path in sys.path if path)
            done = subprocess.run(
                child,
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"PYTHONPATH": paths},
            )
            if done.returncode:
                raise SystemExit(f"memory of {who} could not be measured:\n{done.stderr}")
            ways[who] = json.loads(done.stdout.splitlines()[-1])
            print(f"{setting.label}: {who} holds at most {ways[who]['peak'] / 2**20:,.0f} MiB")
        self.memory.append({"label": setting.label, "ways": ways})
        self._write()

    def _measure_trl(self, measured: Setting) -> None:
        if not trl_online_dpo.is_available():
            self.skipped.append(trl_online_dpo.INSTALL_HINT)
            print(trl_online_dpo.INSTALL_HINT, file=sys.stderr)
            return
        work = (measured.model, measured.mode, measured.device, measured.context)
        for precision in self.options.precision:
            if precision == "auto":
                self.skipped.append("TRL beside --precision auto: say fp32 or bf16")
                continue
            setting = trl_online_dpo.setting_of(*work)
            _limit_threads(self.options, setting.model)
            row = trl_online_dpo.measure_beside_trl(setting, precision, self.options.repeats)
            self.trl.append(row)
            print(f"TRL OnlineDPO, {setting.model}, {precision}: {row['ratio']:.1f}x", flush=True)
            self._write()

    def _write(self) -> None:
        report = {
            "command": self.command,
            "environment": describe_environment(),
            "settings": self.settings,
            "ratios": [row for record in self.settings for row in ratios(record)],
            "memory": self.memory,
            "trl": self.trl,
            "skipped": self.skipped,
        }
        self.options.out.write_text(json.dumps(report, indent=2) + "\n")
        self.options.markdown.write_text(markdown(report))


# ---- options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    work = parser.add_argument_group("work")
    work.add_argument("--model", default="tiny", help="tiny, smollm2, or a model's path")
    work.add_argument("--width", type=int, default=2, help="siblings in the tree")
    work.add_argument("--depth", type=int, default=3, help="levels of the tree")
    work.add_argument("--episodes", type=int, default=2, help="trees")
    work.add_argument("--context", type=int, default=64, help="tokens of an opening prompt")
    work.add_argument("--turn-tokens", type=int, default=32, help="tokens of every turn")
    work.add_argument("--mode", default="lora", choices=["lora", "full"], help="what learns")
    work.add_argument("--pairs", type=int, default=4, help="pairs in one step of ours")
    work.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    work.add_argument("--threads", type=int, help="CPU threads; 1 for tiny, else all cores")
    work.add_argument("--seed", type=int, default=0)
    ours = parser.add_argument_group("ours")
    ours.add_argument(
        "--precision", type=_precisions, default=["fp32"], help="some of fp32,bf16,auto"
    )
    ours.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE")
    measured = parser.add_argument_group("what is measured")
    measured.add_argument("--parts", type=_part_names, default=list(PARTS), help="or none")
    measured.add_argument("--repeats", type=int, default=5, help="timed runs of ours")
    measured.add_argument("--plain-repeats", type=int, default=1, help="of the plain way")
    measured.add_argument("--plain-episodes", type=int, help="play fewer, and scale its time")
    measured.add_argument("--memory", action="store_true", help="peak memory of both ways too")
    measured.add_argument("--trl", action="store_true", help="TRL's OnlineDPO beside ours")
    measured.add_argument("--out", type=Path, default=Path("ast_speed.json"))
    measured.add_argument("--markdown", type=Path, default=Path("ast_speed.md"))
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser


def _precisions(text: str) -> list[str]:
    return _names(text, list(PRECISIONS))


def _part_names(text: str) -> list[str]:
    return [] if text == "none" else _names(text, list(PARTS))


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {unknown[0]!r}. Known: {', '.join(known)}")
    return names


def _only(names: Sequence[str]) -> str:
    (name,) = names
    return name


def _setting(options: argparse.Namespace) -> Setting:
    names = ("model", "width", "depth", "episodes", "context", "mode", "device", "seed")
    chosen: Mapping[str, Any] = {name: getattr(options, name) for name in names}
    return Setting(**chosen, turn_tokens=options.turn_tokens, num_pairs=options.pairs)


def _as_arguments(setting: Setting) -> list[str]:
    names = ("model", "width", "depth", "episodes", "context", "mode", "device", "seed")
    found = [word for name in names for word in (f"--{name}", str(getattr(setting, name)))]
    return [*found, "--turn-tokens", str(setting.turn_tokens), "--pairs", str(setting.num_pairs)]


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(options.repeats, options.plain_repeats, options.plain_episodes)


def _limit_threads(options: argparse.Namespace, model: str) -> None:
    """Both ways the same threads; waking a second one costs more than a tiny model does."""
    torch.set_num_threads(options.threads or (1 if model == "tiny" else _NUM_THREADS))


if __name__ == "__main__":
    main()
