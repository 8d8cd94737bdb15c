"""Runs and evaluations that measured nothing end with an error and can be resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nip_astra.errors import NipAstraError, NothingMeasuredError, ServiceError
from nip_astra.evaluation.families.base import EvaluationRequest
from nip_astra.evaluation.families.protocols import Protocols
from nip_astra.evaluation.run_results import read_results
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    ChatUsage,
    FailureReason,
    register_chat_model,
)
from nip_astra.report.records import read_run
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.tasks.base import EnvironmentTask, Reaction
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment
from nip_astra.scorers.base import SCORERS, Scorer, register_scorer
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import FAST, run_in
from tests.kit.tiny import write_scenario

PLACE = "http://nowhere.test/v1"
FINE = ChatAnswer("you are silly")
DOWN = ChatFailure(FailureReason.UNAVAILABLE, "connection refused")
NO_TEXT = ChatFailure(FailureReason.MALFORMED, "the answer has no text")


class Mood:
    """Behaviour of chat models, scorers and tasks, by the number of the call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.react: Callable[[int], Any] = lambda number: None

    def __call__(self) -> Any:
        self.num_calls += 1
        return self.react(self.num_calls)


chat, scoring, rewarding = Mood(), Mood(), Mood()


class MoodyChatModel(ChatModel):
    """Reacts by `chat`."""

    class Parameters(ChatModel.Parameters):
        """None of its own."""

    name, place = "moody", PLACE

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> ChatModel:
        return cls()

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        sample = chat() or ChatAnswer("Decision: accept")
        return ChatOutcome((sample,) * request.num_samples, ChatUsage(5, 3))


class MoodyScorer(Scorer):
    """Rates 0, or by `scoring`."""

    class Parameters(Scorer.Parameters):
        """None of its own."""

    def _score(self, texts: Sequence[str]) -> Sequence[float | None]:
        react = scoring()
        if isinstance(react, Exception):
            raise react
        return [None if react == "nothing" else 0.0 for _ in texts]


@pytest.fixture(autouse=True)
def _moods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    chat_models, scorers = CHAT_MODELS.snapshot(), SCORERS.snapshot()
    register_chat_model("moody")(MoodyChatModel)
    register_scorer("moody")(MoodyScorer)
    step = ArithmeticEnvironment.step

    def moody_step(self: ArithmeticEnvironment, text: str) -> Reaction:
        reaction = step(self, text)
        return Reaction(reward=None) if rewarding() == "nothing" else reaction

    monkeypatch.setattr(ArithmeticEnvironment, "step", moody_step)
    monkeypatch.setattr(EnvironmentTask, "rate", lambda self, episodes: None)
    for mood in (chat, scoring, rewarding):
        mood.__init__()  # type: ignore[misc]
    yield
    CHAT_MODELS.restore(chat_models)
    SCORERS.restore(scorers)


def moody(num_retries: int = 0) -> dict[str, Any]:
    return {"_type": "moody", "limits": {"num_retries": num_retries, "backoff": 0.0}}


def stress_test(folder: Path) -> ResolvedExperiment:
    folder.mkdir()
    scenario = write_scenario(
        folder,
        target={"chat_model": moody(), "max_new_tokens": 6},
        scorer={"_type": "moody", "on_failure": "skip"},
    )
    overrides = [*FAST, "training.num_iterations=2", "training.num_episodes_per_experience=2"]
    return resolve_experiment(trainer="ast_dpo", scenario=str(scenario), overrides=overrides)


def task_run(folder: Path) -> ResolvedExperiment:
    overrides = [
        "training.num_iterations=2",
        "training.num_episodes_per_experience=4",
        "training.minibatch_size=8",
        "task.evaluation.num_problems=32",
    ]
    return resolve_experiment(trainer="self_hosted_grpo", overrides=overrides)


