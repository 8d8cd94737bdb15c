"""Runs of chat models behind a service are killed, and resume without repeating requests."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from nip_astra import resume_check
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.fine_tuning import OpenAIFineTuning
from nip_astra.resume_check import check_resume
from nip_astra.samplers.text_rollouts import AnswerJournal
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.local_service import LocalService
from nip_astra.serve.settings import ServiceSettings
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from tests.kit.resuming import short_experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked"),
]


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Record stages, requests and jobs by name; kill this process at operation `number`."""
    done: list[str] = []
    polled: set[str] = set()

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        # The number of polls of a job depends on how long it takes.
        is_repeated = name.startswith("look") and name in polled
        polled.add(name)
        note(f"before {name}", is_repeated)
        yield
        note(f"after {name}", is_repeated)

    def note(name: str, is_repeated: bool) -> None:
        if not is_repeated:
            done.append(name)
            if len(done) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(patch: pytest.MonkeyPatch, owner: Any, method: str, name_of: Any) -> None:
        call = getattr(owner, method)

        async def later(*args: Any, **kwargs: Any) -> Any:
            with recorded(name_of(*args)):
                return await call(*args, **kwargs)

        def at_once(*args: Any, **kwargs: Any) -> Any:
            with recorded(name_of(*args)):
                return call(*args, **kwargs)

        is_async = owner in (OpenAIChatModel, OpenAIFineTuning)
        patch.setattr(owner, method, later if is_async else at_once)

    with pytest.MonkeyPatch.context() as patch:
        around(patch, PureTextRlTrainer, "_run_stage", lambda _, stage, *args: f"stage {stage}")
        around(patch, OpenAIChatModel, "_send", lambda *args: "answer")
        around(patch, AnswerJournal, "put", lambda *args: "keeping")
        around(patch, OpenAIFineTuning, "_upload", lambda *args: "upload")
        around(patch, OpenAIFineTuning, "submit", lambda *args: "submission")
        around(patch, OpenAIFineTuning, "job", lambda _, identity: f"look {identity}")
        yield done


def places_in(folder: Path, points: dict[str, int]) -> Callable[[int], list[int]]:
    """Return a sample of operations per part of a name: the first, the last, some between."""

    def places(_: int) -> list[int]:
        names = json.loads((folder / "whole.json").read_text())
        result: set[int] = set()
        for part, count in points.items():
            numbers = [number for number, name in enumerate(names, start=1) if part in name]
            assert numbers, f"no operation is called {part!r}: {sorted(set(names))}"
            result |= {numbers[n * (len(numbers) - 1) // max(count - 1, 1)] for n in range(count)}
        return sorted(result)

    return places


@pytest.mark.parametrize(
    ("trainer", "points", "num_kills"),
    [
        ("pure_text_ei", {"before stage": 10, "after stage": 10}, 20),
        (
            "pure_text_malt",
            {
                "before answer": 2,
                "after answer": 4,
                "after keeping": 2,
                "after upload": 1,
                "after submission": 1,
                "after look": 1,
            },
            11,
        ),
    ],
)
def test_a_killed_run_resumes_without_repeating_requests(
    trainer: str,
    points: dict[str, int],
    num_kills: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume_check, "killed_at", killed_at)
    state_dir, folder = tmp_path / "service", tmp_path / "runs"
    settings = ServiceSettings(
        port=0, state_dir=str(state_dir), max_full_parameters=1_000_000, max_answer_tokens=64
    )
    player = {"player": "scenario://secret_word/models/player"}
    with LocalService(player, settings, num_threads=1) as service:
        completions, jobs = CompletionStore(state_dir), JobStore(state_dir)
        counts: list[tuple[int, int]] = []

        def count(_: object) -> None:
            answered = sum(one.outcome == "answered" for one in completions.log())
            counts.append((answered, len(jobs.jobs())))

        model = f"{{_type: openai, model: player, base_url: '{service.base_url}', "
        model += "limits: {concurrency: 3}}"
        played = f"secret_word.agents.default.model={model}"
        resolved = short_experiment(trainer, folder, played, num_iterations=2)
        places = places_in(folder, points)
        result = check_resume(resolved, folder, places=places, max_iterations=None, on_kill=count)
        assert result.is_equal, f"{result}\n{service.log()}"
        completions.close()
    assert len(result.kills) == num_kills
    # Two complete runs precede the first killed run.
    answered, started = (total // 3 for total in counts[0])
    expected = [(answered * number, started * number) for number in range(3, num_kills + 3)]
    assert counts == expected
