"""Any Hugging Face sequence classifier as a scorer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nip_astra.parameters.parameters_base import PlainText
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import register_scorer
from nip_astra.scorers.model_base import ModelScorer, find_label, load_pretrained

ADVICE = (
    "Give a folder that save_pretrained of a sequence classifier wrote, or a hub id that this "
    "machine can reach."
)


@register_scorer(ScorerType.CLASSIFIER)
class ClassifierScorer(ModelScorer):
    """Probability of one label of a sequence classifier.

    A model with several exclusive labels uses softmax; a multi-label model, or one with a single
    output, sigmoid. Texts longer than the context window are truncated at the end.
    """

    can_be_copied = True

    class Parameters(ModelScorer.Parameters):
        """Model and label."""

        model: str
        """Hub id, folder, `scenario://file` or `package://package/file`."""
        label: PlainText
        """Label whose probability is the score."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._tokenizer, self._model = load_pretrained(
            parameters.model,
            scenario_dir,
            kind="classifier",
            is_no="trained classifier",
            advice=ADVICE,
            from_name=_from_name,
        )
        self._model.requires_grad_(False).to(self.device).eval()
        names = {int(number): str(name) for number, name in self._model.config.id2label.items()}
        self._label = find_label(
            parameters.label,
            [names[number] for number in sorted(names)],
            of=f"the classifier {parameters.model!r}",
        )
        window = getattr(self._model.config, "max_position_embeddings", None)
        limit = self._tokenizer.model_max_length
        self._max_length = limit if window is None else min(limit, int(window))
        # Where a text without words has no tokens at all, one unknown word stands for it.
        has_frame = bool(self._tokenizer("")["input_ids"])
        self._blank = "" if has_frame else self._tokenizer.unk_token or self._tokenizer.eos_token

    def _score(self, texts: Sequence[str]) -> list[float]:
        return self._in_batches(texts, lambda part: self._probabilities(part)[:, self._label], len)

    def _probabilities(self, texts: Sequence[str]) -> torch.Tensor:
        """Each label's probability for each text, float32 `[text, label]`."""
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


def _from_name(name: str) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, trust_remote_code=False, output_loading_info=True
    )
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False), model, info
