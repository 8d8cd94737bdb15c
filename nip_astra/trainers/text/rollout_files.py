"""Where rollouts in words are kept: what was answered, what was played, what people read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from nip_astra.samplers.answer_journal import AnswerJournal
from nip_astra.samplers.text_rollouts import transcripts
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.nested_array_dict import NestedArrayDict

ROLLOUTS, ANSWERS, TRANSCRIPTS = "rollouts.json", "answers.jsonl", "transcripts.json"


class RolloutFiles:
    """The rollouts of one run, a folder for each sampling; in memory without a run directory.

    A folder `rollouts/<split>_<iteration>` has `answers.jsonl`, the answers as they came in;
    `rollouts.json`, a `NestedArrayDict` with prompts and raw answers; and `transcripts.json`.
    """

    def __init__(self, run_directory: RunDirectory | None) -> None:
        self.run_directory = run_directory
        self._in_memory: dict[tuple[str, int], NestedArrayDict] = {}

    def folder(self, split: str, iteration: int) -> Path | None:
        """The folder of a sampling; None without a run directory."""
        if self.run_directory is None:
            return None
        return self.run_directory.rollouts_dir / f"{split}_{iteration:04d}"

    def journal(
        self,
        split: str,
        iteration: int,
        run_key: str | None = None,
        *,
        is_replayed: bool = False,
    ) -> AnswerJournal:
        """What was answered in a sampling so far; see `AnswerJournal` for the options."""
        folder = self.folder(split, iteration)
        path = None if folder is None else folder / ANSWERS
        return AnswerJournal(path, run_key, is_replayed)

    def keep(
        self,
        rollouts: NestedArrayDict,
        split: str,
        iteration: int,
        *,
        agent_names: Sequence[str],
        channel_names: Sequence[str],
    ) -> None:
        """Keep the rollouts of a sampling."""
        folder = self.folder(split, iteration)
        if folder is None or self.run_directory is None:
            self._in_memory[split, iteration] = rollouts
            return
        folder.mkdir(parents=True, exist_ok=True)
        told = transcripts(rollouts, agent_names, channel_names)
        name = folder.relative_to(self.run_directory.path) / TRANSCRIPTS
        self.run_directory.write_json(str(name), told)
        rollouts.save(folder / ROLLOUTS)

    def load(self, split: str, iteration: int) -> NestedArrayDict:
        """The rollouts of an earlier sampling.

        Raises
        ------
        DataError
            When they are missing or damaged.
        """
        folder = self.folder(split, iteration)
        if folder is None:
            return self._in_memory[split, iteration]
        return NestedArrayDict.load(folder / ROLLOUTS)

    def forget(self, split: str, iteration: int) -> None:
        """Remove what was kept of a sampling that is to be done anew."""
        self._in_memory.pop((split, iteration), None)
        folder = self.folder(split, iteration)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
