"""One vLLM engine in this process: requests of tokens, its weights and adapters, and its sleep.

vLLM is imported when an engine is started. What is asked of it has been there, under these names,
from 0.30 to 0.33.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nip_astra.distributed.launch import rank_of_process
from nip_astra.errors import (
    ConfigurationError,
    ContextLengthError,
    MissingDependencyError,
    ModelLoadError,
)
from nip_astra.language_models.base import Generation, SamplingOptions, pad_right

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that an engine can be started for; an adapter may have a lower one."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is started."""

    dtype: str
    max_model_len: int
    gpu_memory_utilization: float
    lora_rank: int | None = None
    can_sleep: bool = False
    enforce_eager: bool = False


class SamplingEngine(Protocol):
    """What samples turns: an engine of this process, or several in actors."""

    options: EngineOptions

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        """Raise `ModelLoadError` where its tokens are others than the trainer's."""

    def note_weights(self, version: Hashable) -> None:
        """Say which version it was started with."""

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Take full weights unless this version is held."""

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        """What samples with an adapter, which is taken unless this version is held."""

    def sleep(self) -> None:
        """Give memory back until the next use."""

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], *, adapter: Any = None
    ) -> list[Reply]:
        """Sample a turn for each request."""


def start_engine(name: str, options: EngineOptions) -> VllmEngine:
    """Load a model into an engine of its own."""
    # Weights are handed over as tensors, which takes an engine in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        vllm: Any = importlib.import_module("vllm")
        lora: Any = importlib.import_module("vllm.lora.request")
    except ImportError as error:
        raise MissingDependencyError(
            f"the model {name!r} was to be sampled by vLLM, which is not installed or cannot be "
            f"imported ({error}). Install it with: pip install 'nip_astra[vllm]', on a machine "
            "with a GPU, or set the language model's _type to huggingface."
        ) from error
    with_lora: dict[str, Any] = {}
    if options.lora_rank is not None:
        rank = _engine_rank(options.lora_rank)
        with_lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
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
                # What a checkpoint says of sampling is not asked for.
                generation_config="vllm",
                **with_lora,
            )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelLoadError(
            f"the model {name!r} was to be sampled by vLLM, which could not load it: {reason}. "
            "Where memory is short, lower max_model_len, or change gpu_memory_utilization: it is "
            "the engine's share of the whole GPU. Where vLLM does not know the architecture, set "
            "_type to huggingface."
        ) from error
    return VllmEngine(llm, vllm.SamplingParams, lora.LoRARequest, options)


class AbsentEngine:
    """What stands for engines in actors in the processes of a run that sample no turn."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        """Left to the process with the engine."""

    def note_weights(self, version: Hashable) -> None:
        """Nothing is held."""

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Nothing is held."""

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        """Nothing is held."""

    def sleep(self) -> None:
        """There is nothing to give back."""

    def generate(
        self, requests: Sequence[Request], arguments: dict[str, Any], *, adapter: Any = None
    ) -> list[Reply]:
        """Refuse to sample."""
        raise ConfigurationError(
            f"process {rank_of_process()} of a run was to sample by vLLM, but the first process "
            "alone has the engines (num_engines). Have it play, or set the language model's _type "
            "to huggingface."
        )


