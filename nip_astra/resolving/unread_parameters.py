"""Refuse parameters that are set and that nothing in the run reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from nip_astra.errors import NipAstraError, ParameterFault, UnreadParameterError, show_value
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.faults import TYPE_KEY
from nip_astra.parameters.files import Layer, flatten, merge_layers
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.scenarios.registry import Scenario
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer

OF_EVERY_RUN = ("base_run",)
"""Groups that every run reads."""
SHARED_GROUPS = tuple(
    name
    for name, field in HyperParameters.model_fields.items()
    if isinstance(field.annotation, type)
    and issubclass(field.annotation, SubParameters)
    and name not in OF_EVERY_RUN
)
"""Groups of the hyper-parameters that belong to no single component."""


def refuse_unread(
    preset: Sequence[Layer],
    base: Layer,
    layers: Sequence[Layer],
    hyper_params: HyperParameters,
    trainer_class: type[Trainer],
    scenario_class: type[Scenario],
    kind: str,
) -> None:
    """Refuse values that neither trainer nor scenario nor protocol reads.

    These are values in shared groups that none of them uses, and parameters whose condition
    (`nip_astra.parameters.conditions`) does not hold. Defaults pass, and so does the complete file
    of a run. A value also passes if a later layer, for instance an option on the command line, made
    its condition fail.

    Parameters
    ----------
    preset : Sequence[Layer]
        The trainer's preset; values that the base run sets as well are not checked.
    base : Layer
        The base run's values, which are not checked.
    layers : Sequence[Layer]
        Layers from a file, an option or an object; not the scenario's.
    hyper_params : HyperParameters
        The resolved ones.

    Raises
    ------
    UnreadParameterError
        With every such value.
    """
    if trainer_class.parameter_groups is None:
        return
    order = _Order([*preset, base, *layers])
    run = _Run(hyper_params, trainer_class, scenario_class, kind, order)
    checked = [Layer(layer.source, _without(layer.values, base.values)) for layer in preset]
    checked += [layer for layer in layers if not layer.is_complete]
    given, sources = merge_layers(checked, resolve=False)
    faults = [
        ParameterFault(
            leaf.path,
            repr(leaf.value),
            problem,
            advice or _advice(leaf.path),
            _nearest(leaf.path, sources, ""),
        )
        for leaf in _walk(hyper_params, given, (), run.trainer_class.reads_where)
        if not leaf.is_default
        for problem, advice in run.reasons_against(leaf)
    ]
    if faults:
        raise UnreadParameterError(faults)


def never_read(
    paths: Iterable[str],
    hyper_params: HyperParameters,
    trainer_class: type[Trainer],
    scenario_class: type[Scenario],
    kind: str,
) -> list[str]:
    """The given parameters that nothing reads, or whose whole group is read elsewhere only.

    A single parameter whose condition does not hold is not among them: it is shown as unused.
    """
    if trainer_class.parameter_groups is None:
        return []
    run = _Run(hyper_params, trainer_class, scenario_class, kind, _Order([]))
    top = (_Scope("", hyper_params),)
    unmet = {}
    for name, field in type(hyper_params).model_fields.items():
        conditions = [one for one in field.metadata if isinstance(one, ReadWhere)]
        conditions += [one for path, one in trainer_class.reads_where.items() if path == name]
        unmet[name] = _first_unmet(conditions, top)
    leaves = (_Leaf(path, None, False, unmet.get(path.partition(".")[0])) for path in paths)
    return [leaf.path for leaf in leaves if any(run.reasons_against(leaf))]


class _Condition(NamedTuple):
    """A condition, with the full path and the value of the parameter that it depends on."""

    where: ReadWhere
    path: str
    value: Any


class _Leaf(NamedTuple):
    """A given value, and its first condition that does not hold."""

    path: str
    value: Any
    is_default: bool
    unmet: _Condition | None


class _Scope(NamedTuple):
    """A group of parameters and its path with a trailing dot, empty for all parameters."""

    prefix: str
    group: SubParameters


class _Order:
    """Which of two parameters a later layer set."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._last = {
            path: number for number, layer in enumerate(layers) for path, _ in flatten(layer.values)
        }

    def is_later(self, path: str, other: str) -> bool:
        return bool(_nearest(path, self._last, -1) > _nearest(other, self._last, -1))


