"""Rollouts with made-up probes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.reward_terms.base import REWARD_TERMS, RatedProbes, RewardTerm, build_reward_terms

STRANGE = ["\u732b\u3068\u72ac", "\U0001f642", "\ud800", "!!!", "a", "x" * 2000, "\x00", "A  b"]


def random_probes(count: int, *, seed: int) -> list[str]:
    """Probes of one to nine words, some of which repeat."""
    rng = random.Random(seed)
    words = ["do", "you", "like", "my", "cat", "dog", "today", "again", "?", "silly"]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


def rollout(
    probes: Sequence[str],
    *,
    logprobs_NT: Tensor | None = None,
    reference_NT: Tensor | None = None,
    mask_NT: Tensor | None = None,
    response_score_N: Tensor | None = None,
) -> RatedProbes:
    """A rollout of these probes; tokens are made up unless given."""
    count = len(probes)
    given = next((x for x in (mask_NT, logprobs_NT, reference_NT) if x is not None), None)
    width = 3 if given is None else given.shape[1]
    mask_NT = torch.ones(count, width, dtype=torch.bool) if mask_NT is None else mask_NT
    made_up_NT = -torch.ones(count, width)
    return RatedProbes(
        prompts=["hello"] * count,
        probes=list(probes),
        responses=["fine thanks"] * count,
        probe_mask_NT=mask_NT,
        probe_logprobs_NT=made_up_NT if logprobs_NT is None else logprobs_NT,
        reference_logprobs_NT=made_up_NT if reference_NT is None else reference_NT,
        response_score_N=torch.full((count,), torch.nan)
        if response_score_N is None
        else response_score_N,
        tree_width=1,
    )


def term_of(name: str, *, scenario_dir: Path | None = None, **options: Any) -> RewardTerm:
    """A reward term as a parameter file would."""
    parameters = REWARD_TERMS.get(name).Parameters.from_dict(options)
    device = torch.device("cpu")
    (term,) = build_reward_terms([parameters], device=device, scenario_dir=scenario_dir).values()
    return term
