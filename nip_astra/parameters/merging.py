"""Put parameter values from several places on top of each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from nip_astra.errors import ParameterFault
from nip_astra.parameters.faults import TYPE_KEY, is_about_elements, show


class Merger:
    """Nested values, and where they came from.

    Attributes
    ----------
    values : dict
        What all that was added gives together.
    sources : dict[str, str]
        Where each leaf came from, by dotted path; of a list whose elements were changed, all
        places.
    faults : list[ParameterFault]
        Elements of lists that were to be changed and are not there.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.faults: list[ParameterFault] = []

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Put values on top; they stay as they are."""
        self._merge(self.values, values, source, "")

    def _merge(
        self, into: dict[str, Any], values: Mapping[str, Any], source: str, prefix: str
    ) -> None:
        for key, value in values.items():
            name = str(key)
            path = f"{prefix}{name}"
            old = into.get(name)
            if isinstance(value, Mapping):
                if isinstance(old, dict) and not _is_other_type(old, value):
                    self._merge(old, value, source, f"{path}.")
                    continue
                if isinstance(old, list) and is_about_elements(value):
                    into[name] = self._changed(old, value, source, path)
                    continue
            for known in [known for known in self.sources if known.startswith(f"{path}.")]:
                del self.sources[known]
            self.sources[path] = source
            if isinstance(value, Mapping):
                into[name] = {}
                self._merge(into[name], value, source, f"{path}.")
            else:
                into[name] = value

    def _changed(
        self, old: Sequence[Any], values: Mapping[str, Any], source: str, path: str
    ) -> list[Any]:
        """A list with other values in some of its elements."""
        elements = list(old)
        for key, value in values.items():
            number = int(key)
            if number >= len(elements):
                self.faults.append(_beyond_the_end(elements, path, key, value, source))
                continue
            one = {key: deepcopy(elements[number])}
            self._merge(one, {key: value}, source, f"{path}.")
            elements[number] = one[key]
        before = self.sources.get(path, source)
        if source not in before.split(", "):
            self.sources[path] = f"{before}, {source}"
        return elements


def default_lists(values: Mapping[str, Any], model: type[BaseModel], source: str) -> dict[str, Any]:
    """The lists that are defaults of fields and of which values change single elements."""
    merger = Merger()
    for path in _paths_to_elements(values, ()):
        found: Any = _default_at(model, path)
        if isinstance(found, list):
            for name in reversed(path):
                found = {name: found}
            merger.add(found, source)
    return merger.values


def _paths_to_elements(
    values: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            path = (*above, str(name))
            if is_about_elements(value):
                yield path
            yield from _paths_to_elements(value, path)


def _default_at(model: type[BaseModel], path: Sequence[str]) -> Any:
    """A field's default as a file has it, or None where its model cannot be known."""
    place: Any = model
    for name in path:
        if isinstance(place, type) and issubclass(place, BaseModel) and name in place.model_fields:
            field = place.model_fields[name]
            place = (
                field.annotation
                if field.is_required()
                else field.get_default(call_default_factory=True)
            )
        elif isinstance(place, BaseModel) and name in type(place).model_fields:
            place = getattr(place, name)
        elif isinstance(place, Mapping) and name in place:
            place = place[name]
        else:
            return None
    if isinstance(place, list):
        return [one.model_dump(mode="json") if isinstance(one, BaseModel) else one for one in place]
    return None


def _is_other_type(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return TYPE_KEY in new and new[TYPE_KEY] != old.get(TYPE_KEY)


def _beyond_the_end(
    elements: Sequence[Any], path: str, key: str, value: Any, source: str
) -> ParameterFault:
    last = f"Its elements are 0 to {len(elements) - 1}; to" if elements else "To"
    return ParameterFault(
        f"{path}.{key}",
        show(value),
        f"is beyond the end of a list of {len(elements)}",
        f"{last} lengthen it, give the whole list as {path}.",
        source,
    )
