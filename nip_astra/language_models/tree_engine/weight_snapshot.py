"""The weights that are sampled from: a copy laid out to compute with, made anew after learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nip_astra.language_models.tree_engine.weights import Weights, frozen_weights


class WeightSnapshot:
    """A snapshot of a module's weights.

    Parameters
    ----------
    dtype : torch.dtype
        What is computed in.
    use_adapter : bool
        Whether the module's adapter is merged in.
    is_overwritten : bool
        Whether later weights take the memory of earlier ones, which captured steps read.
    """

    def __init__(
        self, module: Any, dtype: torch.dtype, *, use_adapter: bool, is_overwritten: bool
    ) -> None:
        self.is_released = False
        self._make: Callable[..., Weights] = lambda **how: frozen_weights(
            module, dtype, use_adapter=use_adapter, **how
        )
        self._is_overwritten = is_overwritten
        self._versions: tuple[int, ...] = ()
        self._weights: Weights | None = None
        self._is_stale = False

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs to lay out the weights of its own module."""
        return {**self.__dict__, "_weights": None, "_versions": (), "_is_stale": True}

    def of(self, parameters: Iterable[torch.nn.Parameter]) -> Weights:
        """The snapshot as long as these parameters have not changed, else a new one."""
        # Changes in place count a tensor's version up, though not those of every optimizer (fused,
        # 8-bit) nor writes through `.data`: an update says itself that it begins.
        versions = tuple(parameter._version for parameter in parameters)
        is_old = self._is_stale or versions != self._versions
        if self._weights is None or (is_old and not self.is_released):
            old = self._weights if self._is_overwritten else None
            self._weights = None
            # What is made in inference mode could not be overwritten outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self._versions, self._weights = versions, self._make(into=old)
            self._is_stale = False
        return self._weights

    def make_room(self) -> None:
        """Drop the snapshot before an update, and free it unless captured steps read it."""
        self._is_stale = True
        if not self._is_overwritten:
            self._weights = None

    def release(self) -> None:
        """Keep the snapshot alone: the module's own matrices are freed, and it cannot compute."""
        self._weights = self._make(release=True)
        self.is_released = True
