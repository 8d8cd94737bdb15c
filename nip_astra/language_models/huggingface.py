"""The Hugging Face backend: models of transformers, forwarded as trees of tokens where possible.

A model of the Llama family is read by `Decoder`, which forwards each token of a tree once. Any
other causal language model goes through its own `forward` and `generate`, at the price of reading
shared tokens again.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary, `N` token.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import CheckpointError, ModelLoadError
from nip_astra.language_models.adapters import LoraParameters, add_adapter, merged_copy
from nip_astra.language_models.attention import TrieAttention
from nip_astra.language_models.base import (
    Generation,
    GenerationSession,
    LanguageModel,
    SamplingOptions,
    TokenCount,
    TokenScores,
)
from nip_astra.language_models.decoder import (
    Decoder,
    Weights,
    build_decoder,
    frozen_weights,
    live_weights,
)
from nip_astra.language_models.plain_forward import generate_turns, score_rows, spread
from nip_astra.language_models.registry import register_language_model
from nip_astra.language_models.sampling import sample_tokens
from nip_astra.language_models.scoring import MAX_LOGITS, token_logprobs_and_entropy
from nip_astra.language_models.sessions import CachedSession
from nip_astra.language_models.sources import (
    DTYPES,
    gains_from_bfloat16,
    load_causal_lm,
    load_tokenizer,
    resolve_model,
)
from nip_astra.language_models.token_trie import TokenTrie, build_trie
from nip_astra.parameters.types import LanguageModelType

logger = logging.getLogger(__name__)

SMALLEST_RELEASED = 50_000_000
"""A frozen model of as many weights is held once, in the layout that is fastest to compute with."""


@register_language_model(LanguageModelType.HUGGINGFACE)
class HuggingFaceLanguageModel(LanguageModel):
    """A causal language model that runs in this process.

    The module is kept in eval mode always: dropout would make the log-probabilities of the policy
    and of the reference differ by noise.
    """

    class Parameters(LanguageModel.Parameters):
        """Where the model comes from and how it is held."""

        model: str
        """Hub id, folder, `.gguf` file, `scenario://file` or `package://package/file`."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """What is computed in. auto: bfloat16 for a model that learns, has 50 M weights or more and
        runs where bfloat16 is computed natively; else float32, so that a target answers exactly as
        published. Weights that are trained in full are kept in float32 either way."""
        lora: LoraParameters | None = None
        """Train a low-rank adapter instead of the weights; the base stays as it is and serves as
        the reference, and as the target where that is the same model."""
        max_batch_tokens: int = Field(default=8192, ge=256)
        """Most positions in one forward pass without gradients. Larger is faster on a GPU and takes
        more memory."""

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
    ) -> None:
        self.module = module.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.trainable = trainable
        self.use_adapter = use_adapter
        self.max_batch_tokens = max_batch_tokens
        self.dtype = dtype or next(module.parameters()).dtype
        self.token_count = TokenCount()
        self.context_window = int(getattr(module.config, "max_position_embeddings", 1 << 20))
        self.end_ids = _end_ids(module, tokenizer)
        self._banned_ids = torch.tensor(
            _banned_ids(tokenizer, self.end_ids, module.config.vocab_size), device=device
        )
        self._num_parameters: int = sum(parameter.numel() for parameter in module.parameters())
        if not trainable and not self.has_adapter:
            self.module.requires_grad_(False)
        self._decoder = decoder or build_decoder(self._causal_lm)
        if self._decoder is not None:
            self.cache_bytes_per_token = self._decoder.cache_numbers_per_token * self.dtype.itemsize
        self._snapshot: tuple[tuple[int, ...], Weights] | None = None
        self._is_released = False

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        name, gguf_file = resolve_model(parameters.model, scenario_dir)
        module = load_causal_lm(name, gguf_file).to(device)
        # Before the weights are rounded, so that it can be checked exactly.
        decoder = build_decoder(module)
        dtype = DTYPES.get(parameters.dtype, torch.float32)
        if parameters.dtype == "auto" and trainable and gains_from_bfloat16(module, device):
            dtype = torch.bfloat16
        is_full = trainable and parameters.lora is None
        if not is_full:
            module = module.to(dtype)
        if trainable and parameters.lora is not None:
            module = add_adapter(module, parameters.lora)
        model = cls(
            module,
            load_tokenizer(name, gguf_file),
            device=device,
            trainable=trainable,
            max_batch_tokens=parameters.max_batch_tokens,
            dtype=dtype,
            decoder=decoder,
        )
        if not trainable:
            model._release()
        return model

    @property
    def has_adapter(self) -> bool:
        """Whether the module carries a LoRA adapter (of this model or of one sharing it)."""
        return hasattr(self.module, "peft_config")

    @property
    def _causal_lm(self) -> Any:
        return self.module.get_base_model() if self.has_adapter else self.module

    def without_adapter(self) -> HuggingFaceLanguageModel:
        """Give the base model under the adapter, on the same weights."""
        twin = copy.copy(self)
        twin.use_adapter, twin.trainable, twin.token_count = False, False, TokenCount()
        twin._snapshot = None
        return twin

    def frozen_reference(self) -> HuggingFaceLanguageModel:
        if self.has_adapter:
            return self.without_adapter()
        if not self.trainable:
            return self
        return HuggingFaceLanguageModel(
            copy.deepcopy(self.module),
            self.tokenizer,
            device=self.device,
            trainable=False,
            max_batch_tokens=self.max_batch_tokens,
            dtype=self.dtype,
        )

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.trainable:
            yield from (p for p in self.module.parameters() if p.requires_grad)

    def num_parameters(self) -> int:
        return self._num_parameters

    # ---- sampling

    def open_session(self) -> GenerationSession:
        if self._decoder is None:
            return super().open_session()
        return CachedSession(
            self._decoder,
            self._weights_for_sampling(self._decoder),
            self._draw,
            end_ids=self.end_ids,
            token_count=self.token_count,
            max_batch_tokens=self.max_batch_tokens,
        )

    def _weights_for_sampling(self, decoder: Decoder) -> Weights:
        """Give a snapshot of the weights, made anew when they have changed."""
        # Every change in place counts a tensor's version up.
        versions = tuple(parameter._version for parameter in self.parameters())
        if self._snapshot is None or (self._snapshot[0] != versions and not self._is_released):
            self._snapshot = None
            weights = frozen_weights(self._causal_lm, self.dtype, use_adapter=self.use_adapter)
            self._snapshot = versions, weights
        return self._snapshot[1]

    def _release(self) -> None:
        """Keep the snapshot alone of a large model that never learns."""
        is_large = self._num_parameters >= SMALLEST_RELEASED
        if self._decoder is not None and self.device.type == "cpu" and is_large:
            self._snapshot = (
                (),
                frozen_weights(self._causal_lm, self.dtype, use_adapter=False, release=True),
            )
            self._is_released = True

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
        with self._adapter_state():
            said, spent = generate_turns(
                self.module,
                rows,
                uniforms_BT,
                options,
                draw=self._draw,
                end_ids=self.end_ids,
                max_batch_tokens=self.max_batch_tokens,
            )
        self.token_count.add(spent)
        return said

    def _draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Draw a token of each row; the logits are used up."""
        logprobs_BV = logits_BV.log_softmax(dim=1)
        logits_BV.index_fill_(1, self._banned_ids, float("-inf"))
        if position < options.min_new_tokens:
            ends = torch.tensor([*self.end_ids, *options.end_ids], device=logits_BV.device)
            logits_BV.index_fill_(1, ends, float("-inf"))
        token_B = sample_tokens(
            logits_BV,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)

    # ---- scoring

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        return self.token_scores(context_BC, context_mask_BC, ids_BT, mask_BT).logprobs_BT

    @property
    def hidden_size(self) -> int:
        return int(self.module.config.hidden_size)

    def token_scores(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        needs_entropy: bool = False,
        needs_hidden: bool = False,
    ) -> TokenScores:
        if not mask_BT.any():
            zeros_BT = torch.zeros(ids_BT.shape, device=self.device)
            hidden = zeros_BT.new_zeros(*ids_BT.shape, self.hidden_size) if needs_hidden else None
            return TokenScores(zeros_BT, zeros_BT if needs_entropy else None, hidden)
        rows = context_BC, context_mask_BC, ids_BT, mask_BT
        trie = build_trie(
            _sequences(*rows),
            pair_cost=self._decoder.pair_cost if self._decoder is not None else 0.0,
        )
        self.token_count.scored += trie.num_unique
        with nullcontext() if self.trainable else torch.no_grad():
            if self._decoder is not None:
                found = self._score_trie(
                    self._decoder, trie, *rows[1:], needs_entropy, needs_hidden
                )
            else:
                with self._adapter_state():
                    found, spent = score_rows(
                        self._causal_lm,
                        *rows,
                        max_batch_tokens=self.max_batch_tokens,
                        needs_entropy=needs_entropy,
                        needs_hidden=needs_hidden,
                    )
                self.token_count.add(spent)
        return found

    def _score_trie(
        self,
        decoder: Decoder,
        trie: TokenTrie,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        needs_entropy: bool,
        needs_hidden: bool,
    ) -> TokenScores:
        """Score all rows as one tree: what they share is forwarded once."""
        trie = trie.to(self.device)
        weights = self._weights_for_scoring(decoder)
        limit = self.max_batch_tokens if not torch.is_grad_enabled() else trie.num_tokens
        hidden_NX = torch.cat(
            [
                decoder.hidden(
                    weights, part.ids_N, part.positions_N, TrieAttention(part, weights.dtype)
                )
                for part in trie.passes(limit)
            ]
        )
        self.token_count.forwarded += trie.num_tokens
        scored_BT = mask_BT.to(self.device)
        row_S, column_S = scored_BT.nonzero(as_tuple=True)
        # The position before a token predicts it.
        before_B = context_mask_BC.sum(dim=1).to(self.device) - 1
        hidden_SX = hidden_NX[trie.nodes_SD[row_S, before_B[row_S] + column_S]]
        ids_S = ids_BT.to(self.device)[scored_BT]
        self.token_count.head_rows += len(ids_S)
        found = token_logprobs_and_entropy(hidden_SX, ids_S, weights, needs_entropy=needs_entropy)
        return spread(scored_BT, *found, hidden_SX.float() if needs_hidden else None)

    def _weights_for_scoring(self, decoder: Decoder) -> Weights:
        # Policy and reference always by the same path: others differ by rounding.
        if self._is_released:
            return self._weights_for_sampling(decoder)
        if self.trainable and torch.is_grad_enabled():
            # A step follows, after which the snapshot is of no use; until then it is in the way.
            self._snapshot = None
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
        rows = context_BC, context_mask_BC, ids_BT, mask_BT
        scores = self.token_scores(*rows, needs_hidden=True)
        assert scores.hidden_BTX is not None
        mask_BT = mask_BT.to(self.device)
        weights = self._weights_for_scoring(self._decoder) if self._decoder is not None else None
        head = weights.head if weights is not None else self._causal_lm.get_output_embeddings()
        hidden_SX = scores.hidden_BTX[mask_BT].to(self.dtype)
        is_early_S = mask_BT.nonzero()[:, 1] < options.min_new_tokens
        ends = sorted({*self.end_ids, *options.end_ids})
        size = max(1, MAX_LOGITS // int(self.module.config.vocab_size))
        never = [torch.zeros(0, device=self.device)]
        parts = zip(torch.split(hidden_SX, size), torch.split(is_early_S, size), strict=True)
        for hidden, is_early in parts:
            share_SV = head(hidden).float().softmax(dim=1)
            early_S = torch.where(is_early, share_SV[:, ends].sum(dim=1), 0.0)
            never.append(share_SV[:, self._banned_ids].sum(dim=1) + early_S)
        drawn_S = scores.logprobs_BT[mask_BT] - torch.log1p(-torch.cat(never))
        return spread(mask_BT, drawn_S, None, None).logprobs_BT.cpu()

    # ---- saving

    def save(self, directory: Path) -> None:
        # peft would otherwise look for the base model's config to see whether embeddings changed.
        options = {"save_embedding_layers": False} if self.has_adapter else {}
        self.module.save_pretrained(directory, **options)

    def restore(self, directory: Path) -> None:
        from safetensors.torch import load_file

        name = "adapter_model.safetensors" if self.has_adapter else "model.safetensors"
        try:
            state = load_file(directory / name)
            if self.has_adapter:
                from peft import set_peft_model_state_dict

                problems = set_peft_model_state_dict(self.module, state)
                faults = list(problems.unexpected_keys)
            else:
                problems = self.module.load_state_dict(state, strict=False)
                tied = set(getattr(self.module, "all_tied_weights_keys", {}) or {})
                faults = list(problems.unexpected_keys)
                faults += [key for key in problems.missing_keys if key not in tied]
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"the weights in {directory} do not fit: {error}") from error
        if faults:
            raise CheckpointError(
                f"the weights in {directory} are of another model: {', '.join(faults[:3])}. "
                "Resume with the parameters that wrote them."
            )

    def save_pretrained(self, directory: Path) -> None:
        if self._is_released:
            raise ModelLoadError(
                "a frozen model was to be written, but its weights are held in the processor's own "
                "layout only. Copy the files that it was loaded from."
            )
        module = merged_copy(self.module) if self.has_adapter else self.module
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    @contextmanager
    def _adapter_state(self) -> Iterator[None]:
        if self.has_adapter and not self.use_adapter:
            with self.module.disable_adapter():
                yield
        else:
            yield


def _sequences(
    context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
) -> list[list[int]]:
    """Give what must be read to score each row: all but its last token, which predicts nothing."""
    width = context_BC.shape[1]
    return [
        [*context[width - size :], *ids[: max(length - 1, 0)]]
        for context, size, ids, length in zip(
            context_BC.tolist(),
            context_mask_BC.sum(dim=1).tolist(),
            ids_BT.tolist(),
            mask_BT.sum(dim=1).tolist(),
            strict=True,
        )
    ]


def _end_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = getattr(module.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    found = [i for i in [*ids, tokenizer.eos_token_id] if i is not None]
    return tuple(sorted(set(found)))


def _banned_ids(tokenizer: Any, end_ids: tuple[int, ...], vocab_size: int) -> list[int]:
    """Special tokens other than the end: a model that said a role marker could forge a turn."""
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    special.update(range(len(tokenizer), vocab_size))
    return sorted(i for i in special - set(end_ids) if i < vocab_size)
