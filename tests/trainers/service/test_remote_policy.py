"""A policy with weights only at a service learns like a policy with local weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.serve.settings import TrainingProtocol
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.command_line import CommandLine
from tests.kit.experiments import run_in, task_trainer
from tests.kit.resuming import SERVICE_OVERRIDES
from tests.serve.running import POLICY, TrainingServer, training_server
from tests.serve.test_training_protocols import iterate

MODEL = "task.policy.language_model"
HAS_TINKER = find_spec("tinker") is not None
ADAPTER = (f"{MODEL}.lora.rank=4", f"{MODEL}.lora.alpha=32")
SHORT = (
    "training.num_episodes_per_experience=4",
    "training.lr=1e-3",
    "task.policy.min_new_tokens=0",
)


@pytest.fixture(scope="module")
def server() -> Iterator[TrainingServer]:
    with training_server(["http", "tinker"]) as running:
        yield running


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """The abilities of a machine without weights."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(POLICY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def without_weights(folder: Path) -> tuple[str, ...]:
    return f"{MODEL}._type=remote", f"{MODEL}.model={folder}"


PROTOCOLS = pytest.mark.parametrize(
    ("protocol", "adapter"),
    [
        ("http", ()),
        pytest.param("tinker", ADAPTER, marks=pytest.mark.skipif(not HAS_TINKER, reason="tinker")),
    ],
    ids=["http", "tinker"],
)


def through(server: TrainingServer, protocol: TrainingProtocol) -> tuple[str, ...]:
    section = "remote_api_grpo.train_service"
    return (
        f"{section}.backend={protocol}",
        f"{section}.base_url={server.url}",
        f"{section}.model=policy",
    )


@PROTOCOLS
def test_losses_are_those_with_weights_at_hand(
    server: TrainingServer, tokenizer_dir: Path, protocol: TrainingProtocol, adapter: Sequence[str]
) -> None:
    common = (*adapter, *SHORT, *through(server, protocol))
    here = task_trainer("remote_api_grpo", *common)
    there = task_trainer("remote_api_grpo", *without_weights(tokenizer_dir), *common)
    assert iterate(there) == pytest.approx(iterate(here), rel=1e-4, abs=1e-5)
    assert there.policy.num_parameters() == 0
    assert there.policy.context_window == here.policy.context_window
    for trainer in (here, there):
        trainer.service.close()


@PROTOCOLS
def test_a_run_without_weights_ends_with_the_trained_weights(
    server: TrainingServer,
    tokenizer_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    protocol: TrainingProtocol,
    adapter: Sequence[str],
) -> None:
    given = [
        *SERVICE_OVERRIDES,
        *through(server, protocol),
        *without_weights(tokenizer_dir),
        *adapter,
        "task.policy.min_new_tokens=0",
        "training.num_iterations=1",
    ]
    run = run_in(tmp_path, resolve_experiment(trainer="remote_api_grpo", overrides=given))
    # Our own service releases the weights once they are trained.
    assert (run / "model" / "model.safetensors").exists() == (protocol == "http")
    # The service that trained them is queried again for measurements.
    CommandLine(tmp_path, tmp_path, capsys).ok("evaluate", str(run))
    evaluated = RunDirectory(run / "evaluations" / "test")
    figures = evaluated.read_json("evaluation.json")["figures"]
    after = RunDirectory(run).read_json("results.json")["after"]
    assert {name: figures[name] for name in after} == after


def test_options_that_need_weights_are_refused(tokenizer_dir: Path) -> None:
    given = without_weights(tokenizer_dir)
    with pytest.raises(ConfigurationError, match=r"train_service\.backend local.*'remote'"):
        task_trainer("remote_api_grpo", *given)
    (tokenizer_dir / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"Set language_model\.context_window"):
        task_trainer("remote_api_grpo", *given)


def test_the_model_itself_refuses_to_answer_and_to_score(
    server: TrainingServer, tokenizer_dir: Path
) -> None:
    given = (*SHORT, *through(server, "http"), *without_weights(tokenizer_dir))
    policy: Any = task_trainer("remote_api_grpo", *given).policy
    one = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match=r"cannot score tokens.*training service"):
        policy.logprobs(one.long(), one, one.long(), one)
    with pytest.raises(ConfigurationError, match="_type to huggingface"):
        policy.save(tokenizer_dir)
