"""Losses on log-probabilities of a service: they are handed out as leaves, and gradients go back.

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
"""What was asked: contexts, their mask, continuations, their mask."""


class HandedOut:
    """Log-probabilities that a loss has been given.

    Parameters
    ----------
    policy : LanguageModel
        The model at hand, which the loss must not differentiate.
    """

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._leaves: list[tuple[Rows, Tensor]] = []
        self._is_open = False

    def leaf(self, asked: Rows, logprobs_BT: Tensor) -> Tensor:
        """Log-probabilities to differentiate, where a loss is being computed."""
        if not (self._is_open and torch.is_grad_enabled()):
            return logprobs_BT
        leaf_BT = logprobs_BT.detach().requires_grad_()
        self._leaves.append((asked, leaf_BT))
        return leaf_BT

    def begin(self) -> None:
        """Hand out leaves from here on."""
        self._leaves, self._is_open = [], True

    def end(self) -> list[tuple[Rows, Tensor]]:
        """What was handed out since, with its gradients; leaves without any are left out.

        Raises
        ------
        ServiceRequestError
            When the loss differentiates the model at hand, or nothing of the service.
        """
        leaves, self._leaves, self._is_open = self._leaves, [], False
        if any(one.grad is not None for one in self.policy.parameters()):
            for one in self.policy.parameters():
                one.grad = None
            raise ServiceRequestError(
                "a loss was to be differentiated through a training service, but it also "
                "differentiates the model at hand, for instance its entropies or hidden states, "
                "which services do not give. Write it with service.logprobs alone, or train with "
                "train_service.backend local."
            )
        found = [(asked, leaf.grad) for asked, leaf in leaves if leaf.grad is not None]
        if not found:
            raise ServiceRequestError(
                "a loss was to be differentiated through a training service, but it depends on no "
                "log-probability of the service. Take them from service.logprobs or "
                "policy_logprobs."
            )
        return found


def mean_loss(
    batches: Sequence[TensorDict],
    loss: Loss,
    handed_out: HandedOut,
    send: Callable[[Rows, Tensor], None],
) -> dict[str, float]:
    """Compute a loss, and hand over the gradients of its mean over all batches' samples.

    Parameters
    ----------
    send : Callable
        Called with what was asked and the gradient of each log-probability, `[B, T]`.

    Returns
    -------
    dict[str, float]
        Means over the samples of all batches, `loss` among them.
    """
    num_samples = sum(len(batch) for batch in batches)
    sums: dict[str, float] = {}
    for batch in batches:
        share = len(batch) / num_samples
        handed_out.begin()
        value, metrics = loss(batch)
        if value.requires_grad:
            torch.autograd.backward(value * share)
        for asked, gradient_BT in handed_out.end():
            send(asked, gradient_BT)
        for name, figure in {"loss": value, **metrics}.items():
            sums[name] = sums.get(name, 0.0) + share * float(figure.detach().double())
    return sums
