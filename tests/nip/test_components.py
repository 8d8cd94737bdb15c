"""Trainers of nip's names take nip's objects, whose parts work as in nip."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import random_split
from torchrl.envs.utils import check_env_specs

from nip_astra.errors import ConfigurationError
from nip_astra.nip import components, running, tensors
from nip_astra.nip.hyper_params import DEFAULTS, AgentsParameters, HyperParameters, ours
from nip_astra.nip.modules import MODULES
from nip_astra.nip.tools import DummyTqdm
from nip_astra.run import prepare_experiment
from nip_astra.scenario_instance import ProtocolInstance
from tests.kit.documents import find

GRAPH_AGENT = {"num_gnn_layers": 1, "num_transformer_layers": 1}
IMAGE_AGENT = {"num_blocks_per_group": 1}
RL = {"frames_per_batch": 32, "minibatch_size": 16, "num_iterations": 1, "num_epochs": 1}
RL |= {"num_test_iterations": 1, "num_normalization_steps": 32}
TRAINERS = {
    "vanilla_ppo": "VanillaPpoTrainer",
    "reinforce": "ReinforceTrainer",
    "spg": "SpgTrainer",
    "solo_agent": "SoloAgentTrainer",
}


def parameters(
    trainer: str = "vanilla_ppo", scenario: str = "graph_isomorphism", **groups: Any
) -> HyperParameters:
    """Small agents, 20 datapoints, and 4 rounds."""
    agent = GRAPH_AGENT if scenario == "graph_isomorphism" else IMAGE_AGENT
    values = {
        "agents": {"_default": agent},
        "nip_protocol": {"max_message_rounds": 4},
        "dataset_options": {"max_train_size": 20},
        "solo_agent": {"num_epochs": 2, "batch_size": 8},
        **groups,
        "rl": RL | groups.get("rl", {}),
    }
    return HyperParameters(scenario, trainer, "test", **values)


def parts(hyper_params: HyperParameters) -> tuple[Any, Any]:
    """The components and the settings."""
    settings = running.ExperimentSettings(progress=False)
    return running.build_scenario_instance(hyper_params, settings), settings


# ---- trainers


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_takes_nips_objects_and_learns_what_ours_learns(name: str) -> None:
    hyper_params = parameters(name)
    instance, settings = parts(hyper_params)
    trainer_class = find(f"nip_astra.nip.trainers.{TRAINERS[name]}")
    trainer = trainer_class(hyper_params, instance, settings)
    assert trainer.agent_names == ["prover", "verifier"]
    assert trainer.protocol_handler.message_channel_names == ["main"]
    assert trainer.protocol_handler.max_message_rounds == trainer.max_message_rounds == 4
    assert trainer.device == torch.device("cpu")
    assert trainer.use_single_body
    assert trainer.use_critic is (name != "solo_agent")
    assert trainer.settings.logger.name == "nip_astra"
    assert trainer.hyper_params.dataset == "test"
    environment = trainer.scenario_instance.train_environment
    assert environment.frames_per_batch == environment.num_envs * 4
    assert trainer.scenario_instance.combined_body is not None
    trainer.save_checkpoint()
    trainer.train()
    shipped = prepare_experiment(ours(hyper_params), progress=False).trainer
    shipped.train()
    learned, expected = (
        [p for agent in one.scenario_instance.agents.values() for p in agent.parameters()]
        for one in (trainer, shipped)
    )
    assert all(torch.equal(a, b) for a, b in zip(learned, expected, strict=True))


def test_both_plain_bases_have_the_components_of_nips_page() -> None:
    seen: list[Any] = []

    class Walks:
        def train(self: Any) -> None:
            seen.append(self)
            for step in range(2):
                self.settings.stat_logger.log({"loss": torch.tensor(1.5 - step)}, step=step)
            self.settings.stat_logger.log({"test_loss": 0.25})

    def one(base: Any) -> Any:
        made = type("Made", (Walks, base), {})
        hyper_params = parameters()
        instance, settings = parts(hyper_params)
        return made(hyper_params, instance, settings)

    for base in (tensors.Trainer, tensors.TensorDictTrainer):
        trainer = one(base)
        logged: list[Any] = []
        trainer.tracker.log_metrics = lambda values, *, step, to=logged: to.append((step, values))
        trainer.train()
        assert logged == [(1, {"loss": 1.5}), (2, {"loss": 0.5}), (2, {"test_loss": 0.25})]
        instance = trainer.scenario_instance
        assert trainer.agent_names == [*instance.agents]
        assert instance.protocol_handler.prover_names == ["prover"]
        assert isinstance(trainer.device, torch.device)
        assert trainer.hyper_params.rl.num_iterations == 1
        assert trainer.hyper_params.solo_agent.learning_rate == 0.001
        assert len(instance.train_dataset) == 20
        assert {"x", "y", "adjacency"} <= set(instance.test_dataset.keys())
        assert instance.train_environment.num_envs == 8
        assert instance.train_environment.steps_per_env_per_iteration == 4
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec", "batch_size"):
            assert getattr(instance.test_environment, name) is not None
        trainer.save_checkpoint()
    assert len(seen) == 2


def test_the_optimizer_has_the_rate_of_each_part() -> None:
    agent = GRAPH_AGENT | {"body_lr_factor": {"actor": 0.1, "critic": 1.0}}
    agent |= {"gnn_lr_factor": {"actor": 0.1, "critic": 1.0}}
    hyper_params = parameters(rl={"lr": 3.0}, agents={"_default": agent})
    trainer = tensors.VanillaPpoTrainer(hyper_params, *parts(hyper_params))
    trainer._build_operators()
    loss_module, _ = trainer._get_loss_module_and_gae()
    optimizer, _ = trainer._get_optimizer_and_param_freezer(loss_module)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in loss_module.parameters()} == set(rates)
    body = trainer.agents["prover"].policy_body
    gnn = {id(p) for p in body.gnn_parameters()}
    assert {round(rates[one], 6) for one in gnn} == {0.03}
    assert {round(rates[id(p)], 6) for p in body.parameters() if id(p) not in gnn} == {0.3}
    heads = trainer.agents["prover"].policy_head.parameters()
    assert {rates[id(p)] for p in heads} == {3.0}
    with pytest.raises(ConfigurationError, match="weight"):
        trainer._get_optimizer_and_param_freezer(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", ["vanilla_ppo", "reinforce"])
def test_a_trainer_that_is_built_by_name_optimizes_the_weights_of_its_loss(
    name: str, is_shared: bool
) -> None:
    small = find("nip_astra.nip.GraphIsomorphismAgentParameters").construct_test_params()
    agents = AgentsParameters(prover=small, verifier=small)
    rl = {"use_shared_body": is_shared}
    hyper_params = parameters(name, agents=agents, rl=rl, functionalize_modules=True)
    settings = running.ExperimentSettings(
        device="cpu", test_run=True, ignore_cache=True, pin_memory=False
    )
    instance = running.build_scenario_instance(hyper_params=hyper_params, settings=settings)
    trainer = find("nip_astra.nip.trainers.build_trainer")(hyper_params, instance, settings)
    loss_module, _ = trainer._get_loss_module_and_gae()
    optimizer, _ = trainer._get_optimizer_and_param_freezer(loss_module)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for _, p in loss_module.named_parameters()} == known


def test_experiments_take_the_settings_of_nips_tests(tmp_path: Path) -> None:
    hyper_params = parameters(message_size=2)
    prepared = running.prepare_experiment(
        hyper_params=hyper_params, test_run=True, ignore_cache=True
    )
    assert prepared.total_num_iterations > 0
    result = running.run_experiment(
        hyper_params,
        tqdm_func=DummyTqdm,
        test_run=True,
        ignore_cache=True,
        pin_memory=False,
        num_rollout_workers=0,
        runs_dir=str(tmp_path),
    )
    assert "mean_accuracy" in result.results["after"]


# ---- parts of agents, and data


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    ("scenario", "symbols", "action"),
    [
        ("graph_isomorphism", (2, 11), "node_selected"),
        ("image_classification", None, "latent_pixel_selected"),
    ],
)
def test_combined_parts_compute_what_our_agents_compute(
    scenario: str, symbols: tuple[int, int] | None, action: str, is_shared: bool
) -> None:
    agent = GRAPH_AGENT if scenario == "graph_isomorphism" else IMAGE_AGENT
    hyper_params = parameters(
        scenario=scenario,
        interaction_protocol="merlin_arthur",
        agents=AgentsParameters(prover0=agent, prover1=agent, verifier=agent),
        rl={"use_shared_body": is_shared, "frames_per_batch": 32},
    )
    instance, _ = parts(hyper_params)
    body, value_body = (
        (instance.combined_body, instance.combined_body)
        if is_shared
        else (instance.combined_policy_body, instance.combined_value_body)
    )
    assert (instance.combined_body is None) is not is_shared
    loader = components.TensorDictDataLoader(instance.train_dataset, batch_size=8)
    batch = next(iter(loader))
    symbols = symbols or tuple(batch["x"].shape[-2:])
    assert batch["x"].shape == (8, 2, 1, 1, *symbols)
    batch["round"] = torch.ones(8, dtype=torch.long)
    batch["message"] = torch.zeros(8, 1, 1, *symbols)
    batch["message"][..., 0, 0] = 1.0
    whole = components.unviewed(instance).combined_agents.eval()
    acted = TensorDictSequential(body, instance.combined_policy_head)(batch.clone())
    valued = TensorDictSequential(value_body, instance.combined_value_head)(batch.clone())
    frame = components.our_frame(batch, instance.train_environment)
    for number, name in enumerate(whole.names):
        output = whole.policy(name, frame)
        logits = acted["agents", f"{action}_logits"][:, number]
        assert torch.equal(logits, output.message_logits_BVPS)
        decision = acted["agents", "decision_logits"][:, number]
        expected = torch.zeros(8, 3) if output.decision_logits_B3 is None else output[1]
        assert torch.equal(decision, expected)
        assert torch.equal(valued["agents", "value"][:, number], whole.values(name, frame))


def test_a_replaced_body_gets_the_channels_that_its_agent_sees() -> None:
    agents = AgentsParameters(
        dict.fromkeys(("verifier", "prover0", "prover1", "prover2"), GRAPH_AGENT)
    )
    hyper_params = parameters(
        interaction_protocol="multi_channel_test", agents=agents, rl={"frames_per_batch": 40}
    )
    instance, settings = parts(hyper_params)
    handler, combined = instance.protocol_handler, instance.combined_body
    old_bodies = combined.bodies.copy()
    seen: dict[str, list[int]] = {}

    class Checking(components.TensorDictAgentPart):
        def forward(self, data: TensorDict) -> TensorDict:
            channels = data["x"][0, 0, :, 0, 0, 0].long().tolist()
            assert channels == self.visible_message_channel_indices
            assert len(channels) == self.num_visible_message_channels
            names = [handler.message_channel_names[index] for index in channels]
            assert names == self.visible_message_channel_names
            seen[self.agent_name] = channels
            return old_bodies[self.agent_name].forward(data)

    for name in combined.bodies:
        combined.bodies[name] = Checking(hyper_params, settings, name, handler)
    frame = instance.train_dataset[:5].clone()
    channels = torch.arange(handler.num_message_channels, dtype=torch.float32)
    frame["x"] = channels[:, None, None, None].expand(frame["x"].shape).clone()
    output = TensorDictSequential(combined, instance.combined_policy_head)(frame)
    logits = output["agents", "node_selected_logits"]
    for number, (name, visible) in enumerate(seen.items()):
        assert visible == handler.visible_channels(name)
        hidden = sorted(set(range(handler.num_message_channels)) - set(visible))
        assert (logits[:, number, hidden] == components.MASKED).all()
    part = combined.bodies["prover0"]
    assert (part.agent_id, part.is_prover, part.is_verifier) == (
        handler.agent_names.index("prover0"),
        True,
        False,
    )
    assert part.max_message_rounds == handler.max_message_rounds
    assert part.visible_message_channel_mask.tolist() == [
        handler.can_agent_see_channel("prover0", name) for name in handler.message_channel_names
    ]


def test_an_agent_alone_learns_in_a_loop_of_ones_own() -> None:
    hyper_params = parameters("solo_agent")
    instance, _ = parts(hyper_params)
    learned, _ = random_split(instance.train_dataset, (0.8, 0.2))
    agent = instance.agents["verifier"]
    model = TensorDictSequential(agent.body, agent.solo_head)
    groups = agent.get_model_parameter_dicts(base_lr=0.01)
    assert {id(p) for group in groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    optimizer = torch.optim.Adam(groups)
    losses = []
    for _ in range(6):
        for batch in components.TensorDictDataLoader(learned, batch_size=16):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch)["decision_logits"], batch["y"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    named = dict(agent.solo_head.named_parameters()).items()
    assert len(agent.get_model_parameter_dicts(0.01, named)) == 1


# ---- environments


@pytest.mark.parametrize("scenario", ["graph_isomorphism", "image_classification"])
def test_an_environment_steps_frames_in_nips_layout(scenario: str) -> None:
    rewards = {"prover_reward": 1, "verifier_reward": 2, "verifier_terminated_penalty": -4}
    rewards |= {"verifier_no_guess_reward": 8, "verifier_incorrect_penalty": -16}
    hyper_params = parameters(
        scenario=scenario,
        rl={"frames_per_batch": 48, "steps_per_env_per_iteration": 4},
        protocol_common={**rewards, "verifier_first": False},
    )
    settings = running.ExperimentSettings(progress=False)
    handler = running.build_protocol_handler(hyper_params, settings)
    place = "graph_isomorphism" if scenario == "graph_isomorphism" else "image_classification"
    prefix = "GraphIsomorphism" if scenario == "graph_isomorphism" else "ImageClassification"
    dataset = find(f"nip_astra.nip.{place}.{prefix}Dataset")(hyper_params, settings, handler)
    environment = find(f"nip_astra.nip.{place}.{prefix}Environment")(
        hyper_params, settings, dataset, handler
    )
    check_env_specs(environment)
    symbols = environment.main_message_space_shape
    if scenario == "graph_isomorphism":
        assert symbols == (2, environment.max_num_nodes)
    else:
        assert symbols == (environment.latent_height, environment.latent_width)
        assert dataset["image"].shape[1:] == (
            environment.dataset_num_channels,
            environment.image_height,
            environment.image_width,
        )
    count = 12
    rounds = torch.arange(count) % 4
    frame = environment_frame(dataset, count, rounds)
    sent = torch.arange(2 * count).view(count, 2, 1, 1) % (symbols[0] * symbols[1])
    done = rounds == 0
    frame["agents"] = TensorDict(
        {
            environment.layout.action: sent,
            "decision": torch.tensor([[0] * count, [0, 1, 2, 2, 0, 0] * 2]).T,
            "done": done[:, None].expand(count, 2).clone(),
        },
        batch_size=(count, 2),
    )
    frame["done"], frame["terminated"] = done, torch.zeros(count, dtype=torch.bool)
    frame["y"] = torch.tensor([0, 1, 0, 1] * 3)
    following = environment._step(frame)
    for row in range(count):
        sender = int(rounds[row]) % 2
        message = torch.zeros(symbols).flatten()
        message[sent[row, sender, 0, 0]] = 1
        assert torch.equal(following["message"][row, 0, 0], message.view(symbols))
        history = following["message_history"][row]
        assert torch.equal(history[rounds[row], 0, 0], message.view(symbols))
        assert history.sum() == 1
        expected = expected_reward(int(rounds[row]), int(frame["agents", "decision"][row, 1]),
                                   int(frame["y"][row]))  # fmt: skip
        assert following["agents", "reward"][row].tolist() == expected
    assert torch.equal(following["x"], following["message_history"])
    assert torch.equal(following["round"], rounds + 1)
    decides = (rounds % 2 == 1) & (frame["agents", "decision"][:, 1] != 2)
    assert torch.equal(following["done"], done | decides | (rounds == 3))


def environment_frame(dataset: TensorDict, count: int, rounds: Tensor) -> TensorDict:
    """The first frames of datapoints, in some rounds, without messages."""
    frame = dataset[:count].clone()
    frame["round"] = rounds
    return frame


def expected_reward(round_index: int, decision: int, label: int) -> list[float]:
    """Rewards of prover and verifier, by nip's rules for a prover that begins."""
    if round_index % 2 == 0:
        return [0.0, 0.0]
    if decision == 2:
        return [0.0, -4.0 if round_index == 3 else 8.0]
    return [float(decision), 2.0 if decision == label else -16.0]


