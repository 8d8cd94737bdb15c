"""The weights of a Llama-family module: a snapshot for sampling, or the trained weights themselves.

Shape suffixes: `N` token, `X` hidden unit, `V` vocabulary, `O` output, `I` input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

JOINED: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Linear layers of a module that are joined into one product, in order."""


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
    """The weights of a model, prepared for computing in one precision."""

    embedding_VX: Tensor
    layers: Sequence[Layer]
    final_norm: Tensor
    head: LinearMap
    dtype: torch.dtype


class DenseLinear:
    """A matrix product by torch; the matrix may be overwritten."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self.bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)

    def overwrite(self, weight_OI: Tensor, bias_O: Tensor | None) -> DenseLinear:
        """Write other weights into the same memory."""
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
    """Return a snapshot for sampling: adapters merged, and matrices used together joined.

    Matrices are copies in `dtype`, in oneDNN's layout where `uses_onednn`. `release` frees the
    module's own matrices, so that it cannot compute afterwards. `into`, an earlier snapshot off the
    CPU, is overwritten, so that captured steps read the new weights.
    """
    old_products = _iterate_products(into) if into is not None else None

    def join(*linears: Any) -> LinearMap:
        with torch.no_grad():
            matrices = [_merge_adapters(linear, use_adapter) for linear in linears]
            matrix_OI = torch.cat(matrices).to(dtype)
            biases = [_unwrap(linear).bias for linear in linears]
            # A model has biases in all of these or in none.
            bias_O = None if biases[0] is None else torch.cat(biases).to(dtype)
        if old_products is not None:
            return next(old_products).overwrite(matrix_OI, bias_O)
        if release:
            for linear in linears:
                without_memory = torch.empty(linear.weight.shape, device="meta")
                linear.weight = torch.nn.Parameter(without_memory, requires_grad=False)
        if uses_onednn(matrix_OI.shape, matrix_OI.device, dtype):
            return packed_linear(matrix_OI, bias_O)
        return DenseLinear(matrix_OI, bias_O)

    new_weights = _build_weights(module, dtype, join)
    if into is None:
        return new_weights
    # The products have been overwritten already, by `join`.
    old_tensors, new_tensors = _small_tensors(into), _small_tensors(new_weights)
    for old, new in zip(old_tensors, new_tensors, strict=True):
        # Without a change of precision both are the module's own.
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    return into


def _iterate_products(weights: Weights) -> Iterator[DenseLinear]:
    """Yield the products of a snapshot, in the order in which `_build_weights` makes them."""
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)  # type: ignore[misc]  # off the CPU all are
    yield weights.head  # type: ignore[misc]  # as above


def _small_tensors(weights: Weights) -> list[Tensor]:
    """Return the embedding and the norms, which are not products."""
    tensors = [weights.embedding_VX, weights.final_norm]
    for layer in weights.layers:
        tensors += [layer.input_norm, layer.mlp_norm]
        if layer.query_norm is not None and layer.key_norm is not None:
            tensors += [layer.query_norm, layer.key_norm]
    return tensors


def live_weights(module: Any, dtype: torch.dtype, *, use_adapter: bool) -> Weights:
    """Return the current weights, with gradients, computing in `dtype`; nothing is copied."""

    def join(*linears: Any) -> LinearMap:
        matrices = _live_matrices(linears, dtype)
        adapters: list[list[Adapter]] = []
        for linear in linears:
            linear_adapters = []
            for name in _active_adapters(linear) if use_adapter else ():
                down, up = linear.lora_A[name].weight, linear.lora_B[name].weight
                linear_adapters.append(Adapter(down, up, linear.scaling[name]))
            adapters.append(linear_adapters)
        if any(adapters):
            return adapted_linear(matrices, adapters)
        return lambda x_NI: _multiply_all(x_NI, matrices)

    return _build_weights(module, dtype, join)


def _build_weights(module: Any, dtype: torch.dtype, join: Callable[..., LinearMap]) -> Weights:
    """Collect the weights of a module; `join` makes one product of linear layers."""
    layers = []
    for layer in module.model.layers:
        products = {}
        for name, paths in JOINED.items():
            products[name] = join(*(layer.get_submodule(path) for path in paths))
        layers.append(
            Layer(
                input_norm=layer.input_layernorm.weight.to(dtype),
                mlp_norm=layer.post_attention_layernorm.weight.to(dtype),
                query_norm=_optional_norm(layer.self_attn, "q_norm", dtype),
                key_norm=_optional_norm(layer.self_attn, "k_norm", dtype),
                **products,
            )
        )
    return Weights(
        embedding_VX=module.model.embed_tokens.weight.to(dtype),
        layers=layers,
        final_norm=module.model.norm.weight.to(dtype),
        head=join(module.lm_head),
        dtype=dtype,
    )


def _optional_norm(attention: Any, name: str, dtype: torch.dtype) -> Tensor | None:
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight.to(dtype)


def _unwrap(linear: Any) -> Any:
    """Return the plain linear layer under an adapter."""
    return getattr(linear, "base_layer", linear)


def _active_adapters(linear: Any) -> Sequence[str]:
    return linear.active_adapters if hasattr(linear, "base_layer") else ()


def _merge_adapters(linear: Any, use_adapter: bool) -> Tensor:
    """Return a layer's matrix, with the updates of its adapters if they are used."""
    weight_OI: Tensor = _unwrap(linear).weight.detach()
    if use_adapter:
        for name in _active_adapters(linear):
            weight_OI = weight_OI + linear.get_delta_weight(name)
    return weight_OI


