"""Groups are strict, frozen, and come back from their plain values."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import Field

from nip_astra.errors import ParameterError
from nip_astra.parameters.parameters_base import (
    MAX_COUNT,
    MAX_WHOLE,
    SubParameters,
    Url,
)
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
    "paint": {
        "gloss": 0.25,
        "layers": 2,
        "colour": "blue",
        "is_dry": False,
        "thinner": None,
        "label": "",
    },
    "coats": [Paint(layers=3).to_dict()],
    "names": ["a", "b"],
    "sizes": {"x": 1.0},
    "title": "1e-5",
}


def test_a_group_comes_back_from_its_plain_values_polymorphic_parts_included() -> None:
    drawing = Drawing.from_dict(DRAWING)
    assert drawing.to_dict() == DRAWING
    assert Drawing.from_dict(drawing.to_dict()) == drawing
    assert isinstance(drawing.get("shape"), Ring.Parameters)


def test_plain_values_survive_json_and_yaml() -> None:
    values = Drawing.from_dict(DRAWING).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert yaml.safe_load(yaml.safe_dump(values)) == values


def test_a_group_survives_pickling_also_where_it_inherits_its_parameters() -> None:
    drawing = Drawing.from_dict(DRAWING)
    assert pickle.loads(pickle.dumps(drawing)) == drawing


def test_only_the_values_that_were_given_can_be_written() -> None:
    drawing = Drawing(shape=Circle.Parameters(radius=1), paint=Paint(layers=2))
    assert drawing.model_dump(mode="json", exclude_unset=True) == {
        "shape": {"_type": "circle", "radius": 1.0},
        "paint": {"layers": 2},
    }


def test_a_group_is_frozen() -> None:
    with pytest.raises(ParameterError, match=r"gloss: cannot be changed.*model_copy\(update="):
        Paint().gloss = 0.1  # type: ignore[misc]


def test_a_copy_with_a_field_that_nothing_has_is_refused() -> None:
    assert Paint().model_copy(update={"layers": 3}).layers == 3
    with pytest.raises(ParameterError, match=r"glos: unknown parameter.*Did you mean 'gloss'"):
        Paint().model_copy(update={"glos": 0.5})


def test_a_whole_number_is_a_float_and_nothing_else_is_converted() -> None:
    paint = Paint(gloss=1)
    assert type(paint.gloss) is float
    for wrong in ({"gloss": "1"}, {"gloss": True}, {"layers": 1.0}, {"is_dry": 1}, {"label": 3}):
        with pytest.raises(ParameterError):
            Paint.from_dict(wrong)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_must_be_finite(wrong: float) -> None:
    with pytest.raises(ParameterError, match="gloss: must be a finite number"):
        Paint(gloss=wrong)


def test_an_instance_is_taken_as_a_polymorphic_part() -> None:
    drawing = Drawing(shape=Ring.Parameters(radius=3), more=[Blob.Parameters()])
    assert drawing.get("shape.radius") == 3.0
    assert drawing.to_dict()["shape"]["_type"] == "ring"


def test_a_part_that_takes_one_kind_only_needs_no_type_and_refuses_another() -> None:
    assert Drawing.from_dict(
        {"shape": {"_type": "blob"}, "wheel": {"radius": 1}}
    ).wheel == Circle.Parameters(radius=1)
    with pytest.raises(ParameterError, match="wheel: must have the _type 'circle', not 'blob'"):
        Drawing.from_dict({"shape": {"_type": "blob"}, "wheel": {"_type": "blob"}})


def test_a_component_that_inherits_its_parameters_gets_its_own_name() -> None:
    assert Circle.Parameters.type_name == "circle"
    assert Ring.Parameters.type_name == "ring"
    assert Blob.Parameters.type_name == "blob"
    assert Shape.Parameters.type_name == ""
    assert issubclass(Ring.Parameters, Circle.Parameters)


def test_components_that_share_a_parameters_class_keep_their_own_names() -> None:
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


def test_a_value_is_found_by_its_dotted_path() -> None:
    drawing = Drawing.from_dict(DRAWING)
    assert drawing.get("paint.layers") == 2
    assert drawing.get("more.1.radius") == 1.0
    assert drawing.get("names.0") == "a"
    assert drawing.get("sizes.x") == 1.0
    assert drawing.get("paint") == drawing.paint


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("paint.layer", 'paint.layer: unknown parameter; given "paint.layer". Did you mean '),
        ("title.x", 'title.x: unknown parameter; given "title.x". Remove it.'),
        ("more.7", 'more.7: unknown parameter; given "more.7". Known here: 0, 1.'),
    ],
)
def test_a_path_that_leads_nowhere_is_told(path: str, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Drawing.from_dict(DRAWING).get(path)
    assert message in str(caught.value)


def test_the_json_schema_describes_every_parameter_and_every_kind() -> None:
    schema = Drawing.model_json_schema()
    kinds = schema["properties"]["shape"]["anyOf"]
    assert [kind["properties"]["_type"]["const"] for kind in kinds] == ["blob", "circle", "ring"]
    assert kinds[1]["required"] == ["_type", "radius"]
    assert kinds[1]["properties"]["radius"]["description"] == "Metres."
    assert schema["additionalProperties"] is False
    assert schema["properties"]["title"]["description"] == "What it is called."
    json.dumps(schema)


def test_a_default_that_breaks_its_own_rule_is_found_when_it_is_used() -> None:
    class Broken(SubParameters):
        """Its default is no number."""

        size: float = "big"  # type: ignore[assignment]
        """Metres."""

    with pytest.raises(ParameterError, match="size: must be a number, not text"):
        Broken()


def test_what_omegaconf_reads_is_what_the_group_holds() -> None:
    text = "gloss: 1e-3\nlayers: 3\nthinner: null\nis_dry: false\n"
    values = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(values, dict)
    paint = Paint.from_dict({str(key): value for key, value in values.items()})
    assert (paint.gloss, paint.layers, paint.thinner, paint.is_dry) == (0.001, 3, None, False)


class Sizes(SubParameters):
    """Whole numbers with bounds and without."""

    free: int = 1
    own: int = Field(default=1, le=MAX_WHOLE)
    url: Url | None = None


def test_a_whole_number_without_a_bound_of_its_own_ends_before_c_does() -> None:
    assert Sizes(free=MAX_COUNT, own=MAX_WHOLE).own == MAX_WHOLE
    with pytest.raises(ParameterError, match=f"free.*{MAX_COUNT:,}"):
        Sizes(free=MAX_COUNT + 1)


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://a", "http://", "http://[", "http://a:x", "http://a\0b", "http://a b"]
)
def test_what_is_no_address_is_refused_as_a_parameter(url: str) -> None:
    assert Sizes(url="https://a.example:8000/v1").url
    with pytest.raises(ParameterError, match="url"):
        Sizes(url=url)
