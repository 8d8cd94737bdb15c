"""Rollout analyses: in a run, on stored rollouts, by a plug-in, in files, report and W&B."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nip_astra.errors import ConfigurationError, DataError, UnknownNameError, UntrustedRunError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat_models.scripted import ScriptedChatModel
from nip_astra.resolving.analysing import analyse_run
from nip_astra.scenario_base.text.analysers import AnalysisParameters, Verdict
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RunDirectory
from nip_astra.tracking.tracker import register_tracker
from nip_astra.trainers.text.analysis import load_verdicts, stored_samplings
from tests.kit.command_line import CommandLine, refused
from tests.kit.experiments import RecordingTracker, run_in
from tests.kit.messages import says
from tests.kit.resuming import short_experiment
from tests.kit.text_games import accepting, build_text_parts, build_text_trainer

PLAYER = (
    "{_type: scripted, when: {'Now decide': ['Decision: accept'], 'Ask for': ['the word?']}, "
    "answers: [river]}"
)
JUDGE = '_type: scripted\nanswers: ["Reason: It is so.\\nAnswer: yes"]\n'
PLUGIN = '''
"""A question of one's own."""

import nip_astra as na


@na.register_rollout_analyser("politeness")
class Politeness(na.RolloutAnalyser):
    """Whether an agent is polite."""

    role = "verifier"

    def question(self, subject: na.Subject) -> str:
        return f"Is {subject.name} polite throughout?"
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyses")
    model = (f"secret_word.agents.default.model={PLAYER}",)
    frozen = "secret_word.agents.default.freeze_agent=true"
    resolved = short_experiment("pure_text_ei", folder, *model, frozen, num_iterations=2)
    return run_in(folder, resolved, "one")


@pytest.fixture
def finished(run: Path, tmp_path: Path) -> Path:
    """A finished run of scripted agents, without analyses."""
    return Path(shutil.copytree(run, tmp_path / "one"))


@pytest.fixture
def judge_file(tmp_path: Path) -> Path:
    path = tmp_path / "judge.yaml"
    path.write_text(JUDGE, encoding="utf-8")
    return path


@pytest.fixture
def type_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, tmp_path, capsys)


def test_a_run_judges_its_tests_and_its_results_hold_the_shares(tmp_path: Path) -> None:
    parts = build_text_parts(tmp_path / "prompts", accepting)
    parts.instance.analysis = AnalysisParameters.from_dict(
        {
            "analysers": [{"_type": "prover_role_conformance"}],
            "model": {
                "_type": "scripted",
                "when": {"claim [0246]": ["Answer: yes"], "claim": ["Answer: no"]},
            },
            "are_train_rollouts_judged": True,
        }
    )
    directory = RunDirectory.create(tmp_path, "one")
    trainer = build_text_trainer(parts, directory)
    recorder = RecordingTracker()
    trainer.tracker = recorder
    trainer.train()
    # Half of the eight claims of a test are even.
    assert trainer.results["after"]["prover/share_prover_role_conformance"] == 0.5
    assert "prover/share_prover_role_conformance" in trainer.results["training"]["last"]
    folders = {path.parent.name for path in (directory.path / "analyses").glob("*/*.json")}
    assert folders == {"train_0000", "train_0001", "test_0000", "test_0001"}
    verdicts = load_verdicts(directory, "test", 1, "prover_role_conformance")
    assert verdicts["verdict"].shape == (8, 2, 1)
    assert (verdicts["verdict"][:, 1] == Verdict.NOT_REQUESTED).all()
    assert [row[5] for row in recorder.tables["analyses/2"]] == ["yes", "no"] * 4
    names = [name for name, *_ in recorder.artifacts]
    assert names == ["checkpoint-one", "agents-one", "rollouts-one", "analyses-one"]


def test_stored_rollouts_are_judged_from_python_and_again_for_nothing(finished: Path) -> None:
    quotation = ["direct_quotation"]
    model = ScriptedChatModel(["Answer: no"], name="stern")
    (analysis,) = analyse_run(finished, quotation, model, iteration=0)
    assert analysis.figures == {"prover/share_direct_quotation": 0.0}
    assert analysis.summary["shares"]["prover"]["num_no"] == len(model.requests) == 4
    stored = json.loads((finished / "analyses/test_0000/direct_quotation.json").read_text())
    assert stored == json.loads(json.dumps(analysis.summary))
    verdicts = load_verdicts(RunDirectory.open(finished), "test", 0, "direct_quotation")
    assert verdicts == analysis.verdicts
    kind = ScriptedChatModel(["Answer: yes"], name="kind")
    with pytest.raises(ConfigurationError, match="not of 'kind'"):
        analyse_run(finished, quotation, kind)
    (again,) = analyse_run(finished, quotation, kind, iteration=0, is_overwritten=True)
    assert again.figures == {"prover/share_direct_quotation": 1.0}
    # Answers of a judge from a file are cached in the run.
    parameters = AnalysisParameters.from_dict(
        {"analysers": [{"_type": "follow_up"}], "model": {"_type": "scripted", "model": "kept"}}
    ).model
    numbers = []
    for _ in range(2):
        analyse_run(finished, ["accurate_quotation"], parameters, iteration=1, is_overwritten=True)
        with closing(sqlite3.connect(finished / "service_answers.sqlite")) as database:
            numbers += database.execute("SELECT COUNT(*) FROM answers").fetchone()
    assert numbers[0] == numbers[1] > 0


