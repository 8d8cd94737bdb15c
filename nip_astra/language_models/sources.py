"""Find and load Hugging Face models: a hub id, a folder, a GGUF file, or a file in a package."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nip_astra.errors import MissingDependencyError, ModelLoadError
from nip_astra.language_models.adapters import merge_adapter
from nip_astra.language_models.saved_weights import ADAPTER_CONFIG
from nip_astra.parameters.content import resolve_reference

logger = logging.getLogger(__name__)

MODEL_CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALLEST_BFLOAT16_MODEL = 50_000_000
"""Below this many weights nothing is gained from bfloat16."""
_READING_GGUF = threading.RLock()


def resolve_model(reference: str, scenario_dir: Path | None) -> tuple[str, str | None]:
    """The folder or hub id of a model and, for a GGUF file, the file's name."""
    source = resolve_reference(reference, scenario_dir)
    if isinstance(source, Path):
        if not source.exists():
            raise ModelLoadError(
                f"the model {reference!r} was asked for, but {source} does not exist. Give a "
                "folder with config.json and safetensors, a .gguf file, or a hub id."
            )
        if source.suffix == ".gguf":
            _require_gguf(reference)
            return str(source.parent), source.name
        if not is_model_folder(source):
            raise ModelLoadError(
                f"the model {reference!r} was asked for, but {source} holds no config.json. Give "
                "a folder that save_pretrained wrote, of a model or of an adapter."
            )
    return str(source), None


def is_model_folder(folder: Path) -> bool:
    """Say whether a folder holds a model, or an adapter of one."""
    return any((folder / name).is_file() for name in (MODEL_CONFIG, ADAPTER_CONFIG))


def _base_of_adapter(name: str) -> str | None:
    """What a folder's adapter was trained on; None for a folder or hub id of a model."""
    config = Path(name) / ADAPTER_CONFIG
    if not config.is_file() or (Path(name) / MODEL_CONFIG).is_file():
        return None
    try:
        base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise _load_error("adapter", name, error) from error
    if not isinstance(base, str) or not base:
        raise ModelLoadError(
            f"the adapter {name!r} was asked for, but its {ADAPTER_CONFIG} does not name the model "
            "that it was trained on. Write its folder or hub id there as base_model_name_or_path."
        )
    return base


@lru_cache(maxsize=8)
def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """Load a tokenizer; equal arguments share one object. An adapter has that of its model."""
    from transformers import AutoTokenizer

    name = _base_of_adapter(name) or name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **_gguf(gguf_file))
        is_empty = not tokenizer.encode("a", add_special_tokens=False)
    except Exception as error:
        raise _load_error("tokenizer", name, error) from error
    if is_empty:
        # transformers makes one without words where a folder has a model alone.
        raise ModelLoadError(
            f"the tokenizer of {name!r} was asked for, but it turns texts into nothing, as one "
            "does that was made without its files. Save it beside the model: "
            "tokenizer.save_pretrained(folder)."
        )
    return tokenizer


def load_causal_lm(name: str, gguf_file: str | None) -> Any:
    """Load a causal language model in float32 with the SDPA attention, in eval mode.

    Of an adapter's folder that is the model it was trained on, with the adapter added in.
    """
    from transformers import AutoModelForCausalLM

    base = _base_of_adapter(name)
    if base is not None:
        return merge_adapter(load_causal_lm(base, None), Path(name)).eval()
    try:
        with gguf_read_once() if gguf_file else nullcontext():
            model, info = AutoModelForCausalLM.from_pretrained(
                name,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation="sdpa",
                output_loading_info=True,
                **_gguf(gguf_file),
            )
    except Exception as error:
        raise _load_error("model", name, error) from error
    # transformers gives what is missing random weights, for instance in a folder of a classifier.
    if info["missing_keys"]:
        raise ModelLoadError(
            f"the model {name!r} was asked for, but it is no complete language model: it lacks the "
            f"weights {_some(info['missing_keys'])}. Give a folder that save_pretrained of a "
            "causal language model wrote, a .gguf file, package://name/file, or a hub id."
        )
    # A dequantised GGUF model keeps a marker that makes save_pretrained refuse.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def round_weights(module: Any, dtype: torch.dtype) -> None:
    """Hold a module's weights in a precision.

    `module.to(dtype)` would round the frequencies of rotary embeddings too, which turns tokens a
    thousand positions from the first by half a radian.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and "inv_freq" not in name:
            buffer.data = buffer.data.to(dtype)


class ModelDescription(NamedTuple):
    """What is known of a model without its weights."""

    context_window: int
    vocab_size: int
    num_parameters: int
    generation_config: Any


def describe_model(name: str) -> ModelDescription:
    """Read what a folder or hub id says of its model; no weights are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        vocab_size = int(config.vocab_size)
    except Exception as error:
        raise _load_error("model", name, error) from error
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        generation_config = module.generation_config
    return ModelDescription(
        int(getattr(config, "max_position_embeddings", 1 << 20)),
        vocab_size,
        int(module.num_parameters()),
        generation_config,
    )


def gains_from_bfloat16(module: Any, device: torch.device) -> bool:
    """Say whether a model is large enough, and the device able, to gain from bfloat16."""
    if module.num_parameters() < SMALLEST_BFLOAT16_MODEL:
        return False
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())


def computing_dtype(
    module: Any,
    asked: str,
    device: torch.device,
    *,
    trainable: bool,
) -> torch.dtype:
    """What a model computes in.

    Parameters
    ----------
    asked : str
        "auto", "fastest" or a key of `DTYPES`.
    """
    dtype = DTYPES.get(asked, torch.float32)
    if (asked == "fastest" or (asked == "auto" and trainable)) and gains_from_bfloat16(
        module, device
    ):
        dtype = torch.bfloat16
    return dtype


def _gguf(gguf_file: str | None) -> dict[str, str]:
    return {"gguf_file": gguf_file} if gguf_file else {}


def _require_gguf(reference: str) -> None:
    try:
        import gguf  # noqa: F401 - an optional package that transformers imports itself
    except ImportError as error:
        raise MissingDependencyError(
            f"the model {reference!r} is a GGUF file, and reading it needs the package gguf. "
            "Install it with: pip install 'nip_astra[gguf]'"
        ) from error


def _some(names: Iterable[str], limit: int = 4) -> str:
    found = sorted(names)
    return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" * (len(found) > limit))


def _load_error(what: str, name: str, error: Exception) -> ModelLoadError:
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return ModelLoadError(
        f"the {what} of {name!r} could not be loaded: {reason}. Give a folder that "
        "save_pretrained wrote, a .gguf file, package://name/file, or a hub id that this machine "
        "can reach."
    )


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Let transformers parse each GGUF file once, and map each model's names once.

    `from_pretrained` parses the file, with the tokens of its vocabulary, for the configuration and
    again for the weights, and works out the names of all tensors anew for every submodule; that
    took 12 of 17 seconds in which a model of 135 M weights was loaded.
    """
    import gguf

    with _READING_GGUF:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = lru_cache(maxsize=2)(reader)
        gguf.get_tensor_name_map = lru_cache(maxsize=8)(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
