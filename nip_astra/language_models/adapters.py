"""Low-rank adapters (LoRA, arXiv:2106.09685) with peft, and files of trained weights."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nip_astra.checkpoints.shards import SHARDS, load_whole
from nip_astra.errors import CheckpointError, ConfigurationError, nearest_names, reason_of
from nip_astra.lazy import import_extra
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.utils.seeding import derive_seed

ADAPTER_CONFIG = "adapter_config.json"


class LoraParameters(SubParameters):
    """Size and target layers of a low-rank adapter."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update. Larger learns more and takes more memory."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: PlainText | list[PlainText] = "all-linear"
    """Names of the linear layers to adapt, a regular expression of them, or all-linear."""


@contextmanager
def adapters_drawn_from(seed: int) -> Iterator[None]:
    """Seed the initial weights of peft adapters within the block, as a service does."""
    with torch.random.fork_rng():
        # Tinker's SDK supports seeds of up to 62 bits.
        torch.manual_seed(derive_seed(seed % (1 << 62), "adapter"))
        yield


def add_adapter(module: Any, parameters: LoraParameters) -> Any:
    """Wrap the model with a new adapter, whose float32 weights initially have no effect.

    Raises
    ------
    ConfigurationError
        If the model has no such layer, or peft cannot adapt one of them.
    """
    peft = import_extra("peft", "a LoRA adapter (lora)", "lora")
    _require_targets(module, parameters.target_modules)
    config = peft.LoraConfig(
        r=parameters.rank,
        lora_alpha=parameters.alpha,
        target_modules=parameters.target_modules,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    # Listed before the call: a failing peft leaves layers of its own in the module.
    layers = _layer_names(module)
    try:
        return peft.get_peft_model(module, config)
    except ValueError as error:
        # For instance layers of a Mamba block that a fused kernel reads past their modules.
        raise ConfigurationError(
            f"lora.target_modules: {reason_of(error)}. Give a list of some of the layers "
            f"{', '.join(layers)}."
        ) from error


def load_adapter(module: Any, folder: Path) -> Any:
    """Wrap the model with an adapter that peft wrote; the adapter is trainable."""
    peft = import_extra("peft", f"the adapter in {folder}", "lora")
    config = peft.PeftConfig.from_pretrained(str(folder))
    # Otherwise peft warns that the adapter was made for another base.
    config.base_model_name_or_path = module.name_or_path
    config.inference_mode = False
    adapted = peft.get_peft_model(module, config)
    restore_weights(adapted, folder)
    return adapted


def _require_targets(module: Any, targets: str | list[str]) -> None:
    """Raise for layers that the model lacks; peft ignores them if it finds another one."""
    if targets == "all-linear":
        return
    layers = _linear_layers(module)
    unknown: list[str] = []
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, layer) for layer in layers):
            unknown.append(targets)
    else:
        for target in targets:
            # A target names a layer by the end of its path, as in peft.
            if not any(f".{layer}".endswith(f".{target}") for layer in layers):
                unknown.append(target)
    if unknown:
        valid_names = _layer_names(module)
        near = nearest_names(unknown[0], valid_names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"lora.target_modules: the model has no linear layer {unknown[0]!r}.{hint} Its layers: "
            f"{', '.join(valid_names)}. Give a list of them, a regular expression of whole names, "
            "or all-linear."
        )


def _linear_layers(module: Any) -> list[str]:
    """Return the paths of the layers that LoRA can adapt."""
    from transformers.pytorch_utils import Conv1D

    # GPT-2 and its relatives have Conv1D, a linear layer with a transposed matrix.
    linear = torch.nn.Linear, Conv1D
    return [path for path, layer in module.named_modules() if isinstance(layer, linear)]


def _layer_names(module: Any) -> list[str]:
    """Return the distinct names of linear layers: the last part of their paths."""
    names = {path.rpartition(".")[2] for path in _linear_layers(module)}
    return sorted(names)


