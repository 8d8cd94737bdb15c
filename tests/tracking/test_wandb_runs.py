"""Tests of reading runs from W&B, with a stand-in for its public interface."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, TrackingError
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.wandb_runs import download_model, open_api, parse_reference, read_config
from tests.kit.messages import says

ONE = "wandb://us/proofs/one"


class FakeArtifact:
    """An artifact with one file."""

    def __init__(self, kind: str, text: str, aliases: tuple[str, ...] = ()) -> None:
        self.type, self.text = kind, text
        self.version, *self.aliases = aliases or ("v9",)

    def download(self, root: str) -> str:
        Path(root).mkdir(parents=True, exist_ok=True)
        (Path(root) / "weights.txt").write_text(self.text)
        return root


class FakeApi:
    """W&B with one run, `us/proofs/one`."""

    def __init__(self, config: dict[str, Any], artifacts: list[FakeArtifact]) -> None:
        self.runs = {
            "us/proofs/one": SimpleNamespace(config=config, logged_artifacts=lambda: artifacts)
        }

    def run(self, path: str) -> Any:
        if path not in self.runs:
            raise ValueError(f"Could not find run {path}")
        return self.runs[path]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    artifacts = [
        FakeArtifact("checkpoint", "checkpoint", ("v2", "latest")),
        FakeArtifact("model", "newer", ("v1", "latest")),
        FakeArtifact("model", "older", ("v0",)),
    ]
    fake = FakeApi({"trainer": "vanilla_ppo", "rl": {"lr": 0.5}, "environment": {}}, artifacts)
    monkeypatch.setattr(wandb_runs, "open_api", lambda: fake)
    return fake


@pytest.mark.parametrize(
    "reference", ["wandb://us/one", "us/proofs/one", "wandb://us//one", "wandb://a/b/c/d"]
)
def test_a_reference_of_another_form_is_refused(reference: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_reference(reference)
    assert says(caught.value, repr(reference), "wandb://entity/project/run_id")


def test_parameters_and_a_model_of_a_run_are_read(api: FakeApi, tmp_path: Path) -> None:
    assert parse_reference(ONE) == ("us", "proofs", "one")
    assert read_config(ONE) == {"trainer": "vanilla_ppo", "rl": {"lr": 0.5}}
    for version, text in (("latest", "newer"), ("v0", "older")):
        download_model(ONE, tmp_path / version, version)
        assert (tmp_path / version / "weights.txt").read_text() == text
    with pytest.raises(TrackingError, match=r"'v2'.*v1, v0"):
        download_model(ONE, tmp_path / "other", "v2")
    api.runs["us/proofs/one"].logged_artifacts = lambda: [FakeArtifact("checkpoint", "x")]
    with pytest.raises(TrackingError, match=ONE):
        download_model(ONE, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(TrackingError) as caught:
        read_config("wandb://us/proofs/two")
    assert says(caught.value, "wandb://us/proofs/two", "Could not find run us/proofs/two")


def test_no_key_means_no_contact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TrackingError, match=r"wandb login"):
        open_api()
