"""What trains and samples a policy: in this process, in another one, or at a provider.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, JsonValue, model_validator
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import ConfigurationError, ServiceRequestError
from nip_astra.language_models.base import Generation, LanguageModel, SamplingOptions
from nip_astra.language_models.remote import RemoteLanguageModel
from nip_astra.language_models.services.optimizer_files import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    put_together,
)
from nip_astra.parameters.conditions import where_not
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import MAX_LR, RegisteredName, SubParameters, Url
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.parameters.types import TrainingServiceType
from nip_astra.registry import Registry
from nip_astra.rl_objectives.reductions import LossOutput

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


TRAINING_SERVICES: Registry[type[TrainingService]] = Registry(
    "training_service",
    package="nip_astra.language_models.services",
    members=TrainingServiceType,
    modules={"local": "training", "http": "http_training", "tinker": "tinker_training"},
)


def register_training_service(
    name: str,
) -> Callable[[type[TrainingService]], type[TrainingService]]:
    """Register a `TrainingService` subclass under the name that `train_service.backend` gives."""
    return TRAINING_SERVICES.register(name)


class TrainServiceParameters(SubParameters):
    """Where the policy learns and samples."""

    backend: Annotated[str, RegisteredName(TRAINING_SERVICES)] = TrainingServiceType.LOCAL
    """local: in this process, on the settings' device. http: at a service that `nip-astra serve
    --train` runs, which has the weights of the policy's model. tinker: at Tinker, or at what
    `nip-astra serve --tinker` runs; it trains adapters (lora.alpha 32) and samples without
    min_new_tokens. Others: `register_training_service`."""
    base_url: Annotated[Url | None, where_not("backend", "local")] = None
    """Address of the service, for instance http://127.0.0.1:8000; null for that of Tinker."""
    model: Annotated[str | None, where_not("backend", "local")] = None
    """Name of the policy's model at the service; null for the path by which the policy names it."""
    token_variable: Annotated[str | None, where_not("backend", "local")] = None
    """Environment variable with the token that the service asks for; null where it asks for
    none."""
    patience_seconds: Annotated[float, where_not("backend", "local")] = Field(default=60.0, ge=0)
    """How long a service that does not answer, or is full, is asked again before the run ends."""
    operation_timeout: Annotated[float, where_not("backend", "local", "tinker")] = Field(
        default=3600.0, gt=0
    )
    """Longest in seconds that one operation, such as a gradient or a rollout, may take."""
    max_answer_mib: Annotated[float, where_not("backend", "local", "tinker")] = Field(
        default=4096.0, gt=0
    )
    """Largest answer of the service that is read. A saved state of full weights in float32 with
    Adam takes 12 bytes per weight."""
    options: Annotated[dict[str, JsonValue], where_not("backend", "local", "http", "tinker")] = {}
    """Values for a registered service, which reads them as `request.parameters.options`."""

    @model_validator(mode="after")
    def _has_address(self) -> Self:
        if self.backend == TrainingServiceType.HTTP and self.base_url is None:
            raise ValueError(
                f"the backend {self.backend} needs base_url, the address of the service; start one "
                "with nip-astra serve --train --model NAME=PATH"
            )
        return self


@dataclass(frozen=True)
class TrainingServiceRequest:
    """What a trainer needs a training service for.

    Attributes
    ----------
    role : str
        Name of the policy in checkpoints.
    optimizer : Optimizer
        Over the policy's weights in this process.
    learned : Sequence[Parameter]
        Weights that learn: the policy's and those of `modules`.
    modules : Module
        What learns beside the policy, for instance a value head.
    seed : int
        Of an adapter's first weights.
    """

    parameters: TrainServiceParameters
    policy: LanguageModel
    role: str
    training: TrainingConfiguration
    optimizer: torch.optim.Optimizer
    learned: Sequence[torch.nn.Parameter]
    modules: torch.nn.Module
    seed: int
    scenario_dir: Path | None

    def remote_model(self) -> str:
        """Name of the policy's model at a service that learns nothing beside it.

        Raises
        ------
        ConfigurationError
            When the parameters name no model, or other modules learn as well.
        """
        names = [name for name, _ in self.modules.named_children()]
        if names:
            raise ConfigurationError(
                f"train_service.backend {self.parameters.backend} cannot train {', '.join(names)} "
                "on the policy's hidden states. Set it to local."
            )
        source: str | None = getattr(self.policy, "source", None)
        if self.parameters.model is not None:
            return self.parameters.model
        if source is None:
            raise ConfigurationError(
                "train_service.model must name the policy's model at the service, since the "
                "policy's parameters name none."
            )
        return str(resolve_reference(source, self.scenario_dir))


class TrainingService(ABC):
    """Holds the weights of a policy: adds up gradients, steps, samples and scores.

    Calls take effect in the order in which they are made. A class that parameter files name as
    `train_service.backend` (`register_training_service`) implements `open`.
    """

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> TrainingService:
        """The service for a trainer's policy; hook.

        Raises
        ------
        ConfigurationError
            When it cannot train what is requested.
        ServiceError
            When it cannot be reached, or lacks the policy's model.
        """
        raise NotImplementedError(f"{cls.__name__} implements no classmethod `open`")

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


@register_training_service(TrainingServiceType.LOCAL)
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

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> LocalTrainingService:
        if isinstance(request.policy, RemoteLanguageModel):
            raise ConfigurationError(
                "train_service.backend local cannot train a policy of the backend 'remote', whose "
                "weights are at a service. Set it to http or tinker, or language_model._type to "
                "huggingface."
            )
        return cls(
            request.policy,
            request.optimizer,
            learned=request.learned,
            modules=request.modules,
            role=request.role,
        )

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
