"""The base of all parameter groups: strict, frozen, complete in what they complain about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from nip_astra.errors import ParameterError, ParameterFault, UnknownNameError, nearest_names


class SubParameters(BaseModel):
    """A group of parameters. Each field has a docstring with its unit and consequence."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    def to_dict(self) -> dict[str, Any]:
        """Give plain values that JSON and YAML can hold and `from_dict` reads back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, sources: Mapping[str, str] = {}) -> Self:
        """Validate plain values.

        Parameters
        ----------
        sources : Mapping[str, str]
            Where each value came from, by dotted path; told with its fault.

        Raises
        ------
        ParameterError
            With every fault found.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ParameterError(_faults(error.errors(), cls, sources)) from None

    def get(self, path: str) -> Any:
        """Give the value at a dotted path, for instance `get("training.lr")`.

        Raises
        ------
        ParameterError
            When there is no such parameter.
        """
        value: Any = self
        for name in path.split("."):
            names = list(type(value).model_fields) if isinstance(value, BaseModel) else []
            if name not in names:
                fault = ParameterFault(path, "a path", "unknown parameter", _suggest(name, names))
                raise ParameterError([fault])
            value = getattr(value, name)
        return value


class PolymorphicParameters(SubParameters):
    """Parameters of one of several kinds; `_type` says which in a file."""

    type_name: ClassVar[str] = ""
    """The registered name; set by the decorator that registers the component."""

    @model_serializer(mode="wrap")
    def _with_type(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {"_type": type(self).type_name, **handler(self)}


Component = TypeVar("Component")


def claim_parameters(component: Any, name: str) -> None:
    """Name a component's `Parameters` class after its registered name.

    A component that inherits its `Parameters` gets a class of its own, so that naming it leaves
    the parent's name alone.
    """
    if "Parameters" not in vars(component):
        inherited = component.Parameters
        component.Parameters = type(
            "Parameters",
            (inherited,),
            {"__doc__": inherited.__doc__, "__module__": component.__module__},
        )
    component.Parameters.type_name = str(name)


def polymorphic(get: Callable[[str], Any], base: type[PolymorphicParameters]) -> Any:
    """Give a field type whose `_type` chooses the parameters, by a registry's `get`."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> PolymorphicParameters:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("needs_type", "must be a group of parameters with a _type")
        rest = {key: item for key, item in value.items() if key != "_type"}
        type_name = value.get("_type")
        if not isinstance(type_name, str):
            raise PydanticCustomError("needs_type", "needs a _type that says its kind")
        try:
            cls = get(type_name).Parameters
        except UnknownNameError as error:
            raise PydanticCustomError("unknown_type", "{text}", {"text": str(error)}) from None
        try:
            parameters: PolymorphicParameters = cls.model_validate(rest)
        except ValidationError as error:
            raise PydanticCustomError(
                "nested", "is not valid", {"faults": _faults(error.errors(), cls, {})}
            ) from None
        return parameters

    schema = {
        "type": "object",
        "properties": {"_type": {"type": "string"}},
        "required": ["_type"],
    }
    # mypy cannot follow a type that is chosen at run time.
    serialized: Any = SerializeAsAny[base]  # type: ignore[misc, valid-type]
    return Annotated[serialized, WrapValidator(validate), WithJsonSchema(schema)]


def _faults(
    errors: list[Any], model: type[BaseModel], sources: Mapping[str, str]
) -> list[ParameterFault]:
    faults: list[ParameterFault] = []
    for error in errors:
        path = ".".join(str(part) for part in error["loc"])
        nested = (error.get("ctx") or {}).get("faults")
        if nested:
            faults += [
                fault._replace(
                    path=f"{path}.{fault.path}",
                    source=_source_of(f"{path}.{fault.path}", sources),
                )
                for fault in nested
            ]
            continue
        problem, suggestion = _explain(error, model)
        given = "nothing" if error["type"] == "missing" else _show(error["input"])
        faults.append(ParameterFault(path, given, problem, suggestion, _source_of(path, sources)))
    return faults


def _explain(error: Any, model: type[BaseModel]) -> tuple[str, str]:
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        names = _field_names(model, error["loc"][:-1])
        return "unknown parameter", _suggest(str(error["loc"][-1]), names)
    if kind == "missing":
        return "is required", "Give it a value."
    if kind.endswith("_type") and isinstance(given, bool):
        return f"must be {_noun(kind)}, not true or false", ""
    if kind in ("float_type", "int_type") and isinstance(given, str):
        return f"must be {_noun(kind)}, not text", "Write it without quotes."
    if kind == "literal_error" and isinstance(given, str):
        allowed = error["ctx"]["expected"]
        names = [word.strip(" '") for word in allowed.replace(" or ", ",").split(",")]
        near = nearest_names(given, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"must be one of {allowed}", hint.strip()
    text = str(error["msg"])
    text = text.removeprefix("Value error, ").removeprefix("Input should be ")
    is_rule = kind.endswith(("_type", "_equal", "_than")) or "should be" in str(error["msg"])
    return (f"must be {text}" if is_rule and not text.startswith("must") else text), ""


def _noun(kind: str) -> str:
    return {"float_type": "a number", "int_type": "a whole number", "string_type": "text"}.get(
        kind, "of another type"
    )


def _suggest(name: str, names: list[str]) -> str:
    near = nearest_names(name, names, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known here: {', '.join(names)}." if names else ""


def _field_names(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in location:
        fields = getattr(current, "model_fields", {})
        if part not in fields:
            # An index into a list: the element's type has been found already.
            continue
        current = _model_in(fields[part].annotation)
    return list(getattr(current, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None


def _source_of(path: str, sources: Mapping[str, str]) -> str:
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""


def _show(value: Any) -> str:
    try:
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
