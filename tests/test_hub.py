"""A trained policy is published with its card, and without anything else of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

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
    assert set(files) == {"README.md", "config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads(files["config.json"])["_name_or_path"] == "base"
    assert json.loads(files["tokenizer.json"])["model"]["vocab"] == {"/usr/bin": 1}
    published = b"".join(files.values())
    assert str(tmp_path).encode() not in published
    assert SECRET.encode() not in published
    card = files["README.md"].decode()
    assert says(card, "license: apache-2.0", "pocket_chat", "transformers", "before", "[")
    assert "nip-astra --trainer ast_dpo" in card


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
