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
from torch import Tensor

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.tree_engine.weights import JOINED, LinearMap, Weights

_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")


class LowRank(NamedTuple):
    """An adapter's update of a product, `up @ down`; `up` includes the scale."""

    down_RI: Tensor
    up_OR: Tensor


Adapter = Mapping[tuple[int, str], LowRank]
"""Update of each of `JOINED` in each layer."""


@dataclass
class Routes:
    """The adapters of the next forward pass, each with its tokens."""

    current: list[tuple[Adapter, Tensor | None]] = field(default_factory=list)

    def set(self, adapters: Sequence[Adapter | None], device: torch.device) -> None:
        """Set the adapter of each token, None for the plain weights."""
        found: dict[int, tuple[Adapter, list[int]]] = {}
        for index, adapter in enumerate(adapters):
            if adapter is not None:
                found.setdefault(id(adapter), (adapter, []))[1].append(index)
        self.current = [
            (adapter, None if len(rows) == len(adapters) else torch.tensor(rows, device=device))
            for adapter, rows in found.values()
        ]


class RoutedLinear:
    """A matrix product, plus the updates of adapters for their tokens."""

    def __init__(self, base: LinearMap, routes: Routes, place: tuple[int, str]) -> None:
        self.base, self.routes, self.place = base, routes, place

    def __call__(self, x_NI: Tensor) -> Tensor:
        product_NO = self.base(x_NI)
        for adapter, rows in self.routes.current:
            low_rank = adapter.get(self.place)
            if low_rank is None:
                continue
            own = x_NI if rows is None else x_NI[rows]
            added = (own @ low_rank.down_RI.t()) @ low_rank.up_OR.t()
            if rows is None:
                product_NO = product_NO + added
            else:
                product_NO = product_NO.index_add(0, rows, added)
        return product_NO


def routed(weights: Weights, routes: Routes) -> Weights:
    """Return the same weights with the adapters of `routes` at every product of their layers."""
    layers = []
    for index, layer in enumerate(weights.layers):
        maps: dict[str, Any] = {
            name: RoutedLinear(getattr(layer, name), routes, (index, name)) for name in JOINED
        }
        layers.append(replace(layer, **maps))
    return replace(weights, layers=layers)


def read_adapter(folder: Path, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read a peft adapter for the layers of a model of the Llama family."""
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "adapter_model.safetensors")
        scale = float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"the adapter in {folder} cannot be read: {error}. Give a folder that save_pretrained "
            "of a peft model with LoRA wrote."
        ) from error
    strange = [name for name in _UNSUPPORTED if config.get(name)]
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        _, found, path = name.partition("model.layers.")
        index, _, rest = path.partition(".")
        layer, _, half = rest.removesuffix(".weight").rpartition(".")
        if not found or half not in ("lora_A", "lora_B"):
            strange.append(name)
            continue
        halves.setdefault((int(index), layer), {})[half] = tensor.to(device, torch.float32)
    places = {(index, layer) for index, layer in halves}
    known = {layer for layers in JOINED.values() for layer in layers}
    strange += [f"layers.{index}.{layer}" for index, layer in places if layer not in known]
    if strange:
        raise ModelLoadError(
            f"the adapter in {folder} holds {', '.join(strange[:3])}, not only low-rank updates of "
            "linear layers. Merge it into its model (merge_and_unload) and serve that."
        )
    return _joined(halves, scale, dtype)


def _joined(
    halves: Mapping[tuple[int, str], Mapping[str, Tensor]], scale: float, dtype: torch.dtype
) -> Adapter:
    """Join the updates of layers that are one product."""
    found: dict[tuple[int, str], LowRank] = {}
    for index in sorted({index for index, _ in halves}):
        for name, layers in JOINED.items():
            parts = [halves.get((index, layer)) for layer in layers]
            present = [part for part in parts if part is not None]
            if not present:
                continue
            if len(present) < len(parts):
                raise ModelLoadError(
                    f"the adapter changes some of {', '.join(layers)} only. Merge it into its "
                    "model (merge_and_unload) and serve that."
                )
            down_RI = torch.cat([part["lora_A"] for part in present])
            # torch leaves it without types.
            up_OR = torch.block_diag(*(part["lora_B"] * scale for part in present))  # type: ignore[no-untyped-call]
            found[index, name] = LowRank(down_RI.to(dtype), up_OR.to(dtype))
    return found
