"""Losses of a remote policy: its log-probabilities are leaves, whose gradients are sent back.

Shape suffixes: `B` row, `T` continuation position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ServiceRequestError
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.services.training import Loss

Rows = tuple[Tensor, ...]
"""Contexts, their mask, continuations, their mask."""


class LogprobLeaves:
    """The leaves of one loss.

    Parameters
    ----------
    policy : LanguageModel
        The model in this process, which the loss must not differentiate.
    """

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._leaves: list[tuple[Rows, Tensor]] = []
        self._is_open = False

    def leaf(self, rows: Rows, logprobs_BT: Tensor) -> Tensor:
        """The log-probabilities as a leaf while a loss is computed, otherwise unchanged."""
        if not (self._is_open and torch.is_grad_enabled()):
            return logprobs_BT
        leaf_BT = logprobs_BT.detach().requires_grad_()
        self._leaves.append((rows, leaf_BT))
        return leaf_BT

    def begin(self) -> None:
        """Make leaves from here on."""
        self._leaves, self._is_open = [], True

    def end(self) -> list[tuple[Rows, Tensor]]:
        """The rows and gradients of the leaves since `begin` that have a gradient.

        Raises
        ------
        ServiceRequestError
            When the loss differentiates the model in this process, or no leaf.
        """
        leaves, self._leaves, self._is_open = self._leaves, [], False
        if any(one.grad is not None for one in self.policy.parameters()):
            for one in self.policy.parameters():
                one.grad = None
            raise ServiceRequestError(
                "the loss differentiates the model in this process, for instance its entropies or "
                "hidden states, which services do not return. Use service.logprobs alone, or "
                "train_service.backend local."
            )
        gradients = [(rows, leaf.grad) for rows, leaf in leaves if leaf.grad is not None]
        if not gradients:
            raise ServiceRequestError(
                "the loss depends on no log-probability of the training service. Take them from "
                "service.logprobs or policy_logprobs."
            )
        return gradients


def mean_loss(
    batches: Sequence[TensorDict],
    loss: Loss,
    leaves: LogprobLeaves,
    send: Callable[[Rows, Tensor], None],
) -> dict[str, float]:
    """Compute a loss, and send the gradients of its mean over all batches' samples.

    Parameters
    ----------
    send : Callable
        Called with rows and the gradient of each log-probability, `[B, T]`.

    Returns
    -------
    dict[str, float]
        Means over the samples of all batches, `loss` among them.
    """
    num_samples = sum(len(batch) for batch in batches)
    sums: dict[str, float] = {}
    for batch in batches:
        share = len(batch) / num_samples
        leaves.begin()
        value, metrics = loss(batch)
        if value.requires_grad:
            torch.autograd.backward(value * share)
        for rows, gradient_BT in leaves.end():
            send(rows, gradient_BT)
        for name, figure in {"loss": value, **metrics}.items():
            sums[name] = sums.get(name, 0.0) + share * float(figure.detach().double())
    return sums
