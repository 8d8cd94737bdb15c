"""What was given explicitly, apart from defaults: the values that win over files."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from nip_astra.parameters.faults import TYPE_KEY
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters


def plain_values(value: Any) -> Any:
    """A value as a file would hold it; of groups only the fields that were set."""
    if isinstance(value, SubParameters):
        names = [name for name in type(value).model_fields if name in value.model_fields_set]
        fields = {name: plain_values(getattr(value, name)) for name in names}
        if isinstance(value, PolymorphicParameters):
            return {TYPE_KEY: value.type_name, **fields}
        return fields
    if isinstance(value, Mapping):
        return {str(name): plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The values that differ from those of before, in their groups."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            inner = differences(value, old)
            if inner:
                found[name] = inner
        elif name not in before or value != old:
            found[name] = value
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both, group by group; the second win."""
    values = dict(below)
    for name, value in above.items():
        old = values.get(name)
        is_group = isinstance(value, Mapping) and isinstance(old, Mapping)
        values[name] = merged(old, value) if is_group else value  # type: ignore[arg-type]  # groups
    return values
