"""Each fault has its path, the given value, its source, and a valid alternative."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError, ParameterFault
from tests.kit.messages import says
from tests.parameters.groups import Drawing, Paint

SHAPE = {"_type": "circle", "radius": 1.0}


def faults_of(
    values: dict[str, Any], sources: dict[str, str] | None = None
) -> list[ParameterFault]:
    with pytest.raises(ParameterError) as caught:
        Drawing.from_dict({"shape": SHAPE} | values, sources=sources or {})
    return caught.value.faults


# Each with the path, the given value, and facts of the problem and the suggestion.
WRONG: list[tuple[dict[str, Any], str, str, list[str]]] = [
    ({"gloss": "1e-5"}, "paint.gloss", '"1e-5"', ["number", "text", " 1e-5."]),
    ({"gloss": True}, "paint.gloss", "true", ["number", "true or false"]),
    ({"gloss": None}, "paint.gloss", "null", ["number", "null"]),
    ({"gloss": object}, "paint.gloss", "<class 'object'>", ["number", "type"]),
    ({"gloss": 2}, "paint.gloss", "2", ["at most 1"]),
    ({"gloss": -1}, "paint.gloss", "-1", ["at least 0"]),
    ({"layers": 10}, "paint.layers", "10", ["less than 10"]),
    ({"thinner": 0}, "paint.thinner", "0", ["greater than 0"]),
    ({"layers": 2.0}, "paint.layers", "2.0", ["whole number", "Write 2."]),
    ({"layers": 2.5}, "paint.layers", "2.5", ["whole number"]),
    ({"layers": "3"}, "paint.layers", '"3"', ["whole number", "text", " 3."]),
    ({"is_dry": 1}, "paint.is_dry", "1", ["true or false", "number"]),
    ({"label": 7}, "paint.label", "7", ["text", "number", "'7'"]),
    ({"label": "far too long"}, "paint.label", '"far too long"', ["8 letters"]),
    ({"colour": "gren"}, "paint.colour", '"gren"', ["red, green, blue", "'green'?"]),
    ({"colour": "rad"}, "paint.colour", '"rad"', ["red, green, blue"]),
    ({"glos": 1}, "paint.glos", "1", ["unknown", "'paint.gloss'?"]),
    ({"gloss_paint": 1}, "paint.gloss_paint", "1", ["unknown", "'paint.gloss'?"]),
    ({"zzz": 1}, "paint.zzz", "1", ["unknown", "gloss, layers, colour, is_dry"]),
    ({"title": 1}, "paint.title", "1", ["unknown", "'title'?"]),
]
NESTED: list[tuple[dict[str, Any], str, str, list[str]]] = [
    ({"paint": None}, "paint", "null", ["group", "null"]),
    ({"gloss": 1}, "gloss", "1", ["unknown", "'paint.gloss'?"]),
    ({"paint.gloss": 1}, "paint.gloss", "1", ["unknown", "`gloss`", "`paint:`"]),
    ({"coats": [{}, {"gloss": "x"}]}, "coats.1.gloss", '"x"', ["number", "text"]),
    ({"coats": [{"glos": 1}]}, "coats.0.glos", "1", ["unknown", "'coats.0.gloss'?"]),
    ({"coats": {"gloss": 1}}, "coats", '{"gloss": 1}', ["list", "group"]),
    ({"names": 3}, "names", "3", ["text or a list", "'3'"]),
    ({"names": ["a", 3]}, "names.1", "3", ["text", "number", "'3'"]),
    ({"sizes": {"x": "a"}}, "sizes.x", '"a"', ["number", "text"]),
    ({"shape": {"_type": "circl"}}, "shape._type", '"circl"', ["'circle'?", "blob, circle, ring"]),
    ({"shape": {"radius": 1}}, "shape", '{"radius": 1}', ["_type", "blob, circle, ring"]),
    ({"shape": {"_type": "circle"}}, "shape.radius", "nothing", ["--set shape.radius=VALUE"]),
    ({"more": [SHAPE, {"_type": "ring"}]}, "more.1.radius", "nothing", ["--set more.1.radius="]),
    ({"more": [{**SHAPE, "radios": 2}]}, "more.0.radios", "2", ["unknown", "'more.0.radius'?"]),
    ({"ghost": {"_type": "ring", "radius": 0}}, "ghost.radius", "0", ["greater than 0"]),
]


@pytest.mark.parametrize(
    ("values", "path", "given", "facts"),
    [({"paint": values}, *expected) for values, *expected in WRONG] + NESTED,
)
def test_a_wrong_value_is_reported_at_its_place(
    values: dict[str, Any], path: str, given: str, facts: list[str]
) -> None:
    (fault,) = faults_of(values)
    assert (fault.path, fault.given) == (path, given)
    assert says(f"{fault.problem} {fault.suggestion}", *facts)


def test_all_faults_are_reported_at_once() -> None:
    values = {"paint": {"gloss": 3}, "coats": [{"layers": 0}], "shape": {"_type": "circle"}, "x": 1}
    sources = {"paint.gloss": "--set", "coats": "a.yaml", "shape": "b.yaml"}
    # The source is that of the value, or of the nearest group around it.
    expected = {"shape.radius": "", "paint.gloss": "--set", "coats.0.layers": "a.yaml", "x": ""}
    assert {fault.path: fault.source for fault in faults_of(values, sources)} == expected
    with pytest.raises(ParameterError) as caught:
        Paint(glos=1, layers=True)  # type: ignore[call-arg]
    assert [fault.path for fault in caught.value.faults] == ["layers", "glos"]


def test_nothing_is_suggested_if_nothing_is_near_and_a_long_value_is_truncated() -> None:
    for values in ({"gloss": "nan"}, {"colour": "rad"}, {"layers": 2.5}, {"gloss": "x" * 500}):
        (fault,) = faults_of({"paint": values})
        assert fault.suggestion == ""
        assert len(str(fault)) < 160
