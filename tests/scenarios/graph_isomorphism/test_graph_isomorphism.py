"""The scenario is built from its file, played, and learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from nip_astra.errors import DataError, ParameterError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.factory import build_scenario_instance
from nip_astra.parameters.content import find_scenario
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.samplers.episodes import EpisodeSampler
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.graph_isomorphism import GraphIsomorphismScenario
from nip_astra.scenarios.graphs.agents import GraphBody
from nip_astra.scenarios.graphs.generation import GraphPairParameters, generate_pairs
from nip_astra.scenarios.graphs.pair_files import save_pairs
from nip_astra.scenarios.graphs.wl import wl_accuracy

KIND = "graph_isomorphism"
DATASET = {"num_train": 48, "num_test": 16}


def build(
    *, trainer_type: str = "rl", scenario_dir: Path | None = None, **values: Any
) -> ScenarioInstance:
    given = {"trainer": "vanilla_ppo", "scenario": KIND, "interaction_protocol": "nip"} | values
    name = str(given["interaction_protocol"])
    protocol = PROTOCOL_HANDLERS.get(name)
    model = HyperParameters.with_sections(
        {KIND: GraphIsomorphismScenario.Parameters, name: protocol.Parameters}
    )
    return build_scenario_instance(
        model.from_dict(given),
        ExperimentSettings(device="cpu"),
        kind=KIND,
        scenario_dir=scenario_dir,
        trainer_type=trainer_type,
    )


def small(**section: Any) -> dict[str, Any]:
    return {
        KIND: {"dataset": DATASET} | section,
        "rl": {"frames_per_batch": 48, "steps_per_env_per_iteration": 6},
    }


def play(instance: ScenarioInstance, num_steps: int = 6) -> Any:
    assert instance.train_environment is not None
    assert instance.combined_agents is not None
    sampler = EpisodeSampler(instance.train_environment, instance.combined_agents, key=(0,))
    return sampler.collect(num_steps)


def gnn_layers(instance: ScenarioInstance) -> dict[str, int]:
    return {name: len(agent.policy_body.gnn_layers) for name, agent in instance.agents.items()}


@pytest.mark.parametrize(("name", "layers", "largest"), [(KIND, 5, 11), (f"{KIND}_small", 4, 9)])
def test_a_built_in_scenario_matches_its_file(name: str, layers: int, largest: int) -> None:
    folder = find_scenario(name)
    values: Any = OmegaConf.to_container(OmegaConf.load(folder / "scenario.yaml"))
    assert values.pop("kind") == KIND
    section = values[KIND]
    section["dataset"] = section.get("dataset", {}) | DATASET
    instance = build(scenario_dir=folder, **values)
    assert gnn_layers(instance) == {"prover": layers, "verifier": 2}
    assert instance.train_dataset["adjacency"].shape == (48, 2, largest, largest)
    assert len(instance.test_dataset) == 16
    scores = instance.train_dataset["wl_score"]
    expected = [0.5, 0.5 + 2 / 48, 0.5 + 7 / 48]
    assert [wl_accuracy(scores, rounds) for rounds in range(3)] == pytest.approx(expected)


TWO_PROVERS = [
    (name, section)
    for name in ("debate", "mnip")
    for section in (
        {},
        {"sequential": True},
        {"sequential": True, "prover0_first": False},
    )
]


@pytest.mark.parametrize("zero_knowledge", [False, True])
@pytest.mark.parametrize("verifier_first", [True, False])
@pytest.mark.parametrize(
    ("protocol", "section"), [("nip", {}), ("multi_channel_test", {}), *TWO_PROVERS]
)
def test_provers_answer_the_verifiers_last_question(
    protocol: str, section: dict[str, Any], verifier_first: bool, zero_knowledge: bool
) -> None:
    random = {"default": {"is_random": True}}
    common = {"verifier_first": verifier_first, "zero_knowledge": zero_knowledge}
    instance = build(
        interaction_protocol=protocol,
        protocol_common=common,
        **small(agents=random) | {"rl": {"frames_per_batch": 512}},
        **{protocol: section},
    )
    handler = instance.protocol_handler
    assert handler is not None
    batch = play(instance, handler.max_message_rounds)
    n = instance.train_dataset["adjacency"].shape[-1]
    asks = [name in handler.verifier_names for name in handler.agent_names]
    sent_ETAC = batch["agents", "message"].squeeze(-1) // n
    answers: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for e in range(len(batch)):
        asked: dict[int, int] = {}
        for t in range(batch.shape[1]):
            if batch["round"][e, t] == 0:
                asked = {}
            questions = {}
            for a, c in batch["active_mask"][e, t].nonzero().tolist():
                graph = int(sent_ETAC[e, t, a, c])
                if asks[a]:
                    questions[c] = graph
                elif handler.agent_names[a] in handler.prover_names and c in asked:
                    answers.setdefault((a, c), set()).add((asked[c], graph))
            asked |= questions
    assert {(0, 1), (1, 0)} == set().union(*answers.values())
    assert all(len(seen) == 2 for seen in answers.values()), answers
    speaking = {a for a, _ in answers}
    assert len(speaking) == {"nip": 1, "multi_channel_test": 2}.get(protocol, 2)


@pytest.mark.parametrize("protocol", list(InteractionProtocolType))
def test_every_protocol_is_played(protocol: str) -> None:
    instance = build(interaction_protocol=str(protocol), **small())
    batch = play(instance)
    assert batch.batch_size == (8, 6)
    assert int(batch["agents", "message"].max()) < 22
    assert batch["agents", "logprob"].isfinite().all()
    for agent in instance.agents.values():
        assert isinstance(agent.policy_body, GraphBody)
        assert agent.value_body is not agent.policy_body


def test_the_seed_of_the_experiment_changes_the_networks_and_not_the_pairs() -> None:
    first, other = (build(seed=seed, **small()) for seed in (1, 2))
    another = build(**small(dataset=DATASET | {"seed": 1}))
    pairs = [one.train_dataset["adjacency"] for one in (first, other, another)]
    assert pairs[0] is pairs[1], "made once in a process"
    assert not torch.equal(pairs[0], pairs[2])
    weights = [one.agents["prover"].policy_body.output.weight for one in (first, other)]
    assert not torch.equal(*weights)


def test_pairs_are_read_from_a_file_of_the_scenario(tmp_path: Path) -> None:
    parameters = GraphPairParameters(num_train=6, num_test=4, sizes=[7, 8])
    train, test = (generate_pairs(parameters, split) for split in ("train", "test"))
    save_pairs(tmp_path / "pairs.safetensors", train=train, test=test)
    section = small(dataset={"file": "scenario://pairs.safetensors"})
    instance = build(scenario_dir=tmp_path, **section)
    assert (len(instance.train_dataset), len(instance.test_dataset)) == (6, 4)
    assert instance.train_dataset["wl_score"].tolist() == train.wl_score.tolist()
    with pytest.raises(DataError, match="none"):
        build(scenario_dir=tmp_path, **small(dataset={"file": "scenario://none"}))


def test_heads_that_do_not_divide_a_token_are_refused() -> None:
    with pytest.raises(ParameterError, match="num_heads must divide d_transformer, which is 16"):
        build(**small(agents={"default": {"num_heads": 3}}))


def test_an_agent_alone_learns_as_much_as_its_rounds_of_message_passing_reveal() -> None:
    only_degrees = {"score_1_share": 1.0, "score_2_share": 0.0, "num_train": 64}
    instance = build(
        trainer_type="solo_agent",
        **small(agents={"default": {"num_gnn_layers": 1}}, dataset=DATASET | only_degrees),
    )
    assert instance.train_environment is not None
    frames = instance.train_environment.first_frames(torch.arange(64))
    agent = instance.agents["verifier"]
    assert (agent.value_head, agent.policy_head) == (None, None)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(agent.solo(frames), frames["y"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2
