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
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has layers with a sliding window"
    if name == "MistralForCausalLM" and getattr(config, "sliding_window", None):
        return "it has a sliding window"
    # transformers 4 has another name for it, and none for the default.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"its rotary embedding is of the type {rope['rope_type']}"
    parts = "base_layer", "modules_to_save"
    adapted = (layer for layer in module.modules() if any(hasattr(layer, part) for part in parts))
    return next(filter(None, map(_why_unsupported_adapter, adapted)), None)


def _why_unsupported_adapter(layer: Any) -> str | None:
    """Return why an adapted layer is not `scaling * up @ down` on frozen weights."""
    if not getattr(layer, "lora_A", None):
        return "it has adapters other than LoRA on linear layers"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "its adapters have biases (lora_bias)"
    if any(getattr(layer, name, None) for name in ("lora_magnitude_vector", "lora_variant")):
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
        self.head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.num_layers = int(config.num_hidden_layers)
        self.eps = float(config.rms_norm_eps)
        self.activation: Callable[[Tensor], Tensor] = module.model.layers[0].mlp.act_fn
        self._is_silu = config.hidden_act in ("silu", "swish")
        self.scale = self.head_dim**-0.5
        self.cache_numbers_per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        self.recomputes_layers = False
        """Whether a layer's inside is forgotten, and computed again in the backward pass."""
        self._padding_id: int | None = module.model.embed_tokens.padding_idx
        self._rotary = module.model.rotary_emb
        self._cos_sin: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        # Multiplications of one pair of tokens against those of one token, over a layer.
        pair = 2 * self.num_heads * self.head_dim
        per_token = (
            config.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
            + 3 * config.hidden_size * config.intermediate_size
        )
        self.pair_cost: float = pair / per_token

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
        x = F.embedding(ids_N, weights.embedding_VX, padding_idx=self._padding_id)
        num_tokens = len(ids_N)
        if num_positions is None:
            num_positions = int(positions_N.max()) + 1 if num_tokens else 1
        tables = self.rotations(num_positions, weights.dtype, ids_N.device)
        cos, sin = (table[positions_N] for table in tables)
        read: Callable[..., Tensor] = self._read_layer
        if self.recomputes_layers and torch.is_grad_enabled():
            read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
        size = max_tokens if max_tokens and not torch.is_grad_enabled() else max(num_tokens, 1)
        for index, layer in enumerate(weights.layers):
            x = read(x, layer, partial(attend, index), cos, sin, size)
        return rms_norm(x, weights.final_norm, self.eps)

    def _read_layer(
        self,
        x: Tensor,
        layer: Layer,
        attend: Callable[..., Tensor],
        cos: Tensor,
        sin: Tensor,
        size: int,
    ) -> Tensor:
        joined = layer.qkv(rms_norm(x, layer.input_norm, self.eps))
        joined = joined.view(x.shape[0], -1, self.head_dim)
        num_placed = self.num_heads + self.num_kv_heads
        # With gradients, parts of a split take one copy, slices a tensor of zeros each.
        heads, values = torch.split(joined, [num_placed, self.num_kv_heads], dim=1)
        queries, keys = self._place(heads, layer, cos, sin)
        x = x + layer.output(attend(queries, keys, values))
        if x.shape[0] <= size:
            return self._read_mlp(x, layer)
        return torch.cat([self._read_mlp(part, layer) for part in torch.split(x, size)])

    def _read_mlp(self, x: Tensor, layer: Layer) -> Tensor:
        gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.eps))
        gated = silu_gated(gate_up) if self._is_silu else unsaved(self._gated, gate_up)
        return x + layer.down(gated)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _place(
        self, heads: Tensor, layer: Layer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries, scaled, and keys, both rotated by their positions."""
        if layer.query_norm is not None and layer.key_norm is not None:
            heads = unsaved(self._norm_heads, heads, layer.query_norm, layer.key_norm)
        first, second = heads.chunk(2, dim=-1)
        rotated = heads * cos + torch.cat((-second, first), dim=-1) * sin
        queries, keys = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=1)
        return queries * self.scale, keys

    def _norm_heads(self, heads: Tensor, query_norm: Tensor, key_norm: Tensor) -> Tensor:
        queries, keys = torch.split(heads, [self.num_heads, self.num_kv_heads], dim=1)
        queries = F.rms_norm(queries, (self.head_dim,), query_norm, self.eps)
        return torch.cat([queries, F.rms_norm(keys, (self.head_dim,), key_norm, self.eps)], dim=1)

    def rotations(
        self, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotation at each position, `[num_positions or more, 1, D]`."""
        tables = self._cos_sin.get(dtype)
        if tables is None or len(tables[0]) < num_positions:
            # To the next power of two, so that a growing conversation rarely needs another.
            positions = torch.arange(1 << (num_positions - 1).bit_length(), device=device)
            like = torch.empty(0, dtype=dtype, device=device)
            cos, sin = self._rotary(like, position_ids=positions.unsqueeze(0))
            tables = self._cos_sin[dtype] = (cos[0].unsqueeze(1), sin[0].unsqueeze(1))
        return tables


def build_decoder(module: Any) -> Decoder | None:
    """Build the forward pass of a module, or log and return None if it differs.

    It is compared with the module's own in float32 only: in bfloat16 two correct passes may differ
    as much as a wrong one.
    """
    reason = why_unsupported(module)
    decoder = None if reason else Decoder(module)
    is_exact = module.model.embed_tokens.weight.dtype == torch.float32 if decoder else False
    if decoder is not None and is_exact and not _agrees_with_module(decoder, module):
        decoder, reason = None, "its outputs differ from the module's"
    if decoder is None:
        logger.info(
            "%s uses its own forward pass, which repeats shared tokens: %s",
            type(module).__name__,
            reason,
        )
    return decoder


@torch.no_grad()
def _agrees_with_module(decoder: Decoder, module: Any) -> bool:
    """Compare the forward pass with the module's own on a few tokens."""
    vocab_size = int(module.config.vocab_size)
    ids = [7 % vocab_size, 3 % vocab_size, vocab_size // 2, vocab_size - 1, 1]
    device = module.model.embed_tokens.weight.device
    expected = module(torch.tensor([ids], device=device)).logits[0]
    trie = build_trie([ids]).to(device)
    weights = live_weights(module, torch.float32, use_adapter=True)
    attend = TrieAttention(trie, torch.float32)
    found = weights.head(decoder.hidden(weights, trie.ids_N, trie.positions_N, attend))
    # Relative to the spread of the logits; a wrong pass is off by about one.
    return bool((found - expected).abs().max() <= 1e-3 * expected.std())


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
        exact_NX, grad_NX = x_NX.float(), gradients[0].float()
        scale_N1 = exact_NX.square().mean(dim=-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed_NX = exact_NX * scale_N1
        grad_weight_X = None
        if ctx.needs_input_grad[1]:
            grad_weight_X = (grad_NX * normed_NX).flatten(0, -2).sum(dim=0).to(weight_X)
        grad_NX = grad_NX * weight_X.float()
        along_N1 = (grad_NX * normed_NX).mean(dim=-1, keepdim=True)
        grad_NX = grad_NX.sub_(normed_NX.mul_(along_N1)).mul_(scale_N1)
        return grad_NX.to(x_NX), grad_weight_X, None


class _SiluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(gradients[0] * up, gate, grad_input=grad_gate)
        return grad
