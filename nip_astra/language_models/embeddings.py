"""Text embeddings of unit length, whose inner products measure similarity.

    embedder = build_embedder(EmbedderParameters(), device=torch.device("cpu"))
    vectors_NX = embedder.embed(["hello", "good day"])

Shape suffixes: `N` text, `X` dimension, `B` text of a batch, `T` token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.sources import load_pretrained, read_limits
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.safe_text import valid_text
from nip_astra.utils.devices import resolve_device
from nip_astra.utils.ngrams import character_sequences, ngrams, normalise

CHARACTER_ORDERS = (3, 4, 5)
"""Lengths of the character n-grams of the kind "ngram"."""
NUM_NGRAM_DIMENSIONS = 1024
"""Dimensions of the kind "ngram". With fewer, hash collisions make different texts similar."""
MAX_CACHED = 10_000
"""Maximum number of cached vectors; beyond it, the oldest are dropped."""
_ADVICE = (
    "Give a folder that save_pretrained of an encoder wrote, package://name/folder, or a hub id "
    "that this machine can reach."
)


class EmbedderParameters(SubParameters):
    """Kind and model of a text embedder."""

    kind: Literal["ngram", "encoder"] = "ngram"
    """ngram: hashed counts of character n-grams; needs no weights and captures spelling, not
    meaning. encoder: the mean of a Hugging Face encoder's last hidden states over the tokens."""
    model: str | None = None
    """For the kind encoder: hub id, folder, `scenario://file` or `package://package/folder`."""
    batch_size: int = Field(default=64, ge=1)
    """Texts per batch. Larger is faster on a GPU and takes more memory."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """For the kind encoder: its device; null for the run's device."""

    @model_validator(mode="after")
    def _check_kind(self) -> EmbedderParameters:
        if self.kind == "encoder" and self.model is None:
            raise ValueError("of kind 'encoder' needs a model: a folder, a hub id or package://...")
        for name in ("model", "device"):
            if self.kind == "ngram" and getattr(self, name) is not None:
                raise ValueError(
                    f"of kind 'ngram' has no {name}; leave it out or set kind: encoder"
                )
        return self


