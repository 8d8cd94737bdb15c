"""A run that ends at any request resumes as if uninterrupted, and pays for nothing twice."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatOutcome, ChatRequest, LimitParameters
from nip_astra.language_models.services.fine_tuning import FineTuningJob
from nip_astra.language_models.services.retrying import ResponseCache, UsageLog, with_retries
from nip_astra.samplers.text_rollouts import AnswerJournal
from nip_astra.scenario_base.text.models import PureTextSharedModelGroup
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers import rl_pure_text_base
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from tests.kit.text_games import FakeChatModel, FakeFineTuning, build_text_parts, build_text_trainer

GROUPS = {
    "text_rl": {
        "num_iterations": 2,
        "rollouts_per_iteration": 2,
        "test_on_whole_dataset": False,
    }
}


class Killed(BaseException):
    """The process ends."""


@dataclass
class Fate:
    """Ends a process at its `end`-th operation: after that, nothing is done."""

    end: int = 0
    count: int = 0

    def note(self) -> None:
        self.count += 1
        if self.end and self.count >= self.end:
            raise Killed


@dataclass
class Service:
    """Chat models and jobs that outlive processes, and the log of their work.

    Attributes
    ----------
    answers : dict
        By request name; each is answered once.
    """

    fate: Fate
    answers: dict[str, ChatOutcome] = field(default_factory=dict)
    log: Counter[str] = field(default_factory=Counter)
    jobs: FakeFineTuning = field(default_factory=FakeFineTuning)


class RemoteModel(FakeChatModel):
    """A model of the service, reached over a network that may fail."""

    service: Service

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        assert request.key is not None
        name = f"{request.key}/{request.first_sample}"
        if name not in self.service.answers:
            self.service.answers[name] = await super().answer(request)
            self.service.log[f"{self.name} {request.seed} {request.first_sample}"] += 1
        self.service.fate.note()
        return self.service.answers[name]


class RemoteJobs(FakeFineTuning):
    """Jobs of the service."""

    service: Service

    async def submit(self, *args: Any, **kwargs: Any) -> FineTuningJob:
        found = await self.service.jobs.submit(*args, **kwargs)
        self.service.fate.note()
        return found

    async def job(self, job_id: str) -> FineTuningJob:
        found = await self.service.jobs.job(job_id)
        self.service.fate.note()
        return found


def _script(name: str) -> Callable[[ChatRequest, int], str]:
    def answer(request: ChatRequest, sample: int) -> str:
        number = ((request.seed or 0) + request.first_sample + sample) % 97
        if "Last turn" not in request.messages[-1]["content"]:
            return f"said {number}"
        return f"Decision: {'accept' if number % 2 else 'reject'}"

    return answer


def _process(folder: Path, trainer: str, service: Service) -> PureTextRlTrainer:
    """A process's objects: the trainer, with models and jobs of the service."""
    directory = RunDirectory(folder / "one")
    jobs = RemoteJobs()
    jobs.service = service
    parts = build_text_parts(
        folder / "prompts", _script, trainer=trainer, service=jobs, groups=GROUPS
    )
    settings = ExperimentSettings(run_directory=directory)

    def open_model(name: str | None) -> Any:
        model = RemoteModel(_script(name or "base"), name or "base")
        model.service, model.samples_at_once = service, 1
        return with_retries(model, LimitParameters(), None, settings, label="agents")

    for group in parts.instance.shared_model_groups.values():
        group._open_model = open_model
    return build_text_trainer(parts, directory)


def _run(folder: Path, trainer: str, service: Service) -> dict[int, str]:
    """A process that starts or resumes a run; returns the run's output at the end."""
    if not (folder / "one").exists():
        RunDirectory.create(folder, "one")
    process = _process(folder, trainer, service)
    store = process._checkpoint_store()
    assert store is not None
    latest = store.latest()
    if latest is not None:
        process.go_on_from(latest)
    process.train()
    paths = sorted((folder / "one" / "rollouts").glob("*/rollouts.json"))
    # Service durations are measured, and the folder is the test's own.
    own = ("services", "model_dir")
    results = {name: one for name, one in process.results.items() if name not in own}
    texts = [json.dumps([results, process.state.to_dict()])]
    texts += [path.read_text() for path in paths]
    texts += [(folder / "one" / "metrics.jsonl").read_text()]
    return dict(enumerate(one.replace(process.state.run_key, "KEY") for one in texts))


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    """Counts requests to the service, and stages; nothing waits for a disk or a job."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(rl_pure_text_base, "FIRST_LOOK", 0.0)
    fate = Fate()
    watch(fate, monkeypatch, PureTextRlTrainer, "_run_stage")
    watch(fate, monkeypatch, PureTextRlTrainer, "_save_checkpoint")
    return fate


def watch(fate: Fate, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Count the calls of a method as well."""
    call = getattr(owner, method)

    def watched(*args: Any, **kwargs: Any) -> Any:
        fate.note()
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, method, watched)


@pytest.fixture
def _all_that_is_kept(fate: Fate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count uses of answers as well."""
    for owner, method in (
        *((AnswerJournal, "put"), (ResponseCache, "remember"), (UsageLog, "release")),
        (PureTextSharedModelGroup, "switch_to_next_model"),
    ):
        watch(fate, monkeypatch, owner, method)


def _check_all_ends(trainer: str, fate: Fate, folder: Path) -> int:
    """End a run at each operation, and return the number of operations."""
    whole = Service(fate)
    expected = _run(folder / "whole", trainer, whole)
    num_operations = fate.count
    assert max(whole.log.values()) == 1
    assert whole.jobs.submitted
    for number in range(1, num_operations + 1):
        fate.end, fate.count = number, 0
        service = Service(fate)
        with pytest.raises(Killed):
            _run(folder / str(number), trainer, service)
        fate.end = 0
        assert _run(folder / str(number), trainer, service) == expected, number
        assert max(service.log.values()) == 1, "a completion was computed twice"
        assert sum(service.log.values()) == sum(whole.log.values())
        assert len(service.jobs.submitted) == len(whole.jobs.submitted)
    return num_operations


def test_a_run_that_ends_at_any_stage_or_request_goes_on_and_repeats_none(
    fate: Fate, tmp_path: Path
) -> None:
    """The service has answered, but the answer is not recorded here: the worst moment.

    Also before a stage, and between its end and its saving.
    """
    assert _check_all_ends("pure_text_ei", fate, tmp_path) >= 40


@pytest.mark.slow
@pytest.mark.usefixtures("_all_that_is_kept")
@pytest.mark.parametrize("trainer", ["pure_text_ei", "pure_text_malt"])
def test_a_run_that_ends_at_any_operation_goes_on_and_repeats_nothing(
    trainer: str, fate: Fate, tmp_path: Path
) -> None:
    assert _check_all_ends(trainer, fate, tmp_path) > 80
