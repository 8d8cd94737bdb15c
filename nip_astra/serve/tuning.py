"""Fine-tune a model on examples: the same numbers in a job's process and when called directly.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import NonFiniteLossError
from nip_astra.language_models.adapters import LoraParameters, add_adapter
from nip_astra.language_models.base import pad_left, pad_right
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.pretrained import find_tokenizer
from nip_astra.language_models.saved_weights import restore_weights
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.sources import load_causal_lm, resolve_model
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.policy_losses import nll_loss
from nip_astra.rl_objectives.preference import preference_loss
from nip_astra.rl_objectives.reductions import masked_sum
from nip_astra.serve.tuning_data import Method, TokenRow, TrainingText, token_rows
from nip_astra.utils.seeding import derive_seed, derived_generator

LEARNING_RATES: dict[tuple[Method, bool], float] = {
    ("supervised", True): 1e-3,
    ("supervised", False): 2e-4,
    ("dpo", True): 2e-4,
    ("dpo", False): 2e-5,
}
"""By method and whether an adapter is trained; what `learning_rate_multiplier` multiplies."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class TuningPlan:
    """All that decides the result of a job.

    Attributes
    ----------
    source : str
        The model to train: folder, hub id or `.gguf` file.
    start_from : str or None
        Folder of an adapter to go on with.
    lora_rank : int or None
        Of a fresh adapter; None trains all weights.
    beta : float
        Of DPO; larger stays closer to the model that the job starts from.
    num_threads : int
        CPU cores; they decide the last digits.
    """

    method: Method
    source: str
    num_epochs: int
    batch_size: int
    lr_multiplier: float
    beta: float
    seed: int
    lora_rank: int | None
    lora_alpha: float
    start_from: str | None
    device: str
    num_threads: int

    @property
    def trains_adapter(self) -> bool:
        """Whether the weights of the model stay as they are."""
        return self.lora_rank is not None or self.start_from is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class StepReport(NamedTuple):
    """What one optimizer step gave.

    Attributes
    ----------
    step : int
        Counted from 1.
    ends_epoch : int or None
        The epoch that ends with it, counted from 1.
    """

    step: int
    metrics: dict[str, float]
    ends_epoch: int | None


