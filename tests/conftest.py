"""Fixtures shared by the tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
    from tests.kit.command_line import CommandLine
    from tests.kit.learning import Learning

# Fixtures import what they need: the process that distributes tests to workers runs none, and the
# workers wait until it has read this file.

# Progress bars of loading weights; the command line turns them off too.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Tests start many processes, each of which would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("learning", "results of tests with the fixture `learning`")
    group.addoption("--seeds", type=int, help="run each with seeds 0 to SEEDS - 1")
    group.addoption("--margins", type=Path, help="append results to a file; no other test is run")
    group.addoption("--threads", type=int, default=1, help="threads of torch")
    group.addoption("--bfloat16", choices=("yes", "no"), help="whether large models gain from it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    num_seeds = metafunc.config.getoption("--seeds")
    if num_seeds is not None and "learning" in metafunc.fixturenames:
        names = [f"seed{seed}" for seed in range(num_seeds)]
        metafunc.parametrize("learning", range(num_seeds), ids=names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--margins") is not None:
        items[:] = [item for item in items if "learning" in getattr(item, "fixturenames", ())]


def pytest_collectstart() -> None:
    # Modules and tests stay alive: garbage collection would only visit them again.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_sandbox"):
        from nip_astra.utils.sandbox import why_no_bubblewrap

        if why := why_no_bubblewrap():
            pytest.skip(f"sandbox: {why}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        outcome: sum(
            "needs_sandbox" in report.keywords
            for report in terminalreporter.stats.get(outcome, ())
            if report.when == "call" or outcome == "skipped"
        )
        for outcome in ("passed", "failed", "skipped")
    }
    if any(counts.values()):
        shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        terminalreporter.write_line(f"tests of the sandbox: {shown}")
    # The workers have ended by now, so their time is that of children.
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    terminalreporter.write_line(f"CPU time of all processes: {seconds:.0f} s")


@pytest.fixture(autouse=True)
def _one_thread(pytestconfig: pytest.Config) -> None:
    # Small operations run many times slower with two threads on busy cores, and a command with a
    # given number of threads does not reset it.
    import torch

    torch.set_num_threads(pytestconfig.getoption("--threads"))


@pytest.fixture
def learning(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Learning:
    """The seed of a learning test, and the check of its results."""
    from nip_astra.language_models import sources
    from tests.kit.learning import Learning

    bfloat16 = pytestconfig.getoption("--bfloat16")
    if bfloat16 is not None:
        answer = bfloat16 == "yes"
        monkeypatch.setattr(sources, "gains_from_bfloat16", lambda module, device: answer)
    seed = getattr(request, "param", 0)
    name = request.node.nodeid.replace(f"seed{seed}", "seed")
    return Learning(name, seed, pytestconfig.getoption("--margins"))


@pytest.fixture(autouse=True, scope="session")
def _models_read_once() -> Iterator[None]:
    from tests.kit.reading import models_are_read_once

    with pytest.MonkeyPatch.context() as patch:
        models_are_read_once(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # The key that signs runs is created there, also by processes that tests start; those have a
    # single thread as well.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("OMP_NUM_THREADS", "1")
        # No test cuts the power, and syncing a busy disk takes long.
        patch.setattr(os, "fsync", lambda file: None)
        # Services that tests start run on this machine.
        for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama and its tokenizer."""
    from tests.kit.tiny import make_language_model

    return make_language_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_model(tiny_model_dir: Path) -> HuggingFaceLanguageModel:
    """A trainable backend over the tiny model."""
    from tests.kit.tiny import load_backend

    return load_backend(tiny_model_dir)


@pytest.fixture(scope="session")
def tiny_scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario folder over tiny random models."""
    from tests.kit.tiny import write_scenario

    return write_scenario(tmp_path_factory.mktemp("scenario"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A scenario folder of numbers, without models, whose trainer counts."""
    from tests.kit.toy_scenario import toy_scenario_in

    with toy_scenario_in(tmp_path_factory.mktemp("toy") / "toy_scenario") as folder:
        yield folder


@pytest.fixture
def toy_protocol() -> Iterator[None]:
    """The scenario kind of `toy_trainer`, registered for the test."""
    from tests.kit.toy_protocol_scenario import toy_kind  # TorchRL, which few tests need

    with toy_kind():
        yield


@pytest.fixture
def cli(
    tmp_path: Path,
    tiny_scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[CommandLine]:
    """The command line in an empty folder; plug-ins loaded by a test are forgotten after it."""
    from tests.kit.command_line import CommandLine, plugins_forgotten_after

    monkeypatch.chdir(tmp_path)
    with plugins_forgotten_after():
        yield CommandLine(tmp_path, tiny_scenario, capsys)


@pytest.fixture
def no_plugins_left() -> Iterator[None]:
    """A test's registrations and loaded plug-ins are forgotten after it."""
    from tests.kit.command_line import plugins_forgotten_after

    with plugins_forgotten_after():
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processes forked by a test, of which none may remain after it."""
    processes: list[int] = []
    fork = os.fork

    def noted() -> int:
        process = fork()
        processes.append(process)
        return process

    monkeypatch.setattr(os, "fork", noted)
    yield processes
    for process in processes:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)
