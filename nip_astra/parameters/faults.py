"""Turn pydantic's errors into parameter faults, each with its dotted path."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from nip_astra.errors import ParameterFault, nearest_names, show_value
from nip_astra.parameters.conversion import current_name

TYPE_KEY = "_type"
"""Key that names the kind of a polymorphic part in a file."""
NESTED = "nested"
"""Type of an error that wraps the `error` and the `model` of a polymorphic part."""
UNKNOWN_TYPE = "unknown_type"
"""Type of an error about an unknown `_type` of a polymorphic part."""

_NOUNS = {
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a group of parameters",
    "model_type": "a group of parameters",
    "model_attributes_type": "a group of parameters",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}
_OTHER_NAMES = {
    "entropy_eps": "ppo.entropy_weight, and entropy_weight in the section of reinforce",
    "body_lr_factor": "agents.<name>.body_lr_factor in the section of the scenario's kind",
    "learning_rate": "lr",
}
"""Names from other projects that are not similar to ours."""


def faults_of(
    error: ValidationError,
    model: type[BaseModel],
    sources: Mapping[str, str],
    *,
    prefix: str = "",
) -> list[ParameterFault]:
    """Every fault of a validation.

    Parameters
    ----------
    model : type[BaseModel]
        The validated model.
    sources : Mapping[str, str]
        Where each value came from, by dotted path; a fault takes the source of its parts or of its
        nearest parent.
    prefix : str
        Dotted path of the model with a trailing dot, if it is part of another.
    """
    found = [_Found.of(detail, model, prefix) for detail in error.errors(include_url=False)]
    faults: list[ParameterFault] = []
    for group in _by_place(found):
        first = group[0]
        if first.detail["type"] == NESTED:
            context = first.detail["ctx"]
            inner = f"{first.path}."
            faults += faults_of(context["error"], context["model"], sources, prefix=inner)
            continue
        explained = [_explain(one, model, prefix) for one in group]
        kind, path, given = first.detail["type"], first.path, first.detail["input"]
        if kind == UNKNOWN_TYPE:
            path, given = f"{path}.{TYPE_KEY}", given[TYPE_KEY]
        faults.append(
            ParameterFault(
                path=path,
                given="nothing" if kind == "missing" else show_value(given),
                problem=_either([problem for problem, _ in explained]),
                suggestion=next((suggestion for _, suggestion in explained if suggestion), ""),
                source="" if kind == "missing" else _source_of(path, sources),
            )
        )
    return faults


def suggest(name: str, siblings: Sequence[str], *, prefix: str = "") -> str:
    """A sentence with the known name nearest to a wrong one, or with all known names."""
    # nip_protocol is nearer to zk_protocol than to nip, and means the latter.
    prefixes = [sibling for sibling in siblings if name.startswith(f"{sibling}_")]
    near = prefixes[:1] or nearest_names(name, siblings, 1)
    if near:
        return f"Did you mean {prefix + near[0]!r}?"
    return f"Known here: {', '.join(siblings)}." if siblings else "Remove it."


def is_about_elements(values: Mapping[str, Any]) -> bool:
    """Whether all names are numbers, which index elements of a list from 0."""
    return bool(values) and all(str(name).isdecimal() for name in values)


@dataclass(frozen=True)
class _Found:
    """An error of pydantic, located in the parameters.

    Attributes
    ----------
    path : str
        Dotted path, without pydantic's names for the members of a union.
    union_path : str or None
        Path of the enclosing field of several types, if the error concerns one of them.
    siblings : tuple[str, ...]
        Known names of the enclosing group.
    """

    detail: Mapping[str, Any]
    path: str
    union_path: str | None
    siblings: tuple[str, ...]

    @classmethod
    def of(cls, detail: Any, model: type[BaseModel], prefix: str) -> _Found:
        parts: list[str] = []
        union_path: str | None = None
        annotation: Any = model
        owner: Any = model
        for part in detail["loc"]:
            owner = annotation
            annotation, is_name = _step(annotation, part)
            if is_name:
                parts.append(str(part))
            elif union_path is None:
                union_path = prefix + ".".join(parts)
        owners = [one for one in _members(owner) if hasattr(one, "model_fields")]
        siblings = tuple(owners[0].model_fields) if owners else ()
        path = (prefix + ".".join(parts)).rstrip(".")
        return cls(detail, path, union_path, siblings)


def _by_place(found: Sequence[_Found]) -> Iterator[list[_Found]]:
    """The errors one by one, but those of a union together.

    For a union, the member that accepted most of the value reports the error: for a list, its
    element, and not that the value should have been text. So does a member that accepted all of it
    and found its parts inconsistent.
    """
    unions: dict[str, list[_Found]] = {}
    for one in found:
        if one.union_path is not None:
            unions.setdefault(one.union_path, []).append(one)
    for one in found:
        if one.union_path is None:
            yield [one]
        elif one.union_path in unions:
            members = unions.pop(one.union_path)
            deeper = [
                member
                for member in members
                if member.path != one.union_path or member.detail["type"] == "value_error"
            ]
            if deeper:
                yield from ([member] for member in deeper)
            else:
                yield members


def _step(annotation: Any, part: str | int) -> tuple[Any, bool]:
    """The annotation at one part of a location, and whether the part is a name in a file."""
    members = _members(annotation)
    if len(members) > 1:
        return next((one for one in members if _is_tag_of(str(part), one)), None), False
    inner = members[0] if members else None
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        field = inner.model_fields.get(str(part))
        return (None if field is None else field.annotation), True
    arguments = get_args(inner)
    if get_origin(inner) in (list, set, tuple) and isinstance(part, int):
        return (arguments[0] if arguments else None), True
    if get_origin(inner) in (dict, Mapping):
        # pydantic marks an error of the key itself by a part of its own.
        return (arguments[-1] if arguments else None), part != "[key]"
    return None, True


def _members(annotation: Any) -> list[Any]:
    """The types of an annotation, without null."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [one for inner in get_args(annotation) for one in _members(inner)]
    return [] if annotation in (None, NoneType) else [annotation]


