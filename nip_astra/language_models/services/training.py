"""Training services, which train and sample a policy here, in another process or at a provider.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, JsonValue, model_validator
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.shards import load_shards, sizes_in
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import CheckpointError, ConfigurationError, ServiceRequestError
from nip_astra.language_models.base import (
    Generation,
    LanguageModel,
    SamplingOptions,
)
from nip_astra.language_models.remote import RemoteLanguageModel
from nip_astra.parameters.conditions import where_not
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import MAX_LR, RegisteredName, SubParameters, Url
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.parameters.types import TrainingServiceType
from nip_astra.registry import Registry
from nip_astra.rl_objectives.reductions import LossOutput

Loss = Callable[[TensorDict], LossOutput]
"""The loss of a batch, a mean over its samples, and scalars to log. It differentiates
log-probabilities of `TrainingService.logprobs`, or of a local service's model."""
OPTIMIZER = "optimizer"
"""Name of the optimizer's files in a folder of `LocalTrainingService.save_state`."""
OPTIMIZER_SHARDS = "optimizer_shards"
"""Name of the folder with the optimizer's shards."""


@dataclass(frozen=True)
class OptimizerFigures:
    """The result of an optimizer step.

    Attributes
    ----------
    grad_norm : float
        Norm of the gradients before clipping.
    was_taken : bool
        False if the norm is not finite; then the weights stay and the gradients are dropped.
    """

    grad_norm: float
    was_taken: bool


def check_step(lr: float, max_grad_norm: float | None) -> None:
    """Raise for a learning rate outside 0 to `MAX_LR`, or a norm bound that is not positive."""
    if not 0 <= lr <= MAX_LR:
        raise ServiceRequestError(f"lr is {lr}; give a learning rate from 0 to {MAX_LR:g}.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ServiceRequestError(
            f"max_grad_norm is {max_grad_norm}; give a norm above 0, or null for no bound."
        )


TRAINING_SERVICES: Registry[type[TrainingService]] = Registry("training_service")


def register_training_service(
    name: str,
) -> Callable[[type[TrainingService]], type[TrainingService]]:
    """Register a `TrainingService` subclass for `train_service.backend`; a decorator."""
    return TRAINING_SERVICES.register(name)


class TrainServiceParameters(SubParameters):
    """Training service of the policy."""

    backend: Annotated[str, RegisteredName(TRAINING_SERVICES)] = TrainingServiceType.LOCAL
    """local: in this process, on the settings' device. http: a service started by `nip-astra serve
    --train`, which has the weights of the policy's model. tinker: Tinker, or a service started by
    `nip-astra serve --tinker`; it trains adapters (lora.alpha 32) and samples without
    min_new_tokens. Others: `register_training_service`."""
    base_url: Annotated[Url | None, where_not("backend", "local")] = None
    """Address of the service, for instance http://127.0.0.1:8000; null for Tinker's own."""
    model: Annotated[str | None, where_not("backend", "local")] = None
    """Name of the policy's model at the service; null for the path in the policy's parameters."""
    token_variable: Annotated[str | None, where_not("backend", "local")] = None
    """Environment variable with the service's token; null for none."""
    retry_timeout_seconds: Annotated[float, where_not("backend", "local")] = Field(
        default=60.0, ge=0
    )
    """Seconds for which requests are retried if a service does not answer or is full."""
    operation_timeout: Annotated[float, where_not("backend", "local", "tinker")] = Field(
        default=3600.0, gt=0
    )
    """Maximum seconds of one operation, such as a gradient or a rollout."""
    max_answer_mib: Annotated[float, where_not("backend", "local", "tinker")] = Field(
        default=4096.0, gt=0
    )
    """Maximum response size. A saved state of full weights in float32 with Adam takes 12 bytes per
    weight."""
    options: Annotated[dict[str, JsonValue], where_not("backend", "local", "http", "tinker")] = {}
    """Values for a registered service, which reads `request.parameters.options`."""

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
    """A trainer's request for a training service.

    Attributes
    ----------
    role : str
        Name of the policy in checkpoints.
    optimizer : Optimizer
        Over the policy's weights in this process.
    learned : Sequence[Parameter]
        Weights that learn: the policy's and those of `modules`.
    modules : Module
        Further modules that learn, for instance a value head.
    seed : int
        Seed of an adapter's initial weights.
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
        """Return the name of the policy's model at a service that trains no further modules."""
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
    """Holds the weights of a policy: accumulates gradients, steps, samples and scores, in order.

    A class registered for `train_service.backend` (`register_training_service`) implements `open`.
    """

    @classmethod
    def open(cls, request: TrainingServiceRequest) -> TrainingService:
        """Hook: open the service for a trainer's policy.

        Raises
        ------
        ConfigurationError
            When it cannot train as requested.
        ServiceError
            When it cannot be reached, or lacks the policy's model.
        """
        raise NotImplementedError(f"{cls.__name__} implements no classmethod `open`")

    @abstractmethod
    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        """Accumulate the gradient of the mean loss over the samples of all batches.

        Returns
        -------
        dict[str, float]
            Means over the samples of all batches, `loss` among them.

        Raises
        ------
        ServiceError
            When the service cannot be reached, or does not support the loss.
        """

    @abstractmethod
    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        """Take a step along the accumulated gradients, and clear them.

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
        """Return `LanguageModel.logprobs`, with gradient within the loss of `forward_backward`."""

    def tempered_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperature: float,
    ) -> Tensor:
        """Return `logprobs` of the whole vocabulary at a temperature above 0.

        Raises
        ------
        ConfigurationError
            For another temperature than 1, if the service does not support it.
        """
        if temperature == 1.0:
            return self.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)
        raise ConfigurationError(
            f"the training service {type(self).__name__} scores at temperature 1, not "
            f"{temperature:g}. Set policy_loss.logprobs to raw, or train_service.backend to local."
        )

    @torch.no_grad()
    def compute_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return `tempered_logprobs` without gradient, on the CPU."""
        rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
        return self.tempered_logprobs(*rows, temperature).detach().cpu()

    @abstractmethod
    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        """Sample as `LanguageModel.generate`; remote samplers derive seeds from the uniforms."""

    @abstractmethod
    def save_state(self, directory: Path) -> None:
        """Write the state for an exact continuation: weights and optimizer, or their address."""

    @abstractmethod
    def load_state(self, directory: Path) -> None:
        """Load the state of `save_state`; raise `CheckpointError` if it is damaged or unfit."""

    @abstractmethod
    def save_weights_for_sampler(self, directory: Path) -> None:
        """Write a complete model and tokenizer in Hugging Face layout."""


