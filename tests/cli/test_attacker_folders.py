"""Attackers given as folders of models and adapters are evaluated like runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.evaluation.storage import read_rows
from nip_astra.language_models.adapters import LoraParameters, add_adapter
from nip_astra.language_models.sources import load_causal_lm
from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused
from tests.kit.tiny import make_language_model

SMALL = (
    *("--num-episodes", "6", "--probability-episodes", "0"),
    *("--set", "ast_chat.failure_threshold=0.5"),
)


def evaluate(cli: CommandLine, folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation of an attacker's folder."""
    cli.ok("evaluate", str(folder), *SMALL, "--scenario", str(cli.scenario))
    return read_rows(folder / "evaluations" / "test" / "rows.jsonl")


def test_a_copied_model_generates_the_same_as_in_its_run(cli: CommandLine, run: Path) -> None:
    copied = Path(shutil.copytree(run / "model", cli.folder / "copied"))
    cli.ok("evaluate", str(run), *SMALL)
    assert evaluate(cli, copied) == read_rows(run / "evaluations" / "test" / "rows.jsonl")
    assert figures_of(copied)["failure_rate"] == figures_of(run)["failure_rate"]


def test_the_folders_within_a_run_mean_the_run_and_its_checkpoints(
    cli: CommandLine, run: Path
) -> None:
    checkpoint = max((run / "checkpoints").glob("step_*"))
    folders = {run / "model": "test", checkpoint / "attacker": f"test-{checkpoint.name}"}
    for path, name in folders.items():
        cli.ok("evaluate", str(path), *SMALL)
        assert (run / "evaluations" / name / "rows.jsonl").is_file()


def test_an_adapter_is_added_to_the_model_it_was_trained_on(
    cli: CommandLine, tiny_model_dir: Path
) -> None:
    pytest.importorskip("peft")
    model = add_adapter(load_causal_lm(str(tiny_model_dir), None), LoraParameters(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    model.save_pretrained(cli.folder / "adapter")
    for name in ("plain", "merged"):
        shutil.copytree(tiny_model_dir, cli.folder / name)
    model.merge_and_unload().save_pretrained(cli.folder / "merged")
    adapted, merged, plain = (
        [row["probe"] for row in evaluate(cli, cli.folder / name)]
        for name in ("adapter", "merged", "plain")
    )
    assert adapted == merged != plain


def test_missing_and_incompatible_parts_are_reported(
    cli: CommandLine, run: Path, tiny_model_dir: Path
) -> None:
    for name in ("empty", "nameless"):
        (cli.folder / name).mkdir()
    cli.write("nameless/adapter_config.json", "{}")
    other = make_language_model(cli.folder / "other")
    tokenizer = (other / "tokenizer.json").read_text().replace('"hello"', '"hallo"')
    (other / "tokenizer.json").write_text(tokenizer)
    scenario = ("--scenario", str(cli.scenario))
    for arguments, fact in (
        ((str(tiny_model_dir),), "--scenario NAME"),
        (("empty", *scenario), "neither a run nor a model"),
        ((str(run), *scenario), "--scenario"),
        (("nameless", *scenario), "base model"),
        (("other", *scenario), "vocabulary"),
    ):
        assert fact in refused(cli("evaluate", *arguments))
