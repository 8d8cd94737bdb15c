"""Refuse what was asked for and nothing reads: a value in a group that trainers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nip_astra.base_runs import is_complete
from nip_astra.errors import NipAstraError, ParameterError, ParameterFault
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.loading import Layer, flatten, merge_layers
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.scenarios.registry import Scenario
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer

OF_EVERY_RUN = ("base_run",)
"""Groups that are read whatever the trainer."""
SHARED_GROUPS = tuple(
    name
    for name, field in HyperParameters.model_fields.items()
    if isinstance(field.annotation, type)
    and issubclass(field.annotation, SubParameters)
    and name not in OF_EVERY_RUN
)
"""Groups of the hyper-parameters that belong to no single component."""


def check_that_all_are_read(
    layers: Sequence[Layer],
    hyper_params: HyperParameters,
    trainer_class: type[Trainer],
    scenario_class: type[Scenario],
    kind: str,
) -> None:
    """Refuse values of shared groups that neither the trainer nor the scenario reads.

    Values equal to the default pass, and so does what a run wrote down: that is every parameter.

    Parameters
    ----------
    layers : Sequence[Layer]
        What was given by file, option or object; not what scenario or base run say.
    hyper_params : HyperParameters
        The resolved ones.

    Raises
    ------
    ParameterError
        With every such value.
    """
    if trainer_class.parameter_groups is None:
        return
    read = (*trainer_class.parameter_groups, *scenario_class.parameter_groups)
    given, sources = merge_layers(
        [layer for layer in layers if not is_complete(layer)], resolve=False
    )
    values = dict(flatten(hyper_params.to_dict()))
    defaults = dict(flatten(_defaults()))
    unread = [
        path
        for path, _ in flatten({name: given[name] for name in SHARED_GROUPS if name in given})
        if path in values
        and not _is_in(path, read)
        and not (path in defaults and values[path] == defaults[path])
    ]
    if unread:
        problem = _problem(hyper_params.trainer, trainer_class, kind, scenario_class)
        raise ParameterError(
            [
                ParameterFault(
                    path, repr(values[path]), problem, _advice(path), sources.get(path, "")
                )
                for path in unread
            ]
        )


def _problem(
    trainer: str, trainer_class: type[Trainer], kind: str, scenario_class: type[Scenario]
) -> str:
    return (
        f"is read neither by the trainer {trainer!r} "
        f"({_words(trainer_class.parameter_groups or ())}) nor by scenarios of the kind {kind!r} "
        f"({_words(scenario_class.parameter_groups)})"
    )


def _is_in(path: str, groups: Sequence[str]) -> bool:
    return any(path == group or path.startswith(f"{group}.") for group in groups)


def _defaults() -> dict[str, Any]:
    fields = HyperParameters.model_fields
    return {name: fields[name].get_default().to_dict() for name in SHARED_GROUPS}


def _words(groups: Sequence[str]) -> str:
    return f"which reads {', '.join(groups)}" if groups else "which reads no shared group"


def _advice(path: str) -> str:
    readers = []
    for name in TRAINERS.names():
        try:
            groups = TRAINERS.get(name).parameter_groups
        except NipAstraError:
            continue  # a package that cannot be imported is told when its trainer is asked for
        if groups is None or _is_in(path, groups):
            readers.append(name)
    by = f"Trainers that read it: {', '.join(readers)}." if readers else "No trainer reads it."
    return f"Leave it out. {by}"