def text_run(folder: Path, num_retries: int = 0) -> ResolvedExperiment:
    return resolve_experiment(
        trainer="pure_text_ei",
        overrides=[
            f"secret_word.agents.default.model={json.dumps(moody(num_retries))}",
            "secret_word.agents.default.freeze_agent=true",
            "secret_word.num_test=4",
            "text_rl.num_iterations=2",
            "text_rl.rollouts_per_iteration=4",
        ],
    )


Build = Callable[[Path], ResolvedExperiment]
CAUSES = pytest.mark.parametrize(
    ("build", "mood", "reaction", "facts"),
    [
        (stress_test, chat, DOWN, ("2 unavailable", PLACE, "connection refused")),
        (stress_test, chat, NO_TEXT, ("2 malformed", PLACE, "no text")),
        (stress_test, scoring, "nothing", ("4 of 4 turns", "4 undetermined")),
        (stress_test, scoring, ValueError("out of order"), ("4 of 4 turns", "4 error")),
        (task_run, rewarding, "nothing", ("before training", "32 of 32 answers")),
        (text_run, chat, DOWN, ("unavailable", PLACE, "connection refused")),
        (text_run, chat, NO_TEXT, ("malformed", PLACE, "no text")),
    ],
    ids=["down", "no-text", "no-verdict", "scorer-raises", "no-reward", "text-down", "text-null"],
)


def ended(build: Build, folder: Path) -> str:
    """Run until the error that nothing was measured, and return its text."""
    with pytest.raises(NothingMeasuredError) as caught:
        run_in(folder, build(folder / "s"))
    return str(caught.value)


@CAUSES
def test_a_run_that_measured_nothing_fails_and_goes_on_when_the_cause_is_gone(
    tmp_path: Path, build: Build, mood: Mood, reaction: Any, facts: tuple[str, ...]
) -> None:
    mood.react = lambda number: reaction
    told = ended(build, tmp_path)
    assert all(fact in told for fact in facts), told
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["status"] == "failed"
    assert results["error"] == {"type": "NothingMeasuredError", "message": told}
    assert read_results(tmp_path / "run").status == "failed"
    assert told in " ".join(read_run(tmp_path / "run").notes)
    mood.react = lambda number: None
    found = resume_experiment(tmp_path / "run", progress=False)
    assert found.results["after"]
    assert read_results(tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("build", "mood", "reaction", "num_last"),
    [(stress_test, chat, DOWN, 4), (task_run, rewarding, "nothing", 32)],
)
def test_an_evaluation_after_training_without_a_result_leaves_the_checkpoint(
    tmp_path: Path, build: Build, mood: Mood, reaction: Any, num_last: int
) -> None:
    run_in(tmp_path, build(tmp_path / "b"), "a")
    num_earlier = mood.num_calls - num_last
    mood.num_calls = 0
    mood.react = lambda number: reaction if number > num_earlier else None
    told = ended(build, tmp_path)
    assert "after training" in told
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert json.loads((tmp_path / "run" / "results.json").read_text())["before"]
    mood.react = lambda number: None
    resumed = resume_experiment(tmp_path / "run", progress=False).results
    assert resumed["after"] == read_results(tmp_path / "a").results["after"]


@pytest.mark.parametrize("num_blank", [1, 2])
def test_iterations_without_a_result_are_warned_of_and_all_of_them_are_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_blank: int
) -> None:
    # 32 answers before, then 32 in each of two iterations, then 32 after.
    rewarding.react = lambda number: "nothing" if 32 < number <= 32 + 32 * num_blank else None
    with caplog.at_level(logging.WARNING):
        if num_blank == 1:
            results = read_results(run_in(tmp_path, task_run(tmp_path))).results
            assert results["after"]["num_without_reward"] == 0
        else:
            assert "32 of 32 answers" in ended(task_run, tmp_path)
            assert resume_experiment(tmp_path / "run", progress=False).results["after"]
    assert "iteration 1 measured nothing: 32 of 32 answers have no reward" in caplog.text


