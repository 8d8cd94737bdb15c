"""A run of tiny models, and the contents of its evaluations."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from nip_astra.cli.app import main

SMALL = (
    "training.num_iterations=2",
    "ast_chat.evaluation.use_random_search=false",
    # About half of a random target's replies fail here.
    "ast_chat.failure_threshold=0.5",
)


def figures_of(run: Path, name: str = "test") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluations" / name / "evaluation.json").read_text())
    return found


def copy_evaluated(trained: Path, folder: Path, *options: str) -> Path:
    """The folder of a copy of the run after `nip-astra evaluate runs/one` with these options."""
    shutil.copytree(trained, folder / "runs" / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["nip-astra", "evaluate", "runs/one", *options])
        silence = io.StringIO()
        with redirect_stdout(silence), redirect_stderr(silence), pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return folder / "runs" / "one"
