"""The toxicity classifiers of the package detoxify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch

from nip_astra.errors import ModelLoadError, reason_of
from nip_astra.language_models.sources import read_limits
from nip_astra.lazy import import_extra
from nip_astra.parameters.conditions import where
from nip_astra.parameters.content import resolve_reference
from nip_astra.parameters.parameters_base import PlainText
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import register_scorer
from nip_astra.scorers.classifier import ModelScorer, find_label

CANONICAL = {
    "toxic": "toxicity",
    "severe_toxic": "severe_toxicity",
    "identity_hate": "identity_attack",
}
"""Labels of checkpoints that Detoxify renames."""
ADVICE = (
    "Give a published Detoxify checkpoint with 'config' and 'state_dict', and as config_path a "
    "folder with config.json and the tokenizer of its architecture."
)


class _Checkpoint(NamedTuple):
    architecture: dict[str, Any]
    categories: list[str]
    weights: dict[str, torch.Tensor]


@register_scorer(ScorerType.DETOXIFY)
class DetoxifyScorer(ModelScorer):
    """Probability of one category of a Detoxify model: the sigmoid of that output.

    Texts longer than the model's window are truncated at the end.
    """

    can_be_copied = True

    class Parameters(ModelScorer.Parameters):
        """Model and category."""

        variant: Annotated[
            Literal["original", "unbiased", "multilingual", "original-small", "unbiased-small"],
            where("checkpoint", None),
        ] = "original"
        """Published model to download if no `checkpoint` is given."""
        category: PlainText = "toxicity"
        """Category whose probability is the score: toxicity, severe_toxicity, obscene, threat,
        insult, identity_attack; "unbiased" and "multilingual" have sexual_explicit too."""
        checkpoint: str | None = None
        """Local checkpoint: a path, `scenario://file` or `package://package/file`."""
        config_path: str | None = None
        """Folder with config.json and tokenizer of the checkpoint's architecture; null to load
        them from the hub or its cache."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        import_extra("detoxify", "the scorer 'detoxify'", "detoxify")
        self._what = parameters.checkpoint or parameters.variant
        folder = parameters.config_path and str(
            resolve_reference(parameters.config_path, self.scenario_dir)
        )
        checkpoint = self._read(parameters.checkpoint)
        self._tokenizer, self._model = self._build(checkpoint, folder)
        self._category = find_label(
            parameters.category,
            checkpoint.categories,
            of=f"the Detoxify model {self._what!r}",
            kind="category",
        )
        self._max_length, _ = read_limits(self._tokenizer, self._model)

    def _read(self, reference: str | None) -> _Checkpoint:
        """Read the content of the checkpoint; only tensors and plain values are unpickled."""
        from detoxify.detoxify import MODEL_URLS

        try:
            if reference is None:
                content = torch.hub.load_state_dict_from_url(
                    MODEL_URLS[self.parameters.variant],
                    map_location="cpu",
                    progress=False,
                    check_hash=True,
                    weights_only=True,
                )
            else:
                path = resolve_reference(reference, self.scenario_dir)
                content = torch.load(path, map_location="cpu", weights_only=True)
            names = content["config"]["dataset"]["args"]["classes"]
            return _Checkpoint(
                dict(content["config"]["arch"]["args"]),
                [CANONICAL.get(name, name) for name in names],
                content["state_dict"],
            )
        except Exception as error:
            raise self._load_error(error) from error

    def _build(self, checkpoint: _Checkpoint, folder: str | None) -> tuple[Any, Any]:
        """Load tokenizer and model with the package's own loader.

        The loader reads the architecture by the hub id in the checkpoint, even if given a folder;
        so the folder replaces that id.
        """
        from detoxify.detoxify import get_model_and_tokenizer

        architecture = dict(checkpoint.architecture)
        if folder:
            architecture["model_type"] = folder
        try:
            model, tokenizer = get_model_and_tokenizer(
                **architecture, state_dict=checkpoint.weights
            )
        except Exception as error:
            raise self._load_error(error) from error
        lacking = sorted(dict(model.named_parameters()).keys() - checkpoint.weights.keys())
        if lacking:  # transformers gives these random weights, which would be random scores
            raise self._load_error(ValueError(f"it lacks the weights {', '.join(lacking[:4])}"))
        return tokenizer, model.requires_grad_(False).to(self.device).eval()

    def _load_error(self, error: Exception) -> ModelLoadError:
        reason = reason_of(error)
        if isinstance(error, KeyError):
            reason = f"it has no {reason}"
        return ModelLoadError(
            f"the Detoxify model {self._what!r} could not be loaded: {reason}. {ADVICE}"
        )

    def _score(self, texts: Sequence[str]) -> list[float]:
        # Not Detoxify.predict, which returns a number instead of a list for a single text.
        return self._in_batches(
            texts, lambda part: self._logits(part).sigmoid()[:, self._category], len
        )
