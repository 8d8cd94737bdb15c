"""Fine-tuning jobs in this process: a folder a job, and what it trains is a folder too.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.checkpoints.store import MANIFEST, inspect_folder, write_manifest
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    NipAstraError,
    NonFiniteLossError,
    RunDirectoryError,
    ServiceError,
)
from nip_astra.language_models.base import LANGUAGE_MODELS
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat import ChatMessage
from nip_astra.language_models.services.fine_tuning import (
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    PreferenceExample,
    SupervisedExample,
    check_length,
)
from nip_astra.rl_objectives.preference import preference_loss
from nip_astra.utils.devices import threads_for

logger = logging.getLogger(__name__)

LR = 1e-4
"""Learning rate where a job's multiple of it is 1."""
NUM_EPOCHS = 3
BATCH_SIZE = 8
BETA = 0.1
"""What a job takes where it does not say."""
NLL_WEIGHT = 1.0
"""Weight of the cross entropy of preferred answers in a preference job. Without it, DPO makes both
answers of a pair unlikely, the end of a turn among them, and small models talk without end."""
MAX_GRAD_NORM = 1.0
JOB, EXAMPLES, MODEL, ERROR = "job.json", "examples.jsonl", "model", "error"
CANCELLED = "cancelled"
"""What stands in the file `error` of a job that was cancelled."""


class _Row(NamedTuple):
    """A text to learn from: tokens that are read, then tokens that are to be said."""

    context: list[int]
    answer: list[int]


