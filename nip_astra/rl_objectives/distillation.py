"""Learning from a teacher on the student's own samples.

Shape suffixes: `B` row, `T` token, `V` vocabulary.

An estimate of a divergence from sampled tokens has a gradient that need not be the divergence's:
back-propagated as a loss, `log S - log T` gives 0 on average, and the estimator k3 gives that of
the *forward* divergence. So what is here is named by the gradient that it gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.rl_objectives.advantages import discounted_sums
from nip_astra.rl_objectives.reductions import masked_fill_zero


def reverse_kl_advantages(
    student_logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weight: float = 1.0,
    discount: float = 0.0,
) -> Tensor:
    """Advantages whose policy gradient is that of KL(student || teacher), without gradient.

    `A_t = -weight * sum_(s >= t) discount**(s - t) (log S_s - log T_s)` over the tokens that count,
    on tokens sampled from the student. As the advantage of a score-function or importance-sampling
    loss at ratio 1, the expected gradient is, with discount

    - 0: that of `sum_t KL(S(. | what was said) || T(. | what was said))`, with what was said fixed:
      the usual on-policy distillation, of low variance;
    - 1: that of the divergence between whole sequences, exactly.

    Parameters
    ----------
    student_logprobs_BT, teacher_logprobs_BT : Tensor
        Of the sampled tokens, nats.
    discount : float
        In [0, 1].

    Returns
    -------
    Tensor
        `[B, T]`; 0 where the mask is False.
    """
    gap_BT = masked_fill_zero(student_logprobs_BT.detach() - teacher_logprobs_BT.detach(), mask_BT)
    if discount == 0:
        return -weight * gap_BT
    # Tokens between two of the student's count no step.
    factor_BT = torch.where(mask_BT, discount, 1.0)
    return masked_fill_zero(-weight * discounted_sums(gap_BT, factor_BT), mask_BT)


def exact_kl(student_logits_BTV: Tensor, teacher_logits_BTV: Tensor, *, forward: bool) -> Tensor:
    """The divergence at every position over the whole vocabulary, `[B, T]` nats.

    KL(student || teacher), or with `forward` KL(teacher || student); gradients flow into the
    student's logits.
    """
    student_BTV = student_logits_BTV.log_softmax(dim=-1)
    teacher_BTV = teacher_logits_BTV.detach().log_softmax(dim=-1)
    if forward:
        return (teacher_BTV.exp() * (teacher_BTV - student_BTV)).sum(dim=-1)
    return (student_BTV.exp() * (student_BTV - teacher_BTV)).sum(dim=-1)
