"""The probe for messages that reveal the label sees only an agent's first message.

Shapes: E environments, T rounds, A agents, C channels, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.protocols.registry import build_protocol_handler
from nip_astra.scenario_base.protocol.tensordict_agents import MessageSpace
from nip_astra.trainers.protocol.message_regression import MessageRegression
from tests.kit.learning import Learning

PLAIN = HyperParameters.with_sections({})
NUM_SYMBOLS = 6


def regression(
    kind: str | None = "linear",
    seed: int = 0,
    playing: Sequence[str] = ("prover", "verifier"),
    **fields: Any,
) -> MessageRegression:
    regressor = None if kind is None else {"_type": kind}
    values = {"message_regression": {"regressor": regressor} | fields}
    names = {"trainer": "none", "scenario": "none", "seed": seed}
    return MessageRegression(PLAIN.from_dict(names | values), playing)


def game(protocol: str = "nip", num_symbols: int = NUM_SYMBOLS, num_linear: int = 0) -> Any:
    """The probe's input from the combined agents."""
    names = {"trainer": "none", "scenario": "none", "interaction_protocol": protocol}
    handler = build_protocol_handler(PLAIN(**names))
    space = MessageSpace(num_symbols, 1, num_linear)
    return SimpleNamespace(names=handler.agent_names, protocol=handler, space=space)


