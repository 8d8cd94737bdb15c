"""A forward pass over flat lists of tokens for models of the Llama family.

It takes tokens with their positions, since a tree of conversations is not a rectangular batch, and
an attention function that decides which token sees which. It is compared with the transformers
module when it is built.

Shape suffixes: `N` token, `X` hidden unit, `H` query head, `K` key-value head, `D` head dimension,
`V` vocabulary, `S` scored position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.language_models.tree_engine.attention import TrieAttention
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import Layer, Weights, live_weights

logger = logging.getLogger(__name__)

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Supported architectures: RMS norm, rotary positions, gated MLP."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the sequence length."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, queries_NHD, keys_NKD, values_NKD) -> [N, H * D]`; the queries are scaled."""


def why_unsupported(module: Any) -> str | None:
    """Return why a module's forward pass differs from this one; None if it does not."""
    name = type(module).__name__
    config = module.config
    if name not in FAMILY:
        return f"{name} is not of the Llama family"
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layer_types:
        return "it has layers with a sliding window"
    if name == "MistralForCausalLM" and getattr(config, "sliding_window", None):
        return "it has a sliding window"
    # transformers 4 has another name for it, and none for the default.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"its rotary embedding is of the type {rope['rope_type']}"
    for layer in module.modules():
        # peft keeps the layer that it wraps under one of these names.
        if hasattr(layer, "base_layer") or hasattr(layer, "modules_to_save"):
            reason = _why_unsupported_adapter(layer)
            if reason is not None:
                return reason
    return None


def _why_unsupported_adapter(layer: Any) -> str | None:
    """Return why an adapted layer is not `scaling * up @ down` on frozen weights."""
    if not getattr(layer, "lora_A", None):
        return "it has adapters other than LoRA on linear layers"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "its adapters have biases (lora_bias)"
    if getattr(layer, "lora_magnitude_vector", None) or getattr(layer, "lora_variant", None):
        return "its adapters have a magnitude vector (DoRA) or another part of their own"
    if any(parameter.requires_grad for parameter in layer.base_layer.parameters()):
        return "it learns weights under its adapters"
    return None