def test_a_malformed_answer_is_retried_in_one_layer(tmp_path: Path) -> None:
    chat.react = lambda number: NO_TEXT
    with pytest.raises(NothingMeasuredError):
        run_in(tmp_path, text_run(tmp_path, 5))
    # 4 rollouts, in whose first round one agent has a turn.
    assert chat.num_calls == 4 * 6


@pytest.mark.parametrize(
    ("build", "mood", "reaction"),
    [
        (stress_test, chat, DOWN),
        (stress_test, scoring, "nothing"),
        (task_run, rewarding, "nothing"),
        (text_run, chat, DOWN),
    ],
    ids=["target-down", "no-verdict", "no-reward", "text-down"],
)
def test_an_evaluation_that_measured_nothing_exits_with_2_and_can_be_repeated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    build: Build,
    mood: Mood,
    reaction: Any,
) -> None:
    run_in(tmp_path, build(tmp_path / "s"))
    type_command = CommandLine(tmp_path, tmp_path, capsys)
    typed = ["evaluate", str(tmp_path / "run"), "--seed", "9", "--name", "again", "--json"]
    typed += ["--probability-episodes", "0"] if build is stress_test else []
    mood.react = lambda number: reaction
    capsys.readouterr()
    said = refused(type_command(*typed))
    assert (PLACE in said) if mood is chat else ("measured nothing" in said)
    assert not (tmp_path / "run" / "evaluations" / "again" / "evaluation.json").exists()
    mood.react = lambda number: None
    healed = type_command(*typed)
    assert healed.code == 0, healed.err


@pytest.mark.parametrize(
    ("sample", "counts"),
    [
        (ChatAnswer(""), (4, 4, 0)),
        (ChatAnswer("", refusal="I cannot"), (4, 0, 4)),
        (FINE, (4, 0, 0)),
    ],
)
def test_empty_replies_and_refusals_stand_beside_the_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: ChatAnswer, counts: tuple[int, ...]
) -> None:
    chat.react = lambda number: sample
    run = run_in(tmp_path, stress_test(tmp_path / "s"))
    results = read_results(run).results
    is_silent = sum(counts[1:]) > 0
    names = ("num_received", "num_empty", "num_refused")
    assert results["after"]["replies"] == dict(zip(names, counts, strict=True))
    cell = f"{counts[1]} / {counts[2]} of {counts[0]}"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert (cell in page) == is_silent
    assert any("replies of the target" in one for one in results["warnings"]) == is_silent
    type_command = CommandLine(tmp_path, tmp_path, capsys)
    capsys.readouterr()
    said = type_command("evaluate", str(run), "--probability-episodes", "0")
    assert (cell in said.out) == is_silent
    found = json.loads((run / "evaluations" / "test" / "evaluation.json").read_text())
    assert tuple(found["replies"].values()) == counts
    with_evaluation = (run / "report.html").read_text(encoding="utf-8")
    assert (with_evaluation.count(cell) > page.count(cell)) == is_silent


def test_an_error_of_another_kind_is_kept_in_the_results(tmp_path: Path) -> None:
    chat.react = lambda number: None if number < 6 else DOWN
    with pytest.raises(ServiceError) as caught:
        run_in(tmp_path, text_run(tmp_path))
    assert isinstance(caught.value, NipAstraError)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["status"], results["error"]["type"]) == ("failed", "ServiceError")


def test_an_evaluation_of_a_protocol_in_which_no_episode_ended_is_an_error(tmp_path: Path) -> None:
    trainer = SimpleNamespace(
        agents=SimpleNamespace(names=("prover", "verifier")),
        rl=SimpleNamespace(num_iterations=1),
        testing=nullcontext,
        test_batches=lambda *_: [],
    )
    subject: Any = SimpleNamespace(trainer=trainer, environment=None, key=(0,), num_batches=0)
    folder: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(NothingMeasuredError, match="no episode ended"):
        Protocols().play(subject, folder, EvaluationRequest(), print)
