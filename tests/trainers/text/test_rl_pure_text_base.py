from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn import Module

from nip_astra.errors import (
    CheckpointError,
    ConfigurationError,
    RunDirectoryError,
    ServiceError,
    StopRequested,
)
from nip_astra.language_models.services import retrying
from nip_astra.language_models.services.chat import ChatRequest
from nip_astra.language_models.services.fine_tuning import FineTuningJob, JobStatus
from nip_astra.resume_check import read_run_contents
from nip_astra.run import _write_report
from nip_astra.samplers import text_rollouts
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.rl_pure_text_base import PureTextRlTrainer
from nip_astra.utils.nested_array_dict import NestedArrayDict
from tests.kit import actors_here
from tests.kit.experiments import metrics_of, run_in
from tests.kit.messages import says
from tests.kit.resuming import Killed, short_experiment
from tests.kit.text_games import (
    FakeFineTuning,
    Script,
    TextParts,
    build_text_parts,
    build_text_trainer,
)


def honest(name: str) -> Script:
    """The base decides by the request's seed; a tuned verifier is right."""

    def script(request: ChatRequest, number: int) -> str:
        if "Last turn" not in request.messages[-1]["content"]:
            return f"said {(request.seed or 0) % 97}"
        claim = int(str(request.messages[0]["content"]).split("claim ")[1].rstrip("."))
        right = claim % 2 if name != "base" else (request.seed or 0) % 2
        return f"Decision: {'accept' if right else 'reject'}"

    return script


THREE = {"text_rl": {"num_iterations": 3}}
SHARED = {"shared_model_group": "both"}


def _build(folder: Path, **options: Any) -> TextParts:
    return build_text_parts(folder / "prompts", honest, **options)


def _trained(folder: Path, *, test_run: bool = False, **options: Any) -> tuple[TextParts, Any]:
    """A finished run without a directory; `options` are those of its parts."""
    parts = _build(folder, **options)
    trainer = build_text_trainer(parts, test_run=test_run)
    trainer.train()
    return parts, trainer


def test_a_run_tests_learns_and_tests_again(tmp_path: Path) -> None:
    directory, parts = RunDirectory.create(tmp_path, "one"), _build(tmp_path)
    trainer = build_text_trainer(parts, directory)
    directory.write_yaml("hyper_parameters.yaml", trainer.hyper_params.to_dict())
    trainer.train()
    results = directory.read_json("results.json")
    assert results == json.loads(json.dumps(trainer.results))
    assert results["after"]["mean_accuracy"] == 1.0
    assert results["before"]["mean_accuracy"] < 1.0
    assert results["before"]["num_episodes"] == 8
    assert results["models"] == {
        agent: f"tuned:{trainer.state.run_key}/{agent}/0" for agent in ("prover", "verifier")
    }
    assert results["training"]["num_jobs"] == 2
    # Two samplings of six and two tests of eight, of two turns each.
    assert results["training"]["num_requests"] == parts.num_requests == 56
    assert results["training"]["prompt_tokens"] == 560
    rows = metrics_of(directory.path)
    assert rows[-1]["test_mean_accuracy"] == 1.0
    names = {"accuracy_where_level_1", "verifier/mean_episode_reward", "cost/num_requests"}
    assert names <= set(rows[0])
    # Rollouts are kept with prompts and transcripts, which the report shows.
    folders = sorted(path.name for path in directory.rollouts_dir.iterdir() if path.is_dir())
    assert folders == ["test_0000", "test_0001", "train_0000", "train_0001"]
    rollouts = NestedArrayDict.load(directory.rollouts_dir / "train_0001" / "rollouts.json")
    assert trainer._rollouts == rollouts
    assert "You are Prover" in rollouts["agents", "prompt"][0, 0, 0]

    def transcripts_of(name: str) -> Any:
        return json.loads((directory.rollouts_dir / name / "transcripts.json").read_text())

    played = transcripts_of("train_0001")
    assert [episode["datapoint_id"] for episode in played] == rollouts["datapoint_id"].tolist()
    assert played[0]["turns"][0]["messages"] == {"main": played[0]["turns"][0]["raw_message"]}
    _write_report(directory)
    page = (directory.path / "report.html").read_text(encoding="utf-8")
    first_message = transcripts_of("test_0000")[0]["turns"][0]["raw_message"]
    assert says(page, first_message, "accepts", "claim")


