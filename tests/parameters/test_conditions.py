"""Conditions under which parameters are read."""

from __future__ import annotations

import pytest

from nip_astra.parameters.conditions import ReadWhere, where, where_above, where_given
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from tests.parameters.test_every_parameter import every_field, every_group


@pytest.mark.parametrize(
    ("condition", "met", "unmet", "words"),
    [
        (where("a", True), [True], [False], "is true"),
        (where("a", "x", "y"), ["x", "y"], ["z", ""], "is one of x, y"),
        (where("a", None), [None], ["x", 0], "is null"),
        (where_given("a"), [0, ""], [None], "is not null"),
        (where_above("a", 1), [2, 1.5], [1, 0], "is above 1"),
    ],
)
def test_a_condition_holds_for_some_values_only(
    condition: ReadWhere, met: list[object], unmet: list[object], words: str
) -> None:
    assert all(condition.is_met(value) for value in met)
    assert not any(condition.is_met(value) for value in unmet)
    assert condition.words == words


def conditions() -> list[tuple[type[SubParameters], ReadWhere]]:
    of_fields = [
        (cls, item)
        for cls, _, field in every_field()
        for item in field.metadata
        if isinstance(item, ReadWhere)
    ]
    return of_fields + [(cls, cls.read_where) for cls in every_group() if cls.read_where]


def knows(cls: type[SubParameters], path: str) -> bool:
    first, _, rest = path.partition(".")
    field = cls.model_fields.get(first)
    return field is not None and (not rest or knows(field.annotation, rest))  # type: ignore[arg-type]


def test_every_condition_names_an_existing_parameter() -> None:
    result = conditions()
    assert len(result) > 40
    # A condition on a group around its own: an instance of one of these classes.
    around = [HyperParameters, *(cls for cls in every_group() if "agents" in cls.model_fields)]
    lost = [
        f"{cls}: {item.path}"
        for cls, item in result
        if not any(knows(group, item.path) for group in (cls, *around))
    ]
    assert lost == []
    assert not knows(HyperParameters, "ppo.loss_typ")
