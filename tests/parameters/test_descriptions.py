"""Every parameter says what it is; the schema and `show` have no other source."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import nip_astra
from nip_astra.parameters.parameters_base import SubParameters


def _subclasses(cls: type[SubParameters]) -> Iterator[type[SubParameters]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _groups() -> list[type[SubParameters]]:
    for module in pkgutil.walk_packages(nip_astra.__path__, "nip_astra."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {cls for cls in _subclasses(SubParameters) if cls.__module__.startswith("nip_astra.")}
    return sorted(found, key=_name)


def _name(group: type[SubParameters]) -> str:
    return f"{group.__module__}.{group.__qualname__}"


GROUPS = _groups()


def test_all_groups_are_found() -> None:
    names = {_name(group) for group in GROUPS}
    assert {
        "nip_astra.experiment_settings.ExperimentSettings",
        "nip_astra.parameters.training.TrainingConfiguration",
        "nip_astra.trainers.ast_dpo.AstDpoTrainer.Parameters",
        "nip_astra.scenario_base.conversation.planted_failures.PlantedFailure",
    } <= names


@pytest.mark.parametrize("group", GROUPS, ids=_name)
def test_every_group_of_parameters_has_a_docstring(group: type[SubParameters]) -> None:
    assert (group.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("group", GROUPS, ids=_name)
def test_every_parameter_has_a_docstring(group: type[SubParameters]) -> None:
    for name, field in group.model_fields.items():
        assert (field.description or "").strip(), f"{_name(group)}.{name} has no docstring"
        assert "\n    " not in (field.description or ""), f"{name}: an indent of the source"


@pytest.mark.parametrize("group", GROUPS, ids=_name)
def test_descriptions_differ_within_a_group(group: type[SubParameters]) -> None:
    texts = [field.description for field in group.model_fields.values()]
    assert len(set(texts)) == len(texts)
