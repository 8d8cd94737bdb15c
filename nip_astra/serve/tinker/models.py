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
from nip_astra.language_models.services.tinker_training import LORA_ALPHA
from nip_astra.language_models.services.training import LocalTrainingService, build_adamw
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.serve.requests import bad_request
from nip_astra.serve.tinker.bodies import AdamBody
from nip_astra.serve.tinker.messages import Datum, ForwardBackward, Likeliest, loss_outputs
from nip_astra.serve.tinker.store import Checkpoint, LoraShape, RunRecord
from nip_astra.serve.training import Base, Bases, HostedModel

ROLE = "policy"
PLACES_AT_ONCE = 1024


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
        loss = loss_of(request)
        for datum in request.data:
            self.check_ids(torch.tensor(datum.ids), len(datum.ids) + 1)
            self.check_ids(datum.targets, 0)
        with torch.set_grad_enabled(not request.is_forward_only):
            logprobs = target_logprobs(self.policy, request.data)
            loss_N = loss(torch.cat([one.flatten() for one in logprobs]))
            total = loss_N.sum()
        if not request.is_forward_only:
            with self.gradients_or_none():
                torch.autograd.backward(total)
        sizes = [one.numel() for one in logprobs]
        elementwise = [
            part.reshape(one.shape)
            for part, one in zip(torch.split(loss_N.detach(), sizes), logprobs, strict=True)
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
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        figures = self.service.optim_step(
            lr=adam.learning_rate, max_grad_norm=adam.grad_clip_norm or None
        )
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
    policy = bases.policy(base, lora_of(base, record.lora), seed=seed)
    # Each step sets its own parameters.
    optimizer = build_adamw([{"params": list(policy.parameters()), "lr_factor": 1.0}], lr=0.0)
    service = LocalTrainingService(policy, optimizer, role=ROLE)
    return TinkerModel(record.run_id, base, service, record)


def lora_of(base: Base, shape: LoraShape) -> LoraParameters:
    """Return the adapter that the protocol describes by parts of the model."""
    head = base.module.get_output_embeddings()
    targets = []
    for name, layer in base.module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            is_attention = "attn" in name or "attention" in name
            is_wanted = shape.train_attn if is_attention else shape.train_mlp
            if shape.train_unembed if layer is head else is_wanted:
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
    inputs = {name: value.to(logprobs_N.device) for name, value in inputs.items()}
    options = {"beta": inputs["beta"]} if "beta" in inputs else {}
    if _LOW in inputs:
        options |= {"clip_low": 1 - inputs[_LOW], "clip_high": inputs[_HIGH] - 1}
    advantages_N = inputs["advantages" if "advantages" in inputs else "weights"]
    old_N = inputs.get("logprobs")
    loss_BN = PolicyLoss(loss, options).of_tokens(
        logprobs_N.unsqueeze(0),
        None if old_N is None else old_N.unsqueeze(0),
        advantages_N.expand_as(logprobs_N).unsqueeze(0),
        torch.ones_like(logprobs_N, dtype=torch.bool).unsqueeze(0),
    )
    return loss_BN.squeeze(0)


def loss_of(request: ForwardBackward) -> Callable[[Tensor], Tensor]:
    """Return the `target_losses` of a request, with the inputs of all data in order.

    Raises `ApiError` 400 for an unknown loss, and for missing or unused inputs.
    """
    name, data = request.loss, request.data
    kind = LOSSES.get(name)
    if kind is None:
        raise bad_request(
            f"unknown loss {name[:100]!r}; available: {', '.join(LOSSES)}. Compute others at the "
            "client with forward_backward_custom.",
            "loss_fn",
        )
    known = kind.defaults.keys() & {"beta", *_BOUNDS}
    for key, value in request.config.items():
        if key not in known or isinstance(value, str) or not math.isfinite(value):
            raise bad_request(
                f"loss_fn_config of the loss {name!r} has {key}={value!r}. It takes finite numbers "
                f"for: {', '.join(sorted(known)) or 'nothing'}.",
                "loss_fn_config",
            )
    inputs: dict[str, Tensor] = {
        key: torch.tensor(float(request.config.get(key, default)))
        for key, default in kind.defaults.items()
    }
    names = {key for datum in data for key in datum.inputs} - {"target_tokens"}
    allowed = {*kind.needs, *kind.may_have}
    needed = {*kind.needs, *(names & allowed)}
    faults = [
        f"{key} is missing"
        for key in sorted(needed)
        if any(key not in datum.inputs for datum in data)
    ]
    faults += [f"{key} is not read" for key in sorted(names - allowed)]
    if faults:
        raise bad_request(
            f"wrong inputs of the loss {name!r}: {'; '.join(faults)}. Each "
            f"datum takes: {', '.join(['target_tokens', *sorted(allowed)])}.",
            "loss_fn_inputs",
        )
    for key in names:
        values = torch.cat([datum.inputs[key].flatten() for datum in data])
        if not values.is_floating_point() or not bool(values.isfinite().all()):
            raise bad_request(f"{key} of some datum is not finite in float32.", "loss_fn_inputs")
        inputs[key] = values
    return partial(target_losses, kind.loss, inputs)


# ---- log-probabilities


def target_logprobs(policy: HuggingFaceLanguageModel, data: Sequence[Datum]) -> list[Tensor]:
    """Return log-probabilities of the targets of data, in their shapes, with gradient, in one pass.

    If each target is the next token, as usual, they equal `LanguageModel.logprobs` bit for bit.
    """
    found: dict[int, Tensor] = {}
    plain = [number for number, one in enumerate(data) if _are_next_tokens(one)]
    if plain:
        rows = [data[number] for number in plain]
        logprobs_BT = policy.logprobs(*_rows([(one.ids[0], one.targets) for one in rows]))
        for place, number in enumerate(plain):
            found[number] = logprobs_BT[place, : len(data[number].ids)]
    others = [number for number in range(len(data)) if number not in found]
    if others:
        hidden = hidden_states(policy, [data[number].ids for number in others])
        for number, hidden_TX in zip(others, hidden, strict=True):
            logprobs_TV = policy.compute_logits(hidden_TX).log_softmax(dim=-1)
            targets = data[number].targets.to(hidden_TX.device)
            chosen_TK = logprobs_TV.gather(1, targets.reshape(len(targets), -1))
            found[number] = chosen_TK.reshape(targets.shape)
    return [found[number] for number in range(len(data))]


def _are_next_tokens(datum: Datum) -> bool:
    targets = datum.targets
    return targets.ndim == 1 and list(datum.ids[1:]) == targets[:-1].tolist()


def _rows(rows: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context_B1 = torch.tensor([[first] for first, _ in rows])
    lengths = torch.tensor([len(ids) for _, ids in rows])
    ids_BT = pad_sequence([ids for _, ids in rows], batch_first=True)
    mask_BT = torch.arange(ids_BT.shape[1]) < lengths[:, None]
    return context_B1, torch.ones_like(context_B1, dtype=torch.bool), ids_BT, mask_BT


def hidden_states(policy: HuggingFaceLanguageModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the last hidden state after each token of texts, `[T, X]` per text, with gradient."""
    # The token after the last one is never looked at.
    rows = _rows([(ids[0], torch.tensor([*ids[1:], ids[-1]])) for ids in texts])
    scores = policy.token_scores(*rows, needs_hidden=True)
    assert scores.hidden_BTX is not None
    return [scores.hidden_BTX[place, : len(ids)] for place, ids in enumerate(texts)]


@torch.no_grad()
def logprobs_after(policy: HuggingFaceLanguageModel, hidden_TX: Tensor) -> list[Tensor]:
    """Return log-probabilities of all tokens at each position, `[T, V]` per chunk of positions."""
    parts = torch.split(hidden_TX, PLACES_AT_ONCE)
    return [policy.compute_logits(part).log_softmax(dim=-1).cpu() for part in parts]


def likeliest(parts: Sequence[Tensor], count: int) -> Likeliest:
    """Return the most likely tokens at each position, from chunks of `logprobs_after`."""
    found = [part.topk(min(count, part.shape[1]), dim=1) for part in parts]
    return Likeliest(
        torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])
    )
