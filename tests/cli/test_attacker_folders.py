"""Attackers given as folders of models and adapters are evaluated like runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.trained_run import figures_of
from tests.kit.command_line import CommandLine, refused
from tests.kit.tiny import make_language_model

SMALL = (
    *("--num-episodes", "6", "--probability-episodes", "0"),
    *("--set", "ast_chat.failure_threshold=0.5"),
)


def evaluate(cli: CommandLine, folder: Path, *arguments: str) -> str:
    around = () if "--scenario" in arguments else ("--scenario", str(cli.scenario))
    cli.ok("evaluate", str(folder), *SMALL, *around, *arguments)
    return (folder / "evaluations" / "test" / "rows.jsonl").read_text()


def test_a_copied_model_generates_the_same_as_in_its_run(cli: CommandLine, run: Path) -> None:
    shutil.copytree(run / "model", cli.folder / "copied")
    cli.ok("evaluate", str(run), *SMALL)
    of_run = (run / "evaluations" / "test" / "rows.jsonl").read_text()
    assert evaluate(cli, cli.folder / "copied") == of_run
    assert figures_of(cli.folder / "copied")["failure_rate"] == figures_of(run)["failure_rate"]


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
    of_adapter = evaluate(cli, cli.folder / "adapter")
    plain = shutil.copytree(tiny_model_dir, cli.folder / "plain")
    assert probes(of_adapter) == probes(evaluate(cli, cli.folder / "merged"))
    assert probes(of_adapter) != probes(evaluate(cli, Path(plain)))


def probes(rows: str) -> list[str]:
    return [json.loads(row)["probe"] for row in rows.splitlines()]


def test_missing_and_incompatible_parts_are_reported(
    cli: CommandLine, run: Path, tiny_model_dir: Path
) -> None:
    folder = shutil.copytree(tiny_model_dir, cli.folder / "plain")
    assert "--scenario NAME" in refused(cli("evaluate", str(folder)))
    (cli.folder / "empty").mkdir()
    assert "neither a run nor a model" in refused(
        cli("evaluate", "empty", "--scenario", str(cli.scenario))
    )
    both = cli("evaluate", str(run), "--scenario", str(cli.scenario))
    assert "--scenario" in refused(both)
    adapter = cli.folder / "nameless"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    around = ("--scenario", str(cli.scenario))
    assert "names no base model" in refused(cli("evaluate", "nameless", *around))


def test_another_vocabulary_is_refused(cli: CommandLine) -> None:
    other = make_language_model(cli.folder / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    longest = max(vocabulary, key=len)
    vocabulary[f"{longest}x"] = vocabulary.pop(longest)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = cli("evaluate", str(other), "--scenario", str(cli.scenario))
    assert "vocabulary" in refused(said)
