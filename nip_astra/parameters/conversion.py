"""Read parameters with the names of older versions or of ASTRA-RL.

Both go through one operation, `rename`: move values from old dotted paths to new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.version import __version__

logger = logging.getLogger(__name__)

Move = str | Mapping[str, Callable[[Any], Any]]
"""Target of a value: a dotted path, or several, each with a function of the old value."""


def _unchanged(value: Any) -> Any:
    return value


def _distance_below(ratio: Any) -> Any:
    return None if ratio is None else round(1 - ratio, 12)


def _distance_above(ratio: Any) -> Any:
    return None if ratio is None else round(ratio - 1, 12)


def _kind_with_gradient(kind: Any) -> Any:
    # The gradient of k1 is 0 in expectation.
    return "k2" if kind == "k1" else kind


RENAMED: dict[str, Move] = {
    "training.training_steps": "training.num_iterations",
    "training.batch_size": "training.minibatch_size",
    "solo_agent.batch_size": "solo_agent.minibatch_size",
    "text_rl.fine_tune_batch_size": "text_rl.fine_tune_minibatch_size",
    "spg.foreseen_step_factor": "spg.opponent_step_factor",
    "message_regression.regressor.batch_size": "message_regression.regressor.minibatch_size",
    "ppo.entropy_coef": "ppo.entropy_weight",
    "reinforce.entropy_coef": "reinforce.entropy_weight",
    "ppo.clip_epsilon": {"ppo.clip_low": _unchanged, "ppo.clip_high": _unchanged},
    "ast_ppo.clip_range": {"ast_ppo.clip_low": _unchanged, "ast_ppo.clip_high": _unchanged},
    "ast_ppo.kl.kind": {
        "ast_ppo.kl.value": _unchanged,
        "ast_ppo.kl.gradient": _kind_with_gradient,
    },
    "ast_grpo.kl_weight": "ast_grpo.kl.weight",
    "ast_grpo.kl_kind": {
        "ast_grpo.kl.value": _unchanged,
        "ast_grpo.kl.gradient": _kind_with_gradient,
    },
    "*.num_runs": "*.group_size",
    "*.policy_loss.least_ratio": {"*.policy_loss.clip_low": _distance_below},
    "*.policy_loss.most_ratio": {"*.policy_loss.clip_high": _distance_above},
    "*.policy_loss.dual_clip": {
        "*.policy_loss.loss_options": lambda c: {} if c is None else {"dual_clip": c}
    },
    "*.train_service.patience_seconds": "*.train_service.retry_timeout_seconds",
    "*.policy_loss.kl_weight": "*.policy_loss.kl.weight",
    "*.policy_loss.kl_value": "*.policy_loss.kl.value",
    "*.policy_loss.kl_gradient": "*.policy_loss.kl.gradient",
    "*.policy_loss.most_mismatch": "*.policy_loss.max_mismatch",
    "*.service_loss.loss_fn": "*.policy_loss.loss",
    "*.service_loss.clip_low_threshold": {"*.policy_loss.clip_low": _distance_below},
    "*.service_loss.clip_high_threshold": {"*.policy_loss.clip_high": _distance_above},
}
"""Old dotted paths and the current paths of the same parameters; `*` matches any section."""
ASTRA_NAMES: dict[str, Move] = {
    "training_steps": "num_iterations",
    "batch_size": "minibatch_size",
}
"""ASTRA-RL's field names of `TrainingConfiguration`, and ours; both are accepted there."""


# ---- renamed parameters


