"""A model in training by Tinker's protocol: its losses, which are sums over targets, and scores.

Shape suffixes: `B` row, `T` token, `K` candidate, `X` hidden unit, `V` vocabulary, `N` target of
any datum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.tinker_training import LORA_ALPHA, find_part
from nip_astra.language_models.services.training import LocalTrainingService, build_adamw
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.serve.requests import bad_request
from nip_astra.serve.tinker.bodies import AdamBody
from nip_astra.serve.tinker.messages import Datum, ForwardBackward, TopTokens, loss_outputs
from nip_astra.serve.tinker.store import Checkpoint, LoraShape, RunRecord
from nip_astra.serve.training import Base, Bases, HostedModel

ROLE = "policy"
POSITIONS_AT_ONCE = 1024
"""Positions whose log-probabilities of the whole vocabulary are in memory at once."""


@dataclass
class TinkerModel(HostedModel):
    """A model trained with Tinker's protocol."""

    record: RunRecord

    def forward_backward(self, request: ForwardBackward) -> bytes:
        """Compute a loss, add its gradients, and return log-probabilities.

        A wrong request raises `ApiError` and adds no gradient.
        """
        if not request.data:
            raise bad_request("there is no datum. Send at least one.")
        loss = build_loss(request)
        for datum in request.data:
            # The last target is the token after the last one that the model reads.
            self.check_ids(torch.tensor(datum.ids), len(datum.ids) + 1)
            self.check_ids(datum.targets, 0)
        with torch.set_grad_enabled(not request.is_forward_only):
            # Per datum, in the shape of its targets.
            logprobs = target_logprobs(self.policy, request.data)
            logprobs_N = torch.cat([datum_logprobs.flatten() for datum_logprobs in logprobs])
            loss_N = loss(logprobs_N)
            total = loss_N.sum()
        if not request.is_forward_only:
            with self.gradients_or_none():
                torch.autograd.backward(total)
        sizes = [datum_logprobs.numel() for datum_logprobs in logprobs]
        losses = torch.split(loss_N.detach(), sizes)
        elementwise = [
            datum_loss.reshape(datum_logprobs.shape)
            for datum_loss, datum_logprobs in zip(losses, logprobs, strict=True)
        ]
        return loss_outputs(
            {"logprobs": logprobs, "elementwise_loss": elementwise},
            {"loss:sum": float(total.detach().double())},
        )

    def optim_step(self, adam: AdamBody) -> dict[str, float]:
        """Take a step along the gradients.

        If they are not finite, raises `ApiError` and drops them; the weights stay as they were.
        """
        for group in self.service.optimizer.param_groups:
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        # A norm of 0 means no clipping in the protocol.
        max_grad_norm = adam.grad_clip_norm or None
        figures = self.service.optim_step(lr=adam.learning_rate, max_grad_norm=max_grad_norm)
        if not figures.was_taken:
            raise bad_request(
                f"the gradients are not finite (norm {figures.grad_norm}). They are dropped and "
                "the weights unchanged; check the data of the last forward_backward."
            )
        return {"grad_norm:mean": figures.grad_norm, "lr:mean": adam.learning_rate}

    def write_weights(self, folder: Path) -> None:
        self.policy.save(folder / ROLE)

    def load(self, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
        """Load a saved state; without its optimizer, a new one starts."""
        if checkpoint.kind != "training":
            raise bad_request(
                f"the checkpoint {checkpoint.path!r} holds weights to sample from only. Give one "
                "of save_state.",
                "path",
            )
        if with_optimizer:
            self.service.load_state(checkpoint.folder)
        else:
            self.policy.restore(checkpoint.folder / ROLE)
            self.service.optimizer.state.clear()
        self.service.optimizer.zero_grad(set_to_none=True)


def build_model(bases: Bases, record: RunRecord, *, seed: int) -> TinkerModel:
    """Build a new model in training from its base."""
    base = bases.get(record.base_model)
    policy = bases.policy(base, find_lora(base, record.lora), seed=seed)
    # Each step sets its own parameters.
    optimizer = build_adamw([{"params": list(policy.parameters()), "lr_factor": 1.0}], lr=0.0)
    service = LocalTrainingService(policy, optimizer, role=ROLE)
    return TinkerModel(record.run_id, base, service, record)


def find_lora(base: Base, shape: LoraShape) -> LoraParameters:
    """Return the adapter that the protocol describes by parts of the model."""
    head = base.module.get_output_embeddings()
    targets = []
    for name, layer in base.module.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        # `LoraShape` has a field for each part.
        if getattr(shape, find_part(name, layer, head)):
            targets.append(name)
    if not targets:
        raise bad_request(
            f"the chosen parts of {base.name!r} have no linear layer. Set train_attn, train_mlp or "
            "train_unembed.",
            "lora_config",
        )
    return LoraParameters(rank=shape.rank, alpha=LORA_ALPHA, target_modules=targets)


# ---- losses


@dataclass(frozen=True)
class LossKind:
    """A loss of the protocol: the policy loss, and its inputs besides `target_tokens`."""

    loss: str
    needs: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    may_have: tuple[str, ...] = ()


_POLICY = ("logprobs", "advantages")
_LOW, _HIGH = _BOUNDS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, LossKind] = MappingProxyType(
    {
        "cross_entropy": LossKind("reinforce", (), {"weights": 1.0}, ("weights",)),
        "importance_sampling": LossKind("importance_sampling", _POLICY),
        "ppo": LossKind("ppo", _POLICY, {_LOW: 0.8, _HIGH: 1.2}, _BOUNDS),
        "cispo": LossKind("cispo", _POLICY, {_LOW: 0.0, _HIGH: 4.0}, _BOUNDS),
        "dro": LossKind("dro", _POLICY, {"beta": 0.05}),
    }
)
"""Losses by their names in the protocol."""


