"""A vLLM engine in this process, and requests to it; for vLLM 0.26 to 0.33."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.distributed.launch import rank_of_process
from nip_astra.errors import (
    ConfigurationError,
    ContextLengthError,
    MissingDependencyError,
    ModelLoadError,
    reason_of,
)
from nip_astra.language_models.base import Generation, SamplingOptions, pad_right

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that an engine can be started with."""


@dataclass(frozen=True)
class EngineOptions:
    """Start options of an engine."""

    dtype: str
    max_model_len: int
    gpu_memory_utilization: float
    lora_rank: int | None = None
    can_sleep: bool = False
    enforce_eager: bool = False


class SamplingEngine:
    """Samples turns. The base class is a placeholder in processes that do not sample."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        """Raise `ModelLoadError` if its tokens differ from the trainer's."""

    def note_weights(self, version: Hashable) -> None:
        """Record the version of the initial weights."""

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Load full weights, by their names in the checkpoint, unless this version is loaded."""

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        """Return the adapter for `generate`, loaded if new; `write` saves it with peft."""

    def sleep(self) -> None:
        """Release memory until the next use."""

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], *, adapter: Any = None
    ) -> list[Reply]:
        """Sample a turn for each request, with an adapter of `hold_adapter` or the base weights."""
        raise ConfigurationError(
            f"process {rank_of_process()} of the run cannot sample: the first process alone has "
            "the vLLM engines (num_engines). Set the language model's _type to huggingface."
        )


def start_engine(name: str, options: EngineOptions) -> VllmEngine:
    """Load a model into a new engine."""
    # Weights are passed as tensors, which requires an engine in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        vllm: Any = importlib.import_module("vllm")
        lora: Any = importlib.import_module("vllm.lora.request")
    except ImportError as error:
        raise MissingDependencyError(
            f"vLLM cannot be imported for the model {name!r} ({error}). Run: pip install "
            "'nip_astra[vllm]' on a machine with a GPU, or set _type to huggingface."
        ) from error
    lora_arguments: dict[str, Any] = {}
    if options.lora_rank is not None:
        # The smallest of vLLM's ranks in which the adapter fits; its memory is reserved.
        max_rank = next((rank for rank in LORA_RANKS if rank >= options.lora_rank), None)
        if max_rank is None:
            raise ConfigurationError(
                f"lora.rank is {options.lora_rank}; vLLM takes ranks up to {LORA_RANKS[-1]}."
            )
        lora_arguments = {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
    try:
        # An engine in this process sets the global seed.
        with torch.random.fork_rng():
            llm = vllm.LLM(
                model=name,
                tokenizer=name,
                dtype=options.dtype,
                seed=0,
                max_model_len=options.max_model_len,
                gpu_memory_utilization=options.gpu_memory_utilization,
                enable_prefix_caching=True,
                enable_sleep_mode=options.can_sleep,
                enforce_eager=options.enforce_eager,
                # Before temperature, top_k and top_p, as everywhere in this package.
                logprobs_mode="raw_logprobs",
                # Not the checkpoint's own sampling options.
                generation_config="vllm",
                **lora_arguments,
            )
    except Exception as error:
        raise ModelLoadError(
            f"vLLM could not load the model {name!r}: {reason_of(error)}. Lower max_model_len or "
            "change gpu_memory_utilization (a share of the whole GPU) if memory is short, or set "
            "_type to huggingface if the architecture is unknown."
        ) from error
    return VllmEngine(llm, vllm.SamplingParams, lora.LoRARequest, options)


class _LoadedAdapter(NamedTuple):
    """The adapter that an engine has loaded."""

    version: Hashable
    request: Any
    """vLLM's `LoRARequest`."""
    folder: TemporaryDirectory[str]
    """Its files, which vLLM may read again while the adapter is in use."""


