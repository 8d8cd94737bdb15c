"""The losses of Tinker's protocol, sums over all targets of all data.

Shape suffixes: `N` target of any datum, `B` row (here one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.tinker.messages import Datum

Inputs = Mapping[str, Tensor]
"""Inputs of each target, `[N]`; bounds may be single numbers."""


@dataclass(frozen=True)
class LossKind:
    """A loss of the protocol: a policy loss, and the inputs that it reads.

    Attributes
    ----------
    loss : str
        Name in the registry of policy losses.
    needs, may_have : tuple of str
        Inputs beside `target_tokens`.
    defaults : Mapping[str, float]
        Of `loss_fn_config`, and of inputs of the same name.
    """

    loss: str
    needs: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    may_have: tuple[str, ...] = ()

    def compute(self, logprobs_N: Tensor, inputs: Inputs) -> Tensor:
        """The loss of each target, `[N]`."""
        options = {"beta": inputs["beta"]} if "beta" in inputs else {}
        if "clip_low_threshold" in inputs:
            options["clip_low"] = 1 - inputs["clip_low_threshold"]
            options["clip_high"] = inputs["clip_high_threshold"] - 1
        advantages_N = inputs["advantages" if "advantages" in inputs else "weights"]
        old_N = inputs.get("logprobs")
        row = PolicyLoss(self.loss, options).of_tokens(
            logprobs_N.unsqueeze(0),
            None if old_N is None else old_N.unsqueeze(0),
            advantages_N.expand_as(logprobs_N).unsqueeze(0),
            torch.ones_like(logprobs_N, dtype=torch.bool).unsqueeze(0),
        )
        return row.squeeze(0)


_POLICY = ("logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, LossKind] = MappingProxyType(
    {
        "cross_entropy": LossKind("reinforce", (), {"weights": 1.0}, ("weights",)),
        "importance_sampling": LossKind("importance_sampling", _POLICY),
        "ppo": LossKind("ppo", _POLICY, dict(zip(_BOUNDS, (0.8, 1.2), strict=True)), _BOUNDS),
        "cispo": LossKind("cispo", _POLICY, dict(zip(_BOUNDS, (0.0, 4.0), strict=True)), _BOUNDS),
        "dro": LossKind("dro", _POLICY, {"beta": 0.05}),
    }
)
"""By their names in the protocol."""
_CONFIGURED = ("beta", *_BOUNDS)


def loss_kind(name: str) -> LossKind:
    """A loss by its name.

    Raises
    ------
    ApiError
        400 where there is none.
    """
    found = LOSSES.get(name)
    if found is None:
        raise wrong(
            f"unknown loss {name[:100]!r}; available: {', '.join(LOSSES)}. Compute others at the "
            "client with forward_backward_custom.",
            "loss_fn",
        )
    return found


def loss_inputs(
    name: str, kind: LossKind, data: Sequence[Datum], config: Mapping[str, float | str]
) -> Inputs:
    """The inputs of a loss, of all data in their order.

    Raises
    ------
    ApiError
        400 where something is missing, or is given that the loss does not read.
    """
    known = {key for key in kind.defaults if key in _CONFIGURED}
    for key, value in config.items():
        if key not in known or isinstance(value, str) or not math.isfinite(value):
            raise wrong(
                f"loss_fn_config of the loss {name!r} has {key}={value!r}. It takes finite numbers "
                f"for: {', '.join(sorted(known)) or 'nothing'}.",
                "loss_fn_config",
            )
    inputs: dict[str, Tensor] = {
        key: torch.tensor(float(config.get(key, default))) for key, default in kind.defaults.items()
    }
    names = {key for datum in data for key in datum.inputs} - {"target_tokens"}
    allowed = {*kind.needs, *kind.may_have}
    missing = [key for key in kind.needs if any(key not in datum.inputs for datum in data)]
    strange = sorted(names - allowed)
    partly = [key for key in names & allowed if any(key not in one.inputs for one in data)]
    if missing or strange or partly:
        faults = [f"{key} is missing" for key in sorted({*missing, *partly})]
        faults += [f"{key} is not read" for key in strange]
        raise wrong(
            f"wrong inputs of the loss {name!r}: {'; '.join(faults)}. Each "
            f"datum takes: {', '.join(['target_tokens', *sorted(allowed)])}.",
            "loss_fn_inputs",
        )
    for key in names:
        values = torch.cat([datum.inputs[key].flatten() for datum in data])
        if not values.is_floating_point() or not bool(values.isfinite().all()):
            raise wrong(
                f"{key} of some datum is not finite in float32.",
                "loss_fn_inputs",
            )
        inputs[key] = values
    return inputs
