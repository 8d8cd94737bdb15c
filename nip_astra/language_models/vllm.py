"""The vLLM backend: vLLM samples, and the Hugging Face backend scores and learns.

Log-probabilities in a loss are never vLLM's: its kernels round differently, so the ratio of the two
is not 1 for equal weights. The difference on sampled tokens is logged.

Shape suffixes: `B` or `R` row, `C` context, `T` token of a turn or span.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
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
    derive_row_seed,
    padded_rows,
    padded_turns,
    sampling_arguments,
    scoring_request,
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
        description = describe_model(name)
        tokenizer = find_tokenizer(parameters.model, parameters.base_model, scenario_dir)
        scorer = None
        if trainable:
            scorer = HuggingFaceLanguageModel.load(
                parameters, device=device, scenario_dir=scenario_dir, trainable=True
            )
        dtype = _choose_engine_dtype(parameters.dtype, description.num_parameters)
        if scorer is not None and parameters.dtype in ("auto", "fastest"):
            dtype = "bfloat16" if scorer.dtype == torch.bfloat16 else "float32"
        has_adapter = scorer is not None and scorer.has_adapter
        window = description.context_window
        if parameters.max_model_len is not None:
            window = min(parameters.max_model_len, window)
        options = EngineOptions(
            dtype=dtype,
            max_model_len=window,
            gpu_memory_utilization=parameters.gpu_memory_utilization,
            lora_rank=parameters.lora.rank if has_adapter else None,
            can_sleep=parameters.sleep_during_updates,
            enforce_eager=parameters.decode_graphs == "never",
        )
        engine = _start_engines(name, options, parameters)
        engine.check_vocabulary(tokenizer, description.vocab_size)
        num_parameters = description.num_parameters
        if scorer is not None:
            # With the adapter.
            num_parameters = scorer.num_parameters()
        return cls(
            engine,
            tokenizer,
            scorer=scorer,
            end_ids=find_end_ids(description.generation_config, tokenizer),
            vocab_size=description.vocab_size,
            num_parameters=num_parameters,
            source=parameters.model,
            use_adapter=has_adapter,
        )

    def _twin(self, scorer: HuggingFaceLanguageModel | None) -> VllmLanguageModel:
        """Return a frozen model on the same engine, without adapter."""
        twin = copy.copy(self)
        twin.scorer = scorer
        twin.use_adapter = False
        twin.token_count = TokenCount()
        twin.gap = SamplerGap()
        twin.weights = None
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
        # Only under an adapter do the base's weights stay as they are.
        if not self.scorer.has_adapter or parameters.model != self.source:
            return None
        options = self.engine.options
        dtype = _choose_engine_dtype(parameters.dtype, self.num_parameters())
        if dtype != options.dtype or not _does_engine_fit(options, parameters):
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
        scores_contexts = any(request.scores_context for request in requests)
        if scores_contexts and not self.can_score_contexts:
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
        ids_BT, mask_BT = generation.ids_BT, generation.mask_BT
        # Rows that share a beginning are neighbours, so that parts repeat little.
        order = sorted(range(len(contexts)), key=lambda row: contexts[row])  # type: ignore[arg-type, return-value]  # lists
        longest_context = max(len(context) for context in contexts)
        rows_at_once = max(1, MAX_PADDED // (longest_context + ids_BT.shape[1]))
        logprobs_BT = torch.zeros(mask_BT.shape)
        with torch.no_grad(), self.rescoring():
            for part in torch.split(torch.tensor(order), rows_at_once):
                part_contexts = [contexts[row] for row in part.tolist()]
                context_BC, context_mask_BC = pad_left(part_contexts, torch.device("cpu"))
                part_logprobs = self.scorer.logprobs(
                    context_BC, context_mask_BC, ids_BT[part], mask_BT[part]
                )
                logprobs_BT[part] = part_logprobs.cpu()
        self.gap.note(generation.logprobs_BT[mask_BT], logprobs_BT[mask_BT])
        return Generation(ids_BT, mask_BT, logprobs_BT)

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
        needs_more = needs_entropy or needs_hidden or distribution is not None
        if self.scorer is None and not needs_more:
            return TokenScores(self._score_by_engine(rows))
        if self.scorer is not None and self.scorer.trainable and torch.is_grad_enabled():
            # An update follows, which needs the engine's memory and changes the weights.
            assert self.weights is not None
            self.weights.num_passes += 1
            self.engine.sleep()
        # Without a scorer this raises: vLLM gives log-probabilities only.
        score = super().token_scores if self.scorer is None else self.scorer.token_scores
        return score(
            *rows, needs_entropy=needs_entropy, needs_hidden=needs_hidden, distribution=distribution
        )

    def _score_by_engine(self, rows: TokenRows) -> Tensor:
        *_, ids_BT, mask_BT = rows
        trie = build_trie(sequences_to_read(rows))
        self.token_count.scored += trie.num_unique
        context_lengths: list[int] = []
        requests: list[Request] = []
        for context_C, context_mask_C, ids_T, mask_T in zip(*rows, strict=True):
            context = context_C[context_mask_C].tolist()
            continuation = ids_T[mask_T].tolist()
            context_lengths.append(len(context))
            requests.append(scoring_request([*context, *continuation], self.context_window))
        replies = self.ask(requests, SCORE_ONE)
        logprobs_BT = torch.zeros(ids_BT.shape)
        for row, (context_length, reply) in enumerate(zip(context_lengths, replies, strict=True)):
            assert reply.context_logprobs is not None
            is_scored_T = mask_BT[row].cpu()
            # The last token may have been sampled; see `scoring_request`.
            logprobs = [*reply.context_logprobs, *reply.logprobs]
            stop = context_length + int(is_scored_T.sum())
            logprobs_BT[row, is_scored_T] = torch.tensor(logprobs[context_length:stop])
        return logprobs_BT

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
        requests = []
        for row, uniforms_T in enumerate(uniforms_RT):
            context_index, sibling = divmod(row, rows_per_context)
            scores_context = spans is not None and sibling == 0
            requests.append(
                Request(contexts[context_index], derive_row_seed(uniforms_T), scores_context)
            )
        replies = self.model.ask(requests, options)
        generation = padded_turns(replies, options.max_new_tokens)
        self.model.token_count.generated += int(generation.mask_BT.sum())
        span_logprobs_CT = None
        if spans is not None:
            span_logprobs = []
            first_replies = replies[::rows_per_context]
            for reply, (start, stop) in zip(first_replies, spans, strict=True):
                span_logprobs.append((reply.context_logprobs or [])[start:stop])
            span_logprobs_CT = padded_rows(span_logprobs)
        self._contexts.append([request.context for request in requests])
        return Turns(generation, span_logprobs_CT)

    def settle(self, generations: Sequence[Generation]) -> list[Generation]:
        max_width = max((turns.ids_BT.shape[1] for turns in generations), default=0)

        def pad(x_BT: Tensor) -> Tensor:
            return F.pad(x_BT, (0, max_width - x_BT.shape[1]))

        if not generations:
            return []
        all_turns = Generation(
            torch.cat([pad(turns.ids_BT) for turns in generations]),
            torch.cat([pad(turns.mask_BT) for turns in generations]),
            torch.cat([pad(turns.logprobs_BT) for turns in generations]),
        )
        contexts = [context for call_contexts in self._contexts for context in call_contexts]
        logprobs_BT = self.model.rescored(contexts, all_turns).logprobs_BT
        settled = []
        start = 0
        for turns in generations:
            num_rows, width = turns.ids_BT.shape
            turn_logprobs_BT = logprobs_BT[start : start + num_rows, :width]
            settled.append(Generation(turns.ids_BT, turns.mask_BT, turn_logprobs_BT))
            start += num_rows
        return settled


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

        def iterate_weights() -> Iterator[tuple[str, Tensor]]:
            for name, weight in module.named_parameters():
                yield name, weight.detach().to(dtype)

        engine.hold_weights(self.version, iterate_weights)
        return None


def _start_engines(name: str, options: EngineOptions, parameters: Any) -> SamplingEngine:
    """Start the engine of this process, or the Ray actors of a run."""
    if not parameters.num_engines:
        # In every process: vLLM forms its groups with all processes of the run.
        return start_engine(name, options)
    if rank_of_process() > 0:
        # Only the first process of a run samples.
        return SamplingEngine(options)
    return start_remote_engines(
        name, options, num_engines=parameters.num_engines, num_gpus=parameters.gpus_per_engine
    )


def _choose_engine_dtype(requested: str, num_parameters: int) -> str:
    """Return the precision of an engine without a scorer."""
    if requested == "fastest":
        return "bfloat16" if num_parameters >= SMALLEST_BFLOAT16_MODEL else "float32"
    return "float32" if requested == "auto" else requested


def _does_engine_fit(options: EngineOptions, parameters: Any) -> bool:
    """Return whether an engine fits a model's parameters, ignoring those at their defaults."""
    fields = type(parameters).model_fields
    engine_values = {
        "max_model_len": options.max_model_len,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "decode_graphs": "never" if options.enforce_eager else "always",
    }
    differing = []
    for name, engine_value in engine_values.items():
        requested = getattr(parameters, name)
        if requested != fields[name].default and requested != engine_value:
            differing.append(name)
    if differing:
        logger.info(
            "%r gets a separate engine: its %s differs from that of the model that learns",
            parameters.model,
            " and ".join(differing),
        )
    return not differing


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
        metrics = {
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
        return metrics
