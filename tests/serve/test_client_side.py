"""The client side against the service: answers, seeds, samples, refusals, and training jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services import fine_tuning
from nip_astra.language_models.services.chat import ChatAnswer
from nip_astra.language_models.services.chat_models.local import LocalChatModel
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel
from tests.language_models.services.requests import ask, saying, texts
from tests.serve.running import Running, running

SUPERVISED = fine_tuning.SupervisedExample(
    ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"})
)
LIKED = fine_tuning.PreferenceExample(
    ({"role": "user", "content": "hello"},), "good day", "stupid cat"
)


def client(service: Running, **fields: Any) -> RetryingChatModel:
    values = {"base_url": service.base_url, "model": "tiny"} | fields
    return RetryingChatModel.load(OpenAIChatModel.Parameters(**values), scenario_dir=None)


def test_a_local_model_answers_alike(
    service: Running, tiny_model: HuggingFaceLanguageModel
) -> None:
    local = LocalChatModel(tiny_model, name="tiny")
    requests = [
        *(
            saying("hello", seed=n, num_samples=3, max_tokens=12, needs_logprobs=n % 2 == 0)
            for n in (0, 1, 2**40)
        ),
        saying("hello you", seed=1, first_sample=2, max_tokens=12, temperature=0.5),
        saying("hello you", seed=2, max_tokens=20, top_p=0.7, stop=("cat", "the")),
        saying("hello", temperature=0.0, max_tokens=12),
    ]
    here, there = ask(local, *requests), ask(client(service), *requests)
    assert [texts(outcome) for outcome in here] == [texts(outcome) for outcome in there]
    assert len({text for outcome in here for text in texts(outcome)}) > 9
    assert [outcome.usage for outcome in here[-3:]] == [outcome.usage for outcome in there[-3:]]
    ours, theirs = ([one for outcome in of for one in outcome.samples] for of in (here, there))
    for own, served in zip(ours, theirs, strict=True):
        assert own.finish_reason is served.finish_reason
        assert own.token_logprobs == pytest.approx(served.token_logprobs, abs=1e-4)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["supervised", "dpo"])
def test_a_job_has_a_key_and_ends_with_a_model(tiny_model_dir: Path, method: str) -> None:
    examples: Any = [SUPERVISED if method == "supervised" else LIKED] * 4
    options = fine_tuning.FineTuningOptions(method, num_epochs=1, batch_size=2, seed=1)  # type: ignore[arg-type]

    async def whole(base_url: str) -> fine_tuning.FineTuningJob:
        service = fine_tuning.OpenAIFineTuning(fine_tuning.FineTuningParameters(base_url=base_url))
        try:
            job = await service.submit("tiny", examples, options, key="mine")
            again = await service.submit("tiny", examples, options, key="mine")
            assert again.job_id == job.job_id
            while not job.status.is_over:
                await asyncio.sleep(0.02)
                job = await service.job(job.job_id)
            assert (await service.job("ftjob-none")).status is fine_tuning.JobStatus.FAILED
            return job
        finally:
            await service.close()

    with running({"tiny": str(tiny_model_dir)}) as service:
        done = asyncio.run(whole(service.base_url))
        assert (done.status, done.error) == (fine_tuning.JobStatus.SUCCEEDED, None)
        assert done.model is not None
        (outcome,) = ask(client(service, model=done.model), saying("hello", max_tokens=3))
        assert isinstance(outcome.samples[0], ChatAnswer)
