"""Each parameter of the package is read, documented, and of a type that files support."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

import nip_astra
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.parameters_base import PolymorphicParameters, SubParameters

ROOT = Path(nip_astra.__file__).parent
# In files for the next version of the package.
NOT_READ = {"package_version"}
# Groups that need one of several fields.
INCOMPLETE = {"OpenEnvTask.Parameters"}


def subclasses_of(cls: type[SubParameters]) -> set[type[SubParameters]]:
    below = set(cls.__subclasses__())
    return below.union(*(subclasses_of(item) for item in below))


@functools.cache
def every_group() -> list[type[SubParameters]]:
    for module in pkgutil.walk_packages([str(ROOT)], "nip_astra."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Plug-ins loaded by other tests have modules whose names only begin alike.
    groups = [
        cls for cls in subclasses_of(SubParameters) if cls.__module__.startswith("nip_astra.")
    ]
    # Sections have the names of trainers and scenario kinds, which no class of a file has.
    return sorted((cls for cls in groups if not vars(cls).get("_sections")), key=str)


def every_field() -> list[tuple[type[SubParameters], str, FieldInfo]]:
    return [(cls, name, field) for cls in every_group() for name, field in cls.model_fields.items()]


def test_every_parameter_is_read_by_some_module() -> None:
    read: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    fields = every_field()
    assert len(fields) > 50
    unread = {f"{cls}.{name}" for cls, name, _ in fields if name not in read | NOT_READ}
    assert sorted(unread) == []


def test_every_group_and_parameter_has_a_docstring_of_its_own() -> None:
    wrong = []
    for group in every_group():
        texts = [field.description or "" for field in group.model_fields.values()]
        is_indented = any("\n    " in text for text in texts)
        is_complete = (group.__doc__ or "").strip().endswith(".") and all(map(str.strip, texts))
        if not is_complete or is_indented or len(set(texts)) < len(texts):
            wrong.append(group)
    assert wrong == []


def test_every_group_whose_fields_have_defaults_is_valid_and_equals_that_of_its_dict() -> None:
    complete = [
        cls
        for cls in every_group()
        if cls.__qualname__ not in INCOMPLETE
        and not any(field.is_required() for field in cls.model_fields.values())
    ]
    assert len(complete) > 3
    for cls in complete:
        group = cls()
        assert cls.from_dict(group.to_dict()) == group


def test_every_group_has_a_json_schema_and_types_of_files() -> None:
    for cls in every_group():
        if not issubclass(cls, ExperimentSettings):  # its runtime fields have no JSON
            assert cls.model_json_schema()["type"] == "object"

    def is_of_files(annotation: Any) -> bool:
        return not any(w in str(annotation).lower() for w in ("tuple", "path", "set[", "enum"))

    wrong = [f"{cls}.{name}" for cls, name, field in every_field()
             if not field.exclude and not is_of_files(field.annotation)]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("cls", [SubParameters, PolymorphicParameters])
def test_the_bases_are_strict_closed_and_frozen(cls: type[SubParameters]) -> None:
    expected = {"strict": True, "extra": "forbid", "frozen": True}
    assert expected.items() <= cls.model_config.items()