def test_the_command_judges_by_every_analyser_and_the_report_shows_it(
    finished: Path, judge_file: Path, type_command: CommandLine
) -> None:
    command = ["analyse", str(finished), "--judge", str(judge_file)]
    dry = type_command.ok(*command, "--dry-run", "--json", "--analyser", "direct_quotation")
    counts = {"direct_quotation": 4}
    assert json.loads(dry.out) == {"test_0000": counts, "test_0001": counts}
    output = type_command.ok(*command, "--split", "all", "--overwrite").out
    assert re.search(r"train, iteration 0 +prover_role_conformance +prover +100.0%", output)
    assert len(stored_samplings(RunDirectory.open(finished))) == 4
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert says(page, "Rollout analyses", "prover, accurate quotation", "yes: It is so.")


@pytest.mark.usefixtures("no_plugins_left")
def test_a_custom_question_comes_from_a_plug_in(
    finished: Path, judge_file: Path, tmp_path: Path, type_command: CommandLine
) -> None:
    plugin = tmp_path / "politeness.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    options = ("--judge", str(judge_file), "--plugin", str(plugin), "--iteration", "1", "--json")
    output = type_command.ok("analyse", str(finished), "--analyser", "politeness", *options)
    (summary,) = json.loads(output.out)
    assert summary["meaning"] == "Whether an agent is polite."
    assert set(summary["shares"]) == {"verifier"}


@pytest.mark.usefixtures("no_plugins_left")
def test_a_tracker_gets_the_analyses_of_a_stored_run(finished: Path) -> None:
    class Recorder(RecordingTracker):
        made: ClassVar[list[Recorder]] = []

        def __init__(self, run_directory: RunDirectory, settings: Any, config: Any) -> None:
            super().__init__()
            self.config = config
            self.made.append(self)

        def log_summary(self, values: Mapping[str, float]) -> None:
            self.summary = values

    register_tracker("recorder")(Recorder)
    analyse_run(
        *(finished, ["direct_quotation"], ScriptedChatModel(["Answer: yes"])),
        settings=ExperimentSettings(trackers=["recorder"]),
        iteration=1,
        is_overwritten=True,
    )
    (tracker,) = Recorder.made
    assert tracker.config["trainer"] == "pure_text_ei"
    assert tracker.summary == {"test_prover/share_direct_quotation": 1.0}
    assert [name for name, *_ in tracker.artifacts] == ["analyses-one"]
    assert len(tracker.tables["analyses/2"]) == 4


def test_the_judge_named_by_a_foreign_run_gets_no_request(finished: Path, tmp_path: Path) -> None:
    theirs = RunDirectory(shutil.copytree(finished, tmp_path / "theirs"))
    values = theirs.read_yaml(HYPER_PARAMETERS)
    judge = {"_type": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    values["secret_word"]["analysis"] = {"analysers": [{"_type": "follow_up"}], "model": judge}
    theirs.write_yaml(HYPER_PARAMETERS, values)
    with pytest.raises(UntrustedRunError, match="base_url"):
        analyse_run(theirs.path)


def test_unjudgeable_runs_are_reported(finished: Path, type_command: CommandLine) -> None:
    model = ScriptedChatModel(["Answer: yes"])
    with pytest.raises(ConfigurationError, match="name no judge"):
        analyse_run(finished)
    with pytest.raises(DataError, match="test_0000, test_0001, train_0000, train_0001"):
        analyse_run(finished, model=model, iteration=7)
    with pytest.raises(UnknownNameError, match="Did you mean 'follow_up'"):
        analyse_run(finished, ["folow_up"], model)
    about = [{"_type": "follow_up", "agents": ["arthur"]}]
    wrong = AnalysisParameters.from_dict({"analysers": about, "model": {"_type": "scripted"}})
    with pytest.raises(ConfigurationError, match=r"arthur.*prover, verifier"):
        analyse_run(finished, wrong.analysers, model)
    output = type_command("analyse", str(finished), "--judge", "none.yaml")
    assert "none.yaml" in refused(output)
