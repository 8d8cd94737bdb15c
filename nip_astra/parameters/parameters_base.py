"""Base class of all parameter groups: strict, frozen, with all faults reported at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType, new_class
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from urllib.parse import urlsplit

from annotated_types import Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nip_astra.errors import (
    ConfigurationError,
    ParameterError,
    ParameterFault,
    UnknownNameError,
    nearest_names,
    show_value,
)
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.conversion import current_name
from nip_astra.registry import Registry

TYPE_KEY = "_type"
"""Key that names the kind of a polymorphic part in a file."""
NESTED = "nested"
"""Type of an error with the `error` and the `model` of a polymorphic part."""
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
TRL_OPTIONS: Mapping[str, str] = {
    "num_generations": "self_hosted_grpo.group_size",
    "max_completion_length": "task.policy.max_new_tokens",
    "temperature": "task.policy.temperature",
    "top_p": "task.policy.top_p",
    "top_k": "task.policy.top_k",
    "beta": "self_hosted_grpo.policy_loss.kl.weight",
    "epsilon": "self_hosted_grpo.policy_loss.clip_low",
    "epsilon_high": "self_hosted_grpo.policy_loss.clip_high",
    "delta": "self_hosted_grpo.policy_loss.loss_options",
    "loss_type": "self_hosted_grpo.policy_loss.loss",
    "importance_sampling_level": "self_hosted_grpo.policy_loss.loss",
    "sapo_temperature_pos": "self_hosted_grpo.policy_loss.loss_options",
    "sapo_temperature_neg": "self_hosted_grpo.policy_loss.loss_options",
    "vespo_k_pos": "self_hosted_grpo.policy_loss.loss_options",
    "vespo_lambda_pos": "self_hosted_grpo.policy_loss.loss_options",
    "vespo_k_neg": "self_hosted_grpo.policy_loss.loss_options",
    "vespo_lambda_neg": "self_hosted_grpo.policy_loss.loss_options",
    "use_bias_correction_kl": "self_hosted_grpo.policy_loss.kl.by_ratio",
    "scale_rewards": "self_hosted_grpo.scale",
    "mask_truncated_completions": "self_hosted_grpo.mask_truncated_completions",
    "learning_rate": "training.lr",
    "lr_scheduler_type": "training.lr_schedule",
    "warmup_steps": "training.num_warmup_steps",
    "max_steps": "training.num_iterations",
    "max_grad_norm": "training.max_grad_norm",
    "weight_decay": "training.weight_decay",
    "per_device_train_batch_size": "training.minibatch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
}
"""Our parameter for options of TRL's `GRPOConfig`, in its GRPO trainer."""


def faults_of(
    error: ValidationError,
    model: type[BaseModel],
    sources: Mapping[str, str],
    *,
    prefix: str = "",
) -> list[ParameterFault]:
    """Return every fault of a model's validation, with its path below `prefix`.

    A fault has the source of its parts, or of its nearest parent.
    """
    found = [_located(detail, model, prefix) for detail in error.errors(include_url=False)]
    faults: list[ParameterFault] = []
    for group in _by_place(found):
        first = group[0]
        if first.detail["type"] == NESTED:
            context = first.detail["ctx"]
            inner = f"{first.path}."
            faults += faults_of(context["error"], context["model"], sources, prefix=inner)
            continue
        explained = [_explain(one, model, prefix) for one in group]
        problems = list(dict.fromkeys(problem for problem, _ in explained))
        if len(problems) > 1:
            wants = [one.removeprefix("must be ").partition(", not ")[0] for one in problems]
            problems = [f"must be {' or '.join(wants)}"]
        kind, path, given = first.detail["type"], first.path, first.detail["input"]
        if kind == UNKNOWN_TYPE:
            path, given = f"{path}.{TYPE_KEY}", given[TYPE_KEY]
        shown = "nothing" if kind == "missing" else show_value(given)
        if kind == "value_error" and isinstance(given, Mapping | BaseModel):
            shown = ""  # the problem names the values that do not fit together
        faults.append(
            ParameterFault(
                path=path,
                given=shown,
                problem=problems[0],
                suggestion=next((suggestion for _, suggestion in explained if suggestion), ""),
                source="" if kind == "missing" else _source_of(path, sources),
            )
        )
    return faults


