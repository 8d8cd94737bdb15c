"""nip's array functions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nip_astra.rl_objectives import ihvp, stackelberg


def set_seed(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def logit_entropy(logits: Tensor) -> Tensor:
    """Return the entropy, in nats, of the distributions given by logits in the last dimension."""
    entropy: Tensor = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1)
    return entropy


def aggregate_mean_grouped_by_class(
    values: npt.ArrayLike, classes: npt.ArrayLike, num_classes: int | None = None
) -> npt.NDArray[np.float64]:
    """Return the mean value of each class 0, 1, ..., NaN for an empty class.

    Parameters
    ----------
    num_classes : int, optional
        One more than the largest class where it is not given.
    """
    flat, numbers = np.asarray(values, dtype=float).ravel(), np.asarray(classes).ravel()
    count = int(numbers.max()) + 1 if num_classes is None else num_classes
    means = np.full(count, np.nan)
    for number in np.unique(numbers).tolist():
        means[number] = flat[numbers == number].mean()
    return means


def mean_for_unique_keys(data: npt.NDArray[Any], key: npt.NDArray[Any], axis: int = 0) -> Any:
    """Return the mean of data along an axis, counting values of equal keys once.

    Parameters
    ----------
    key : ndarray
        Broadcasts with `data`; where keys are equal, so are the data.
    """
    shape = np.broadcast_shapes(data.shape, key.shape)
    data_S, key_S = (np.moveaxis(np.broadcast_to(one, shape), axis, 0) for one in (data, key))
    means = np.empty(data_S.shape[1:])
    for place in np.ndindex(*means.shape):
        _, first = np.unique(key_S[(slice(None), *place)], return_index=True)
        means[place] = data_S[(first, *place)].mean()
    return means


def compute_nystrom_ihvp(
    follower_loss: Tensor,
    leader_loss: Tensor,
    follower_params: Mapping[str, Tensor],
    leader_params: Mapping[str, Tensor],
    rank: int = 5,
    rho: float = 0.1,
    retain_graph: bool = True,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Approximate `(H + rho I)^-1 g` by Nystrom's method; see `rl_objectives.ihvp.nystrom`.

    `H` is the Hessian of the follower's loss by its parameters, and `g` the gradient of the
    leader's loss by them. The graphs are kept in any case, and `leader_params` are not needed.

    Returns
    -------
    dict of Tensor
        The product, by name and in the shape of the follower's parameters.
    """
    parameters = list(follower_params.values())
    field_P = ihvp.gradient(follower_loss, parameters)
    hessian = ihvp.jacobian_operator(field_P, parameters, is_symmetric=True)
    inverse = ihvp.nystrom(hessian, rank=rank, rho=rho, generator=generator)
    product_P = inverse.solve(ihvp.gradient(leader_loss, parameters, create_graph=False))
    return dict(zip(follower_params, ihvp.unflatten(product_P, parameters), strict=True))


def compute_sos_update(
    simultaneous_grad: Mapping[str, Tensor],
    hessian_grad_product: Mapping[str, Tensor],
    opponent_shaping: Mapping[str, Tensor],
    scaling_factor: float,
    threshold_factor: float,
) -> dict[str, Tensor]:
    """Compute the update of stable opponent shaping; see `stackelberg.compute_sos_update`.

    Parameters
    ----------
    simultaneous_grad, hessian_grad_product, opponent_shaping : Mapping of Tensor
        Gradient, product of the off-diagonal Hessian with it, and shaping term, by parameter.

    Returns
    -------
    dict of Tensor
        The update by parameter.
    """
    like = list(simultaneous_grad.values())
    gradient_P, product_P, shaping_P = (
        ihvp.flatten([terms[name] for name in simultaneous_grad])
        for terms in (simultaneous_grad, hessian_grad_product, opponent_shaping)
    )
    update_P, _ = stackelberg.compute_sos_update(
        gradient_P,
        gradient_P - product_P,
        shaping_P,
        scaling_factor=scaling_factor,
        threshold_factor=threshold_factor,
    )
    return dict(zip(simultaneous_grad, ihvp.unflatten(update_P, like), strict=True))
