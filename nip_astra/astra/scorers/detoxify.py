"""The toxicity classifiers of the package detoxify."""

from __future__ import annotations

from typing import Any

from nip_astra.astra.core.scorer import RegisteredScorer


class DetoxifyScorer(RegisteredScorer):
    """Probability of one category of a Detoxify model; see the registered scorer `detoxify`.

    Parameters
    ----------
    harm_category : str
        Category whose probability is the score.
    variant : str
        Published model to download; ignored if `checkpoint` is given.
    device : str
        Where the model runs.
    **parameters
        More of the registered scorer's, for instance `checkpoint`, `config_path`, `batch_size`.
    """

    def __init__(
        self,
        harm_category: str = "toxicity",
        variant: str = "original",
        *,
        device: str = "cpu",
        **parameters: Any,
    ) -> None:
        super().__init__(
            "detoxify", device=device, category=harm_category, variant=variant, **parameters
        )


DetoxifyModerator = DetoxifyScorer
