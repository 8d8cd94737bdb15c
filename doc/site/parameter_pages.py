"""Generate a page for every group of parameters from its fields."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic_core import PydanticUndefined

from nip_astra.built_ins import KINDS
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.conditions import ReadWhere
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.registry import ALL_REGISTRIES, Registry, find_registry
from nip_astra.resolving.resolution import SHARED_GROUPS
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
from nip_astra.trainers.solo_agent import SoloAgentTrainer

FOLDER = "reference/parameters"
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
CHAPTERS = (
    ("trainer", "Trainers"),
    ("scenario", "Kinds of scenario"),
    ("protocol_handler", "Protocols"),
    ("scorer", "Scorers"),
    ("reward_term", "Reward terms"),
    ("language_model", "Language models"),
    ("message_regressor", "Message regressors"),
    ("pretrained_model", "Image models"),
    ("rollout_analyser", "Rollout analysers"),
)
"""Kinds of registries in the order of the site; others follow."""


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes
    ----------
    chapter : str
        Heading in the navigation.
    path : str
        From the folder of the documentation.
    """

    chapter: str
    title: str
    path: str
    text: str


def parameter_pages() -> Iterator[Page]:
    """Every group of parameters: shared ones, then those of everything that is registered."""
    for kind in KINDS:
        find_registry(kind)
    readers = _Readers()
    yield _page("Shared groups", "experiment", HyperParameters, readers, prefix="")
    for name in (*SHARED_GROUPS, "base_run"):
        group = HyperParameters.model_fields[name].annotation
        assert isinstance(group, type)
        yield _page("Shared groups", name, group, readers, prefix=f"{name}.")
    yield _page("Shared groups", "settings", ExperimentSettings, readers, prefix="settings.")
    others = [kind for kind in ALL_REGISTRIES if kind not in dict(CHAPTERS)]
    unnamed = [(kind, f"{kind}s".replace("_", " ").capitalize()) for kind in others]
    for kind, chapter in (*CHAPTERS, *unnamed):
        registry = ALL_REGISTRIES[kind]
        for name in registry.names():
            component = registry.get(name)
            group = getattr(component, "Parameters", None)
            if isinstance(group, type) and issubclass(group, SubParameters):
                is_section = kind in ("trainer", "scenario", "protocol_handler")
                prefix = f"{name}." if is_section else ""
                yield _page(chapter, name, group, readers, prefix=prefix, component=component)


def _page(
    chapter: str,
    name: str,
    group: type[SubParameters],
    readers: _Readers,
    *,
    prefix: str,
    component: Any = None,
) -> Page:
    lines = [f"# `{name}`", ""]
    if component is not None:
        lines += [_paragraph(component.__doc__), ""]
    lines += [_paragraph(group.__doc__), ""]
    if component is not None and not prefix:
        lines += [f"Chosen by `_type: {name}`.", ""]
    paths = list(_paths(group, prefix))
    found = {readers.words(path) for path in paths}
    is_said = not prefix and component is not None
    if not is_said and len(found) == 1:
        lines += [f"Read by {found.pop()}.", ""]
    lines += _table(group, prefix, readers, by_trainer=not is_said and len(found) > 1)
    folder = chapter.lower().replace(" ", "-")
    return Page(chapter, name, f"{FOLDER}/{folder}/{name}.md", "\n".join(lines) + "\n")


def _paths(group: type[SubParameters], prefix: str, above: tuple[type, ...] = ()) -> Iterator[str]:
    """The paths of a group's fields and of those of the groups within it."""
    for name, field in group.model_fields.items():
        yield f"{prefix}{name}"
        inner = _group_in(field.annotation)
        if group is not HyperParameters and inner is not None and inner not in above:
            yield from _paths(inner, f"{prefix}{name}.", (*above, group))


def _table(
    group: type[SubParameters],
    prefix: str,
    readers: _Readers,
    *,
    by_trainer: bool,
    above: tuple[type, ...] = (),
) -> list[str]:
    """The fields of a group, and below them those of the groups within it."""
    head = ["parameter", "type", "default", "meaning"] + ["read by"] * by_trainer
    rows, below = [], []
    for name, field in group.model_fields.items():
        path = f"{prefix}{name}"
        inner = _group_in(field.annotation)
        cells = [
            f"`{path}`",
            _type_words(field.annotation, field.metadata),
            "below" if inner else _default(field),
            _meaning(field),
        ]
        if not prefix and inner is not None and group is HyperParameters:
            cells[2] = f"[its page]({name}.md)"
        elif inner is not None and inner not in above and not _is_chosen(field):
            below += ["", f"## `{path}`", "", _paragraph(inner.__doc__), ""]
            inside = (*above, group)
            below += _table(inner, f"{path}.", readers, by_trainer=by_trainer, above=inside)
        elif _is_chosen(field):
            cells[2] = _default(field)
        if by_trainer:
            cells.append(readers.words(path))
        rows.append(cells)
    if not rows:
        return ["It has no parameters."]
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + below


