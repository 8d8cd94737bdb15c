"""One set of weights with several low-rank adapters, selected per token.

Shape suffixes: `N` token, `I` input, `O` output, `R` rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.tree_engine.weights import JOINED, LinearMap, Weights

_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


class LowRank(NamedTuple):
    """An adapter's update of a product, `up @ down`; `up` includes the scale."""

    down_RI: Tensor
    up_OR: Tensor


Product = tuple[int, str]
"""A layer's index, and a key of `JOINED`."""


Adapter = Mapping[Product, LowRank]
"""The update of each product that the adapter changes."""


@dataclass
class Routes:
    """The adapters of the next forward pass, each with its tokens."""

    active: list[tuple[Adapter, Tensor | None]] = field(default_factory=list)
    """Each adapter with the indices of its tokens; None if these are all tokens."""

    def set(self, adapters: Sequence[Adapter | None], device: torch.device) -> None:
        """Set the adapter of each token, None for the plain weights."""
        # By identity: two adapters of equal weights are still two.
        tokens_by_adapter: dict[int, list[int]] = {}
        adapter_by_id: dict[int, Adapter] = {}
        for index, adapter in enumerate(adapters):
            if adapter is not None:
                adapter_by_id[id(adapter)] = adapter
                tokens_by_adapter.setdefault(id(adapter), []).append(index)
        self.active = []
        for adapter_id, tokens in tokens_by_adapter.items():
            has_all_tokens = len(tokens) == len(adapters)
            indices = None if has_all_tokens else torch.tensor(tokens, device=device)
            self.active.append((adapter_by_id[adapter_id], indices))


class RoutedLinear:
    """A matrix product, plus the updates of adapters for their tokens."""

    def __init__(self, base: LinearMap, routes: Routes, product: Product) -> None:
        self.base = base
        self.routes = routes
        self.product = product

    def __call__(self, x_NI: Tensor) -> Tensor:
        product_NO = self.base(x_NI)
        for adapter, tokens in self.routes.active:
            low_rank = adapter.get(self.product)
            if low_rank is None:
                continue
            adapted_x = x_NI if tokens is None else x_NI[tokens]
            update = (adapted_x @ low_rank.down_RI.t()) @ low_rank.up_OR.t()
            if tokens is None:
                product_NO = product_NO + update
            else:
                product_NO = product_NO.index_add(0, tokens, update)
        return product_NO


def route_adapters(weights: Weights, routes: Routes) -> Weights:
    """Return the same weights with the adapters of `routes` at every product of their layers."""
    layers = []
    for index, layer in enumerate(weights.layers):
        maps: dict[str, Any] = {}
        for name in JOINED:
            maps[name] = RoutedLinear(getattr(layer, name), routes, (index, name))
        layers.append(replace(layer, **maps))
    return replace(weights, layers=layers)


def read_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read a peft adapter for the layers of a model of the Llama family."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "adapter_model.safetensors")
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"the adapter in {folder} cannot be read: {error}. Give a folder that save_pretrained "
            "of a peft model with LoRA wrote."
        ) from error
    unsupported = [option for option in _UNSUPPORTED if config.get(option)]
    adaptable = {path for paths in JOINED.values() for path in paths}
    # Matrices A and B of each linear layer, by the index of its layer and its path in there.
    matrices: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        # For example base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight.
        _, is_of_layer, path_in_layers = name.partition("model.layers.")
        index, _, path = path_in_layers.removesuffix(".weight").partition(".")
        linear, _, matrix = path.rpartition(".")
        if not is_of_layer or matrix not in ("lora_A", "lora_B"):
            unsupported.append(name)
        elif linear not in adaptable:
            unsupported.append(f"layers.{index}.{linear}")
        else:
            halves = matrices.setdefault((int(index), linear), {})
            halves[matrix] = tensor.to(device, torch.float32)
    if unsupported:
        raise ModelLoadError(
            f"the adapter in {folder} holds {', '.join(unsupported[:3])}, not only low-rank "
            "updates of linear layers. Merge it into its model (merge_and_unload) and serve that."
        )
    return _join_updates(matrices, scale, dtype)


def _join_updates(
    matrices: Mapping[tuple[int, str], Mapping[str, Tensor]], scale: float, dtype: torch.dtype
) -> Adapter:
    """Join the updates of layers that are one product."""
    adapter: dict[Product, LowRank] = {}
    for index in sorted({index for index, _ in matrices}):
        for product, paths in JOINED.items():
            updates = [matrices[index, path] for path in paths if (index, path) in matrices]
            if not updates:
                continue
            if len(updates) < len(paths):
                raise ModelLoadError(
                    f"the adapter changes some of {', '.join(paths)} only. Merge it into its "
                    "model (merge_and_unload) and serve that."
                )
            # The layers share their input, and each has its own output and its own rank.
            down_RI = torch.cat([update["lora_A"] for update in updates])
            scaled_ups = [update["lora_B"] * scale for update in updates]
            # torch leaves it without types.
            up_OR = torch.block_diag(*scaled_ups)  # type: ignore[no-untyped-call]
            adapter[index, product] = LowRank(down_RI.to(dtype), up_OR.to(dtype))
    return adapter
