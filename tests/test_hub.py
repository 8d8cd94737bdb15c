"""A trained policy is published with its card, and without anything else of the run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import yaml

from nip_astra.errors import (
    ConfigurationError,
    RunDirectoryError,
    ServiceRequestError,
    UntrustedRunError,
)
from nip_astra.hub import push_to_hub
from tests.kit.command_line import CommandLine
from tests.kit.messages import says
from tests.report.runs import write_run

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A stress test whose parameters and model folder contain paths, a token and others' files."""
    sources = {"trainer": "command line", "training.lr": "command line", "training.data": "--set"}
    parameters = {"data": f"{tmp_path}/secret/data.jsonl", "key": SECRET}
    folder = write_run(tmp_path / "runs/one", parameters=parameters, sources=sources)
    model = folder / "model"
    model.mkdir()
    config = {"_name_or_path": f"{tmp_path}/base", "auto_map": {"a": "b--c"}, "vocab_size": 3}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"/usr/bin": 1}}}')
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "train.jsonl").write_text("foreign")
    return folder


class Hub:
    """Stands in for the hub's client, and records its input."""

    endpoint = "https://hub.test"
    calls: list[tuple[str, Any]]
    error: Exception | None = None

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((repo_id, options))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        files = [path for path in folder_path.rglob("*") if path.is_file()]
        self.calls.append((repo_id, {item.name: item.read_bytes() for item in files}))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.calls, Hub.error = [], None
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_weights_tokenizer_and_card_are_published_and_nothing_private(
    run: Path, hub: type[Hub], tmp_path: Path
) -> None:
    address = push_to_hub(run, "me/attacker", private=False, license="apache-2.0")
    assert address == "https://hub.test/me/attacker"
    (_, options), (_, files) = hub.calls
    assert options == {"private": False, "exist_ok": True}
    weights = {"config.json", "tokenizer.json", "model.safetensors"}
    assert set(files) == {"README.md", "nip_astra.yaml", *weights}
    assert json.loads(files["config.json"])["_name_or_path"] == "base"
    assert json.loads(files["tokenizer.json"])["model"]["vocab"] == {"/usr/bin": 1}
    published = b"".join(files.values())
    assert str(tmp_path).encode() not in published
    assert SECRET.encode() not in published
    card = files["README.md"].decode()
    assert says(card, "license: apache-2.0", "pocket_chat", "transformers", "before", "[")
    assert "nip-astra --parameters nip_astra.yaml" in card
    assert "data.jsonl" in card.partition("How it was trained")[2]


def trained_run(folder: Path, parameters: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """A run with a model and with these sections of parameters."""
    write_run(folder, results=results)
    file = folder / "hyper_parameters.yaml"
    values = yaml.safe_load(file.read_text()) | dict(parameters)
    file.write_text(yaml.safe_dump(values))
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    (folder / "model/model.safetensors").write_bytes(b"weights")
    return folder


def card_of(run: Path) -> str:
    folder = run.with_name("out")
    push_to_hub(run, "me/a", folder=folder, dry_run=True)
    return (folder / "README.md").read_text()


MARKUP = "<img src=x> [click](http://x.test) `code` | ``` \n# a heading"


def test_texts_of_a_foreign_run_are_no_markup_of_its_card(tmp_path: Path) -> None:
    parameters = {"scenario": MARKUP, "task": {"policy": {}, "task": {"train": MARKUP}}}
    card = card_of(trained_run(tmp_path / "one", parameters, {"warnings": [MARKUP]}))
    outside_code = re.sub(r"`[^`\n]*`", "", card)
    assert "<img" not in outside_code
    assert "](http" not in outside_code
    assert "\n# a heading" not in card
    assert card.count("```") == 2


@pytest.mark.parametrize(
    ("name", "is_attacker", "metadata"),
    [
        ("ast_chat", True, {"base_model": ["someone/base"]}),
        ("task", False, {"base_model": ["someone/base"], "datasets": ["someone/rows"]}),
    ],
)
def test_a_card_names_its_models_and_data_and_warns_of_attackers_alone(
    tmp_path: Path, name: str, is_attacker: bool, metadata: dict[str, list[str]]
) -> None:
    model = {"language_model": {"_type": "huggingface", "model": "someone/base"}}
    sections = {
        "ast_chat": {"attacker": model, "target": model, "scorer": {"_type": "toxblock"}},
        "task": {"policy": model, "task": {"_type": "dataset", "train": "someone/rows:train"}},
    }
    card = card_of(trained_run(tmp_path / "one", {name: sections[name]}, {}))
    fields = yaml.safe_load(card.split("---")[1])
    assert fields | metadata == fields
    assert ("datasets" in fields) is ("datasets" in metadata)
    assert ("make another model fail" in card) is is_attacker


def test_the_command_of_a_card_repeats_the_run(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.run("--test-run", "--seed", "3").code == 0
    run = tmp_path / "runs/one"
    card = card_of(run)
    (command,) = re.findall(r"```sh\nnip-astra (.*)\n```", card)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(run.with_name("out") / "nip_astra.yaml", elsewhere)
    shutil.copytree(cli.scenario, elsewhere / cli.scenario.name)
    assert cli.scenario.name in card
    monkeypatch.chdir(elsewhere)
    cli.ok(*shlex.split(command), "--test-run", "--run-id", "again", "--runs-dir", "runs")
    metrics = [path / "metrics.jsonl" for path in (run, elsewhere / "runs/again")]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()


def test_a_dry_run_writes_the_folder_alone(
    run: Path, hub: type[Hub], tmp_path: Path, cli: CommandLine
) -> None:
    target = tmp_path / "out"
    cli.ok("push", str(run), "me/a", "--dry-run", "--output", str(target))
    assert hub.calls == []
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert "license:" not in (target / "README.md").read_text()
    for taken in (target, target / "README.md"):
        with pytest.raises(ConfigurationError, match="out"):
            push_to_hub(run, "me/a", folder=taken, dry_run=True)
    other = tmp_path / "other"
    assert push_to_hub(run, "me/a", folder=other, dry_run=True) == str(other)


def test_unpublishable_runs_are_refused(run: Path, hub: type[Hub], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no/such/name"):
        push_to_hub(run, "no/such/name")
    # Without a network the hub's client raises errors of its HTTP library, which are no OSError.
    for hub.error in (OSError("no route"), httpx.ConnectError("no route")):
        with pytest.raises(ServiceRequestError, match="no route"):
            push_to_hub(run, "me/a")
    (tmp_path / "other").write_bytes(b"other")
    (run / "model" / "linked.safetensors").symlink_to(tmp_path / "other")
    with pytest.raises(UntrustedRunError, match="linked"):
        push_to_hub(run, "me/a")
    with pytest.raises(RunDirectoryError, match="model"):
        push_to_hub(write_run(tmp_path / "two"), "me/a")
