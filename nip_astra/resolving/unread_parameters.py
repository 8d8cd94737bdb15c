"""Refuse what was asked for and nothing reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from nip_astra.errors import NipAstraError, ParameterFault, UnreadParameterError
from nip_astra.parameters.agents import DEFAULT_AGENT
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.faults import TYPE_KEY, show
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.loading import Layer, flatten, merge_layers
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters
from nip_astra.protocols.registry import PROTOCOL_HANDLERS
from nip_astra.resolving.base_runs import is_complete
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
    preset: Sequence[Layer],
    base: Layer,
    layers: Sequence[Layer],
    hyper_params: HyperParameters,
    trainer_class: type[Trainer],
    scenario_class: type[Scenario],
    kind: str,
) -> None:
    """Refuse values that neither trainer nor scenario nor protocol reads.

    These are values of shared groups that are none of theirs, and of parameters whose condition
    (`nip_astra.parameters.conditions`) does not hold. Values equal to the default pass, and so does
    what a run wrote down: that is every parameter. A value passes also where a later layer, for
    instance an option on the command line, is the one that made its condition fail.

    Parameters
    ----------
    preset : Sequence[Layer]
        What the trainer's preset says; where the base run says otherwise it is not asked for.
    base : Layer
        What the base run says, which is no request of this run.
    layers : Sequence[Layer]
        What was given by file, option or object; not what the scenario says.
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
    asked = [Layer(layer.source, _without(layer.values, base.values)) for layer in preset]
    asked += [layer for layer in layers if not is_complete(layer)]
    given, sources = merge_layers(asked, resolve=False)
    faults = [
        ParameterFault(leaf.path, repr(leaf.value), *reason, _nearest(leaf.path, sources, ""))
        for leaf in _walk(hyper_params, given, (), run.trainer_class.reads_where)
        if not leaf.is_default
        for reason in run.reasons_against(leaf)
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
    """Those of some parameters that nothing reads, and those of groups read elsewhere only.

    A single parameter whose condition does not hold is none of them: it is there to be found.
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
    """A condition, with the path from the top, and the value, of the parameter that it asks for."""

    where: ReadWhere
    path: str
    value: Any


class _Leaf(NamedTuple):
    """A value that was given, and the first condition of it that does not hold."""

    path: str
    value: Any
    is_default: bool
    unmet: _Condition | None


class _Scope(NamedTuple):
    """A group of parameters and its path, which ends with a dot where it is not the whole."""

    prefix: str
    group: SubParameters


class _Order:
    """Which of two parameters was given later."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._last = {
            path: number for number, layer in enumerate(layers) for path, _ in flatten(layer.values)
        }

    def is_later(self, path: str, other: str) -> bool:
        """Say whether a parameter was given by a later layer than another."""
        return bool(_nearest(path, self._last, -1) > _nearest(other, self._last, -1))


@dataclass(frozen=True)
class _Run:
    """Who reads parameters."""

    hyper_params: HyperParameters
    trainer_class: type[Trainer]
    scenario_class: type[Scenario]
    kind: str
    order: _Order

    def reasons_against(self, leaf: _Leaf) -> Iterator[tuple[str, str]]:
        """What is wrong with a value that nothing reads, and what to do; once at most."""
        trainer = self.hyper_params.trainer
        groups = self.trainer_class.parameter_groups or ()
        is_shared = leaf.path.partition(".")[0] in SHARED_GROUPS
        if is_shared and not _is_in(leaf.path, (*groups, *self.scenario_class.parameter_groups)):
            problem = (
                f"is read neither by the trainer {trainer!r} ({_words(groups)}) nor by scenarios "
                f"of the kind {self.kind!r} ({_words(self.scenario_class.parameter_groups)})"
            )
            yield problem, _advice(leaf.path)
        elif _is_in(leaf.path, self.trainer_class.never_reads):
            yield f"is not read by the trainer {trainer!r}", "Leave it out."
        elif _is_in(leaf.path, self.scenario_class.never_reads):
            yield f"is not read by scenarios of the kind {self.kind!r}", "Leave it out."
        elif _is_in(leaf.path, self._never_read_by_protocol()):
            if self.order.is_later("interaction_protocol", leaf.path):
                return
            protocol = self.hyper_params.interaction_protocol
            yield f"means nothing to the protocol {protocol!r}", "Leave it out."
        elif leaf.unmet is not None and not self.order.is_later(leaf.unmet.path, leaf.path):
            where, path, value = leaf.unmet
            yield (
                f"is read only where {path} {where.words}, and that is {_shown(value)}",
                f"Leave it out, or change {path}.",
            )

    def _never_read_by_protocol(self) -> tuple[str, ...]:
        protocol = self.hyper_params.interaction_protocol
        if protocol is None or not self.scenario_class.uses_protocol:
            return ()
        return PROTOCOL_HANDLERS.get(protocol).never_reads


def _without(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """What others do not say."""
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
    """Every value that was given to a group or to a group within it.

    Parameters
    ----------
    around : tuple[_Scope, ...]
        Groups around this one, the outermost first.
    conditions : Mapping[str, ReadWhere]
        Those of the trainer, by path from the top.
    unmet : _Condition, optional
        A condition of the whole group that does not hold.
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
    """The groups that a value consists of, with their paths and what was given of each."""
    if isinstance(value, SubParameters) and isinstance(given, Mapping):
        yield path, value, given
    elif isinstance(value, Mapping) and isinstance(given, Mapping):
        # What stands under `default` may be read by an agent that says the rest otherwise.
        names = set(given) - ({DEFAULT_AGENT} if len(value) > 1 else set())
        for name in sorted(names & set(value)):
            yield from _groups_in(value[name], given[name], f"{path}.{name}")
    elif isinstance(value, list) and isinstance(given, list | Mapping):
        # A mapping changes single elements.
        elements = given if isinstance(given, Mapping) else dict(enumerate(given))
        for number, one_given in elements.items():
            yield from _groups_in(value[int(number)], one_given, f"{path}.{number}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def _is_in(path: str, groups: Sequence[str]) -> bool:
    return any(fnmatchcase(path, group) or fnmatchcase(path, f"{group}.*") for group in groups)


def _nearest(path: str, by_path: Mapping[str, Any], default: Any) -> Any:
    """What a mapping holds of a parameter, or of the nearest group or list around it."""
    while path:
        if path in by_path:
            return by_path[path]
        path = path.rpartition(".")[0]
    return default


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
