"""Groups are strict, frozen, and equal to those of their plain values."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
import yaml
from pydantic import Field

from nip_astra.errors import ParameterError
from nip_astra.parameters.parameters_base import MAX_COUNT, MAX_WHOLE, SubParameters, Url
from tests.kit.messages import says
from tests.parameters.groups import (
    SHAPES,
    Blob,
    Circle,
    Drawing,
    Paint,
    Ring,
    Shape,
    register_shape,
)

DRAWING: dict[str, Any] = {
    "shape": {"_type": "ring", "radius": 2.0, "num_segments": 5},
    "more": [{"_type": "blob"}, {"_type": "circle", "radius": 1.0, "num_segments": 32}],
    "ghost": {"_type": "blob"},
    "wheel": {"_type": "circle", "radius": 1e-5, "num_segments": 3},
    "paint": Paint(gloss=0.25, layers=2, colour="blue", is_dry=False).to_dict(),
    "coats": [Paint(layers=3).to_dict()],
    "names": ["a", "b"],
    "sizes": {"x": 1.0},
    "title": "1e-5",
}


def test_a_group_equals_that_of_its_plain_values_polymorphic_parts_included() -> None:
    drawing = Drawing.from_dict(DRAWING)
    values = drawing.to_dict()
    assert values == DRAWING
    assert Drawing.from_dict(values) == drawing == pickle.loads(pickle.dumps(drawing))
    assert isinstance(drawing.get("shape"), Ring.Parameters)
    assert json.loads(json.dumps(values)) == yaml.safe_load(yaml.safe_dump(values)) == values


def test_a_group_is_frozen_and_copied_with_known_fields_only() -> None:
    with pytest.raises(ParameterError, match=r"gloss.*model_copy\(update="):
        Paint().gloss = 0.1  # type: ignore[misc]
    assert Paint().model_copy(update={"layers": 3}).layers == 3
    with pytest.raises(ParameterError, match=r"glos: .*'gloss'"):
        Paint().model_copy(update={"glos": 0.5})


def test_a_whole_number_is_a_float_and_only_finite_ones_are_accepted() -> None:
    assert type(Paint(gloss=1).gloss) is float
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ParameterError, match="gloss"):
            Paint(gloss=number)


def test_a_polymorphic_part_may_be_an_instance_and_a_part_of_one_kind_needs_no_type() -> None:
    drawing = Drawing(shape=Ring.Parameters(radius=3), more=[Blob.Parameters()])
    assert drawing.get("shape.radius") == 3.0
    assert drawing.to_dict()["shape"]["_type"] == "ring"
    blob = {"shape": {"_type": "blob"}}
    assert Drawing.from_dict(blob | {"wheel": {"radius": 1}}).wheel == Circle.Parameters(radius=1)
    with pytest.raises(ParameterError, match=r"wheel: .*'circle'.*'blob'"):
        Drawing.from_dict(blob | {"wheel": {"_type": "blob"}})


def test_components_that_inherit_or_share_parameters_have_their_own_names() -> None:
    names = [item.Parameters.type_name for item in (Circle, Ring, Blob, Shape)]
    assert names == ["circle", "ring", "blob", ""]
    assert issubclass(Ring.Parameters, Circle.Parameters)

    class First:
        class Parameters(Shape.Parameters):
            """Shared."""

    class Second:
        Parameters = First.Parameters

    snapshot = SHAPES.snapshot()
    register_shape("first")(First)
    register_shape("second")(Second)
    SHAPES.restore(snapshot)
    register_shape("first")(First)
    SHAPES.restore(snapshot)
    assert (First.Parameters.type_name, Second.Parameters.type_name) == ("first", "second")


def test_a_value_has_a_dotted_path() -> None:
    drawing = Drawing.from_dict(DRAWING)
    values = {"paint.layers": 2, "more.1.radius": 1.0, "names.0": "a", "sizes.x": 1.0}
    for path, value in (values | {"paint": drawing.paint}).items():
        assert drawing.get(path) == value
    for path, hint in (("paint.layer", "'paint.layers'"), ("title.x", ""), ("more.7", "0, 1")):
        with pytest.raises(ParameterError) as caught:
            drawing.get(path)
        assert says(caught.value, f"{path}: ", f'"{path}"', hint)


class Typed(SubParameters):
    """Whole numbers with a bound and without, and an address."""

    free: int = 1
    own: int = Field(default=1, le=MAX_WHOLE)
    url: Url | None = None


WRONG_URLS = ("", "x", "ftp://a", "http://", "http://[", "http://a:x", "http://a\0b", "http://a b")


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        # Without a bound of its own, a whole number ends before C's does.
        ({"free": MAX_COUNT + 1}, f"free.*{MAX_COUNT:,}"),
        *(({"url": url}, "url") for url in WRONG_URLS),
    ],
)
def test_numbers_that_c_does_not_hold_and_texts_that_are_no_addresses_are_refused(
    values: dict[str, Any], facts: str
) -> None:
    assert Typed(free=MAX_COUNT, own=MAX_WHOLE, url="https://a.example:8000/v1").url
    with pytest.raises(ParameterError, match=facts):
        Typed(**values)
