"""Kill runs of chat models behind a service, at stages and between requests, and go on.

Run as `python -m tests.kit.text_killing FOLDER TRAINER POINT=COUNT ...`; points are parts of the
names of operations, of which so many are taken, the first, the last and some between. One line of
JSON a kill, and a last one that sums up. Processes are forked from one that has imported all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.fine_tuning import OpenAIFineTuning
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.resume_check import difference_of, go_on, in_a_fork, what_was_found
from nip_astra.run import run_experiment
from nip_astra.samplers.text_rollouts import AnswerJournal
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.local_service import LocalService
from nip_astra.serve.settings import ServiceSettings
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer

SETTINGS: dict[str, Any] = {"progress": False}
SMALL = (
    "text_rl.num_iterations=2",
    "text_rl.rollouts_per_iteration=6",
    "text_rl.min_fine_tune_examples=1",
    "text_rl.num_fine_tune_epochs=1",
    "secret_word.num_test=6",
)


@contextmanager
def watched(last: str = "", number: int = 0) -> Iterator[list[str]]:
    """Name operations as they come; end the process without a word at the `number`-th called so.

    Of that name, and not of all: how often a job is looked at depends on how long it takes.
    """
    done: list[str] = []

    def note(name: str) -> None:
        done.append(name)
        if name == last and done.count(name) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, method: str, name: Callable[..., str]) -> tuple[Any, str, Any]:
        call = getattr(owner, method)

        async def asynchronously(*args: Any, **kwargs: Any) -> Any:
            note(f"before {name(*args)}")
            found = await call(*args, **kwargs)
            note(f"after {name(*args)}")
            return found

        def at_once(*args: Any, **kwargs: Any) -> Any:
            note(f"before {name(*args)}")
            found = call(*args, **kwargs)
            note(f"after {name(*args)}")
            return found

        is_async = owner is not PureTextRlTrainer and owner is not AnswerJournal
        setattr(owner, method, asynchronously if is_async else at_once)
        return owner, method, call

    kept = [
        around(PureTextRlTrainer, "_run_stage", lambda _, stage, *args: f"stage {stage}"),
        around(OpenAIChatModel, "_ask", lambda *args: "answer"),
        around(AnswerJournal, "put", lambda *args: "keeping"),
        around(OpenAIFineTuning, "_upload", lambda *args: "upload"),
        around(OpenAIFineTuning, "submit", lambda *args, **kwargs: "submission"),
        around(OpenAIFineTuning, "job", lambda *args: "look"),
    ]
    try:
        yield done
    finally:
        for owner, method, call in kept:
            setattr(owner, method, call)


class Log:
    """What a service has done since this was made or last asked."""

    def __init__(self, state_dir: Path) -> None:
        self._completions, self._jobs = CompletionStore(state_dir), JobStore(state_dir)
        self._num_completions = self._num_jobs = 0
        self.since()

    def since(self) -> dict[str, Any]:
        """How many completions and jobs there were, and which ones came twice."""
        completions, jobs = self._completions.log(), self._jobs.jobs()
        new = completions[self._num_completions :]
        new_jobs = len(jobs) - self._num_jobs
        self._num_completions, self._num_jobs = len(completions), len(jobs)
        digests = [one.digest for one in new if one.outcome == "answered"]
        return {
            "answered": len(digests),
            "repeated": len(digests) - len(set(digests)),
            "jobs": new_jobs,
        }


def kill_at_points(
    resolved: ResolvedExperiment, folder: Path, log: Log, points: list[str]
) -> list[dict[str, Any]]:
    """Run once to the end, then kill one at each point, go on, and tell what differs."""

    def run(name: str) -> None:
        run_experiment(resolved, runs_dir=str(folder / name), run_id="run", **SETTINGS)

    with watched() as operations:
        run("whole")
    expected, done = what_was_found(folder / "whole" / "run"), log.since()
    assert done["repeated"] == 0
    found = []
    for number in sorted({place for point in points for place in _places(operations, point)}):
        name = operations[number - 1]

        def until_killed(name: str = name, number: int = number) -> None:
            with watched(name, operations[:number].count(name)):
                run(str(number))

        status = in_a_fork(until_killed)
        again = in_a_fork(partial(go_on, resolved, folder / str(number)))
        told: dict[str, Any] = {"number": number, "operation": name, "faults": []}
        if (status, again) != (-signal.SIGKILL, 0):
            told["faults"].append(f"ended with {status}, and going on with {again}")
        else:
            left = what_was_found(folder / str(number) / "run")
            difference = difference_of(left, expected)
            told["faults"] += [difference] if difference else []
        told["service"] = log.since()
        if told["service"] != done:
            told["faults"].append(f"the service did {told['service']} and not {done}")
        print(json.dumps(told), flush=True)
        found.append(told)
    return found


def _places(operations: list[str], point: str) -> set[int]:
    """Numbers, from 1, of so many operations of a name."""
    part, _, count = point.partition("=")
    places = [number for number, name in enumerate(operations, start=1) if part in name]
    assert places, f"no operation is called {part!r}: {sorted(set(operations))}"
    last = max(int(count) - 1, 1)
    return {places[n * (len(places) - 1) // last] for n in range(int(count))}


def main() -> None:
    folder, trainer, *points = sys.argv[1:]
    state_dir = Path(folder, "service")
    settings = ServiceSettings(
        port=0, state_dir=str(state_dir), max_full_parameters=1_000_000, max_answer_tokens=64
    )
    with LocalService(
        {"player": "scenario://secret_word/models/player"}, settings, num_threads=1
    ) as service:
        model = f"{{_type: openai, model: player, base_url: '{service.base_url}', "
        model += "limits: {concurrency: 3}}"
        resolved = resolve_experiment(
            trainer=trainer, overrides=[*SMALL, f"secret_word.agents.default.model={model}"]
        )
        try:
            found = kill_at_points(resolved, Path(folder), Log(state_dir), points)
        except BaseException:
            sys.stderr.write(service.log())
            raise
    num_faults = sum(bool(one["faults"]) for one in found)
    print(json.dumps({"kills": len(found), "faults": num_faults}))
    sys.exit(num_faults > 0)


if __name__ == "__main__":
    main()
