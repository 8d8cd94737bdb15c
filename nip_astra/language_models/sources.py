"""Loading of Hugging Face models: a hub id, a folder, a GGUF file, or a file in a package."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from nip_astra.errors import CheckpointError, ModelLoadError, reason_of
from nip_astra.language_models.adapters import ADAPTER_CONFIG, load_adapter, merge_adapter
from nip_astra.lazy import import_extra
from nip_astra.parameters.content import resolve_reference
from nip_astra.progress import quiet_libraries

logger = logging.getLogger(__name__)

MODEL_CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALLEST_BFLOAT16_MODEL = 50_000_000
"""Size, in weights, from which bfloat16 is faster."""
SLOWER_BFLOAT16 = {"AVX512": 1.3, "AVX2": 4.0}
"""Time of a product in bfloat16 over float32 by the processor's instructions, where it has none for
bfloat16: medians of 64 and 512 rows by 576 x 1536 weights on one core."""
ADVICE = (
    "Give a folder that save_pretrained wrote, a .gguf file, package://name/file, or a hub id "
    "that this machine can reach."
)
SECONDS_TO_REACH_HUB = 5.0
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_READING_GGUF = threading.RLock()


def resolve_model(reference: str, scenario_dir: Path | None) -> tuple[str, str | None]:
    """Return the folder or hub id of a model and, for a GGUF file, the file's name."""
    source = resolve_reference(reference, scenario_dir)
    if isinstance(source, Path):
        if not source.exists():
            raise ModelLoadError(
                f"the model {reference!r} is missing: {source} does not exist. {ADVICE}"
            )
        if source.suffix == ".gguf":
            import_extra("gguf", f"the GGUF file {reference!r}", "gguf")
            return str(source.parent), source.name
        if not is_model_folder(source):
            raise ModelLoadError(f"{source} holds no model: it has no config.json. {ADVICE}")
        return str(source), None
    _require_hub(source)
    return source, None


def _require_hub(name: str) -> None:
    """Raise at once for an invalid hub id, and if the hub is unreachable and the model not cached.

    huggingface_hub tries each file six times, which takes a minute.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # lazy export

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelLoadError(
            f"the model {name!r} is neither a folder nor a name on the hub. {ADVICE}"
        ) from error
    if constants.is_offline_mode() or getproxies():
        # A proxy may reach the hub where a connection of our own does not.
        return
    problem = _hub_problem(constants.ENDPOINT)
    if not problem:
        return
    cached_files = [
        try_to_load_from_cache(name, file_name) for file_name in (MODEL_CONFIG, ADAPTER_CONFIG)
    ]
    # The path of a file, None if unknown, or a mark for a file that the hub lacks.
    if not any(isinstance(cached_file, str) for cached_file in cached_files):
        raise ModelLoadError(
            f"the model {name!r} is not in the cache, and {constants.ENDPOINT} cannot be reached: "
            f"{problem}. {ADVICE}"
        )
    logger.warning("%s cannot be reached (%s); using cached models", constants.ENDPOINT, problem)
    constants.HF_HUB_OFFLINE = True


@lru_cache(maxsize=1)
def _hub_problem(address: str) -> str:
    """Return why the hub cannot be reached; empty if it can."""
    url = urlsplit(address)
    default_port = 80 if url.scheme == "http" else 443
    host_and_port = (url.hostname or "", url.port or default_port)
    try:
        socket.create_connection(host_and_port, SECONDS_TO_REACH_HUB).close()
    except OSError as error:
        return reason_of(error)
    return ""


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder holds a model, or an adapter of one."""
    return any((folder / name).is_file() for name in (MODEL_CONFIG, ADAPTER_CONFIG))


def _is_adapter(name: str) -> bool:
    """Return whether a folder holds an adapter without its base."""
    folder = Path(name)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / MODEL_CONFIG).is_file()


def _read_base_name(folder: str) -> str:
    """Return the base model in an adapter's configuration."""
    try:
        config = json.loads((Path(folder) / ADAPTER_CONFIG).read_text())
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelLoadError(
            f"the {ADAPTER_CONFIG} of {folder} names no base model. Set base_model, or "
            "attacker_base_model_id in nip_astra.astra."
        )
    return base


@lru_cache(maxsize=8)
def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """Load a tokenizer, cached by its arguments; an adapter has its base's tokenizer."""
    from transformers import AutoTokenizer

    name = _read_base_name(name) if _is_adapter(name) else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **_gguf(gguf_file))
        is_empty = not tokenizer.encode("a", add_special_tokens=False)
    except Exception as error:
        raise _load_error("tokenizer", name, error) from error
    if is_empty:
        # transformers creates an empty one if a folder has only a model.
        raise ModelLoadError(
            f"the tokenizer of {name!r} turns texts into nothing: its files are missing. Save it "
            "beside the model: tokenizer.save_pretrained(folder)."
        )
    return tokenizer


