"""A model in training by Tinker's protocol, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.bases import Base, Bases
from nip_astra.serve.training.hosted import HostedModel
from nip_astra.serve.training.tinker.bodies import AdamBody
from nip_astra.serve.training.tinker.losses import loss_inputs, loss_kind
from nip_astra.serve.training.tinker.messages import ForwardBackward, loss_outputs
from nip_astra.serve.training.tinker.scores import target_logprobs
from nip_astra.serve.training.tinker.store import Checkpoint, LoraShape, RunRecord

LORA_ALPHA = 32.0
"""As the service of Tinker's has it: adapters are scaled by this over their rank."""
ROLE = "policy"


@dataclass
class TinkerModel(HostedModel):
    """A model in training by Tinker's protocol."""

    record: RunRecord

    def forward_backward(self, request: ForwardBackward) -> bytes:
        """Compute a loss, add its gradients to what there is, and give log-probabilities.

        Raises
        ------
        ApiError
            Where the request is wrong; then no gradient is added.
        """
        kind = loss_kind(request.loss)
        if not request.data:
            raise wrong("gradients were asked for without any datum. Send at least one.")
        inputs = loss_inputs(request.loss, kind, request.data, request.config)
        for datum in request.data:
            self.check_ids(torch.tensor(datum.ids), len(datum.ids) + 1)
            self.check_ids(datum.targets, 0)
        with torch.set_grad_enabled(not request.is_forward_only):
            logprobs = target_logprobs(self.policy, request.data)
            logprobs_N = torch.cat([one.flatten() for one in logprobs])
            on_device = {name: value.to(logprobs_N.device) for name, value in inputs.items()}
            loss_N = kind.compute(logprobs_N, on_device)
            loss = loss_N.sum()
        if not request.is_forward_only:
            with self.gradients_or_none():
                torch.autograd.backward(loss)
        sizes = [one.numel() for one in logprobs]
        elementwise = [
            part.reshape(one.shape)
            for part, one in zip(torch.split(loss_N.detach(), sizes), logprobs, strict=True)
        ]
        return loss_outputs(
            {"logprobs": logprobs, "elementwise_loss": elementwise},
            {"loss:sum": float(loss.detach().double())},
        )

    def optim_step(self, adam: AdamBody) -> dict[str, float]:
        """Step along the gradients.

        Raises
        ------
        ApiError
            Where they are not finite; then they are gone, and the weights are as they were.
        """
        for group in self.service.optimizer.param_groups:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        figures = self.service.optim_step(
            lr=adam.learning_rate, max_grad_norm=adam.grad_clip_norm or None
        )
        if not figures.was_taken:
            raise wrong(
                f"an optimizer step was asked for, but {NOT_FINITE}: their norm is "
                f"{figures.grad_norm}. They are gone, and the weights are as they were. Look at "
                "the data of the last forward_backward."
            )
        return {"grad_norm:mean": figures.grad_norm, "lr:mean": adam.learning_rate}

    def write_state(self, folder: Path) -> None:
        """Write weights and optimizer."""
        self.service.save_state(folder)

    def write_weights(self, folder: Path) -> None:
        """Write the adapter alone, to sample from."""
        self.policy.save(folder / ROLE)

    def load(self, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
        """Take up what `write_state` wrote; without the optimizer that starts anew."""
        if checkpoint.kind != "training":
            raise wrong(
                f"the checkpoint {checkpoint.path!r} was to be trained further, but it holds "
                "weights to sample from alone. Give one that save_state wrote.",
                "path",
            )
        if with_optimizer:
            self.service.load_state(checkpoint.folder)
        else:
            self.policy.restore(checkpoint.folder / ROLE)
            self.service.optimizer.state.clear()
        self.service.optimizer.zero_grad(set_to_none=True)


NOT_FINITE = "the gradients are not finite"


def build_model(bases: Bases, record: RunRecord, *, seed: int) -> TinkerModel:
    """A model in training, from its base."""
    base = bases.get(record.base_model)
    policy = bases.policy(base, lora_of(base, record.lora), seed=seed)
    # What each step names is set then.
    optimizer = torch.optim.AdamW([{"params": list(policy.parameters()), "lr_factor": 1.0}])
    service = LocalTrainingService(policy, optimizer, role=ROLE)
    return TinkerModel(record.run_id, base, service, record)


def lora_of(base: Base, shape: LoraShape) -> LoraParameters:
    """The adapter that the protocol describes by parts of the model.

    Raises
    ------
    ApiError
        Where the model has none of these parts.
    """
    head = base.module.get_output_embeddings()
    targets = []
    for name, layer in base.module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            is_attention = "attn" in name or "attention" in name
            is_wanted = shape.train_attn if is_attention else shape.train_mlp
            if shape.train_unembed if layer is head else is_wanted:
                targets.append(name)
    if not targets:
        raise wrong(
            f"an adapter was to be put on the model {base.name!r}, but it has no linear layer "
            "among those that are to be trained. Set train_attn, train_mlp or train_unembed.",
            "lora_config",
        )
    return LoraParameters(rank=shape.rank, alpha=LORA_ALPHA, target_modules=targets)