class VllmEngine(SamplingEngine):
    """A running engine; models that differ only in their adapters may share it."""

    def __init__(
        self, llm: Any, sampling_params: Any, lora_request: Any, options: EngineOptions
    ) -> None:
        super().__init__(options)
        self.llm = llm
        self._sampling_params = sampling_params
        self._lora_request = lora_request
        self._awake = {"weights", "kv_cache"}
        self._has_stale_prefixes = False
        self._weights_version: Hashable = None
        self._adapter: _LoadedAdapter | None = None
        self._num_adapters = 0

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        refuse_other_vocabulary(*self.vocabulary(), tokenizer, vocab_size)

    def vocabulary(self) -> tuple[int, dict[str, int]]:
        """Return the size of the engine's vocabulary, and its tokens."""
        return (
            self.llm.llm_engine.model_config.get_vocab_size(),
            self.llm.get_tokenizer().get_vocab(),
        )

    # ---- weights

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        if version == self._weights_version:
            return
        self._wake("weights")

        def load(model: Any) -> None:
            model.load_weights(weights())

        config = getattr(self.llm.llm_engine, "vllm_config", None)
        device_config = getattr(config, "device_config", None)
        if getattr(device_config, "device_type", None) == "cpu":
            # On CPUs vLLM has repacked the matrices, so they are reloaded as at the start.
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        else:
            self.llm.apply_model(load)
        self._weights_version = version
        self._has_stale_prefixes = True

    def note_weights(self, version: Hashable) -> None:
        self._weights_version = version

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        if self._adapter is not None and self._adapter.version == version:
            return self._adapter.request
        folder = TemporaryDirectory(prefix="nip_astra_adapter_")
        write(Path(folder.name))
        # Each version gets a new number and name: vLLM would take an adapter of the same number
        # from its cache, and reuse cached prefixes of the same name.
        self._num_adapters += 1
        number = self._num_adapters
        request = self._lora_request(
            lora_name=f"adapter-{number}", lora_int_id=number, lora_path=folder.name
        )
        self._wake("weights")
        if self._adapter is not None:
            # First, since an engine has memory for one adapter (max_loras).
            self.llm.llm_engine.remove_lora(self._adapter.request.lora_int_id)
            self._adapter.folder.cleanup()
            self._adapter = None
        try:
            self.llm.llm_engine.add_lora(request)
        except Exception as error:
            folder.cleanup()
            raise ModelLoadError(
                f"vLLM refused the LoRA adapter: {error}. Set lora.target_modules to attention "
                "and MLP projections, or lora to null."
            ) from error
        self._adapter = _LoadedAdapter(version, request, folder)
        self._has_stale_prefixes = True
        return request

    # ---- memory

    def sleep(self) -> None:
        # Level 2, which drops weights, has lost weights that no sync restores.
        if self.options.can_sleep and self._awake:
            self.llm.sleep(level=1)
            self._awake = set()

    def _wake(self, *parts: str) -> None:
        # Caches come last: while weights are exchanged their memory is free.
        missing = [part for part in parts if part not in self._awake]
        if missing:
            self.llm.wake_up(tags=missing)
            self._awake.update(missing)

    # ---- sampling

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], *, adapter: Any = None
    ) -> list[Reply]:
        if not requests:
            return []
        longest = max(len(request.context) for request in requests)
        max_tokens = arguments["max_tokens"]
        if longest + max_tokens > self.options.max_model_len:
            raise ContextLengthError(
                f"a context of {longest} tokens and a turn of {max_tokens} exceed vLLM's window of "
                f"{self.options.max_model_len}. Raise max_model_len, or lower max_new_tokens."
            )
        self._wake("weights", "kv_cache")
        if self._has_stale_prefixes:
            if self.llm.reset_prefix_cache() is False:
                raise ModelLoadError(
                    "vLLM did not reset its prefix cache, because requests are in flight. Use "
                    "each engine from one place at a time."
                )
            self._has_stale_prefixes = False
        prompts = []
        sampling_params = []
        for request in requests:
            prompts.append({"prompt_token_ids": list(request.context)})
            request_arguments = dict(arguments)
            if request.forced is not None:
                # A bias would exclude a banned token, also if it is the only allowed one.
                request_arguments["allowed_token_ids"] = [request.forced]
                request_arguments["logit_bias"] = None
            sampling_params.append(
                self._sampling_params(
                    **request_arguments,
                    seed=request.seed,
                    # The prefix cache has no scores; some versions return those of another
                    # request (vllm-project/vllm pull request 42245).
                    skip_reading_prefix_cache=request.scores_context,
                    prompt_logprobs=0 if request.scores_context else None,
                )
            )
        outputs = self.llm.generate(prompts, sampling_params, use_tqdm=False, lora_request=adapter)
        return [
            read_reply(request, output) for request, output in zip(requests, outputs, strict=True)
        ]


def refuse_other_vocabulary(
    engine_size: int, engine_vocabulary: Mapping[str, int], tokenizer: Any, vocab_size: int
) -> None:
    """Raise `ModelLoadError` if an engine's tokens differ from the trainer's."""
    if engine_size == vocab_size and engine_vocabulary == tokenizer.get_vocab():
        return
    raise ModelLoadError(
        f"vLLM loaded another tokenizer, or a vocabulary of {engine_size} rows instead of "
        f"{vocab_size}. Give a folder in which weights, config.json and tokenizer belong together."
    )