def _live_matrices(linears: Sequence[Any], dtype: torch.dtype) -> list[Matrix]:
    """Return the matrices of layers with one input: side by side if oneDNN computes the product."""
    plain_linears = [_unwrap(linear) for linear in linears]
    weights = [linear.weight.to(dtype) for linear in plain_linears]
    biases: list[Tensor | None] = [
        None if linear.bias is None else linear.bias.to(dtype) for linear in plain_linears
    ]
    joined_shape = torch.Size((sum(map(len, weights)), weights[0].shape[1]))
    if dtype == torch.float32 and uses_onednn(joined_shape, weights[0].device, dtype):
        # Joined as in a snapshot. A model has biases in all of these or in none.
        present_biases = [bias for bias in biases if bias is not None]
        bias_O = torch.cat(present_biases) if present_biases else None
        return [Matrix(tuple(weights), bias_O, OneDnnLinear.apply)]
    return [
        Matrix((weight,), bias, _multiply_dense)
        for weight, bias in zip(weights, biases, strict=True)
    ]


class WeightSnapshot:
    """A snapshot of a module's weights."""

    def __init__(
        self, module: Any, dtype: torch.dtype, *, use_adapter: bool, is_overwritten: bool
    ) -> None:
        self.is_released = False
        self._take_snapshot: Callable[..., Weights] = partial(
            frozen_weights, module, dtype, use_adapter=use_adapter
        )
        self._is_overwritten = is_overwritten
        self._versions: tuple[int, ...] = ()
        self._weights: Weights | None = None
        self._is_stale = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state from which a copy prepares the weights of its own module."""
        return {**self.__dict__, "_weights": None, "_versions": (), "_is_stale": True}

    def update(self, parameters: Iterable[torch.nn.Parameter]) -> Weights:
        """Return the snapshot while these parameters are unchanged, else a new one."""
        # Not every optimizer (fused, 8-bit) nor writes through `.data` raise a tensor's version: an
        # update also calls `make_room`.
        versions = tuple(parameter._version for parameter in parameters)
        is_outdated = self._is_stale or versions != self._versions
        if self._weights is None or (is_outdated and not self.is_released):
            overwritten = self._weights if self._is_overwritten else None
            # Freed first, so that two snapshots are never in memory together.
            self._weights = None
            # What is made in inference mode could not be overwritten outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._weights = self._take_snapshot(into=overwritten)
            self._versions = versions
            self._is_stale = False
        return self._weights

    def make_room(self) -> None:
        """Drop the snapshot before an update, and free it unless captured steps read it."""
        self._is_stale = True
        if not self._is_overwritten:
            self._weights = None

    def release(self) -> None:
        """Keep only the snapshot: the module's own matrices are freed, and it cannot compute."""
        self._weights = self._take_snapshot(release=True)
        self.is_released = True


# oneDNN keeps each shape of a product prepared, which takes about half a megabyte; rollouts go
# through hundreds of shapes, of which few come again soon. It reads this at the first product.
for _setting in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_setting, "128")

LinearMap = Callable[[Tensor], Tensor]
"""A product with a fixed matrix, `[N, I] -> [N, O]`."""

SMALLEST_FOR_ONEDNN = 250_000
"""Minimum weights of a matrix that oneDNN multiplies; below, neither kernel is clearly faster."""
_VECTORS_FOR_ONEDNN = ("AVX2", "AVX512")


