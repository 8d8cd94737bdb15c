"""Runs that start their own text service: for the target, for the judge, over a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import (
    ConfigurationError,
    ModelLoadError,
    NothingMeasuredError,
    ParameterError,
    ServiceError,
)
from nip_astra.evaluation.families.scorers import model_card
from nip_astra.evaluation.run_results import read_results
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services import service_process
from nip_astra.language_models.services.chat import ChatAnswer, close_all, complete_all
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.service_process import OwnService
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment
from nip_astra.scenario_base.text.models import TextAgent, TextAgentParameters, open_text_models
from tests.kit.experiments import run_in
from tests.kit.serving import wait_until
from tests.kit.tiny import write_scenario
from tests.language_models.services.requests import saying

for package in ("openai", "fastapi", "uvicorn"):
    pytest.importorskip(package)

FEW = ("training.num_iterations=2", "training.num_episodes_per_experience=2")


def local(weights: Path, **fields: Any) -> dict[str, Any]:
    """Parameters of a chat model behind the run's own service."""
    given = {"_type": "openai", "model": "tiny", "service": "local", "weights": str(weights)}
    return given | fields


def state_of(process: Path) -> tuple[str, int]:
    """A process's state, Z if it has ended, and its parent."""
    try:
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)


def services_of(process: int) -> list[int]:
    """The serving processes of a starter."""
    children = [
        path
        for path in Path("/proc").glob("[0-9]*")
        if state_of(path)[0] != "Z" and state_of(path)[1] == process
    ]
    served = "nip_astra.serve.local_service"
    return [int(path.name) for path in children if served in (path / "cmdline").read_text()]


@pytest.mark.slow  # two processes, each of which imports torch
def test_a_model_starts_its_service_again_when_it_died_and_stops_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy in the environment does not apply to this machine's own service.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    parameters = OpenAIChatModel.Parameters(**local(tiny_model_dir))
    model, other = OpenAIChatModel(parameters), OpenAIChatModel(parameters)
    own = OwnService.shared("tiny", str(tiny_model_dir.resolve()), "cpu")
    assert own.address is None, "nothing was asked for yet"
    request = saying("hello you", temperature=0.0, max_tokens=4)
    (first,) = complete_all(model, [request])
    (pid,) = services_of(os.getpid())
    (second,) = complete_all(other, [request])
    assert services_of(os.getpid()) == [pid], "one service serves both"
    assert isinstance(first.samples[0], ChatAnswer)
    assert first.samples == second.samples
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: own.address is None)
    (again,) = complete_all(model, [request])
    assert again.samples == first.samples
    close_all([model, other])
    assert services_of(os.getpid()) == []


def test_an_unservable_model_is_reported_before_or_at_the_first_request(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match="no_model does not exist"):
        OpenAIChatModel(OpenAIChatModel.Parameters(**local(tmp_path / "no_model")))
    with pytest.raises(ParameterError, match="which needs weights"):
        OpenAIChatModel.Parameters.from_dict(
            {"_type": "openai", "model": "tiny", "service": "local"}
        )
    model = OpenAIChatModel(OpenAIChatModel.Parameters(**local(tiny_model_dir)))

    def end_at_once(*_: object, **__: object) -> None:
        raise ServiceError("the service ended at once: no memory.")

    monkeypatch.setattr(service_process, "ServiceProcess", end_at_once)
    with pytest.raises(ConfigurationError, match=r"'tiny' has service: local, but .* no memory"):
        complete_all(model, [saying("hello")])


def test_place_of_answers_hangs_on_the_weights_and_on_no_port(tiny_model_dir: Path) -> None:
    def place() -> str:
        return OpenAIChatModel(OpenAIChatModel.Parameters(**local(tiny_model_dir))).place

    before = place()
    assert before == place()
    config = tiny_model_dir / "config.json"
    times = config.stat()
    try:
        os.utime(config, ns=(1, 1))
        assert place() != before
    finally:
        os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    ("judge", "fact"),
    [
        ({}, "needs a base_url"),
        ({"service": "local"}, "needs weights to serve"),
        (
            {"service": "local", "weights": "x", "base_url": "http://127.0.0.1:1/v1"},
            r"is read only where .*service is address",
        ),
    ],
)
def test_conditions_are_reported_if_both_or_neither_are_given(
    judge: dict[str, str], fact: str, tmp_path: Path
) -> None:
    given = {"_type": "judge", "model": "m"} | judge
    overrides = [f"ast_chat.scorer.{name}={value}" for name, value in given.items()]
    with pytest.raises(ParameterError, match=fact):
        resolve_experiment(
            trainer="ast_dpo", scenario=str(write_scenario(tmp_path)), overrides=overrides
        )


def test_agents_that_are_trained_by_jobs_need_a_service_that_stays(tiny_model_dir: Path) -> None:
    model = OpenAIChatModel.Parameters(**local(tiny_model_dir))
    agent = TextAgent("prover", 0, is_verifier=False, parameters=TextAgentParameters(model=model))
    with pytest.raises(ConfigurationError, match=r"players has service: local"):
        open_text_models(agent, label="players", scenario_dir=None, settings=ExperimentSettings())


def test_a_card_names_the_weights_that_are_served(tiny_model_dir: Path) -> None:
    target = OpenAIChatModel.Parameters(**local(tiny_model_dir))
    card = model_card("target", target, None)
    assert card["source"] == f"{tiny_model_dir} behind a service of the run"


CODE = """
import sys
from pathlib import Path
from nip_astra.resolving.resolution import resolve_experiment
from tests.kit.experiments import run_in
resolved = resolve_experiment(trainer="ast_dpo", scenario=sys.argv[1], overrides=sys.argv[3:])
run_in(Path(sys.argv[2]), resolved, "cut", checkpoint_period=1)
"""


@pytest.mark.slow  # several processes, each of which imports torch
def test_a_run_and_its_service_are_killed_and_resumed_to_the_same_end(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    target = {"chat_model": local(tiny_model_dir), "max_new_tokens": 4}
    # The template of the judge refuses its request.
    judge = local(tiny_model_dir, _type="judge", num_retries=0, max_tokens=4, on_failure="skip")
    judge |= {"rubric": "Rate.", "response_format": "text"}
    scenario = write_scenario(tmp_path / "s", target=target)
    more = [*FEW, "training.num_iterations=6"]
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(scenario), overrides=more)
    whole = read_results(run_in(tmp_path, resolved, "whole", checkpoint_period=1))
    assert services_of(os.getpid()) == [], "the service ends with the run"
    with subprocess.Popen([sys.executable, "-c", CODE, str(scenario), str(tmp_path), *more]) as run:
        kept = tmp_path / "cut" / "checkpoints"
        wait_until(lambda: (kept.is_dir() and any(kept.iterdir())) or run.poll() is not None)
        (service,) = services_of(run.pid)
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: state_of(Path(f"/proc/{service}"))[0] == "Z", 30)
    resumed = resume_experiment(tmp_path / "cut", progress=False)
    assert resumed.results["after"] == whole.results["after"]
    assert resumed.results["services"]["target"]["failures"] == {}
    assert "Services" in (tmp_path / "cut" / "report.html").read_text()

    judged = write_scenario(tmp_path / "j", target=target, scorer=judge)
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(judged), overrides=FEW)
    with pytest.raises(NothingMeasuredError, match="'tiny' at local service"):
        run_in(tmp_path, resolved, "judged")
    assert services_of(os.getpid()) == []
