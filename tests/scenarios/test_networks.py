"""Scenarios with networks are built from their files, played, and learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from nip_astra.errors import ConfigurationError, DataError, ParameterError
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.graphs.generation import GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.pair_files import save_pairs
from nip_astra.scenarios.graphs.wl import wl_accuracy
from nip_astra.scenarios.image_classification import ImageClassificationScenario
from nip_astra.scenarios.images.pretrained import PcaModel, embedding_key
from tests.kit.experiments import trainer_of
from tests.kit.learning import Learning
from tests.kit.messages import says

GRAPHS, IMAGES = "graph_isomorphism", "image_classification"
SMALL = {
    GRAPHS: (f"{GRAPHS}.dataset.num_train=48", f"{GRAPHS}.dataset.num_test=16"),
    IMAGES: (f"{IMAGES}.dataset.max_train_size=64", f"{IMAGES}.initial_num_channels=4"),
}
DATA = {GRAPHS: "adjacency", IMAGES: "image"}
"""A column of each kind's dataset."""
NUM_SYMBOLS = {GRAPHS: 2 * 11, IMAGES: 4 * 4}


def build(
    kind: str, *overrides: str, trainer: str = "vanilla_ppo", scenario: str | None = None
) -> ScenarioInstance:
    """An instance with little data, of the shipped scenario unless another is given."""
    made = trainer_of(trainer, *SMALL[kind], *overrides, scenario=scenario or kind)
    instance: ScenarioInstance = made.scenario_instance
    return instance


def play(instance: ScenarioInstance) -> Any:
    sampler = EpisodeSampler(instance.train_environment, instance.combined_agents, key=(0,))
    return sampler.collect(6)


@pytest.mark.parametrize(
    ("name", "layers", "largest"), [(GRAPHS, 5, 11), (f"{GRAPHS}_small", 4, 9)]
)
def test_pairs_and_networks_of_graphs_match_the_file(name: str, layers: int, largest: int) -> None:
    instance = build(GRAPHS, scenario=name)
    num_layers = {name: len(item.policy_body.gnn_layers) for name, item in instance.agents.items()}
    assert num_layers == {"prover": layers, "verifier": 2}
    assert instance.train_dataset["adjacency"].shape == (48, 2, largest, largest)
    assert len(instance.test_dataset) == 16
    scores = instance.train_dataset["wl_score"]
    expected = [0.5, 0.5 + 2 / 48, 0.5 + 7 / 48]
    assert [wl_accuracy(scores, rounds) for rounds in range(3)] == pytest.approx(expected)


def test_networks_of_images_match_the_file() -> None:
    instance = build(IMAGES, f"{IMAGES}.initial_num_channels=16")
    assert instance.train_dataset["image"].shape == (64, 1, 8, 8)
    for name, size in {"prover": 3, "verifier": 1}.items():
        body = instance.agents[name].policy_body
        assert body.read_messages.out_channels == 16
        assert body.groups[0].blocks[0].convolution.kernel_size == (size, size)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("protocol", list(InteractionProtocolType))
def test_every_protocol_is_played_by_networks_that_all_learn(kind: str, protocol: str) -> None:
    sizes = ("frames_per_batch=48", "steps_per_env_per_iteration=6", "pretrain_agents=false")
    options = [f"rl.{size}" for size in sizes]
    instance = build(kind, f"interaction_protocol={protocol}", *options)
    batch = play(instance)
    assert batch.batch_size == (8, 6)
    assert int(batch["agents", "message"].max()) < NUM_SYMBOLS[kind]
    assert batch["agents", "logprob"].isfinite().all()
    frames = batch.reshape(-1)
    for agent in instance.agents.values():
        assert agent.value_body is not agent.policy_body
        output, values = agent.policy(frames), agent.value(frames)
        assert values.shape == (48,)
        logits = [item for item in output if item is not None]
        torch.stack([item.square().sum() for item in (*logits, values)]).sum().backward()
        assert all(weight.grad is not None for weight in agent.parameters())


