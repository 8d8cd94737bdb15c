"""The vLLM backend: vLLM samples, and the Hugging Face backend scores and learns.

Log-probabilities in a loss are never vLLM's: its kernels round differently, so the ratio of the two
is not 1 for equal weights. The difference on sampled tokens is logged.

Shape suffixes: `B` or `R` row, `C` context, `T` token of a turn or span.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from nip_astra.distributed.launch import rank_of_process
from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.adapters import save_weights
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    LanguageModel,
    SamplingDistribution,
    SamplingOptions,
    TokenCount,
    TokenRows,
    TokenScores,
    Turns,
    pad_left,
    register_language_model,
)
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.message_format import detect_format
from nip_astra.language_models.sampling import SupportMask, find_banned_ids, find_end_ids
from nip_astra.language_models.scoring import sequences_to_read
from nip_astra.language_models.sources import (
    SMALLEST_BFLOAT16_MODEL,
    describe_model,
    find_tokenizer,
    resolve_model,
)
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.vllm_backend.engine import (
    EngineOptions,
    Reply,
    Request,
    SamplingEngine,
    padded_rows,
    padded_turns,
    sampling_arguments,
    scoring_request,
    seed_of,
    start_engine,
)
from nip_astra.language_models.vllm_backend.remote_engines import start_remote_engines
from nip_astra.parameters.conditions import where_above
from nip_astra.parameters.types import LanguageModelType

logger = logging.getLogger(__name__)

SCORE_ONE = SamplingOptions(max_new_tokens=1, temperature=0.0)
"""vLLM samples at least one token of every text that it scores; a greedy one needs no seed, for
which vLLM draws row by row."""
MAX_PADDED = 1 << 24
"""Maximum tokens, including padding, that are rescored at once: 128 MiB of ids."""


@register_language_model(LanguageModelType.VLLM)
class VllmLanguageModel(LanguageModel):
    """A causal language model sampled by vLLM in this process.

    Parameters
    ----------
    scorer : HuggingFaceLanguageModel or None
        The weights that learn; None for a frozen model, which vLLM scores.
    """

    class Parameters(HuggingFaceLanguageModel.Parameters):
        """Source and precision of the model, and vLLM's share of the GPU."""

        gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1)
        """Share of the GPU's memory for vLLM's weights and caches. Larger samples more turns at
        once and leaves less to training."""
        max_model_len: int | None = Field(default=None, ge=2)
        """Maximum conversation in tokens; null for the model's window. Smaller uses less memory."""
        sleep_during_updates: bool = False
        """Whether vLLM releases its memory during updates of a model that learns; costs the time to
        copy the weights twice per rollout."""
        num_engines: int = Field(default=0, ge=0)
        """Engines in Ray actors, on one machine or many, that share the turns; 0 for one engine in
        this process. They receive weights and adapters after each update. RAY_ADDRESS selects the
        cluster. Tested on CPUs only."""
        gpus_per_engine: Annotated[float, where_above("num_engines", 0)] = Field(default=1, ge=0)
        """GPUs per engine actor."""

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: Any,
        *,
        scorer: HuggingFaceLanguageModel | None,
        end_ids: tuple[int, ...],
        vocab_size: int,
        num_parameters: int,
        source: str,
        use_adapter: bool,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.end_ids = end_ids
        self.context_window = engine.options.max_model_len
        self.source = source
        self.use_adapter = use_adapter
        self.token_count = TokenCount()
        self.gap = SamplerGap()
        self.weights: LearntWeights | None = None
        kept_ids = (*end_ids, *detect_format(tokenizer).shown_ids())
        self._banned_ids = find_banned_ids(tokenizer, kept_ids, vocab_size)
        self._num_parameters = num_parameters
        if scorer is not None:
            scorer.token_count = self.token_count
            self.weights = LearntWeights(scorer)
            self.engine.note_weights(self.weights.version)

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> VllmLanguageModel:
        name, gguf_file = resolve_model(parameters.model, scenario_dir)
        if gguf_file is not None:
            raise ModelLoadError(
                f"vLLM cannot load the GGUF file {parameters.model!r}. Use a folder with "
                "safetensors or a hub id, or set _type to huggingface."
            )
        if parameters.sleep_during_updates and not trainable:
            raise ConfigurationError(
                f"sleep_during_updates is set for {parameters.model!r}, which does not learn. Set "
                "it for the model that does: vLLM lets one engine per process sleep."
            )
        about = describe_model(name)
        tokenizer = find_tokenizer(parameters.model, parameters.base_model, scenario_dir)
        scorer = None
        if trainable:
            scorer = HuggingFaceLanguageModel.load(
                parameters, device=device, scenario_dir=scenario_dir, trainable=True
            )
        dtype = _engine_dtype(parameters.dtype, about.num_parameters)
        if scorer is not None and parameters.dtype in ("auto", "fastest"):
            dtype = "bfloat16" if scorer.dtype == torch.bfloat16 else "float32"
        has_adapter = scorer is not None and scorer.has_adapter
        window = min(parameters.max_model_len or about.context_window, about.context_window)
        options = EngineOptions(
            dtype=dtype,
            max_model_len=window,
            gpu_memory_utilization=parameters.gpu_memory_utilization,
            lora_rank=parameters.lora.rank if has_adapter else None,
            can_sleep=parameters.sleep_during_updates,
            enforce_eager=parameters.decode_graphs == "never",
        )
        engine: SamplingEngine
        if parameters.num_engines and rank_of_process() > 0:
            # Only the first process of a run samples.
            engine = SamplingEngine(options)
        elif parameters.num_engines:
            engine = start_remote_engines(
                name,
                options,
                num_engines=parameters.num_engines,
                num_gpus=parameters.gpus_per_engine,
            )
        else:
            # In every process: vLLM forms its groups with all processes of the run.
            engine = start_engine(name, options)
        engine.check_vocabulary(tokenizer, about.vocab_size)
        return cls(
            engine,
            tokenizer,
            scorer=scorer,
            end_ids=find_end_ids(about.generation_config, tokenizer),
            vocab_size=about.vocab_size,
            num_parameters=about.num_parameters if scorer is None else scorer.num_parameters(),
            source=parameters.model,
            use_adapter=has_adapter,
        )

    def _twin(self, scorer: HuggingFaceLanguageModel | None) -> VllmLanguageModel:
        """Return a frozen model on the same engine, without adapter."""
        twin = copy.copy(self)
        twin.scorer, twin.use_adapter = scorer, False
        twin.token_count, twin.gap, twin.weights = TokenCount(), SamplerGap(), None
        if scorer is not None:
            scorer.token_count = twin.token_count
            twin.weights = LearntWeights(scorer)
        return twin

    def frozen_reference(self) -> VllmLanguageModel:
        # By the same path as the policy.
        return self if self.scorer is None else self._twin(self.scorer.frozen_reference())

    def base_for(self, parameters: Any) -> LanguageModel | None:
        if self.scorer is None:
            return None
        if parameters.type_name != LanguageModelType.VLLM:
            return self.scorer.base_for(parameters)
        options = self.engine.options
        is_same = parameters.model == self.source
        is_same &= _engine_dtype(parameters.dtype, self.num_parameters()) == options.dtype
        if not (self.scorer.has_adapter and is_same and _is_engine_of(options, parameters)):
            return None
        return self._twin(None)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.scorer is not None:
            yield from self.scorer.parameters()

    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def can_score_contexts(self) -> bool:  # type: ignore[override]  # depends on the engine
        return self.engine.options.lora_rank is None

    # ---- sampling

    def open_session(self) -> GenerationSession:
        return VllmSession(self)

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        session = self.open_session()
        turns = session.generate(contexts, rows_per_context, uniforms_BT, options)
        return session.settle([turns.generation])[0]

    def ask(self, requests: Sequence[Request], options: SamplingOptions) -> list[Reply]:
        """Sample a turn for each request with the current weights."""
        if not self.can_score_contexts and any(one.scores_context for one in requests):
            raise ConfigurationError(
                f"{self.source!r} shares a vLLM engine with a LoRA adapter, where vLLM cannot "
                "score contexts. Set the reward's likelihood_model to reference, or use another "
                "max_model_len for a separate engine."
            )
        arguments = sampling_arguments(options, end_ids=self.end_ids, banned_ids=self._banned_ids)
        adapter = None
        if self.weights is not None:
            adapter = self.weights.send(self.engine, use_adapter=self.use_adapter)
        replies = self.engine.generate(requests, arguments, adapter=adapter)
        self.token_count.forwarded += sum(reply.num_forwarded for reply in replies)
        self.token_count.head_rows += sum(len(reply.ids) for reply in replies)
        return replies

    def rescored(self, contexts: Sequence[Sequence[int]], generation: Generation) -> Generation:
        """Return turns, one per context, with log-probabilities computed as in the losses.

        Tokens that rows share, as the turns of a conversation do, are forwarded once. Differences
        to vLLM's log-probabilities are recorded.
        """
        if self.scorer is None or not contexts:
            return generation
        # Rows that share a beginning are neighbours, so that parts repeat little.
        key: Any = contexts.__getitem__
        order = sorted(range(len(contexts)), key=key)
        width = max(map(len, contexts)) + generation.ids_BT.shape[1]
        logprobs_BT = torch.zeros(generation.mask_BT.shape)
        with torch.no_grad(), self.rescoring():
            for part in torch.split(torch.tensor(order), max(1, MAX_PADDED // width)):
                rows = pad_left([contexts[row] for row in part.tolist()], torch.device("cpu"))
                scored = self.scorer.logprobs(
                    *rows, generation.ids_BT[part], generation.mask_BT[part]
                )
                logprobs_BT[part] = scored.cpu()
        self.gap.note(generation.logprobs_BT[generation.mask_BT], logprobs_BT[generation.mask_BT])
        return Generation(generation.ids_BT, generation.mask_BT, logprobs_BT)

    def take_metrics(self) -> dict[str, float]:
        return self.gap.take()

    # ---- scoring

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        return self.token_scores(context_BC, context_mask_BC, ids_BT, mask_BT).logprobs_BT

    @property
    def hidden_size(self) -> int:
        return 0 if self.scorer is None else self.scorer.hidden_size

    def token_scores(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        needs_entropy: bool = False,
        needs_hidden: bool = False,
        distribution: SamplingDistribution | None = None,
    ) -> TokenScores:
        rows = (context_BC, context_mask_BC, ids_BT, mask_BT)
        if self.scorer is None and distribution is None and not (needs_entropy or needs_hidden):
            return TokenScores(self._scored_by_engine(rows))
        if self.scorer is not None and self.scorer.trainable and torch.is_grad_enabled():
            assert self.weights is not None
            self.weights.num_passes += 1
            self.engine.sleep()
        score = super().token_scores if self.scorer is None else self.scorer.token_scores
        return score(
            *rows, needs_entropy=needs_entropy, needs_hidden=needs_hidden, distribution=distribution
        )

    def _scored_by_engine(self, rows: TokenRows) -> Tensor:
        context_BC, context_mask_BC, ids_BT, mask_BT = rows
        before = [row[mask].tolist() for row, mask in zip(context_BC, context_mask_BC, strict=True)]
        after = [row[mask].tolist() for row, mask in zip(ids_BT, mask_BT, strict=True)]
        trie = build_trie(sequences_to_read(rows))
        self.token_count.scored += trie.num_unique
        requests = [
            scoring_request([*a, *b], self.context_window)
            for a, b in zip(before, after, strict=True)
        ]
        found_BT = torch.zeros(ids_BT.shape)
        for row, (start, reply) in enumerate(
            zip(map(len, before), self.ask(requests, SCORE_ONE), strict=True)
        ):
            assert reply.context_logprobs is not None
            logprobs = [*reply.context_logprobs, *reply.logprobs][start:]
            found_BT[row, mask_BT[row].cpu()] = torch.tensor(logprobs[: len(after[row])])
        return found_BT

    def support_mask(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> SupportMask:
        find = super().support_mask if self.scorer is None else self.scorer.support_mask
        return find(context_BC, context_mask_BC, ids_BT, mask_BT, options)

    def sampled_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> Tensor | None:
        if self.scorer is None:
            return None
        return self.scorer.sampled_logprobs(context_BC, context_mask_BC, ids_BT, mask_BT, options)

    # ---- saving

    def save(self, directory: Path) -> None:
        self._trained().save(directory)

    def restore(self, directory: Path) -> None:
        self._trained().restore(directory)

    def save_pretrained(self, directory: Path) -> None:
        self._trained().save_pretrained(directory)

    def _trained(self) -> HuggingFaceLanguageModel:
        if self.scorer is None:
            raise ModelLoadError(
                f"the frozen model {self.source!r} cannot be saved or restored: its weights are in "
                "vLLM only. Copy the files that it was loaded from."
            )
        return self.scorer


class VllmSession(GenerationSession):
    """Turns sampled by vLLM, whose prefix cache replaces our own caches.

    They are rescored all at once: a pass after each turn would repeat the turns before it.
    """

    def __init__(self, model: VllmLanguageModel) -> None:
        self.model = model
        self._contexts: list[list[Sequence[int]]] = []

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        # One request per row: with vLLM's n, siblings would not have their own seeds.
        seeds = [seed_of(row_T) for row_T in uniforms_RT]
        requests = [
            Request(
                contexts[row // rows_per_context],
                seed,
                scores_context=spans is not None and row % rows_per_context == 0,
            )
            for row, seed in enumerate(seeds)
        ]
        replies = self.model.ask(requests, options)
        generation = padded_turns(replies, options.max_new_tokens)
        self.model.token_count.generated += int(generation.mask_BT.sum())
        scores = None
        if spans is not None:
            read = zip(replies[::rows_per_context], spans, strict=True)
            scores = padded_rows([(reply.context_logprobs or [])[a:b] for reply, (a, b) in read])
        self._contexts.append([request.context for request in requests])
        return Turns(generation, scores)

    def settle(self, generations: Sequence[Generation]) -> list[Generation]:
        lengths = [len(rows) for rows in self._contexts]
        widths = [generation.ids_BT.shape[1] for generation in generations]
        columns = [
            [generation.ids_BT, generation.mask_BT, generation.logprobs_BT]
            for generation in generations
        ]
        together = [
            torch.cat([F.pad(x, (0, max(widths) - x.shape[1])) for x in column])
            for column in zip(*columns, strict=True)
        ]
        contexts = [context for rows in self._contexts for context in rows]
        generation = self.model.rescored(contexts, Generation(*together))
        parts = (
            torch.split(x, lengths)
            for x in (generation.ids_BT, generation.mask_BT, generation.logprobs_BT)
        )
        return [
            Generation(*(x[:, :width] for x in one))
            for width, *one in zip(widths, *parts, strict=True)
        ]


class LearntWeights:
    """The weights of a learning model, sent to an engine when they have changed."""

    def __init__(self, scorer: HuggingFaceLanguageModel) -> None:
        self.scorer = scorer
        self.num_passes = 0
        self._identity = object()

    @property
    def version(self) -> tuple[object, int, tuple[int, ...]]:
        """Return a value that differs whenever the weights may."""
        # Not every optimizer (fused, 8-bit) nor writes through `.data` raise a tensor's version:
        # passes with gradients are counted too.
        versions = tuple(parameter._version for parameter in self.scorer.parameters())
        return self._identity, self.num_passes, versions

    def send(self, engine: SamplingEngine, *, use_adapter: bool) -> Any:
        """Send changes to an engine; return the adapter to sample with, if any."""
        module = self.scorer.module
        if self.scorer.has_adapter:
            if not use_adapter:
                return None
            return engine.hold_adapter(self.version, lambda folder: save_weights(module, folder))

        # The engine would round them in the same way, after a transfer of twice the size.
        dtype = getattr(torch, engine.options.dtype)

        def weights() -> Iterable[tuple[str, Tensor]]:
            return ((name, one.detach().to(dtype)) for name, one in module.named_parameters())

        engine.hold_weights(self.version, weights)
        return None


def _engine_dtype(requested: str, num_parameters: int) -> str:
    """Return the precision of an engine without a scorer."""
    if requested == "fastest":
        return "bfloat16" if num_parameters >= SMALLEST_BFLOAT16_MODEL else "float32"
    return "float32" if requested == "auto" else requested


def _is_engine_of(options: EngineOptions, parameters: Any) -> bool:
    """Return whether an engine fits a model's parameters, ignoring those at their defaults."""
    fields = type(parameters).model_fields
    held = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "decode_graphs": "never" if options.enforce_eager else "always",
    }
    others = [
        name
        for name, value in held.items()
        if getattr(parameters, name) not in (fields[name].default, value)
    ]
    if others:
        logger.info(
            "%r gets a separate engine: its %s differs from that of the model that learns",
            parameters.model,
            " and ".join(others),
        )
    return not others


SUSPICIOUS_GAP = 0.1
"""Mean difference, nats per token, beyond which the engine is unlikely to have the trainer's
weights; 0.012 has been reported for bfloat16 (huggingface/trl issue 4772)."""


class SamplerGap:
    """Differences between two log-probabilities of sampled tokens, since the last reset."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._num_tokens = 0
        self._sum = self._sum_absolute = self._largest = 0.0

    def note(self, sampler_S: Tensor, trainer_S: Tensor) -> None:
        """Add tokens: log p as sampled, and as scored by the trainer, nats."""
        if len(sampler_S) == 0:
            return
        gap_S = sampler_S.double() - trainer_S.double()
        self._num_tokens += len(gap_S)
        self._sum += float(gap_S.sum())
        self._sum_absolute += float(gap_S.abs().sum())
        self._largest = max(self._largest, float(gap_S.abs().max()))

    def take(self) -> dict[str, float]:
        """Return and reset the metrics, nats per token; empty if there were no tokens.

        `kl` estimates the divergence of the sampler from the trainer: a mean over sampled tokens.
        """
        if not self._num_tokens:
            return {}
        mean = self._sum_absolute / self._num_tokens
        found = {
            "sampler_gap/mean": mean,
            "sampler_gap/largest": self._largest,
            "sampler_gap/kl": self._sum / self._num_tokens,
        }
        if mean > SUSPICIOUS_GAP:
            logger.warning(
                "the log-probabilities of sampling are %.2f nats per token from the trainer's; "
                "does the engine hold the same weights?",
                mean,
            )
        self._reset()
        return found
