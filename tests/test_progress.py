"""Tests of the progress bar and of the loops that count on it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from nip_astra import progress
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.progress import (
    MIN_BAR_WIDTH,
    IterationContext,
    ProgressBar,
    attach_progress_bar,
    count_requests,
    counting,
    loops_cut_to,
    only_own_bars,
    open_progress,
    quiet_libraries,
    read_progress,
    showing,
    total_num_iterations,
    waiting_for,
)
from nip_astra.utils.formatting import decimal
from tests.kit.bars import Bars


@pytest.fixture(autouse=True)
def _no_bar_is_open() -> None:
    """Close bars that other tests left open."""
    for bar in list(progress._BARS):
        bar.close()


def stderr_of(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


Settings = partial(ExperimentSettings, progress=False)


class Loops:
    """Two loops; `progress` is set by tests that share a bar."""

    def __init__(self, settings: ExperimentSettings, *, num_train: int = 4, start: int = 0) -> None:
        self.settings = settings
        self.num_train = num_train
        self.start = start
        self.seen: list[int] = []

    @attach_progress_bar(lambda self: self.num_train)
    def train(self, iteration_context: IterationContext, scale: int = 1) -> str:
        """Train."""
        iteration_context.set_description("train")
        for index in iteration_context.iterate(self.start):
            self.seen.append(index * scale)
            iteration_context.set_postfix(loss=0.123456, state="fine")
        return "trained"

    @attach_progress_bar(lambda self: 3)
    def test(self, iteration_context: IterationContext) -> None:
        for _ in range(iteration_context.num_iterations):
            iteration_context.step()


def with_shared_bar(loops: Loops, bars: Bars | None) -> ProgressBar:
    loops.progress = open_progress(total_num_iterations(loops), True, bars)
    return loops.progress


@pytest.mark.parametrize(
    ("num_train", "test_run", "cut", "num_run", "total"),
    [(7, False, None, 7, 10), (7, True, None, 1, 2), (0, True, None, 0, 1), (7, False, 2, 2, 4)],
)
def test_the_count_is_known_before_the_loop_and_capped_in_a_test_run(
    num_train: int, test_run: bool, cut: int | None, num_run: int, total: int
) -> None:
    loops = Loops(Settings(test_run=test_run), num_train=num_train)
    assert Loops.train.__doc__ == "Train."
    assert Loops.train.num_iterations_func(loops) == num_train
    with loops_cut_to(cut):
        assert total_num_iterations(loops) == total
        # Without its context, and to its end if it keeps to its number.
        assert loops.train(scale=2) == "trained"
    assert loops.seen == [2 * index for index in range(num_run)]


@pytest.mark.parametrize(("reads", "num_run"), [(False, 1), (True, 2)])
def test_a_test_run_cuts_a_loop_that_counts_by_step(reads: bool, num_run: int) -> None:
    """A loop that has read its number, but continues, is ended one iteration later."""

    class Counting(Loops):
        @attach_progress_bar(lambda self: 7)
        def count(self, iteration_context: IterationContext) -> None:
            assert not reads or iteration_context.num_iterations in (1, 7)
            for index in range(7):
                self.seen.append(index)
                iteration_context.step()

    for settings, expected in ((Settings(test_run=True), num_run), (Settings(), 7)):
        loops = Counting(settings)
        loops.count()
        assert loops.seen == list(range(expected))


@pytest.mark.parametrize("test_run", [False, True])
def test_an_undecorated_override_is_not_counted_and_the_bar_grows_by_loops_that_it_calls(
    test_run: bool,
) -> None:
    class Twice(Loops):
        def train(self) -> None:
            super().train()
            super().train()

    bars = Bars()
    loops = Twice(Settings(progress=True, tqdm_func=bars, test_run=test_run))
    shared = with_shared_bar(loops, bars)
    (bar,) = bars.opened
    assert bar.total == (1 if test_run else 3)
    states = []
    update = bar.update
    bar.update = lambda n: (update(n), states.append((bar.n, bar.total)))
    loops.train()
    loops.test()
    assert all(num_done <= total for num_done, total in states)
    assert bar.n == bar.total == shared.total == (3 if test_run else 11)


def test_loops_share_the_bar_of_their_owner_and_show_the_part_before_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr, bars = stderr_of(monkeypatch), Bars()
    loops = Loops(Settings(progress=True, tqdm_func=bars), start=1)
    with_shared_bar(loops, bars)
    loops.train()
    (bar,) = bars.opened
    assert (bar.total, bar.n, bar.description) == (7, 4, "train 4/4, in all")
    loops.test()
    assert (bar.total, bar.n, bar.is_closed) == (7, 7, False)
    assert bar.postfixes[-1] == {"loss": "0.123", "state": "fine"}
    with_shared_bar(loops, None)
    loops.train()
    loops.test()
    heads = [line.split(" loss")[0] for line in stderr.getvalue().splitlines()]
    assert heads[:3] == [f"train {n}/4, in all {n}/7" for n in (2, 3, 4)]
    # The second loop does not describe itself.
    assert heads[3:] == [f"train 4/4, in all {n}/7" for n in (5, 6, 7)]


def test_values_are_short_and_those_of_another_task_go() -> None:
    bars = Bars()
    bar = open_progress(3, True, bars)
    (drawn,) = bars.opened
    bar.set_description("train")
    bar.set_postfix(
        {"rate": 12345.6, "loss": 1e-5, "huge": 1e12, "near": 999.7, "lost": float("nan")}
    )
    shown = {"rate": "12,346", "loss": "1e-05", "huge": "1e+12", "near": "1,000"}
    assert drawn.postfixes[-1] == shown
    assert list(map(decimal, (999.4, 999.7, -1000.2))) == ["999", "1,000", "\N{MINUS SIGN}1,000"]
    bar.set_description("train")
    assert drawn.postfixes[-1] != {}
    bar.set_description("test")
    assert drawn.postfixes[-1] == {}


@pytest.mark.parametrize(("start", "seen"), [(0, [0, 1, 2, 3]), (3, [3]), (9, [])])
def test_a_loop_without_a_shared_bar_opens_and_closes_its_own_advanced_to_its_start(
    start: int, seen: list[int]
) -> None:
    bars, steps = Bars(), []
    count = lambda: steps.append(1)  # noqa: E731
    settings = Settings(progress=True, tqdm_func=bars, global_tqdm_step_fn=count)
    loops = Loops(settings, start=start)
    loops.train()
    (bar,) = bars.opened
    assert loops.seen == seen
    assert (bar.total, bar.n, bar.initial, bar.is_closed) == (4, 4, min(start, 4), True)
    assert len(steps) == 4


def test_an_iteration_whose_body_is_left_is_not_counted_and_the_bar_is_closed() -> None:
    class Failing(Loops):
        @attach_progress_bar(lambda self: 5)
        def train(self, iteration_context: IterationContext) -> None:
            for index in iteration_context.iterate():
                if index == 2:
                    raise ArithmeticError("lost")

    bars = Bars()
    with pytest.raises(ArithmeticError, match="lost"):
        Failing(Settings(progress=True, tqdm_func=bars)).train()
    (bar,) = bars.opened
    assert (bar.n, bar.is_closed) == (2, True)


@pytest.mark.parametrize(
    ("total", "resumed", "heads"),
    [
        (300, 0, [f"train {30 * n}/300 loss=0.5" for n in range(1, 11)]),
        # A resumed run does not repeat lines.
        (10, 6, [f"train {n}/10 loss=0.5" for n in (7, 8, 9, 10)]),
    ],
)
def test_without_a_terminal_a_run_prints_at_most_ten_whole_lines(
    monkeypatch: pytest.MonkeyPatch, total: int, resumed: int, heads: list[str]
) -> None:
    stderr = stderr_of(monkeypatch)
    bar = open_progress(total)
    bar.set_description("train")
    bar.set_postfix({"loss": 0.5})
    bar.skip(resumed)
    for _ in range(total - resumed):
        bar.step()
    bar.close()
    text = stderr.getvalue()
    assert [line.split(" [")[0] for line in text.splitlines()] == heads
    assert "\r" not in text


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ["1/3"]),
        (80, ["1/3", "failures=0.25", "[", "reward=1.5"]),
        (200, ["1/3", "failures=0.25", "[", "reward=1.5", "loss=0.5", "tokens_per_second=12,346"]),
    ],
)
def test_the_bar_stays_visible_and_figures_are_dropped_from_the_last(
    width: int, shown: list[str]
) -> None:
    bar = ProgressBar(3)
    bar.set_description("Training the attacker")
    bar.set_position(1, 2)
    bar.step()
    bar.set_postfix({"failures": 0.25, "reward": 1.5, "loss": 0.5, "tokens_per_second": 12345.6})
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True).print(bar)
    bar.close()
    (line,) = without_colours(stream.getvalue()).splitlines()
    assert len(line) <= width
    assert len(re.findall("[━╸╺]", line)) >= MIN_BAR_WIDTH
    figures = re.sub(r"\[.*?\]", "[", line.rpartition("━ ")[2]).split()
    assert figures == shown


def without_colours(text: str) -> str:
    return re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", text)


def test_output_of_others_has_lines_of_its_own_above_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = stderr_of(monkeypatch, is_terminal=True)
    logger = logging.Logger("of another library")
    monkeypatch.setitem(logging.root.manager.loggerDict, logger.name, logger)
    logger.addHandler(logging.StreamHandler())
    with showing("Loading"):
        inner = open_progress(2)
        inner.step()
        logger.warning("a weight is missing")
        print("deprecated", file=sys.stderr)
        inner.close()
    assert sys.stderr is terminal
    assert logger.handlers[0].stream is terminal
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    shown = [without_colours(line).strip() for line in lines]
    assert "a weight is missing" in shown
    assert "deprecated" in shown
    assert any(re.search("━ 1/2 ", line) for line in shown), "what was counted stays"


def test_bars_of_other_libraries_are_off_while_and_between_ours() -> None:
    from transformers.utils import logging as other

    was_on = other.is_progress_bar_enabled()
    other.enable_progress_bar()
    try:
        with showing("Loading", enabled=False):
            assert not other.is_progress_bar_enabled()
        assert other.is_progress_bar_enabled()
        with only_own_bars():
            with showing("Loading", enabled=False):
                other.enable_progress_bar()  # as when it is imported now
                quiet_libraries()
            assert not other.is_progress_bar_enabled()
        assert other.is_progress_bar_enabled()
    finally:
        if not was_on:
            other.disable_progress_bar()


class Notebook:
    """A stand-in for a notebook, with the newest content of each of its outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: dict[str, dict[str, str]] = {}
        self.cell = SimpleNamespace(execution_count=1)
        package, module = ModuleType("IPython"), ModuleType("IPython.display")
        package.get_ipython = lambda: self.cell
        module.display = self._display
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
        monkeypatch.setenv("FORCE_COLOR", "1")

    def _display(self, bundle: dict[str, str], *, raw: bool, display_id: str, update: bool) -> None:
        assert raw
        assert "\x1b" not in "".join(bundle.values())
        assert update == (display_id in self.shown)
        self.shown[display_id] = bundle

    @property
    def outputs(self) -> list[dict[str, str]]:
        return list(self.shown.values())


