"""A single bar counts the iterations of all runs, including runs that have not begun."""

from __future__ import annotations

from pathlib import Path

from nip_astra.sweep.plan import Arm, FinishedRun, PlannedRun, RunStatus
from nip_astra.sweep.runner import FIRST_GUESS, SweepBar
from tests.kit.bars import Bars


def test_a_bar_foresees_the_runs_that_have_not_begun(tmp_path: Path) -> None:
    bars = Bars()
    bar = SweepBar(4, lambda run_id: tmp_path / run_id, tqdm_func=bars)
    (drawn,) = bars.opened
    assert drawn.total == 4 * FIRST_GUESS
    runs = [PlannedRun(Arm("ast_dpo", None, {}), seed) for seed in range(4)]
    ids = [run.run_id for run in runs]
    (tmp_path / ids[0]).write_text("3 20\n")
    bar.poll(ids[:2])
    assert (drawn.n, drawn.total) == (3, 80)
    assert drawn.description == "0 of 4 runs, 2 at work"
    bar.note(FinishedRun(runs[0], RunStatus.ENDED, 5.0))
    assert (drawn.n, drawn.total) == (20, 80)
    (tmp_path / ids[1]).write_text("6 40\n")
    bar.poll(ids[1:2])
    assert (drawn.n, drawn.total) == (26, 20 + 40 + 2 * 30)
    bar.note(FinishedRun(runs[1], RunStatus.PRUNED, 5.0))
    assert (drawn.n, drawn.total) == (26, 20 + 6 + 2 * 13)
    bar.note(FinishedRun(runs[2], RunStatus.FAILED, 1.0))
    # Progress before the start does not enter the rate.
    bar.note(FinishedRun(runs[3], RunStatus.ENDED, 0.0))
    assert drawn.n == drawn.total
    assert drawn.initial > 0
    bar.poll([])
    assert drawn.description == "4 of 4 runs, 0 at work, 1 failed"
