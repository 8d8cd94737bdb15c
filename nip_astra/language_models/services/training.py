"""What trains and samples a policy: in this process, in another one, or at a provider.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ServiceRequestError
from nip_astra.language_models.base import Generation, LanguageModel, SamplingOptions
from nip_astra.language_models.services.optimizer_files import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    put_together,
)
from nip_astra.parameters.parameters_base import MAX_LR
from nip_astra.rl_objectives.outputs import LossOutput

Loss = Callable[[TensorDict], LossOutput]
"""The loss of a batch, a mean over its samples, and scalars to log. It gets the log-probabilities
that it differentiates from `TrainingService.logprobs`, or, of a local service, from its model."""


@dataclass(frozen=True)
class OptimizerFigures:
    """What became of an optimizer step.

    Attributes
    ----------
    grad_norm : float
        Norm of the gradients before they were scaled down.
    was_taken : bool
        False where the norm is not finite; then the weights are as they were and the gradients are
        gone.
    """

    grad_norm: float
    was_taken: bool


def check_step(lr: float, max_grad_norm: float | None) -> None:
    """Refuse an optimizer step that could leave weights without finite values.

    Raises
    ------
    ServiceRequestError
        When the learning rate is not from 0 to `MAX_LR`, or the bound of the norm is not above 0.
    """
    if not 0 <= lr <= MAX_LR:
        raise ServiceRequestError(f"lr is {lr}; give a learning rate from 0 to {MAX_LR:g}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ServiceRequestError(
            f"max_grad_norm is {max_grad_norm}; give a norm above 0, or null for no bound."
        )


class TrainingService(ABC):
    """Holds the weights of a policy: adds up gradients, steps, samples and scores.

    Calls take effect in the order in which they are made.
    """

    @abstractmethod
    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        """Add the gradient of the mean loss over the samples of all batches to what there is.

        Returns
        -------
        dict[str, float]
            Means over the samples of all batches, `loss` among them.

        Raises
        ------
        ServiceError
            When the service cannot be reached or cannot do what the loss asks for.
        """

    @abstractmethod
    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        """Step along the gradients that were added up, and forget them.

        Parameters
        ----------
        lr : float
            Learning rate; parameters with an `lr_factor` take it times that.
        max_grad_norm : float or None
            Gradients are scaled down to this norm.

        Raises
        ------
        ServiceRequestError
            See `check_step`; nothing is changed then.
        """

    @abstractmethod
    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """As `LanguageModel.logprobs`, with gradient within the loss of `forward_backward`."""

    @torch.no_grad()
    def compute_logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """As `logprobs`, without gradient, on the CPU."""
        return self.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT).detach().cpu()

    @abstractmethod
    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """As `LanguageModel.generate`. A service that draws by itself takes its seeds from the
        uniform numbers.
        """

    @abstractmethod
    def save_state(self, directory: Path) -> None:
        """Write what training needs to go on exactly: weights and optimizer, or their address."""

    @abstractmethod
    def load_state(self, directory: Path) -> None:
        """Take up what `save_state` wrote.

        Raises
        ------
        CheckpointError
            When it is of another policy or broken.
        """

    @abstractmethod
    def save_weights_for_sampler(self, directory: Path) -> None:
        """Write a complete model and tokenizer in Hugging Face layout."""


class LocalTrainingService(TrainingService):
    """A model in this process and its optimizer.

    A loss may also differentiate what else learns, and whatever `model` gives with gradient:
    entropies and hidden states by `token_scores`.

    Parameters
    ----------
    optimizer : Optimizer
        Over the learned parameters; its groups may have an `lr_factor`.
    learned : Sequence[Parameter]
        What gradients are taken of; those of the optimizer.
    modules : Module, optional
        What learns beside the model, for instance a value head.
    role : str
        Name, in a folder of `save_state`, of the model's folder.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        *,
        learned: Sequence[torch.nn.Parameter] | None = None,
        modules: torch.nn.Module | None = None,
        role: str = "policy",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.learned = list(model.parameters()) if learned is None else list(learned)
        self.modules = torch.nn.Module() if modules is None else modules
        self.role = role

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        num_samples = sum(len(batch) for batch in batches)
        sums: dict[str, Tensor] = {}
        for batch in batches:
            share = len(batch) / num_samples
            value, metrics = loss(batch)
            torch.autograd.backward(value * share)
            for name, figure in {"loss": value, **metrics}.items():
                added = share * figure.detach().double()
                sums[name] = sums[name] + added if name in sums else added
        # One transfer from the device for all of them.
        return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        check_step(lr, max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        norm = torch.nn.utils.clip_grad_norm_(self.learned, max_grad_norm or math.inf)
        figures = OptimizerFigures(float(norm.double()), was_taken=bool(norm.isfinite()))
        if figures.was_taken:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        return self.model.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        return self.model.generate(contexts, rows_per_context, uniforms_BT, options)

    def save_state(self, directory: Path) -> None:
        self.model.save(directory / self.role)
        content: dict[str, Any] = {
            "modules": dict(self.modules.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(directory / OPTIMIZER, content)

    def load_state(self, directory: Path) -> None:
        content = load_state(directory / OPTIMIZER)
        self.model.restore(directory / self.role)
        self.modules.load_state_dict(content["modules"])
        put_together(self.optimizer, content["optimizer"], directory / OPTIMIZER_SHARDS)

    def save_weights_for_sampler(self, directory: Path) -> None:
        self.model.save_pretrained(directory)
