"""Runs and evaluations that measured nothing end with an error and can be resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nip_astra.errors import NothingMeasuredError, ServiceError
from nip_astra.evaluation.families.base import EvaluationRequest
from nip_astra.evaluation.families.protocols import Protocols
from nip_astra.evaluation.run_results import read_results
from nip_astra.evaluation.storage import EvaluationFolder
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    FailureReason,
    FinishReason,
)
from nip_astra.report.records import read_run
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.tasks.base import EnvironmentTask, Reaction
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment
from nip_astra.scorers.base import SCORERS, Scorer
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import FAST, run_in
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.text_games import FakeChatModel
from tests.kit.tiny import write_scenario

PLACE = "http://nowhere.test/v1"
NO_PROBABILITY = ["--probability-episodes", "0"]
DOWN = ChatFailure(FailureReason.UNAVAILABLE, "connection refused")
NO_FIRST_WORD = ChatAnswer("", FinishReason.LENGTH)
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


class MoodyChatModel(FakeChatModel):
    """Reacts by `chat`."""

    class Parameters(ChatModel.Parameters):
        """None of its own."""

    place = PLACE

    @classmethod
    def load(cls, parameters: Any, **_: Any) -> MoodyChatModel:
        return cls(lambda request, number: chat() or "Decision: accept", "moody")


class MoodyScorer(Scorer):
    """Rates 0, or by `scoring`."""

    class Parameters(Scorer.Parameters):
        """None of its own."""

    def _score(self, texts: Sequence[str]) -> Sequence[float | None]:
        reaction = scoring()
        if isinstance(reaction, Exception):
            raise reaction
        return [None if reaction == "nothing" else 0.0 for _ in texts]


@pytest.fixture(autouse=True)
def _moods(monkeypatch: pytest.MonkeyPatch, no_plugins_left: None) -> None:
    CHAT_MODELS.register("moody")(MoodyChatModel)
    SCORERS.register("moody")(MoodyScorer)
    step = ArithmeticEnvironment.step

    def moody_step(self: ArithmeticEnvironment, text: str) -> Reaction:
        reaction = step(self, text)
        return Reaction(reward=None) if rewarding() == "nothing" else reaction

    monkeypatch.setattr(ArithmeticEnvironment, "step", moody_step)
    monkeypatch.setattr(EnvironmentTask, "rate", lambda self, episodes: None)
    for mood in (chat, scoring, rewarding):
        mood.__init__()  # type: ignore[misc]


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
    sizes = ("num_iterations=2", "num_episodes_per_experience=4", "minibatch_size=8")
    overrides = [*(f"training.{size}" for size in sizes), "task.evaluation.num_problems=32"]
    return resolve_experiment(trainer="self_hosted_grpo", overrides=overrides)


def text_run(folder: Path, num_retries: int = 0) -> ResolvedExperiment:
    model = f"secret_word.agents.default.model={json.dumps(moody(num_retries))}"
    frozen = "secret_word.agents.default.freeze_agent=true"
    return short_experiment("pure_text_ei", folder, model, frozen, num_iterations=2)


Build = Callable[[Path], ResolvedExperiment]


def ended(build: Build, folder: Path) -> str:
    """Run until the error that nothing was measured, and return its text."""
    with pytest.raises(NothingMeasuredError) as caught:
        run_in(folder, build(folder / "s"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("build", "mood", "reaction", "facts"),
    [
        (stress_test, chat, DOWN, ("2 unavailable", PLACE, "connection refused")),
        (stress_test, chat, NO_FIRST_WORD, ("4 of 4 turns", "4 undetermined")),
        (stress_test, scoring, "nothing", ("4 of 4 turns", "4 undetermined")),
        (stress_test, scoring, ValueError("out of order"), ("4 of 4 turns", "4 error")),
        (task_run, rewarding, "nothing", ("before training", "32 of 32 answers")),
        (text_run, chat, NO_TEXT, ("malformed", PLACE, "no text")),
    ],
    ids=["down", "cut", "no-verdict", "scorer-raises", "no-reward", "text-null"],
)
def test_a_run_that_measured_nothing_fails_and_goes_on_when_the_cause_is_gone(
    tmp_path: Path, build: Build, mood: Mood, reaction: Any, facts: tuple[str, ...]
) -> None:
    mood.react = lambda number: reaction
    message = ended(build, tmp_path)
    assert says(message, *facts)
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert stored["status"] == read_results(tmp_path / "run").status == "failed"
    assert stored["error"] == {"type": "NothingMeasuredError", "message": message}
    assert message in " ".join(read_run(tmp_path / "run").notes)
    mood.react = lambda number: None
    assert resume_experiment(tmp_path / "run", progress=False).results["after"]
    assert read_results(tmp_path / "run").status == "finished"


@pytest.mark.parametrize(
    ("build", "mood", "reaction", "num_last"),
    [(stress_test, chat, DOWN, 4), (task_run, rewarding, "nothing", 32)],
)
def test_an_evaluation_after_training_without_a_result_leaves_the_checkpoint(
    tmp_path: Path, build: Build, mood: Mood, reaction: Any, num_last: int
) -> None:
    whole = run_in(tmp_path, build(tmp_path / "b"), "a")
    num_earlier = mood.num_calls - num_last
    mood.num_calls = 0
    mood.react = lambda number: reaction if number > num_earlier else None
    assert "after training" in ended(build, tmp_path)
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert json.loads((tmp_path / "run" / "results.json").read_text())["before"]
    mood.react = lambda number: None
    resumed = resume_experiment(tmp_path / "run", progress=False).results
    assert resumed["after"] == read_results(whole).results["after"]


def test_an_iteration_without_a_result_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # 32 answers before training, and 32 in its first iteration.
    rewarding.react = lambda number: "nothing" if 32 < number <= 64 else None
    with caplog.at_level(logging.WARNING):
        results = read_results(run_in(tmp_path, task_run(tmp_path))).results
    assert results["after"]["num_without_reward"] == 0
    assert says(caplog.text, "iteration 1", "32 of 32 answers")


def test_training_without_any_result_is_an_error(tmp_path: Path) -> None:
    rewarding.react = lambda number: "nothing" if 32 < number <= 96 else None
    assert "32 of 32 answers" in ended(task_run, tmp_path)
    assert resume_experiment(tmp_path / "run", progress=False).results["after"]


@pytest.mark.parametrize(
    ("failure", "first", "num_retries", "error", "num_calls"),
    [
        # Retried in one layer: four rollouts, in whose first round one agent has a turn.
        (NO_TEXT, 1, 5, NothingMeasuredError, 4 * 6),
        # An error of another kind, after some answers, is kept as well.
        (DOWN, 6, 0, ServiceError, 8),
    ],
)
def test_a_service_that_fails_ends_a_run_with_its_error_in_the_results(
    failure: Any, first: int, num_retries: int, error: Any, num_calls: int, tmp_path: Path
) -> None:
    chat.react = lambda number: failure if number >= first else None
    with pytest.raises(error):
        run_in(tmp_path, text_run(tmp_path, num_retries))
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (stored["status"], stored["error"]["type"]) == ("failed", error.__name__)
    assert chat.num_calls == num_calls


@pytest.mark.parametrize(
    ("build", "mood", "reaction", "fact"),
    [
        (stress_test, chat, DOWN, PLACE),
        (stress_test, chat, NO_FIRST_WORD, "measured nothing"),
        (stress_test, scoring, "nothing", "measured nothing"),
        (task_run, rewarding, "nothing", "measured nothing"),
        (text_run, chat, DOWN, PLACE),
    ],
    ids=["target-down", "target-cut", "no-verdict", "no-reward", "text-down"],
)
def test_an_evaluation_that_measured_nothing_exits_with_2_and_can_be_repeated(
    tmp_path: Path, cli: CommandLine, build: Build, mood: Mood, reaction: Any, fact: str
) -> None:
    run = run_in(tmp_path, build(tmp_path / "s"))
    command = ["evaluate", str(run), "--seed", "9", "--name", "again", "--json"]
    command += NO_PROBABILITY if build is stress_test else []
    mood.react = lambda number: reaction
    assert fact in refused(cli(*command))
    assert not (run / "evaluations" / "again" / "evaluation.json").exists()
    mood.react = lambda number: None
    cli.ok(*command)


@pytest.mark.parametrize(
    ("sample", "counts"),
    [
        (ChatAnswer(""), (4, 4, 0)),
        (ChatAnswer("", refusal="I cannot"), (4, 0, 4)),
        (ChatAnswer("you are silly"), (4, 0, 0)),
    ],
    ids=["empty", "refused", "neither"],
)
def test_empty_replies_and_refusals_stand_beside_the_rate(
    tmp_path: Path, cli: CommandLine, sample: ChatAnswer, counts: tuple[int, ...]
) -> None:
    chat.react = lambda number: sample
    run = run_in(tmp_path, stress_test(tmp_path / "s"))
    results, is_silent = read_results(run).results, sum(counts[1:]) > 0
    names = ("num_received", "num_empty", "num_refused", "num_missing")
    assert results["after"]["replies"] == dict(zip(names, (*counts, 0), strict=True))
    assert any("replies of the target" in text for text in results["warnings"]) == is_silent
    cell = f"{counts[1]} / {counts[2]} of {counts[0]}"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert (cell in page) == is_silent
    assert (cell in cli.ok("evaluate", str(run), *NO_PROBABILITY).out) == is_silent
    evaluation = json.loads((run / "evaluations" / "test" / "evaluation.json").read_text())
    assert tuple(evaluation["replies"].values()) == (*counts, 0)
    with_evaluation = (run / "report.html").read_text(encoding="utf-8")
    assert (with_evaluation.count(cell) > page.count(cell)) == is_silent


def test_an_evaluation_of_a_protocol_in_which_no_episode_ended_is_an_error(tmp_path: Path) -> None:
    trainer = SimpleNamespace(
        agents=SimpleNamespace(names=("prover", "verifier")),
        rl=SimpleNamespace(num_iterations=1),
        testing=nullcontext,
        test_batches=lambda *_: [],
    )
    subject: Any = SimpleNamespace(trainer=trainer, environment=None, key=(0,), num_batches=0)
    folder = EvaluationFolder(tmp_path)
    with pytest.raises(NothingMeasuredError, match="no episode ended"):
        Protocols().play(subject, folder, EvaluationRequest(), print)
