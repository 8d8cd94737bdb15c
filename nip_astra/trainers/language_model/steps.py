"""What the batches of one optimizer step know of the whole step, and what it costs.

Shape suffixes: `B` sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from nip_astra.errors import NonFiniteLossError
from nip_astra.language_models.base import TokenCount
from nip_astra.trainers.language_model.state import LanguageModelState
from nip_astra.utils.processor import peak_memory_bytes

STEP_TOTALS = "step_totals"
"""Column of a batch: trained tokens and samples of the whole optimizer step, int64 `[B, 2]`."""


def write_step_totals(batches: Sequence[TensorDict], tokens: str) -> None:
    """Tell each batch of a step what the whole step learns; see `num_tokens_in_step`.

    Parameters
    ----------
    tokens : str
        The column whose tokens are learnt.
    """
    name = f"{tokens}_mask"
    if any(batch.get(name, None) is None for batch in batches):
        return
    totals = [sum(int(batch[name].sum()) for batch in batches), sum(map(len, batches))]
    for batch in batches:
        batch[STEP_TOTALS] = torch.tensor([totals]).expand(len(batch), 2)


def num_tokens_in_step(batch: TensorDict, tokens: str) -> float:
    """The part of a batch, by samples, of the learnt tokens of the whole optimizer step."""
    totals = batch.get(STEP_TOTALS, None)
    if totals is None:
        return float(int(batch[f"{tokens}_mask"].sum()))
    num_tokens, num_samples = totals[0].tolist()
    return float(num_tokens * len(batch) / num_samples)


def token_metrics(spent: TokenCount) -> dict[str, float]:
    """The tokens that an optimizer step forwarded and their ratio to the unique ones."""
    return {
        "tokens/update_forwarded": float(spent.forwarded),
        "tokens/update_forwarded_per_unique": spent.forwarded / max(spent.scored, 1),
    }


def speed_and_memory(
    timings: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """How many tokens an iteration sampled a second, and the most memory so far."""
    seconds = timings["time/collect_seconds"] + timings["time/update_seconds"]
    return {
        "time/tokens_per_second": metrics.get("tokens/generated", 0) / max(seconds, 1e-9),
        "memory/peak_gib": peak_memory_bytes() / 2**30,
    }


def non_finite_error(state: LanguageModelState, loss: float, norm: float) -> NonFiniteLossError:
    """What stops a run whose loss or gradient is no number; weights are those before the step."""
    return NonFiniteLossError(
        f"optimizer step {state.num_optimizer_steps + 1} (iteration {state.iteration + 1}) has "
        f"loss {loss} and gradient norm {norm}; the weights before it are saved. Lower training.lr "
        "or training.max_grad_norm, and look at the iteration's rollouts."
    )
