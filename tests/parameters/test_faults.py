"""Each fault is told with its path, what was given, from where, and what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from nip_astra.errors import ParameterError
from tests.kit.messages import says
from tests.parameters.groups import Drawing, Paint

SHAPE = {"_type": "circle", "radius": 1.0}


def faults_of(values: dict[str, Any], sources: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ParameterError) as caught:
        Drawing.from_dict({"shape": SHAPE} | values, sources=sources or {})
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"gloss": "1e-5"},
            'paint.gloss: must be a number, not text; given "1e-5". Write it without quotes: 1e-5.',
        ),
        ({"gloss": "much"}, 'paint.gloss: must be a number, not text; given "much".'),
        ({"gloss": "nan"}, 'paint.gloss: must be a number, not text; given "nan".'),
        ({"gloss": True}, "paint.gloss: must be a number, not true or false; given true."),
        ({"gloss": None}, "paint.gloss: must be a number, not null; given null."),
        ({"gloss": [1]}, "paint.gloss: must be a number, not a list; given [1]."),
        (
            {"gloss": {"x": 1}},
            'paint.gloss: must be a number, not a group of parameters; given {"x": 1}.',
        ),
        ({"gloss": 2}, "paint.gloss: must be at most 1; given 2."),
        ({"gloss": -1}, "paint.gloss: must be at least 0; given -1."),
        ({"layers": 10}, "paint.layers: must be less than 10; given 10."),
        ({"thinner": 0}, "paint.thinner: must be greater than 0; given 0."),
        ({"layers": 2.0}, "paint.layers: must be a whole number; given 2.0. Write 2."),
        ({"layers": 2.5}, "paint.layers: must be a whole number; given 2.5."),
        (
            {"layers": "3"},
            'paint.layers: must be a whole number, not text; given "3". Write it without quotes: '
            "3.",
        ),
        ({"is_dry": 1}, "paint.is_dry: must be true or false, not a number; given 1."),
        ({"is_dry": "yes"}, 'paint.is_dry: must be true or false, not text; given "yes".'),
        (
            {"label": 7},
            "paint.label: must be text, not a number; given 7. Write it in quotes: '7'.",
        ),
        (
            {"colour": "gren"},
            "paint.colour: must be one of red, green, blue; given \"gren\". Did you mean 'green'?",
        ),
        ({"colour": "rad"}, 'paint.colour: must be one of red, green, blue; given "rad".'),
        ({"colour": 3}, "paint.colour: must be one of red, green, blue; given 3."),
        (
            {"label": "far too long"},
            'paint.label: is too long; give 8 letters at most; given "far too long".',
        ),
        ({"glos": 1}, "paint.glos: unknown parameter; given 1. Did you mean 'paint.gloss'?"),
        (
            {"gloss_paint": 1},
            "paint.gloss_paint: unknown parameter; given 1. Did you mean 'paint.gloss'?",
        ),
        (
            {"zzz": 1},
            "paint.zzz: unknown parameter; given 1. Known here: gloss, layers, colour, is_dry, "
            "thinner, label.",
        ),
        ({"title": 1}, "paint.title: unknown parameter; given 1. Did you mean 'title'?"),
    ],
)
def test_a_wrong_value_is_told(values: dict[str, Any], fault: str) -> None:
    assert faults_of({"paint": values}) == [fault]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"paint": None}, "paint: must be a group of parameters, not null; given null."),
        ({"paint": 3}, "paint: must be a group of parameters, not a number; given 3."),
        ({"gloss": 1}, "gloss: unknown parameter; given 1. Did you mean 'paint.gloss'?"),
        ({"coats": [{}, {"gloss": "x"}]}, 'coats.1.gloss: must be a number, not text; given "x".'),
        (
            {"coats": [{"glos": 1}]},
            "coats.0.glos: unknown parameter; given 1. Did you mean 'coats.0.gloss'?",
        ),
        (
            {"coats": {"gloss": 1}},
            'coats: must be a list, not a group of parameters; given {"gloss": 1}.',
        ),
        ({"names": 3}, "names: must be text or a list; given 3. Write it in quotes: '3'."),
        (
            {"names": ["a", 3]},
            "names.1: must be text, not a number; given 3. Write it in quotes: '3'.",
        ),
        ({"sizes": {"x": "a"}}, 'sizes.x: must be a number, not text; given "a".'),
        (
            {"shape": {"_type": "circl"}},
            "shape._type: unknown shape 'circl'. Did you mean 'circle'? Known shapes: blob, "
            "circle, ring. A shape of your own is loaded with --plugin path/to/file.py; given "
            '"circl".',
        ),
        (
            {"shape": {"radius": 1}},
            "shape: must be a group of parameters with a _type; given "
            '{"radius": 1}. Known kinds: blob, circle, ring.',
        ),
        (
            {"shape": {"_type": "circle"}},
            "shape.radius: is required; given nothing. Give it in a file or with --set "
            "shape.radius=VALUE.",
        ),
        (
            {"more": [SHAPE, {"_type": "ring"}]},
            "more.1.radius: is required; given nothing. Give it in a file or with --set "
            "more.1.radius=VALUE.",
        ),
        (
            {"more": [SHAPE, {"_type": "ring", "radius": 1, "radios": 2}]},
            "more.1.radios: unknown parameter; given 2. Did you mean 'more.1.radius'?",
        ),
        (
            {"ghost": {"_type": "ring", "radius": 0}},
            "ghost.radius: must be greater than 0; given 0.",
        ),
    ],
)
def test_a_fault_is_told_at_its_place_also_in_lists_and_polymorphic_parts(
    values: dict[str, Any], fault: str
) -> None:
    assert faults_of(values) == [fault]


def test_all_faults_are_told_at_once() -> None:
    values = {"shape": {"_type": "circle"}, "more": [{"_type": "x"}], "gloss": 1, "names": 3}
    paths = [fault.partition(":")[0] for fault in faults_of(values)]
    assert paths == ["shape.radius", "more.0._type", "names", "gloss"]


def test_a_fault_names_the_source_of_its_value_or_of_the_nearest_group_around_it() -> None:
    values = {"paint": {"gloss": 3}, "coats": [{"layers": 0}], "shape": {"_type": "circle"}}
    sources = {"paint.gloss": "--set", "coats": "a.yaml", "shape": "b.yaml"}
    assert faults_of(values, sources) == [
        "shape.radius: is required; given nothing. Give it in a file or with --set "
        "shape.radius=VALUE.",
        "paint.gloss: must be at most 1; given 3 (from --set).",
        "coats.0.layers: must be at least 1; given 0 (from a.yaml).",
    ]


def test_a_long_value_is_cut_and_one_without_json_is_shown_all_the_same() -> None:
    [fault] = faults_of({"paint": {"gloss": "x" * 500}})
    assert len(fault) < 160
    [fault] = faults_of({"paint": {"gloss": object}})
    assert fault == "paint.gloss: must be a number, not a type; given <class 'object'>."


def test_an_object_made_in_python_tells_its_faults_in_the_same_words() -> None:
    with pytest.raises(ParameterError) as caught:
        Paint(glos=1, layers=True)  # type: ignore[call-arg]
    assert says(
        caught.value,
        "2 parameters",
        "layers:",
        "whole number",
        "true",
        "glos:",
        "unknown",
        "1",
        "'gloss'?",
    )