def suggest(name: str, siblings: Sequence[str], *, prefix: str = "") -> str:
    """Return a sentence with the known name nearest to a wrong one, or with all known names."""
    # nip_protocol is nearer to zk_protocol than to nip, and means the latter.
    prefixes = [sibling for sibling in siblings if name.startswith(f"{sibling}_")]
    near = prefixes[:1] or nearest_names(name, siblings, 1)
    if near:
        return f"Did you mean {prefix + near[0]!r}?"
    return f"Known here: {', '.join(siblings)}." if siblings else "Remove it."


def is_about_elements(values: Mapping[str, Any]) -> bool:
    """Return whether all names are numbers, which index the elements of a list from 0."""
    return bool(values) and all(str(name).isdecimal() for name in values)


class _Found(NamedTuple):
    """A pydantic error, located in the parameters."""

    detail: Mapping[str, Any]
    path: str  # dotted, without pydantic's names for the members of a union
    union_path: str | None  # of the enclosing field of several types, if it concerns one of them
    siblings: tuple[str, ...]  # known names of the enclosing group


def _located(detail: Any, model: type[BaseModel], prefix: str) -> _Found:
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
    return _Found(detail, (prefix + ".".join(parts)).rstrip("."), union_path, siblings)


def _by_place(found: Sequence[_Found]) -> Iterator[list[_Found]]:
    """Yield the errors one by one, but those of a union together.

    The union member that accepted most of the value reports the error: for a list, its element, and
    not that the value should have been text.
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
            # A member with a value_error accepted all parts and found them inconsistent.
            deeper = [
                [member]
                for member in members
                if member.path != one.union_path or member.detail["type"] == "value_error"
            ]
            yield from deeper or [members]


def _step(annotation: Any, part: str | int) -> tuple[Any, bool]:
    """Return the annotation at one part of a location, and whether the part is a name in a file."""
    members = _members(annotation)
    if len(members) > 1:
        for member in members:
            name = getattr(get_origin(member) or member, "__name__", "")
            if str(part) == name or str(part).startswith(f"{name}["):
                return member, False
        return None, False
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
    """Return the types of an annotation, without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [one for inner in get_args(annotation) for one in _members(inner)]
    return [] if annotation in (None, NoneType) else [annotation]


