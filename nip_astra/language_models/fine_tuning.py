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
        indices = []
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant" and message.get("weight", 1) != 0:
                indices.append(index)
        return indices

    def teaching_last_message(self) -> TrainingText:
        """Return the same conversation, of which only the last message may be learned."""
        *before, last = self.messages
        return self._replace(messages=(*map(without_weight, before), last))


TrainingExample: TypeAlias = tuple[TrainingText, ...]
"""A conversation, or those with the preferred and the rejected answer."""


def preference_texts(
    before: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> TrainingExample:
    """Return one conversation for each answer, of which only the answer is learned."""
    history = [without_weight(message) for message in before]
    return tuple(TrainingText((*history, answer), tuple(tools)) for answer in answers)


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
        is_full = values.get("lora_rank") is None and values.get("start_from") is None
        implied: dict[str, Any] = {
            "nll_weight": 0.0,
            "freeze_embeddings": False,
            "lr_schedule": "linear",
            "truncate_prompts": False,
            "last_message_only": True,
            "trained_weights": "all" if is_full else "adapter",
        }
        return cls(**(implied | dict(values)))

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


class _LearnedLogprobs(NamedTuple):
    """Log-probabilities of the tokens of rows."""

    logprobs_BT: Tensor
    """float32, nats, 0 on padding; gradients flow."""
    is_learned_BT: Tensor
    """bool; False on padding."""


class _PairScores(NamedTuple):
    """Scores of pairs of answers."""

    logratios_B: Tensor
    """log p(preferred) - log p(rejected), summed over learned tokens, nats; gradients flow."""
    preferred: _LearnedLogprobs


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
        self.model = model or _load_planned_model(plan, self.device)
        module = self.model.module
        if plan.freeze_embeddings and not plan.trains_adapter:
            for embedding in (module.get_input_embeddings(), module.get_output_embeddings()):
                if embedding is not None:
                    embedding.requires_grad_(False)
        self.rows = self._encode(examples)
        """The rows of each example."""
        self.weights = [weight for weight in module.parameters() if weight.requires_grad]
        self.lr = LEARNING_RATES[plan.method, plan.trains_adapter] * plan.lr_multiplier
        self.optimizer = build_adamw([{"params": self.weights}], lr=self.lr)
        self.service = LocalTrainingService(self.model, self.optimizer, learned=self.weights)
        self.steps_per_epoch = math.ceil(len(self.rows) / plan.batch_size)
        self.num_steps = self.steps_per_epoch * plan.num_epochs
        self.step = 0
        self._saved_at = -LARGE_PERIOD
        self.reference: list[float] = []
        """Of each pair, log p(preferred) - log p(rejected) under the starting model."""
        if plan.method == "dpo":
            # Before the first step; later the starting model no longer exists.
            with torch.no_grad():
                for start in range(0, len(self.rows), plan.batch_size):
                    pairs = self.rows[start : start + plan.batch_size]
                    self.reference += self._score_pairs(pairs).logratios_B.tolist()

    def _encode(self, examples: Sequence[TrainingExample]) -> list[list[TokenRow]]:
        if self.plan.last_message_only:
            examples = [tuple(text.teaching_last_message() for text in texts) for texts in examples]
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
        tokens_per_epoch = sum(sum(row.is_learned) for rows in self.rows for row in rows)
        return round(tokens_per_epoch * self.step / self.steps_per_epoch)

    def run(self) -> Iterator[StepReport]:
        """Take the remaining steps, one at a time."""
        batch_size = self.plan.batch_size
        while self.step < self.num_steps:
            epoch, step_in_epoch = divmod(self.step, self.steps_per_epoch)
            # From the plan and the epoch alone, so that a job that continues has the same order.
            generator = derived_generator(self.plan.seed, "order", epoch)
            order = torch.randperm(len(self.rows), generator=generator).tolist()
            start = step_in_epoch * batch_size
            metrics = self._take_step(order[start : start + batch_size])
            self.step += 1
            is_last = step_in_epoch + 1 == self.steps_per_epoch
            yield StepReport(self.step, metrics, epoch + 1 if is_last else None)

    def _take_step(self, examples: Sequence[int]) -> dict[str, float]:
        batch = TensorDict({"index": torch.tensor(examples)}, batch_size=[len(examples)])
        metrics = self.service.forward_backward([batch], self._loss)
        lr = self.lr * LR_SCHEDULES[self.plan.lr_schedule](self.step / self.num_steps)
        is_finite = math.isfinite(metrics["loss"])
        if is_finite:
            # Not taken if the norm of the gradient is not finite.
            is_finite = self.service.optim_step(lr=lr, max_grad_norm=MAX_GRAD_NORM).was_taken
        if not is_finite:
            raise NonFiniteLossError(
                f"the loss or gradient of step {self.step + 1} is not finite. Lower the "
                "learning-rate multiplier of the job."
            )
        return metrics

    def _loss(self, batch: TensorDict) -> LossOutput:
        indices = batch["index"].tolist()
        examples = [self.rows[index] for index in indices]
        if self.plan.method == "supervised":
            scores = self._score([row for rows in examples for row in rows])
            return nll_loss(scores.logprobs_BT, scores.is_learned_BT)
        pairs = self._score_pairs(examples)
        reference_B = torch.tensor([self.reference[index] for index in indices])
        loss, metrics = preference_loss(
            pairs.logratios_B,
            reference_B.to(pairs.logratios_B),
            kind="sigmoid",
            beta=self.plan.beta,
        )
        if self.plan.nll_weight:
            nll = nll_loss(pairs.preferred.logprobs_BT, pairs.preferred.is_learned_BT)
            loss = loss + self.plan.nll_weight * nll.loss
            metrics = metrics | nll.metrics
        return LossOutput(loss, metrics)

    def _score(self, rows: Sequence[TokenRow]) -> _LearnedLogprobs:
        """Return the log-probabilities of the tokens, and which of them are learned."""
        context_BC, context_mask_BC = pad_left([row.context for row in rows], self.device)
        ids_BT, mask_BT = pad_right([row.ids for row in rows], self.device)
        is_learned = [is_learned for row in rows for is_learned in row.is_learned]
        is_learned_BT = torch.zeros_like(mask_BT)
        is_learned_BT[mask_BT] = torch.tensor(is_learned, device=self.device)
        logprobs_BT = self.model.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)
        return _LearnedLogprobs(logprobs_BT, is_learned_BT)

    def _score_pairs(self, pairs: Sequence[Sequence[TokenRow]]) -> _PairScores:
        """Return log p(preferred) - log p(rejected), and the preferred tokens' own."""
        rows = [preferred for preferred, _ in pairs] + [rejected for _, rejected in pairs]
        scores = self._score(rows)
        sums_B = masked_sum(scores.logprobs_BT, scores.is_learned_BT, dim=1)
        preferred_B, rejected_B = sums_B.chunk(2)
        num_pairs = len(pairs)
        preferred = _LearnedLogprobs(
            scores.logprobs_BT[:num_pairs], scores.is_learned_BT[:num_pairs]
        )
        return _PairScores(preferred_B - rejected_B, preferred)

    @torch.no_grad()
    def evaluate(self, examples: Sequence[TrainingExample]) -> float:
        """Return the mean negative log-probability per learned token, nats.

        Of a pair only the preferred answer counts.
        """
        first_texts = [example[:1] for example in examples]
        rows = [row for example_rows in self._encode(first_texts) for row in example_rows]
        total_nll = num_tokens = 0.0
        for start in range(0, len(rows), self.plan.batch_size):
            scores = self._score(rows[start : start + self.plan.batch_size])
            total_nll -= float(masked_sum(scores.logprobs_BT, scores.is_learned_BT))
            num_tokens += int(scores.is_learned_BT.sum())
        return total_nll / num_tokens

    # ---- files

    def save(self, folder: Path) -> None:
        """Write the result: an adapter, or the whole model with its tokenizer."""
        self.model.save(folder)
        if not self.plan.trains_adapter:
            self.model.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Tensor]:
        """Return weights, optimizer, step and reference, to continue in another process."""
        state: dict[str, Tensor] = {}
        for index, weight in enumerate(self.weights):
            state[f"weight.{index}"] = weight.detach()
            # Empty before the first step.
            for name, tensor in self.optimizer.state.get(weight, {}).items():
                state[f"optimizer.{index}.{name}"] = tensor
        state["step"] = torch.tensor(self.step)
        state["reference"] = torch.tensor(self.reference, dtype=torch.float64)
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state` of another process."""
        for index, weight in enumerate(self.weights):
            weight.copy_(state[f"weight.{index}"])
            prefix = f"optimizer.{index}."
            optimizer_state = {}
            for name, tensor in state.items():
                if name.startswith(prefix):
                    optimizer_state[name.removeprefix(prefix)] = tensor.clone()
            if optimizer_state:
                self.optimizer.state[weight] = optimizer_state
        self.step = int(state["step"])
        self.reference = state["reference"].tolist()

    def save_progress(self, folder: Path, report: StepReport, *, is_needed: bool = False) -> None:
        """Save the state and the report of its step, if the last one was saved long enough ago."""
        elapsed = time.monotonic() - self._saved_at
        if not is_needed and elapsed < SMALL_PERIOD:
            return
        state = {name: tensor.contiguous() for name, tensor in self.state().items()}
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        is_small = num_bytes <= LARGE_STATE
        if is_small or is_needed or elapsed >= LARGE_PERIOD:
            about = {"metrics": report.metrics, "epoch": report.ends_epoch}
            # Renamed when complete: a kill leaves the last state as it was.
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
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            self.load_state(state)
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


class RenderedTurn(NamedTuple):
    """A learned message and the text before it, as the chat template renders them."""

    before: str
    """The conversation up to the beginning of the model's message."""
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
    # Examples often repeat texts, of which each is rendered once.
    rendered: dict[str, list[RenderedTurn]] = {}
    keys_by_example: list[list[str]] = []
    for number, example in enumerate(examples, 1):
        keys = [json.dumps(text, default=dict) for text in example]
        keys_by_example.append(keys)
        for key, text in zip(keys, example, strict=True):
            if key in rendered:
                continue
            try:
                rendered[key] = _render_learned_turns(tokenizer, text)
            except ModelLoadError as error:
                raise ConfigurationError(f"example {number} cannot be used: {error}") from error
    encoded = _encode_parts(tokenizer, rendered.values())
    rows_by_example = []
    for number, keys in enumerate(keys_by_example, 1):
        rows: list[TokenRow] = []
        for key in keys:
            text_rows = _join_turns(encoded, end_ids, rendered[key])
            if truncate_prompts and any(len(row.ids) >= window for row in text_rows):
                # Apart, the learned messages may fit with a part of what precedes each.
                text_rows = [_encode_turn(encoded, end_ids, turn) for turn in rendered[key]]
            rows += text_rows
        longest = max(len(row.ids) for row in rows)
        if truncate_prompts and longest < window:
            # All rows keep as much, so that the answers of a pair have the same prompt.
            max_context = window - longest
            rows = [row._replace(context=row.context[-max_context:]) for row in rows]
        num_tokens = max(len(row.context) + len(row.ids) for row in rows)
        if num_tokens > window:
            raise ContextLengthError(
                f"example {number} has {num_tokens} tokens, but the model's window holds {window}. "
                "Shorten it, or leave it out."
            )
        rows_by_example.append(rows)
    return rows_by_example


def _render_learned_turns(tokenizer: Any, text: TrainingText) -> list[RenderedTurn]:
    messages = []
    for message in text.messages:
        # Templates do not know the key of weights.
        messages.append({key: value for key, value in message.items() if key != "weight"})
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


def _encode_parts(
    tokenizer: Any, rendered: Iterable[Sequence[RenderedTurn]]
) -> Mapping[str, tuple[int, ...]]:
    """Return the tokens of all texts of which rows consist."""
    # A dictionary as a set that keeps its order.
    texts: dict[str, None] = {}
    for turns in rendered:
        for turn in turns:
            texts |= dict.fromkeys(turn)
        for previous, turn in pairwise(turns):
            text_between = _text_between(previous, turn)
            texts |= dict.fromkeys([text_between or ""])
    if not texts:
        return {}
    # All at once: a tokenizer takes much longer for as many calls.
    ids = tokenizer([*texts], add_special_tokens=False)["input_ids"]
    return dict(zip(texts, map(tuple, ids), strict=True))


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
    context = encoded[turn.before]
    written = encoded[turn.written]
    for position, token in enumerate(written):
        if token in end_ids:
            ids = written[: position + 1]
            break
    else:
        # Some templates end turns by text, or open answers in another way than they render them.
        ids = (*encoded[turn.answer], *end_ids[:1])
    return TokenRow(context, ids, (True,) * len(ids))


def _join_turns(
    encoded: Mapping[str, tuple[int, ...]],
    end_ids: Sequence[int],
    turns: Sequence[RenderedTurn],
) -> list[TokenRow]:
    """Return the rows of a conversation; each token is in as few of them as possible."""
    rows: list[TokenRow] = []
    previous: RenderedTurn | None = None
    for turn in turns:
        turn_row = _encode_turn(encoded, end_ids, turn)
        text_between = None if previous is None else _text_between(previous, turn)
        if previous is None or text_between is None:
            rows.append(turn_row)
        else:
            # What the template writes after the end token is read, not generated.
            num_learned = len(_encode_turn(encoded, end_ids, previous).ids)
            read_ids = (*encoded[previous.written][num_learned:], *encoded[text_between])
            last_row = rows[-1]
            is_read = (False,) * len(read_ids)
            rows[-1] = TokenRow(
                last_row.context,
                (*last_row.ids, *read_ids, *turn_row.ids),
                (*last_row.is_learned, *is_read, *turn_row.is_learned),
            )
        previous = turn
    return rows


def _load_planned_model(plan: FineTuningPlan, device: torch.device) -> HuggingFaceLanguageModel:
    """Load the model of a plan, with the adapter to train, in float32."""
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
        self.directory = directory
        self.parameters = parameters
        self.num_threads = num_threads
        self.scenario_dir = scenario_dir
        self.device = torch.device(device)
        # One job at a time: two would share the processor and exceed the memory.
        self._lock = asyncio.Lock()

    async def submit(
        self, model: str, examples: Examples, options: FineTuningOptions, *, key: str
    ) -> FineTuningJob:
        # The same key leads to the same job, also in a run that is resumed.
        job_id = f"job-{sha256(key.encode()).hexdigest()[:16]}"
        folder = self.directory / job_id
        if not (folder / JOB).exists():
            if not examples:
                raise ServiceError(f"a job for {model!r} has no examples. Give at least one.")
            # Raises for options that contradict the model's parameters.
            self._choose_lora(options.trained_weights)
            lines = [json.dumps(example._asdict()) + "\n" for example in examples]
            _write_job(folder, model, "".join(lines), options, key)
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

    def _choose_lora(self, trained_weights: TrainedWeights | None) -> LoraParameters | None:
        """Return the adapter that a job trains: the model's own, if it has one."""
        lora: LoraParameters | None = getattr(self.parameters, "lora", None)
        trained_weights = trained_weights or DEFAULTS["trained_weights"]
        if trained_weights == "adapter":
            return lora or LoraParameters()
        if lora is not None:
            raise ConfigurationError(
                "trained_weights is 'all', but the model's parameters have lora. Remove lora, or "
                "set trained_weights to 'adapter'."
            )
        return None

    def resolve_model(self, model: str) -> str:
        path = Path(self.find_model_path(model))
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
        return self._model_name(path.parent) if path.parent.parent == self.directory else model

    def find_model_path(self, model: str) -> str:
        """Return the path of a model trained by a job of this service, any other name unchanged.

        A path from before the run was moved or copied leads to the model in its current folder.
        """
        path = Path(model)
        # A model's path ends in DIRECTORY/JOB/model.
        if path.parts[-3::2] != (self.directory.name, MODEL):
            return model
        current_path = self.directory / path.parts[-2] / MODEL
        if current_path.exists() or not path.is_absolute():
            return str(current_path)
        return model

    def _model_name(self, folder: Path) -> str:
        return f"{self.directory.name}/{folder.name}/{MODEL}"

    def _state(self, folder: Path) -> FineTuningJob:
        if not (folder / JOB).exists():
            error = f"{self.directory} holds no such job"
            return FineTuningJob(folder.name, JobStatus.FAILED, error=error)
        if (folder / ERROR).exists():
            error = (folder / ERROR).read_text(encoding="utf-8")
            return FineTuningJob(folder.name, JobStatus.FAILED, error=error)
        if (folder / MODEL).is_dir():
            return FineTuningJob(folder.name, JobStatus.SUCCEEDED, model=self._model_name(folder))
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
        parameters = self.parameters.model_copy(
            update={"model": self.find_model_path(job["model"])}
        )
        options = FineTuningOptions(**job["options"]).resolved()
        is_older = "format" not in job
        if is_older and getattr(parameters, "lora", None) is None:
            options["trained_weights"] = "all"
        lora = self._choose_lora(options["trained_weights"])
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
            # The last step's report, if all steps were taken before a kill.
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


def _write_job(
    folder: Path, model: str, examples: str, options: FineTuningOptions, key: str
) -> None:
    """Write the folder of a new job; it appears when it is complete."""
    job = {"model": model, "key": key, "options": asdict(options)}
    content = job | {"digest": _digest(job, examples), "format": JOB_FORMAT}
    unfinished = folder.with_name(f".new-{folder.name}")
    with _raising_run_directory_error(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        (unfinished / EXAMPLES).write_text(examples, encoding="utf-8")
        (unfinished / JOB).write_text(json.dumps(content, indent=2), encoding="utf-8")
        unfinished.rename(folder)


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
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        text = (folder / EXAMPLES).read_text(encoding="utf-8")
        digest = job.get("digest", "")
        # An older version wrote no digest.
        is_whole = digest == "" or digest == _digest(job, text)
        # Not `splitlines`, which also splits at characters that JSON leaves in texts.
        lines = [line for line in text.split("\n") if line]
        examples = [_read_example(json.loads(line)) for line in lines]
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error!r}. Restore its files.") from error
    if not is_whole:
        raise CheckpointError(f"the files of {folder} have changed. Restore them.")
    return job, examples


def _read_example(stored: Mapping[str, Any]) -> TrainingExample:
    messages, tools = stored["messages"], stored.get("tools", ())
    if "preferred" not in stored:
        return (TrainingText(tuple(messages), tuple(tools)),)
    preferred = {"role": "assistant", "content": stored["preferred"]}
    rejected = {"role": "assistant", "content": stored["rejected"]}
    return preference_texts(messages, [preferred, rejected], tools)
