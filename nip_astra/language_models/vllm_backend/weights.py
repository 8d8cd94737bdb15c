"""How an engine comes to sample with the weights of a model that learns elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.saved_weights import save_weights
from nip_astra.language_models.vllm_backend.engine import SamplingEngine


class LearntWeights:
    """The weights of a model that learns, of which an engine is sent what it has not.

    Attributes
    ----------
    num_passes : int
        Passes with gradients so far; whoever makes one counts it.
    """

    def __init__(self, scorer: HuggingFaceLanguageModel) -> None:
        self.scorer = scorer
        self.num_passes = 0
        self._identity = object()

    @property
    def version(self) -> tuple[object, int, tuple[int, ...]]:
        """What differs whenever the weights may."""
        # Changes in place count a tensor's version up, though not those of every optimizer (fused,
        # 8-bit) nor writes through `.data`: passes with gradients are counted too.
        versions = tuple(parameter._version for parameter in self.scorer.parameters())
        return self._identity, self.num_passes, versions

    def send(self, engine: SamplingEngine, *, use_adapter: bool) -> Any:
        """Send an engine what has changed, and give the adapter to sample with, or None."""
        module = self.scorer.module
        if self.scorer.has_adapter:
            if not use_adapter:
                return None
            return engine.hold_adapter(self.version, lambda folder: save_weights(module, folder))

        def weights() -> Iterable[tuple[str, Tensor]]:
            return ((name, weight.detach()) for name, weight in module.named_parameters())

        engine.hold_weights(self.version, weights)
        return None