def target_losses(loss: str, inputs: Mapping[str, Tensor], logprobs_N: Tensor) -> Tensor:
    """Return the loss of each target; all inputs are `[N]`, bounds may be single numbers."""
    inputs = {name: tensor.to(logprobs_N.device) for name, tensor in inputs.items()}
    options = {}
    if "beta" in inputs:
        options["beta"] = inputs["beta"]
    if _LOW in inputs:
        # The protocol bounds the ratio itself, our losses its distance from 1.
        options["clip_low"] = 1 - inputs[_LOW]
        options["clip_high"] = inputs[_HIGH] - 1
    # Cross entropy is reinforce with weights for advantages: -weight * logprob.
    advantages_N = inputs["advantages" if "advantages" in inputs else "weights"]
    old_logprobs_N = inputs.get("logprobs")
    # One row of all targets.
    loss_BN = PolicyLoss(loss, options).of_tokens(
        logprobs_N.unsqueeze(0),
        None if old_logprobs_N is None else old_logprobs_N.unsqueeze(0),
        advantages_N.expand_as(logprobs_N).unsqueeze(0),
        torch.ones_like(logprobs_N, dtype=torch.bool).unsqueeze(0),
    )
    return loss_BN.squeeze(0)


def build_loss(request: ForwardBackward) -> Callable[[Tensor], Tensor]:
    """Return the `target_losses` of a request, with the inputs of all data in order.

    Raises `ApiError` 400 for an unknown loss, and for missing or unused inputs.
    """
    name = request.loss
    kind = LOSSES.get(name)
    if kind is None:
        raise bad_request(
            f"unknown loss {name[:100]!r}; available: {', '.join(LOSSES)}. Compute others at the "
            "client with forward_backward_custom.",
            "loss_fn",
        )
    options = kind.defaults.keys() & {"beta", *_BOUNDS}
    for key, option in request.config.items():
        if key not in options or isinstance(option, str) or not math.isfinite(option):
            raise bad_request(
                f"loss_fn_config of the loss {name!r} has {key}={option!r}. It takes finite "
                f"numbers for: {', '.join(sorted(options)) or 'nothing'}.",
                "loss_fn_config",
            )
    inputs: dict[str, Tensor] = {}
    for key, default in kind.defaults.items():
        inputs[key] = torch.tensor(float(request.config.get(key, default)))
    # An input per target replaces the default or the option of the same name.
    inputs |= _join_inputs(request.data, name, kind)
    return partial(target_losses, kind.loss, inputs)


