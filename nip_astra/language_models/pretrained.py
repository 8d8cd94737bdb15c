"""Load what a training left: a whole model, an adapter over another, with or without tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nip_astra.errors import CheckpointError, MissingDependencyError, ModelLoadError
from nip_astra.language_models.saved_weights import ADAPTER_CONFIG, restore_weights
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.parameters.content import resolve_reference

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)


def load_model(reference: str, base: str | None, scenario_dir: Path | None) -> Any:
    """Load a causal language model in float32; an adapter is added into its base's weights.

    Parameters
    ----------
    reference : str
        Hub id, `.gguf` file, or folder that `save_pretrained` of a model or an adapter wrote.
    base : str, optional
        The model under an adapter; the one that the adapter names where it is left out.
    """
    folder = adapter_folder(reference, scenario_dir)
    if folder is None:
        return load_causal_lm(*resolve_model(reference, scenario_dir))
    name, gguf_file = resolve_model(base or base_of(folder), scenario_dir)
    return _with_adapter(load_causal_lm(name, gguf_file), folder)


def find_tokenizer(reference: str, base: str | None, scenario_dir: Path | None) -> Any:
    """Load the tokenizer of a model, or that of its base where a folder holds none."""
    source = resolve_reference(reference, scenario_dir)
    folder = adapter_folder(reference, scenario_dir)
    if not isinstance(source, Path) or not source.is_dir():
        return load_tokenizer(*resolve_model(reference, scenario_dir))
    if has_tokenizer(source):
        return load_tokenizer(str(source))
    base = base or (base_of(folder) if folder is not None else None)
    if base is None:
        raise ModelLoadError(
            f"the tokenizer of {reference!r} was asked for, but {source} holds none. Save it "
            "beside the model, tokenizer.save_pretrained(folder), or name the model that it comes "
            "from as base_model, in nip_astra.astra attacker_base_model_id."
        )
    return load_tokenizer(*resolve_model(base, scenario_dir))


def has_tokenizer(folder: Path) -> bool:
    """Say whether a folder holds a tokenizer; transformers makes an empty one where it does not."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def adapter_folder(reference: str, scenario_dir: Path | None) -> Path | None:
    """The folder where a reference is one of an adapter without its base."""
    source = resolve_reference(reference, scenario_dir)
    is_adapter = isinstance(source, Path) and (source / ADAPTER_CONFIG).exists()
    if not isinstance(source, Path) or not is_adapter or (source / "config.json").exists():
        return None
    return source


def base_of(folder: Path) -> str:
    """The model that an adapter was trained on, as the adapter says."""
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelLoadError(
            f"the adapter in {folder} was to be put on its base model, but its {ADAPTER_CONFIG} "
            "names none. Name it as base_model, in nip_astra.astra attacker_base_model_id."
        )
    return base


def _with_adapter(module: Any, folder: Path) -> Any:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} holds an adapter, and reading it needs the package peft. Install it with: "
            "pip install 'nip_astra[lora]'."
        ) from error
    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.base_model_name_or_path = module.name_or_path  # it is the one that was asked for
        adapted = get_peft_model(module, config)
        restore_weights(adapted, folder)
        # peft freezes what it wraps, and a merged model is one like any other.
        return adapted.merge_and_unload().requires_grad_(True).eval()
    except (CheckpointError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the adapter in {folder} could not be added into {type(module).__name__}: {error}. "
            "Give the model that it was trained on as base_model, and a LoRA adapter that peft "
            "wrote as adapter_model.safetensors."
        ) from error