class Decoder:
    """Forward pass of a causal language model; only its linear layers may be wrapped by peft."""

    def __init__(self, module: Any) -> None:
        config = module.config
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        default_head_dim = config.hidden_size // config.num_attention_heads
        self.head_dim = int(getattr(config, "head_dim", None) or default_head_dim)
        self.num_layers = int(config.num_hidden_layers)
        self.eps = float(config.rms_norm_eps)
        self.activation: Callable[[Tensor], Tensor] = module.model.layers[0].mlp.act_fn
        self._is_silu = config.hidden_act in ("silu", "swish")
        self.scale = self.head_dim**-0.5
        # Keys and values of all layers.
        self.cache_numbers_per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        self.recomputes_layers = False
        """Whether a layer's inside is forgotten, and computed again in the backward pass."""
        self._padding_id: int | None = module.model.embed_tokens.padding_idx
        self._rotary = module.model.rotary_emb
        self._cos_sin: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        # Multiplications of one pair of tokens against those of one token, over a layer.
        per_pair = 2 * self.num_heads * self.head_dim
        # Projections of queries and of the output, then of keys and values.
        head_products = 2 * self.num_heads + 2 * self.num_kv_heads
        attention_products = config.hidden_size * self.head_dim * head_products
        # Gate, up and down.
        mlp_products = 3 * config.hidden_size * config.intermediate_size
        self.pair_cost: float = per_pair / (attention_products + mlp_products)

    def hidden(
        self,
        weights: Weights,
        ids_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        *,
        num_positions: int | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """Return the normalised last hidden state of every token, `[N, X]` in the weights' dtype.

        Without gradients at most `max_tokens` are in an MLP at a time, which takes the most memory.
        """
        # As in the module, the padding token's own row gets no gradient from being read.
        x_NX = F.embedding(ids_N, weights.embedding_VX, padding_idx=self._padding_id)
        num_tokens = len(ids_N)
        if num_positions is None:
            num_positions = int(positions_N.max()) + 1 if num_tokens else 1
        cos_table, sin_table = self.rotations(num_positions, weights.dtype, ids_N.device)
        cos_N, sin_N = cos_table[positions_N], sin_table[positions_N]
        forward_layer: Callable[..., Tensor] = self._forward_layer
        if self.recomputes_layers and torch.is_grad_enabled():
            forward_layer = partial(
                checkpoint, forward_layer, use_reentrant=False, preserve_rng_state=False
            )
        mlp_tokens = max(num_tokens, 1)
        if max_tokens and not torch.is_grad_enabled():
            mlp_tokens = max_tokens
        for index, layer in enumerate(weights.layers):
            x_NX = forward_layer(x_NX, layer, partial(attend, index), cos_N, sin_N, mlp_tokens)
        return rms_norm(x_NX, weights.final_norm, self.eps)

    def _forward_layer(
        self,
        x_NX: Tensor,
        layer: Layer,
        attend: Callable[..., Tensor],
        cos_N: Tensor,
        sin_N: Tensor,
        mlp_tokens: int,
    ) -> Tensor:
        qkv = layer.qkv(rms_norm(x_NX, layer.input_norm, self.eps))
        qkv_NHD = qkv.view(x_NX.shape[0], -1, self.head_dim)
        # Queries and keys are rotated together; values have no position.
        num_rotated = self.num_heads + self.num_kv_heads
        # With gradients, parts of a split take one copy, slices a tensor of zeros each.
        heads_NHD, values_NKD = torch.split(qkv_NHD, [num_rotated, self.num_kv_heads], dim=1)
        queries_NHD, keys_NKD = self._rotate(heads_NHD, layer, cos_N, sin_N)
        attended_NX = attend(queries_NHD, keys_NKD, values_NKD)
        x_NX = x_NX + layer.output(attended_NX)
        if x_NX.shape[0] <= mlp_tokens:
            return self._forward_mlp(x_NX, layer)
        chunks = torch.split(x_NX, mlp_tokens)
        return torch.cat([self._forward_mlp(chunk, layer) for chunk in chunks])

    def _forward_mlp(self, x_NX: Tensor, layer: Layer) -> Tensor:
        gate_up = layer.gate_up(rms_norm(x_NX, layer.mlp_norm, self.eps))
        gated = silu_gated(gate_up) if self._is_silu else unsaved(self._gate, gate_up)
        return x_NX + layer.down(gated)

    def _gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _rotate(
        self, heads_NHD: Tensor, layer: Layer, cos_N: Tensor, sin_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries, scaled, and keys, both rotated by their positions."""
        if layer.query_norm is not None and layer.key_norm is not None:
            heads_NHD = unsaved(self._norm_heads, heads_NHD, layer.query_norm, layer.key_norm)
        # As in transformers, a pair is a unit of the first half and one of the second half.
        first, second = heads_NHD.chunk(2, dim=-1)
        orthogonal_NHD = torch.cat((-second, first), dim=-1)
        rotated_NHD = heads_NHD * cos_N + orthogonal_NHD * sin_N
        queries, keys = torch.split(rotated_NHD, [self.num_heads, self.num_kv_heads], dim=1)
        return queries * self.scale, keys

    def _norm_heads(self, heads_NHD: Tensor, query_norm: Tensor, key_norm: Tensor) -> Tensor:
        queries, keys = torch.split(heads_NHD, [self.num_heads, self.num_kv_heads], dim=1)
        queries = F.rms_norm(queries, (self.head_dim,), query_norm, self.eps)
        keys = F.rms_norm(keys, (self.head_dim,), key_norm, self.eps)
        return torch.cat([queries, keys], dim=1)

    def rotations(
        self, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotation at each position, `[num_positions or more, 1, D]`."""
        tables = self._cos_sin.get(dtype)
        if tables is None or len(tables[0]) < num_positions:
            # To the next power of two, so that a growing conversation rarely needs another.
            table_size = 1 << (num_positions - 1).bit_length()
            positions = torch.arange(table_size, device=device)
            # The module takes only type and device from its first argument.
            like = torch.empty(0, dtype=dtype, device=device)
            cos, sin = self._rotary(like, position_ids=positions.unsqueeze(0))
            tables = (cos[0].unsqueeze(1), sin[0].unsqueeze(1))
            self._cos_sin[dtype] = tables
        return tables


def build_decoder(module: Any) -> Decoder | None:
    """Build the forward pass of a module, or log and return None if it differs.

    It is compared with the module's own in float32 only: in bfloat16 two correct passes may differ
    as much as a wrong one.
    """
    reason = why_unsupported(module)
    if reason is None:
        decoder = Decoder(module)
        is_float32 = module.model.embed_tokens.weight.dtype == torch.float32
        if not is_float32 or _agrees_with_module(decoder, module):
            return decoder
        reason = "its outputs differ from the module's"
    logger.info(
        "%s uses its own forward pass, which repeats shared tokens: %s",
        type(module).__name__,
        reason,
    )
    return None


@torch.no_grad()
def _agrees_with_module(decoder: Decoder, module: Any) -> bool:
    """Compare the forward pass with the module's own on a few tokens."""
    vocab_size = int(module.config.vocab_size)
    ids = [7 % vocab_size, 3 % vocab_size, vocab_size // 2, vocab_size - 1, 1]
    device = module.model.embed_tokens.weight.device
    expected_NV = module(torch.tensor([ids], device=device)).logits[0]
    trie = build_trie([ids]).to(device)
    weights = live_weights(module, torch.float32, use_adapter=True)
    attend = TrieAttention(trie, torch.float32)
    hidden_NX = decoder.hidden(weights, trie.ids_N, trie.positions_N, attend)
    max_difference = (weights.head(hidden_NX) - expected_NV).abs().max()
    # Relative to the spread of the logits; a wrong pass is off by about one.
    return bool(max_difference <= 1e-3 * expected_NV.std())


SMALLEST_UNSAVED = 1 << 18
"""Input size up to which functions keep their intermediate values for the backward pass."""


def is_unsaved(x: Tensor) -> bool:
    """Return whether the backward pass recomputes intermediate values of a function of `x`."""
    return torch.is_grad_enabled() and x.numel() >= SMALLEST_UNSAVED


def unsaved(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function; intermediate values are not kept for large inputs."""
    if not is_unsaved(inputs[0]):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def rms_norm(x_NX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last axis, and multiply by weights."""
    if x_NX.device.type != "cpu" or not is_unsaved(x_NX):
        # F.rms_norm calls this after checks that cost a small model as much again. On a GPU it is
        # one kernel each way, and keeps nothing but its input.
        return torch.rms_norm(x_NX, weight_X.shape, weight_X, eps)
    normed: Tensor = _RmsNorm.apply(x_NX, weight_X, eps)  # type: ignore[no-untyped-call]
    return normed


def silu_gated(gate_up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` of `[N, 2 * Y]`, whose first half is the gate."""
    if not is_unsaved(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    gated: Tensor = _SiluGated.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


class _RmsNorm(torch.autograd.Function):
    """With `n = x / rms(x)`, the gradient is `(h - n * mean(h * n)) / rms(x)`, `h` that of `n`."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_NX, weight_X)
        ctx.eps = eps
        return F.rms_norm(x_NX, weight_X.shape, weight_X, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NX, weight_X = ctx.saved_tensors
        # In float32, as the forward kernel computes.
        x_float_NX = x_NX.float()
        grad_output_NX = gradients[0].float()
        inverse_rms_N1 = x_float_NX.square().mean(dim=-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed_NX = x_float_NX * inverse_rms_N1
        grad_weight_X = None
        if ctx.needs_input_grad[1]:
            grad_weight_X = (grad_output_NX * normed_NX).flatten(0, -2).sum(dim=0).to(weight_X)
        grad_normed_NX = grad_output_NX * weight_X.float()
        # The part along the normalised vector, whose length cannot change.
        along_N1 = (grad_normed_NX * normed_NX).mean(dim=-1, keepdim=True)
        grad_NX = grad_normed_NX.sub_(normed_NX.mul_(along_N1)).mul_(inverse_rms_N1)
        return grad_NX.to(x_NX), grad_weight_X, None


class _SiluGated(torch.autograd.Function):
    """`silu(gate) * up`, which keeps only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_output = gradients[0]
        gate, up = gate_up.chunk(2, dim=-1)
        # Both halves are written into one tensor, since joining them would copy it.
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_output, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grad_output * up, gate, grad_input=grad_gate)
        return grad_gate_up