def test_iterations_go_through_the_data_in_passes_and_never_end(tmp_path: Path) -> None:
    groups = {"text_rl": {"num_iterations": 5, "rollouts_per_iteration": 6, "test_scheme": "none"}}
    _, trainer = _trained(tmp_path, groups=groups)
    ids = [trainer.files.load("train", number)["datapoint_id"].tolist() for number in range(5)]
    assert sorted(ids[0] + ids[1]) == sorted(ids[2] + ids[3]) == list(range(12))
    assert ids[0] + ids[1] != ids[2] + ids[3]
    # More than the data contains, in a single iteration.
    groups = {"text_rl": {"num_iterations": 1, "rollouts_per_iteration": 30}}
    _, trainer = _trained(tmp_path, groups=groups)
    assert len(trainer.files.load("train", 0)) == 30


@pytest.mark.parametrize(
    ("options", "iterations", "num_episodes"),
    [
        ({"test_scheme": "none"}, [], 0),
        ({"test_scheme": "all"}, [0, 1, 2], 8),
        ({"test_scheme": "last", "test_on_whole_dataset": False}, [2], 6),
        ({"test_scheme": "first_and_last"}, [0, 2], 8),
        ({"test_scheme": "first_and_last", "test_on_whole_dataset": False}, [0, 2], 6),
    ],
)
def test_agents_are_tested_by_the_scheme_on_the_same_data(
    options: dict[str, Any], iterations: list[int], num_episodes: int, tmp_path: Path
) -> None:
    groups = {"text_rl": {"num_iterations": 3} | options}
    directory, parts = RunDirectory.create(tmp_path, "one"), _build(tmp_path, groups=groups)
    trainer = build_text_trainer(parts, directory)
    trainer.train()
    tested = sorted(int(path.name[5:]) for path in directory.rollouts_dir.glob("test_*"))
    assert tested == iterations
    data = [sorted(trainer.files.load("test", n)["datapoint_id"].tolist()) for n in tested]
    assert [len(ids) for ids in data] == [num_episodes] * len(iterations)
    assert data == data[:1] * len(data)
    assert (trainer.results["before"] is None) == (0 not in iterations)
    assert (trainer.results["after"] == trainer.state.last) == (not iterations)


@pytest.mark.parametrize(
    ("options", "text_rl", "jobs"),
    [
        # The last iteration trains nothing, except in a test run, which sees that jobs work.
        ({}, {"num_iterations": 1}, []),
        ({"test_run": True}, {"num_iterations": 3}, ["prover", "verifier"]),
        ({}, {"min_fine_tune_examples": 100}, []),
        ({"agents": {"prover": {"freeze_agent": True}}}, {}, ["verifier"]),
        ({"agents": dict.fromkeys(("prover", "verifier"), SHARED)}, {}, ["both"]),
    ],
    ids=["last iteration", "test run", "too few examples", "frozen", "shared"],
)
def test_a_job_trains_each_model_that_has_enough_to_learn(
    options: dict[str, Any], text_rl: dict[str, Any], jobs: list[str], tmp_path: Path
) -> None:
    parts, trainer = _trained(tmp_path, groups={"text_rl": text_rl}, **options)
    assert [key.split("/")[1] for key, *_ in parts.service.submitted] == jobs
    groups = parts.instance.shared_model_groups
    tuned = {name for name, group in groups.items() if "tuned" in str(group.model_name)}
    assert tuned == set(jobs)
    assert trainer.results["training"]["num_jobs"] == len(jobs)


def test_agents_that_share_a_model_share_its_job_and_must_agree(tmp_path: Path) -> None:
    parts, trainer = _trained(tmp_path, agents={"prover": SHARED, "verifier": SHARED})
    ((key, _, examples, options),) = parts.service.submitted
    assert key == f"{trainer.state.run_key}/both/0"
    speakers = {str(one.messages[0]["content"]).split(".")[0] for one in examples}
    assert speakers == {"You are Prover", "You are Verifier"}
    assert options.method == "supervised"
    with pytest.raises(ConfigurationError, match="freeze_agent of verifier is True, of"):
        _build(tmp_path, agents={"prover": SHARED, "verifier": SHARED | {"freeze_agent": True}})


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_job_starts_from_the_last_model_or_from_the_first(
    from_scratch: bool, tmp_path: Path
) -> None:
    own = {"fine_tune_from_scratch": from_scratch}
    agents = {"prover": {"freeze_agent": True}, "verifier": own}
    parts, trainer = _trained(tmp_path, agents=agents, groups=THREE)
    first = f"tuned:{trainer.state.run_key}/verifier/0"
    models = [model for _, model, *_ in parts.service.submitted]
    assert models == ["base", "base" if from_scratch else first]


