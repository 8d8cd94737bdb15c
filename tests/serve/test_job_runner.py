"""The process that trains a served job, and the example files that it reads."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.language_models.fine_tuning import FineTuning, FineTuningPlan, LocalFineTuningService
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services import fine_tuning as services
from nip_astra.language_models.services.fine_tuning import JobStatus as Status
from nip_astra.language_models.services.fine_tuning import PreferenceExample, SupervisedExample
from nip_astra.language_models.sources import load_model
from nip_astra.serve.job_routes import JobBody
from nip_astra.serve.job_runner import (
    MAX_CRASHES,
    STOPPED,
    TRAINING,
    JobRunner,
    JobTraining,
    main,
    read_examples,
)
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.requests import ApiError
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.settings import ServiceSettings
from nip_astra.utils.children import AdoptedChild
from tests.language_models.test_fine_tuning import PREFERRED, QUESTION, SUPERVISED, make_plan


def stored_job(folder: Path, plan: FineTuningPlan, examples: bytes) -> JobStore:
    """A store with a running job called "job"."""
    store = JobStore(folder)
    names = {"id": "job", "model": "tiny", "root": "tiny", "name": "ft:tiny"}
    store.add_job(names | {"plan": plan.to_dict(), "request": {}}, None)
    store.change_job("job", status=Status.RUNNING)
    store.job_folder("job").mkdir()
    (store.job_folder("job") / TRAINING).write_bytes(examples)
    return store


EXAMPLES: dict[str, Any] = {
    "supervised": [SupervisedExample(text.messages) for (text,) in SUPERVISED],
    "dpo": [
        PreferenceExample(
            better.messages[:-1], better.messages[-1]["content"], worse.messages[-1]["content"]
        )
        for better, worse in PREFERRED
    ],
}


@pytest.mark.parametrize("trained_weights", ["all", "adapter", None])
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_the_same_job_gives_equal_weights_in_process_and_served(
    tmp_path: Path,
    tiny_model_dir: Path,
    method: services.Method,
    trained_weights: services.TrainedWeights | None,
) -> None:
    options = services.FineTuningOptions(
        method,
        num_epochs=3,
        batch_size=1,
        lr_multiplier=5.0,
        trained_weights=trained_weights,
        seed=2,
    )
    lora = LoraParameters(rank=8, alpha=16.0) if trained_weights == "adapter" else None
    parameters = HuggingFaceLanguageModel.Parameters(model=str(tiny_model_dir), lora=lora)
    local = LocalFineTuningService(tmp_path / "jobs", parameters)
    job = asyncio.run(local.submit(str(tiny_model_dir), EXAMPLES[method], options, key="key"))
    here = asyncio.run(local.job(job.job_id))
    assert here.model is not None

    request = {
        "model": "tiny",
        "training_file": "file",
        "method": services._method_field(options),
        "seed": 2,
    }
    received = JobBody.model_validate(request).options
    assert received == options
    settings = ServiceSettings()
    adapter = lora or LoraParameters(rank=settings.lora_rank, alpha=settings.lora_alpha)
    plan = replace(
        make_plan(tiny_model_dir),
        **received.resolved(),
        lora_rank=None if trained_weights == "all" else adapter.rank,
        lora_alpha=adapter.alpha,
    )
    store = stored_job(tmp_path, plan, services.to_jsonl(EXAMPLES[method], method))
    assert JobTraining(store, store.job("job"), lambda: False).run() == 0
    folder = store.job_folder("job") / "model"
    base = None if trained_weights == "all" else str(tiny_model_dir)
    served = load_model(str(folder), base, None)
    other = load_model(local.find_model_path(here.model), None, None)
    first, second = served.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    start = load_model(str(tiny_model_dir), None, None).state_dict()
    assert any(not torch.equal(first[name], start[name]) for name in first)


def test_a_cancelled_job_ends_after_its_step(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = services.to_jsonl(EXAMPLES["supervised"][:1], "supervised")
    store = stored_job(tmp_path, make_plan(tiny_model_dir), examples)
    take_step, steps = FineTuning._take_step, []

    def cancelled(tuning: FineTuning, chosen: Sequence[int]) -> dict[str, float]:
        steps.append(tuning.step)
        if len(steps) == 2:
            store.change_job("job", status=Status.CANCELLED)
        return take_step(tuning, chosen)

    monkeypatch.setattr(FineTuning, "_take_step", cancelled)
    assert JobTraining(store, store.job("job"), lambda: False).run() == STOPPED
    assert steps == [0, 1]
    assert store.job("job").status is Status.CANCELLED


def test_two_processes_of_a_job_train_it_once(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = services.to_jsonl(EXAMPLES["supervised"], "supervised")
    store = stored_job(tmp_path, make_plan(tiny_model_dir), examples)
    take_step, steps = FineTuning._take_step, []

    def noted(tuning: FineTuning, chosen: Sequence[int]) -> dict[str, float]:
        steps.append(tuning.step)
        return take_step(tuning, chosen)

    monkeypatch.setattr(FineTuning, "_take_step", noted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(main, [str(tmp_path)] * 2, ["job"] * 2))
    assert sorted(codes) == [0, STOPPED]
    assert steps == list(range(len(steps)))
    assert store.job("job").is_trained


def test_processes_that_end_with_the_service_are_no_crashes(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    store = stored_job(tmp_path, make_plan(tiny_model_dir), b"")
    for _ in range(MAX_CRASHES):
        store.change_job("job", status=Status.RUNNING)
        runner = JobRunner(store, ServedModels(device=torch.device("cpu"), limits=EngineLimits()))
        process = AdoptedChild("job", 1, "a start before that of the machine")
        runner._watch("job", process)
        runner._settle(process)
    assert (store.job("job").status, store.job("job").crashes) == (Status.QUEUED, 0)


USER = '{"role": "user", "content": "x"}'
ANSWER = '{"role": "assistant", "content": "x"}'


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("{", "line 2 .* JSON"),
        ("[]", "line 2 .* supervised"),
        ('{"messages": []}', "messages"),
        (f'{{"messages": [{USER}]}}', "2"),
        (f'{{"messages": [{USER}, {USER}]}}', "'assistant'"),
        ('{"messages": [], "weight": 1}', "'weight'"),
        (f'{{"messages": [{USER[:-1]}, "weight": 1}}, {ANSWER}]}}', "weight"),
        (f'{{"messages": [{USER}, {ANSWER[:-1]}, "weight": 0.5}}]}}', "weight"),
        (f'{{"messages": [{USER}, {ANSWER[:-1]}, "weight": 0}}]}}', "weight of 0"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, fact: str) -> None:
    right = {"messages": [*QUESTION, {"role": "assistant", "content": "fine"}]}
    (tmp_path / "file").write_text(f"{json.dumps(right)}\n{line}\n")
    with pytest.raises(ApiError, match=fact):
        read_examples(tmp_path / "file", "supervised")
    (tmp_path / "file").write_text("\n\n")
    with pytest.raises(ApiError, match="no examples"):
        read_examples(tmp_path / "file", "dpo")


def test_lines_with_weights_and_tools_are_read(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    line = {
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": "fine", "weight": 0},
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            {"role": "assistant", "content": "two", "weight": 1},
        ],
        "tools": [tool],
        "parallel_tool_calls": False,
    }
    (tmp_path / "file").write_text(json.dumps(line))
    ((text,),) = read_examples(tmp_path / "file", "supervised")
    assert text.learned == [3, 5]
    assert text.tools == (tool,)
    assert text.messages[3]["tool_calls"] == [call]
    pair = {
        "input": {"messages": line["messages"][:-1], "tools": [tool]},
        "preferred_output": [{"role": "assistant", "content": "two"}],
        "non_preferred_output": [{"role": "assistant", "content": "three"}],
    }
    del pair["input"]["messages"][1]["weight"]  # type: ignore[attr-defined]
    (tmp_path / "file").write_text(json.dumps(pair))
    (both,) = read_examples(tmp_path / "file", "dpo")
    assert [text.learned for text in both] == [[5], [5]]