class LocalFineTuningService(FineTuningService):
    """Trains a small model of transformers, when a job is first looked at.

    All weights that can learn are trained, or those of the adapter that the parameters ask for;
    embeddings of tokens stay as they are, so that words which no example has are not forgotten.

    Supervised jobs minimise the mean cross entropy of the answers' tokens, end token included;
    preference jobs DPO's loss (arXiv:2305.18290, eq. 7), the reference being the model that the job
    starts from, plus the cross entropy of the preferred answers (arXiv:2404.19733, eq. 1). AdamW
    with a constant learning rate, on the CPU or the GPU that is given. Equal jobs give equal
    weights on the CPU.

    A trained model is named by its path from the folder that holds `directory`, so that the names
    hold where both are moved or copied. Its manifest holds the digest of each file.

    Parameters
    ----------
    directory : Path
        Where jobs and models are kept; a job is found there again by its key.
    parameters : LanguageModel.Parameters
        How models are held; a job says which one is trained.
    num_threads : int, optional
        CPU threads; None takes as many as the model's size needs.
    """

    def __init__(
        self,
        directory: Path,
        parameters: Any,
        *,
        scenario_dir: Path | None = None,
        device: torch.device | str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        self.directory, self.parameters = directory, parameters
        self.num_threads = num_threads
        self.scenario_dir, self.device = scenario_dir, torch.device(device)
        self._lock = asyncio.Lock()
        self._ending = threading.Lock()

    async def submit(
        self,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        *,
        key: str,
    ) -> FineTuningJob:
        job_id = f"job-{sha256(key.encode()).hexdigest()[:16]}"
        folder = self.directory / job_id
        if not (folder / JOB).exists():
            if not examples:
                raise ServiceError(
                    f"a job was to train {model!r}, but it has no examples. Give at least one."
                )
            with _raising_run_directory_error(folder):
                self._write_job(folder, model, examples, options, key)
        return self._state(folder)

    def _write_job(
        self,
        folder: Path,
        model: str,
        examples: Sequence[SupervisedExample] | Sequence[PreferenceExample],
        options: FineTuningOptions,
        key: str,
    ) -> None:
        unfinished = folder.with_name(f".new-{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        lines = "".join(json.dumps(one._asdict()) + "\n" for one in examples)
        (unfinished / EXAMPLES).write_text(lines, encoding="utf-8")
        job = {"model": model, "key": key, "options": asdict(options)}
        content = job | {"digest": _digest(job, lines)}
        (unfinished / JOB).write_text(json.dumps(content, indent=2), encoding="utf-8")
        unfinished.rename(folder)

    async def job(self, job_id: str) -> FineTuningJob:
        folder = self.directory / job_id
        async with self._lock:
            if not self._state(folder).status.is_over:
                await asyncio.to_thread(self._run, folder)
        return self._state(folder)

    async def cancel(self, job_id: str) -> FineTuningJob:
        folder = self.directory / job_id
        with self._ending, _raising_run_directory_error(folder):
            if not self._state(folder).status.is_over:
                (folder / ERROR).write_text(CANCELLED, encoding="utf-8")
        return self._state(folder)

    def take_up(self, model: str) -> str:
        path = Path(self.place_of(model))
        if not path.is_absolute():
            return model
        fault = "" if path.is_dir() else "there is no such folder"
        if (path / MANIFEST).exists():
            # An older version wrote none.
            _, fault = inspect_folder(path)
        if fault:
            raise CheckpointError(
                f"the trained model {path} cannot be used: {fault}. Restore its files, or start a "
                "new run."
            )
        return self._name_of(path.parent) if path.parent.parent == self.directory else model

    def place_of(self, model: str) -> str:
        """Return the path of a model that a job of this service has trained, any other as it is.

        A path from before the run was moved or copied leads to the model in its present folder.
        """
        path = Path(model)
        if path.parts[-3::2] != (self.directory.name, MODEL):
            return model
        own = self.directory / path.parts[-2] / MODEL
        return str(own) if own.exists() or not path.is_absolute() else model

    def _name_of(self, folder: Path) -> str:
        return f"{self.directory.name}/{folder.name}/{MODEL}"

    def _state(self, folder: Path) -> FineTuningJob:
        if not (folder / JOB).exists():
            error = f"{self.directory} holds no such job"
            return FineTuningJob(folder.name, JobStatus.FAILED, error=error)
        if (folder / ERROR).exists():
            error = (folder / ERROR).read_text(encoding="utf-8")
            status = JobStatus.CANCELLED if error == CANCELLED else JobStatus.FAILED
            return FineTuningJob(folder.name, status, error=error)
        if (folder / MODEL).is_dir():
            return FineTuningJob(folder.name, JobStatus.SUCCEEDED, model=self._name_of(folder))
        return FineTuningJob(folder.name, JobStatus.QUEUED)

    def _run(self, folder: Path) -> None:
        def raise_if_cancelled() -> None:
            if (folder / ERROR).exists():
                raise _CancelledError

        try:
            job, examples = _read_job(folder)
            options = FineTuningOptions(**job["options"])
            model = self._load(self.place_of(job["model"]))
            train = _train_preferred if options.method == "dpo" else _train_supervised
            with threads_for(model.num_parameters(), self.num_threads):
                loss = train(model, examples, options, raise_if_cancelled)
            logger.info("job %s trained %s; its last loss is %.4g", folder.name, model.source, loss)
        except _CancelledError:
            return
        except NipAstraError as error:
            with _raising_run_directory_error(folder):
                (folder / ERROR).write_text(str(error), encoding="utf-8")
            return
        unfinished = folder / f".new-{MODEL}"
        with _raising_run_directory_error(folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            model.save_pretrained(unfinished)
            write_manifest(unfinished, 0, {"job": folder.name}, is_best=False)
            with self._ending:
                if not (folder / ERROR).exists():
                    unfinished.rename(folder / MODEL)

    def _load(self, name: str) -> HuggingFaceLanguageModel:
        parameters = self.parameters.model_copy(update={"model": name})
        backend = LANGUAGE_MODELS.get(parameters.type_name)
        model = backend.load(
            parameters, device=self.device, scenario_dir=self.scenario_dir, trainable=True
        )
        if not isinstance(model, HuggingFaceLanguageModel):
            raise ConfigurationError(
                f"a job in this process was to train {name!r} of the backend "
                f"{parameters.type_name!r}, but it trains models of huggingface only. Use that "
                "backend, or a service that trains."
            )
        return model


class _CancelledError(Exception):
    """Ends the training of a job that has been cancelled."""


@contextmanager
def _raising_run_directory_error(folder: Path) -> Iterator[None]:
    """Name the job that could not be written; it is as it was before."""
    try:
        yield
    except NipAstraError:
        raise
    except Exception as error:
        # safetensors and tokenizers have errors of their own for a full disk.
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(
            f"the job {folder} could not be written: {reason}. Free space or change the "
            "permissions, and resume the run: the job is trained then, and no rollout is lost."
        ) from error


def _digest(job: Mapping[str, Any], examples: str) -> str:
    content = {name: job[name] for name in ("model", "key", "options")}
    return sha256(json.dumps([content, examples], sort_keys=True).encode()).hexdigest()


def _read_job(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is to be trained, and the examples."""
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        text = (folder / EXAMPLES).read_text(encoding="utf-8")
        # An older version wrote no digest.
        is_whole = job.get("digest", "") in ("", _digest(job, text))
        examples = [json.loads(line) for line in text.split("\n") if line]
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. Restore its files.") from error
    if not is_whole:
        raise CheckpointError(f"{folder} is no longer as it was submitted. Restore its files.")
    return job, examples


def _train_supervised(
    model: HuggingFaceLanguageModel,
    examples: list[dict[str, Any]],
    options: FineTuningOptions,
    after_step: Callable[[], None],
) -> float:
    rows = []
    for number, one in enumerate(examples, 1):
        *before, last = one["messages"]
        rows.append(_row(model, number, before, last["content"]))

    def loss(batch: Sequence[int]) -> Tensor:
        logprobs_B, counts_B = _answer_logprobs(model, [rows[place] for place in batch])
        return -logprobs_B.sum() / counts_B.sum()

    return _optimise(model, len(rows), loss, options, after_step)


def _train_preferred(
    model: HuggingFaceLanguageModel,
    examples: list[dict[str, Any]],
    options: FineTuningOptions,
    after_step: Callable[[], None],
) -> float:
    preferred, rejected = (
        [
            _row(model, number, one["messages"], one[answer])
            for number, one in enumerate(examples, 1)
        ]
        for answer in ("preferred", "rejected")
    )

    def measure(batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The log-ratios of pairs, and the preferred answers' mean log-probability of a token."""
        rows = [preferred[place] for place in batch] + [rejected[place] for place in batch]
        logprobs_B, counts_B = _answer_logprobs(model, rows)
        chosen_B, other_B = logprobs_B.chunk(2)
        return chosen_B - other_B, chosen_B.sum() / counts_B[: len(batch)].sum()

    with torch.no_grad():
        reference = torch.cat([measure([place])[0] for place in range(len(examples))])
    beta = BETA if options.beta is None else options.beta

    def loss(batch: Sequence[int]) -> Tensor:
        logratios_B, mean_logprob = measure(batch)
        found = preference_loss(logratios_B, reference[list(batch)], kind="sigmoid", beta=beta)
        return found.loss - NLL_WEIGHT * mean_logprob

    return _optimise(model, len(examples), loss, options, after_step)


def _optimise(
    model: HuggingFaceLanguageModel,
    num_rows: int,
    loss_of: Any,
    options: FineTuningOptions,
    after_step: Callable[[], None],
) -> float:
    """Minimise a loss over minibatches, and give its last value; `after_step` may raise to end."""
    multiplier = 1.0 if options.lr_multiplier is None else options.lr_multiplier
    embeddings = {id(one) for one in model.module.get_input_embeddings().parameters()}
    if model.module.get_output_embeddings() is not None:
        embeddings |= {id(one) for one in model.module.get_output_embeddings().parameters()}
    # Else words that no example has are said less and less.
    weights = [
        one for one in model.module.parameters() if one.requires_grad and id(one) not in embeddings
    ]
    optimizer = torch.optim.AdamW(weights, lr=LR * multiplier, weight_decay=0.0)
    order, last = random.Random(options.seed or 0), float("nan")
    size = options.batch_size or BATCH_SIZE
    model.module.train()
    with torch.enable_grad():
        for _ in range(options.num_epochs or NUM_EPOCHS):
            places = order.sample(range(num_rows), num_rows)
            for start in range(0, num_rows, size):
                loss = loss_of(places[start : start + size])
                if not torch.isfinite(loss):
                    raise NonFiniteLossError(
                        "a job was to train a model, but its loss is not finite. Lower "
                        "fine_tune_lr_multiplier."
                    )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
                optimizer.step()
                last = float(loss.detach())
                after_step()
    model.module.eval()
    return last


def _row(
    model: HuggingFaceLanguageModel, number: int, messages: Sequence[ChatMessage], answer: str
) -> _Row:
    tokenizer = model.tokenizer
    text = tokenizer.apply_chat_template(
        [dict(one) for one in messages], tokenize=False, add_generation_prompt=True
    )
    context = tokenizer.encode(text, add_special_tokens=False)
    said = [*tokenizer.encode(answer, add_special_tokens=False), model.end_ids[0]]
    check_length(number, len(context) + len(said), model.context_window)
    return _Row(context, said)


def _answer_logprobs(
    model: HuggingFaceLanguageModel, rows: Sequence[_Row]
) -> tuple[Tensor, Tensor]:
    """Each answer's log-probability, nats, and its number of tokens, both `[B]`."""
    length = max(len(row.context) + len(row.answer) for row in rows)
    ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
    is_read_BT = torch.zeros(len(rows), length, dtype=torch.long)
    is_said_BT = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        end = len(row.context) + len(row.answer)
        ids_BT[number, :end] = torch.tensor([*row.context, *row.answer])
        is_read_BT[number, :end] = 1
        is_said_BT[number, len(row.context) : end] = True
    ids_BT, is_said_BT = ids_BT.to(model.device), is_said_BT.to(model.device)
    logits_BTV = model.module(
        input_ids=ids_BT, attention_mask=is_read_BT.to(model.device)
    ).logits.float()
    # The logits at a place are those of the token after it.
    logprobs_BT = torch.log_softmax(logits_BTV[:, :-1], -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    said_BT = is_said_BT[:, 1:]
    return (logprobs_BT * said_BT).sum(1), said_BT.sum(1)