# ---- interrupted and resumed


def _final(trainer: PureTextRlTrainer) -> list[dict[str, Any]]:
    """A run's output without its key."""
    results = {name: one for name, one in trainer.results.items() if name != "model_dir"}
    text = json.dumps([results, trainer.state.to_dict()])
    return json.loads(text.replace(trainer.state.run_key, "KEY"))  # type: ignore[no-any-return]


def _rollouts(directory: RunDirectory) -> dict[str, NestedArrayDict]:
    paths = sorted(directory.rollouts_dir.glob("*/rollouts.json"))
    return {path.parent.name: NestedArrayDict.load(path) for path in paths}


def _start(folder: Path, **options: Any) -> tuple[RunDirectory, TextParts, PureTextRlTrainer]:
    """A run of three iterations."""
    directory, parts = RunDirectory.create(folder, "one"), _build(folder, groups=THREE, **options)
    return directory, parts, build_text_trainer(parts, directory)


def _continue(folder: Path, directory: RunDirectory, parts: TextParts) -> PureTextRlTrainer:
    """A new process continues with the same services."""
    again = _build(folder, service=parts.service, groups=THREE)
    trainer = build_text_trainer(again, directory)
    store = trainer._checkpoint_store()
    assert store is not None
    latest = store.latest()
    if latest is not None:
        trainer.resume_from(latest)
    trainer.train()
    parts.models.update({f"{name} again": model for name, model in again.models.items()})
    return trainer


def _requests_of(parts: TextParts) -> list[tuple[str, int | None]]:
    """Every request to any model, by the model and the seed, which identifies it."""
    return [
        (name.removesuffix(" again").partition("/")[2], request.seed)
        for name, model in parts.models.items()
        for request in model.requests
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any, int]:
    directory, parts, trainer = _start(tmp_path_factory.mktemp("unbroken"))
    trainer.train()
    assert len(set(_requests_of(parts))) == parts.num_requests
    return _final(trainer), _rollouts(directory), parts.num_requests


class DyingJobs(FakeFineTuning):
    """The first jobs of agents end without a model; the others succeed."""

    ends: dict[str, FineTuningJob]

    async def job(self, job_id: str) -> FineTuningJob:
        return self.ends.get(job_id.partition("/")[2]) or await super().job(job_id)


@pytest.mark.parametrize(
    ("end", "is_known"),
    [
        (FineTuningJob("job", JobStatus.FAILED, error="no memory"), True),
        (FineTuningJob("job", JobStatus.FAILED, error="no memory"), False),
        (FineTuningJob("job", JobStatus.CANCELLED), True),
        (FineTuningJob("job", JobStatus.SUCCEEDED, model=None), True),
    ],
)
def test_a_job_that_died_ends_the_run_and_is_submitted_under_a_further_key_on_each_resume(
    end: FineTuningJob, is_known: bool, unbroken: Any, tmp_path: Path
) -> None:
    """If it is unknown, the process was killed before it recorded the job's submission."""
    jobs = DyingJobs()
    jobs.ends = {"verifier/0": end, "verifier/1": end}
    directory, parts, trainer = _start(tmp_path, service=jobs)
    first_end: tuple[type[BaseException], str | None] = (ServiceError, end.error or str(end.status))
    if not is_known:
        trainer._note_groups = _die  # type: ignore[method-assign]
        first_end = (Killed, None)
    with pytest.raises(first_end[0], match=first_end[1]):
        trainer.train()
    with pytest.raises(ServiceError):
        _continue(tmp_path, directory, parts)
    ended = _continue(tmp_path, directory, parts)
    seeds = {key.partition("/")[2]: options.seed for key, _, _, options in jobs.submitted}
    keys = ["prover/0", *(f"verifier/{number}" for number in range(3)), "prover/1", "verifier/3"]
    assert [key.partition("/")[2] for key, *_ in jobs.submitted] == keys
    assert seeds["verifier/0"] == seeds["verifier/1"] == seeds["verifier/2"] != seeds["verifier/3"]
    assert _rollouts(directory) == unbroken[1], "no rollout was lost, and none was played twice"
    assert ended.results["after"] == unbroken[0][0]["after"]
    assert parts.num_requests == unbroken[2]


