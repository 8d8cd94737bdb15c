"""Fine-tuning jobs of OpenAI's protocol: requests, recovery of jobs, and messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.language_models.services.fine_tuning import (
    FineTuningOptions,
    FineTuningParameters,
    JobStatus,
    OpenAIFineTuning,
    PreferenceExample,
    SupervisedExample,
)
from tests.language_models.services.job_stub import JobStub, job_stub

pytest.importorskip("openai")

T = TypeVar("T")
SUPERVISED = SupervisedExample(
    ({"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"})
)
PREFERENCE = PreferenceExample(({"role": "user", "content": "hé"},), "ho", "no")


def use(
    stub: JobStub, do: Callable[[OpenAIFineTuning], Awaitable[T]], pauses: list[float] | None = None
) -> T:
    """Use a service that is opened for this call only."""

    async def pause(seconds: float) -> None:
        if pauses is not None:
            pauses.append(seconds)

    async def whole() -> T:
        service = OpenAIFineTuning(FineTuningParameters(base_url=stub.base_url), pause=pause)
        try:
            return await do(service)
        finally:
            await service.close()

    return asyncio.run(whole())


def test_a_supervised_job_is_submitted_with_its_options() -> None:
    options = FineTuningOptions(num_epochs=2, batch_size=4, lr_multiplier=0.5, seed=2**31 + 3)
    with job_stub() as stub:
        job = use(stub, lambda service: service.submit("base", [SUPERVISED], options, key="run-1"))
    assert (job.job_id, job.status, job.model, job.error) == ("job-0", "queued", None, None)
    hyper_parameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyper_parameters}}
    created = {"model": "base", "training_file": "file-0", "method": method, "seed": 3}
    assert stub.created == [created | {"metadata": {"nip_astra_key": "run-1"}}]
    assert json.loads(stub.contents["file-0"]) == {"messages": list(SUPERVISED.messages)}


def test_a_preference_job_has_openais_form_and_leaves_the_rest_to_the_service() -> None:
    options = FineTuningOptions("dpo", beta=0.2)
    with job_stub() as stub:
        use(
            stub, lambda service: service.submit("base", [PREFERENCE, PREFERENCE], options, key="k")
        )
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    assert stub.created[0]["method"] == method
    assert "seed" not in stub.created[0]
    row = {
        "input": {"messages": [{"role": "user", "content": "hé"}]},
        "preferred_output": [{"role": "assistant", "content": "ho"}],
        "non_preferred_output": [{"role": "assistant", "content": "no"}],
    }
    rows = [json.loads(line) for line in stub.contents["file-0"].splitlines()]
    assert rows == [row, row]


def test_a_key_finds_its_job_among_others_on_later_pages() -> None:
    async def submit_all(service: OpenAIFineTuning) -> list[str]:
        keys = [f"{n}" * 90 for n in range(3)]
        jobs = [
            await service.submit("base", [SUPERVISED], FineTuningOptions(), key=key)
            for key in [*keys, *keys]
        ]
        return [job.job_id for job in jobs]

    with job_stub() as stub:
        ids = use(stub, submit_all)
    assert ids == [f"job-{n}" for n in range(3)] * 2
    assert len(stub.files) == 1, "the same examples are uploaded once"


def test_a_job_whose_response_was_lost_is_not_submitted_again() -> None:
    pauses: list[float] = []
    with job_stub() as stub:
        # Jobs are listed, files are listed, the file is sent, the job is started.
        stub.faults = ["", "", "", "lost"]
        job = use(
            stub, lambda s: s.submit("base", [SUPERVISED], FineTuningOptions(), key="k"), pauses
        )
    assert (job.job_id, len(stub.jobs), pauses) == ("job-0", 1, [1.0])


def test_failures_that_may_pass_are_retried_and_others_are_errors() -> None:
    pauses: list[float] = []
    with job_stub() as stub:
        stub.faults = [500, 429, 503]
        use(stub, lambda s: s.submit("base", [SUPERVISED], FineTuningOptions(), key="k"), pauses)
        assert pauses == [1.0, 2.0, 4.0]
        stub.faults = [500] * 6
        with pytest.raises(ServiceError, match=r"'job-0': status 500 .* \(6 attempts\)"):
            use(stub, lambda service: service.job("job-0"))
        stub.faults = [400]
        with pytest.raises(ServiceError, match="cancel the job 'job-0': status 400"):
            use(stub, lambda service: service.cancel("job-0"))
        assert use(stub, lambda service: service.job("job-9")).status is JobStatus.FAILED
        stub.faults = [401]
        with pytest.raises(ConfigurationError, match="base_url"):
            use(stub, lambda service: service.job("job-0"))


def test_the_status_and_the_end_of_a_job_are_reported() -> None:
    with job_stub() as stub:
        use(stub, lambda s: s.submit("base", [SUPERVISED], FineTuningOptions(), key="k"))
        (job,) = stub.jobs
        expected = {"running": JobStatus.RUNNING, "paused": JobStatus.RUNNING}
        for job["status"], status in expected.items():
            assert use(stub, lambda service: service.job("job-0")).status is status
        job |= {"status": "succeeded", "fine_tuned_model": "ft:base:1"}
        done = use(stub, lambda service: service.job("job-0"))
        assert (done.status.is_over, done.model) == (True, "ft:base:1")
        job |= {"status": "failed", "fine_tuned_model": None}
        job["error"] = {"code": "x", "message": "no memory", "param": None}
        assert use(stub, lambda service: service.job("job-0")).error == "no memory"
        assert use(stub, lambda service: service.cancel("job-0")).status is JobStatus.CANCELLED
        job["status"] = "dreaming"
        dreaming = use(stub, lambda service: service.job("job-0"))
        assert dreaming.status is JobStatus.FAILED
        assert "'dreaming'" in str(dreaming.error)


def test_examples_of_the_other_method_and_none_at_all_are_refused() -> None:
    with job_stub() as stub:
        for examples in ([], [PREFERENCE]):
            with pytest.raises(ConfigurationError, match="SupervisedExample"):
                use(stub, lambda s, e=examples: s.submit("m", e, FineTuningOptions(), key="k"))  # type: ignore[misc]
        assert stub.files == stub.jobs == []
