"""Fine-tuning jobs of OpenAI's protocol: requests, recovery of jobs, and messages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningParameters,
    JobStatus,
    OpenAIFineTuning,
    PreferenceExample,
    SupervisedExample,
)
from tests.language_models.services.job_stub import JobStub, job_stub

pytest.importorskip("openai")

SUPERVISED = SupervisedExample(
    ({"role": "user", "content": "hé"}, {"role": "assistant", "content": "ho"})
)
PREFERENCE = PreferenceExample(({"role": "user", "content": "hé"},), "ho", "no")


def use(stub: JobStub, method: str, *given: Any, **options: Any) -> FineTuningJob:
    """Call a method of a service that is opened for this call only."""

    async def pause(seconds: float) -> None:
        stub.pauses.append(seconds)

    async def whole() -> FineTuningJob:
        service = OpenAIFineTuning(FineTuningParameters(base_url=stub.base_url), pause=pause)
        try:
            return await getattr(service, method)(*given, **options)  # type: ignore[no-any-return]
        finally:
            await service.close()

    return asyncio.run(whole())


def submit(stub: JobStub, *examples: Any, key: str = "k", **options: Any) -> FineTuningJob:
    return use(stub, "submit", "base", examples, FineTuningOptions(**options), key=key)


def test_a_supervised_job_is_submitted_with_its_options() -> None:
    options = {"num_epochs": 2, "batch_size": 4, "lr_multiplier": 0.5, "seed": 2**31 + 3}
    with job_stub() as stub:
        job = submit(stub, SUPERVISED, **options)
    assert (job.job_id, job.status, job.model, job.error) == ("job-0", "queued", None, None)
    hyper_parameters = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5}
    method = {"type": "supervised", "supervised": {"hyperparameters": hyper_parameters}}
    created = {"model": "base", "training_file": "file-0", "method": method, "seed": 3}
    assert stub.created == [created | {"metadata": {"nip_astra_key": "k"}}]
    assert json.loads(stub.contents["file-0"]) == {"messages": list(SUPERVISED.messages)}


def test_a_preference_job_has_openais_form_and_leaves_the_rest_to_the_service() -> None:
    with job_stub() as stub:
        submit(stub, PREFERENCE, PREFERENCE, method="dpo", beta=0.2)
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
    keys = [f"{n}" * 90 for n in range(3)]
    with job_stub() as stub:
        ids = [submit(stub, SUPERVISED, key=key).job_id for key in [*keys, *keys]]
    assert ids == [f"job-{n}" for n in range(3)] * 2
    assert len(stub.files) == 1, "the same examples are uploaded once"


def test_a_job_whose_response_was_lost_is_not_submitted_again() -> None:
    with job_stub() as stub:
        # Jobs are listed, files are listed, the file is sent, the job is started.
        stub.faults = ["", "", "", "lost"]
        job = submit(stub, SUPERVISED)
    assert (job.job_id, len(stub.jobs), stub.pauses) == ("job-0", 1, [1.0])


def test_failures_that_may_pass_are_retried_and_others_are_errors() -> None:
    with job_stub() as stub:
        stub.faults = [500, 429, 503]
        submit(stub, SUPERVISED)
        assert stub.pauses == [1.0, 2.0, 4.0]
        stub.faults = [500] * 6
        with pytest.raises(ServiceError, match=r"'job-0': status 500 .* \(6 attempts\)"):
            use(stub, "job", "job-0")
        stub.faults = [400]
        with pytest.raises(ServiceError, match="cancel the job 'job-0': status 400"):
            use(stub, "cancel", "job-0")
        assert use(stub, "job", "job-9").status is JobStatus.FAILED
        stub.faults = [401]
        with pytest.raises(ConfigurationError, match="base_url"):
            use(stub, "job", "job-0")


def test_the_status_and_the_end_of_a_job_are_reported() -> None:
    with job_stub() as stub:
        submit(stub, SUPERVISED)
        (job,) = stub.jobs
        for job["status"] in ("running", "paused"):
            assert use(stub, "job", "job-0").status is JobStatus.RUNNING
        job |= {"status": "succeeded", "fine_tuned_model": "ft:base:1"}
        done = use(stub, "job", "job-0")
        assert (done.status.is_over, done.model) == (True, "ft:base:1")
        job |= {"status": "failed", "fine_tuned_model": None}
        job["error"] = {"code": "x", "message": "no memory", "param": None}
        assert use(stub, "job", "job-0").error == "no memory"
        assert use(stub, "cancel", "job-0").status is JobStatus.CANCELLED
        job["status"] = "dreaming"
        dreaming = use(stub, "job", "job-0")
        assert dreaming.status is JobStatus.FAILED
        assert "'dreaming'" in str(dreaming.error)


def test_examples_of_the_other_method_and_none_at_all_are_refused() -> None:
    with job_stub() as stub:
        for examples in ([], [PREFERENCE]):
            with pytest.raises(ConfigurationError, match="SupervisedExample"):
                submit(stub, *examples)
        assert stub.files == stub.jobs == []
