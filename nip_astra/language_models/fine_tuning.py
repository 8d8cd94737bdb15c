"""Fine-tuning of causal language models on examples, and jobs of it in this process.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.store import MANIFEST, inspect_folder, write_manifest
from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    ContextLengthError,
    ModelLoadError,
    NipAstraError,
    NonFiniteLossError,
    RunDirectoryError,
    ServiceError,
)
from nip_astra.language_models.adapters import LoraParameters, add_adapter, with_adapter
from nip_astra.language_models.base import LANGUAGE_MODELS, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.services.fine_tuning import (
    Examples,
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    LrSchedule,
    Method,
)
from nip_astra.language_models.services.training import LocalTrainingService, build_adamw
from nip_astra.language_models.sources import find_tokenizer, load_causal_lm, resolve_model
from nip_astra.rl_objectives.policy_losses import nll_loss
from nip_astra.rl_objectives.preference import preference_loss
from nip_astra.rl_objectives.reductions import LossOutput, masked_sum
from nip_astra.utils.devices import threads_for
from nip_astra.utils.seeding import derive_seed, derived_generator

logger = logging.getLogger(__name__)

LEARNING_RATES: dict[tuple[Method, bool], float] = {
    ("supervised", True): 1e-3,
    ("supervised", False): 2e-4,
    ("dpo", True): 2e-4,
    ("dpo", False): 2e-5,
}
"""Learning rate by method and whether an adapter is trained; multiplied by `lr_multiplier`."""
LR_SCHEDULES: Mapping[LrSchedule, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "constant": lambda progress: 1.0,
}
"""Factor of the learning rate by the share of completed steps."""
MAX_GRAD_NORM = 1.0
STATE = "state.safetensors"
"""File with an unfinished job's weights, optimizer and step."""
LARGE_STATE = 64 << 20
"""State size, in bytes, above which a state is saved every `LARGE_PERIOD` seconds."""
SMALL_PERIOD, LARGE_PERIOD = 1.0, 60.0
"""Least seconds between two saved states."""


class TrainingText(NamedTuple):
    """A conversation and its training answers: one, or the preferred and the rejected one."""

    messages: tuple[Mapping[str, str], ...]
    answers: tuple[str, ...]


class TokenRow(NamedTuple):
    """Tokens of a prompt, and those of an answer, including the end of the turn."""

    context: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class FineTuningPlan:
    """Everything that decides the result of a job; see also `FineTuningOptions`."""

    method: Method
    source: str
    """The model to train: folder, hub id or `.gguf` file."""
    num_epochs: int
    batch_size: int
    lr_multiplier: float
    beta: float
    nll_weight: float
    freeze_embeddings: bool
    lr_schedule: LrSchedule
    truncate_prompts: bool
    seed: int
    lora_rank: int | None
    """Rank of a new adapter; None trains all weights."""
    lora_alpha: float
    start_from: str | None
    """Folder of an adapter to continue with."""
    device: str
    num_threads: int
    """CPU cores; they affect the last digits."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FineTuningPlan:
        """Restore a stored plan; one of an older version gets the values that it trained with."""
        older: dict[str, Any] = {
            "nll_weight": 0.0,
            "freeze_embeddings": False,
            "lr_schedule": "linear",
            "truncate_prompts": False,
        }
        return cls(**(older | dict(values)))

    @property
    def trains_adapter(self) -> bool:
        """Whether the model's own weights stay fixed."""
        return self.lora_rank is not None or self.start_from is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


class StepReport(NamedTuple):
    """Result of one optimizer step."""

    step: int
    """Number of the step, from 1."""
    metrics: dict[str, float]
    ends_epoch: int | None
    """The epoch that ends with the step, from 1."""


