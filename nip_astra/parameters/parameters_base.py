"""The base of all parameter groups: strict, frozen, reporting all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType, new_class
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
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

from nip_astra.errors import ParameterError, ParameterFault, UnknownNameError, show_value
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.conversion import current_name
from nip_astra.parameters.faults import NESTED, TYPE_KEY, UNKNOWN_TYPE, faults_of, suggest
from nip_astra.registry import Registry

T = TypeVar("T")


class _Inside:
    """Marks text that cannot reach anything outside of a run."""


PlainText = Annotated[str, _Inside()]
"""Text that is shown, compared or sent to a model, and names no file, address, variable or code.

Other text, unless it has one of the types below, needs the user's approval if a run of somebody
else sets it; see `nip_astra.trust`.
"""
CheckedName = Annotated[str, _Inside()]
"""A registered name or code, checked when it is looked up or loaded."""
MAX_COUNT = 2**31 - 1
"""Default bound of whole numbers; larger ones are mistakes, and overflow in C or in memory."""
MAX_WHOLE = 2**63 - 1
"""Bound for fields with larger whole numbers, such as seeds."""
MAX_LR = 100.0
"""Bound of learning rates; every optimizer here diverges above it."""


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
"""The address of a service."""


class SubParameters(BaseModel):
    """A group of parameters.

    A field has the type of its value in a YAML file: a number, text, true or false, a `Literal`, a
    list, another group, or null. Only whole numbers are converted, to floats. Each field has a
    docstring below it with its unit and effect.
    """

    read_where: ClassVar[ReadWhere | None] = None
    """Condition of the whole group; the parameter that it depends on is always read."""

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
        """Plain values for JSON and YAML, which `from_dict` reads back."""
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
        """A copy with some fields changed.

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
        """The value at a dotted path, for instance `get("training.lr")`.

        An element of a list has its number, from 0, as name.

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
    """Parameters of one of several kinds; `_type` names it in a file."""

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
    """A value as a file would hold it; groups keep only the fields that were set explicitly."""
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


class ComponentRegistry(Registry[T]):
    """A registry of components whose nested class `Parameters` is named after them, by `_type`."""

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers a component under `name` and names its `Parameters`.

        A component that inherits its `Parameters`, or shares them with another, gets a class of its
        own, so that the other's name stays.
        """
        register = super().register(name)

        def decorate(component: Any) -> Any:
            found: type[PolymorphicParameters] = component.Parameters
            is_own = "Parameters" in vars(component)
            if not is_own or vars(found).get("type_name") not in (None, "", str(name)):
                body = {
                    "__doc__": found.__doc__,
                    "__module__": component.__module__,
                    "__qualname__": f"{component.__qualname__}.Parameters",
                }
                component.Parameters = new_class(
                    "Parameters", (found,), {}, lambda space: space.update(body)
                )
            component.Parameters.type_name = str(name)
            return register(component)

        return decorate


def polymorphic(get: Callable[[str], Any], base: type[PolymorphicParameters]) -> Any:
    """A field type whose `_type` selects the parameters.

    Parameters
    ----------
    get : Callable
        Returns the component of a name, whose nested class `Parameters` validates; usually a
        registry's `get`. Then the JSON Schema has every registered kind.
    base : type[PolymorphicParameters]
        The base of all kinds; instances pass unchanged.
    """
    return Annotated[base, _ByType(get, base)]


class _ByType:
    """Validation and JSON Schema of a polymorphic field."""

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
            raise PydanticCustomError(
                "type_name",
                "must be a group of parameters with a {key}",
                {"key": TYPE_KEY, "hint": self._hint()},
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

    def _hint(self) -> str:
        names = self._names()
        return f"Known kinds: {', '.join(names)}." if names else ""


class RegisteredName(_Inside):
    """Marks text as a registered name: `Annotated[str, RegisteredName(REGISTRY)]`.

    A name is checked without importing anything.
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
    """Each text of a group, by its dotted path, that may name something outside of a run.

    Left out are `Literal`s, enumerations, text with a harmless type, and defaults.
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
    """Whether values of a type cannot name anything outside of a run."""
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
