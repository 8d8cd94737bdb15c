"""The scenario is built from its file, played, and learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.parameters.content import find_scenario
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.image_classification import ImageClassificationScenario
from nip_astra.scenarios.images.agents import ImageBody
from nip_astra.scenarios.images.pretrained import PcaModel, embedding_key
from tests.kit.messages import says

KIND = "image_classification"
SMALL: dict[str, Any] = {"dataset": {"max_train_size": 64}, "initial_num_channels": 4}


def build(
    *, trainer_type: str = "rl", scenario_dir: Path | None = None, **values: Any
) -> ScenarioInstance:
    model = HyperParameters.with_sections({KIND: ImageClassificationScenario.Parameters})
    given = {"trainer": "vanilla_ppo", "scenario": KIND, "interaction_protocol": "nip"}
    hyper_params = model.from_dict(given | values)
    return build_scenario_instance(
        hyper_params,
        ExperimentSettings(device="cpu"),
        kind=KIND,
        scenario_dir=scenario_dir,
        trainer_type=trainer_type,
    )


def small(**section: Any) -> dict[str, Any]:
    return {KIND: SMALL | section, "rl": {"frames_per_batch": 48, "steps_per_env_per_iteration": 6}}


def play(instance: ScenarioInstance, num_steps: int = 6) -> Any:
    assert instance.train_environment is not None
    assert instance.combined_agents is not None
    sampler = EpisodeSampler(instance.train_environment, instance.combined_agents, key=(0,))
    return sampler.collect(num_steps)


def test_the_built_in_scenario_matches_its_file() -> None:
    folder = find_scenario(KIND)
    values = OmegaConf.to_container(OmegaConf.load(folder / "scenario.yaml"))
    assert isinstance(values, dict)
    assert values.pop("kind") == KIND
    instance = build(scenario_dir=folder, **values)
    assert instance.train_dataset["image"].shape[1:] == (1, 8, 8)
    assert instance.agents.keys() == {"prover", "verifier"}
    bodies = {name: agent.policy_body for name, agent in instance.agents.items()}
    assert [body.read_messages.out_channels for body in bodies.values()] == [16, 16]
    kernels = {name: body.groups[0].blocks[0].convolution for name, body in bodies.items()}
    assert {name: one.kernel_size[0] for name, one in kernels.items()} == {
        "prover": 3,
        "verifier": 1,
    }


@pytest.mark.parametrize("protocol", list(InteractionProtocolType))
def test_every_protocol_is_played(protocol: str) -> None:
    instance = build(interaction_protocol=str(protocol), **small())
    batch = play(instance)
    assert batch.batch_size == (8, 6)
    assert int(batch["agents", "message"].max()) < 16
    assert batch["agents", "logprob"].isfinite().all()
    for agent in instance.agents.values():
        frames = batch.reshape(-1)
        assert agent.policy(frames).message_logits_BVPS.shape[0] == 48
        assert agent.value(frames).shape == (48,)


def test_gradients_reach_every_network_of_an_agent() -> None:
    instance = build(**small())
    frames = play(instance).reshape(-1)
    agent = instance.agents["verifier"]
    output = agent.policy(frames)
    total = output.message_logits_BVPS.square().sum() + agent.value(frames).square().sum()
    (total + output.decision_logits_B3.square().sum()).backward()
    assert all(weight.grad is not None for weight in agent.parameters())


def test_too_many_halvings_are_refused_with_how_many_there_may_be() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(**small(num_block_groups=3))
    assert says(
        caught.value, "8 x 8", "3 times", "leaves 1", "image_classification.num_block_groups", "2"
    )


def test_views_of_a_trained_model_are_computed_once_and_read_by_those_who_want_them() -> None:
    model = {"_type": "pca", "num_components": 3, "patch_size": 4}
    agents = {
        "prover": {"pretrained_embeddings_model": model},
        "verifier": {},
    }
    instance = build(**small(agents=agents))
    key = embedding_key(PcaModel.Parameters(num_components=3, patch_size=4))
    assert instance.train_dataset[key].shape == (64, 3, 2, 2)
    assert instance.test_dataset[key].shape[1:] == (3, 2, 2)
    frames = play(instance).reshape(-1)
    changed = frames.clone()
    changed[key] = frames[key] + 1.0
    for name, reads in (("prover", True), ("verifier", False)):
        body = instance.agents[name].policy_body
        assert isinstance(body, ImageBody)
        same = torch.equal(body(frames)["image"], body(changed)["image"])
        assert same is not reads


def test_no_view_is_computed_for_an_agent_that_plays_at_random() -> None:
    agent = {"is_random": True, "pretrained_embeddings_model": {"_type": "pca"}}
    instance = build(**small(agents={"default": {}, "prover": agent}))
    assert set(instance.train_dataset.keys()) == {"image", "y"}
    assert not list(instance.agents["prover"].parameters())
    assert play(instance)["agents", "logprob"].isfinite().all()


def test_the_seed_of_the_experiment_changes_the_networks_and_not_the_images() -> None:
    first, same, other = build(**small()), build(**small()), build(seed=1, **small())
    assert torch.equal(first.train_dataset["image"], other.train_dataset["image"])

    def weights(instance: ScenarioInstance) -> torch.Tensor:
        return torch.cat([one.flatten() for one in instance.agents["prover"].parameters()])

    assert torch.equal(weights(first), weights(same))
    assert not torch.equal(weights(first), weights(other))


def test_a_verifier_alone_learns_which_digits_are_which() -> None:
    instance = build(
        trainer_type="solo_agent",
        interaction_protocol="solo_verifier",
        rl={"frames_per_batch": 256, "steps_per_env_per_iteration": 1},
    )
    agent, train, test = (
        instance.agents["verifier"],
        instance.train_environment,
        instance.test_environment,
    )
    assert train is not None
    assert test is not None
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    for _ in range(70):
        frames = train.first_frames(train.cycler.take(256))
        loss = cross_entropy(agent.solo(frames), frames["y"].squeeze(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frames = test.first_frames(torch.arange(len(instance.test_dataset)))
    accuracy = (agent.solo(frames).argmax(-1) == frames["y"].squeeze(-1)).float().mean()
    assert float(accuracy) > 0.85
