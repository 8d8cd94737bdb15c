"""Files that a reader opens from a trainer's hook to its result.

Each journey makes a short run and traces one call of a hook. A file of the package counts if one
of its functions is executed, or if it defines the type of an argument or of a result. The forward
pass is left out with all that it calls.

    python benchmarks/files_read.py --out files.json
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from measuring import build_parser, markdown_table, report_figures

import nip_astra as na


@dataclass(frozen=True)
class Journey:
    """A hook to trace in a run of a trainer."""

    name: str
    trainer: str
    hook: str
    """Module, and name of a function or method in it."""
    left_out: tuple[str, ...] = ()
    """Names of functions that are left out with all that they call."""


JOURNEYS = (
    Journey(
        "loss of ast_grpo",
        "ast_grpo",
        "nip_astra.trainers.ast.grpo:AstGrpoTrainer.loss",
        ("policy_scores",),
    ),
    Journey(
        "loss of self_hosted_grpo",
        "self_hosted_grpo",
        "nip_astra.trainers.service.self_hosted:SelfHostedTrainer.loss",
        ("policy_logprobs",),
    ),
    Journey(
        "loss of vanilla_ppo",
        "vanilla_ppo",
        "nip_astra.rl_objectives.ippo:IppoObjective._policy_entries",
        # The agents' networks.
        ("policy", "evaluate", "values", "policy_and_values", "is_acting"),
    ),
    Journey(
        "content of a checkpoint",
        "self_hosted_grpo",
        "nip_astra.trainers.trainer_base:Trainer._save_checkpoint",
    ),
)


@dataclass
class FileTracer:
    """Collects the package's files behind the first call of a function."""

    package_dir: Path
    left_out: Sequence[str]
    files: set[str] = field(default_factory=set)
    is_done: bool = False
    _hidden_depth: int = 0

    def wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the hook, and traces its first call."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_done:
                return hook(*args, **kwargs)
            self.is_done = True
            sys.setprofile(self._on_event)
            try:
                return hook(*args, **kwargs)
            finally:
                sys.setprofile(None)

        return call

    def _on_event(self, frame: FrameType, event: str, result: object) -> None:
        if event not in ("call", "return"):
            return
        is_hook = not self.files
        is_left_out = frame.f_code.co_name in self.left_out and not is_hook
        if event == "return" and is_left_out:
            self._hidden_depth -= 1
        if self._hidden_depth == 0 and not is_left_out:
            self._count(frame, event, result)
        if event == "call" and is_left_out:
            self._hidden_depth += 1

    def _count(self, frame: FrameType, event: str, result: object) -> None:
        """Count the file of a frame of the package, and those of its values' types."""
        file = Path(frame.f_code.co_filename)
        if not file.is_relative_to(self.package_dir):
            return
        self.files.add(file.relative_to(self.package_dir).as_posix())
        if event == "return":
            values = [result]
        else:
            num_arguments = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            names = frame.f_code.co_varnames[:num_arguments]
            values = [frame.f_locals[name] for name in names if name in frame.f_locals]
        for value in values:
            self._count_type(type(value))

    def _count_type(self, value_type: type) -> None:
        module = sys.modules.get(value_type.__module__)
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_relative_to(self.package_dir):
            self.files.add(Path(file).relative_to(self.package_dir).as_posix())


def trace_journey(journey: Journey) -> list[str]:
    """Return the files of a journey, sorted."""
    module_name, _, path = journey.hook.partition(":")
    *owner_names, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for owner_name in owner_names:
        owner = getattr(owner, owner_name)
    hook = getattr(owner, name)
    tracer = FileTracer(Path(na.__file__).parent, journey.left_out)
    setattr(owner, name, tracer.wrap(hook))
    try:
        with tempfile.TemporaryDirectory() as runs_dir:
            na.run_experiment(
                trainer=journey.trainer,
                runs_dir=runs_dir,
                run_id="traced",
                test_run=True,
                progress=False,
                num_threads=1,
            )
    finally:
        setattr(owner, name, hook)
    if not tracer.is_done:
        raise RuntimeError(f"{journey.trainer} did not call {journey.hook}")
    return sorted(tracer.files)


def main() -> None:
    """Trace the chosen journeys and print their files."""
    options = build_parser(__doc__, journeys=[journey.name for journey in JOURNEYS]).parse_args()
    files_by_name = {
        journey.name: trace_journey(journey)
        for journey in JOURNEYS
        if journey.name in options.journeys
    }
    rows = [(name, len(files), ", ".join(files)) for name, files in files_by_name.items()]
    table = markdown_table(("journey", "files", "which"), rows)
    report_figures(files_by_name, options.out, shown=table)


if __name__ == "__main__":
    main()