# ---- protocols


def test_zero_knowledge_protocols_have_nips_names_and_step() -> None:
    hyper_params = parameters(protocol_common={"zero_knowledge": True})
    handler = running.build_protocol_handler(hyper_params, running.ExperimentSettings())
    assert handler.message_channel_names == ["main_standard", "main_adversarial", "main_simulator"]
    assert handler.agent_names == ["prover", "verifier", "adversarial_verifier", "simulator"]
    base = handler.base_protocol
    assert (base.verifier_name, handler.verifier_index) == ("verifier", 1)
    rounds, seed = torch.arange(4), torch.zeros(4, dtype=torch.long)
    mask = handler.get_active_agents_mask_from_rounds_and_seed(rounds, seed)
    of_base = base.get_active_agents_mask_from_rounds_and_seed(rounds, seed)
    assert torch.equal(mask[:, 1, 0], of_base[:, 1, 0])
    assert torch.equal(mask[:, 2, 1], of_base[:, 1, 0])
    guesses = base.get_verifier_guess_mask_from_rounds_and_seed(rounds, seed)
    assert torch.equal(guesses, of_base[:, 1].any(-1))

    torch.manual_seed(0)
    shape = (16, 4)
    agents = {
        "decision": torch.randint(0, 3, (*shape, 4)),
        "done": torch.randint(0, 2, (*shape, 4), dtype=torch.bool),
        "main_message_logits": torch.randn(*shape, 4, 3, 1, 5),
        "decision_logits": torch.randn(*shape, 4, 3),
    }
    frames = TensorDict(
        {
            "y": torch.randint(0, 2, (*shape, 1)),
            "round": torch.randint(0, 4, shape),
            "seed": torch.zeros(shape, dtype=torch.long),
            "done": torch.randint(0, 2, shape, dtype=torch.bool),
            "agents": TensorDict(agents, batch_size=(*shape, 4)),
        },
        batch_size=shape,
    )
    done, agent_done, terminated, reward = handler.step_interaction_protocol(frames)
    _, base_done, base_terminated, base_reward = base.step_interaction_protocol(frames)
    assert torch.equal(agent_done[..., 1], base_done[..., 1])
    assert torch.equal(terminated, base_terminated)
    assert torch.equal(done, (agent_done[..., 1] & agent_done[..., 2]) | frames["done"])
    for other in (0, 3):
        assert torch.equal(agent_done[..., other], done)
    assert torch.equal(reward[..., 2], -reward[..., 3])
    torch.testing.assert_close(reward[..., 0], base_reward[..., 0] + reward[..., 3])


