"""The losses of Tinker's protocol, sums over all targets of all data.

Shape suffixes: `N` target of any datum, `B` row (here one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from nip_astra.rl_objectives.ratios import bounded
from nip_astra.serve.api_errors import wrong
from nip_astra.serve.training.tinker.messages import Datum

Inputs = Mapping[str, Tensor]
"""What the loss reads of each target, `[N]`; bounds may be single numbers."""


@dataclass(frozen=True)
class LossKind:
    """A loss: what it reads, and how it is computed.

    Attributes
    ----------
    compute : Callable
        `(logprobs_N, inputs) -> [N]`.
    needs, may_have : tuple of str
        Inputs beside `target_tokens`.
    defaults : Mapping[str, float]
        Of `loss_fn_config`, and of inputs of the same name.
    """

    compute: Callable[[Tensor, Inputs], Tensor]
    needs: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)
    may_have: tuple[str, ...] = ()


def _cross_entropy(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    return -logprobs_N * inputs["weights"]


def _importance_sampling(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    return -_ratio(logprobs_N, inputs) * inputs["advantages"]


def _ppo(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    ratio_N, advantages_N = _ratio(logprobs_N, inputs), inputs["advantages"]
    held_N = _held(ratio_N, inputs)
    return torch.maximum(-ratio_N * advantages_N, -held_N * advantages_N)


def _cispo(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    held_N = _held(_ratio(logprobs_N, inputs), inputs).detach()
    return -held_N * inputs["advantages"] * logprobs_N


def _dro(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    distance_N = (logprobs_N - inputs["logprobs"]).square()
    return 0.5 * inputs["beta"] * distance_N - logprobs_N * inputs["advantages"]


def _ratio(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    return bounded(logprobs_N - inputs["logprobs"]).exp()


def _held(ratio_N: Tensor, inputs: Inputs) -> Tensor:
    return torch.minimum(
        torch.maximum(ratio_N, inputs["clip_low_threshold"]), inputs["clip_high_threshold"]
    )


_POLICY = ("logprobs", "advantages")
_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, LossKind] = MappingProxyType(
    {
        "cross_entropy": LossKind(_cross_entropy, (), {"weights": 1.0}, ("weights",)),
        "importance_sampling": LossKind(_importance_sampling, _POLICY),
        "ppo": LossKind(_ppo, _POLICY, dict(zip(_BOUNDS, (0.8, 1.2), strict=True)), _BOUNDS),
        "cispo": LossKind(_cispo, _POLICY, dict(zip(_BOUNDS, (0.0, 4.0), strict=True)), _BOUNDS),
        "dro": LossKind(_dro, _POLICY, {"beta": 0.05}),
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
            f"gradients of the loss {name[:100]!r} were asked for, but this service has "
            f"{', '.join(LOSSES)}. Write another one with forward_backward_custom, which computes "
            "it at the client.",
            "loss_fn",
        )
    return found


def loss_inputs(
    name: str, kind: LossKind, data: Sequence[Datum], config: Mapping[str, float | str]
) -> Inputs:
    """What a loss reads, of all data in their order.

    Raises
    ------
    ApiError
        400 where something is missing, or is given that the loss does not read.
    """
    known = {key for key in kind.defaults if key in _CONFIGURED}
    for key, value in config.items():
        if key not in known or isinstance(value, str) or not math.isfinite(value):
            raise wrong(
                f"the loss {name!r} was given {key}={value!r} in loss_fn_config, which it does not "
                f"read. It reads finite numbers for: {', '.join(sorted(known)) or 'nothing'}.",
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
        faults += [f"{key} is nothing that it reads" for key in strange]
        raise wrong(
            f"the loss {name!r} was given other inputs than it takes: {'; '.join(faults)}. Each "
            f"datum takes: {', '.join(['target_tokens', *sorted(allowed)])}.",
            "loss_fn_inputs",
        )
    for key in names:
        values = torch.cat([datum.inputs[key].flatten() for datum in data])
        if not values.is_floating_point() or not bool(values.isfinite().all()):
            raise wrong(
                f"{key} of some datum holds what is no finite number of float32. Send others.",
                "loss_fn_inputs",
            )
        inputs[key] = values
    return inputs
