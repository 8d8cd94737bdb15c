"""Base of scorers that run a model: device, length-sorted batches, loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field

from nip_astra.errors import ConfigurationError, ModelLoadError, NipAstraError, nearest_names
from nip_astra.language_models.sources import resolve_model
from nip_astra.parameters.parameters_base import PlainText
from nip_astra.scorers.base import Scorer
from nip_astra.utils.actors import actors_for
from nip_astra.utils.devices import resolve_device

T = TypeVar("T")


class ModelScorer(Scorer):
    """A scorer that runs a model in this process, or in the run's Ray actors.

    Attributes
    ----------
    can_be_copied : bool
        Whether a pickled copy may rate in another process.
    """

    can_be_copied: ClassVar[bool] = False

    class Parameters(Scorer.Parameters):
        """Device and batch size of the model."""

        batch_size: int = Field(default=256, ge=1)
        """Texts in one forward pass. Larger is faster and takes more memory."""
        device: PlainText | None = Field(default=None, pattern=r"^(auto|cpu|cuda(:\d+)?)$")
        """Where the model runs: "cpu", "cuda", "cuda:1", "auto"; null for the run's device."""

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
        """Scores of the items, in order; each call of `rate` returns `[batch]`.

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
                rated = [rate(batch).tolist() for batch in batches]
            else:
                calls = [partial(self._rated, rate, batch) for batch in batches]
                # Longest first, so that the last call is short.
                rated = actors.call(calls[::-1], [self])[::-1]
        scores = [0.0] * len(items)
        for i, value in zip(order, chain.from_iterable(rated), strict=True):
            scores[i] = value
        return scores

    def _rated(self, rate: Callable[[list[T]], torch.Tensor], batch: list[T]) -> list[float]:
        """Rate in an actor; an exception of the model becomes the scorer's error."""
        try:
            values: list[float] = rate(batch).tolist()
        except NipAstraError:
            raise
        except Exception as error:
            raise self._error_of(len(batch), error) from error
        return values

    def to_send(self) -> ModelScorer:
        """A copy without cached verdicts, for another process."""
        sent = copy.copy(self)
        sent._verdicts = {}
        return sent


def find_label(label: str, labels: Sequence[str], *, of: str, what: str = "label") -> int:
    """Index of a label among a classifier's labels."""
    if label in labels:
        return list(labels).index(label)
    near = nearest_names(label, labels)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    plural = "categories" if what == "category" else f"{what}s"
    raise ConfigurationError(
        f"{of} has no {what} {label!r}.{hint} Its {plural}: {', '.join(labels)}."
    )


def load_pretrained(
    reference: str,
    scenario_dir: Path | None,
    *,
    kind: str,
    is_no: str,
    advice: str,
    from_name: Callable[[str], tuple[Any, Any, dict[str, Any]]],
) -> tuple[Any, Any]:
    """Tokenizer and model of a reference; a model with missing weights is refused."""
    name, gguf_file = resolve_model(reference, scenario_dir)
    if gguf_file is not None:
        raise ModelLoadError(
            f"the {kind} {reference!r} is a GGUF file, which holds a language model. {advice}"
        )
    try:
        tokenizer, model, info = from_name(name)
    except Exception as error:
        raise ModelLoadError(
            f"the {kind} {reference!r} could not be loaded: {reason_of(error)}. {advice}"
        ) from error
    # transformers initialises missing weights at random: scores would be random.
    if info["missing_keys"]:
        raise ModelLoadError(
            f"{name} is not a {is_no}: the weights {', '.join(sorted(info['missing_keys']))} are "
            f"missing. {advice}"
        )
    return tokenizer, model


def reason_of(error: Exception) -> str:
    """The first line of an error, without its full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
