"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft, which is imported only when asked."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    ModelLoadError,
    nearest_names,
)
from nip_astra.language_models.saved_weights import has_adapter
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.utils.seeding import derive_seed


class LoraParameters(SubParameters):
    """Size and place of a low-rank adapter."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update. Larger learns more and takes more memory."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: PlainText | list[PlainText] = "all-linear"
    """Names of the linear layers to adapt, a regular expression of them, or all-linear."""


@contextmanager
def adapters_drawn_from(seed: int) -> Iterator[None]:
    """A block in which adapters get their first weights from a seed, here as at a service.

    peft draws from the global generator, which is afterwards as it was before.
    """
    with torch.random.fork_rng():
        # Tinker's SDK knows seeds of 62 bits.
        torch.manual_seed(derive_seed(seed % (1 << 62), "adapter"))
        yield


def add_adapter(module: Any, parameters: LoraParameters) -> Any:
    """Wrap the model with a fresh adapter, whose weights are float32 and start as a no-op.

    Raises
    ------
    ConfigurationError
        When the model lacks a layer that is to be adapted.
    MissingDependencyError
        When peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            "a LoRA attacker was asked for, and it needs the package peft. Install it with: "
            "pip install 'nip_astra[lora]', or set lora to null to train all weights."
        ) from error
    _check_targets(module, parameters.target_modules)
    config = LoraConfig(
        r=parameters.rank,
        lora_alpha=parameters.alpha,
        target_modules=parameters.target_modules,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(module, config)


def _check_targets(module: Any, targets: str | list[str]) -> None:
    """Refuse layers that the model has not; peft leaves them out where it finds another one."""
    if targets == "all-linear":
        return
    layers = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    if isinstance(targets, str):
        unknown = [] if any(re.fullmatch(targets, name) for name in layers) else [targets]
    else:
        unknown = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in layers)]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in layers})
        near = nearest_names(unknown[0], known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"a LoRA adapter was to be put on {unknown[0]!r}, but the model has no linear layer of "
            f"that name.{hint} Its layers: {', '.join(known)}. Set lora.target_modules to a list "
            "of them, to one regular expression of whole names, or to all-linear."
        )


def adapter_state(module: Any, *, is_on: bool) -> AbstractContextManager[None]:
    """A block in which a module computes with its adapter, where it has one, or without."""
    if is_on or not has_adapter(module):
        return nullcontext()
    state: AbstractContextManager[None] = module.disable_adapter()
    return state


def merge_adapter(module: Any, folder: Path) -> Any:
    """A plain model with the adapter that peft saved in a folder added into its weights.

    Raises
    ------
    ModelLoadError
        When the adapter cannot be read, or is not of this model.
    MissingDependencyError
        When peft is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingDependencyError(
            f"the adapter in {folder} was asked for, and it needs the package peft. Install it "
            "with: pip install 'nip_astra[lora]'."
        ) from error
    try:
        return PeftModel.from_pretrained(module, str(folder)).merge_and_unload()
    except Exception as error:
        raise ModelLoadError(
            f"the adapter in {folder} was asked for, but cannot be put on its model: {error}. Give "
            "a folder that save_pretrained of a peft model wrote."
        ) from error


def merged_copy(module: Any) -> Any:
    """A plain model with the adapter added into its weights; the original stays as it is."""
    return copy.deepcopy(module).merge_and_unload()
