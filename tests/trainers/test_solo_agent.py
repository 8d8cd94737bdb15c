"""Supervised training of single agents, and as a start for reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nip_astra.errors import CheckpointError, ConfigurationError, NonFiniteLossError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.trainers import solo_agent
from nip_astra.trainers.solo_agent import CACHE_DIR
from tests.kit.learning import Learning
from tests.kit.toy_protocol_scenario import (
    ToyBody,
    ToyPolicyHead,
    ToyProtocolScenario,
    merged,
    toy_trainer,
)

pytestmark = pytest.mark.usefixtures("toy_protocol")

SOLO = {"num_epochs": 1, "minibatch_size": 10, "lr": 0.02}


def test_an_agent_learns_only_from_its_observations(learning: Learning) -> None:
    trainer = toy_trainer("solo_agent", solo_agent={**SOLO, "num_epochs": 20}, seed=learning.seed)
    trainer.train()
    after = trainer.results["after"]
    learning.check(after["prover/test_accuracy"], threshold=0.9, best=1.0)
    learning.check(abs(after["verifier/test_accuracy"] - 0.5), threshold=0.25, best=0.0)
    learning.check(after["prover/test_loss"], threshold=0.3, best=0.0)
    assert after["verifier/test_loss"] == pytest.approx(0.693, abs=0.1)
    # The toy's score is the label plus one, and half of its datapoints have each label.
    parts = [after[f"verifier/test_accuracy_wl_{score}"] for score in (1, 2)]
    assert sum(parts) / 2 == pytest.approx(after["verifier/test_accuracy"])


def test_learning_rate_factors_and_schedules_of_agents_hold() -> None:
    idle = {"_type": "contiguous", "period": 2, "start": 1, "stop": 2}
    frozen = {"agent_lr_factor": {"actor": 0.5}, "body_lr_factor": {"actor": 0.0, "critic": 3.0}}
    agents = {"prover": frozen, "verifier": {"update_schedule": idle}}

    def moves_of(trainer: Any, name: str, epoch: int) -> dict[str, float]:
        """Largest change of the weights of each part of an agent."""
        agent = trainer.scenario_instance.agents[name]
        before = {key: value.detach().clone() for key, value in agent.named_parameters()}
        trainer.trainings[name].run_epoch(epoch)
        largest: dict[str, float] = {}
        for key, value in agent.named_parameters():
            part, distance = key.partition(".")[0], (value.detach() - before[key]).abs().max()
            largest[part] = max(largest.get(part, 0.0), float(distance))
        return largest

    for is_overridden in (False, True):
        solo = {**SOLO, "num_epochs": 2, "minibatch_size": 32, "anneal_lr": False}
        solo["body_lr_factor_override"] = is_overridden
        trainer = toy_trainer("solo_agent", solo_agent=solo, toy_protocol={"agents": agents})
        prover = moves_of(trainer, "prover", 0)
        # The first step of Adam is its learning rate.
        for part, factor in (("policy_body", 0.5 * is_overridden), ("solo_head", 0.5)):
            assert prover[part] == pytest.approx(factor * SOLO["lr"], rel=0.05)
        assert set(moves_of(trainer, "verifier", 0).values()) == {0.0}
        verifier = moves_of(trainer, "verifier", 1)
        assert verifier.keys() == {"policy_body", "solo_head"}, "bodies learn, not heads alone"
        assert min(verifier.values()) > 0.01


def test_pretraining_trains_bodies_that_reinforcement_learning_leaves_alone() -> None:
    never = {"_type": "constant", "is_on": False}
    frozen = {"body_lr_factor": {"actor": 0.0, "critic": 0.0}, "update_schedule": never}
    trainer = toy_trainer(
        rl={"pretrain_agents": True}, solo_agent=SOLO, toy_protocol={"agents": {"default": frozen}}
    )
    body = trainer.agents["prover"].policy_body
    before = [value.detach().clone() for value in body.parameters()]
    trainer._prepare()
    assert not any(map(torch.equal, before, body.parameters()))


def test_nothing_is_learned_from_held_out_data() -> None:
    trainer = toy_trainer("solo_agent", solo_agent={**SOLO, "test_share": 0.25})
    training = trainer.trainings["prover"]
    assert len(training.held_out_N) == 8
    assert sorted([*training.held_out_N.tolist(), *training.learned_N.tolist()]) == list(range(32))
    first_frames = training.environment.first_frames
    with mock.patch.object(training.environment, "first_frames", wraps=first_frames) as read:
        training.run_epoch(0)
    rows = [row for call in read.call_args_list for row in call.args[0].tolist()]
    assert sorted(rows) == sorted(training.learned_N.tolist())


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    trainer = toy_trainer("solo_agent", solo_agent=SOLO)
    trainer.trainings["prover"].environment.dataset["vector"][0] = float("nan")
    trainer.trainings["prover"].learned_N = torch.arange(32)
    with pytest.raises(NonFiniteLossError, match=r"Lower solo_agent\.lr"):
        trainer.train()


# ---- as a start for reinforcement learning


def pretrained(tmp_path: Path, trainer: str = "vanilla_ppo", **more: Any) -> Any:
    settings = ExperimentSettings(progress=False, runs_dir=str(tmp_path))
    given = merged({"rl": {"pretrain_agents": True}, "solo_agent": SOLO}, more)
    built = toy_trainer(trainer, settings=settings, **given)
    built._prepare()
    return built


def test_random_agents_alone_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="is_random"):
        toy_trainer("solo_agent", toy_protocol={"agents": {"default": {"is_random": True}}})


def test_an_optimizer_of_other_weights_is_refused() -> None:
    trainer = toy_trainer("solo_agent", solo_agent=SOLO)
    trainer.train()
    training = trainer.trainings["prover"]
    state = training.state()
    state["param_groups"] = state["param_groups"][:1]
    with pytest.raises(CheckpointError, match="'prover'"):
        training.load_state(state)


def test_both_bodies_start_from_a_body_trained_alone(tmp_path: Path, learning: Learning) -> None:
    trainer = pretrained(tmp_path, solo_agent={"num_epochs": 20}, seed=learning.seed)
    agent = trainer.agents["prover"]
    fresh = toy_trainer("vanilla_ppo", rl={"pretrain_agents": True}).agents["prover"]
    policy, value = (body.state_dict() for body in (agent.policy_body, agent.value_body))
    assert all(torch.equal(policy[name], value[name]) for name in policy)
    assert set(trainer.optimizers.optimizers) == {"prover", "verifier"}, "solo heads learn no more"
    assert not torch.equal(policy["net.0.weight"], fresh.policy_body.state_dict()["net.0.weight"])
    with torch.no_grad():
        frames = trainer.test_environment.first_frames(torch.arange(32))
        right = agent.solo(frames).argmax(-1) == frames["y"].squeeze(-1)
    learning.check(float(right.float().mean()), threshold=0.85, best=1.0)


@pytest.mark.parametrize("pretrain_decisions", [True, False])
def test_decisions_start_from_the_solo_head_if_requested(
    pretrain_decisions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over: list[Any] = []
    monkeypatch.setattr(ToyPolicyHead, "decide_as", lambda head, solo: taken_over.append(solo))
    trainer = pretrained(tmp_path, rl={"pretrain_decisions": pretrain_decisions})
    heads = [trainer.agents[name].solo_head for name in trainer.agents.names]
    assert taken_over == (heads if pretrain_decisions else [])


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"solo_agent": {"num_epochs": 2}},
        {"toy_protocol": {"num_datapoints": 30}},
        {"toy_protocol": {"message_size": 2}},
        {"toy_protocol": {"include_linear_message_space": True}},
        {"toy_protocol": {"agents": {"default": {"d_hidden": 12}}}},
        {"nip": {"max_message_rounds": 4}, "rl": {"steps_per_env_per_iteration": 3}},
    ],
)
def test_other_parameters_have_bodies_of_their_own(tmp_path: Path, other: dict[str, Any]) -> None:
    pretrained(tmp_path)
    pretrained(tmp_path, **other)
    assert len(list((tmp_path / CACHE_DIR).iterdir())) == 4


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (ToyProtocolScenario, "layers_on", "compiled: toy.c"),
        (solo_agent, "processor_name", "another"),
        (solo_agent, "digest_of_code", "other lines"),
    ],
)
def test_other_layers_processors_and_code_have_bodies_of_their_own(
    owner: Any, name: str, value: str, tmp_path: Path
) -> None:
    pretrained(tmp_path)
    with mock.patch.object(owner, name, return_value=value) as replaced:
        pretrained(tmp_path)
    replaced.assert_called()
    assert len(list((tmp_path / CACHE_DIR).iterdir())) == 4


def test_the_code_of_a_body_is_that_of_its_classes_as_well(tmp_path: Path) -> None:
    with mock.patch.object(solo_agent, "digest_of_code", return_value="code") as digest:
        pretrained(tmp_path)
    modules = {module for call in digest.call_args_list for module in call.args[0]}
    bases = "nip_astra.scenario_base.protocol.tensordict_agents"
    assert {"tests.kit.toy_protocol_scenario", bases} <= modules
    assert not any(name.startswith("torch") for name in modules)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"broken", id="no safetensors file"),
        pytest.param(lambda whole: whole[:-1], id="cut short"),
        pytest.param(lambda whole: whole[:-8] + bytes(8), id="other bytes"),
    ],
)
def test_a_body_is_read_from_its_file_unless_it_is_damaged(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = pretrained(tmp_path).agents.state_dict()
    files = {path: path.read_bytes() for path in (tmp_path / CACHE_DIR).iterdir()}
    times = {path: path.stat().st_mtime_ns for path in files}
    assert len(files) == 2
    again = pretrained(tmp_path).agents.state_dict()
    assert {path: path.stat().st_mtime_ns for path in files} == times
    for path, whole in files.items():
        path.write_bytes(damage(whole))
    repaired = pretrained(tmp_path).agents.state_dict()
    assert caplog.text.count("computed again") == 2
    assert {path: path.read_bytes() for path in files} == files
    for name in (name for name in first if "_body" in name):
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], repaired[name])


def test_a_critic_that_sees_more_channels_keeps_its_own_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: set[bool] = set()
    load = ToyBody.load_state_dict

    def recorded(body: ToyBody, *args: Any, **kwargs: Any) -> Any:
        loaded.add(body.shape.is_verifier)
        return load(body, *args, **kwargs)

    monkeypatch.setattr(ToyBody, "load_state_dict", recorded)
    pretrained(tmp_path, "mappo", interaction_protocol="mnip", mnip={"max_message_rounds": 4})
    # The verifier sees all channels itself.
    assert loaded == {True}
