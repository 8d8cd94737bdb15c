"""Loading of the three agents of a stress test by model name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nip_astra.errors import ConfigurationError, ModelLoadError
from nip_astra.language_models.base import LanguageModel, TokenModel, as_language_model
from nip_astra.language_models.sources import find_tokenizer
from nip_astra.scenario_base.agents import (
    ConversationAgent,
    ConversationAgentParameters,
    build_agent,
    load_language_model,
    load_target,
)

Options = Mapping[str, Any]
ModelId = str | Path | None
"""Hub id, folder or GGUF file."""


def load_agents(
    attacker_model: ModelId,
    target_model: ModelId,
    baseline_model: ModelId,
    *,
    device: torch.device,
    attacker_options: Options,
    target_options: Options,
) -> dict[str, ConversationAgent]:
    """Load attacker, target and reference; see `HFASTProblem`."""
    for name, model in {"attacker": attacker_model, "target": target_model}.items():
        if not model:
            raise ConfigurationError(
                f"{name}_model_id is missing. Give a hub id, a folder of save_pretrained, or a "
                ".gguf file."
            )
    assert attacker_model is not None
    assert target_model is not None

    def load(parameters: ConversationAgentParameters, *, trainable: bool) -> LanguageModel:
        model = load_language_model(
            parameters.language_model, device=device, scenario_dir=None, trainable=trainable
        )
        return as_language_model(model, role="problem")

    attacker = agent_parameters(attacker_model, attacker_options)
    target = agent_parameters(target_model, target_options)
    policy = load(attacker, trainable=True)
    reference: TokenModel
    if baseline_model is None or str(baseline_model) == str(attacker_model):
        reference = policy.frozen_reference()
    else:
        # It speaks as the attacker does, and has no adapter.
        other = agent_parameters(str(baseline_model), _without_lora(attacker_options))
        reference = load(other, trainable=False)
    tested = load_target(target, policy, device=device, scenario_dir=None)
    return {
        "attacker": build_agent("attacker", attacker, policy),
        "target": build_agent("target", target, tested),
        "reference": build_agent("reference", attacker, reference),
    }


def agent_parameters(model: str | Path, options: Options) -> ConversationAgentParameters:
    """Return an agent's parameters; it uses its chat template if there is one."""
    model = str(model)
    backend = {"_type": "huggingface", "model": model, **options.get("language_model", {})}
    values = {**options, "language_model": backend}
    if "format" not in options:
        tokenizer = find_tokenizer(model, backend.get("base_model"), None)
        values["format"] = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return ConversationAgentParameters.from_dict(values)


def check_same_tokens(attacker: ConversationAgent, reference: ConversationAgent) -> None:
    """Raise for a reference with another vocabulary: it scores the sampled tokens."""
    if not attacker.shares_tokens_with(reference):
        raise ModelLoadError(
            "the baseline cannot score the attacker's tokens: their vocabularies differ. Leave "
            "baseline_model_id out to use the attacker's own model, or give one of its family."
        )


def _without_lora(options: Options) -> Options:
    own = ("lora", "base_model")
    backend = {k: v for k, v in options.get("language_model", {}).items() if k not in own}
    return {**options, "language_model": backend}