def test_a_notebook_has_one_output_per_bar_and_one_without_content_is_taken_over_in_its_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notebook, stderr = Notebook(monkeypatch), sys.stderr
    with showing("Loading"):
        assert sys.stderr is stderr
    assert notebook.outputs == [{}]
    with showing("Training", 2) as bar:
        bar.step(2)
    (output,) = notebook.outputs
    assert re.search("^Training ━+ 2/2", output["text/plain"])
    with showing("Loading"):
        pass
    notebook.cell.execution_count += 1
    with showing("Evaluating", 2):
        pass
    assert ["Training" in notebook.outputs[0]["text/plain"], *notebook.outputs[1:2]] == [True, {}]
    assert "Evaluating" in notebook.outputs[2]["text/plain"]


def test_a_forked_process_does_not_write_to_the_display_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = stderr_of(monkeypatch, is_terminal=True)
    with showing("Loading"):
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.stderr is terminal else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.stderr is not terminal


def test_requests_and_units_without_requests_are_counted_and_repetitions_never() -> None:
    count_requests()
    with showing("Judging", 5, counts_requests=True) as bar, showing("Other", 3):
        count_requests()
        assert bar.num_done == 1
    with showing("Rating", 9, counts_requests=True) as bar:
        with counting(5):
            count_requests(2)
            assert bar.num_done == 2
            with counting(4):
                pass
        assert bar.num_done == 5
        with counting(3):
            for _ in range(6):
                count_requests()
            assert bar.num_done == 8, "repetitions do not count"
        assert bar.num_done == 8
        with pytest.raises(ValueError, match="broken"), counting(1):
            raise ValueError("broken")
        count_requests()
        assert bar.num_done == 9
    with showing("Loading") as bar, counting(3):
        pass
    assert bar.num_done == 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_wait_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stderr = stderr_of(monkeypatch, is_terminal=is_terminal)
    bar = open_progress(3)
    bar.set_postfix({"loss": 1.0})

    async def wait() -> None:
        with waiting_for("the judge", after=0.0), waiting_for("the target", after=0.0):
            await asyncio.sleep(0.01)

    asyncio.run(wait())
    during = stderr.getvalue()
    assert "the judge" in during
    bar.step()
    bar.close()
    if is_terminal:
        assert "(and 1 more)" in during
        assert "loss=1" in stderr.getvalue().rpartition("the judge")[2]
    else:
        assert during.count("waiting for") == 1


