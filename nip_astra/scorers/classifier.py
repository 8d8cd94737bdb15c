"""Base of scorers that run a model, and the scorer of any sequence classifier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field

from nip_astra.errors import NipAstraError, UnknownNameError
from nip_astra.language_models.sources import load_pretrained, read_limits
from nip_astra.parameters.parameters_base import PlainText
from nip_astra.parameters.types import ScorerType
from nip_astra.progress import count_requests
from nip_astra.scorers.base import Scorer, register_scorer
from nip_astra.utils.actors import actors_for
from nip_astra.utils.devices import resolve_device

T = TypeVar("T")


class ModelScorer(Scorer):
    """A scorer that runs a model in this process, or in the run's Ray actors."""

    can_be_copied: ClassVar[bool] = False
    """Whether a pickled copy may rate in another process."""
    _tokenizer: Any
    _model: Any
    _max_length: int

    class Parameters(Scorer.Parameters):
        """Device and batch size of the model."""

        batch_size: int = Field(default=256, ge=1)
        """Texts in one forward pass. Larger is faster and takes more memory."""
        device: PlainText | None = Field(default=None, pattern=r"^(auto|cpu|cuda(:\d+)?)$")
        """Device of the model: "cpu", "cuda", "cuda:1", "auto"; null for the run's device."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        if parameters.device is not None:
            device = resolve_device(parameters.device)
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)

    def _in_batches(
        self,
        items: Sequence[T],
        rate: Callable[[list[T]], torch.Tensor],
        length: Callable[[T], int],
    ) -> list[float]:
        """Return scores of the items, in order; each call of `rate` returns `[batch]`.

        Batches are distributed over actors; their composition depends on the items alone.
        """
        # Sorted by length, to keep padding small.
        order = sorted(range(len(items)), key=lambda i: length(items[i]))
        size = self.parameters.batch_size
        batches = [
            [items[i] for i in order[start : start + size]] for start in range(0, len(order), size)
        ]
        actors = actors_for(self.device) if self.can_be_copied and len(batches) > 1 else None
        with torch.no_grad():
            if actors is None:
                rated = []
                for batch in batches:
                    rated.append(rate(batch).tolist())
                    count_requests(len(batch))
            else:
                calls = [partial(self._rated, rate, batch) for batch in batches]
                # Longest first, so that the last call is short.
                rated = actors.call(calls[::-1], [self])[::-1]
        scores = [0.0] * len(items)
        for i, value in zip(order, chain.from_iterable(rated), strict=True):
            scores[i] = value
        return scores

    def _rated(self, rate: Callable[[list[T]], torch.Tensor], batch: list[T]) -> list[float]:
        """Rate in an actor; convert an exception of the model to the scorer's error."""
        try:
            values: list[float] = rate(batch).tolist()
        except NipAstraError:
            raise
        except Exception as error:
            raise self._error_of(len(batch), error) from error
        return values

    def _logits(self, texts: Sequence[str]) -> torch.Tensor:
        """Return logits of texts truncated to `_max_length`, float32 `[text, label]`."""
        # Without `return_tensors`, by which tokenizers look at each number in Python.
        rows = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_length
        )
        inputs = {name: torch.tensor(ids, device=self.device) for name, ids in rows.items()}
        logits: torch.Tensor = self._model(**inputs).logits.float()
        return logits

    def to_send(self) -> ModelScorer:
        """Return a copy without cached verdicts, for another process."""
        sent = copy.copy(self)
        sent._verdicts = {}
        return sent


def find_label(label: str, labels: Sequence[str], *, of: str, kind: str = "label") -> int:
    """Return the index of a label among a classifier's labels."""
    if label not in labels:
        raise UnknownNameError(kind, label, labels, f"They are those of {of}.")
    return list(labels).index(label)


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

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._tokenizer, self._model = load_pretrained(
            parameters.model,
            self.scenario_dir,
            kind="classifier",
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
        self._max_length, self._blank = read_limits(self._tokenizer, self._model)

    def _score(self, texts: Sequence[str]) -> list[float]:
        return self._in_batches(texts, lambda part: self._probabilities(part)[:, self._label], len)

    def _probabilities(self, texts: Sequence[str]) -> torch.Tensor:
        """Return each label's probability for each text, float32 `[text, label]`."""
        logits = self._logits([text if text.strip() else self._blank for text in texts])
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