def play(
    combined: Any, num_rounds: int, *, num_datapoints: int = 120, first: int = 0, seed: int = 3
) -> TensorDict:
    """Random moves in one episode per datapoint, from a round on; labels are balanced."""
    protocol, space = combined.protocol, combined.space
    generator = torch.Generator().manual_seed(seed)
    batch_size = (num_datapoints, num_rounds)
    ids_ET = torch.arange(num_datapoints)[:, None].expand(batch_size)
    rounds_ET = torch.arange(first, first + num_rounds).expand(batch_size)
    seeds_ET = (ids_ET // 2) % 2
    active = protocol.active_mask(rounds_ET.flatten(), seeds_ET.flatten())
    place = (*batch_size, protocol.num_agents, protocol.num_channels, space.message_size)
    agents = {"message": torch.randint(space.num_symbols, place, generator=generator)}
    if space.num_linear_symbols:
        shape = {"high": space.num_linear_symbols, "size": place, "generator": generator}
        agents["linear_message"] = torch.randint(**shape)
    content = {
        "round": rounds_ET,
        "seed": seeds_ET,
        "y": ids_ET[..., None] % 2,
        "datapoint_id": ids_ET,
        "active_mask": active.unflatten(0, batch_size),
        "agents": TensorDict(agents, batch_size=batch_size),
    }
    return TensorDict(content, batch_size=batch_size)


def leak(
    batch: TensorDict, combined: Any, agent: str, round_index: int, key: str = "message"
) -> None:
    """Have an agent send the label in a round, in a code of two symbols per label."""
    number = combined.names.index(agent)
    y_E = batch["y"][:, round_index, 0]
    sent_E = y_E if key == "linear_message" else y_E + 2 * (torch.arange(len(y_E)) % 3 > 0)
    batch["agents", key][:, round_index, number] = sent_E[:, None, None]


@pytest.mark.parametrize(
    ("kind", "key"), [("mlp", "message"), ("linear", "message"), ("linear", "linear_message")]
)
def test_a_label_in_the_first_message_of_a_prover_is_seen(
    learning: Learning, kind: str, key: str
) -> None:
    combined = game(num_linear=2 if key == "linear_message" else 0)
    batch = play(combined, 4, num_datapoints=400, seed=learning.seed)
    probe = regression(kind, learning.seed)
    before = probe.regress(batch, combined, 0)["message_regression/prover"]
    learning.check(before, threshold=0.8, best=0.5)
    leak(batch, combined, "prover", 1, key)
    result = regression(kind, learning.seed).regress(batch, combined, 0)
    assert len(result) == 4, "an accuracy and a baseline of each agent"
    learning.check(result["message_regression/prover"], threshold=0.9, best=1.0)
    # 80 test messages, 4 standard deviations
    learning.check(abs(result["message_regression/verifier"] - 0.5), threshold=0.224, best=0.0)
    learning.check(result["message_regression/prover_baseline"], threshold=0.7, best=0.5)


def test_received_and_later_messages_are_not_taken_for_the_first_message() -> None:
    combined = game()
    batch = play(combined, 6, num_datapoints=1000)
    leak(batch, combined, "verifier", 0)
    leak(batch, combined, "prover", 3)
    result = regression().regress(batch, combined, 0)
    assert result["message_regression/verifier"] == 1.0
    assert abs(result["message_regression/prover"] - 0.5) < 4 * 0.5 / 200**0.5


def test_values_where_an_agent_may_not_send_are_not_read() -> None:
    combined = game("debate")
    batch = play(combined, 2)
    expected = regression().regress(batch, combined, 0)
    silent = ~batch["active_mask"]
    y_ET1 = batch["y"][..., None, None].expand_as(batch["agents", "message"])
    batch["agents", "message"] = torch.where(silent[..., None], y_ET1, batch["agents", "message"])
    assert regression().regress(batch, combined, 0) == expected


def test_who_speaks_first_may_depend_on_the_episode() -> None:
    combined = game("merlin_arthur")
    batch = play(combined, 2)
    for name in combined.names:
        leak(batch, combined, name, 0 if name != "verifier" else 1)
    result = regression(playing=combined.names).regress(batch, combined, 0)
    assert [result[f"message_regression/{name}"] for name in combined.names] == [1.0, 1.0, 1.0]


def test_answers_are_not_known_from_other_messages_about_the_same_datapoint() -> None:
    # Each datapoint has its symbol, seen in 8 episodes: the answer could be memorised.
    combined = game(num_symbols=40)
    batch = torch.cat([play(combined, 2, num_datapoints=40) for _ in range(8)])
    y_N = (torch.rand(40, generator=torch.Generator().manual_seed(0)) > 0.5).long().repeat(8)
    batch["y"] = y_N[:, None, None].expand(-1, 2, 1)
    symbols = batch["datapoint_id"][..., None, None, None]
    batch["agents", "message"] = symbols.expand(-1, -1, 2, 1, 1)
    result = regression(test_share=0.5).regress(batch, combined, 0)
    # An unseen symbol carries no information beyond the more common label.
    baseline = result["message_regression/prover_baseline"]
    assert result["message_regression/prover"] == pytest.approx(baseline, abs=1e-6)
    assert baseline < 0.8


def test_where_there_is_nothing_to_fit_nothing_is_given() -> None:
    combined = game()
    begun_before = play(combined, 3, first=2)
    for index in range(3):
        leak(begun_before, combined, "prover", index)
    assert regression().regress(begun_before, combined, 0) == {}
    assert regression().regress(play(combined, 2, num_datapoints=1), combined, 0) == {}
    assert len(regression().regress(play(combined, 2, num_datapoints=2), combined, 0)) == 4
    batch = play(combined, 2)
    assert regression(None).regress(batch, combined, 0) == {}
    probe = regression(period=3)
    assert [bool(probe.regress(batch, combined, i)) for i in range(5)] == [1, 0, 0, 1, 0]


def test_only_the_agents_that_are_named_are_probed() -> None:
    combined = game()
    batch = play(combined, 4)
    result = regression(agents=["prover"]).regress(batch, combined, 0)
    assert set(result) == {"message_regression/prover", "message_regression/prover_baseline"}
    assert regression().regress(batch, combined, 0).items() >= result.items()
    with pytest.raises(UnknownNameError, match=r"unknown agent 'provr'.*'prover'"):
        regression(agents=["provr"])


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_the_run_s_random_numbers_and_batch_stay_as_they_are(kind: str) -> None:
    combined = game()
    batch = play(combined, 4)
    before, state = batch.clone(), torch.get_rng_state()
    with torch.no_grad():
        result = regression(kind).regress(batch, combined, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert bool((batch == before).all())
    assert regression(kind).regress(batch, combined, 7) == result
    others = [regression(kind, seed=1).regress(batch, combined, 7)]
    others.append(regression(kind).regress(batch, combined, 8))
    assert all(other != result for other in others)


def test_a_fit_continues_from_the_last_fit_if_requested(learning: Learning) -> None:
    combined = game()
    batch = play(combined, 4, num_datapoints=600, seed=learning.seed)
    leak(batch, combined, "prover", 1)
    slow = {"_type": "mlp", "num_epochs": 1, "lr": 1e-3}
    scores: dict[bool, list[float]] = {}
    for reset_on_fit in (True, False):
        probe = regression(None, learning.seed, regressor=slow, reset_on_fit=reset_on_fit)
        results = [probe.regress(batch, combined, iteration) for iteration in range(25)]
        scores[reset_on_fit] = [result["message_regression/prover"] for result in results]
    learning.check(sum(scores[True]) / 25, threshold=0.85, best=0.5)
    learning.check(min(scores[False][-5:]), threshold=0.9, best=1.0)


def test_a_continued_probe_never_predicts_its_training_data() -> None:
    probe = regression("mlp", reset_on_fit=False)
    ids = torch.arange(400)
    first, second = (
        probe._is_judged(ids[rows], torch.Generator()) for rows in (slice(0, 300), slice(100, 400))
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first[100:], second[:200])
    assert 0.1 < first.float().mean() < 0.3


def test_a_regressor_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'linear'.*reset_on_fit"):
        regression("linear", reset_on_fit=False)
