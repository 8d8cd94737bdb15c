"""Attackers given as folders of models and adapters are evaluated like runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nip_astra.evaluation.storage import read_rows
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
    for path, name in (
        (run / "model", "test"),
        (checkpoint / "attacker", f"test-{checkpoint.name}"),
    ):
        cli.ok("evaluate", str(path), *SMALL)
        assert (run / "evaluations" / name / "rows.jsonl").is_file()


def test_an_adapter_is_added_to_the_model_it_was_trained_on(
    cli: CommandLine, tiny_model_dir: Path
) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(str(tiny_model_dir))
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    model.save_pretrained(str(cli.folder / "adapter"))
    model.merge_and_unload().save_pretrained(str(cli.folder / "merged"))
    for file in tiny_model_dir.iterdir():
        if not (cli.folder / "merged" / file.name).exists():
            shutil.copy(file, cli.folder / "merged")
    shutil.copytree(tiny_model_dir, cli.folder / "plain")
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
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    longest = max(vocabulary, key=len)
    vocabulary[f"{longest}x"] = vocabulary.pop(longest)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    scenario = ("--scenario", str(cli.scenario))
    for arguments, fact in (
        ((str(tiny_model_dir),), "--scenario NAME"),
        (("empty", *scenario), "neither a run nor a model"),
        ((str(run), *scenario), "--scenario"),
        (("nameless", *scenario), "base model"),
        (("other", *scenario), "vocabulary"),
    ):
        assert fact in refused(cli("evaluate", *arguments))