@dataclass(frozen=True)
class _Run:
    """The components that read parameters."""

    hyper_params: HyperParameters
    trainer_class: type[Trainer]
    scenario_class: type[Scenario]
    kind: str
    order: _Order

    def reasons_against(self, leaf: _Leaf) -> Iterator[tuple[str, str | None]]:
        """The problem with an unread value, and the advice if it is not `_advice`."""
        trainer = self.hyper_params.trainer
        groups = self.trainer_class.parameter_groups or ()
        is_shared = leaf.path.partition(".")[0] in SHARED_GROUPS
        if is_shared and not _is_in(leaf.path, (*groups, *self.scenario_class.parameter_groups)):
            problem = (
                f"is read neither by the trainer {trainer!r} ({_readers(groups)}) nor by scenarios "
                f"of the kind {self.kind!r} ({_readers(self.scenario_class.parameter_groups)})"
            )
            yield problem, None
        elif _is_in(leaf.path, self.trainer_class.never_reads):
            yield f"is not read by the trainer {trainer!r}", "Leave it out."
        elif _is_in(leaf.path, self.scenario_class.never_reads):
            yield f"is not read by scenarios of the kind {self.kind!r}", "Leave it out."
        elif _is_in(leaf.path, self._never_read_by_protocol()):
            if self.order.is_later("interaction_protocol", leaf.path):
                return
            protocol = self.hyper_params.interaction_protocol
            yield f"is not read by the protocol {protocol!r}", "Leave it out."
        elif leaf.unmet is not None and not self.order.is_later(leaf.unmet.path, leaf.path):
            where, path, value = leaf.unmet
            yield (
                f"is read only where {path} {where.words}, and it is {_shown(value)}",
                f"Leave it out, or change {path}.",
            )

    def _never_read_by_protocol(self) -> tuple[str, ...]:
        protocol = self.hyper_params.interaction_protocol
        if protocol is None or not self.scenario_class.uses_protocol:
            return ()
        return PROTOCOL_HANDLERS.get(protocol).never_reads


def _without(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose paths are not in others."""
    left = {}
    for name, value in values.items():
        other = others.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            left[name] = _without(value, other)
        elif name not in others:
            left[name] = value
    return left


def _walk(
    group: SubParameters,
    given: Mapping[str, Any],
    around: tuple[_Scope, ...],
    conditions: Mapping[str, ReadWhere],
    *,
    prefix: str = "",
    unmet: _Condition | None = None,
) -> Iterator[_Leaf]:
    """Every given value of a group and of the groups within it.

    Parameters
    ----------
    around : tuple[_Scope, ...]
        Enclosing groups, the outermost first.
    conditions : Mapping[str, ReadWhere]
        The trainer's, by full path.
    unmet : _Condition, optional
        A failed condition of the whole group.
    """
    scopes = (*around, _Scope(prefix, group))
    for name, field in type(group).model_fields.items():
        if name not in given:
            continue
        path, value = f"{prefix}{name}", getattr(group, name)
        own = [one for one in field.metadata if isinstance(one, ReadWhere)]
        of_group = type(group).read_where
        own += [of_group] if of_group is not None and of_group.path != name else []
        failed = unmet or _first_unmet(own, scopes)
        if path in conditions:
            failed = failed or _first_unmet([conditions[path]], scopes[:1])
        inner = list(_groups_in(value, given[name], path))
        default = field.get_default(call_default_factory=True)
        for where, part, part_given in inner:
            yield from _walk(part, part_given, scopes, conditions, prefix=f"{where}.", unmet=failed)
            if isinstance(part, PolymorphicParameters) and TYPE_KEY in part_given:
                yield _Leaf(f"{where}.{TYPE_KEY}", part.type_name, part == default, failed)
        if not inner:
            yield _Leaf(path, value, default is not PydanticUndefined and value == default, failed)


def _first_unmet(conditions: Sequence[ReadWhere], scopes: Sequence[_Scope]) -> _Condition | None:
    for where in conditions:
        first = where.path.partition(".")[0]
        for prefix, group in reversed(scopes):
            if first in type(group).model_fields:
                value = group.get(where.path)
                if not where.is_met(value):
                    return _Condition(where, prefix + where.path, value)
                break
    return None


def _groups_in(
    value: Any, given: Any, path: str
) -> Iterator[tuple[str, SubParameters, Mapping[str, Any]]]:
    """The groups in a value, each with its path and its given values."""
    if isinstance(value, SubParameters) and isinstance(given, Mapping):
        yield path, value, given
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        # Values of `default` may be read by an agent that overrides the others.
        names = set(given) - ({DEFAULT_AGENT} if len(value) > 1 else set())
        for name in sorted(names & set(value)):
            yield from _groups_in(value[name], given[name], f"{path}.{name}")
    elif isinstance(value, list) and isinstance(given, list | Mapping):
        # A mapping changes single elements.
        elements = given if isinstance(given, Mapping) else dict(enumerate(given))
        for number, one_given in elements.items():
            yield from _groups_in(value[int(number)], one_given, f"{path}.{number}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show_value(value)


def _is_in(path: str, groups: Sequence[str]) -> bool:
    return any(fnmatchcase(path, group) or fnmatchcase(path, f"{group}.*") for group in groups)


def _nearest(path: str, by_path: Mapping[str, Any], default: Any) -> Any:
    """The entry of a parameter, or of the nearest group or list around it."""
    while path:
        if path in by_path:
            return by_path[path]
        path = path.rpartition(".")[0]
    return default


def _readers(groups: Sequence[str]) -> str:
    return f"which reads {', '.join(groups)}" if groups else "which reads no shared group"


def _advice(path: str) -> str:
    readers = []
    for name in TRAINERS.names():
        try:
            groups = TRAINERS.get(name).parameter_groups
        except NipAstraError:
            continue  # A package that cannot be imported is reported when its trainer is used.
        if groups is None or _is_in(path, groups):
            readers.append(name)
    by = f"Trainers that read it: {', '.join(readers)}." if readers else "No trainer reads it."
    return f"Leave it out. {by}"