SMALLEST_FUSED = 1 << 20
"""Number of weights from which AdamW is fused, which takes a quarter of the time and rounds
differently."""


def build_adamw(
    groups: Sequence[dict[str, Any]], *, lr: float, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """Build `torch.optim.AdamW`, fused for models of a million weights and more."""
    num_weights = sum(weight.numel() for group in groups for weight in group["params"])
    # The fused kernel ignores strides; autograd leaves gradients with those of their weights.
    is_fused = True if num_weights >= SMALLEST_FUSED else None
    return torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, fused=is_fused)


@register_training_service(TrainingServiceType.LOCAL)
class LocalTrainingService(TrainingService):
    """A model in this process and its optimizer.

    A loss may also differentiate `modules` and other results of the model, such as entropies and
    hidden states of `token_scores`.

    Parameters
    ----------
    optimizer : Optimizer
        Over the learned parameters; its groups may have an `lr_factor`.
    learned : Sequence[Parameter]
        Parameters of the optimizer; default: those of the model.
    modules : Module, optional
        Further modules that learn, for instance a value head.
    role : str
        Name of the model's folder in a folder of `save_state`.
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
        return accumulate(((batch, len(batch) / num_samples) for batch in batches), loss)

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        check_step(lr, max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        norm = self._clip(max_grad_norm)
        figures = OptimizerFigures(norm, was_taken=math.isfinite(norm))
        if figures.was_taken:
            self.optimizer.step()
            # Fused optimizers do not, and snapshots for sampling are compared by it.
            torch.autograd.graph.increment_version(self.learned)
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def _clip(self, max_grad_norm: float | None) -> float:
        """Clip the gradient norm; return the norm before."""
        gradients = [weight.grad for weight in self.learned if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # clip_grad_norm_ would multiply small gradients, too, by 1.
        if max_grad_norm is not None and bool(norm + 1e-6 > max_grad_norm):
            torch.nn.utils.clip_grads_with_norm_(self.learned, max_grad_norm, norm)
        return float(norm.double())

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        return self.model.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)

    def tempered_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        temperature: float,
    ) -> Tensor:
        if temperature == 1.0:
            return self.logprobs(context_BC, context_mask_BC, ids_BT, mask_BT)
        return self.model.tempered_logprobs(
            context_BC, context_mask_BC, ids_BT, mask_BT, temperature
        )

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
        load_optimizer(self.optimizer, content["optimizer"], directory / OPTIMIZER_SHARDS)

    def save_weights_for_sampler(self, directory: Path) -> None:
        self.model.save_pretrained(directory)


def accumulate(
    batches: Iterable[tuple[TensorDict, float]],
    loss: Loss,
    backward: Callable[[Tensor], None] = torch.autograd.backward,
) -> dict[str, float]:
    """Backpropagate the loss of each batch times its share; return the sums of all metrics."""
    sums: dict[str, Tensor] = {}
    for batch, share in batches:
        batch_loss, metrics = loss(batch)
        # At once, so that the graph of one batch is in memory at a time.
        backward(batch_loss * share)
        for name, metric in {"loss": batch_loss, **metrics}.items():
            weighted = share * metric.detach().double()
            sums[name] = sums[name] + weighted if name in sums else weighted
    # One transfer from the device for all of them.
    totals: list[float] = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, totals, strict=True))


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    shards: Path,
    distribute: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Load an optimizer's state, saved with or without sharding.

    Parameters
    ----------
    state : dict
        That of `Optimizer.state_dict`, without the tensors in `shards`.
    shards : Path
        Folder with the sharded tensors; it need not exist.
    distribute : Callable, optional
        `(tensor, weight) -> tensor`: takes this process's shard of a full tensor, as of the weight.
        Without it, tensors stay whole.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    # torch keeps the state of a weight, such as Adam's moments, by the weight's number.
    weight_states: dict[int, dict[str, Any]] = {}
    for number, saved_state in state["state"].items():
        weight_state = {}
        for name, saved in saved_state.items():
            if distribute is not None and isinstance(saved, Tensor):
                saved = distribute(saved, weights[number])
            weight_state[name] = saved
        weight_states[number] = weight_state
    if shards.is_dir():
        targets: dict[str, Tensor] = {}
        for name in sizes_in(shards):
            number, _, key = name.partition(".")
            if not number.isdecimal() or int(number) >= len(weights):
                raise CheckpointError(
                    f"{shards} is of another optimizer: it has {name}, here are {len(weights)} "
                    "weights. Resume with the parameters that wrote it."
                )
            targets[name] = torch.zeros_like(weights[int(number)], requires_grad=False)
            weight_states.setdefault(int(number), {})[key] = targets[name]
        load_shards(shards, targets)
    optimizer.load_state_dict({"state": weight_states, "param_groups": state["param_groups"]})


# ---- remote services

Rows = tuple[Tensor, ...]
"""Contexts, their mask, continuations, their mask."""


class LogprobLeaves:
    """Losses of a remote policy: its log-probabilities are leaves, whose gradients are sent back.

    The loss must not differentiate `policy`, the model in this process.
    """

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._leaves: list[tuple[Rows, Tensor]] = []
        self._is_open = False

    def leaf(self, rows: Rows, logprobs_BT: Tensor) -> Tensor:
        """Return the log-probabilities as a leaf while a loss is computed, otherwise unchanged."""
        if not (self._is_open and torch.is_grad_enabled()):
            return logprobs_BT
        leaf_BT = logprobs_BT.detach().requires_grad_()
        self._leaves.append((rows, leaf_BT))
        return leaf_BT

    def mean_loss(
        self, batches: Sequence[TensorDict], loss: Loss, send: Callable[[Rows, Tensor], None]
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

        def with_leaves(batch: TensorDict) -> LossOutput:
            self._leaves = []
            self._is_open = True
            return loss(batch)

        def backward(share_of_loss: Tensor) -> None:
            # A loss without a gradient is reported by `_take_gradients`.
            if share_of_loss.requires_grad:
                torch.autograd.backward(share_of_loss)
            for rows, gradient_BT in self._take_gradients():
                send(rows, gradient_BT)

        num_samples = sum(len(batch) for batch in batches)
        shares = ((batch, len(batch) / num_samples) for batch in batches)
        return accumulate(shares, with_leaves, backward)

    def _take_gradients(self) -> list[tuple[Rows, Tensor]]:
        """Return the gradient of each leaf; raise if the loss has others, or none."""
        leaves = self._leaves
        self._leaves = []
        self._is_open = False
        if any(weight.grad is not None for weight in self.policy.parameters()):
            for weight in self.policy.parameters():
                weight.grad = None
            raise ServiceRequestError(
                "the loss differentiates the model in this process, for instance its entropies or "
                "hidden states, which services do not return. Use service.logprobs only, or "
                "train_service.backend local."
            )
        gradients = [(rows, leaf.grad) for rows, leaf in leaves if leaf.grad is not None]
        if not gradients:
            # Without any, the service would take a step with no data.
            raise ServiceRequestError(
                "the loss depends on no log-probability of the training service. Take them from "
                "service.logprobs or policy_logprobs."
            )
        return gradients


def adapter_config(policy: LanguageModel) -> Any:
    """Return PEFT's configuration of a policy's adapter; None without one."""
    module: Any = getattr(policy, "module", None)
    if not hasattr(module, "peft_config"):
        return None
    return module.peft_config[module.active_adapter]
