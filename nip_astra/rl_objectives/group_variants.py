"""The policy losses over groups of siblings that have a name, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import Baseline, ZeroVarianceRule
from nip_astra.rl_objectives.masked import Reduction

RatioLevel = Literal["token", "sequence_mean", "sequence_product"]
"""What `pi / pi_old` is taken of, see `GroupVariant`."""

GroupVariantName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"]
"""Names of `GROUP_VARIANTS`."""


@dataclass(frozen=True)
class GroupVariant:
    """All that sets one policy loss over groups of siblings apart from another.

    A variant of one's own is `dataclasses.replace(GROUP_VARIANTS["grpo"], clip_high=0.28)`.

    Attributes
    ----------
    source : str
        Where it is defined, and in what this differs.
    ratio : RatioLevel
        `token`: `pi / pi_old` of each token; `sequence_mean`: its geometric mean over the tokens
        of a row, one for all of them; `sequence_product`: the ratio of the whole row.
    surrogate : "clipped" or "weighted"
        `clipped`: `min(ratio * A, clip(ratio) * A)`, whose gradient is 0 beyond the clip in the
        direction of A; `weighted`: `clip(ratio) * A * log pi` with a constant ratio, whose
        gradient never vanishes.
    clip_low, clip_high : float or None
        The ratio is clipped to `[1 - clip_low, 1 + clip_high]`; None does not clip on that side.
    baseline : Baseline
        What a reward is compared with, see `group_advantages`.
    std_epsilon : float or None
        Advantages are divided by the unbiased standard deviation of the group plus this; None
        divides by nothing.
    zero_variance : ZeroVarianceRule
        Whether groups whose rewards are all equal stay in the batch, see `group_advantages`.
    reduction : Reduction
        How tokens become one loss, see `reduce_loss`.

    Raises
    ------
    ConfigurationError
        For the surrogate "weighted" with one ratio a row, which no source defines.
    """

    source: str
    ratio: RatioLevel = "token"
    surrogate: Literal["clipped", "weighted"] = "clipped"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    baseline: Baseline = "mean"
    std_epsilon: float | None = 1e-4
    zero_variance: ZeroVarianceRule = "keep"
    reduction: Reduction = "sequence"

    def __post_init__(self) -> None:
        if self.surrogate == "weighted" and self.ratio != "token":
            raise ConfigurationError(
                f"a policy loss with the surrogate 'weighted' and the ratio {self.ratio!r} was "
                f"asked for; that surrogate weights the log-probability of each token by its own "
                f"ratio. Use the ratio 'token', or the surrogate 'clipped'."
            )


GROUP_VARIANTS: Mapping[str, GroupVariant] = MappingProxyType(
    {
        "grpo": GroupVariant(source="DeepSeekMath, arXiv:2402.03300, eq. 3"),
        "dr_grpo": GroupVariant(
            source="Understanding R1-Zero-like training, arXiv:2503.20783",
            std_epsilon=None,
            reduction="sum_over_length",
        ),
        "dapo": GroupVariant(
            source="DAPO, arXiv:2503.14476, eq. 8; without the penalty on overlong answers, and "
            "groups that are dropped are not sampled again",
            clip_high=0.28,
            zero_variance="drop",
            reduction="token",
        ),
        "cispo": GroupVariant(
            source="MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; ratios are at most 5",
            surrogate="weighted",
            clip_low=None,
            clip_high=4.0,
            zero_variance="drop",
            reduction="token",
        ),
        "gspo": GroupVariant(
            source="GSPO, arXiv:2507.18071, eq. 5 and 7",
            ratio="sequence_mean",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        "rloo": GroupVariant(
            source="Back to basics, arXiv:2402.14740; clipped, for later epochs",
            ratio="sequence_product",
            baseline="leave_one_out",
            std_epsilon=None,
            reduction="sequence_sum",
        ),
    }
)
"""The variants that have a name."""
