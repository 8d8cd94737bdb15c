"""The registry of reward terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import RewardTermType
from nip_astra.registry import Registry
from nip_astra.reward_terms.base import RewardTerm

REWARD_TERMS: Registry[type[RewardTerm]] = Registry(
    "reward_term",
    package="nip_astra.reward_terms",
    members=RewardTermType,
    modules={
        RewardTermType.COSINE_NOVELTY: "novelty",
        RewardTermType.SELF_BLEU_NOVELTY: "novelty",
        RewardTermType.FAILURE_RARITY: "failure_kinds",
        RewardTermType.FAILURE_SHARING: "failure_kinds",
        RewardTermType.ENTROPY_BONUS: "likelihood_terms",
        RewardTermType.GIBBERISH_PENALTY: "likelihood_terms",
    },
)


def register_reward_term(name: str) -> Callable[[type[RewardTerm]], type[RewardTerm]]:
    """Register a `RewardTerm` subclass under the `_type` by which parameter files name it."""

    def decorate(cls: type[RewardTerm]) -> type[RewardTerm]:
        claim_parameters(cls, name)
        return REWARD_TERMS.register(name)(cls)

    return decorate


def build_reward_term(
    parameters: Any, *, device: torch.device, scenario_dir: Path | None
) -> RewardTerm:
    """The reward term that the parameters describe."""
    cls = REWARD_TERMS.get(parameters.type_name)
    return cls(parameters, device=device, scenario_dir=scenario_dir)


def build_reward_terms(
    parameters: Sequence[Any], *, device: torch.device, scenario_dir: Path | None
) -> dict[str, RewardTerm]:
    """The reward terms of a list by name, in order.

    A term is named after its kind; the second of a kind is `<kind>_2`, and so on.
    """
    terms: dict[str, RewardTerm] = {}
    for term in parameters:
        name, number = term.type_name, 1
        while name in terms:
            number += 1
            name = f"{term.type_name}_{number}"
        terms[name] = build_reward_term(term, device=device, scenario_dir=scenario_dir)
    return terms
