"""ASTRA-RL's commands `train` and `evaluate`, as ours with their options."""

from __future__ import annotations

from pathlib import Path

import typer

from nip_astra.cli.app import app as our_app
from nip_astra.errors import RunDirectoryError
from nip_astra.tracking.run_directory import RESULTS

TRAINER = "ast_dpo"
"""Trainer of `train` if its options name none."""
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that are passed on."""
app = typer.Typer(help="Train and evaluate attackers.")


@app.command(context_settings=FORWARDED)
def train(context: typer.Context) -> None:
    """Train an attacker; options are those of `nip-astra run`, by default --trainer ast_dpo."""
    typer.echo("Training model...")
    names_trainer = any(option.split("=")[0] in ("-t", "--trainer") for option in context.args)
    trainer = [] if names_trainer else ["--trainer", TRAINER]
    _forward("run", *trainer, *context.args)


@app.command(context_settings=FORWARDED)
def evaluate(context: typer.Context) -> None:
    """Evaluate a run; options are those of `nip-astra evaluate`, by default of the newest run."""
    typer.echo("Evaluating model...")
    names_run = bool(context.args) and not context.args[0].startswith("-")
    _forward("evaluate", *([] if names_run else [str(newest_run())]), *context.args)


def newest_run(runs_dir: Path = Path("runs")) -> Path:
    """Return the folder of the run that ended last.

    Raises
    ------
    RunDirectoryError
        If none has ended.
    """
    ended = [path.parent for path in runs_dir.glob(f"*/{RESULTS}")]
    if not ended:
        raise RunDirectoryError(f"{runs_dir} holds no run with results. Train first, or name one.")
    return max(ended, key=lambda path: (path / RESULTS).stat().st_mtime)


def _forward(*arguments: str) -> None:
    typer.main.get_command(our_app).main(args=list(arguments), standalone_mode=False)


def main() -> None:
    """Run the command line."""
    app()