@pytest.mark.parametrize("kind", SMALL)
def test_the_seed_of_the_experiment_changes_the_networks_and_not_the_data(kind: str) -> None:
    first, same, other = (build(kind, f"seed={seed}") for seed in (1, 1, 2))
    assert torch.equal(first.train_dataset[DATA[kind]], other.train_dataset[DATA[kind]])

    def weights(instance: ScenarioInstance) -> torch.Tensor:
        return torch.cat([item.flatten() for item in instance.agents["prover"].parameters()])

    assert torch.equal(weights(first), weights(same))
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize(
    ("kind", "override", "facts"),
    [
        (GRAPHS, "agents.default.num_heads=3", ("num_heads", "d_transformer", "16")),
        (IMAGES, "num_block_groups=3", ("8 x 8", "3 times", f"{IMAGES}.num_block_groups", "2")),
    ],
)
def test_impossible_sizes_are_refused(kind: str, override: str, facts: tuple[str, ...]) -> None:
    with pytest.raises((ParameterError, ConfigurationError)) as caught:
        build(kind, f"{kind}.{override}")
    assert says(caught.value, *facts)


# ---- graphs


def test_pairs_are_made_once_in_a_process_unless_their_seed_differs() -> None:
    seeds = ("seed=1", "seed=2", f"{GRAPHS}.dataset.seed=1")
    first, same, other = (build(GRAPHS, seed).train_dataset["adjacency"] for seed in seeds)
    assert first is same
    assert not torch.equal(first, other)


def test_pairs_are_read_from_a_file_of_the_scenario(tmp_path: Path) -> None:
    parameters = GraphPairParameters(num_train=6, num_test=4, sizes=[7, 8])
    train, test = (generate_pairs(parameters, split) for split in ("train", "test"))
    save_pairs(tmp_path / "pairs.safetensors", train=train, test=test)
    (tmp_path / "scenario.yaml").write_text(f"kind: {GRAPHS}\ninteraction_protocol: nip\n")
    file = f"{GRAPHS}.dataset={{file: 'scenario://pairs.safetensors'}}"
    instance = trainer_of("vanilla_ppo", file, scenario=tmp_path).scenario_instance
    assert (len(instance.train_dataset), len(instance.test_dataset)) == (6, 4)
    assert instance.train_dataset["wl_score"].tolist() == train.wl_score.tolist()
    with pytest.raises(DataError, match="none"):
        trainer_of("vanilla_ppo", file.replace("pairs", "none"), scenario=tmp_path)


# ---- images


def test_views_of_a_trained_model_are_computed_once_and_read_by_those_who_want_them() -> None:
    model = "{_type: pca, num_components: 3, patch_size: 4}"
    instance = build(IMAGES, f"{IMAGES}.agents.prover.pretrained_embeddings_model={model}")
    key = embedding_key(PcaModel.Parameters(num_components=3, patch_size=4))
    assert instance.train_dataset[key].shape == (64, 3, 2, 2)
    assert instance.test_dataset[key].shape[1:] == (3, 2, 2)
    frames = play(instance).reshape(-1)
    changed = frames.clone()
    changed[key] = frames[key] + 1.0
    for name, reads in (("prover", True), ("verifier", False)):
        body = instance.agents[name].policy_body
        assert torch.equal(body(frames)["image"], body(changed)["image"]) is not reads


def test_no_view_is_computed_for_an_agent_that_plays_at_random() -> None:
    prover = {"is_random": True, "pretrained_embeddings_model": {"_type": "pca"}}
    parameters = ImageClassificationScenario.Parameters.from_dict(
        {"dataset": {"name": "tiny"}, "agents": {"default": {}, "prover": prover}}
    )
    train, _ = ImageClassificationScenario.build_datasets(parameters, seed=0, scenario_dir=None)
    assert set(train.keys()) == {"image", "y"}


def test_a_verifier_alone_learns_which_digits_are_which(learning: Learning) -> None:
    given = ("dataset.max_train_size=null", "agents.verifier.kernel_size=3")
    instance = build(
        IMAGES,
        *("interaction_protocol=solo_verifier", f"{IMAGES}.initial_num_channels=16"),
        *(f"{IMAGES}.{override}" for override in given),
        f"seed={learning.seed}",
        trainer="solo_agent",
    )
    agent, train = instance.agents["verifier"], instance.train_environment
    assert (agent.value_head, agent.policy_head) == (None, None)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    for _ in range(70):
        frames = train.first_frames(train.cycler.take(256))
        loss = cross_entropy(agent.solo(frames), frames["y"].squeeze(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    frames = instance.test_environment.first_frames(torch.arange(len(instance.test_dataset)))
    accuracy = (agent.solo(frames).argmax(-1) == frames["y"].squeeze(-1)).float().mean()
    # Half of the digits are of each label.
    learning.check(float(accuracy), threshold=0.7, best=1.0)
