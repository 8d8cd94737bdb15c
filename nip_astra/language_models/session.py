"""One rollout through a model that samples: what stays with it from call to call.

Shape suffixes: `R` row, `T` token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from nip_astra.language_models.tokens import SamplingOptions, Turns


class GenerationSession(ABC):
    """One rollout through a model: calls in turn, each continuing what the last one said.

    The weights of the model stay as they are while a session is open.
    """

    @abstractmethod
    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_RT: Tensor,
        options: SamplingOptions,
        *,
        branching: int = 1,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> Turns:
        """Sample turns as `TokenSampler.generate` does, and score spans of what is read.

        Parameters
        ----------
        branching : int
            Contexts that continue one row: context i continues row `i // branching` of the last
            call, and in a first call so many neighbours are expected to begin alike. A context
            that does not continue its row is read from its beginning.
        spans : Sequence[tuple[int, int]], optional
            For each context, where the tokens to be scored begin, at least 1, and end.
        """

    def close(self) -> None:  # noqa: B027 - who keeps nothing has nothing to free
        """Free what was kept for further calls."""