def uses_onednn(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN, rather than torch, multiplies with a matrix of this shape.

    It follows from shape, precision and processor alone: both kernels round differently, so that a
    choice by measured times gave a resumed run or an actor other digits than its run. In float32,
    oneDNN took .3 to .9 of torch's time with 4 rows on processors with AVX2 or AVX-512, and twice
    that time without.
    """
    if shape.numel() < SMALLEST_FOR_ONEDNN or not has_onednn(device, dtype):
        return False
    # torch leaves its backend checks without types.
    vectors: str = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
    return vectors in _VECTORS_FOR_ONEDNN


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply on this device, in float32 or bfloat16.

    It packs bfloat16 weights only on processors with AVX-512 or better.
    """
    # torch leaves its backend checks without types.
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not is_built:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearMap:
    """Return a product with a copy of the weights in oneDNN's own layout; no gradient."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), None)
    bias = None if bias_O is None else bias_O.detach().to(weight_OI.dtype)
    # Looked up once, since this is called for every token.
    multiply = torch.ops.mkldnn._linear_pointwise

    def linear(x_NI: Tensor) -> Tensor:
        product: Tensor = multiply(x_NI, packed, bias, "none", [], "")
        return product

    return linear


class OneDnnLinear(torch.autograd.Function):
    """The float32 product with matrices side by side, with gradients, all computed by oneDNN.

    Joining the matrices twice takes less than a product with each, and memory only for a moment.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, bias_O: Tensor | None, *weights_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, *weights_OI)
        ctx.has_bias = bias_O is not None
        return _multiply_onednn(x_NI, _join_matrices(weights_OI), bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, *weights_OI = ctx.saved_tensors
        grad_NO = gradients[0].contiguous()
        needs_x, needs_bias, *needs_weights = ctx.needs_input_grad
        grad_x = None
        if needs_x:
            grad_x = _multiply_onednn(grad_NO, _join_matrices(weights_OI).t(), None)
        grad_bias = grad_NO.sum(dim=0) if ctx.has_bias and needs_bias else None
        if not any(needs_weights):
            return grad_x, grad_bias, *(None for _ in weights_OI)
        grad_OI = _multiply_onednn(grad_NO.t(), x_NI.t(), None)
        sizes = [len(weight_OI) for weight_OI in weights_OI]
        return grad_x, grad_bias, *torch.split(grad_OI, sizes)


def _join_matrices(weights_OI: Sequence[Tensor]) -> Tensor:
    return weights_OI[0] if len(weights_OI) == 1 else torch.cat(tuple(weights_OI))


def _multiply_onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
    return product


class Matrix(NamedTuple):
    """Matrices side by side and their bias in the computing precision."""

    weights: tuple[Tensor, ...]
    """Each `[O, I]`."""
    bias: Tensor | None
    multiply: Callable[..., Tensor]
    """`(x_NI, bias_O, *weights_OI) -> [N, O]`."""


def _multiply_dense(x_NI: Tensor, bias_O: Tensor | None, weight_OI: Tensor) -> Tensor:
    return F.linear(x_NI, weight_OI, bias_O)


class Adapter(NamedTuple):
    """A trained update of a matrix: `scaling * up @ down`."""

    down: Tensor
    up: Tensor
    scaling: float


def _multiply_all(x_NI: Tensor, matrices: Sequence[Matrix]) -> Tensor:
    """Compute the products with all matrices, side by side."""
    products = [multiply(x_NI, bias, *weights) for weights, bias, multiply in matrices]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def adapted_linear(matrices: Sequence[Matrix], adapters: Sequence[Sequence[Adapter]]) -> LinearMap:
    """Return the products with all matrices, each with its adapters, `[N, I] -> [N, O]`."""
    weights = [weight for matrix in matrices for weight in matrix.weights]
    all_adapters = [adapter for weight_adapters in adapters for adapter in weight_adapters]

    def apply(x_NI: Tensor) -> Tensor:
        # All adapters as one: their inner units side by side, and each weight's outputs read only
        # those of its own adapters.
        down_RI = torch.cat([adapter.down for adapter in all_adapters]).to(weights[0])
        up_blocks = []
        for weight, weight_adapters in zip(weights, adapters, strict=True):
            if weight_adapters:
                scaled_ups = [adapter.up * adapter.scaling for adapter in weight_adapters]
                up_blocks.append(torch.cat(scaled_ups, dim=1))
            else:
                up_blocks.append(all_adapters[0].up.new_zeros(len(weight), 0))
        # torch leaves these without types.
        up_OR = torch.block_diag(*up_blocks).to(weights[0])  # type: ignore[no-untyped-call]
        product: Tensor = _AdaptedLinear.apply(x_NI, down_RI, up_OR, matrices)  # type: ignore[no-untyped-call]
        return product

    return apply


class _AdaptedLinear(torch.autograd.Function):
    """`x W^T + (x down^T) up^T`; no gradient of `W` is ever computed."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, down_RI: Tensor, up_OR: Tensor, matrices: Sequence[Matrix]
    ) -> Tensor:
        inner_NR = x_NI @ down_RI.t()
        ctx.save_for_backward(x_NI, inner_NR, down_RI, up_OR)
        ctx.matrices = matrices
        return _multiply_all(x_NI, matrices).addmm_(inner_NR, up_OR.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, inner_NR, down_RI, up_OR = ctx.saved_tensors
        grad_NO = gradients[0].contiguous()
        grad_inner_NR = grad_NO @ up_OR
        grad_down_RI = grad_inner_NR.t() @ x_NI
        grad_up_OR = grad_NO.t() @ inner_NR
        if not ctx.needs_input_grad[0]:
            return None, grad_down_RI, grad_up_OR, None
        # Each matrix has its own columns of the output.
        grad_NI = None
        start = 0
        for weights, _, multiply in ctx.matrices:
            weight_OI = _join_matrices(weights)
            stop = start + len(weight_OI)
            part_NI = multiply(grad_NO[:, start:stop].contiguous(), None, weight_OI.t())
            grad_NI = part_NI if grad_NI is None else grad_NI.add_(part_NI)
            start = stop
        assert grad_NI is not None
        return grad_NI.addmm_(grad_inner_NR, down_RI), grad_down_RI, grad_up_OR, None
