"""Parameters that older versions called otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "training.training_steps": "training.num_iterations",
    "training.batch_size": "training.minibatch_size",
    "solo_agent.batch_size": "solo_agent.minibatch_size",
    "text_rl.fine_tune_batch_size": "text_rl.fine_tune_minibatch_size",
    "spg.foreseen_step_factor": "spg.opponent_step_factor",
    "message_regression.regressor.batch_size": "message_regression.regressor.minibatch_size",
}
"""Dotted paths that files of older versions hold, and those of the same parameters now."""

logger = logging.getLogger(__name__)


def with_new_names(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Nested values by the names of now; what was renamed is noted in the log.

    A value that is given by both names keeps them, which validation refuses.

    Parameters
    ----------
    source : str
        Where the values come from, for the note.
    """
    found = dict(values)
    notes: list[str] = []
    for old, new in RENAMED.items():
        group, _, name = new.rpartition(".")
        parts = group.split(".")
        within = _at(found, parts)
        before = old.rpartition(".")[2]
        if within is None or before not in within or name in within:
            continue
        renamed = {name if key == before else key: value for key, value in within.items()}
        _put(found, parts, renamed)
        notes.append(f"{old} is {new}")
    if notes:
        logger.warning(
            "%s has names of an older nip_astra, which are read as those of now: %s. Write the "
            "new ones.",
            source,
            "; ".join(notes),
        )
    return found


def name_of_now(path: str) -> str | None:
    """What the parameter of a dotted path, or of the end of one, is called now."""
    if path in RENAMED:
        return RENAMED[path]
    return "num_iterations" if path.rpartition(".")[2] == "training_steps" else None


def _at(values: Mapping[str, Any], parts: list[str]) -> Mapping[str, Any] | None:
    found: Any = values
    for part in parts:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _put(values: dict[str, Any], parts: list[str], group: dict[str, Any]) -> None:
    """Replace a group within copies of those around it."""
    for part in parts[:-1]:
        values[part] = dict(values[part])
        values = values[part]
    values[parts[-1]] = group
