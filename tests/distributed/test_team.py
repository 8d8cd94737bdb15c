"""Processes exchange values, add up tensors, and notice when one of them has ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nip_astra.distributed.launch import (
    is_one_of_several,
    processes_on_this_machine,
    rank_of_process,
)
from nip_astra.distributed.sharding import RowDivision
from nip_astra.distributed.team import Team, open_team
from nip_astra.errors import ConfigurationError, LostProcessError, StopRequested
from nip_astra.utils.processor import num_cores
from tests.distributed.processes import together
from tests.kit.messages import says

CPU = torch.device("cpu")


def test_a_single_process_is_a_team() -> None:
    with open_team(CPU) as team:
        assert (team.size, team.rank, team.is_leader) == (1, 0, True)
        assert team.lead(lambda: 5) == 5
        assert team.broadcast("x") == "x"
        assert team.all_gather(3) == [3]
        assert list(team.shard_of(7)) == list(range(7))


def test_shards_are_all_there_is_and_as_equal_as_can_be() -> None:
    teams = [Team() for _ in range(3)]
    for rank, team in enumerate(teams):
        team.rank, team.size = rank, 3
    for count in (0, 1, 2, 3, 7, 9):
        shards = [team.shard_of(count) for team in teams]
        assert [one for shard in shards for one in shard] == list(range(count))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_the_launcher_defines_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = num_cores()
    assert not is_one_of_several()
    # Some clusters set the size for every job.
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not is_one_of_several()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert is_one_of_several()
    assert processes_on_this_machine() == 2
    assert num_cores() == max(alone // 2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"RANK": "5"}, {"RANK": "2"}, {"RANK": "x"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}),
        *({"WORLD_SIZE": "0"}, {"LOCAL_WORLD_SIZE": "9" * 5000}, {"LOCAL_WORLD_SIZE": "0"}),
    ],
)
def test_impossible_values_of_a_launcher_are_refused_by_name(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **wrong}.items():
        monkeypatch.setenv(name, value)
    ((name, value),) = wrong.items()
    read = processes_on_this_machine if name == "LOCAL_WORLD_SIZE" else rank_of_process
    with pytest.raises(ConfigurationError, match=name) as caught:
        read()
    assert value[:40] in str(caught.value)


def everything(store: str) -> dict[str, Any]:
    with open_team(CPU, store) as team:
        two = [torch.full((2,), team.rank + 1.0), torch.full((1,), 2**40 + team.rank)]
        team.all_reduce(two)
        copied = [torch.full((3,), float(team.rank))]
        team.broadcast_tensors(copied)
        requests = [{"x": torch.tensor([1.5])}, {"x": torch.tensor([4.0])}]
        handlers = {"double": lambda given: given["x"] * 2}
        doubled = team.lead(lambda: team.request("double", requests), handlers)
        rows = torch.arange(5.0, requires_grad=True)
        (joined,) = RowDivision(team)(lambda some: [rows[some] ** 2], 5)
        (joined.sum() ** 2).backward()
        assert rows.grad is not None
        team.all_reduce([rows.grad])
        (few,) = RowDivision(team)(lambda some: [rows[:1][some] * 3], 1)
        few_grad = torch.autograd.grad(few.sum(), rows)[0]
        team.all_reduce([few_grad])
        with pytest.raises(StopRequested, match="SIGTERM"):
            team.lead(Mock(side_effect=StopRequested("SIGTERM")))
        return {
            "sums": [one.tolist() for one in two],
            "copied": copied[0].tolist(),
            "broadcast": team.broadcast({"rank": team.rank, 1: (2, None)}),
            "all": team.all_gather("ab" * team.rank),
            "doubled": None if doubled is None else [value.tolist() for value in doubled],
            "joined": joined.tolist(),
            "gradient": rows.grad.tolist(),
            "few": few_grad.tolist(),
        }


def test_processes_share_their_results(tmp_path: Path) -> None:
    leader, other = together(everything, tmp_path)
    assert leader.pop("doubled") == [[3.0], [8.0]]
    assert other.pop("doubled") is None
    squares = [0.0, 1.0, 4.0, 9.0, 16.0]
    expected = {
        "sums": [[3.0, 3.0], [2**41 + 1]],
        "copied": [0.0] * 3,
        "broadcast": {"rank": 0, 1: (2, None)},
        "all": ["", "ab"],
        "joined": squares,
        # d (sum x^2)^2 / dx = 2 sum x^2 * 2 x, once and not once per process.
        "gradient": [4 * sum(squares) * x for x in range(5)],
        "few": [3.0, 0.0, 0.0, 0.0, 0.0],
    }
    assert leader == other == expected


def test_the_end_of_a_process_is_reported_in_plain_words(tmp_path: Path) -> None:
    def lose_one(store: str) -> str:
        with open_team(CPU, store) as team:
            team.all_gather(0)
            if team.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(LostProcessError) as caught:
                team.all_gather(0)
            return str(caught.value)

    message, _ = together(lose_one, tmp_path, killed=[1])
    assert says(message, "2 processes", "has ended")
    assert "third_party" not in message


def test_others_end_with_a_leader_that_fails(tmp_path: Path) -> None:
    def fail_in_leader(store: str) -> str:
        with open_team(CPU, store) as team:
            errors = (ZeroDivisionError, LostProcessError)
            with pytest.raises(errors) as caught:
                team.lead(lambda: 1 / 0)
            return f"{caught.type.__name__}: {caught.value}"

    leader, other = together(fail_in_leader, tmp_path)
    assert leader.startswith("ZeroDivisionError")
    assert says(other, "LostProcessError", "leading process has failed", "division by zero")


def test_a_meeting_that_cannot_be_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError) as caught, open_team(CPU):
        pass
    assert says(caught.value, "process 0 of 2", "env://", "torchrun", "process_store=FILE")
