"""The Hugging Face backend: models of transformers, forwarded as trees of tokens where possible.

A model of the Llama family is read by `Decoder`, which forwards each token of a tree once. Any
other causal language model goes through its own `forward` and `generate`, at the price of reading
shared tokens again.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary,
`S` scored position.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.adapters import (
    LoraParameters,
    adapter_state,
    add_adapter,
    merged_copy,
)
from nip_astra.language_models.base import (
    Drawn,
    Generation,
    GenerationSession,
    LanguageModel,
    SamplingOptions,
    TokenCount,
    TokenModel,
    TokenScores,
    register_language_model,
)
from nip_astra.language_models.drawn import DrawRule, KeptTokens
from nip_astra.language_models.plain_forward import (
    RowReader,
    autocast_to,
    generate_turns,
    layers_of,
    score_rows,
)
from nip_astra.language_models.pretrained import find_tokenizer, load_model
from nip_astra.language_models.sampling import sample_tokens
from nip_astra.language_models.saved_weights import (
    has_adapter,
    restore_weights,
    save_adapter_config,
    save_weights,
)
from nip_astra.language_models.sources import (
    computing_dtype,
    round_weights,
)
from nip_astra.language_models.special_tokens import find_banned_ids, find_end_ids
from nip_astra.language_models.tree_engine.decode_graphs import DecodeGraphs, build_fixed_steps
from nip_astra.language_models.tree_engine.decoder import Decoder, build_decoder
from nip_astra.language_models.tree_engine.sessions import CachedSession
from nip_astra.language_models.tree_engine.token_trie import build_trie
from nip_astra.language_models.tree_engine.tree_scores import (
    find_kept_tokens,
    pair_cost_of,
    score_trie,
    sequences_to_read,
)
from nip_astra.language_models.tree_engine.weights import Weights, WeightSnapshot, live_weights
from nip_astra.parameters.types import LanguageModelType

logger = logging.getLogger(__name__)

SMALLEST_RELEASED = 50_000_000
"""A frozen model of as many weights is held once, in the layout that is fastest to compute with."""


@register_language_model(LanguageModelType.HUGGINGFACE)
class HuggingFaceLanguageModel(LanguageModel):
    """A causal language model that runs in this process.

    The module is kept in eval mode always: dropout would make the log-probabilities of the policy
    and of the reference differ by noise.

    Parameters
    ----------
    is_unbridled : bool
        Any token may be drawn, special ones too, and none ends a turn by itself.
    """

    class Parameters(TokenModel.Parameters):
        """Where the model comes from and how it is held."""

        model: str
        """Hub id, folder, `.gguf` file, `scenario://file` or `package://package/file`. An adapter's
        folder, as peft writes it, is added into its base's weights."""
        base_model: str | None = None
        """What the model was before training: where the tokenizer comes from if `model` holds none,
        and the weights under an adapter; null for what the adapter names."""
        dtype: Literal["auto", "fastest", "float32", "bfloat16"] = "auto"
        """What is computed in. fastest: bfloat16 for a model that has 50 M weights or more and runs
        where bfloat16 is computed natively, else float32. auto: the same for a model that learns,
        and float32 for any other, so that a target answers exactly as published. Weights that are
        trained in full are kept in float32 either way, and rounded as they are read: mixed
        precision."""
        lora: LoraParameters | None = None
        """Train a low-rank adapter instead of the weights; the base stays as it is and serves as
        the reference, and as the target where that is the same model."""
        max_batch_tokens: int = Field(default=8192, ge=256)
        """Most positions in one forward pass without gradients, on a GPU with them too. Larger is
        faster there and takes more memory."""
        decode_graphs: DecodeGraphs = "auto"
        """Whether decoding steps are captured as CUDA graphs. auto: on a GPU, where that can be
        done; always: demanded; never. It changes speed, and log-probabilities by rounding.
        Experimental: not run on a GPU yet."""

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
        is_unbridled: bool = False,
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
        self.end_ids = find_end_ids(module.generation_config, tokenizer)
        banned_ids = find_banned_ids(tokenizer, self.end_ids, module.config.vocab_size)
        if is_unbridled:
            # Whoever asks says which tokens end a turn.
            banned_ids, self.end_ids = [], ()
        self.token_draw = TokenDraw(banned_ids, self.end_ids, device)
        self._num_parameters: int = sum(parameter.numel() for parameter in module.parameters())
        if not trainable and not self.has_adapter:
            self.module.requires_grad_(False)
        self._decoder = decoder or build_decoder(self._causal_lm)
        if self._decoder is not None:
            self.cache_bytes_per_token = self._decoder.cache_numbers_per_token * self.dtype.itemsize
        # A subclass says so itself.
        self.is_in_this_process = True
        self.can_be_forked = type(self) is HuggingFaceLanguageModel and device.type == "cpu"
        self.source: str | None = None
        self._decode_graphs = decode_graphs
        self._steps = build_fixed_steps(self._decoder, device, decode_graphs)
        self._snapshot = self._new_snapshot()
        self._load_again: Callable[[], HuggingFaceLanguageModel] | None = None
        self.scores_by_module = self._decoder is None
        """Whether tokens are scored by the module's own forward pass, as those of a model are
        whose learner knows no other."""
        self.recomputes_layers = False
        """Whether learning forgets the inside of layers, and computes it again going back."""
        self._reader: RowReader | None = None

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        load = partial(
            cls._load_whole,
            parameters,
            device=device,
            scenario_dir=scenario_dir,
            trainable=trainable,
        )
        model = load()
        is_large = model._num_parameters >= SMALLEST_RELEASED
        if not trainable and model._decoder is not None and is_large:
            model._snapshot.release()
            model._load_again = load
        return model

    @classmethod
    def _load_whole(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> HuggingFaceLanguageModel:
        """The model with the matrices of its module, which may be freed afterwards."""
        source = parameters.model, parameters.base_model, scenario_dir
        module = load_model(*source).to(device)
        # Before the weights are rounded, so that it can be checked exactly.
        decoder = build_decoder(module)
        is_full = trainable and parameters.lora is None
        dtype = computing_dtype(module, parameters.dtype, device, trainable=trainable)
        if not is_full:
            round_weights(module, dtype)
        if trainable and parameters.lora is not None:
            module = add_adapter(module, parameters.lora)
        model = cls(
            module,
            find_tokenizer(*source),
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
        # In bfloat16 a pass over single tokens and one over a tree differ by up to 0.2 nats.
        return self.dtype == torch.float32

    @property
    def has_adapter(self) -> bool:
        """Whether the module carries a LoRA adapter (of this model or of one sharing it)."""
        return has_adapter(self.module)

    @property
    def _causal_lm(self) -> Any:
        return self.module.get_base_model() if self.has_adapter else self.module

    def without_adapter(self) -> HuggingFaceLanguageModel:
        """The base model under the adapter, on the same weights."""
        twin = copy.copy(self)
        twin.use_adapter, twin.trainable, twin.token_count = False, False, TokenCount()
        twin._steps = self._steps.anew() if self._steps is not None else None
        twin._snapshot = twin._new_snapshot()
        return twin

    def base_for(self, parameters: Any) -> LanguageModel | None:
        if parameters.type_name != LanguageModelType.HUGGINGFACE:
            return None
        is_same = self.has_adapter and parameters.model == self.source
        asked = computing_dtype(self.module, parameters.dtype, self.device, trainable=False)
        if is_same and self.dtype == asked:
            twin = self.without_adapter()
            twin.max_batch_tokens = parameters.max_batch_tokens
            twin._decode_graphs = parameters.decode_graphs
            twin._steps = build_fixed_steps(twin._decoder, twin.device, twin._decode_graphs)
            twin._snapshot = twin._new_snapshot()
            return twin
        return None

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
            decode_graphs=self._decode_graphs,
        )

    def sampler_copy(self) -> HuggingFaceLanguageModel:
        return HuggingFaceLanguageModel(
            copy.deepcopy(self.module),
            self.tokenizer,
            device=self.device,
            trainable=self.trainable,
            use_adapter=self.use_adapter,
            max_batch_tokens=self.max_batch_tokens,
            dtype=self.dtype,
            decode_graphs=self._decode_graphs,
        )

    @torch.no_grad()
    def weight_copy(self) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in self.module.state_dict().items()}

    @torch.no_grad()
    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(weights)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.trainable:
            yield from (p for p in self.module.parameters() if p.requires_grad)

    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def can_be_copied(self) -> bool:  # type: ignore[override]  # depends on what was released
        # Of matrices that are laid out for one processor alone nothing can be made elsewhere.
        is_whole = not self._snapshot.is_released or self._load_again is not None
        return type(self) is HuggingFaceLanguageModel and is_whole

    def shared_parts(self) -> list[object]:
        # Of a module whose matrices were freed nothing can be made.
        shared = super().shared_parts()
        return shared if self._snapshot.is_released else [*shared, self.module]

    def to_send(self) -> HuggingFaceLanguageModel:
        if not self._snapshot.is_released:
            return self
        assert self._load_again is not None
        return self._load_again()

    # ---- sampling

    def open_session(self) -> GenerationSession:
        if self._decoder is None:
            return super().open_session()
        return CachedSession(
            self._decoder,
            self._snapshot.of(self.parameters()),
            self.token_draw.draw,
            end_ids=self.end_ids,
            token_count=self.token_count,
            max_batch_tokens=self.max_batch_tokens,
            steps=self._steps,
        )

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
        autocast = autocast_to(self.module, self.dtype)
        with adapter_state(self.module, is_on=self.use_adapter), autocast():
            said, spent = generate_turns(
                self.module,
                rows,
                uniforms_BT,
                options,
                draw=self.token_draw.draw,
                end_ids=self.end_ids,
                max_batch_tokens=self.max_batch_tokens,
            )
        self.token_count.add(spent)
        return said

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
        drawn: Drawn | None = None,
    ) -> TokenScores:
        if not mask_BT.any() and self._reader is None:
            zeros_BT = torch.zeros(ids_BT.shape, device=self.device)
            hidden = zeros_BT.new_zeros(*ids_BT.shape, self.hidden_size) if needs_hidden else None
            return TokenScores(zeros_BT, zeros_BT if needs_entropy else None, hidden)
        rows = context_BC, context_mask_BC, ids_BT, mask_BT
        needs: dict[str, Any] = {"needs_entropy": needs_entropy, "needs_hidden": needs_hidden}
        needs["rule"] = None if drawn is None else self.token_draw.rule_of(drawn, mask_BT)
        if self._reader is not None:
            # As many passes in each process that reads a part of the weights.
            found, spent = score_rows(self._reader, *rows, max_batch_tokens=None, **needs)
            self.token_count.add(spent)
            return found
        pair_cost = pair_cost_of(self._decoder, self.device)
        trie = build_trie(sequences_to_read(*rows), pair_cost=pair_cost)
        self.token_count.scored += trie.num_unique
        with nullcontext() if self.trainable else torch.no_grad():
            if self._decoder is not None and not self.scores_by_module:
                found, spent = score_trie(
                    self._decoder,
                    self._weights_for_scoring(),
                    trie,
                    *rows[1:],
                    max_batch_tokens=self.max_batch_tokens,
                    **needs,
                )
            else:
                with adapter_state(self.module, is_on=self.use_adapter):
                    recomputes = self.recomputes_layers
                    reader = RowReader(self._causal_lm, self.dtype, recomputes_layers=recomputes)
                    limit = self.max_batch_tokens
                    found, spent = score_rows(reader, *rows, max_batch_tokens=limit, **needs)
        self.token_count.add(spent)
        return found

    def recompute_layers(self) -> None:
        """Have learning forget the inside of layers, and compute it again in the backward pass.

        Raises
        ------
        ConfigurationError
            When the model does not say which its layers are.
        """
        if self._decoder is None:
            layers_of(self._causal_lm)
        else:
            self._decoder.recomputes_layers = True
        self.recomputes_layers = True

    @contextmanager
    def reading_through(self, reader: RowReader) -> Iterator[None]:
        """Score by a reader in place of the module within the block, with gradient, in one pass."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None

    def logits_of(self, hidden_NX: Tensor) -> Tensor:
        """Logits `[N, V]`, float32, of hidden states that `token_scores` gave; with gradient."""
        if self._decoder is None:
            with adapter_state(self.module, is_on=self.use_adapter):
                return self._module_head(hidden_NX).float()
        return self._weights_for_scoring().head(hidden_NX.to(self.dtype)).float()

    def _module_head(self, hidden_NX: Tensor) -> Tensor:
        with autocast_to(self._causal_lm, self.dtype)():
            head = self._causal_lm.get_output_embeddings()
            logits: Tensor = head(hidden_NX.to(head.weight.dtype))
        return logits

    def _weights_for_scoring(self) -> Weights:
        # Policy and reference always by the same path: others differ by rounding.
        if self._snapshot.is_released:
            return self._snapshot.of(())
        if self.trainable and torch.is_grad_enabled():
            # A step follows, after which the snapshot is of no use; until then it is in the way.
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
        rows = context_BC, context_mask_BC, ids_BT, mask_BT
        options = replace(options, temperature=1.0, top_k=None, top_p=1.0)
        return self.token_scores(*rows, drawn=Drawn(options)).logprobs_BT.cpu()

    @torch.no_grad()
    def kept_tokens(
        self,
        context_BC: Tensor,
        context_mask_BC: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor,
        options: SamplingOptions,
    ) -> KeptTokens:
        scores = self.token_scores(context_BC, context_mask_BC, ids_BT, mask_BT, needs_hidden=True)
        assert scores.hidden_BTX is not None
        mask_BT = mask_BT.to(self.device)
        weights = self._weights_for_scoring() if self._decoder is not None else None
        return find_kept_tokens(
            weights.head if weights is not None else self._module_head,
            scores.hidden_BTX[mask_BT].to(self.dtype),
            ids_BT.to(self.device)[mask_BT],
            self.token_draw.rule_of(Drawn(options), mask_BT),
            top_k=options.top_k,
            top_p=options.top_p,
            vocab_size=int(self.module.config.vocab_size),
        )

    # ---- saving

    def save(self, directory: Path) -> None:
        save_weights(self.module, directory)

    def save_description(self, directory: Path) -> None:
        """Write all that a folder of the model holds beside the weights."""
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
                "a frozen model was to be written, but its weights are held in the processor's own "
                "layout only. Copy the files that it was loaded from."
            )
        module = merged_copy(self.module) if self.has_adapter else self.module
        module.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


class TokenDraw:
    """Draws tokens of a model's distributions, and says by which rule tokens were drawn.

    Parameters
    ----------
    banned_ids : Sequence[int]
        Tokens that are never drawn.
    end_ids : tuple[int, ...]
        Tokens that end a turn.
    """

    def __init__(
        self, banned_ids: Sequence[int], end_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.banned_ids = torch.tensor(banned_ids, dtype=torch.long, device=device)
        self._own_end_ids = end_ids
        self._device = device
        self._end_ids: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self, logits_BV: Tensor, uniforms_B: Tensor, position: int, options: SamplingOptions
    ) -> tuple[Tensor, Tensor]:
        """Draw a token of each row; the logits are used up."""
        logprobs_BV = logits_BV.log_softmax(dim=1)
        logits_BV.index_fill_(1, self.banned_ids, float("-inf"))
        if position < options.min_new_tokens:
            logits_BV.index_fill_(1, self._ends(options), float("-inf"))
        token_B = sample_tokens(
            logits_BV,
            uniforms_B,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        return token_B, logprobs_BV.gather(1, token_B.unsqueeze(1)).squeeze(1)

    def rule_of(self, drawn: Drawn, mask_BT: Tensor) -> DrawRule:
        """The rule by which the tokens of a mask were drawn."""
        options = drawn.options
        return DrawRule(
            temperature=options.temperature,
            banned_ids=self.banned_ids,
            end_ids=self._ends(options),
            is_early_S=(mask_BT.nonzero()[:, 1] < options.min_new_tokens).to(self._device),
            kept=None if drawn.kept is None else drawn.kept.to(self._device),
        )

    def _ends(self, options: SamplingOptions) -> Tensor:
        """The end tokens on the device; making them anew each step would wait for it."""
        ids = (*self._own_end_ids, *options.end_ids)
        if ids not in self._end_ids:
            self._end_ids[ids] = torch.tensor(ids, device=self._device)
        return self._end_ids[ids]
