"""The weights that are sampled from: a copy laid out to compute with, made anew after learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nip_astra.language_models.weights import Weights, frozen_weights


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

    def of(self, parameters: Iterable[torch.nn.Parameter]) -> Weights:
        """Give the snapshot as long as these parameters have not changed, else a new one."""
        # Every change in place counts a tensor's version up.
        versions = tuple(parameter._version for parameter in parameters)
        if self._weights is None or (versions != self._versions and not self.is_released):
            old = self._weights if self._is_overwritten else None
            self._weights = None
            self._versions, self._weights = versions, self._make(into=old)
        return self._weights

    def make_room(self) -> None:
        """Free the snapshot before an update, unless captured steps read it."""
        if not self._is_overwritten:
            self._weights = None

    def release(self) -> None:
        """Keep the snapshot alone: the module's own matrices are freed, and it cannot compute."""
        self._weights = self._make(release=True)
        self.is_released = True