def _join_inputs(data: Sequence[Datum], loss_name: str, kind: LossKind) -> dict[str, Tensor]:
    """Return the inputs of a loss, `[N]` each; raise `ApiError` unless each datum has the same."""
    sent = {name for datum in data for name in datum.inputs} - {"target_tokens"}
    allowed = {*kind.needs, *kind.may_have}
    faults = []
    for name in sorted({*kind.needs, *(sent & allowed)}):
        if any(name not in datum.inputs for datum in data):
            faults.append(f"{name} is missing")
    faults += [f"{name} is not read" for name in sorted(sent - allowed)]
    if faults:
        raise bad_request(
            f"wrong inputs of the loss {loss_name!r}: {'; '.join(faults)}. Each "
            f"datum takes: {', '.join(['target_tokens', *sorted(allowed)])}.",
            "loss_fn_inputs",
        )
    inputs = {}
    for name in sent:
        input_N = torch.cat([datum.inputs[name].flatten() for datum in data])
        if not input_N.is_floating_point() or not bool(input_N.isfinite().all()):
            raise bad_request(f"{name} of some datum is not finite in float32.", "loss_fn_inputs")
        inputs[name] = input_N
    return inputs


# ---- log-probabilities


def target_logprobs(policy: HuggingFaceLanguageModel, data: Sequence[Datum]) -> list[Tensor]:
    """Return log-probabilities of the targets of data, in their shapes, with gradient, in one pass.

    If each target is the next token, as usual, they equal `LanguageModel.logprobs` bit for bit.
    """
    # Data of both kinds may be mixed: results are collected by the number of the datum.
    logprobs: dict[int, Tensor] = {}
    next_token_numbers = []
    other_numbers = []
    for number, datum in enumerate(data):
        targets = datum.targets
        is_next_token = targets.ndim == 1 and list(datum.ids[1:]) == targets[:-1].tolist()
        if is_next_token:
            next_token_numbers.append(number)
        else:
            other_numbers.append(number)
    if next_token_numbers:
        rows = [(data[number].ids[0], data[number].targets) for number in next_token_numbers]
        logprobs_BT = policy.logprobs(*_pad_rows(rows))
        for row, number in enumerate(next_token_numbers):
            logprobs[number] = logprobs_BT[row, : len(data[number].ids)]
    if other_numbers:
        hidden = hidden_states(policy, [data[number].ids for number in other_numbers])
        for number, hidden_TX in zip(other_numbers, hidden, strict=True):
            logprobs_TV = policy.compute_logits(hidden_TX).log_softmax(dim=-1)
            targets = data[number].targets.to(hidden_TX.device)
            logprobs_TK = logprobs_TV.gather(1, targets.reshape(len(targets), -1))
            logprobs[number] = logprobs_TK.reshape(targets.shape)
    return [logprobs[number] for number in range(len(data))]


def _pad_rows(rows: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows of a first and further tokens, as `LanguageModel.logprobs` takes them."""
    context_B1 = torch.tensor([[first] for first, _ in rows])
    lengths = torch.tensor([len(ids) for _, ids in rows])
    ids_BT = pad_sequence([ids for _, ids in rows], batch_first=True)
    mask_BT = torch.arange(ids_BT.shape[1]) < lengths[:, None]
    return context_B1, torch.ones_like(context_B1, dtype=torch.bool), ids_BT, mask_BT


def hidden_states(policy: HuggingFaceLanguageModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the last hidden state after each token of texts, `[T, X]` per text, with gradient."""
    # A position is scored by the next token. The last one, which has none, is scored by itself;
    # that score is not read.
    rows = [(ids[0], torch.tensor([*ids[1:], ids[-1]])) for ids in texts]
    scores = policy.token_scores(*_pad_rows(rows), needs_hidden=True)
    assert scores.hidden_BTX is not None
    return [scores.hidden_BTX[row, : len(ids)] for row, ids in enumerate(texts)]


@torch.no_grad()
def logprobs_after(policy: HuggingFaceLanguageModel, hidden_TX: Tensor) -> list[Tensor]:
    """Return log-probabilities of all tokens at each position, `[T, V]` per chunk of positions."""
    parts = torch.split(hidden_TX, POSITIONS_AT_ONCE)
    return [policy.compute_logits(part).log_softmax(dim=-1).cpu() for part in parts]


def top_tokens(parts: Sequence[Tensor], count: int) -> TopTokens:
    """Return the most likely tokens at each position, from chunks of `logprobs_after`."""
    tops = [part.topk(min(count, part.shape[1]), dim=1) for part in parts]
    ids_TK = torch.cat([top.indices for top in tops])
    logprobs_TK = torch.cat([top.values for top in tops])
    return TopTokens(ids_TK, logprobs_TK)
