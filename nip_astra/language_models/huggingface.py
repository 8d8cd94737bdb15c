"""The Hugging Face backend: models of transformers, forwarded as trees of tokens if possible.

`Decoder` computes models of the Llama family and forwards each token of a tree once. Other causal
language models use their own `forward` and `generate`, which repeat shared tokens.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary,
`S` scored position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ModelLoadError, NonFiniteOutputError
from nip_astra.language_models.adapters import (
    LoraParameters,
    adapter_state,
    add_adapter,
    has_adapter,
    merge_adapter,
    restore_weights,
    save_adapter_config,
    save_weights,
)
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    LanguageModel,
    SamplingDistribution,
    SamplingOptions,
    TokenCount,
    TokenModel,
    TokenScores,
    register_language_model,
)
from nip_astra.language_models.batch_engine import BatchEngine, EngineLimits
from nip_astra.language_models.message_format import detect_format
from nip_astra.language_models.plain_forward import (
    RowReader,
    autocast_to,
    compute_logits,
    find_layers,
    generate_turns,
    score_rows,
)
from nip_astra.language_models.sampling import (
    ConstrainedSampler,
    SupportMask,
    find_banned_ids,
    find_end_ids,
)
from nip_astra.language_models.scoring import (
    ScoreNeeds,
    find_support,
    row_limits,
    score_trie,
    sequences_to_read,
)
from nip_astra.language_models.sequences import GenerationRequest, Progress
from nip_astra.language_models.sources import (
    computing_dtype,
    find_tokenizer,
    load_model,
    round_weights,
)
from nip_astra.language_models.structured import Grammars
from nip_astra.language_models.tree_engine.decode_graphs import DecodeGraphs, build_fixed_steps
from nip_astra.language_models.tree_engine.decoder import Decoder, build_decoder
from nip_astra.language_models.tree_engine.sessions import CachedSession
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.weights import Weights, WeightSnapshot, live_weights
from nip_astra.parameters.types import LanguageModelType

SMALLEST_RELEASED = 50_000_000
"""Size, in weights, from which frozen models are kept only in the fastest layout."""


@register_language_model(LanguageModelType.HUGGINGFACE)
class HuggingFaceLanguageModel(LanguageModel):
    """A causal language model that runs in this process.

    The module stays in eval mode: dropout would add noise to log-probabilities.

    Parameters
    ----------
    allows_any_token : bool
        Draw special tokens too, and end a turn at none unless the options name it.
    """

    class Parameters(TokenModel.Parameters):
        """Source and precision of the model."""

        model: str
        """Hub id, folder, `.gguf` file, `scenario://file` or `package://package/file`. A peft
        adapter folder is merged into its base's weights."""
        base_model: str | None = None
        """The model before training: source of the tokenizer if `model` has none, and of the
        weights under an adapter; null for the one that the adapter names."""
        dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
        """Precision. fastest: bfloat16 for a model of at least 50 M weights on hardware with native
        bfloat16, else float32. auto: the same for a model that learns, float32 for any other, so
        that a target answers exactly as published. Weights trained in full stay in float32 and are
        rounded when read (mixed precision)."""
        lora: LoraParameters | None = None
        """Train a low-rank adapter instead of the weights; the base serves as the reference, and as
        the target if that is the same model."""
        max_batch_tokens: int = Field(default=8192, ge=256)
        """Maximum positions in one forward pass without gradients (on a GPU also with). Larger is
        faster and takes more memory."""
        decode_graphs: DecodeGraphs = "auto"
        """Whether to capture decoding steps as CUDA graphs. auto: on a GPU if possible; always:
        required; never. Affects speed, and log-probabilities by rounding."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        device: torch.device,
        trainable: bool,
        use_adapter: bool = True,
        max_batch_tokens: int = 8192,
        dtype: torch.dtype | None = None,
        decoder: Decoder | None = None,
        decode_graphs: DecodeGraphs = "auto",
        allows_any_token: bool = False,
    ) -> None:
        self.module = module.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.trainable = trainable
        self.use_adapter = use_adapter
        self.max_batch_tokens = max_batch_tokens
        self.dtype = dtype or next(module.parameters()).dtype
        self.token_count = TokenCount()
        # Of the language model, if the module also reads images.
        self.config = module.config.get_text_config()
        self.context_window = int(getattr(self.config, "max_position_embeddings", 1 << 20))
        self.end_ids = find_end_ids(module.generation_config, tokenizer)
        kept_ids = (*self.end_ids, *detect_format(tokenizer).shown_ids())
        banned_ids = find_banned_ids(tokenizer, kept_ids, self.config.vocab_size)
        if allows_any_token:
            banned_ids, self.end_ids = [], ()
        self.token_sampler = ConstrainedSampler(banned_ids, self.end_ids, device)
        self._num_parameters: int = sum(parameter.numel() for parameter in module.parameters())
        if not trainable and not self.has_adapter:
            # An adapter's module belongs to the model that trains it.
            self.module.requires_grad_(False)
        self._decoder = decoder or build_decoder(self._causal_lm)
        if self._decoder is not None:
            self.cache_bytes_per_token = self._decoder.cache_numbers_per_token * self.dtype.itemsize
        # Subclasses must opt in.
        self.is_in_this_process = True
        self.can_be_forked = type(self) is HuggingFaceLanguageModel and device.type == "cpu"
        self.source: str | None = None
        self._decode_graphs = decode_graphs
        self._steps = build_fixed_steps(self._decoder, device, decode_graphs)
        self._snapshot = self._new_snapshot()
        self._reload: Callable[[], HuggingFaceLanguageModel] | None = None
        self.scores_by_module = self._decoder is None
        """Whether the module's own forward pass scores tokens."""
        self.recomputes_layers = False
        """Whether training recomputes activations of layers in the backward pass."""
        self._reader: RowReader | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        load = partial(
            cls._load_with_module,
            parameters,
            device=device,
            scenario_dir=scenario_dir,
            trainable=trainable,
        )
        model = load()
        is_large = model._num_parameters >= SMALLEST_RELEASED
        if not trainable and model._decoder is not None and is_large:
            # Module and snapshot together would take twice the memory.
            model._snapshot.release()
            model._reload = load
        return model

    @classmethod
    def _load_with_module(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        """Load the model with its module, whose matrices may be freed afterwards."""
        module = load_model(parameters.model, parameters.base_model, scenario_dir).to(device)
        # Before rounding, so that its exactness can be checked.
        decoder = build_decoder(module)
        dtype = computing_dtype(module, parameters.dtype, device, trainable=trainable)
        is_trained_in_full = trainable and parameters.lora is None
        if not is_trained_in_full:
            # Weights under an optimizer stay in float32: its updates are smaller than the
            # distance of two bfloat16 numbers.
            round_weights(module, dtype)
        if trainable and parameters.lora is not None:
            module = add_adapter(module, parameters.lora)
        model = cls(
            module,
            find_tokenizer(parameters.model, parameters.base_model, scenario_dir),
            device=device,
            trainable=trainable,
            max_batch_tokens=parameters.max_batch_tokens,
            dtype=dtype,
            decoder=decoder,
            decode_graphs=parameters.decode_graphs,
        )
        model.source = parameters.model
        return model

    @property
    def samples_as_it_scores(self) -> bool:
        # In bfloat16, decoding and tree passes differ by up to 0.2 nats.
        return self.dtype == torch.float32

    @property
    def has_adapter(self) -> bool:
        """Whether the module has a LoRA adapter, of this model or of one sharing the module."""
        return has_adapter(self.module)

    @property
    def _causal_lm(self) -> Any:
        return self.module.get_base_model() if self.has_adapter else self.module

    def without_adapter(self) -> HuggingFaceLanguageModel:
        """Return the base model under the adapter, on the same weights."""
        twin = copy.copy(self)
        twin.use_adapter = False
        twin.trainable = False
        twin.token_count = TokenCount()
        # Captured steps and snapshots are of one set of weights.
        twin._steps = self._steps.copy_uncaptured() if self._steps is not None else None
        twin._snapshot = twin._new_snapshot()
        return twin

    def base_for(self, parameters: Any) -> LanguageModel | None:
        if parameters.type_name != LanguageModelType.HUGGINGFACE:
            return None
        # Only under an adapter do the base's weights stay as they are.
        if not self.has_adapter or parameters.model != self.source:
            return None
        dtype = computing_dtype(self.module, parameters.dtype, self.device, trainable=False)
        if self.dtype != dtype:
            return None
        twin = self.without_adapter()
        twin.max_batch_tokens = parameters.max_batch_tokens
        twin._decode_graphs = parameters.decode_graphs
        twin._steps = build_fixed_steps(twin._decoder, twin.device, twin._decode_graphs)
        twin._snapshot = twin._new_snapshot()
        return twin

    def frozen_reference(self) -> HuggingFaceLanguageModel:
        if self.has_adapter:
            return self.without_adapter()
        return self._copy(trainable=False) if self.trainable else self

    def sampler_copy(self) -> HuggingFaceLanguageModel:
        return self._copy(trainable=self.trainable)

    def _copy(self, *, trainable: bool) -> HuggingFaceLanguageModel:
        return HuggingFaceLanguageModel(
            copy.deepcopy(self.module),
            self.tokenizer,
            device=self.device,
            trainable=trainable,
            use_adapter=self.use_adapter,
            max_batch_tokens=self.max_batch_tokens,
            dtype=self.dtype,
            decode_graphs=self._decode_graphs,
        )

    @torch.no_grad()
    def weight_copy(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.module.state_dict().items()}

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(weights)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if not self.trainable:
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                yield parameter

    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def can_be_copied(self) -> bool:  # type: ignore[override]  # depends on the released parts
        # Matrices in one processor's layout cannot be moved.
        is_loadable = not self._snapshot.is_released or self._reload is not None
        return type(self) is HuggingFaceLanguageModel and is_loadable

    def shared_parts(self) -> list[object]:
        shared = super().shared_parts()
        return shared if self._snapshot.is_released else [*shared, self.module]

    def to_send(self) -> HuggingFaceLanguageModel:
        if not self._snapshot.is_released:
            return self
        assert self._reload is not None
        return self._reload()

    # ---- sampling

    def open_session(self) -> GenerationSession:
        if self._decoder is None:
            return super().open_session()
        return CachedSession(
            self._decoder,
            self._snapshot.update(self.parameters()),
            self.token_sampler.draw,
            end_ids=self.end_ids,
            token_count=self.token_count,
            max_batch_tokens=self.max_batch_tokens,
            steps=self._steps,
        )

    @cached_property
    def grammars(self) -> Grammars:
        if self._decoder is None:
            return super().grammars
        return Grammars(self.tokenizer, self.end_ids, self.config.vocab_size)

    def complete(
        self, requests: Sequence[GenerationRequest], *, max_rows: int
    ) -> list[list[Progress]]:
        if self._decoder is None:
            return super().complete(requests, max_rows=max_rows)
        engine = BatchEngine(
            self._decoder,
            self._snapshot.update(self.parameters()),
            self.tokenizer,
            end_ids=self.end_ids,
            banned_ids=self.token_sampler.banned_ids.tolist(),
            limits=EngineLimits(max_rows=max_rows),
        )
        if any(request.grammar is not None for request in requests):
            # Compiled once for the model, not once for each engine.
            engine.grammars = self.grammars
        results = engine.run(requests)
        self.token_count.add(engine.token_count)
        for progress in chain.from_iterable(results):
            if progress.finish_reason == "error" and not progress.is_request_fault:
                raise NonFiniteOutputError(f"the model {self.source}: {progress.error}")
        return results

    def _new_snapshot(self) -> WeightSnapshot:
        return WeightSnapshot(
            self._causal_lm,
            self.dtype,
            use_adapter=self.use_adapter,
            is_overwritten=self._steps is not None,
        )

    @torch.no_grad()
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        if self._decoder is not None:
            session = self.open_session()
            return session.generate(contexts, rows_per_context, uniforms_BT, options).generation
        rows = [context for context in contexts for _ in range(rows_per_context)]
        with self._module_context():
            generation, spent = generate_turns(
                self.module,
                rows,
                uniforms_BT,
                options,
                draw=self.token_sampler.draw,
                end_ids=self.end_ids,
                max_batch_tokens=self.max_batch_tokens,
            )
        self.token_count.add(spent)
        return generation

    @contextmanager
    def _module_context(self) -> Iterator[None]:
        """Let the module compute as this model does: with or without adapter, in its precision."""
        autocast = autocast_to(self._causal_lm, self.dtype)
        with adapter_state(self.module, is_on=self.use_adapter), autocast():
            yield

    # ---- scoring

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        return self.token_scores(context_BC, context_mask_BC, ids_BT, mask_BT).logprobs_BT

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

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
        if not mask_BT.any() and self._reader is None:
            # Nothing is forwarded.
            zeros_BT = torch.zeros(ids_BT.shape, device=self.device)
            hidden_BTX = None
            if needs_hidden:
                hidden_BTX = zeros_BT.new_zeros(*ids_BT.shape, self.hidden_size)
            return TokenScores(zeros_BT, zeros_BT if needs_entropy else None, hidden_BTX)
        transform = None
        if distribution is not None:
            transform = self.token_sampler.transform(distribution, mask_BT)
        needs = ScoreNeeds(needs_entropy, needs_hidden, transform)
        if self._reader is not None:
            # One pass, as in every process that holds a part of the weights.
            scores, spent = score_rows(self._reader, rows, needs, max_batch_tokens=None)
            self.token_count.add(spent)
            return scores
        limits = row_limits(self._decoder, self.device, self.dtype)
        # Also without a decoder: its unique tokens are counted as the minimum of work.
        trie = build_trie(sequences_to_read(rows), **limits)
        self.token_count.scored += trie.num_unique
        with nullcontext() if self.trainable else torch.no_grad():
            if self._decoder is not None and not self.scores_by_module:
                scores, spent = score_trie(
                    self._decoder,
                    self._weights_for_scoring(),
                    trie,
                    rows,
                    needs,
                    max_batch_tokens=self.max_batch_tokens,
                )
            else:
                reader = RowReader(
                    self._causal_lm, self.dtype, recomputes_layers=self.recomputes_layers
                )
                with adapter_state(self.module, is_on=self.use_adapter):
                    scores, spent = score_rows(
                        reader, rows, needs, max_batch_tokens=self.max_batch_tokens
                    )
        self.token_count.add(spent)
        return scores

    def recompute_layers(self) -> None:
        """Recompute activations of layers in the backward pass, to save memory."""
        if self._decoder is None:
            # Raises now, rather than in the first step, if the layers are unknown.
            find_layers(self._causal_lm)
        else:
            self._decoder.recomputes_layers = True
        self.recomputes_layers = True

    @contextmanager
    def reading_through(self, reader: RowReader) -> Iterator[None]:
        """Score through `reader` instead of the module, in one pass, within the block."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None

    def compute_logits(self, hidden_NX: Tensor) -> Tensor:
        """Return logits `[N, V]`, float32, of hidden states from `token_scores`; gradients flow."""
        head = self._select_head()
        return head(hidden_NX.to(self.dtype)).float()

    def _select_head(self) -> Callable[[Tensor], Tensor]:
        """Return the function from hidden states to logits."""
        if self._decoder is not None:
            return self._weights_for_scoring().head

        def apply_module_head(hidden_NX: Tensor) -> Tensor:
            # A pass of one token, before whose head the hidden states are put in place of its own:
            # the module may scale or cap logits after the head.
            some_token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with self._module_context():
                _, logits_NV = compute_logits(self._causal_lm, hidden_NX.to, input_ids=some_token)
            return logits_NV

        return apply_module_head

    def _weights_for_scoring(self) -> Weights:
        # Policy and reference by the same path, or they would differ by rounding.
        if self._snapshot.is_released:
            return self._snapshot.update(())
        if self.trainable and torch.is_grad_enabled():
            # The step that follows makes the snapshot obsolete; free its memory now.
            self._snapshot.make_room()
        return live_weights(self._causal_lm, self.dtype, use_adapter=self.use_adapter)

    @torch.no_grad()
    def sampled_logprobs(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> Tensor | None:
        untruncated = replace(options, temperature=1.0, top_k=None, top_p=1.0)
        scores = self.token_scores(
            context_BC,
            context_mask_BC,
            ids_BT,
            mask_BT,
            distribution=SamplingDistribution(untruncated),
        )
        return scores.logprobs_BT.cpu()

    @torch.no_grad()
    def support_mask(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> SupportMask:
        scores = self.token_scores(context_BC, context_mask_BC, ids_BT, mask_BT, needs_hidden=True)
        assert scores.hidden_BTX is not None
        mask_BT = mask_BT.to(self.device)
        hidden_SX = scores.hidden_BTX[mask_BT].to(self.dtype)
        ids_S = ids_BT.to(self.device)[mask_BT]
        transform = self.token_sampler.transform(SamplingDistribution(options), mask_BT)
        vocab_size = int(self.config.vocab_size)
        return find_support(self._select_head(), hidden_SX, ids_S, transform, options, vocab_size)

    # ---- saving

    def save(self, directory: Path) -> None:
        save_weights(self.module, directory)

    def save_description(self, directory: Path) -> None:
        """Write the model's files except its weights."""
        if self.has_adapter:
            save_adapter_config(self.module, directory)
            return
        self.module.config.save_pretrained(directory)
        if self.module.generation_config is not None:
            self.module.generation_config.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def restore(self, directory: Path) -> None:
        restore_weights(self.module, directory)

    def save_pretrained(self, directory: Path) -> None:
        if self._snapshot.is_released:
            raise ModelLoadError(
                "cannot write a frozen model that is kept in the processor's layout only. Copy the "
                "files that it was loaded from."
            )
        # Merging changes a module, so a copy is merged.
        module = merge_adapter(copy.deepcopy(self.module)) if self.has_adapter else self.module
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