class VllmEngine:
    """A running engine; several models may share it, where adapters alone tell them apart."""

    def __init__(
        self, llm: Any, sampling_params: Any, lora_request: Any, options: EngineOptions
    ) -> None:
        self.llm = llm
        self.options = options
        self._sampling_params = sampling_params
        self._lora_request = lora_request
        self._awake = {"weights", "kv_cache"}
        self._has_stale_prefixes = False
        self._held: Hashable = None
        self._adapter: tuple[Hashable, Any, TemporaryDirectory[str]] | None = None
        self._num_adapters = 0

    def check_vocabulary(self, tokenizer: Any, vocab_size: int) -> None:
        """Raise `ModelLoadError` where the engine's tokens are others than the trainer's."""
        refuse_other_vocabulary(*self.vocabulary(), tokenizer, vocab_size)

    def vocabulary(self) -> tuple[int, dict[str, int]]:
        """The rows of the engine's vocabulary, and its tokens."""
        return (
            self.llm.llm_engine.model_config.get_vocab_size(),
            self.llm.get_tokenizer().get_vocab(),
        )

    # ---- weights

    def hold_weights(
        self, version: Hashable, weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Take full weights, by their names in the checkpoint, unless this version is held."""
        if version == self._held:
            return
        self._wake("weights")

        def load(model: Any) -> None:
            model.load_weights(weights())

        if _has_packed_weights(self.llm):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        else:
            self.llm.apply_model(load)
        self._held = version
        self._has_stale_prefixes = True

    def note_weights(self, version: Hashable) -> None:
        """Say which version the engine was started with."""
        self._held = version

    def hold_adapter(self, version: Hashable, write: Callable[[Path], None]) -> Any:
        """The request that samples with an adapter, loading it unless this version is held.

        Each version has a number and a name that no other had: vLLM would take an adapter of the
        same number from its cache, and cached prefixes of the same name for those of the new one.
        """
        if self._adapter is not None and self._adapter[0] == version:
            return self._adapter[1]
        # The folder stays as long as the adapter is in use: vLLM may read it again.
        folder = TemporaryDirectory(prefix="nip_astra_adapter_")
        write(Path(folder.name))
        self._num_adapters += 1
        number = self._num_adapters
        request = self._lora_request(
            lora_name=f"adapter-{number}", lora_int_id=number, lora_path=folder.name
        )
        self._wake("weights")
        if self._adapter is not None:
            self.llm.llm_engine.remove_lora(self._adapter[1].lora_int_id)
            self._adapter[2].cleanup()
            self._adapter = None
        try:
            self.llm.llm_engine.add_lora(request)
        except Exception as error:
            folder.cleanup()
            raise ModelLoadError(
                f"vLLM was to sample with a LoRA adapter, but refused it: {error}. Set "
                "lora.target_modules to attention and MLP projections, or lora to null."
            ) from error
        self._adapter = (version, request, folder)
        self._has_stale_prefixes = True
        return request

    # ---- memory

    def sleep(self) -> None:
        """Memory back until the next use: weights go to the processor's, caches are dropped.

        Weights are kept because dropping them (vLLM's level 2) has lost what no sync brings back.
        """
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
        """Sample a turn for each request, with what `hold_adapter` returned or the base weights."""
        if not requests:
            return []
        self._check_lengths(requests, arguments["max_tokens"])
        self._wake("weights", "kv_cache")
        if self._has_stale_prefixes:
            if self.llm.reset_prefix_cache() is False:
                raise ModelLoadError(
                    "vLLM was to forget prefixes read with older weights, but did not, since "
                    "requests are in flight. Give each engine one user at a time."
                )
            self._has_stale_prefixes = False
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(request.context)} for request in requests],
            [
                self._sampling_params(
                    **(arguments | forcing(request)),
                    seed=request.seed,
                    # Scores of what the prefix cache holds are not in it; some versions give
                    # those of another request instead (vllm-project/vllm pull request 42245).
                    skip_reading_prefix_cache=request.scores_context,
                    prompt_logprobs=0 if request.scores_context else None,
                )
                for request in requests
            ],
            use_tqdm=False,
            lora_request=adapter,
        )
        return [read_reply(*pair) for pair in zip(requests, outputs, strict=True)]

    def _check_lengths(self, requests: Sequence[Request], max_tokens: int) -> None:
        longest = max(len(request.context) for request in requests)
        if longest + max_tokens > self.options.max_model_len:
            raise ContextLengthError(
                f"a context of {longest} tokens and a turn of {max_tokens} were to be read by "
                f"vLLM, whose window holds {self.options.max_model_len}. Raise max_model_len of "
                "the language model, or lower max_new_tokens."
            )


def _has_packed_weights(llm: Any) -> bool:
    """Whether an engine has laid its weights out anew, so that they are loaded as at the start.

    On CPUs it has, and what it has made of a matrix knows no loader.
    """
    config = getattr(llm.llm_engine, "vllm_config", None)
    return getattr(getattr(config, "device_config", None), "device_type", None) == "cpu"


def refuse_other_vocabulary(
    found_size: int, found: Mapping[str, int], tokenizer: Any, vocab_size: int
) -> None:
    """Raise `ModelLoadError` where an engine's tokens are others than the trainer's."""
    if found_size == vocab_size and found == tokenizer.get_vocab():
        return
    raise ModelLoadError(
        f"vLLM was to sample the tokens that are trained on, but it loaded a vocabulary of "
        f"{found_size} rows where the model has {vocab_size}, or another tokenizer. Give a folder "
        "in which weights, config.json and tokenizer belong together."
    )


def _engine_rank(rank: int) -> int:
    fitting = [known for known in LORA_RANKS if known >= rank]
    if not fitting:
        raise ConfigurationError(
            f"a LoRA adapter of rank {rank} was to be sampled by vLLM, which takes ranks up to "
            f"{LORA_RANKS[-1]}. Lower lora.rank."
        )
    return fitting[0]


MAX_BANNED = 1024
"""Most tokens for which vLLM takes a bias."""
TEMPERATURES = (0.01, 2.0)
"""Temperatures that vLLM draws at; it raises lower ones without a fault and refuses higher ones."""


class Request(NamedTuple):
    """One turn to be sampled.

    Attributes
    ----------
    seed : int
        The only randomness of the turn.
    scores_context : bool
        Whether to give log p of the context's tokens too.
    forced : int or None
        A token that is said first, whatever its probability.
    """

    context: Sequence[int]
    seed: int
    scores_context: bool = False
    forced: int | None = None


class Reply(NamedTuple):
    """What came of a request.

    Attributes
    ----------
    logprobs : list[float]
        log p of each token of `ids` at temperature 1 with nothing cut off; nats.
    context_logprobs : list[float] or None
        The same for each token of the context, 0 for the first.
    num_forwarded : int
        Tokens that the engine read, without those that its prefix cache had.
    """

    ids: list[int]
    logprobs: list[float]
    context_logprobs: list[float] | None
    num_forwarded: int


def sampling_arguments(
    options: SamplingOptions, *, end_ids: Sequence[int], banned_ids: Sequence[int]
) -> dict[str, Any]:
    """The arguments of `SamplingParams` that draw as `options` say.

    The order is the same in both: banned tokens, temperature, `top_k`, then `top_p` over what is
    left, the token that crosses p included.
    """
    low, high = TEMPERATURES
    if options.temperature != 0.0 and not low <= options.temperature <= high:
        raise ConfigurationError(
            f"the temperature {options.temperature:g} was asked for, but vLLM draws at 0 or "
            f"between {low:g} and {high:g}. Set temperature to one of these, or _type to "
            "huggingface."
        )
    if len(banned_ids) > MAX_BANNED:
        raise ConfigurationError(
            f"{len(banned_ids)} special tokens are never to be said, but vLLM keeps at most "
            f"{MAX_BANNED} from being drawn. Set _type to huggingface for this model."
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
        # Of the token that was drawn alone.
        "logprobs": 0,
        "detokenize": False,
    }


def scoring_request(text: Sequence[int], window: int) -> Request:
    """Ask for log p of a text's tokens: those of the context, then those of the turn."""
    if len(text) < window:
        return Request(text, seed=0, scores_context=True)
    # There is no room for the token that vLLM samples after a text: the last one is made that.
    return Request(text[:-1], seed=0, scores_context=True, forced=text[-1])


def forcing(request: Request) -> dict[str, Any]:
    """The arguments of `SamplingParams` that force a request's token, where it has one."""
    if request.forced is None:
        return {}
    return {"allowed_token_ids": [request.forced], "logit_bias": None}


def read_reply(request: Request, output: Any) -> Reply:
    """Take what is needed from a `RequestOutput` of vLLM."""
    said = output.outputs[0]
    if said.finish_reason not in ("stop", "length"):
        raise ModelLoadError(
            f"vLLM was to sample a turn, but gave it up ({said.finish_reason}). Its log says why."
        )
    ids = list(said.token_ids)
    chosen = [found[token].logprob for found, token in zip(said.logprobs, ids, strict=True)]
    context_logprobs = None
    if request.scores_context:
        read = zip(output.prompt_logprobs, request.context, strict=True)
        # Nothing predicts the first token.
        context_logprobs = [0.0 if found is None else found[token].logprob for found, token in read]
    num_read = len(request.context) - (output.num_cached_tokens or 0)
    return Reply(ids, chosen, context_logprobs, num_read + max(len(ids) - 1, 0))


def seed_of(uniforms_T: Tensor) -> int:
    """The seed of a row, which its uniform numbers alone decide."""
    digest = hashlib.sha256(uniforms_T.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def padded_turns(replies: Sequence[Reply], width: int) -> Generation:
    """Replies as turns, padded to a width."""
    ids, mask = pad_right([reply.ids for reply in replies], torch.device("cpu"))
    padding = (0, width - ids.shape[1])
    logprobs = padded_rows([reply.logprobs for reply in replies])
    found = (torch.nn.functional.pad(x, padding) for x in (ids, mask, logprobs))
    return Generation(*found)


def padded_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """Numbers of several lengths as one tensor, 0 on padding."""
    if not rows:
        return torch.zeros(0, 0)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
