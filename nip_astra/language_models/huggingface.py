"""The Hugging Face backend: an own decode loop over the model and cache classes of transformers.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from nip_astra.errors import CheckpointError
from nip_astra.language_models.adapters import LoraParameters, add_adapter, merged_copy
from nip_astra.language_models.base import (
    Generation,
    LanguageModel,
    SamplingOptions,
    TokenCount,
    pad_left,
)
from nip_astra.language_models.registry import register_language_model
from nip_astra.language_models.sampling import sample_tokens
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer, resolve_model
from nip_astra.parameters.types import LanguageModelType


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
        """Type of frozen weights. auto: bfloat16 for a model of 50 M weights or more where the
        processor computes with it natively. Weights that are trained in full stay float32."""
        lora: LoraParameters | None = None
        """Train a low-rank adapter instead of the weights; the base stays as it is and serves as
        the reference, and as the target where that is the same model."""
        max_batch_tokens: int = Field(default=65_536, ge=256)
        """Most positions in one forward pass. Larger is faster and takes more memory."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        device: torch.device,
        trainable: bool,
        use_adapter: bool = True,
        max_batch_tokens: int = 65_536,
    ) -> None:
        self.module = module.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.trainable = trainable
        self.use_adapter = use_adapter
        self.max_batch_tokens = max_batch_tokens
        self.token_count = TokenCount()
        self.context_window = int(getattr(module.config, "max_position_embeddings", 1 << 20))
        self.end_ids = _end_ids(module, tokenizer)
        self._banned_ids = _banned_ids(tokenizer, self.end_ids, module.config.vocab_size)
        if not trainable and not self.has_adapter:
            self.module.requires_grad_(False)

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        name, gguf_file = resolve_model(parameters.model, scenario_dir)
        is_full = trainable and parameters.lora is None
        module = load_causal_lm(name, gguf_file, "float32" if is_full else parameters.dtype)
        if trainable and parameters.lora is not None:
            module = add_adapter(module, parameters.lora)
        return cls(
            module,
            load_tokenizer(name, gguf_file),
            device=device,
            trainable=trainable,
            max_batch_tokens=parameters.max_batch_tokens,
        )

    @property
    def has_adapter(self) -> bool:
        """Whether the module carries a LoRA adapter (of this model or of one sharing it)."""
        return hasattr(self.module, "peft_config")

    def without_adapter(self) -> HuggingFaceLanguageModel:
        """Give the base model under the adapter, on the same weights."""
        twin = copy.copy(self)
        twin.use_adapter, twin.trainable, twin.token_count = False, False, TokenCount()
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
        )

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.trainable:
            yield from (p for p in self.module.parameters() if p.requires_grad)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @torch.no_grad()
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        num_rows, width = len(contexts) * rows_per_context, options.max_new_tokens
        ids_BT = torch.zeros(num_rows, width, dtype=torch.long)
        mask_BT = torch.zeros(num_rows, width, dtype=torch.bool)
        logprobs_BT = torch.zeros(num_rows, width)
        lengths = [len(context) + width for context in contexts]
        for part in self._parts(lengths, rows_per_context):
            rows = torch.cat([torch.arange(rows_per_context) + i * rows_per_context for i in part])
            with self._adapter_state():
                found = self._decode(
                    [contexts[i] for i in part], rows_per_context, uniforms_BT[rows], options
                )
            for whole, piece in zip((ids_BT, mask_BT, logprobs_BT), found, strict=True):
                whole[rows] = piece.cpu()
        self.token_count.generated += int(mask_BT.sum())
        return Generation(ids_BT, mask_BT, logprobs_BT)

    def _decode(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prefill each context once, then decode all rows; siblings start from one cache."""
        context_BC, context_mask = pad_left(contexts, self.device)
        # The window bounds context + continuation, so the mask can be made whole once.
        cache = DynamicCache(config=self.module.config)
        logits_BV = self._next_logits(context_BC, context_mask, cache)
        rows = torch.arange(len(contexts), device=self.device).repeat_interleave(rows_per_context)
        if rows_per_context > 1:
            cache.batch_select_indices(rows)
        logits_BV, mask_BL = logits_BV[rows], context_mask[rows]
        uniforms_TB = uniforms_BT.to(self.device).T
        alive_B = torch.ones(len(rows), dtype=torch.bool, device=self.device)
        end_ids = torch.tensor([*self.end_ids, *options.end_ids], device=self.device)
        tokens, alive, logprobs = [], [], []
        for position in range(options.max_new_tokens):
            token_B, logprob_B = self._draw(logits_BV, uniforms_TB[position], position, options)
            tokens.append(token_B.masked_fill(~alive_B, 0))
            logprobs.append(logprob_B.masked_fill(~alive_B, 0.0))
            alive.append(alive_B)
            alive_B = alive_B & ~torch.isin(token_B, end_ids)
            if position + 1 == options.max_new_tokens or not alive_B.any():
                break
            mask_BL = torch.cat([mask_BL, alive[-1].unsqueeze(1)], dim=1)
            logits_BV = self._next_logits(tokens[-1].unsqueeze(1), mask_BL, cache)
        padding = options.max_new_tokens - len(tokens)
        stacked = (torch.stack(tokens, 1), torch.stack(alive, 1), torch.stack(logprobs, 1))
        ids, mask, logp = (torch.nn.functional.pad(x, (0, padding)) for x in stacked)
        return ids, mask, logp

    def _draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        allowed = logits_BV.clone()
        allowed[:, self._banned_ids] = float("-inf")
        if position < options.min_new_tokens:
            allowed[:, [*self.end_ids, *options.end_ids]] = float("-inf")
        token_B = sample_tokens(
            allowed,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        chosen_B = logits_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)
        return token_B, chosen_B - logits_BV.logsumexp(dim=1)

    def _next_logits(self, ids: Tensor, mask_BL: Tensor, cache: DynamicCache) -> Tensor:
        self.token_count.forwarded += ids.numel()
        positions = (mask_BL.long().cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self.module(
            input_ids=ids,
            attention_mask=mask_BL.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV

    def logprobs(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        widths = context_mask_BC.sum(dim=1).tolist()
        pieces, order = [], []
        with self._adapter_state(), nullcontext() if self.trainable else torch.no_grad():
            for part in self._parts([width + ids_BT.shape[1] for width in widths], 1):
                # Columns of padding that no row of this part needs are cut off.
                start = context_BC.shape[1] - max(widths[i] for i in part)
                pieces.append(
                    self._score(
                        context_BC[part, start:],
                        context_mask_BC[part, start:],
                        ids_BT[part],
                        mask_BT[part],
                    )
                )
                order += part
        if not pieces:
            return torch.zeros(ids_BT.shape)
        return torch.cat(pieces)[torch.tensor(order).argsort()]

    def _score(
        self, context_BC: Tensor, context_mask_BC: Tensor, ids_BT: Tensor, mask_BT: Tensor
    ) -> Tensor:
        """Score one batch: the head is applied to the scored positions only."""
        ids = torch.cat([context_BC, ids_BT], dim=1).to(self.device)
        mask = torch.cat([context_mask_BC, mask_BT], dim=1).to(self.device)
        self.token_count.forwarded += ids.numel()
        scored_BT = mask_BT.to(self.device)
        base = self.module.get_base_model() if self.has_adapter else self.module
        hidden = base.base_model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp_(min=0),
            use_cache=False,
        ).last_hidden_state
        # The position before a token predicts it.
        before_BTH = hidden[:, context_BC.shape[1] - 1 : -1]
        logits_NV = base.get_output_embeddings()(before_BTH[scored_BT]).float()
        tokens_N = ids_BT.to(self.device)[scored_BT]
        chosen_N = logits_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
        logprobs_N = chosen_N - logits_NV.logsumexp(dim=1)
        return torch.zeros(ids_BT.shape, device=self.device, dtype=logprobs_N.dtype).masked_scatter(
            scored_BT, logprobs_N
        )

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
        module = merged_copy(self.module) if self.has_adapter else self.module
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    def _parts(self, lengths: Sequence[int], rows_each: int) -> Iterator[list[int]]:
        """Split rows, longest first, into batches within the token budget."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        start = 0
        while start < len(order):
            per_context = lengths[order[start]] * rows_each
            size = max(1, self.max_batch_tokens // max(1, per_context))
            yield sorted(order[start : start + size])
            start += size

    @contextmanager
    def _adapter_state(self) -> Iterator[None]:
        if self.has_adapter and not self.use_adapter:
            with self.module.disable_adapter():
                yield
        else:
            yield


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
