"""A run that ends at any request resumes as if uninterrupted, and pays for nothing twice."""

from __future__ import annotations

import json
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
from tests.kit.resuming import Killed
from tests.kit.text_games import FakeChatModel, FakeFineTuning, build_text_parts, build_text_trainer

GROUPS = {
    "text_rl": {"num_iterations": 2, "rollouts_per_iteration": 2, "test_on_whole_dataset": False}
}


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
    """Chat models and jobs that outlive processes, and the log of their work."""

    fate: Fate
    answers: dict[str, ChatOutcome] = field(default_factory=dict)
    """By request name; each is answered once."""
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
        job = await self.service.jobs.submit(*args, **kwargs)
        self.service.fate.note()
        return job

    async def job(self, job_id: str) -> FineTuningJob:
        job = await self.service.jobs.job(job_id)
        self.service.fate.note()
        return job


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


def _run(folder: Path, trainer: str, service: Service) -> list[str]:
    """A process that starts or resumes a run; returns the run's output at the end."""
    if not (folder / "one").exists():
        RunDirectory.create(folder, "one")
    process = _process(folder, trainer, service)
    store = process._checkpoint_store()
    assert store is not None
    latest = store.latest()
    if latest is not None:
        process.resume_from(latest)
    process.train()
    # Service durations are measured, and the folder is the test's own.
    own = ("services", "model_dir")
    results = {name: value for name, value in process.results.items() if name not in own}
    files = [*sorted((folder / "one" / "rollouts").glob("*/rollouts.json"))]
    files.append(folder / "one" / "metrics.jsonl")
    texts = [json.dumps([results, process.state.to_dict()]), *(file.read_text() for file in files)]
    return [text.replace(process.state.run_key, "KEY") for text in texts]


STAGES = ((PureTextRlTrainer, "_run_stage"), (PureTextRlTrainer, "_save_checkpoint"))


def watch(fate: Fate, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Count the calls of a method as well."""
    call = getattr(owner, method)

    def watched(*args: Any, **kwargs: Any) -> Any:
        fate.note()
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, method, watched)


USES_OF_ANSWERS = (
    (AnswerJournal, "put"),
    (ResponseCache, "put"),
    (UsageLog, "release"),
    (PureTextSharedModelGroup, "switch_to_next_model"),
)


@pytest.mark.parametrize(
    ("trainer", "more", "num_least"),
    [
        ("pure_text_ei", (), 40),
        pytest.param("pure_text_ei", USES_OF_ANSWERS, 80, marks=pytest.mark.slow),
        pytest.param("pure_text_malt", USES_OF_ANSWERS, 80, marks=pytest.mark.slow),
    ],
    ids=["ei-stages-and-requests", "ei-every-operation", "malt-every-operation"],
)
def test_a_run_that_ends_at_any_operation_goes_on_and_repeats_none(
    trainer: str,
    more: tuple[tuple[type, str], ...],
    num_least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service has answered, but the answer is not recorded here: the worst moment.

    Also before a stage, and between its end and its saving.
    """
    monkeypatch.setattr(rl_pure_text_base, "FIRST_LOOK", 0.0)  # nothing waits for a job
    fate = Fate()
    for owner, method in (*STAGES, *more):
        watch(fate, monkeypatch, owner, method)
    whole = Service(fate)
    expected = _run(tmp_path / "whole", trainer, whole)
    num_operations = fate.count
    assert num_operations >= num_least
    assert max(whole.log.values()) == 1
    assert whole.jobs.submitted
    for number in range(1, num_operations + 1):
        fate.end, fate.count = number, 0
        service = Service(fate)
        with pytest.raises(Killed):
            _run(tmp_path / str(number), trainer, service)
        fate.end = 0
        assert _run(tmp_path / str(number), trainer, service) == expected, number
        assert max(service.log.values()) == 1, "a completion was computed twice"
        assert sum(service.log.values()) == sum(whole.log.values())
        assert len(service.jobs.submitted) == len(whole.jobs.submitted)
