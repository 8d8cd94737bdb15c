"""A forward pass over loose tokens for models of the Llama family.

The modules of transformers take rectangular batches. A tree of conversations is not rectangular, so
this one takes a flat list of tokens, each with its position, and leaves to an attention function
which token sees which. It reads the weights of the module and is checked against it when it is
built.

Shape suffixes: `N` token, `X` hidden unit, `H` query head, `K` key-value head, `D` head dimension,
`V` vocabulary, `S` scored position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nip_astra.language_models.attention import TrieAttention
from nip_astra.language_models.kernels import (
    LinearMap,
    OneDnnLinear,
    dense_linear,
    has_onednn,
    is_packing_faster,
    packed_linear,
)
from nip_astra.language_models.token_trie import build_trie

logger = logging.getLogger(__name__)

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that are this forward pass: RMS norm, rotary positions, gated MLP."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the sequence."""

SMALLEST_UNSAVED = 1 << 18
"""Elementwise functions of fewer numbers keep what they need for the backward pass."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, queries_NHD, keys_NKD, values_NKD) -> [N, H * D]`; the queries are scaled."""


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


def why_unsupported(module: Any) -> str | None:
    """Say why a module's forward pass is not this one, or None where it is."""
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
    return None


class Decoder:
    """The forward pass of one module.

    Parameters
    ----------
    module : PreTrainedModel
        The causal language model itself, not wrapped by peft, though its linear layers may be.
    """

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
        self.scale = self.head_dim**-0.5
        self.cache_numbers_per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        self._padding_id: int | None = module.model.embed_tokens.padding_idx
        self._rotary = module.model.rotary_emb
        self._cos_sin: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        # Multiplications of one pair of tokens against those of one token, over a layer.
        pair = 2 * self.num_heads * self.head_dim
        per_token = (
            config.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
            + 3 * config.hidden_size * config.intermediate_size
        )
        self.pair_cost = pair / per_token

    def hidden(
        self, weights: Weights, ids_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """Give the normalised last hidden state of every token, `[N, X]` in the weights' dtype."""
        # As in the module, the padding token's own row gets no gradient from being read.
        x = F.embedding(ids_N, weights.embedding_VX, padding_idx=self._padding_id)
        cos, sin = self._rotation(positions_N, weights.dtype)
        num_tokens = len(ids_N)
        for index, layer in enumerate(weights.layers):
            joined = layer.qkv(_unsaved(self._norm, x, layer.input_norm))
            queries, keys = _unsaved(self._place, joined, layer, cos, sin)
            values = joined.view(num_tokens, -1, self.head_dim)[:, -self.num_kv_heads :]
            x = x + layer.output(attend(index, queries, keys, values))
            gate_up = layer.gate_up(_unsaved(self._norm, x, layer.mlp_norm))
            x = x + layer.down(_unsaved(self._gated, gate_up))
        return self._norm(x, weights.final_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate) * up

    def _place(
        self, joined: Tensor, layer: Layer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give queries, scaled, and keys, both rotated by their positions."""
        num_rotated = self.num_heads + self.num_kv_heads
        heads = joined.view(len(joined), -1, self.head_dim)[:, :num_rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            heads = self._norm_heads(heads, layer.query_norm, layer.key_norm)
        first, second = heads.chunk(2, dim=-1)
        rotated = heads * cos + torch.cat((-second, first), dim=-1) * sin
        queries, keys = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=1)
        return queries * self.scale, keys

    def _norm_heads(self, heads: Tensor, query_norm: Tensor, key_norm: Tensor) -> Tensor:
        queries, keys = torch.split(heads, [self.num_heads, self.num_kv_heads], dim=1)
        shape = (self.head_dim,)
        return torch.cat(
            [
                F.rms_norm(queries, shape, query_norm, self.eps),
                F.rms_norm(keys, shape, key_norm, self.eps),
            ],
            dim=1,
        )

    def _rotation(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give cos and sin of each token's rotation, `[N, 1, D]` each."""
        longest = int(positions_N.max()) + 1 if len(positions_N) else 1
        tables = self._cos_sin.get(dtype)
        if tables is None or len(tables[0]) < longest:
            # To the next power of two, so that a growing conversation seldom needs another.
            positions = torch.arange(1 << (longest - 1).bit_length(), device=positions_N.device)
            like = torch.empty(0, dtype=dtype, device=positions_N.device)
            cos, sin = self._rotary(like, position_ids=positions.unsqueeze(0))
            tables = self._cos_sin[dtype] = (cos[0].unsqueeze(1), sin[0].unsqueeze(1))
        return tables[0][positions_N], tables[1][positions_N]


def _unsaved(function: Callable[..., Any], *inputs: Any) -> Any:
    """Compute without keeping what is inside for the backward pass, which computes it again.

    For elementwise functions: they cost little time, and what they would keep is most of the
    memory of an update.
    """
    if not torch.is_grad_enabled() or inputs[0].numel() < SMALLEST_UNSAVED:
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def frozen_weights(
    module: Any, dtype: torch.dtype, *, use_adapter: bool, release: bool = False
) -> Weights:
    """Give a snapshot for sampling: adapters merged, matrices that are used together joined.

    On a CPU the matrices are copied into oneDNN's layout where that is faster; elsewhere they are
    joined copies in `dtype`.

    Parameters
    ----------
    release : bool
        Free the module's own matrices one by one; it cannot compute afterwards.
    """

    def joined(*linears: Any) -> LinearMap:
        with torch.no_grad():
            matrix = torch.cat([_merged(linear, use_adapter) for linear in linears]).to(dtype)
            biases = [_base(linear).bias for linear in linears]
            # A model has biases in all of these or in none.
            bias = None if biases[0] is None else torch.cat(biases).to(dtype)
        for linear in linears if release else ():
            linear.weight = torch.nn.Parameter(
                torch.empty(linear.weight.shape, device="meta"), requires_grad=False
            )
        if has_onednn(matrix.device) and is_packing_faster(matrix.shape, dtype):
            return packed_linear(matrix, bias)
        return dense_linear(matrix, bias)

    return _weights(module, dtype, joined)


def live_weights(module: Any, dtype: torch.dtype, *, use_adapter: bool) -> Weights:
    """Give the weights as they are, with gradients, computing in `dtype`; nothing is copied."""

    def joined(*linears: Any) -> LinearMap:
        maps = [_live_linear(linear, dtype, use_adapter) for linear in linears]
        if len(maps) == 1:
            return maps[0]
        return lambda x: torch.cat([linear(x) for linear in maps], dim=-1)

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
    """Give the plain linear layer under an adapter."""
    return getattr(linear, "base_layer", linear)


def _adapters(linear: Any) -> Iterable[str]:
    return linear.active_adapters if hasattr(linear, "base_layer") else ()


def _merged(linear: Any, use_adapter: bool) -> Tensor:
    weight: Tensor = _base(linear).weight.detach()
    for name in _adapters(linear) if use_adapter else ():
        weight = weight + linear.get_delta_weight(name)
    return weight


def _live_linear(linear: Any, dtype: torch.dtype, use_adapter: bool) -> LinearMap:
    base = _base(linear)
    weight = base.weight.to(dtype)
    bias = None if base.bias is None else base.bias.to(dtype)
    multiply = _gradient_kernel(weight)
    deltas = [
        (linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])
        for name in (_adapters(linear) if use_adapter else ())
    ]

    def apply(x: Tensor) -> Tensor:
        found = multiply(x, weight, bias)
        for down, up, scaling in deltas:
            found = found + F.linear(F.linear(x, down.to(dtype)), up.to(dtype)) * scaling
        return found

    return apply


def _gradient_kernel(weight: Tensor) -> Callable[..., Tensor]:
    """Give torch's product, or oneDNN's where torch would use a slower library."""
    if (
        weight.dtype == torch.float32
        and has_onednn(weight.device)
        and is_packing_faster(weight.shape, weight.dtype)
    ):
        return OneDnnLinear.apply
    return F.linear


def build_decoder(module: Any) -> Decoder | None:
    """Give the forward pass of a module, or None, with a line in the log, where it is another.

    It is compared with the module's own where the weights are float32; in bfloat16 two right passes
    may differ by as much as a wrong one.
    """
    reason = why_unsupported(module)
    decoder = None if reason else Decoder(module)
    is_exact = module.model.embed_tokens.weight.dtype == torch.float32 if decoder else False
    if decoder is not None and is_exact and not _agrees_with_module(decoder, module):
        decoder, reason = None, "its outputs differ from the module's"
    if decoder is None:
        logger.info(
            "%s goes through its own forward pass, which reads shared tokens again: %s",
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
