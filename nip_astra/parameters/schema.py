"""The JSON Schema of parameter files, for editors.

A file may hold part of any group, extend another file, refer to parameters by `${a.b}`, and change
single elements of a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The newest dialect that all editors read."""
DEFINITIONS = "definitions"
REFERENCE = {
    "type": "string",
    "pattern": r"\$\{.+\}|^\?\?\?$",
    "description": "${path.to.parameter}, whose value it takes; ??? must be given later.",
}
EXTENDS = "Another file, relative to this one, whose values hold unless this one sets them."
SETTINGS = "Device, tracking and paths of the run; the command line wins."
SECTION_OF_A_PLUGIN = {"type": "object", "description": "The section of a plug-in."}
_KEPT_BESIDE = ("description", "default")


def schema_of_files(
    model: type[HyperParameters], known: Mapping[str, Sequence[str]], *, is_open: bool
) -> dict[str, Any]:
    """The JSON Schema of files that `model` validates once they are complete.

    `known` has names that an editor proposes, by top-level parameter. With `is_open`, unknown
    groups pass, as sections of plug-ins.
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
    # The version that is installed says nothing about a file.
    del properties["package_version"]["default"]
    properties["settings"] = {"$ref": "#/$defs/ExperimentSettings", "description": SETTINGS}
    files = _loosened(schema)
    files["properties"] |= {"extends": {"type": "string", "description": EXTENDS}}
    files["additionalProperties"] = SECTION_OF_A_PLUGIN if is_open else False
    files[DEFINITIONS] = {name: _loosened(one) for name, one in sorted(definitions.items())}
    files[DEFINITIONS]["Reference"] = REFERENCE
    return {"$schema": DIALECT, "title": "nip_astra parameter file", **files}


class _Generator(GenerateJsonSchema):
    """Leaves out fields that are not stored, and requires none: another file may set them."""

    def field_is_present(self, field: Any) -> bool:
        return not field.get("serialization_exclude", False)

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False


def _describe(group: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
    """Restore the descriptions that pydantic leaves out if a class has the same."""
    for one in group.get("properties", {}).values():
        reference = one.get("$ref", "").rpartition("/")[2]
        if "description" not in one and "description" in definitions.get(reference, {}):
            one["description"] = definitions[reference]["description"]


def _loosened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a file, which need not be complete."""
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
    """The schema of a value at a name or in a list, which may be a reference to another."""
    loose = _loosened(schema)
    if isinstance(loose.get("default"), Mapping):
        del loose["default"]  # Its parts have it.
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