def decode_all(tokenizer: Any, rows: Sequence[list[int]]) -> list[str]:
    """Return the texts of token rows, without special tokens."""
    if not rows:
        # transformers 5.0 decodes an empty batch to one empty text.
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decode_module = type(tokenizer)._decode.__module__
    has_own_decode = not decode_module.startswith("transformers.tokenization_utils")
    if backend is None or has_own_decode or tokenizer.clean_up_tokenization_spaces:
        texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts
    # What `batch_decode` does, without looking at each number in Python.
    return [backend.decode(row, skip_special_tokens=True) for row in rows]


def load_model(reference: str, base: str | None, scenario_dir: Path | None) -> Any:
    """Load a causal language model in float32; an adapter is merged into its base's weights.

    `base` is the model under an adapter, by default the one named by the adapter.
    """
    name, gguf_file = resolve_model(reference, scenario_dir)
    if not _is_adapter(name):
        return load_causal_lm(name, gguf_file)
    base_name, base_gguf_file = resolve_model(base or _read_base_name(name), scenario_dir)
    module = load_causal_lm(base_name, base_gguf_file)
    try:
        merged = merge_adapter(load_adapter(module, Path(name)))
    except (CheckpointError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the adapter in {name} could not be added into {type(module).__name__}: {error}. "
            "Give its base model as base_model, and a LoRA adapter that peft wrote as "
            "adapter_model.safetensors."
        ) from error
    # peft freezes the model that it wraps.
    return merged.requires_grad_(True).eval()