def _paragraph(text: str | None) -> str:
    """The first paragraph of a docstring."""
    return inspect.cleandoc(text or "").split("\n\n")[0]


def _meaning(field: Any) -> str:
    text = " ".join((field.description or "").split())
    where = [one for one in field.metadata if isinstance(one, ReadWhere)]
    text += "".join(f" *Read where `{one.path}` {one.words}.*" for one in where)
    return text.replace("|", "\\|")


def _group_in(annotation: Any) -> type[SubParameters] | None:
    """The group in a type: itself, optional, or the element of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, SubParameters):
        return annotation
    found = (_group_in(part) for part in typing.get_args(annotation))
    return next((one for one in found if one is not None), None)


def _is_chosen(field: Any) -> bool:
    """Whether `_type` selects the group."""
    return bool(_registries_in(field.annotation, field.metadata))


def _registries_in(annotation: Any, metadata: Any = ()) -> list[Any]:
    """The registry of a field whose group is selected by `_type`."""
    own = [one for one in metadata if hasattr(one, "get") and hasattr(one, "base")]
    if typing.get_origin(annotation) is typing.Annotated:
        own += _registries_in(typing.get_args(annotation)[0], annotation.__metadata__)
        return own
    return own + [one for part in typing.get_args(annotation) for one in _registries_in(part)]


def _type_words(annotation: Any, metadata: Any) -> str:
    bounds = [
        f"{sign} {getattr(one, name)}"
        for one in metadata
        for name, sign in BOUNDS.items()
        if getattr(one, name, None) is not None
    ]
    chosen = _registries_in(annotation, metadata)
    words = _chosen_words(chosen) if chosen else _words(annotation)
    return ", ".join([words, *bounds])


def _chosen_words(chosen: list[Any]) -> str:
    registry = getattr(chosen[0].get, "__self__", None)
    names = registry.names() if isinstance(registry, Registry) else []
    kind = registry.kind.replace("_", " ") if isinstance(registry, Registry) else "group"
    return f"{kind} by `_type`" + (f": {', '.join(f'`{name}`' for name in names)}" if names else "")


def _words(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(parts[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(part).strip(chr(34))}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in parts))
    if origin is list:
        return f"list of {_words(parts[0])}"
    if origin is dict:
        return f"{_words(parts[1])}, by name"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, SubParameters):
        return "group"
    return WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be given"
    if isinstance(value, SubParameters):
        plain = value.to_dict()
        return f"`_type: {plain['_type']}`" if "_type" in plain else "below"
    text = json.dumps(value, default=lambda one: one.to_dict(), ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|") if len(text) <= 80 else "a list, in the preset"


class _Readers:
    """Trainers that read each parameter."""

    def __init__(self) -> None:
        trainers, kinds = ALL_REGISTRIES["trainer"], ALL_REGISTRIES["scenario"]
        self.trainers = {name: trainers.get(name) for name in trainers.names()}
        self.kinds = {name: kinds.get(name) for name in kinds.names()}
        self.protocols = set(ALL_REGISTRIES["protocol_handler"].names())

    def words(self, path: str) -> str:
        """The trainers that read a parameter, or "every trainer"."""
        names = [name for name in self.trainers if self._reads(name, path)]
        if len(names) == len(self.trainers):
            return "every trainer"
        return ", ".join(f"`{name}`" for name in names) or "scenarios alone"

    def _reads(self, name: str, path: str) -> bool:
        trainer, section = self.trainers[name], path.partition(".")[0]
        if _is_in(path, getattr(trainer, "never_reads", ())):
            return False
        kinds = [kind for kind in self.kinds if self._plays(trainer, kind)]
        if section in SHARED_GROUPS:
            groups = trainer.parameter_groups
            return groups is None or any(
                _is_in(path, (*groups, *self.kinds[kind].parameter_groups)) for kind in kinds
            )
        if section in self.trainers:
            return section == name or section in trainer.sections_of_others
        if section in self.kinds:
            return section in kinds
        if section in self.protocols:
            return any(self.kinds[kind].uses_protocol for kind in kinds)
        return True

    def _plays(self, trainer: Any, kind: str) -> bool:
        if issubclass(trainer, (TensorDictRlTrainer, SoloAgentTrainer)):
            return bool(self.kinds[kind].uses_protocol)
        return not trainer.scenario_kinds or kind in trainer.scenario_kinds


def _is_in(path: str, groups: Any) -> bool:
    return any(fnmatchcase(path, group) or fnmatchcase(path, f"{group}.*") for group in groups)
