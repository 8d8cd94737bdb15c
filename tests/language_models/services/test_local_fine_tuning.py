"""Fine-tuning jobs in this process: refused, damaged, moved."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest

from nip_astra.errors import CheckpointError, RunDirectoryError
from nip_astra.language_models import fine_tuning
from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.fine_tuning import STATE, FineTuning, LocalFineTuningService
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
)
from tests.kit.messages import says
from tests.kit.resuming import Killed

ANSWER: ChatMessage = {"role": "assistant", "content": "yes"}
SUPERVISED = SupervisedExample(({"role": "user", "content": "hello"}, ANSWER))
PREFERENCE = PreferenceExample(({"role": "user", "content": "hello"},), "yes", "no")
OPTIONS = {
    "supervised": FineTuningOptions(num_epochs=3, batch_size=1, seed=0),
    "dpo": FineTuningOptions("dpo", num_epochs=3, batch_size=1, seed=0),
}
EXAMPLES: dict[str, list[Any]] = {"supervised": [SUPERVISED] * 2, "dpo": [PREFERENCE] * 2}
Open: TypeAlias = Callable[..., LocalFineTuningService]


@pytest.fixture
def open_service(tmp_path: Path, tiny_model_dir: Path) -> Open:
    def open_in(run: Path = tmp_path / "run", **given: Any) -> LocalFineTuningService:
        parameters = HuggingFaceLanguageModel.Parameters(model=str(tiny_model_dir), **given)
        return LocalFineTuningService(run / "jobs", parameters)

    return open_in


def _submit(
    service: LocalFineTuningService,
    method: str = "supervised",
    *,
    examples: list[Any] | None = None,
    key: str = "k",
) -> str:
    given = EXAMPLES[method] if examples is None else examples
    model = service.parameters.model
    return asyncio.run(service.submit(model, given, OPTIONS[method], key=key)).job_id


def _train(service: LocalFineTuningService, job_id: str) -> FineTuningJob:
    return asyncio.run(service.job(job_id))


LONG = "a " * 96


@pytest.mark.parametrize(
    ("method", "example"),
    [
        ("supervised", SupervisedExample(({"role": "user", "content": LONG}, ANSWER))),
        ("dpo", PREFERENCE._replace(rejected=LONG)),
    ],
)
def test_an_example_that_the_window_does_not_hold_fails_the_job(
    method: str, example: Any, open_service: Open
) -> None:
    service = open_service()
    examples = [*EXAMPLES[method][:1], example]
    ended = _train(service, _submit(service, method, examples=examples))
    assert ended.status is JobStatus.FAILED
    assert says(ended.error, "example 2 ", 96)


def test_models_are_named_relative_to_the_run_and_a_changed_model_is_refused(
    open_service: Open, tmp_path: Path
) -> None:
    service = open_service()
    first = _train(service, _submit(service))
    assert first.model == f"jobs/{first.job_id}/model"
    assert service.resolve_model(first.model) == first.model
    absolute = service.find_model_path(first.model)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = open_service(tmp_path / "copy")
    # A run of an older version contains its model's path at the time of training.
    assert copy.resolve_model(absolute) == first.model
    assert Path(copy.find_model_path(absolute)).is_relative_to(tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    weights = tmp_path / "copy" / first.model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        copy.resolve_model(first.model)
    with pytest.raises(CheckpointError, match="run/jobs"):
        open_service().resolve_model(absolute)
    assert copy.resolve_model("ft:gpt:1") == "ft:gpt:1"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("job.json", '"batch_size": 1', '"batch_size": 2'),
        ("examples.jsonl", "yes", "no"),
        ("job.json", "{", ""),
        (STATE, "", "no state"),
    ],
)
def test_a_job_whose_files_were_changed_is_not_trained(
    name: str, old: str, new: str, open_service: Open
) -> None:
    service = open_service()
    job_id = _submit(service)
    path = service.directory / job_id / name
    path.write_text(path.read_text().replace(old, new) if old else new)
    ended = _train(service, job_id)
    assert ended.status is JobStatus.FAILED
    assert job_id in str(ended.error)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((Path, "rename"), (FineTuning, "save_progress"), (fine_tuning, "write_manifest")),
        (HuggingFaceLanguageModel, "save_pretrained"),
    ],
)
def test_a_full_disk_is_a_typed_error_and_the_job_is_trained_later(
    owner: Any, name: str, open_service: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    service = open_service()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=full))
        with pytest.raises(RunDirectoryError, match=full.strerror):
            _train(service, _submit(service))
    assert _train(service, _submit(service)).status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("rank", [8, None])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_killed_job_continues_after_its_last_step(
    method: str,
    rank: int | None,
    open_service: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = None if rank is None else LoraParameters(rank=rank)
    whole = open_service(tmp_path / "whole", lora=lora)
    expected = _train(whole, _submit(whole, method))
    service = open_service(lora=lora)
    job_id = _submit(service, method)
    take_step, steps = FineTuning._take_step, []

    def counted(tuning: FineTuning, chosen: Any) -> Any:
        if len(steps) == 2:
            steps.append(-1)
            raise Killed
        steps.append(tuning.step)
        return take_step(tuning, chosen)

    monkeypatch.setattr(fine_tuning, "SMALL_PERIOD", 0.0)
    monkeypatch.setattr(FineTuning, "_take_step", counted)
    with pytest.raises(Killed):
        _train(service, job_id)
    again = open_service(lora=lora)
    ended = _train(again, job_id)
    assert steps == [0, 1, -1, 2, 3, 4, 5]
    assert ended.model == expected.model
    files = [
        Path(item.find_model_path(str(ended.model))) / "model.safetensors"
        for item in (whole, again)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not (again.directory / job_id / STATE).exists()
