"""The loss of token-level PPO with a value function.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.masked import reduce_loss
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.policy_gradient import ppo_policy_loss, value_loss
from nip_astra.trainers.ast.ppo_samples import PpoParameters


def ppo_loss(
    logprobs_BT: Tensor,
    values_BT: Tensor,
    batch: TensorDict,
    options: PpoParameters,
    *,
    kl_loss_weight: float,
    normaliser: float | None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Policy, value, divergence and entropy loss of a batch of probes; see `AstPpoTrainer`.

    Parameters
    ----------
    logprobs_BT, values_BT : Tensor
        Of the tokens of the probes, with gradient.
    batch : TensorDict
        `[B, T]`: `old_logprobs`, `reference_logprobs`, `advantage`, `return`, `old_value`, and
        `probe_mask`, True on tokens that count.
    kl_loss_weight : float
        Weight of the divergence from the reference in the loss.
    normaliser : float, optional
        What sums over tokens are divided by; their number by default.
    entropy_BT : Tensor, optional
        With gradient; needed where `options.entropy_weight` is not 0.
    weights_BT : Tensor, optional
        Importance weights of the policy's and the divergence's terms.
    """
    mask_BT = batch["probe_mask"]
    loss, metrics = ppo_policy_loss(
        logprobs_BT,
        batch["old_logprobs"],
        batch["advantage"],
        mask_BT,
        clip_low=options.clip_range,
        clip_high=options.clip_range,
        normaliser=normaliser,
        entropy_BT=entropy_BT,
        weights_BT=weights_BT,
    )
    value, more = value_loss(
        values_BT,
        batch["old_value"],
        batch["return"],
        mask_BT,
        clip_range=options.value_clip_range,
        normaliser=normaliser,
    )
    loss = loss + options.value_weight * value
    if kl_loss_weight > 0:
        kl_BT = kl_estimate(
            logprobs_BT, batch["reference_logprobs"], options.kl.kind, mask_BT=mask_BT
        )
        kl_BT = kl_BT if weights_BT is None else weights_BT * kl_BT
        loss += kl_loss_weight * reduce_loss(kl_BT, mask_BT, "token", normaliser=normaliser)
    if entropy_BT is not None:
        entropy = reduce_loss(entropy_BT, mask_BT, "token", normaliser=normaliser)
        loss -= options.entropy_weight * entropy
    return LossOutput(loss, metrics | more)
