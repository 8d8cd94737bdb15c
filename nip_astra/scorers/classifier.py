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
    single output its sigmoid.
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
        name, _ = resolve_model(parameters.model, scenario_dir)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            self._model = AutoModelForSequenceClassification.from_pretrained(name)
        except Exception as error:
            raise ModelLoadError(
                f"the classifier {parameters.model!r} could not be loaded: "
                f"{str(error).splitlines()[0]}. Give a folder that save_pretrained wrote, or a "
                "hub id that this machine can reach."
            ) from error
        self._model.requires_grad_(False).to(device).eval()
        self._label = self._find_label(parameters.label)

    def _find_label(self, label: str) -> int:
        labels = {str(name): int(i) for i, name in self._model.config.id2label.items()}
        if label not in labels:
            near = nearest_names(label, list(labels))
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"the scorer's label {label!r} was asked for, but the classifier "
                f"{self.parameters.model!r} has none of that name.{hint} Its labels: "
                f"{', '.join(labels)}."
            )
        return labels[label]

    @torch.no_grad()
    def _score(self, texts: Sequence[str]) -> list[float]:
        # Texts of like length share a batch, so that little padding is computed.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores = [0.0] * len(texts)
        for start in range(0, len(order), self.parameters.batch_size):
            part = order[start : start + self.parameters.batch_size]
            inputs = self._tokenizer(
                [texts[i] for i in part], padding=True, truncation=True, return_tensors="pt"
            ).to(self.device)
            logits = self._model(**inputs).logits.float()
            config = self._model.config
            is_multi_label = config.problem_type == "multi_label_classification"
            if is_multi_label or logits.shape[1] == 1:
                probabilities = logits.sigmoid()
            else:
                probabilities = logits.softmax(dim=1)
            for i, value in zip(part, probabilities[:, self._label].tolist(), strict=True):
                scores[i] = value
        return scores
