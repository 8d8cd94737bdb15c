"""Stand-ins that let the losses of other libraries be called on plain tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor


def _same(tensor: Tensor, **_: object) -> Tensor:
    return tensor


def trl_trainer(**attributes: Any) -> SimpleNamespace:
    """The trainer attributes that a TRL loss reads: a single process, one batch per step."""
    accelerator = SimpleNamespace(
        num_processes=1, device="cpu", gather=_same, gather_for_metrics=_same, reduce=_same
    )
    return SimpleNamespace(
        **{
            "accelerator": accelerator,
            "aux_loss_enabled": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "use_vllm": False,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
        | attributes
    )


def assert_same(mine: Tensor, theirs: Tensor, *given: Tensor, tolerance: float = 1e-10) -> None:
    """Check values and nonzero gradients."""
    assert mine.item() == pytest.approx(theirs.item(), abs=tolerance)
    for own, other in zip(
        torch.autograd.grad(mine, given, retain_graph=True),
        torch.autograd.grad(theirs, given, retain_graph=True),
        strict=True,
    ):
        assert own.abs().max() > 0
        assert torch.allclose(own, other, rtol=0, atol=tolerance)


def model_with_logprobs(masked_BT: Tensor) -> Any:
    """The interface of a model that a TRL loss reads, with given log-probabilities."""
    figures = masked_BT.detach()
    outputs = SimpleNamespace(
        log_probs=masked_BT, entropy=figures, mean_logits=figures, is_top1=figures > 0
    )
    return Mock(training=True, return_value=outputs)


def loss_of_trl(
    trainer_class: Any,
    logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    inputs: dict[str, Any],
    **attributes: Any,
) -> Tensor:
    """TRL's result for completions without prompts with given log-probabilities."""
    nothing = torch.zeros(len(mask), 0, dtype=torch.long)
    given = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask.to(torch.float64),
        "advantages": advantages,
    }
    trainer = trl_trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, logprobs * 0, None),
        **attributes,
    )
    return trainer_class._compute_loss(trainer, None, given | inputs)


def grpo_of_trl(
    trl: SimpleNamespace,
    given: tuple[Tensor, ...],
    inputs: dict[str, Any] | None = None,
    **changes: Any,
) -> Tensor:
    """TRL's GRPO of new and old log-probabilities, advantages and a mask."""
    logprobs, old, advantages, mask = given
    attributes = {
        "loss_type": "bnpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": 9,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
    }
    args = {"use_bias_correction_kl": False, "delta": None, "steps_per_generation": 1}
    of_args = ("delta", "sapo", "vespo", "use_bias_correction_kl")
    args |= {name: changes.pop(name) for name in [*changes] if name.startswith(of_args)}
    attributes["get_gamma_weights"] = trl.GRPOTrainer.get_gamma_weights
    return loss_of_trl(
        trl.GRPOTrainer,
        *(logprobs, mask, advantages),
        {"old_per_token_logps": old, "num_items_in_batch": mask.sum()} | (inputs or {}),
        **(attributes | changes),
        args=SimpleNamespace(**args),
    )