class Embedder(ABC):
    """Embeds each text, also an empty one, as a finite vector of unit length without gradient."""

    num_dimensions: int

    def __init__(self, *, batch_size: int) -> None:
        self._batch_size = batch_size
        self._cache: dict[str, Tensor] = {}

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of texts, float32 `[N, X]` on the CPU, from a cache if possible.

        An encoder's last digits may depend on earlier calls; see `compute`.
        """
        missing = [text for text in dict.fromkeys(texts) if text not in self._cache]
        computed = dict(zip(missing, self.compute(missing), strict=True))
        vectors = [computed[text] if text in computed else self._cache[text] for text in texts]
        for text, vector in computed.items():
            # Copies: a view would keep the whole batch in memory.
            self._cache[text] = vector.clone()
        num_excess = max(0, len(self._cache) - MAX_CACHED)
        for text in list(self._cache)[:num_excess]:
            del self._cache[text]
        return torch.stack(vectors) if vectors else torch.zeros(0, self.num_dimensions)

    def compute(self, texts: Sequence[str]) -> Tensor:
        """Compute the vectors, whose digits depend on this call's texts only.

        A resumed run computes the same vectors, unlike with a cache.
        """
        if not texts:
            return torch.zeros(0, self.num_dimensions)
        # Texts of similar length share a batch, so that little padding is computed.
        distinct = sorted(set(texts), key=lambda text: (len(text), text))
        batches = []
        for start in range(0, len(distinct), self._batch_size):
            batches.append(self._vectors(distinct[start : start + self._batch_size]))
        row_by_text = {text: row for row, text in enumerate(distinct)}
        rows = [row_by_text[text] for text in texts]
        return torch.cat(batches)[rows]

    @abstractmethod
    def _vectors(self, texts: Sequence[str]) -> Tensor:
        """Hook: return float32 `[B, X]` of unit length on the CPU."""


class NgramEmbedder(Embedder):
    """Counts of character n-grams, each hashed to a dimension and a sign (arXiv:0902.2206).

    Texts are compared without case. The vector of a text is the same in every process and every
    batch.
    """

    num_dimensions = NUM_NGRAM_DIMENSIONS

    def _vectors(self, texts: Sequence[str]) -> Tensor:
        # Boundary marks distinguish letters at the ends of a text, and leave no text empty.
        marked = character_sequences([f"\x02\x02{normalise(text)}\x03" for text in texts])
        counts_BX = np.zeros((len(texts), NUM_NGRAM_DIMENSIONS))
        for grams in ngrams(marked, CHARACTER_ORDERS):
            # Different bits of a hash, so that sign and dimension are independent.
            dimension_G = (grams.keys_G >> np.uint64(33)) % np.uint64(NUM_NGRAM_DIMENSIONS)
            sign_G = 1.0 - 2.0 * (grams.keys_G & np.uint64(1))
            cell_G = grams.owner_G * NUM_NGRAM_DIMENSIONS + dimension_G.astype(np.int64)
            signed_counts = np.bincount(cell_G, sign_G, minlength=counts_BX.size)
            counts_BX += signed_counts.reshape(counts_BX.shape)
        # In a short text, opposite signs may cancel.
        is_zero_B = ~counts_BX.any(axis=1)
        counts_BX[is_zero_B, 0] = 1.0
        units_BX = counts_BX / np.linalg.norm(counts_BX, axis=1, keepdims=True)
        return torch.from_numpy(units_BX.astype(np.float32))


class EncoderEmbedder(Embedder):
    """The mean of an encoder's last hidden states over a text's tokens, in float32.

    Special tokens count as tokens, as in sentence-transformers. Texts longer than the model's
    window are truncated at the end.
    """

    def __init__(
        self, model: str, *, batch_size: int, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(batch_size=batch_size)
        self._name = model
        self._device = device
        self._tokenizer, module = load_pretrained(
            model, scenario_dir, kind="encoder", advice=_ADVICE, from_name=_from_name
        )
        self._model = module.requires_grad_(False).to(device).eval()
        self.num_dimensions = int(module.config.hidden_size)
        self._max_length, self._blank = read_limits(self._tokenizer, module)
        if self._tokenizer.pad_token is None:
            # The mask hides padding, so any token will do.
            self._tokenizer.pad_token = self._tokenizer.eos_token or self._tokenizer.unk_token

    @torch.no_grad()
    def _vectors(self, texts: Sequence[str]) -> Tensor:
        texts = [valid_text(text) if text.strip() else self._blank for text in texts]
        # Without `return_tensors`, by which tokenizers look at each number in Python.
        encoding = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self._max_length
        )
        inputs = {name: torch.tensor(rows, device=self._device) for name, rows in encoding.items()}
        hidden_BTX = self._model(**inputs).last_hidden_state.float()
        mask_BT1 = inputs["attention_mask"].unsqueeze(2)
        num_tokens_B1 = mask_BT1.sum(dim=1).clamp(min=1)
        means_BX = (hidden_BTX * mask_BT1).sum(dim=1) / num_tokens_B1
        if not means_BX.isfinite().all():
            raise ModelLoadError(
                f"the encoder {self._name!r} returned vectors that are not finite: its weights are "
                f"broken. {_ADVICE}"
            )
        return torch.nn.functional.normalize(means_BX, dim=1).cpu()


def build_embedder(
    parameters: EmbedderParameters, *, device: torch.device, scenario_dir: Path | None = None
) -> Embedder:
    """Build the embedder that the parameters describe.

    Raises `ModelLoadError` if the encoder cannot be loaded.
    """
    if parameters.kind == "ngram":
        return NgramEmbedder(batch_size=parameters.batch_size)
    assert parameters.model is not None, "validated"
    if parameters.device is not None:
        device = resolve_device(parameters.device)
    return EncoderEmbedder(
        parameters.model, batch_size=parameters.batch_size, device=device, scenario_dir=scenario_dir
    )


def _from_name(name: str) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    model, info = AutoModel.from_pretrained(
        name, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
    )
    # A pooler is not used here.
    missing = [key for key in info["missing_keys"] if "pooler" not in key]
    return tokenizer, model, {"missing_keys": missing}
