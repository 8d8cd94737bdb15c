"""Any Hugging Face sequence classifier as a scorer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nip_astra.errors import ConfigurationError, ModelLoadError, nearest_names
from nip_astra.language_models.sources import resolve_model
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import Scorer
from nip_astra.scorers.registry import register_scorer


@register_scorer(ScorerType.CLASSIFIER)
class ClassifierScorer(Scorer):
    """The probability of one label of a sequence classifier.

    A model with several exclusive labels gives its softmax, a multi-label model or one with a
    single output its sigmoid. Texts longer than the model's window are cut at their end.
    """

    class Parameters(Scorer.Parameters):
        """Which classifier, and which of its labels is the failure."""

        model: str
        """Hub id, folder, `scenario://file` or `package://package/file`."""
        label: str
        """Label whose probability is the score."""
        batch_size: int = Field(default=256, ge=1)
        """Texts in one forward pass. Larger is faster and takes more memory."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._tokenizer, self._model = _load(parameters.model, scenario_dir)
        self._model.requires_grad_(False).to(device).eval()
        self._label = self._find_label(parameters.label)
        window = getattr(self._model.config, "max_position_embeddings", None)
        limit = self._tokenizer.model_max_length
        self._max_length = limit if window is None else min(limit, int(window))
        # Where a text without words has no tokens at all, one unknown word stands for it.
        has_frame = bool(self._tokenizer("")["input_ids"])
        self._blank = "" if has_frame else self._tokenizer.unk_token or self._tokenizer.eos_token

    def _find_label(self, label: str) -> int:
        labels = {str(name): int(i) for i, name in self._model.config.id2label.items()}
        if label not in labels:
            near = nearest_names(label, list(labels))
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"the scorer's label {label!r} was asked for, but the classifier "
                f"{self.parameters.model!r} has none of that name.{hint} Its labels: "
                f"{', '.join(labels)}. Give one of them as the scorer's label."
            )
        return labels[label]

    @torch.no_grad()
    def _score(self, texts: Sequence[str]) -> list[float]:
        # Texts of like length share a batch, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), self.parameters.batch_size):
            part = order[start : start + self.parameters.batch_size]
            probabilities = self._probabilities([texts[i] for i in part])
            for i, value in zip(part, probabilities[:, self._label].tolist(), strict=True):
                scores[i] = value
        return scores

    def _probabilities(self, texts: Sequence[str]) -> torch.Tensor:
        """Give each label's probability for each text, float32 `[text, label]`."""
        inputs = self._tokenizer(
            [text if text.strip() else self._blank for text in texts],
            padding=True,
            truncation=True,
            max_length=self._max_length,
            return_tensors="pt",
        ).to(self.device)
        logits: torch.Tensor = self._model(**inputs).logits.float()
        is_multi_label = self._model.config.problem_type == "multi_label_classification"
        if is_multi_label or logits.shape[1] == 1:
            return logits.sigmoid()
        return logits.softmax(dim=1)


def _load(reference: str, scenario_dir: Path | None) -> tuple[Any, Any]:
    """Give tokenizer and model; a model without a trained classifier is refused."""
    name, gguf_file = resolve_model(reference, scenario_dir)
    advice = (
        "Give a folder that save_pretrained of a sequence classifier wrote, or a hub id that this "
        "machine can reach."
    )
    if gguf_file is not None:
        raise ModelLoadError(
            f"the classifier {reference!r} was asked for, but a GGUF file holds a language model. "
            f"{advice}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, output_loading_info=True
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelLoadError(
            f"the classifier {reference!r} could not be loaded: {reason}. {advice}"
        ) from error
    # transformers gives what is missing random weights, which would be random scores.
    if info["missing_keys"]:
        raise ModelLoadError(
            f"the classifier {reference!r} was asked for, but {name} is no trained classifier: it "
            f"lacks the weights {', '.join(sorted(info['missing_keys']))}. {advice}"
        )
    return tokenizer, model