def rename(
    values: Mapping[str, Any], names: Mapping[str, Move]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Move values from old dotted paths to new ones; return the result and the moved paths.

    A value stays in place if a new path is already set, or is not inside a group; validation
    reports it then.
    """
    moved: dict[str, str] = {}
    result = {str(name): value for name, value in values.items()}
    for old, move in names.items():
        section, _, inside = old.partition(".")
        targets = {move: _unchanged} if isinstance(move, str) else move
        for name in list(result) if section == "*" else [section]:
            path = f"{name}.{inside}" if inside else name
            new = {target.replace("*", name, 1): function for target, function in targets.items()}
            group, last = _group_at(result, path)
            if group and last in group and all(can_be_set(result, target) for target in new):
                value = _pop(result, path)
                for target, function in new.items():
                    set_value(result, target, function(value))
                moved[path] = " and ".join(new)
    return result, moved


def with_new_names(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Return nested values with current names; log which were renamed."""
    result, moved = rename(values, RENAMED)
    if moved:
        logger.warning(
            "%s uses old parameter names: %s. Write the new names.",
            source,
            "; ".join(f"{old} is {new}" for old, new in moved.items()),
        )
    return result


def current_name(path: str) -> str | None:
    """Return the current name of a parameter, given an old dotted path or its last part."""
    section, _, inside = path.partition(".")
    move = RENAMED.get(path) or RENAMED.get(f"*.{inside}")
    if move is not None:
        return " and ".join([move] if isinstance(move, str) else move).replace("*", section)
    return "num_iterations" if path.rpartition(".")[2] == "training_steps" else None


def _group_at(values: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any] | None, str]:
    """Return the group around a path (empty if missing, None if not a group), and the last name."""
    *groups, name = path.split(".")
    group_values: Any = values
    for group in groups:
        group_values = group_values.get(group)
        if group_values is None:
            return {}, name
        if not isinstance(group_values, Mapping):
            return None, name
    return group_values, name


def can_be_set(values: Mapping[str, Any], path: str) -> bool:
    """Return whether a dotted path is unset, and inside groups only."""
    group, name = _group_at(values, path)
    return group is not None and name not in group


def set_value(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a value in copies of its groups; create missing groups."""
    *groups, name = path.split(".")
    for group in groups:
        values[group] = dict(values.get(group) or {})
        values = values[group]
    values[name] = value


def _pop(values: dict[str, Any], path: str) -> Any:
    """Remove a value from copies of its groups; remove groups that become empty."""
    group, name = _group_at(values, path)
    assert group is not None
    value = group[name]
    rest = {key: other for key, other in group.items() if key != name}
    above = path.rpartition(".")[0]
    if rest and above:
        set_value(values, above, rest)
    elif above.count("."):
        _pop(values, above)
    elif above:
        values[above] = rest
    else:
        del values[name]
    return value


# ---- files of older versions

Conversion = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts the values of an older file to those of a newer one; may change its argument."""

_CONVERSIONS: dict[tuple[int, int], Conversion] = {}


def register_conversion(from_version: str, function: Conversion) -> Conversion:
    """Register a conversion of files of this and older versions to the next version.

    Parameters
    ----------
    from_version : str
        The last version, `major.minor`, whose files need the change.
    function : Callable
        Takes and returns plain values. Raises `ConfigurationError` with the reason if a file cannot
        be converted.

    Raises
    ------
    ConfigurationError
        If the version is malformed or has a conversion already.
    """
    release = release_of(from_version)
    if release is None or release in _CONVERSIONS:
        problem = "is not a version" if release is None else "has a conversion already"
        raise ConfigurationError(
            f"cannot register a conversion from {from_version!r}, which {problem}. Give the last "
            "major.minor version that needs it."
        )
    _CONVERSIONS[release] = function
    return function


def convert(values: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Convert values to the format of the installed version.

    Values without a `package_version` count as current. Those of a newer version are not changed,
    and validation refuses them together with all other faults.
    """
    converted = dict(values)
    version = converted.get("package_version")
    release = release_of(version) if isinstance(version, str) else None
    if release is None or is_newer(str(version)):
        return converted
    converted = with_new_names(converted, source=source)
    for last, function in sorted(_CONVERSIONS.items()):
        if release > last:
            continue
        try:
            converted = function(converted)
        except (ConfigurationError, LookupError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{source} was written by nip_astra {version} and cannot be converted for "
                f"{__version__}: {type(error).__name__}: {error}. Rewrite it, or install "
                f"nip_astra {version}."
            ) from error
    return converted | {"package_version": __version__}


def is_newer(version: str) -> bool:
    """Return whether a version has a newer major or minor release than the installed one."""
    release, installed = release_of(version), release_of(__version__)
    return release is not None and installed is not None and release > installed


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version such as "0.1.0" or "1.2"; None if it is malformed."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