class FineTuning:
    """A model in training.

    Supervised jobs minimise the mean cross entropy of the answers' tokens; preference jobs DPO's
    loss (arXiv:2305.18290, eq. 7), with the starting model as reference, plus `nll_weight` times
    the cross entropy of the preferred answers (arXiv:2404.19733, eq. 1). The optimizer is AdamW
    without weight decay. Equal plans and texts give equal weights on the CPU.
    """

    def __init__(
        self,
        plan: FineTuningPlan,
        texts: Sequence[TrainingText],
        model: HuggingFaceLanguageModel | None = None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(plan.device)
        self.model = model or _load_model(plan, self.device)
        if plan.freeze_embeddings and not plan.trains_adapter:
            module = self.model.module
            for layer in (module.get_input_embeddings(), module.get_output_embeddings()):
                if layer is not None:
                    layer.requires_grad_(False)
        self.rows = self._rows_of(texts)
        self.weights = [one for one in self.model.module.parameters() if one.requires_grad]
        self.lr = LEARNING_RATES[plan.method, plan.trains_adapter] * plan.lr_multiplier
        self.optimizer = build_adamw([{"params": self.weights}], lr=self.lr)
        self.service = LocalTrainingService(self.model, self.optimizer, learned=self.weights)
        self.steps_per_epoch = math.ceil(len(self.rows) / plan.batch_size)
        self.num_steps = self.steps_per_epoch * plan.num_epochs
        self.step = 0
        self._saved_at = -LARGE_PERIOD
        # Before the first step; later the reference no longer exists.
        self.reference: list[float] = []
        if plan.method == "dpo":
            with torch.no_grad():
                for start in range(0, len(self.rows), plan.batch_size):
                    pairs = self.rows[start : start + plan.batch_size]
                    self.reference += self._preferences(pairs)[0].tolist()

    def _rows_of(self, texts: Sequence[TrainingText]) -> list[list[TokenRow]]:
        return token_rows(
            self.model.tokenizer,
            texts,
            self.model.end_ids,
            window=self.model.context_window,
            truncate_prompts=self.plan.truncate_prompts,
        )

    @property
    def num_tokens_trained(self) -> int:
        """Number of answer tokens over all steps so far."""
        per_epoch = sum(len(row.answer) for rows in self.rows for row in rows)
        return round(per_epoch * self.step / self.steps_per_epoch)

    def run(self) -> Iterator[StepReport]:
        """Take the remaining steps, one at a time."""
        while self.step < self.num_steps:
            epoch, place = divmod(self.step, self.steps_per_epoch)
            generator = derived_generator(self.plan.seed, "order", epoch)
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            size = self.plan.batch_size
            chosen = order[place * size : (place + 1) * size]
            metrics = self._take_step(chosen)
            self.step += 1
            is_last = place + 1 == self.steps_per_epoch
            yield StepReport(self.step, metrics, epoch + 1 if is_last else None)

    def _take_step(self, chosen: Sequence[int]) -> dict[str, float]:
        batch = TensorDict({"index": torch.tensor(chosen)}, batch_size=[len(chosen)])
        metrics = self.service.forward_backward([batch], self._loss)
        lr = self.lr * LR_SCHEDULES[self.plan.lr_schedule](self.step / self.num_steps)
        if (
            not math.isfinite(metrics["loss"])
            or not self.service.optim_step(lr=lr, max_grad_norm=MAX_GRAD_NORM).was_taken
        ):
            raise NonFiniteLossError(
                f"the loss or gradient of step {self.step + 1} is not finite. Lower the "
                "learning-rate multiplier of the job."
            )
        return metrics

    def _loss(self, batch: TensorDict) -> LossOutput:
        chosen = batch["index"].tolist()
        if self.plan.method == "supervised":
            return nll_loss(*self._logprobs([self.rows[index][0] for index in chosen]))
        logratios_B, preferred = self._preferences([self.rows[index] for index in chosen])
        reference_B = torch.tensor([self.reference[index] for index in chosen])
        loss, metrics = preference_loss(
            logratios_B, reference_B.to(logratios_B), kind="sigmoid", beta=self.plan.beta
        )
        if self.plan.nll_weight:
            nll = nll_loss(*preferred)
            loss, metrics = loss + self.plan.nll_weight * nll.loss, metrics | nll.metrics
        return LossOutput(loss, metrics)

    def _logprobs(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        context = pad_left([row.context for row in rows], self.device)
        ids_BT, mask_BT = pad_right([row.answer for row in rows], self.device)
        return self.model.logprobs(*context, ids_BT, mask_BT), mask_BT

    def _preferences(
        self, pairs: Sequence[Sequence[TokenRow]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return log p(preferred) - log p(rejected), `[B]` nats, and the preferred tokens' own."""
        rows = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        logprobs_BT, mask_BT = self._logprobs(rows)
        preferred_B, rejected_B = masked_sum(logprobs_BT, mask_BT, dim=1).chunk(2)
        return preferred_B - rejected_B, (logprobs_BT[: len(pairs)], mask_BT[: len(pairs)])

    @torch.no_grad()
    def evaluate(self, texts: Sequence[TrainingText]) -> float:
        """Return the mean negative log-probability per token of the first answers, nats."""
        rows = [pair[0] for pair in self._rows_of(texts)]
        total = count = 0.0
        for start in range(0, len(rows), self.plan.batch_size):
            logprobs_BT, mask_BT = self._logprobs(rows[start : start + self.plan.batch_size])
            total -= float(logprobs_BT.sum())
            count += int(mask_BT.sum())
        return total / count

    # ---- files

    def save(self, folder: Path) -> None:
        """Write the result: an adapter, or the whole model with its tokenizer."""
        self.model.save(folder)
        if not self.plan.trains_adapter:
            self.model.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Tensor]:
        """Return weights, optimizer, step and reference, to continue in another process."""
        state = {f"weight.{index}": one.detach() for index, one in enumerate(self.weights)}
        for index, one in enumerate(self.weights):
            for name, value in self.optimizer.state.get(one, {}).items():
                state[f"optimizer.{index}.{name}"] = value
        state["step"] = torch.tensor(self.step)
        state["reference"] = torch.tensor(self.reference, dtype=torch.float64)
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state` of another process."""
        for index, one in enumerate(self.weights):
            one.copy_(state[f"weight.{index}"])
            prefix = f"optimizer.{index}."
            kept = {
                name.removeprefix(prefix): value.clone()
                for name, value in state.items()
                if name.startswith(prefix)
            }
            if kept:
                self.optimizer.state[one] = kept
        self.step = int(state["step"])
        self.reference = state["reference"].tolist()

    def save_progress(self, folder: Path, report: StepReport, *, is_needed: bool = False) -> None:
        """Save the state and the report of its step, if the last one was saved long enough ago."""
        waited = time.monotonic() - self._saved_at
        if not is_needed and waited < SMALL_PERIOD:
            return
        state = {name: value.contiguous() for name, value in self.state().items()}
        is_small = sum(value.nbytes for value in state.values()) <= LARGE_STATE
        if is_small or is_needed or waited >= LARGE_PERIOD:
            about = {"metrics": report.metrics, "epoch": report.ends_epoch}
            unfinished = folder / f"{STATE}.new"
            save_file(state, unfinished, metadata={"about": json.dumps(about)})
            unfinished.replace(folder / STATE)
            self._saved_at = time.monotonic()

    def load_progress(self, folder: Path) -> StepReport | None:
        """Continue from the saved state, and return the report of its step; None without one."""
        path = folder / STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["about"])
                self.load_state({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
        except (
            SafetensorError,
            OSError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            raise CheckpointError(
                f"the state {path} cannot be used: {error}. Delete it to start the job again."
            ) from error
        return StepReport(self.step, about["metrics"], about["epoch"])


def token_rows(
    tokenizer: Any,
    texts: Sequence[TrainingText],
    end_ids: Sequence[int],
    *,
    window: int,
    truncate_prompts: bool = False,
) -> list[list[TokenRow]]:
    """Return the tokens of each text's answers, as the model reads and generates them.

    With `truncate_prompts` a prompt that does not fit is truncated from the left.
    """
    rendered: dict[str, list[tuple[str, str, str]]] = {}
    keys = [json.dumps(text, default=dict) for text in texts]
    for number, (key, text) in enumerate(zip(keys, texts, strict=True), 1):
        if key in rendered:
            continue
        try:
            rendered[key] = [_rendered(tokenizer, text, answer) for answer in text.answers]
        except ModelLoadError as error:
            raise ConfigurationError(f"example {number} cannot be used: {error}") from error
    # All at once: a tokenizer takes much longer for as many calls.
    parts = list(dict.fromkeys(part for rows in rendered.values() for row in rows for part in row))
    found = tokenizer(parts, add_special_tokens=False)["input_ids"] if parts else []
    encoded = dict(zip(parts, map(tuple, found), strict=True))
    rows_of_texts = []
    for number, key in enumerate(keys, 1):
        rows = [_token_row(encoded, end_ids, *row) for row in rendered[key]]
        longest = max(len(row.answer) for row in rows)
        if truncate_prompts and longest < window:
            rows = [row._replace(context=row.context[longest - window :]) for row in rows]
        num_tokens = max(len(row.context) + len(row.answer) for row in rows)
        if num_tokens > window:
            raise ContextLengthError(
                f"example {number} has {num_tokens} tokens, but the model's window holds {window}. "
                "Shorten it, or leave it out."
            )
        rows_of_texts.append(rows)
    return rows_of_texts


def _rendered(tokenizer: Any, text: TrainingText, answer: str) -> tuple[str, str, str]:
    """Return the text before the answer, what the template makes of the answer, and the answer."""
    before = render_chat(tokenizer, text.messages, opens_answer=True)
    last = {"role": "assistant", "content": answer}
    whole = render_chat(tokenizer, [*text.messages, last], opens_answer=False)
    return before, whole[len(before) :] if whole.startswith(before) else "", answer


def _token_row(
    encoded: Mapping[str, tuple[int, ...]],
    end_ids: Sequence[int],
    before: str,
    written: str,
    answer: str,
) -> TokenRow:
    ids = encoded[written]
    ends = [place for place, token in enumerate(ids) if token in end_ids]
    # Some templates end turns by text, or open answers in another way than they render them.
    ids = ids[: ends[0] + 1] if ends else (*encoded[answer], *end_ids[:1])
    return TokenRow(encoded[before], ids)


def _load_model(plan: FineTuningPlan, device: torch.device) -> HuggingFaceLanguageModel:
    module = load_causal_lm(*resolve_model(plan.source, None)).to(device)
    if plan.start_from is not None:
        module = with_adapter(module, Path(plan.start_from))
    elif plan.lora_rank is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(plan.seed, "adapter"))
            module = add_adapter(module, LoraParameters(rank=plan.lora_rank, alpha=plan.lora_alpha))
    return HuggingFaceLanguageModel(
        module,
        find_tokenizer(plan.source, None, None),
        device=device,
        trainable=True,
        dtype=torch.float32,
    )


# ---- jobs in this process

JOB, EXAMPLES, MODEL, ERROR = "job.json", "examples.jsonl", "model", "error"


class LocalFineTuningService(FineTuningService):
    """Runs `FineTuning` on a small transformers model when a job's status is first requested.

    A killed job continues after its last saved step. Equal jobs give equal weights on the CPU. The
    name of a trained model is its path from the parent of `directory`, so that it stays valid when
    both are moved or copied.

    Parameters
    ----------
    directory : Path
        Folder of jobs and models.
    parameters : LanguageModel.Parameters
        Parameters of the backend; a job names the model.
    num_threads : int, optional
        CPU threads; None chooses by the model's size.
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

    async def submit(
        self, model: str, examples: Examples, options: FineTuningOptions, *, key: str
    ) -> FineTuningJob:
        job_id = f"job-{sha256(key.encode()).hexdigest()[:16]}"
        folder = self.directory / job_id
        if not (folder / JOB).exists():
            if not examples:
                raise ServiceError(f"a job for {model!r} has no examples. Give at least one.")
            lines = "".join(json.dumps(example._asdict()) + "\n" for example in examples)
            job = {"model": model, "key": key, "options": asdict(options)}
            content = job | {"digest": _digest(job, lines)}
            unfinished = folder.with_name(f".new-{folder.name}")
            with _raising_run_directory_error(folder):
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                (unfinished / EXAMPLES).write_text(lines, encoding="utf-8")
                (unfinished / JOB).write_text(json.dumps(content, indent=2), encoding="utf-8")
                unfinished.rename(folder)
        return self._state(folder)

    async def job(self, job_id: str) -> FineTuningJob:
        folder = self.directory / job_id
        async with self._lock:
            if not self._state(folder).status.is_over:
                await asyncio.to_thread(self._run, folder)
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
        """Return the path of a model trained by a job of this service, any other name unchanged.

        A path from before the run was moved or copied leads to the model in its current folder.
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
            return FineTuningJob(folder.name, JobStatus.FAILED, error=error)
        if (folder / MODEL).is_dir():
            return FineTuningJob(folder.name, JobStatus.SUCCEEDED, model=self._name_of(folder))
        return FineTuningJob(folder.name, JobStatus.QUEUED)

    def _run(self, folder: Path) -> None:
        try:
            model = self._train(folder)
        except RunDirectoryError:
            raise
        except NipAstraError as error:
            with _raising_run_directory_error(folder):
                (folder / ERROR).write_text(str(error), encoding="utf-8")
            return
        unfinished = folder / f".new-{MODEL}"
        with _raising_run_directory_error(folder):
            shutil.rmtree(unfinished, ignore_errors=True)
            model.save_pretrained(unfinished)
            write_manifest(unfinished, 0, {"job": folder.name}, is_best=False)
            unfinished.rename(folder / MODEL)
            (folder / STATE).unlink(missing_ok=True)

    def _train(self, folder: Path) -> HuggingFaceLanguageModel:
        job, texts = _read_job(folder)
        parameters = self.parameters.model_copy(update={"model": self.place_of(job["model"])})
        lora = getattr(parameters, "lora", None)
        options = FineTuningOptions(**job["options"]).resolved()
        plan = FineTuningPlan(
            **options,
            source=parameters.model,
            lora_rank=None if lora is None else lora.rank,
            lora_alpha=0.0 if lora is None else lora.alpha,
            start_from=None,
            device=str(self.device),
            num_threads=self.num_threads or 0,
        )
        model = self._load(parameters, plan.seed)
        with threads_for(model.num_parameters(), self.num_threads):
            tuning = FineTuning(plan, texts, model)
            report = tuning.load_progress(folder)
            for report in tuning.run():
                with _raising_run_directory_error(folder):
                    tuning.save_progress(folder, report)
        loss = float("nan") if report is None else report.metrics["loss"]
        logger.info("job %s trained %s; last loss %.4g", folder.name, model.source, loss)
        return model

    def _load(self, parameters: Any, seed: int) -> HuggingFaceLanguageModel:
        backend = LANGUAGE_MODELS.get(parameters.type_name)
        with torch.random.fork_rng(devices=[]):
            # A new adapter is drawn from the global generator.
            torch.manual_seed(derive_seed(seed, "adapter"))
            model = backend.load(
                parameters, device=self.device, scenario_dir=self.scenario_dir, trainable=True
            )
        if not isinstance(model, HuggingFaceLanguageModel):
            raise ConfigurationError(
                f"the backend {parameters.type_name!r} cannot be trained here. Use huggingface, or "
                "a service that trains."
            )
        return model


@contextmanager
def _raising_run_directory_error(folder: Path) -> Iterator[None]:
    """Convert errors of writing a job's files to one that names the job."""
    try:
        yield
    except NipAstraError:
        raise
    except Exception as error:
        # safetensors and tokenizers have errors of their own for a full disk.
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(
            f"the job {folder} could not be written: {reason}. Free space or change the "
            "permissions, then resume the run: the job continues."
        ) from error


def _digest(job: Mapping[str, Any], examples: str) -> str:
    content = {name: job[name] for name in ("model", "key", "options")}
    return sha256(json.dumps([content, examples], sort_keys=True).encode()).hexdigest()


def _read_job(folder: Path) -> tuple[dict[str, Any], list[TrainingText]]:
    """Read the job and its examples."""
    texts = []
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        text = (folder / EXAMPLES).read_text(encoding="utf-8")
        # An older version wrote no digest.
        is_whole = job.get("digest", "") in ("", _digest(job, text))
        for example in (json.loads(line) for line in text.split("\n") if line):
            *before, last = example["messages"]
            if "preferred" in example:
                answers = (example["preferred"], example["rejected"])
                texts.append(TrainingText((*before, last), answers))
            else:
                texts.append(TrainingText(tuple(before), (last["content"],)))
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. Restore its files.") from error
    if not is_whole:
        raise CheckpointError(f"the files of {folder} have changed. Restore them.")
    return job, texts