def test_a_file_holds_the_progress_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, stderr = tmp_path / "run.progress", stderr_of(monkeypatch)
    assert read_progress(file) is None
    clock = [0.0]
    monkeypatch.setattr("nip_astra.progress.time.monotonic", lambda: clock[0])
    bar = open_progress(5, enabled=False, path=str(file))
    assert read_progress(file) == (0, 5)
    bar.step(2)
    assert read_progress(file) == (0, 5), "it is not written at every iteration"
    clock[0] += 1.0
    bar.skip(1)
    bar.lengthen(4)
    assert read_progress(file) == (3, 5)
    bar.set_description("train")
    bar.set_postfix({"loss": 1.0})
    bar.close()
    assert read_progress(file) == (3, 9)
    assert stderr.getvalue() == "", "it is switched off"
    file.write_text("")
    assert read_progress(file) is None
    # A run goes on where its progress cannot be written.
    bar = open_progress(2, enabled=False, path=str(tmp_path / "missing" / "run.progress"))
    bar.step()
    bar.close()
    assert bar.num_done == 1


def test_the_time_of_a_resumed_run_includes_that_of_earlier_processes() -> None:
    bar = open_progress(10, False, seconds_before=3600.0)
    bar.skip(5)
    bar.step()
    try:
        elapsed, remaining = next(part for part in bar._parts() if "<" in part)[1:-1].split("<")
        assert elapsed.startswith("1:00:0")
        # The rate is that of this process.
        assert remaining.startswith("00:0")
    finally:
        bar.close()
