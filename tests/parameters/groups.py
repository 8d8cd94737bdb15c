"""Parameter groups to test with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from nip_astra.parameters.parameters_base import (
    ComponentRegistry,
    PolymorphicParameters,
    SubParameters,
    polymorphic,
)
from nip_astra.registry import ALL_REGISTRIES

_before = dict(ALL_REGISTRIES)
SHAPES: ComponentRegistry[Any] = ComponentRegistry("shape")
ALL_REGISTRIES.clear()
ALL_REGISTRIES.update(_before)  # the program's own registries are listed without this one


class Shape:
    class Parameters(PolymorphicParameters):
        """Any shape."""


register_shape = SHAPES.register


@register_shape("circle")
class Circle(Shape):
    class Parameters(Shape.Parameters):
        """A circle."""

        radius: float = Field(gt=0)
        num_segments: int = 32


@register_shape("ring")
class Ring(Circle):
    """Inherits its parameters."""


@register_shape("blob")
class Blob(Shape):
    """Inherits the empty parameters of all shapes."""


ShapeParameters = polymorphic(SHAPES.get, Shape.Parameters)


class Paint(SubParameters):
    gloss: float = Field(default=0.5, ge=0, le=1)
    layers: int = Field(default=1, ge=1, lt=10)
    colour: Literal["red", "green", "blue"] = "red"
    is_dry: bool = True
    thinner: float | None = Field(default=None, gt=0)
    label: str = ""

    @field_validator("label")
    @classmethod
    def _is_short(cls, label: str) -> str:
        if len(label) > 8:
            raise ValueError("is too long; give 8 letters at most.")
        return label


class Drawing(SubParameters):
    shape: ShapeParameters  # type: ignore[valid-type]
    more: list[ShapeParameters] = []  # type: ignore[valid-type]
    ghost: ShapeParameters | None = None  # type: ignore[valid-type]
    wheel: Circle.Parameters | None = None
    paint: Paint = Paint()
    coats: list[Paint] = []
    names: str | list[str] = "nobody"
    sizes: dict[str, float] = {}
    title: str = "untitled"