def _die(*args: object) -> None:
    raise Killed


def test_half_a_character_in_an_answer_is_replaced_on_receipt(tmp_path: Path) -> None:
    def broken(name: str) -> Script:
        return lambda request, sample: f"{honest(name)(request, sample)} \ud83d"

    directory = RunDirectory.create(tmp_path, "one")
    parts = build_text_parts(tmp_path / "prompts", broken)
    build_text_trainer(parts, directory).train()
    rollouts = _rollouts(directory)["train_0000"]
    assert rollouts["agents", "raw_message"][0, 0, 0].endswith(" \ufffd")
    # An older version stored such answers unchanged.
    journal = directory.rollouts_dir / "train_0000" / "answers.jsonl"
    journal.write_text(journal.read_text().replace("\ufffd", "\\ud83d"))
    (directory.rollouts_dir / "train_0000" / "rollouts.json").unlink()
    assert build_text_trainer(parts, directory)._rollouts_of(0) == rollouts


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_text(path.read_text()[:-40]), id="cut off"),
        pytest.param(lambda path: path.unlink(), id="missing"),
        pytest.param(lambda path: path.write_text("[]"), id="another kind"),
    ],
)
def test_damaged_rollouts_are_rebuilt_from_their_answers(
    damage: Callable[[Path], Any], unbroken: Any, tmp_path: Path
) -> None:
    directory, parts, trainer = _start(tmp_path)
    trainer._stage_create_fine_tune_jobs = _die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.train()
    damage(directory.rollouts_dir / "train_0000" / "rollouts.json")
    ended = _continue(tmp_path, directory, parts)
    assert _final(ended) == unbroken[0]
    assert _rollouts(directory) == unbroken[1]
    assert parts.num_requests == unbroken[2], "no request was repeated"


def test_rollouts_of_an_earlier_iteration_are_not_rebuilt_by_later_models(tmp_path: Path) -> None:
    directory, _, trainer = _start(tmp_path)
    trainer.train()
    folder = directory.rollouts_dir / "train_0000"
    (folder / "rollouts.json").unlink()
    journal = folder / "answers.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))
    with pytest.raises(CheckpointError, match=json.loads(lines[-1])["id"]):
        trainer._rollouts_of(0)


