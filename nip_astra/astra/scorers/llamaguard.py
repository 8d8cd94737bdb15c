"""Guard models of the Llama Guard type."""

from __future__ import annotations

from typing import Any

from nip_astra.astra.core.scorer import RegisteredScorer

MODEL = "meta-llama/Llama-Guard-3-8B"


class LlamaGuardScorer(RegisteredScorer):
    """Probability that a guard classifies a conversation as unsafe; see `llama_guard`.

    Parameters
    ----------
    DEVICE : str
        Where the model runs.
    model : str
        Hub id, folder or GGUF file. The one by default has 8 B weights, 16 GB in bfloat16.
    **parameters
        More of the registered scorer's, for instance `role`, `dtype`, `batch_size`.
    """

    def __init__(self, DEVICE: str = "cuda", *, model: str = MODEL, **parameters: Any) -> None:
        super().__init__("llama_guard", device=DEVICE, model=model, **parameters)


LlamaGuardModerator = LlamaGuardScorer