def load_causal_lm(name: str, gguf_file: str | None) -> Any:
    """Load a causal language model in float32, in eval mode.

    An adapter's folder gives its base model with the adapter merged.
    """
    if _is_adapter(name):
        return load_model(name, None, None)
    from transformers import AutoModelForCausalLM

    quiet_libraries()
    try:
        with gguf_read_once() if gguf_file else nullcontext():
            model, info = AutoModelForCausalLM.from_pretrained(
                name,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                **_gguf(gguf_file),
            )
    except Exception as error:
        raise _load_error("model", name, error) from error
    require_weights(name, info, kind="complete language model", advice=ADVICE)
    # A dequantised GGUF model keeps a marker that makes save_pretrained refuse.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def converted_gguf(file: Path, folder: Path) -> Path:
    """Return the folder of a GGUF file's model as transformers saves it, converted only once.

    The conversion takes much longer than loading its result, which has the same float32 weights.

    Parameters
    ----------
    file : Path
        The GGUF file.
    folder : Path
        Where conversions are kept, each under the digest of its file.

    Raises
    ------
    ModelLoadError
        If the file cannot be read or its conversion cannot be written.
    """
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"the model {file} cannot be read: {error}. {ADVICE}") from error
    target = folder / digest[:32]
    if is_model_folder(target):
        return target
    name, gguf_file = resolve_model(str(file), None)
    module = load_causal_lm(name, gguf_file)
    tokenizer = load_tokenizer(name, gguf_file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when complete; another process may have converted the file meanwhile.
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            model_folder = Path(unfinished) / "model"
            module.save_pretrained(model_folder)
            tokenizer.save_pretrained(model_folder)
            if not target.exists():
                model_folder.rename(target)
    except Exception as error:
        # safetensors and tokenizers have errors of their own for a full disk.
        raise ModelLoadError(
            f"the converted model of {file} cannot be written to {folder}: {reason_of(error)}. "
            "Free some space, or convert the file with transformers and serve the folder."
        ) from error
    return target


def load_pretrained(
    reference: str,
    scenario_dir: Path | None,
    *,
    kind: str,
    advice: str,
    from_name: Callable[[str], tuple[Any, Any, dict[str, Any]]],
) -> tuple[Any, Any]:
    """Load tokenizer and model of a reference; GGUF files and missing weights are refused.

    `from_name` loads tokenizer, model and transformers' loading info from a folder or hub id.
    """
    name, gguf_file = resolve_model(reference, scenario_dir)
    if gguf_file is not None:
        raise ModelLoadError(
            f"the {kind} {reference!r} is a GGUF file, which holds a language model. {advice}"
        )
    import transformers.utils.logging  # noqa: F401 - whose bars are then off

    quiet_libraries()
    try:
        tokenizer, model, info = from_name(name)
    except Exception as error:
        raise ModelLoadError(
            f"the {kind} {reference!r} could not be loaded: {reason_of(error)}. {advice}"
        ) from error
    require_weights(name, info, kind=f"trained {kind}", advice=advice)
    return tokenizer, model


def read_limits(tokenizer: Any, model: Any) -> tuple[int, str]:
    """Return the maximum tokens of a text, and a replacement for a text without words."""
    tokenizer_limit = tokenizer.model_max_length
    window = int(getattr(model.config, "max_position_embeddings", None) or tokenizer_limit)
    for name, layer in model.named_modules():
        # Positions of RoBERTa and its relatives start after the padding index.
        padding = getattr(layer, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            window -= padding + 1
    # Without special tokens, such a text would have no tokens at all.
    has_special_tokens = bool(tokenizer("")["input_ids"])
    blank = "" if has_special_tokens else tokenizer.unk_token or tokenizer.eos_token
    return min(window, tokenizer_limit), blank


def require_weights(name: str, info: Mapping[str, Any], *, kind: str, advice: str) -> None:
    """Raise for a model with missing weights, which transformers initialises at random."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{name} is not a {kind}: the weights {', '.join(missing[:4])} are missing. {advice}"
        )


def round_weights(module: Any, dtype: torch.dtype) -> None:
    """Convert a module's weights to a precision.

    `module.to(dtype)` would also round the frequencies of rotary embeddings, which rotates tokens
    at position 1,000 by half a radian.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and "inv_freq" not in name:
            buffer.data = buffer.data.to(dtype)


class ModelDescription(NamedTuple):
    """Properties of a model that are known without its weights."""

    context_window: int
    vocab_size: int
    num_parameters: int
    generation_config: Any


def describe_model(name: str) -> ModelDescription:
    """Read the configuration of a folder or hub id; no weights are loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # Without memory, to count the weights.
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        text_config = config.get_text_config()
        vocab_size = int(text_config.vocab_size)
    except Exception as error:
        raise _load_error("model", name, error) from error
    try:
        generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        generation_config = module.generation_config
    return ModelDescription(
        context_window=int(getattr(text_config, "max_position_embeddings", 1 << 20)),
        vocab_size=vocab_size,
        num_parameters=int(module.num_parameters()),
        generation_config=generation_config,
    )


def gains_from_bfloat16(module: Any, device: torch.device) -> bool:
    """Return whether a model is large enough, and the device able, to gain from bfloat16."""
    if module.num_parameters() < SMALLEST_BFLOAT16_MODEL:
        return False
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    # Private, so it may be absent.
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(is_supported and is_supported())


def computing_dtype(
    module: Any, requested: str, device: torch.device, *, trainable: bool
) -> torch.dtype:
    """Return the precision that a model computes in: "auto", "fastest" or a key of `DTYPES`."""
    dtype = DTYPES.get(requested, torch.float32)
    gains = gains_from_bfloat16(module, device)
    wants_fastest = requested == "fastest" or (requested == "auto" and trainable)
    if gains and wants_fastest:
        dtype = torch.bfloat16
    is_large = module.num_parameters() >= SMALLEST_BFLOAT16_MODEL
    if requested == "bfloat16" and is_large and not gains and device.type == "cpu":
        _warn_about_slow_bfloat16()
    return dtype


@cache
def _warn_about_slow_bfloat16() -> None:
    """Warn, once a process, of a precision that the processor has no instructions for."""
    instructions = torch.backends.cpu.get_cpu_capability()
    factor = SLOWER_BFLOAT16.get(instructions, SLOWER_BFLOAT16["AVX2"])
    logger.warning(
        "dtype is bfloat16, which this processor lacks: its products take about %g times as long "
        "as those of float32. Set dtype to float32 or fastest.",
        factor,
    )


def _gguf(gguf_file: str | None) -> dict[str, str]:
    return {"gguf_file": gguf_file} if gguf_file else {}


def _load_error(part: str, name: str, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"the {part} of {name!r} could not be loaded: {reason_of(error)}. {ADVICE}"
    )


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Let transformers parse each GGUF file once, and map each model's names once.

    `from_pretrained` does both several times, which took 12 of 17 seconds for 135 M weights.
    """
    import gguf

    # The functions of the module are replaced, which another thread must not see half done.
    with _READING_GGUF:
        reader, get_name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = lru_cache(maxsize=2)(reader)
        gguf.get_tensor_name_map = lru_cache(maxsize=8)(get_name_map)
        try:
            yield
        finally:
            gguf.GGUFReader = reader
            gguf.get_tensor_name_map = get_name_map


def find_tokenizer(reference: str, base: str | None, scenario_dir: Path | None) -> Any:
    """Load the tokenizer of a model, or that of its base if the folder has none."""
    source = resolve_reference(reference, scenario_dir)
    if not isinstance(source, Path) or not source.is_dir():
        return load_tokenizer(*resolve_model(reference, scenario_dir))
    # transformers creates an empty tokenizer for a folder without one.
    if any((source / name).exists() for name in TOKENIZER_FILES):
        return load_tokenizer(str(source))
    if base is None and _is_adapter(str(source)):
        base = _read_base_name(str(source))
    if base is None:
        raise ModelLoadError(
            f"{source} holds no tokenizer. Save it beside the model, or set base_model "
            "(attacker_base_model_id in nip_astra.astra) to the model that it comes from."
        )
    return load_tokenizer(*resolve_model(base, scenario_dir))
