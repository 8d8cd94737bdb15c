"""The weights of a module of the Llama family, as a snapshot to sample from or as they are learnt.

Shape suffixes: `N` token, `X` hidden unit, `V` vocabulary, `O` output, `I` input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.tree_engine.adapted_linear import Adapter, Matrix, adapted_linear
from nip_astra.language_models.tree_engine.kernels import (
    LinearMap,
    OneDnnLinear,
    has_onednn,
    is_packing_faster,
    packed_linear,
)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer as functions; norms are vectors."""

    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: LinearMap
    output: LinearMap
    gate_up: LinearMap
    down: LinearMap


@dataclass(frozen=True)
class Weights:
    """The weights of a model, ready to compute with in one precision."""

    embedding_VX: Tensor
    layers: Sequence[Layer]
    final_norm: Tensor
    head: LinearMap
    dtype: torch.dtype


class DenseLinear:
    """A product with a matrix by torch; the matrix may be overwritten."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)

    def overwrite(self, weight_OI: Tensor, bias_O: Tensor | None) -> DenseLinear:
        """Take other numbers into the same memory."""
        self.weight_OI.copy_(weight_OI)
        if self.bias_O is not None and bias_O is not None:
            self.bias_O.copy_(bias_O)
        return self


def frozen_weights(
    module: Any,
    dtype: torch.dtype,
    *,
    use_adapter: bool,
    release: bool = False,
    into: Weights | None = None,
) -> Weights:
    """A snapshot for sampling: adapters merged, matrices that are used together joined.

    On a CPU the matrices are copied into oneDNN's layout where that is faster; elsewhere they are
    joined copies in `dtype`.

    Parameters
    ----------
    release : bool
        Free the module's own matrices one by one; it cannot compute afterwards.
    into : Weights, optional
        An earlier snapshot off the CPU, which is overwritten and given back, so that whoever reads
        its memory reads the new weights.
    """
    old_maps = iter(_maps_of(into)) if into is not None else None

    def joined(*linears: Any) -> LinearMap:
        with torch.no_grad():
            matrix = torch.cat([_merged(linear, use_adapter) for linear in linears]).to(dtype)
            biases = [_base(linear).bias for linear in linears]
            # A model has biases in all of these or in none.
            bias = None if biases[0] is None else torch.cat(biases).to(dtype)
        if old_maps is not None:
            return next(old_maps).overwrite(matrix, bias)
        for linear in linears if release else ():
            linear.weight = torch.nn.Parameter(
                torch.empty(linear.weight.shape, device="meta"), requires_grad=False
            )
        if has_onednn(matrix.device, dtype) and is_packing_faster(matrix.shape, dtype):
            return packed_linear(matrix, bias)
        return DenseLinear(matrix, bias)

    fresh = _weights(module, dtype, joined)
    if into is None:
        return fresh
    for old, new in zip(_small_tensors(into), _small_tensors(fresh), strict=True):
        # Without a change of precision both are the module's own.
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    return into


def _maps_of(weights: Weights) -> Iterator[DenseLinear]:
    """The products of a snapshot, in the order in which they are made."""
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)  # type: ignore[misc]  # off the CPU all are
    yield weights.head  # type: ignore[misc]  # as above


def _small_tensors(weights: Weights) -> Iterator[Tensor]:
    for layer in weights.layers:
        norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        yield from (norm for norm in norms if norm is not None)
    yield from (weights.embedding_VX, weights.final_norm)


def live_weights(module: Any, dtype: torch.dtype, *, use_adapter: bool) -> Weights:
    """The weights as they are, with gradients, computing in `dtype`; nothing is copied."""

    def joined(*linears: Any) -> LinearMap:
        matrices = [_live_matrix(linear, dtype) for linear in linears]
        adapters = [_live_adapters(linear) if use_adapter else [] for linear in linears]
        if any(adapters):
            return adapted_linear(matrices, adapters)
        return lambda x: _side_by_side(
            [multiply(x, weight, bias) for weight, bias, multiply in matrices]
        )

    return _weights(module, dtype, joined)


def _weights(module: Any, dtype: torch.dtype, joined: Callable[..., LinearMap]) -> Weights:
    layers = [
        Layer(
            input_norm=layer.input_layernorm.weight.to(dtype),
            mlp_norm=layer.post_attention_layernorm.weight.to(dtype),
            query_norm=_optional_norm(layer.self_attn, "q_norm", dtype),
            key_norm=_optional_norm(layer.self_attn, "k_norm", dtype),
            qkv=joined(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            output=joined(layer.self_attn.o_proj),
            gate_up=joined(layer.mlp.gate_proj, layer.mlp.up_proj),
            down=joined(layer.mlp.down_proj),
        )
        for layer in module.model.layers
    ]
    return Weights(
        embedding_VX=module.model.embed_tokens.weight.to(dtype),
        layers=layers,
        final_norm=module.model.norm.weight.to(dtype),
        head=joined(module.lm_head),
        dtype=dtype,
    )


def _optional_norm(attention: Any, name: str, dtype: torch.dtype) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.to(dtype)


def _base(linear: Any) -> Any:
    """The plain linear layer under an adapter."""
    return getattr(linear, "base_layer", linear)


def _adapters(linear: Any) -> Iterable[str]:
    return linear.active_adapters if hasattr(linear, "base_layer") else ()


def _merged(linear: Any, use_adapter: bool) -> Tensor:
    weight: Tensor = _base(linear).weight.detach()
    for name in _adapters(linear) if use_adapter else ():
        weight = weight + linear.get_delta_weight(name)
    return weight


def _live_matrix(linear: Any, dtype: torch.dtype) -> Matrix:
    base = _base(linear)
    weight = base.weight.to(dtype)
    bias = None if base.bias is None else base.bias.to(dtype)
    return Matrix(weight, bias, _gradient_kernel(weight))


def _live_adapters(linear: Any) -> list[Adapter]:
    return [
        Adapter(linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])
        for name in _adapters(linear)
    ]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def _gradient_kernel(weight: Tensor) -> Callable[..., Tensor]:
    """Torch's product, or oneDNN's where torch would use a slower library."""
    if (
        weight.dtype == torch.float32
        and has_onednn(weight.device, weight.dtype)
        and is_packing_faster(weight.shape, weight.dtype)
    ):
        return OneDnnLinear.apply
    return F.linear


class WeightSnapshot:
    """A snapshot of a module's weights.

    Parameters
    ----------
    dtype : torch.dtype
        What is computed in.
    use_adapter : bool
        Whether the module's adapter is merged in.
    is_overwritten : bool
        Whether later weights take the memory of earlier ones, which captured steps read.
    """

    def __init__(
        self, module: Any, dtype: torch.dtype, *, use_adapter: bool, is_overwritten: bool
    ) -> None:
        self.is_released = False
        self._make: Callable[..., Weights] = lambda **how: frozen_weights(
            module, dtype, use_adapter=use_adapter, **how
        )
        self._is_overwritten = is_overwritten
        self._versions: tuple[int, ...] = ()
        self._weights: Weights | None = None
        self._is_stale = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs to lay out the weights of its own module."""
        return {**self.__dict__, "_weights": None, "_versions": (), "_is_stale": True}

    def of(self, parameters: Iterable[torch.nn.Parameter]) -> Weights:
        """The snapshot as long as these parameters have not changed, else a new one."""
        # Changes in place count a tensor's version up, though not those of every optimizer (fused,
        # 8-bit) nor writes through `.data`: an update says itself that it begins.
        versions = tuple(parameter._version for parameter in parameters)
        is_old = self._is_stale or versions != self._versions
        if self._weights is None or (is_old and not self.is_released):
            old = self._weights if self._is_overwritten else None
            self._weights = None
            # What is made in inference mode could not be overwritten outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._versions, self._weights = versions, self._make(into=old)
            self._is_stale = False
        return self._weights

    def make_room(self) -> None:
        """Drop the snapshot before an update, and free it unless captured steps read it."""
        self._is_stale = True
        if not self._is_overwritten:
            self._weights = None

    def release(self) -> None:
        """Keep the snapshot alone: the module's own matrices are freed, and it cannot compute."""
        self._weights = self._make(release=True)
        self.is_released = True
