"""All parameters of an experiment, and the JSON Schema of parameter files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, create_model, field_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.lazy import provided
from nip_astra.parameters.conditions import where
from nip_astra.parameters.conversion import convert, is_newer, release_of
from nip_astra.parameters.files import Layer, differences, merge_layers
from nip_astra.parameters.parameters_base import (
    MAX_WHOLE,
    CheckedName,
    PlainText,
    SubParameters,
    check_parameters_class,
    explicit_values,
)
from nip_astra.parameters.trainers import (
    BaseRunParameters,
    CommonPpoParameters,
    CommonProtocolParameters,
    MessageRegressionParameters,
    RlTrainerParameters,
    TextRlParameters,
    ZkProtocolParameters,
)
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.version import __version__

Sections = tuple[tuple[str, type[SubParameters]], ...]


class HyperParameters(SubParameters):
    """All parameters of an experiment.

    The groups here are shared by all trainers. The parameters of one trainer, one kind of scenario
    and one protocol are in sections with their names.

    `HyperParameters(trainer=..., ...)` resolves as on the command line: the named components
    determine the sections, and values that are not given come from the scenario and the preset.
    Groups and sections are objects or mappings. The same holds for `from_dict`. A class from
    `with_sections` takes nothing from files.

    Raises
    ------
    UnknownNameError
        If the trainer, scenario or protocol is unknown.
    ParameterError
        With every fault, including values that nothing in the run reads.
    """

    _sections: ClassVar[Sections] = ()
    _plain_class: ClassVar[type[HyperParameters] | None] = None

    trainer: CheckedName
    """Registered name of the trainer."""
    scenario: str
    """Name of a folder in scenarios/, or the path of a folder with a scenario.yaml."""
    seed: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Root seed of all random numbers."""
    training: TrainingConfiguration = TrainingConfiguration()
    """Optimisation of language models."""
    interaction_protocol: CheckedName | None = None
    """Registered name of the protocol, for scenarios whose agents play one."""
    protocol_common: CommonProtocolParameters = CommonProtocolParameters()
    """Parameters shared by all interaction protocols."""
    zk_protocol: Annotated[ZkProtocolParameters, where("protocol_common.zero_knowledge", True)] = (
        ZkProtocolParameters()
    )
    """The zero-knowledge wrapper of protocols."""
    rl: RlTrainerParameters = RlTrainerParameters()
    """Reinforcement learning of agents that play a protocol."""
    ppo: CommonPpoParameters = CommonPpoParameters()
    """Proximal policy optimisation of agents that play a protocol."""
    text_rl: TextRlParameters = TextRlParameters()
    """Training of chat models that play a protocol."""
    message_regression: MessageRegressionParameters = MessageRegressionParameters()
    """A probe that tests whether provers' messages reveal the label."""
    base_run: BaseRunParameters = BaseRunParameters()
    """A finished run to build on."""
    plugins: list[CheckedName] = []
    """Python files or modules to import first; they may register names."""
    custom_trainer_module_path: CheckedName | None = None
    """Python file, relative to the parameter file, with a custom trainer class."""
    custom_trainer_class_name: CheckedName | None = None
    """Name of that class; it is registered under the name in `trainer`."""
    package_version: PlainText = __version__
    """Version that wrote the file. An older file is converted, a newer one refused."""

    def __new__(cls, /, **values: Any) -> Self:
        if cls is not HyperParameters or not values:
            return super().__new__(cls)
        return _completed(values)  # type: ignore[return-value]  # an object of a subclass

    def __init__(self, /, **values: Any) -> None:
        if _GIVEN not in vars(self):
            super().__init__(**values)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as on SubParameters'

    def given(self) -> dict[str, Any]:
        """Return the plain values that were set explicitly, not by files or defaults."""
        if _GIVEN not in vars(self):
            values: dict[str, Any] = explicit_values(self)
            return values
        changed = differences(self.to_dict(), vars(self)[_WHOLE])
        layers = [Layer("given", vars(self)[_GIVEN]), Layer("changed", changed)]
        return merge_layers(layers, resolve=False)[0]

    @field_validator("package_version")
    @classmethod
    def _is_readable(cls, version: str) -> str:
        if release_of(version) is None:
            raise PydanticCustomError("version", "is not a version such as {here}", {"here": _HERE})
        if is_newer(version):
            raise PydanticCustomError(
                "version",
                "was written by a newer nip_astra than the installed {here}",
                {"here": _HERE, "hint": f"Install nip_astra {version}."},
            )
        return version

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, sources: Mapping[str, str] = {}) -> Self:
        """Validate plain values; those of an older version are converted first."""
        converted = convert(values, source=sources.get("package_version") or "the parameters")
        if cls is HyperParameters and converted:
            return cls(**converted)
        return super().from_dict(converted, sources=sources)

    @classmethod
    def with_sections(cls, sections: Mapping[str, type[SubParameters]]) -> type[HyperParameters]:
        """Return a subclass with a field for each section; equal sections give the same class.

        A section whose fields all have defaults may be left out of a file.
        """
        taken = [name for name in sections if hasattr(cls, name) or name in cls.model_fields]
        wrong = [name for name in sections if not name.isidentifier() or name.startswith("_")]
        if taken or wrong:
            name = (taken or wrong)[0]
            reason = "is reserved" if taken else "is not an identifier"
            raise ConfigurationError(
                f"no section of the hyper-parameters can be named {name!r}, which {reason}. "
                "Register the trainer or scenario kind under another name: letters, digits and "
                "underscores, starting with a letter."
            )
        for name, section in sections.items():
            check_parameters_class(section, SubParameters, name)
        every_section = dict(cls._sections) | dict(sections)
        return _sectioned(cls._plain_class or cls, tuple(sorted(every_section.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        # A class with sections is created at run time, so pickle cannot find it by name.
        cls = type(self)
        sections = None if cls._plain_class is None else cls._sections
        return _blank, (cls._plain_class or cls, sections), self.__getstate__()


_HERE = __version__
_GIVEN, _WHOLE = "_given", "_whole"
"""Attributes for the given values of an object, and for all its initial values."""


def _completed(values: Mapping[str, Any]) -> HyperParameters:
    """Return hyper-parameters with these values, completed as for a run."""
    given = convert(explicit_values(values), source="the parameters")
    # Resolution is a higher layer than this one.
    hyper_params: HyperParameters = provided("resolve_experiment")(hyper_params=given).hyper_params
    # Not a field: pydantic copies and pickles it, but does not compare it.
    vars(hyper_params).update({_GIVEN: given, _WHOLE: hyper_params.to_dict()})
    return hyper_params


@lru_cache(maxsize=256)
def _sectioned(base: type[HyperParameters], sections: Sections) -> type[HyperParameters]:
    fields: dict[str, Any] = {}
    for name, section in sections:
        is_optional = not any(field.is_required() for field in section.model_fields.values())
        summary = (section.__doc__ or name).strip().splitlines()[0]
        fields[name] = (
            section,
            Field(default_factory=section, description=summary)
            if is_optional
            else Field(description=summary),
        )
    model = create_model(
        "HyperParameters", __base__=base, __module__=__name__, __doc__=base.__doc__, **fields
    )
    model._sections = sections
    model._plain_class = base
    return model


def _blank(base: type[HyperParameters], sections: Sections | None) -> HyperParameters:
    """Create an instance of the class with these sections, to be filled by unpickling."""
    cls = base if sections is None else base.with_sections(dict(sections))
    return cls.__new__(cls)


DIALECT = "http://json-schema.org/draft-07/schema#"
"""Newest JSON Schema dialect that all editors read."""
DEFINITIONS = "definitions"
REFERENCE = {
    "type": "string",
    "pattern": r"\$\{.+\}|^\?\?\?$",
    "description": "${path.to.parameter}, whose value it takes; ??? must be given later.",
}
HYDRA_DEFAULTS = (
    "Files beside this one that it is merged with, in order, without .yaml; _self_ is this one."
)
EXTENDS = "Another file, relative to this one, whose values hold unless this one sets them."
SETTINGS = "Device, tracking and paths of the run; the command line wins."
SECTION_OF_A_PLUGIN = {"type": "object", "description": "The section of a plug-in."}
_KEPT_BESIDE = ("description", "default")


def schema_of_files(
    model: type[HyperParameters], known: Mapping[str, Sequence[str]], *, is_open: bool
) -> dict[str, Any]:
    """Return the JSON Schema of files that `model` validates once they are complete.

    `known` has the names that an editor proposes, by top-level parameter. With `is_open`, unknown
    groups are allowed, as sections of plug-ins.
    """
    schema, settings = (
        one.model_json_schema(schema_generator=_Generator) for one in (model, ExperimentSettings)
    )
    definitions = schema.pop("$defs", {}) | settings.pop("$defs", {})
    definitions["ExperimentSettings"] = settings
    properties = schema["properties"]
    for name, values in known.items():
        others = properties[name].get("anyOf", [{"type": "string"}])
        properties[name]["anyOf"] = [{"enum": list(values)}, *others]
    for group in (schema, *definitions.values()):
        _describe(group, definitions)
    # The installed version is not the version of a file.
    del properties["package_version"]["default"]
    properties["settings"] = {"$ref": "#/$defs/ExperimentSettings", "description": SETTINGS}
    files = _loosened(schema)
    files["properties"] |= {
        "extends": {"type": "string", "description": EXTENDS},
        "defaults": {"type": "array", "items": {"type": "string"}, "description": HYDRA_DEFAULTS},
    }
    files["additionalProperties"] = SECTION_OF_A_PLUGIN if is_open else False
    files[DEFINITIONS] = {name: _loosened(one) for name, one in sorted(definitions.items())}
    files[DEFINITIONS]["Reference"] = REFERENCE
    return {"$schema": DIALECT, "title": "nip_astra parameter file", **files}


class _Generator(GenerateJsonSchema):
    """Omits fields that are not stored, and requires none: another file may set them."""

    def field_is_present(self, field: Any) -> bool:
        return not field.get("serialization_exclude", False)

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False


def _describe(group: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    """Restore the descriptions that pydantic drops if a class has the same."""
    for one in group.get("properties", {}).values():
        reference = one.get("$ref", "").rpartition("/")[2]
        if "description" not in one and "description" in definitions.get(reference, {}):
            one["description"] = definitions[reference]["description"]


def _loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a file, which need not be complete."""
    loose = {key: value for key, value in schema.items() if key not in ("title", "required")}
    if "description" in loose:
        loose["description"] = " ".join(loose["description"].split())
    if "$ref" in loose:
        loose["$ref"] = loose["$ref"].replace("$defs", DEFINITIONS)
    for key in ("properties", "patternProperties"):
        if key in loose:
            loose[key] = {name: _value(one) for name, one in loose[key].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(loose.get(key), Mapping):
            loose[key] = _value(loose[key])
    for key in ("anyOf", "oneOf"):
        if key in loose:
            loose["anyOf"] = [_loosened(one) for one in loose[key]]
    loose.pop("oneOf", None)
    return loose


def _value(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, which may be a reference to another parameter."""
    loose = _loosened(schema)
    if isinstance(loose.get("default"), Mapping):
        del loose["default"]  # Its parts have descriptions.
    beside = {key: loose.pop(key) for key in _KEPT_BESIDE if key in loose}
    kinds = loose.pop("anyOf", None) or [loose]
    if {"type": "string"} in kinds or not any(kinds):
        return {**beside, "anyOf": kinds} if len(kinds) > 1 else {**beside, **kinds[0]}
    # A group with numbers as names changes single elements of a list.
    kinds += [
        {
            "type": "object",
            "patternProperties": {"^[0-9]+$": kind.get("items", {})},
            "additionalProperties": False,
        }
        for kind in kinds
        if kind.get("type") == "array"
    ]
    return {**beside, "anyOf": [*kinds, {"$ref": f"#/{DEFINITIONS}/Reference"}]}
