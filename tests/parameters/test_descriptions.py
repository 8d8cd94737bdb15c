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


def _name(group: type[SubParameters]) -> str:
    return f"{group.__module__}.{group.__qualname__}"


@pytest.fixture(scope="module")
def groups() -> list[type[SubParameters]]:
    """Every group of parameters that ships; all modules are imported for them."""
    for module in pkgutil.walk_packages(nip_astra.__path__, "nip_astra."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {cls for cls in _subclasses(SubParameters) if cls.__module__.startswith("nip_astra.")}
    return sorted(found, key=_name)


def test_all_groups_are_found(groups: list[type[SubParameters]]) -> None:
    assert {
        "nip_astra.experiment_settings.ExperimentSettings",
        "nip_astra.parameters.training.TrainingConfiguration",
        "nip_astra.trainers.ast.dpo.AstDpoTrainer.Parameters",
        "nip_astra.scenario_base.conversation.planted_failures.PlantedFailure",
    } <= {_name(group) for group in groups}


def test_every_group_of_parameters_has_a_docstring(groups: list[type[SubParameters]]) -> None:
    bare = [_name(group) for group in groups if not (group.__doc__ or "").strip().endswith(".")]
    assert bare == []


def test_every_parameter_has_a_docstring_of_its_own(groups: list[type[SubParameters]]) -> None:
    wrong = []
    for group in groups:
        texts = [field.description or "" for field in group.model_fields.values()]
        is_indented = any("\n    " in text for text in texts)
        if not all(map(str.strip, texts)) or is_indented or len(set(texts)) < len(texts):
            wrong.append(_name(group))
    assert wrong == []