MAX_BANNED = 1024
"""Maximum number of tokens for which vLLM accepts a bias."""
TEMPERATURES = (0.01, 2.0)
"""Range of temperatures in vLLM; it silently raises lower ones and refuses higher ones."""


class Request(NamedTuple):
    """One turn to sample; `seed` is its only randomness, and `forced` a prescribed first token."""

    context: Sequence[int]
    seed: int
    scores_context: bool = False
    forced: int | None = None


class Reply(NamedTuple):
    """The result of a request.

    Log-probabilities are at temperature 1 without truncation, nats; 0 for a context's first token.
    `num_forwarded` excludes tokens of the prefix cache.
    """

    ids: list[int]
    logprobs: list[float]
    context_logprobs: list[float] | None
    num_forwarded: int


def sampling_arguments(
    options: SamplingOptions, *, end_ids: Sequence[int], banned_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for `options`; vLLM applies them in equal order."""
    low, high = TEMPERATURES
    if options.temperature != 0.0 and not low <= options.temperature <= high:
        raise ConfigurationError(
            f"temperature is {options.temperature:g}, but vLLM draws at 0 or between {low:g} and "
            f"{high:g}. Change it, or set _type to huggingface."
        )
    if len(banned_ids) > MAX_BANNED:
        raise ConfigurationError(
            f"the model has {len(banned_ids)} special tokens, but vLLM can ban at most "
            f"{MAX_BANNED}. Set _type to huggingface."
        )
    return {
        "max_tokens": options.max_new_tokens,
        "min_tokens": options.min_new_tokens,
        "temperature": options.temperature,
        "top_k": 0 if options.top_k is None else options.top_k,
        "top_p": options.top_p,
        # All ends are named, so that vLLM adds none of its own.
        "stop_token_ids": sorted({*end_ids, *options.end_ids}),
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(banned_ids, float("-inf")) or None,
        # Log-probability of the sampled token only.
        "logprobs": 0,
        "detokenize": False,
    }


def scoring_request(text: Sequence[int], window: int) -> Request:
    """Return a request for log p of a text's tokens: of the context, then of the turn."""
    if len(text) < window:
        return Request(text, seed=0, scores_context=True)
    # No room for the token that vLLM samples after a text: the last one is sampled, forced.
    return Request(text[:-1], seed=0, scores_context=True, forced=text[-1])


def read_reply(request: Request, output: Any) -> Reply:
    """Return the reply in a `RequestOutput` of vLLM."""
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise ModelLoadError(
            f"vLLM aborted a turn ({completion.finish_reason}). Its log gives the reason."
        )
    ids = list(completion.token_ids)
    # One mapping per position, of which only the sampled token is needed.
    logprobs = []
    for logprob_by_token, token in zip(completion.logprobs, ids, strict=True):
        logprobs.append(logprob_by_token[token].logprob)
    context_logprobs = None
    if request.scores_context:
        context_logprobs = []
        for logprob_by_token, token in zip(output.prompt_logprobs, request.context, strict=True):
            # Nothing predicts the first token.
            logprob = 0.0 if logprob_by_token is None else logprob_by_token[token].logprob
            context_logprobs.append(logprob)
    num_cached = output.num_cached_tokens or 0
    # The last token of a turn is not forwarded.
    num_forwarded = len(request.context) - num_cached + max(len(ids) - 1, 0)
    return Reply(ids, logprobs, context_logprobs, num_forwarded)


def derive_row_seed(uniforms_T: Tensor) -> int:
    """Return the seed of a row, derived from its uniform numbers."""
    digest = hashlib.sha256(uniforms_T.cpu().contiguous().numpy().tobytes()).digest()
    # vLLM takes signed numbers of 64 bits.
    return int.from_bytes(digest[:8], "big") >> 2


def padded_turns(replies: Sequence[Reply], width: int) -> Generation:
    """Convert replies to turns, padded to a width."""
    ids_BT, mask_BT = pad_right([reply.ids for reply in replies], torch.device("cpu"))
    logprobs_BT = padded_rows([reply.logprobs for reply in replies])
    padding = (0, width - ids_BT.shape[1])
    return Generation(
        F.pad(ids_BT, padding),
        F.pad(mask_BT, padding),
        F.pad(logprobs_BT, padding),
    )


def padded_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Pad number sequences of different lengths to one tensor, 0 on padding."""
    if not rows:
        return torch.zeros(0, 0)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
