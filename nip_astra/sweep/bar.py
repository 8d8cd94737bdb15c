"""One bar over all runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nip_astra.progress import open_progress, read_progress
from nip_astra.sweep.launchers import FinishedRun, RunStatus

FIRST_GUESS = 10
"""Iterations that a run is taken to have before the first one has told."""


class SweepBar:
    """Counts the iterations of all runs; those of runs that have not begun are foreseen.

    Parameters
    ----------
    num_runs : int
        Of the sweep, those that had ended before included.
    progress_path : Callable
        File in which a run tells how far it is.
    """

    def __init__(
        self,
        num_runs: int,
        progress_path: Callable[[str], Path],
        *,
        enabled: bool = True,
        tqdm_func: Callable[..., Any] | None = None,
    ) -> None:
        self._num_runs = num_runs
        self._path_of = progress_path
        self._bar = open_progress(num_runs * FIRST_GUESS, enabled, tqdm_func)
        self._known: dict[str, tuple[int, int]] = {}
        self._ended: dict[str, RunStatus] = {}
        self._describe(0)

    def poll(self, at_work: Iterable[str]) -> None:
        """Look how far the runs at work are."""
        names = list(at_work)
        for run_id in names:
            told = read_progress(self._path_of(run_id))
            if told is not None:
                self._count(run_id, *told)
        self._describe(len(names))

    def note(self, one: FinishedRun) -> None:
        """Count a run that has ended; one that had ended before, or failed, counts as a whole."""
        run_id = one.run.run_id
        self._ended[run_id] = one.status
        total = self._known.get(run_id, (0, self._mean()))[1]
        if one.status is RunStatus.PRUNED:
            total = self._known.get(run_id, (0, 0))[0]
        if one.status is not RunStatus.STOPPED:
            self._count(run_id, total, total, is_resumed=not one.seconds)

    def close(self) -> None:
        """Leave the terminal in order."""
        self._bar.close()

    def _mean(self) -> int:
        totals = [total for _, total in self._known.values() if total]
        return round(sum(totals) / len(totals)) if totals else FIRST_GUESS

    def _count(self, run_id: str, num_done: int, total: int, *, is_resumed: bool = False) -> None:
        before = self._known.get(run_id, (0, 0))[0]
        self._known[run_id] = (num_done, total)
        foreseen = max(self._num_runs - len(self._known), 0) * self._mean()
        in_all = sum(one for _, one in self._known.values()) + foreseen
        if in_all != self._bar.total:
            self._bar.lengthen(in_all - self._bar.total)
        if num_done > before:
            (self._bar.skip if is_resumed else self._bar.step)(num_done - before)

    def _describe(self, num_at_work: int) -> None:
        said = f"{len(self._ended)} of {self._num_runs} runs, {num_at_work} at work"
        failed = sum(status is RunStatus.FAILED for status in self._ended.values())
        self._bar.set_description(f"{said}, {failed} failed" if failed else said)