@pytest.mark.parametrize("what", ["answers.jsonl", "rollouts.json", "groups.json"])
def test_a_full_disk_is_a_typed_error_and_nothing_is_lost(
    what: str, tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, parts, trainer = _start(tmp_path)
    replace = Path.replace

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_at(path: Path, target: Path) -> Path:
        return full() if target.name == what else replace(path, target)  # type: ignore[func-returns-value,return-value]

    with monkeypatch.context() as patch:
        if what == "answers.jsonl":
            patch.setattr(text_rollouts, "append_line", full)
        else:
            patch.setattr(Path, "replace", full_at)
        with pytest.raises(RunDirectoryError, match=os.strerror(errno.ENOSPC)):
            trainer.train()
    assert _final(_continue(tmp_path, directory, parts)) == unbroken[0]
    assert parts.num_requests == unbroken[2] + (6 if what == "answers.jsonl" else 0)


def test_a_disk_that_fills_up_in_the_middle_of_an_answer_leaves_whole_lines(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, before = tmp_path / "answers.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = text_rollouts.AnswerJournal(path)
    journal.put("one", text_rollouts.StoredResponses(("a",), (False,), ("",)))
    # Like a full disk, the limit lets part of a line through.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        with pytest.raises(RunDirectoryError):
            journal.put("two", text_rollouts.StoredResponses(("b" * 99,), (False,), ("",)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.put("three", text_rollouts.StoredResponses(("c",), (False,), ("",)))
    again = text_rollouts.AnswerJournal(path)
    assert [again.get(name) is not None for name in ("one", "two", "three")] == [True, False, True]


def test_a_signal_stops_after_the_round_and_keeps_its_answers(tmp_path: Path) -> None:
    _, parts, trainer = _start(tmp_path)
    trainer.stop_flag = lambda: "SIGTERM"
    with pytest.raises(StopRequested):
        trainer.train()
    assert parts.num_requests == 6
    assert trainer._has_checkpoint()
    assert len(trainer.files.journal("train", 0)) == 6


def test_trained_models_can_be_tested_again(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "one")
    build_text_trainer(_build(tmp_path), directory).train()
    # A tracker's records of a run are only its models.
    shutil.copytree(directory.path / "model", tmp_path / "downloaded" / "model")
    parts = _build(tmp_path)
    again = build_text_trainer(parts, RunDirectory.create(tmp_path, "two"))
    again.rerun_tests(tmp_path / "downloaded")
    assert again.results["after"]["mean_accuracy"] == 1.0
    assert again.results["before"] is None
    used = [name for name, model in parts.models.items() if model.requests]
    assert all(name.startswith("tuned:") for name in used)


def test_a_dry_run_prices_the_run(tmp_path: Path) -> None:
    groups = {"text_rl": {"num_iterations": 4, "test_scheme": "all"}}
    parts = _build(tmp_path, groups=groups)
    estimate = build_text_trainer(parts).dry_run()
    assert parts.num_requests == 8, "four rollouts of two turns"
    _, trainer = _trained(tmp_path, groups=groups)
    costs = trainer.state.costs()
    assert {name: estimate[name] for name in costs} == costs
    assert estimate["num_rollouts"] == 4 * 6 + 4 * 8


def test_statistics_are_those_of_a_hand_worked_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_text_trainer(_build(tmp_path))
    trainer._prepare_groups()
    rollouts = trainer._sample_rollouts("test", 0)
    right = rollouts["decision"] == rollouts["y"]
    result = trainer._get_log_stats(rollouts)
    assert trainer._get_log_stats(rollouts, train=True) == result
    assert result["mean_accuracy"] == pytest.approx(right.mean())
    assert result["accuracy_of_positives"] == pytest.approx(right[rollouts["y"] == 1].mean())
    of_level_2 = right[rollouts["datapoint", "level"] == 2]
    assert result["accuracy_where_level_2"] == pytest.approx(of_level_2.mean())
    verifier = np.where(right, 1.0, -1.0)
    assert result["verifier/mean_episode_reward"] == pytest.approx(verifier.mean())
    assert result["verifier/std_episode_reward"] == pytest.approx(verifier.std())
    assert result["prover/mean_episode_reward"] == pytest.approx((rollouts["decision"] == 1).mean())
    assert result["share_undecided"] == 0.0
    texts = [text for text in rollouts["agents", "message"][:, :, 0].ravel() if text is not None]
    words = [len(text.split()) for text in texts]
    assert result[f"{trainer.agent_names[0]}/mean_message_words"] == pytest.approx(np.mean(words))
    # A hook may lack `train`; metrics of tests are requested explicitly.
    hooks = (lambda self, rollouts: {"own": 2.0}, lambda self, rollouts, *, train: {"own": train})
    for hook, own in zip(hooks, (2.0, False), strict=True):
        monkeypatch.setattr(type(trainer), "_get_log_stats", hook)
        assert trainer.figures_of(rollouts)["own"] == own


def test_levels_that_are_cut_are_answered_alike_by_any_number_of_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = actors_here.install(monkeypatch)
    cut = "secret_word.agents.default.model.num_batches=3"
    resolved = short_experiment("pure_text_ei", tmp_path / "scenario", cut, num_iterations=2)
    result = [
        read_run_contents(run_in(tmp_path, resolved, f"by-{count}", num_actors=count))
        for count in (0, 2)
    ]
    assert result[0] == result[1]
    assert sum(one.turn for one in made) >= 3
    assert len(made) == 2
    kept = [sum(isinstance(part, Module) for part in one.sender._kept) for one in made]
    assert kept == [1, 1], "actors keep the current model and none before it"


def test_a_run_opens_each_file_of_its_services_once_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path | None] = []
    connect = retrying.connect

    def noted(path: Path | None) -> sqlite3.Connection:
        opened.append(path)
        return connect(path)

    monkeypatch.setattr(retrying, "connect", noted)
    resolved = short_experiment("pure_text_ei", tmp_path / "scenario", num_iterations=3)
    run = run_in(tmp_path, resolved, "run")
    assert json.loads((run / "results.json").read_text())["training"]["num_jobs"] == 2
    names = [path.name for path in opened if path is not None and path.is_relative_to(run)]
    assert names
    assert len(names) == len(set(names))
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert [link for link in links if link.startswith(str(run))] == []
