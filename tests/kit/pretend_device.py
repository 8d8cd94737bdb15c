"""A second device without hardware: its tensors are computed on the CPU, and cannot be mixed.

Tensors with `device=PRETEND` refuse operations beside tensors of the CPU as those of a GPU do, so
that code which makes a tensor on the wrong device fails in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

PRETEND = torch.device("meta")
# A GPU also accepts CPU indices, masks and copies.
MIXED = (
    "aten::index",
    "aten::_index_put_impl_",
    "aten::index_put",
    "aten::copy_",
    "aten::_to_copy",
)


class PretendTensor(Tensor):
    """A tensor of the device; `held` is the same tensor on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=PRETEND,
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.held!r})"

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new_tensor(self, data: Any, **how: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **how})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Creates tensors with `device=PRETEND` on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


@contextmanager
def pretend_device() -> Iterator[torch.device]:
    """Make the device available within the block."""
    fused = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with (
        _Mode(),
        mock.patch(fused, return_value=["cpu", PRETEND.type]),
        mock.patch("torch.tensor", partial(_moved, torch.tensor)),
        mock.patch("torch.as_tensor", partial(_moved, torch.as_tensor)),
    ):
        yield PRETEND


def _moved(make: Callable[..., Tensor], data: Any, *, device: Any = None, **how: Any) -> Tensor:
    """Make a tensor from Python numbers, which torch does not write to its own "meta" device."""
    made = make(data, **how)
    return made if device is None else made.to(device)


def _compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    is_here = any(isinstance(one, PretendTensor) for one in tensors)
    name = func._schema.name
    beside = [one for one in tensors if not isinstance(one, PretendTensor) and one.ndim]
    if is_here and beside and name not in MIXED:
        raise RuntimeError(f"{name}: tensors on the CPU beside tensors on the pretended device")
    target = kwargs.get("device")
    goes_here = is_here if target is None else torch.device(target) == PRETEND
    if name == "aten::copy_" or (name == "aten::index" and target is None):
        goes_here = isinstance(args[0], PretendTensor)
    generator = kwargs.get("generator")
    if goes_here and generator is not None and name != "aten::copy_":
        raise RuntimeError(f"{name}: a generator of the CPU for the pretended device")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain: Callable[[Any], Any] = lambda one: one.held if isinstance(one, PretendTensor) else one  # noqa: E731
    found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    given = {id(one.held): one for one in tensors if isinstance(one, PretendTensor)}

    def wrap(one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, PretendTensor):
            return one
        # An in-place operation returns its argument.
        return given[id(one)] if id(one) in given else PretendTensor(one)

    return tree_map(wrap, found) if goes_here else found