class Tuning:
    """A model in training.

    Parameters
    ----------
    texts : Sequence[TrainingText]
        Examples, in the order of their file.
    """

    def __init__(self, plan: TuningPlan, texts: Sequence[TrainingText]) -> None:
        self.plan = plan
        self.device = torch.device(plan.device)
        module = load_causal_lm(*resolve_model(plan.source, None)).to(self.device)
        if plan.trains_adapter:
            module = self._with_adapter(module)
        self.model = HuggingFaceLanguageModel(
            module,
            find_tokenizer(plan.source, None, None),
            device=self.device,
            trainable=True,
            dtype=torch.float32,
        )
        self.rows = self._rows_of(texts)
        self.weights = [one for one in module.parameters() if one.requires_grad]
        self.lr = LEARNING_RATES[plan.method, plan.trains_adapter] * plan.lr_multiplier
        self.optimizer = torch.optim.AdamW(self.weights, lr=self.lr, weight_decay=0.0)
        self.service = LocalTrainingService(self.model, self.optimizer, learned=self.weights)
        self.steps_per_epoch = math.ceil(len(self.rows) / plan.batch_size)
        self.num_steps = self.steps_per_epoch * plan.num_epochs
        self.step = 0
        # Before the first step; later the reference is no more.
        self.reference = self._logratios(self.rows) if plan.method == "dpo" else []

    def _with_adapter(self, module: Any) -> Any:
        plan = self.plan
        if plan.start_from is not None:
            from peft import PeftConfig, get_peft_model

            config = PeftConfig.from_pretrained(plan.start_from)
            config.inference_mode = False
            adapted = get_peft_model(module, config)
            restore_weights(adapted, Path(plan.start_from))
            return adapted
        assert plan.lora_rank is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(plan.seed, "adapter"))
            return add_adapter(module, LoraParameters(rank=plan.lora_rank, alpha=plan.lora_alpha))

    def _rows_of(self, texts: Sequence[TrainingText]) -> list[list[TokenRow]]:
        window = self.model.context_window
        return token_rows(self.model.tokenizer, texts, self.model.end_ids, window=window)

    @property
    def num_tokens_trained(self) -> int:
        """Tokens that were learnt to say or not to say, over all steps taken."""
        per_epoch = sum(len(row.answer) for rows in self.rows for row in rows)
        return round(per_epoch * self.step / self.steps_per_epoch)

    def run(self) -> Iterator[StepReport]:
        """Take the steps that are left, one at a time.

        Raises
        ------
        NonFiniteLossError
            When a loss or a gradient is no number; the weights stay as they were.
        """
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
        found = self.service.forward_backward([batch], self._loss)
        # From the full rate to zero, in a line.
        lr = self.lr * (1.0 - self.step / self.num_steps)
        is_finite = math.isfinite(found["loss"])
        if (
            not is_finite
            or not self.service.optim_step(lr=lr, max_grad_norm=MAX_GRAD_NORM).was_taken
        ):
            raise NonFiniteLossError(
                f"step {self.step + 1} was to be taken, but its loss or gradient is no finite "
                "number. Lower learning_rate_multiplier."
            )
        return found

    def _loss(self, batch: TensorDict) -> LossOutput:
        chosen = batch["index"].tolist()
        if self.plan.method == "supervised":
            logprobs_BT, mask_BT = self._logprobs([self.rows[index][0] for index in chosen])
            return nll_loss(logprobs_BT, mask_BT)
        policy_B = self._policy_logratios([self.rows[index] for index in chosen])
        reference_B = torch.tensor([self.reference[index] for index in chosen])
        reference_B = reference_B.to(policy_B)
        return preference_loss(policy_B, reference_B, kind="sigmoid", beta=self.plan.beta)

    def _logprobs(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        context = pad_left([row.context for row in rows], self.device)
        ids_BT, mask_BT = pad_right([row.answer for row in rows], self.device)
        return self.model.logprobs(*context, ids_BT, mask_BT), mask_BT

    def _policy_logratios(self, pairs: Sequence[Sequence[TokenRow]]) -> Tensor:
        """How much likelier the preferred answers are, `[B]` nats, sums over tokens."""
        rows = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        logprobs_BT, mask_BT = self._logprobs(rows)
        preferred_B, other_B = masked_sum(logprobs_BT, mask_BT, dim=1).chunk(2)
        return preferred_B - other_B

    @torch.no_grad()
    def _logratios(self, pairs: Sequence[Sequence[TokenRow]]) -> list[float]:
        size = self.plan.batch_size
        parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        return [value for part in parts for value in self._policy_logratios(part).tolist()]

    @torch.no_grad()
    def evaluate(self, texts: Sequence[TrainingText]) -> float:
        """Mean negative log-probability a token of first answers, nats."""
        rows = [pair[0] for pair in self._rows_of(texts)]
        total = count = 0.0
        for start in range(0, len(rows), self.plan.batch_size):
            logprobs_BT, mask_BT = self._logprobs(rows[start : start + self.plan.batch_size])
            total -= float(logprobs_BT.sum())
            count += int(mask_BT.sum())
        return total / count

    # ---- what is kept

    def save(self, folder: Path) -> None:
        """Write what was trained: an adapter, or the whole model with its tokenizer."""
        self.model.save(folder)
        if not self.plan.trains_adapter:
            self.model.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Tensor]:
        """All that a later process needs to go on: weights, optimizer, steps and reference."""
        found = {f"weight.{index}": one.detach() for index, one in enumerate(self.weights)}
        for index, one in enumerate(self.weights):
            for name, value in self.optimizer.state.get(one, {}).items():
                found[f"optimizer.{index}.{name}"] = value
        found["step"] = torch.tensor(self.step)
        found["reference"] = torch.tensor(self.reference, dtype=torch.float64)
        return found

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on where another process was."""
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


def fine_tune(
    plan: TuningPlan,
    texts: Sequence[TrainingText],
    folder: Path,
    *,
    on_step: Callable[[StepReport], None] = lambda _: None,
) -> None:
    """Train a model in this process and write the result, as a job would."""
    tuning = Tuning(plan, texts)
    for report in tuning.run():
        on_step(report)
    tuning.save(folder)