def adapter_state(module: Any, *, is_on: bool) -> AbstractContextManager[None]:
    """Return a context in which a module computes with its adapter, if any, or without."""
    if is_on or not has_adapter(module):
        return nullcontext()
    state: AbstractContextManager[None] = module.disable_adapter()
    return state


def merge_adapter(module: Any) -> Any:
    """Return the plain model with the adapter merged into its weights."""
    base = module.get_base_model()
    head = base.get_output_embeddings()
    embedding = base.get_input_embeddings()
    if hasattr(head, "lora_A") and head.weight is embedding.weight:
        # Tied weights: the update of the head would change the embeddings too.
        head.base_layer.weight = torch.nn.Parameter(head.weight.detach().clone())
        base.config.tie_word_embeddings = False
    return module.merge_and_unload()


def save_weights(module: Any, directory: Path) -> None:
    """Write a module's weights, or only its adapter's, in Hugging Face layout."""
    if has_adapter(module):
        # peft would look for the base model's config, to see whether embeddings changed.
        module.save_pretrained(directory, save_embedding_layers=False)
    else:
        # transformers would rename and split weights (of GPT-NeoX, of experts) as in older
        # versions.
        module.save_pretrained(directory, save_original_format=False)


def learned_weights(module: Any) -> dict[str, Tensor]:
    """Return the trained weights by their names in a file; this process's shards if sharded."""
    named_weights = {path: weight.detach() for path, weight in module.named_parameters()}
    if not has_adapter(module):
        return named_weights
    from peft import get_peft_model_state_dict

    adapter_weights: dict[str, Tensor] = get_peft_model_state_dict(
        module, state_dict=named_weights, save_embedding_layers=False
    )
    return adapter_weights


def save_adapter_config(module: Any, directory: Path) -> None:
    """Write the configuration of an adapter."""
    config = copy.copy(module.peft_config[module.active_adapter])
    config.inference_mode = True
    config.save_pretrained(str(directory))


def restore_weights(module: Any, directory: Path) -> None:
    """Restore the weights written by `save_weights`."""
    is_adapter = has_adapter(module)
    try:
        state = saved_weights(directory, is_adapter=is_adapter)
        if is_adapter:
            from peft import set_peft_model_state_dict

            problems = set_peft_model_state_dict(module, state)
            # The base's weights are missing in every adapter's file.
            missing = [key for key in problems.missing_keys if "lora_" in key]
        else:
            problems = module.load_state_dict(state, strict=False)
            # A file has tied weights once, under one of their names.
            tied_keys = set(getattr(module, "all_tied_weights_keys", {}) or {})
            missing = [key for key in problems.missing_keys if key not in tied_keys]
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {directory} do not fit: {error}") from error
    mismatched = [*problems.unexpected_keys, *missing]
    if mismatched:
        raise CheckpointError(
            f"the weights in {directory} are of another model: {', '.join(mismatched[:3])}. "
            "Resume with the parameters that wrote them."
        )


def saved_weights(directory: Path, *, is_adapter: bool = False) -> dict[str, Tensor]:
    """Read all weights of a folder by name, sharded or not."""
    if (directory / SHARDS).is_dir():
        return load_whole(directory / SHARDS)
    file_name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    path = directory / file_name
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {path} cannot be read: {error}. Resume from another checkpoint."
        ) from error
    return weights


def has_adapter(module: Any) -> bool:
    """Return whether a module has a LoRA adapter."""
    # Not `peft_config`: peft 0.18 leaves it on a module into which it has merged its adapter.
    return hasattr(module, "get_base_model")


def write_joined(folder: Path, output: Path) -> None:
    """Copy a checkpoint's model folder, with its shards joined."""
    # Read before anything is written, so that a broken checkpoint leaves no folder.
    weights = load_whole(folder / SHARDS) if (folder / SHARDS).is_dir() else None
    output.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy2(path, output / path.name)
    if weights is not None:
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        pattern = "adapter_model{suffix}.safetensors" if is_adapter else None
        save_torch_state_dict(weights, output, filename_pattern=pattern)
