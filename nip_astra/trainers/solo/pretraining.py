"""Bodies that are trained to tell the label before the agents play, and kept for later runs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.tracking.environment import processor_name
from nip_astra.trainers.solo.training import SoloParameters, SoloTraining
from nip_astra.utils.tensor_cache import (
    digest_of_code,
    digest_of_tensors,
    keep_tensors,
    take_tensors,
)
from nip_astra.version import __version__

logger = logging.getLogger(__name__)

CACHE_DIR = "pretrained_bodies"
"""Folder in the runs folder."""
CODE = (
    *("nip_astra.scenarios", "nip_astra.scenario_base", "nip_astra.utils"),
    *("nip_astra.trainers.solo.training", "nip_astra.trainers.protocol.optimizers", __name__),
)
"""What a trained body depends on, besides the modules of its own classes."""


def pretrain_bodies(
    agents: Mapping[str, Agent],
    environment: ProtocolEnvironment,
    parameters: SoloParameters,
    *,
    with_decisions: bool,
    seed: int,
    runs_dir: str,
    layers: str,
) -> None:
    """Train each agent's body alone, and give its policy and its value function the result.

    A value function that sees more than the policy has a body of another shape, which stays as it
    was. An agent that was loaded from a run stays as it was trained there.
    A body is read from the cache where one was trained from the same: first weights, data, seed,
    parameters and shape of the agent, and these parameters; and in the same way: by the same code,
    on such a processor. A file of the cache that is damaged is replaced.

    Parameters
    ----------
    with_decisions : bool
        Whether an agent's decisions start as what it tells alone, where its policy head takes that
        over.
    layers : str
        `ScenarioInstance.layers`.
    """
    data = digest_of_tensors(environment.dataset)
    computed_by = [layers, str(environment.device), processor_name(), torch.__version__]
    for name, agent in agents.items():
        if agent.is_random or agent.parameters_of_agent.load_from_run is not None:
            continue
        assert agent.policy_body is not None
        assert agent.solo_head is not None
        trained = nn.ModuleDict({"body": agent.policy_body, "solo_head": agent.solo_head})
        key = _key(agent, data, parameters, seed, computed_by)
        path = Path(runs_dir) / CACHE_DIR / f"{key}.safetensors"
        weights = take_tensors(path)
        if weights is not None:
            trained.load_state_dict(weights)
            logger.info("the body of %s was trained before: %s", name, path)
        else:
            _train(agent, environment, parameters, seed)
            keep_tensors(path, trained.state_dict())
        _copy_to_value_body(agent)
        if with_decisions and agent.policy_head is not None:
            agent.policy_head.decide_as(agent.solo_head)


def _train(
    agent: Agent, environment: ProtocolEnvironment, parameters: SoloParameters, seed: int
) -> None:
    training = SoloTraining(agent, environment, parameters, seed, "pretraining", agent.name)
    # What the body draws, for instance to drop out, is the same whatever was drawn before.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for epoch in range(parameters.num_epochs):
            score = training.run_epoch(epoch)
    logger.info("the body of %s alone is right in %.1f %%", agent.name, 100 * score.accuracy)


def _copy_to_value_body(agent: Agent) -> None:
    if agent.value_body is None or agent.shares_body:
        return
    assert agent.policy_body is not None
    trained, own = agent.policy_body.state_dict(), agent.value_body.state_dict()
    if any(trained[name].shape != own[name].shape for name in trained.keys() & own.keys()):
        logger.info(
            "the value function of %s sees more than its policy, so its body starts untrained",
            agent.name,
        )
        return
    agent.value_body.load_state_dict(trained)


def _key(
    agent: Agent, data: str, parameters: SoloParameters, seed: int, computed_by: list[str]
) -> str:
    """The digest of everything that a trained body depends on."""
    assert agent.policy_body is not None
    assert agent.solo_head is not None
    what = {
        "version": __version__,
        "code": digest_of_code({*CODE, *_modules_of(agent)}),
        "computed_by": computed_by,
        "parts": ["body", "solo_head"],
        "agent": agent.name,
        "shape": asdict(agent.shape),
        "parameters": agent.parameters_of_agent.to_dict(),
        "solo": parameters.to_dict(),
        "seed": seed,
        "data": data,
        "weights": [
            digest_of_tensors(part.state_dict()) for part in (agent.policy_body, agent.solo_head)
        ],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _modules_of(agent: Agent) -> set[str]:
    """The modules of an agent's own classes, plug-ins among them."""
    names = {one.__module__ for part in agent.modules() for one in type(part).__mro__}
    return {name for name in names if name.split(".")[0] not in ("torch", "builtins", "abc")}
