"""Parameters that older versions called otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

RENAMED = {
    "training.training_steps": "training.num_iterations",
    "training.batch_size": "training.minibatch_size",
    "solo_agent.batch_size": "solo_agent.minibatch_size",
    "text_rl.fine_tune_batch_size": "text_rl.fine_tune_minibatch_size",
    "spg.foreseen_step_factor": "spg.opponent_step_factor",
    "ppo.entropy_coef": "ppo.entropy_weight",
    "reinforce.entropy_coef": "reinforce.entropy_weight",
    "message_regression.regressor.batch_size": "message_regression.regressor.minibatch_size",
}
"""Dotted paths that files of older versions hold, and those of the same parameters now."""


def _same(value: Any) -> Any:
    return value


def _below(ratio: Any) -> Any:
    return None if ratio is None else round(1 - ratio, 12)


def _above(ratio: Any) -> Any:
    return None if ratio is None else round(ratio - 1, 12)


def _with_gradient(kind: Any) -> Any:
    # The gradient of k1 is 0 on average.
    return "k2" if kind == "k1" else kind


MOVED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "ppo.clip_epsilon": {"clip_low": _same, "clip_high": _same},
    "ast_ppo.clip_range": {"clip_low": _same, "clip_high": _same},
    "ast_ppo.kl.kind": {
        "kl.value": _same,
        "kl.gradient": _with_gradient,
    },
    "ast_grpo.kl_weight": {"kl.weight": _same},
    "ast_grpo.kl_kind": {
        "kl.value": _same,
        "kl.gradient": _with_gradient,
    },
    "*.num_runs": {"group_size": _same},
    "*.policy_loss.least_ratio": {"policy_loss.clip_low": _below},
    "*.policy_loss.most_ratio": {"policy_loss.clip_high": _above},
    "*.policy_loss.dual_clip": {
        "policy_loss.loss_options": lambda c: {} if c is None else {"dual_clip": c}
    },
    "*.policy_loss.kl_weight": {"policy_loss.kl.weight": _same},
    "*.policy_loss.kl_value": {"policy_loss.kl.value": _same},
    "*.policy_loss.kl_gradient": {"policy_loss.kl.gradient": _same},
    "*.policy_loss.most_mismatch": {"policy_loss.max_mismatch": _same},
    "*.service_loss.loss_fn": {"policy_loss.loss": _same},
    "*.service_loss.clip_low_threshold": {"policy_loss.clip_low": _below},
    "*.service_loss.clip_high_threshold": {"policy_loss.clip_high": _above},
}
"""Parameters whose value or group changed. By old path, where `*` is any section: the new paths
within the section, and how each new value follows from the old one."""

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
    for old, new_paths in MOVED.items():
        section, _, rest = old.partition(".")
        for name in list(found) if section == "*" else [section]:
            if isinstance(found.get(name), Mapping) and _move(found, name, rest, new_paths):
                notes.append(f"{name}.{rest} is {', '.join(f'{name}.{new}' for new in new_paths)}")
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
    section, _, rest = path.partition(".")
    new_paths = MOVED.get(path) or MOVED.get(f"*.{rest}")
    if new_paths is not None:
        return " and ".join(f"{section}.{new}" for new in new_paths)
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


def _move(
    values: dict[str, Any], section: str, old: str, new_paths: Mapping[str, Callable[[Any], Any]]
) -> bool:
    """Move a value within a section, unless it is absent or given by a new name as well."""
    *groups, name = old.split(".")
    before = _at(values, [section, *groups])
    if before is None or name not in before:
        return False
    if any(_holds(values, f"{section}.{new}") for new in new_paths):
        return False
    rest = {key: value for key, value in before.items() if key != name}
    if rest or not groups:
        _put(values, [section, *groups], rest)
    else:
        above = dict(values[section])
        del above[groups[0]]
        values[section] = above
    for new, convert in new_paths.items():
        *inner, last = new.split(".")
        _put_value(values, [section, *inner], last, convert(before[name]))
    return True


def _holds(values: Mapping[str, Any], path: str) -> bool:
    *groups, name = path.split(".")
    found = _at(values, groups)
    return found is not None and name in found


def _put_value(values: dict[str, Any], parts: list[str], name: str, value: Any) -> None:
    for part in parts:
        values[part] = dict(values.get(part) or {})
        values = values[part]
    values[name] = value
