"""Runs with divided weights are saved in parts, and go on in any number of processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.checkpoints.shards import load_whole
from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import CheckpointError, LostProcessError, StopRequested
from nip_astra.evaluation.api import export
from nip_astra.language_models.services.sharded import ShardedService
from nip_astra.language_models.sources import load_causal_lm
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import resume_experiment
from tests.distributed.learning import gap_of, run
from tests.distributed.processes import together
from tests.kit.messages import says
from tests.kit.resuming import short_experiment

pytestmark = pytest.mark.usefixtures("no_plugins_left")


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedExperiment:
    return short_experiment("ast_dpo", tmp_path / "scenario", num_iterations=2)


@pytest.fixture
def adapted(tmp_path: Path) -> ResolvedExperiment:
    lora = "ast_chat.attacker.language_model.lora={rank: 2}"
    return short_experiment("ast_dpo", tmp_path / "adapted", lora, num_iterations=2)


def signalled(
    resolved: ResolvedExperiment,
    path: Path,
    method: str,
    number: int,
    *,
    rank: int,
    by: signal.Signals,
) -> Callable[[str], str]:
    """A run of which a process gets a signal at some call of the service; gives how it ended."""

    def play(store: str) -> str:
        original, calls = getattr(ShardedService, method), iter(range(99))

        def with_signal(self: ShardedService, *given: Any) -> Any:
            if self.team.rank == rank and next(calls) == number:
                os.kill(os.getpid(), by)
            return original(self, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedService, method, with_signal)
            try:
                run(resolved, path, store, sharding="fsdp")
            except LostProcessError as error:
                return str(error)
            except StopRequested as error:
                return error.signal_name
        return ""

    return play


def run_by(
    resolved: ResolvedExperiment, path: Path, store: str | None, *, stops: bool = False
) -> None:
    """Run by divided weights, if there are several processes."""
    run(resolved, path, store, stops=stops, sharding="fsdp" if store else "none")


def resume(path: Path, store: str | None) -> None:
    sharding = "fsdp" if store else "none"
    resume_experiment(path, progress=False, process_store=store, sharding=sharding)


def in_processes(count: int, work: Callable[[str | None], None], folder: Path) -> None:
    if count == 1:
        work(None)
    else:
        together(work, folder, count=count)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (2, 1, "resolved"),
        pytest.param(1, 2, "resolved", marks=pytest.mark.slow),
        pytest.param(2, 2, "resolved", marks=pytest.mark.slow),
        pytest.param(2, 1, "adapted", marks=pytest.mark.slow),
        pytest.param(1, 2, "adapted", marks=pytest.mark.slow),
        pytest.param(2, 2, "adapted", marks=pytest.mark.slow),
    ],
)
def test_a_divided_run_goes_on_in_any_number_of_processes(
    before: int, after: int, what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    resolved = request.getfixturevalue(what)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    is_exact = before == after
    in_processes(after, lambda store: run_by(resolved, whole, store), tmp_path)
    in_processes(before, lambda store: run_by(resolved, stopped, store, stops=True), tmp_path)
    (checkpoint,) = (stopped / "checkpoints").glob("step_*")
    parts = [*checkpoint.glob("attacker/shards/*"), *checkpoint.glob("optimizer_shards/*")]
    assert len(parts) == (4 if before == 2 else 0)
    in_processes(after, lambda store: resume(stopped, store), tmp_path)
    assert (stopped / "results.json").is_file()
    # float32, and one process reads trees of tokens where divided weights read rows.
    assert gap_of(whole, stopped) <= (0 if is_exact else 1e-4)
    if what == "adapted" and after == 2:
        check_parts_of_adapter(stopped, tmp_path / "joined")


def check_parts_of_adapter(path: Path, joined: Path) -> None:
    """A checkpoint has the adapter alone, which is joined for others."""
    latest = CheckpointStore(path / "checkpoints").latest()
    assert latest is not None
    parts = load_whole(latest / "attacker" / "shards")
    assert {name.split(".")[-2] for name in parts} == {"lora_A", "lora_B"}
    export(path, "huggingface", joined)
    weights = load_causal_lm(str(joined), None).state_dict()
    # The run has left the model with the adapter added in.
    for name, weight in load_file(path / "model" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight)


def test_parts_are_joined_for_others_and_a_lost_one_is_told_with_the_checkpoint_that_is_good(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    together(lambda store: run_by(resolved, path, store), tmp_path)
    weights = load_file(path / "model" / "model.safetensors")
    export(path, "huggingface", tmp_path / "joined")
    joined = AutoModelForCausalLM.from_pretrained(tmp_path / "joined").state_dict()
    assert all(torch.equal(joined[name], weights[name]) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "joined").encode("hello")
    (path / "results.json").unlink()
    store = CheckpointStore(path / "checkpoints")
    latest = store.latest()
    assert latest is not None
    lost = sorted((latest / "attacker" / "shards").iterdir())[0]
    lost.rename(tmp_path / lost.name)

    def failed() -> str:
        with pytest.raises(CheckpointError) as caught:
            resume(path, None)
        return str(caught.value)

    assert says(failed(), f"shards/{lost.name} is missing", "newest valid")
    (tmp_path / lost.name).rename(lost)
    lost.write_bytes(lost.read_bytes()[:-1] + b"x")
    assert says(failed(), f"shards/{lost.name} is corrupt")


def test_a_divided_run_of_which_a_process_is_killed_goes_on_from_its_last_checkpoint(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "killed"
    run(resolved, whole, None)
    killed = signalled(resolved, path, "_part_of_step", 5, rank=1, by=signal.SIGKILL)
    message, _ = together(killed, tmp_path, killed=[1])
    assert says(message, "2 processes", "has ended", "saved in step_", "resume")
    assert not (path / "results.json").exists()
    resume(path, None)
    assert gap_of(whole, path) < 1e-4


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    path = tmp_path / "killed"
    killed = signalled(resolved, path, "_save_parts", 1, rank=1, by=signal.SIGKILL)
    message, _ = together(killed, tmp_path, killed=[1])
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert says(message, "has ended", f"saved in {checkpoint.name}")
    CheckpointStore(checkpoint.parent).verify(checkpoint)


@pytest.mark.slow
def test_a_divided_run_that_is_stopped_saves_within_the_iteration(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "stopped"
    run(resolved, whole, None)
    stopped = signalled(resolved, path, "_part_of_step", 1, rank=0, by=signal.SIGTERM)
    assert together(stopped, tmp_path) == ["SIGTERM", "SIGTERM"]
    (checkpoint,) = (path / "checkpoints").glob("step_*")
    assert len([*checkpoint.glob("attacker/shards/*")]) == 2
    resume(path, None)
    assert gap_of(whole, path) < 1e-4