def _is_tag_of(tag: str, member: Any) -> bool:
    name = getattr(get_origin(member) or member, "__name__", "")
    return tag == name or tag.startswith(f"{name}[")


def _explain(found: _Found, model: type[BaseModel], prefix: str) -> tuple[str, str]:
    """The problem and the suggestion."""
    detail = found.detail
    kind, given, context = detail["type"], detail.get("input"), detail.get("ctx") or {}
    if kind == "extra_forbidden":
        return "unknown parameter", _suggest_parameter(found, model, prefix)
    if kind == "missing":
        return "is required", f"Give it in a file or with --set {found.path}=VALUE."
    if kind in _NOUNS:
        return _explain_type(kind, given)
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}", ""
    if kind in ("literal_error", "enum"):
        names = re.findall(r"'([^']*)'", str(context["expected"]))
        # Words of three letters are too similar: "gpu" does not mean "cpu".
        near = nearest_names(given, names, 1) if isinstance(given, str) and len(given) > 3 else []
        hint = f"Did you mean {near[0]!r}?" if near else ""
        return f"must be one of {', '.join(names) or context['expected']}", hint
    text = str(detail["msg"]).removeprefix("Value error, ").removesuffix(".")
    return re.sub(r"^\w+ should ", "must ", text), str(context.get("hint", ""))


def _explain_type(kind: str, given: Any) -> tuple[str, str]:
    noun = _NOUNS[kind]
    if kind == "list_type" and isinstance(given, Mapping) and is_about_elements(given):
        return "has no elements to change: no layer gives the list", (
            "Give the whole list, as [first, second]."
        )
    if kind == "int_type" and isinstance(given, float):
        whole = f"Write {int(given)}." if given.is_integer() else ""
        return f"must be {noun}", whole
    problem = f"must be {noun}, not {_noun_of(given)}"
    if noun.endswith("number") and isinstance(given, str) and _is_number(given):
        return problem, f"Write it without quotes: {given.strip()}."
    if noun == "text" and isinstance(given, bool | int | float):
        return problem, f"Write it in quotes: '{show_value(given)}'."
    return problem, ""


def _noun_of(value: Any) -> str:
    if value is None:
        return "null"
    nouns = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    if isinstance(value, Mapping):
        return "a group of parameters"
    return nouns.get(type(value), f"a {type(value).__name__}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _suggest_parameter(found: _Found, model: type[BaseModel], prefix: str) -> str:
    group, _, name = found.path.rpartition(".")
    current = current_name(found.path)
    if current is not None:
        return f"It is called {current!r} now."
    if name in _OTHER_NAMES:
        return f"Use {_OTHER_NAMES[name]}."
    # `--set lr=...` for training.lr is the most common slip.
    elsewhere = [path for path in _paths(model) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"Did you mean {' or '.join(repr(prefix + path) for path in elsewhere[:3])}?"
    return suggest(name, found.siblings, prefix=f"{group}." if group else "")


def _paths(
    model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[str]:
    """The dotted path of every parameter of a model."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _members(field.annotation):
            is_group = isinstance(inner, type) and issubclass(inner, BaseModel)
            if is_group and inner not in above:
                yield from _paths(inner, f"{prefix}{name}.", (*above, model))


def _either(problems: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(problems))
    if len(distinct) == 1:
        return distinct[0]
    wants = [problem.removeprefix("must be ").partition(", not ")[0] for problem in distinct]
    return f"must be {' or '.join(wants)}"


def _source_of(path: str, sources: Mapping[str, str]) -> str:
    """Where a value came from; for a group, where its parts did."""
    parts = [source for part, source in sources.items() if path and part.startswith(f"{path}.")]
    if parts:
        return ", ".join(dict.fromkeys(parts))
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""