def _explain(found: _Found, model: type[BaseModel], prefix: str) -> tuple[str, str]:
    """Return the problem and the suggestion."""
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
    if "." in str(found.detail["loc"][-1]):
        return f"Nest it: write `{name}` indented below `{group}:`."
    current = current_name(found.path)
    if current is not None:
        return f"It is called {current!r} now."
    if name in TRL_OPTIONS and not group:
        return f"Use {TRL_OPTIONS[name]}."
    if name in _OTHER_NAMES:
        return f"Use {_OTHER_NAMES[name]}."
    # `--set lr=...` for training.lr is the most common slip.
    elsewhere = [path for path in _paths(model) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"Did you mean {' or '.join(repr(prefix + path) for path in elsewhere[:3])}?"
    if name in TRL_OPTIONS:
        return f"Use {TRL_OPTIONS[name]} for the {name} of TRL."
    return suggest(name, found.siblings, prefix=f"{group}." if group else "")


def _paths(
    model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[str]:
    """Yield the dotted path of every parameter of a model."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _members(field.annotation):
            is_group = isinstance(inner, type) and issubclass(inner, BaseModel)
            if is_group and inner not in above:
                yield from _paths(inner, f"{prefix}{name}.", (*above, model))


def _source_of(path: str, sources: Mapping[str, str]) -> str:
    """Return the source of a value; for a group, the sources of its parts."""
    parts = [source for part, source in sources.items() if path and part.startswith(f"{path}.")]
    if parts:
        return ", ".join(dict.fromkeys(parts))
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""


T = TypeVar("T")


class _Inside:
    """Marks text that cannot refer to anything outside of a run."""


PlainText = Annotated[str, _Inside()]
"""Text that is shown, compared or sent to a model, and names no file, address, variable or code.
Other text, except of the types below, needs approval in another user's run; see `nip_astra.trust`.
"""
CheckedName = Annotated[str, _Inside()]
"""A registered name or code, checked when it is looked up or loaded."""


def _check_markers(markers: list[str] | None) -> list[str] | None:
    if markers and (len(markers) != 2 or not all(markers)):
        raise ValueError("must be two texts, or empty for none")
    return markers


ReasoningMarkers = Annotated[list[PlainText] | None, AfterValidator(_check_markers)]
"""Texts that begin and end a model's reasoning; None for the usual ones, empty for none."""
MAX_COUNT = 2**31 - 1
"""Default bound of whole numbers, beyond which C code overflows or memory is exhausted."""
MAX_WHOLE = 2**63 - 1
"""Bound for fields with larger whole numbers, such as seeds."""
MAX_LR = 100.0
"""Bound of learning rates; every optimizer diverges above it."""


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        # Reading the port checks it.
        is_right = parts.port != 0 and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_right = False
    if not is_right or not url.isprintable() or " " in url:
        raise ValueError("must be an address such as http://127.0.0.1:8000/v1")
    return url


Url = Annotated[str, AfterValidator(_checked_url)]
"""Address of a service."""


class SubParameters(BaseModel):
    """A group of parameters.

    A field has the type of its value in a YAML file: a number, text, true or false, a `Literal`, a
    list, another group, or null. Only whole numbers are converted, to floats. Each field has a
    docstring below it with its unit and effect.
    """

    read_where: ClassVar[ReadWhere | None] = None
    """Condition of the whole group; the parameter it depends on is always read."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*")
    @classmethod
    def _can_be_counted(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > MAX_COUNT:
            field = cls.model_fields[str(info.field_name)]
            if not any(isinstance(one, Le | Lt) for one in field.metadata):
                raise ValueError(f"must be at most {MAX_COUNT:,}")
        return value

    def __init__(self, /, **values: Any) -> None:
        """Validate the fields.

        Raises
        ------
        ParameterError
            With every fault found.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ParameterError(faults_of(error, type(self), {})) from None

    # Tells pydantic that nested groups need not go through __init__: their errors keep their path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as on BaseModel's

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and YAML, the input of `from_dict`."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, sources: Mapping[str, str] = {}) -> Self:
        """Validate plain values.

        Parameters
        ----------
        sources : Mapping[str, str]
            Where each value came from, by dotted path; reported with its fault.

        Raises
        ------
        ParameterError
            With every fault found.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ParameterError(faults_of(error, cls, sources)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with some fields changed.

        Raises
        ------
        ParameterError
            If there is no such field; values are checked where the copy is used.
        """
        known = list(type(self).model_fields)
        faults = [
            ParameterFault(name, show_value(value), "unknown parameter", suggest(name, known))
            for name, value in (update or {}).items()
            if name not in known
        ]
        if faults:
            raise ParameterError(faults)
        return super().model_copy(update=update, deep=deep)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if self.model_config.get("frozen") and name in type(self).model_fields:
                hint = f"Make a changed copy: model_copy(update={{{name!r}: ...}})."
                fault = "cannot be changed; parameters are frozen"
                raise ParameterError([ParameterFault(name, show_value(value), fault, hint)])
            super().__setattr__(name, value)

    def get(self, path: str) -> Any:
        """Return the value at a dotted path, for instance `get("training.lr")`.

        Elements of a list are named by their index, from 0.

        Raises
        ------
        ParameterError
            If there is no such parameter.
        """
        value: Any = self
        parts = path.split(".")
        for number, name in enumerate(parts):
            known = _children(value)
            if name not in known:
                above = "".join(f"{part}." for part in parts[:number])
                current = current_name(path)
                hint = (
                    suggest(name, list(known), prefix=above)
                    if current is None
                    else f"It is called {current!r} now."
                )
                fault = ParameterFault(path, show_value(path), "unknown parameter", hint)
                raise ParameterError([fault])
            value = known[name]
        return value


class PolymorphicParameters(SubParameters):
    """Parameters of one of several types, selected by `_type` in a file."""

    type_name: ClassVar[str] = ""
    """The registered name; set when the component is registered."""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or TYPE_KEY not in values:
            return values
        if values[TYPE_KEY] != cls.type_name:
            raise PydanticCustomError(
                "type_name",
                "must have the _type {name}, not {given}",
                {"name": repr(cls.type_name), "given": repr(values[TYPE_KEY])},
            )
        return {key: value for key, value in values.items() if key != TYPE_KEY}

    @model_serializer(mode="wrap")
    def _with_type(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {TYPE_KEY: type(self).type_name, **handler(self)}


def explicit_values(value: Any) -> Any:
    """Return a value as in a file; groups keep only the fields that were set explicitly."""
    if isinstance(value, SubParameters):
        names = [name for name in type(value).model_fields if name in value.model_fields_set]
        fields = {name: explicit_values(getattr(value, name)) for name in names}
        if isinstance(value, PolymorphicParameters):
            return {TYPE_KEY: value.type_name, **fields}
        return fields
    if isinstance(value, Mapping):
        return {str(name): explicit_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [explicit_values(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def check_parameters_class(found: object, base: type[SubParameters], name: str) -> None:
    """Raise unless the nested class `Parameters` of a registered component extends `base`."""
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigurationError(
            f"Parameters of {name!r} is not a subclass of {base.__name__}. Derive it from that of "
            "the base class: class Parameters(Base.Parameters)."
        )


class ComponentRegistry(Registry[T]):
    """A registry of components that names their nested `Parameters` classes, for `_type`."""

    def register(self, name: str) -> Callable[[T], T]:
        """Register a component under `name` and name its `Parameters`; a decorator.

        A component that inherits its `Parameters`, or shares them with another, gets a subclass of
        them, so that the other's name stays.
        """
        register = super().register(name)

        def decorate(component: Any) -> Any:
            found: type[PolymorphicParameters] = component.Parameters
            check_parameters_class(found, PolymorphicParameters, str(name))
            is_own = "Parameters" in vars(component)
            if not is_own or vars(found).get("type_name") not in (None, "", str(name)):
                body = {
                    "__doc__": found.__doc__,
                    "__module__": component.__module__,
                    "__qualname__": f"{component.__qualname__}.Parameters",
                }
                # It has no text of its own to search, which takes long in a deep import.
                config = {"use_attribute_docstrings": False}
                component.Parameters = new_class(
                    "Parameters", (found,), config, lambda space: space.update(body)
                )
                component.Parameters.model_config = found.model_config
            component.Parameters.type_name = str(name)
            return register(component)

        return decorate


def polymorphic(get: Callable[[str], Any], base: type[PolymorphicParameters]) -> Any:
    """Return a field type whose `_type` selects the parameters.

    Parameters
    ----------
    get : Callable
        Returns the component of a name, whose nested class `Parameters` validates; usually a
        registry's `get`. Then the JSON Schema has every registered kind.
    base : type[PolymorphicParameters]
        The base of all kinds; instances pass unchanged.
    """
    return Annotated[base, ByType(get, base)]


class ByType:
    """Validation and JSON Schema of a polymorphic field; see `polymorphic`."""

    def __init__(self, get: Callable[[str], Any], base: type[PolymorphicParameters]) -> None:
        self.get = get
        self.base = base

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, _: self._validate(value),
            handler(source),
            # By the value's class, not the field's: a kind has fields of its own.
            serialization=core_schema.simple_ser_schema("any"),
        )

    def _validate(self, value: Any) -> PolymorphicParameters:
        if isinstance(value, self.base):
            return value
        if not isinstance(value, Mapping) or not isinstance(value.get(TYPE_KEY), str):
            names = self._names()
            raise PydanticCustomError(
                "type_name",
                "must be a group of parameters with a {key}",
                {"key": TYPE_KEY, "hint": f"Known kinds: {', '.join(names)}." if names else ""},
            )
        try:
            model: type[PolymorphicParameters] = self.get(value[TYPE_KEY]).Parameters
        except UnknownNameError as error:
            raise PydanticCustomError(UNKNOWN_TYPE, "{text}", {"text": str(error)}) from None
        rest = {key: item for key, item in value.items() if key != TYPE_KEY}
        try:
            return model.model_validate(rest)
        except ValidationError as error:
            text = "; ".join(str(fault) for fault in faults_of(error, model, {}))
            context = {"text": text, "error": error, "model": model}
            raise PydanticCustomError(NESTED, "{text}", context) from None

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        kinds = [self._kind_schema(name, handler) for name in self._names()]
        if kinds:
            return {"anyOf": kinds}
        tag = {"type": "string"}
        return {"type": "object", "properties": {TYPE_KEY: tag}, "required": [TYPE_KEY]}

    def _kind_schema(self, name: str, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(self.get(name).Parameters.__pydantic_core_schema__)
        definition = handler.resolve_ref_schema(reference)
        definition["properties"] = {
            TYPE_KEY: {"const": name, "type": "string"},
            **definition.get("properties", {}),
        }
        definition["required"] = list(dict.fromkeys([TYPE_KEY, *definition.get("required", [])]))
        return reference

    def _names(self) -> list[str]:
        registry = getattr(self.get, "__self__", None)
        return registry.names() if isinstance(registry, Registry) else []


class RegisteredName(_Inside):
    """Marks text as a registered name: `Annotated[str, RegisteredName(REGISTRY)]`.

    Names are checked without importing anything.
    """

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def _validate(self, name: str) -> str:
        names = self.registry.names()
        if name not in names:
            raise PydanticCustomError(
                "unknown_name",
                "unknown {kind}",
                {"kind": self.registry.kind.replace("_", " "), "hint": suggest(name, names)},
            )
        return name

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        shipped = [name for name in self.registry.names() if self.registry.is_built_in(name)]
        return {"anyOf": [{"enum": shipped}, {"type": "string"}]}


def texts_outside(group: SubParameters, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of a group that may refer to something outside of a run, by dotted path.

    Excluded are `Literal`s, enumerations, text of a harmless type, and defaults.
    """
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if not is_inside(field.annotation, field.metadata) and value != field.default:
            yield from _texts_in(value, f"{prefix}{name}")


def _texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, SubParameters):
        yield from texts_outside(value, f"{path}.")
    elif isinstance(value, str):
        yield path, value
    else:
        for name, item in _children(value).items():
            yield from _texts_in(item, f"{path}.{name}")


def is_inside(annotation: Any, metadata: Sequence[Any] = ()) -> bool:
    """Return whether values of a type cannot refer to anything outside of a run."""
    if any(isinstance(one, _Inside) for one in metadata):
        return True
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        return is_inside(inner, marks)
    if get_origin(annotation) is Literal:
        return True
    if get_args(annotation):
        return all(is_inside(one) for one in get_args(annotation))
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, int | float | bool | Enum | NoneType)


def _children(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): item for index, item in enumerate(value)}
    return {}
