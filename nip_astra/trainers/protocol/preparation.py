"""What is done before agents in a protocol are trained."""

from __future__ import annotations

import math

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_base.protocol.combined import CombinedAgents
from nip_astra.scenario_base.protocol.environment import ProtocolEnvironment
from nip_astra.scenario_base.protocol.tensordict_agents import Agent, RandomPolicyHead
from nip_astra.scenario_instance import ProtocolInstance
from nip_astra.trainers.solo.pretraining import pretrain_bodies
from nip_astra.trainers.solo.training import SoloParameters
from nip_astra.utils.seeding import SeedPart


def normalize_observations(
    agents: CombinedAgents,
    environment: ProtocolEnvironment,
    *,
    num_frames: int,
    key: tuple[SeedPart, ...],
) -> None:
    """Have all bodies shift and scale message histories by what random play shows.

    An agent that was loaded from a run keeps the statistics that it was trained with.

    Parameters
    ----------
    environment : ProtocolEnvironment
        On whose data to play; it stays as it is, since another is made from it.
    num_frames : int
        Frames to play at least; every environment plays a whole conversation or more.
    key : tuple
        Path of names that the play derives from.
    """
    random_agents = {name: _at_random(agents[name]) for name in agents.names}
    sampler = EpisodeSampler(
        environment.with_key(*key, "environment"),
        CombinedAgents(random_agents, agents.protocol, agents.space),
        key=(*key, "agents"),
    )
    num_steps = math.ceil(num_frames / environment.num_environments)
    num_steps = max(num_steps, agents.protocol.max_message_rounds)
    frames = sampler.collect(num_steps).flatten()
    linear = frames.get("linear_message_history", None)
    for name in agents.names:
        parameters = agents[name].parameters_of_agent
        if parameters.load_from_run is not None or not parameters.normalize_message_history:
            continue
        for body in agents[name].bodies:
            body.set_statistics(frames["message_history"], linear)


def pretrain_agents(
    hyper_params: HyperParameters, settings: ExperimentSettings, instance: ProtocolInstance
) -> None:
    """Have all bodies learn to answer alone, by the parameters of `solo_agent`."""
    solo = getattr(hyper_params, "solo_agent", None) or SoloParameters()
    agents = instance.combined_agents
    pretrain_bodies(
        {name: agents[name] for name in agents.names},
        instance.train_environment,
        solo.model_copy(update={"num_epochs": 1}) if settings.test_run else solo,
        with_decisions=hyper_params.rl.pretrain_decisions,
        seed=hyper_params.seed,
        runs_dir=settings.runs_dir,
        layers=instance.layers,
    )


def _at_random(agent: Agent) -> Agent:
    assert agent.policy_head is not None
    head = RandomPolicyHead(agent.shape, agent.policy_head.impossible)
    return Agent(agent.name, agent.parameters_of_agent, agent.shape, policy_head=head)