# ---- parameters of chat models, and of one's own


def test_a_hosted_model_has_its_address_and_penalty() -> None:
    agent = {"model_name": "served", "model_provider": "vLLM-OpenAI"}
    agent |= {"vllm_openai_base_url": "http://localhost:8123/v1", "repetition_penalty": 1.2}
    given = HyperParameters(
        "code_validation", "pure_text_ei", "lrhammond/buggy-apps", agents={"_default": agent}
    )
    model = ours(given).code_validation.agents["prover"].model
    assert (model.model, model.base_url) == ("served", "http://localhost:8123/v1")
    assert model.api_key_variable is None
    assert model.extra_body == {"repetition_penalty": 1.2}
    given.agents["_default"].model_provider = "OpenRouter"
    assert ours(given).code_validation.agents["prover"].model.base_url == running.OPENROUTER
    given.agents["_default"].model_provider = "Elsewhere"
    with pytest.raises(ConfigurationError, match="Elsewhere"):
        ours(given)


def test_registered_parameter_classes_are_restored() -> None:
    sub_parameters = find("nip_astra.nip.parameters.parameters_base.SubParameters")
    register = find("nip_astra.nip.parameters.parameters_base.register_parameter_class")

    @register
    @dataclasses.dataclass
    class OwnParameters(sub_parameters):  # type: ignore[valid-type, misc]  # found by name
        share: float = 0.5

    try:
        stored = {"_type": "OwnParameters", **OwnParameters(0.25).to_dict()}
        assert sub_parameters.from_dict(stored) == OwnParameters(0.25)
        with pytest.raises(ConfigurationError, match="other"):
            sub_parameters.from_dict({**stored, "other": 1})
        assert sub_parameters.from_dict({**stored, "other": 1}, True) == OwnParameters(0.25)
        with pytest.raises(ConfigurationError, match="dataclass"):
            register(type("Plain", (), {}))
    finally:
        del DEFAULTS["OwnParameters"]
    bases = [find(f"nip_astra.nip.{name}") for name in ("AgentParameters", "SubParameters")]
    for name in ("GraphIsomorphismAgentParameters", "CodeValidationAgentParameters"):
        assert issubclass(find(f"nip_astra.nip.{name}"), tuple(bases[:1]))
    assert issubclass(*bases)


def test_only_instances_of_protocols_get_nips_names() -> None:
    instance, _ = parts(parameters())
    assert isinstance(components.unviewed(instance), ProtocolInstance)
    other = object()
    assert components.instance_view(other, None) is other
    assert "graph_isomorphism" in MODULES
