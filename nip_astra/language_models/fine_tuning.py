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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
from nip_astra.language_models.adapters import LoraParameters, add_adapter, load_adapter
from nip_astra.language_models.base import LANGUAGE_MODELS, pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.message_format import detect_format
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.services.fine_tuning import (
    DEFAULTS,
    Examples,
    FineTuningJob,
    FineTuningOptions,
    FineTuningService,
    JobStatus,
    LrSchedule,
    Method,
    TrainedWeights,
    without_weight,
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
    """A conversation of which a model learns its own messages."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages in OpenAI's form. Those of the assistant are learned, except with a `weight` of
    0."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model reads, in OpenAI's form."""

    @property
    def learned(self) -> list[int]:
        """Return the indices of the messages that are learned, in order."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and message.get("weight", 1) != 0
        ]


TrainingExample: TypeAlias = tuple[TrainingText, ...]
"""A conversation, or those with the preferred and the rejected answer."""


def preference_texts(
    before: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> TrainingExample:
    """Return one conversation for each answer, of which only the answer is learned."""
    unlearned = [without_weight(message) for message in before]
    return tuple(TrainingText((*unlearned, answer), tuple(tools)) for answer in answers)


class TokenRow(NamedTuple):
    """A conversation's tokens: those before its first learned message, and the others."""

    context: tuple[int, ...]
    ids: tuple[int, ...]
    is_learned: tuple[bool, ...]
    """Of `ids`: whether the model generates the token, the end of its turn included."""


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
    trained_weights: TrainedWeights
    seed: int
    lora_rank: int | None
    """Rank of a new adapter; None trains all weights."""
    lora_alpha: float
    start_from: str | None
    """Folder of an adapter to continue with."""
    device: str
    num_threads: int
    """CPU cores; they affect the last digits."""
    last_message_only: bool = False
    """Whether a supervised example teaches its last message alone, as in jobs of older versions."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FineTuningPlan:
        """Restore a stored plan; one of an older version gets the values that it trained with."""
        older: dict[str, Any] = {
            "nll_weight": 0.0,
            "freeze_embeddings": False,
            "lr_schedule": "linear",
            "truncate_prompts": False,
            "last_message_only": True,
        }
        is_full = values.get("lora_rank") is None and values.get("start_from") is None
        older["trained_weights"] = "all" if is_full else "adapter"
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
        examples: Sequence[TrainingExample],
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
        self.rows = self._encode(examples)
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

    def _encode(self, examples: Sequence[TrainingExample]) -> list[list[TokenRow]]:
        if self.plan.last_message_only:
            examples = [tuple(map(_with_last_message_only, example)) for example in examples]
        return token_rows(
            self.model.tokenizer,
            examples,
            self.model.end_ids,
            window=self.model.context_window,
            truncate_prompts=self.plan.truncate_prompts,
        )

    @property
    def num_tokens_trained(self) -> int:
        """Number of learned tokens over all steps so far."""
        per_epoch = sum(sum(row.is_learned) for rows in self.rows for row in rows)
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
            return nll_loss(*self._logprobs([row for index in chosen for row in self.rows[index]]))
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
        """Return the log-probabilities of the tokens, and which of them are learned, `[B, T]`."""
        context = pad_left([row.context for row in rows], self.device)
        ids_BT, mask_BT = pad_right([row.ids for row in rows], self.device)
        is_learned_BT = torch.zeros_like(mask_BT)
        is_learned_BT[mask_BT] = torch.tensor(
            [is_learned for row in rows for is_learned in row.is_learned], device=self.device
        )
        return self.model.logprobs(*context, ids_BT, mask_BT), is_learned_BT

    def _preferences(
        self, pairs: Sequence[Sequence[TokenRow]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return log p(preferred) - log p(rejected), `[B]` nats, and the preferred tokens' own."""
        rows = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        logprobs_BT, mask_BT = self._logprobs(rows)
        preferred_B, rejected_B = masked_sum(logprobs_BT, mask_BT, dim=1).chunk(2)
        return preferred_B - rejected_B, (logprobs_BT[: len(pairs)], mask_BT[: len(pairs)])

    @torch.no_grad()
    def evaluate(self, examples: Sequence[TrainingExample]) -> float:
        """Return the mean negative log-probability per learned token, nats.

        Of a pair only the preferred answer counts.
        """
        first_texts = [example[:1] for example in examples]
        rows = [row for rows in self._encode(first_texts) for row in rows]
        total = count = 0.0
        for start in range(0, len(rows), self.plan.batch_size):
            logprobs_BT, is_learned_BT = self._logprobs(rows[start : start + self.plan.batch_size])
            total -= float(masked_sum(logprobs_BT, is_learned_BT))
            count += int(is_learned_BT.sum())
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


def _with_last_message_only(text: TrainingText) -> TrainingText:
    *before, last = text.messages
    return text._replace(messages=(*map(without_weight, before), last))


class RenderedTurn(NamedTuple):
    """A learned message and the text before it, as the chat template renders them."""

    before: str
    """The conversation up to the place where the model's message begins."""
    written: str
    """The rest of the conversation up to and including the message. It is empty where the template
    opens a message in another way than it renders one."""
    answer: str
    """The message's own text."""


def token_rows(
    tokenizer: Any,
    examples: Sequence[TrainingExample],
    end_ids: Sequence[int],
    *,
    window: int,
    truncate_prompts: bool = False,
) -> list[list[TokenRow]]:
    """Return the tokens of each example, as the model reads and generates them.

    The rows of a supervised example together hold all messages that it teaches. It is a single row
    where the template renders a message of a conversation as the model has generated it; a message
    after one that the template changes, for instance by dropping its thoughts, begins another row.
    A pair has one row for each answer.

    With `truncate_prompts` a prompt that does not fit is truncated from the left.

    Raises
    ------
    ConfigurationError
        When the chat template cannot render an example.
    ContextLengthError
        When an example exceeds the window.
    """
    rendered: dict[str, list[RenderedTurn]] = {}
    keys = [[json.dumps(text, default=dict) for text in example] for example in examples]
    for number, (example_keys, example) in enumerate(zip(keys, examples, strict=True), 1):
        for key, text in zip(example_keys, example, strict=True):
            if key in rendered:
                continue
            try:
                rendered[key] = _render_learned_turns(tokenizer, text)
            except ModelLoadError as error:
                raise ConfigurationError(f"example {number} cannot be used: {error}") from error
    encoded = _encode_parts(tokenizer, rendered.values())
    rows_of_examples = []
    for number, example_keys in enumerate(keys, 1):
        rows: list[TokenRow] = []
        for key in example_keys:
            rows_of_text = _join_turns(encoded, end_ids, rendered[key])
            if truncate_prompts and any(len(row.ids) >= window for row in rows_of_text):
                # Apart, the learned messages may fit with a part of what precedes each.
                rows_of_text = [_encode_turn(encoded, end_ids, turn) for turn in rendered[key]]
            rows += rows_of_text
        longest = max(len(row.ids) for row in rows)
        if truncate_prompts and longest < window:
            rows = [row._replace(context=row.context[longest - window :]) for row in rows]
        num_tokens = max(len(row.context) + len(row.ids) for row in rows)
        if num_tokens > window:
            raise ContextLengthError(
                f"example {number} has {num_tokens} tokens, but the model's window holds {window}. "
                "Shorten it, or leave it out."
            )
        rows_of_examples.append(rows)
    return rows_of_examples


def _render_learned_turns(tokenizer: Any, text: TrainingText) -> list[RenderedTurn]:
    messages = [_without_key(message, "weight") for message in text.messages]
    uses_tools = text.tools or any(message.get("tool_calls") for message in messages)
    if uses_tools and not detect_format(tokenizer).shows_tools:
        raise ModelLoadError(
            "the chat template of the model shows no tools. Remove tools and tool_calls, or choose "
            "another model."
        )
    turns = []
    for index in text.learned:
        before = render_chat(tokenizer, messages[:index], opens_answer=True, tools=text.tools)
        whole = render_chat(tokenizer, messages[: index + 1], opens_answer=False, tools=text.tools)
        written = whole[len(before) :] if whole.startswith(before) else ""
        if not written and messages[index].get("tool_calls"):
            raise ModelLoadError(
                "the chat template opens a message in another way than it renders one with "
                "tool_calls. Remove the calls, or choose another model."
            )
        turns.append(RenderedTurn(before, written, messages[index].get("content") or ""))
    return turns


def _without_key(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}


def _encode_parts(
    tokenizer: Any, rendered: Iterable[Sequence[RenderedTurn]]
) -> Mapping[str, tuple[int, ...]]:
    """Return the tokens of all texts of which rows consist."""
    parts: dict[str, None] = {}
    for turns in rendered:
        for turn in turns:
            parts |= dict.fromkeys(turn)
        for previous, turn in pairwise(turns):
            parts |= dict.fromkeys([_text_between(previous, turn) or ""])
    # All at once: a tokenizer takes much longer for as many calls.
    ids = tokenizer([*parts], add_special_tokens=False)["input_ids"] if parts else []
    return dict(zip(parts, map(tuple, ids), strict=True))


def _text_between(previous: RenderedTurn, turn: RenderedTurn) -> str | None:
    """Return the text between two learned messages.

    It is None if the template renders the previous message in another way than it was learned.
    """
    learned = previous.before + previous.written
    is_unchanged = previous.written and turn.before.startswith(learned)
    return turn.before[len(learned) :] if is_unchanged else None


def _encode_turn(
    encoded: Mapping[str, tuple[int, ...]], end_ids: Sequence[int], turn: RenderedTurn
) -> TokenRow:
    """Return a row with one learned message."""
    ids = encoded[turn.written]
    ends = [index for index, token in enumerate(ids) if token in end_ids]
    # Some templates end turns by text, or open answers in another way than they render them.
    ids = ids[: ends[0] + 1] if ends else (*encoded[turn.answer], *end_ids[:1])
    return TokenRow(encoded[turn.before], ids, (True,) * len(ids))


def _join_turns(
    encoded: Mapping[str, tuple[int, ...]],
    end_ids: Sequence[int],
    turns: Sequence[RenderedTurn],
) -> list[TokenRow]:
    """Return the rows of a conversation; each token is in as few of them as possible."""
    rows: list[TokenRow] = []
    previous: RenderedTurn | None = None
    for turn in turns:
        row = _encode_turn(encoded, end_ids, turn)
        between = None if previous is None else _text_between(previous, turn)
        if previous is None or between is None:
            rows.append(row)
        else:
            # What the template writes after the end token is read, not generated.
            num_learned = len(_encode_turn(encoded, end_ids, previous).ids)
            read = (*encoded[previous.written][num_learned:], *encoded[between])
            context, ids, is_learned = rows[-1]
            rows[-1] = TokenRow(
                context,
                (*ids, *read, *row.ids),
                (*is_learned, *(False,) * len(read), *row.is_learned),
            )
        previous = turn
    return rows


def _load_model(plan: FineTuningPlan, device: torch.device) -> HuggingFaceLanguageModel:
    module = load_causal_lm(*resolve_model(plan.source, None)).to(device)
    if plan.start_from is not None:
        module = load_adapter(module, Path(plan.start_from))
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
JOB_FORMAT = 2
"""Version of a stored job. In those without one a supervised example taught its last message alone,
and what was trained depended on the model's parameters."""


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
            self._lora_of_job(options.trained_weights)
            job = {"model": model, "key": key, "options": asdict(options)}
            content = job | {"digest": _digest(job, lines), "format": JOB_FORMAT}
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

    @property
    def has_adapter(self) -> bool:
        """Whether the model's parameters name an adapter."""
        return getattr(self.parameters, "lora", None) is not None

    def _lora_of_job(self, trained_weights: TrainedWeights | None) -> LoraParameters | None:
        """Return the adapter that a job trains: the model's own, if it has one."""
        lora: LoraParameters | None = getattr(self.parameters, "lora", None)
        if (trained_weights or DEFAULTS["trained_weights"]) == "adapter":
            return lora or LoraParameters()
        if lora is not None:
            raise ConfigurationError(
                "trained_weights is 'all', but the model's parameters have lora. Remove lora, or "
                "set trained_weights to 'adapter'."
            )
        return None

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
        job, examples = _read_job(folder)
        parameters = self.parameters.model_copy(update={"model": self.place_of(job["model"])})
        is_older = "format" not in job
        options = FineTuningOptions(**job["options"]).resolved()
        if is_older and getattr(parameters, "lora", None) is None:
            options["trained_weights"] = "all"
        lora = self._lora_of_job(options["trained_weights"])
        if lora is not None:
            parameters = parameters.model_copy(update={"lora": lora})
        plan = FineTuningPlan(
            **options,
            source=parameters.model,
            lora_rank=None if lora is None else lora.rank,
            lora_alpha=0.0 if lora is None else lora.alpha,
            start_from=None,
            device=str(self.device),
            num_threads=self.num_threads or 0,
            last_message_only=is_older,
        )
        model = self._load(parameters, plan.seed)
        with threads_for(model.num_parameters(), self.num_threads):
            tuning = FineTuning(plan, examples, model)
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


def _read_job(folder: Path) -> tuple[dict[str, Any], list[TrainingExample]]:
    """Read the job and its examples."""
    examples: list[TrainingExample] = []
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        text = (folder / EXAMPLES).read_text(encoding="utf-8")
        # An older version wrote no digest.
        is_whole = job.get("digest", "") in ("", _digest(job, text))
        for line in text.split("\n"):
            if line:
                examples.append(_read_example(json.loads(line)))
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. Restore its files.") from error
    if not is_whole:
        raise CheckpointError(f"the files of {folder} have changed. Restore them.")
    return job, examples


def _read_example(stored: Mapping[str, Any]) -> TrainingExample:
    messages, tools = stored["messages"], stored.get("tools", ())
    if "preferred" not in stored:
        return (TrainingText(tuple(messages), tuple(tools)),)
    answers = [{"role": "assistant", "content": stored[name]} for name in ("preferred", "rejected")]
    return preference_texts(messages, answers, tools)
