"""`HyperParameters`, its sections, and the sources of its values."""

from __future__ import annotations

import copy
import pickle

import pytest
import yaml

from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.parameters import HyperParameters
from nip_astra.version import __version__
from tests.kit.messages import says
from tests.parameters.groups import Circle, Drawing, Paint

BASE = {"trainer": "mine", "scenario": "here"}
PLAIN = HyperParameters.with_sections({})
"""Takes nothing from files, and any name of a trainer and scenario."""
MODEL = HyperParameters.with_sections({"paint": Paint, "drawing": Drawing})


def test_trainer_and_scenario_are_required_and_seed_zero_is_a_seed() -> None:
    assert PLAIN.from_dict(BASE).seed == 0
    assert PLAIN.from_dict(BASE | {"seed": 0}).to_dict()["seed"] == 0
    with pytest.raises(ParameterError) as caught:
        PLAIN.from_dict({})
    assert [fault.path for fault in caught.value.faults] == ["trainer", "scenario"]


def test_sections_are_fields_and_may_be_left_out_if_all_have_defaults() -> None:
    assert issubclass(MODEL, HyperParameters)
    params = MODEL.from_dict(BASE | {"drawing": {"shape": {"_type": "blob"}}})
    assert params.get("paint.layers") == 1
    assert params.get("drawing.title") == "untitled"
    with pytest.raises(ParameterError, match="drawing: "):
        MODEL.from_dict(BASE)
    with pytest.raises(ParameterError, match="paint: "):
        PLAIN.from_dict(BASE | {"paint": {}})


def test_equal_sections_give_the_same_class_in_any_order() -> None:
    one = HyperParameters.with_sections({"paint": Paint, "circle": Circle.Parameters})
    two = HyperParameters.with_sections({"circle": Circle.Parameters, "paint": Paint})
    three = HyperParameters.with_sections({"paint": Paint})
    assert one is two is three.with_sections({"circle": Circle.Parameters})
    assert one is not three


def test_written_and_copied_parameters_are_equal() -> None:
    params = MODEL.from_dict(BASE | {"drawing": {"shape": {"_type": "ring", "radius": 1e-7}}})
    # PyYAML reads 1e-07 as text, but writes it as 1.0e-07, which it reads as a number.
    assert MODEL.from_dict(yaml.safe_load(yaml.safe_dump(params.to_dict()))) == params
    for item in (params, PLAIN.from_dict(BASE)):
        unpickled = pickle.loads(pickle.dumps(item))
        for other in (copy.copy(item), copy.deepcopy(item), item.model_copy(), unpickled):
            assert other == item
            assert type(other) is type(item)


def test_a_section_may_have_any_identifier_that_is_not_taken() -> None:
    for name in ("class", "model", "model_size", "x", "T5", "import_"):
        model = HyperParameters.with_sections({name: Paint})
        params = model.from_dict(BASE | {name: {"layers": 2}})
        assert getattr(params, name).layers == params.to_dict()[name]["layers"] == 2
    taken = ("training", "seed", "get", "to_dict", "copy", "model_dump")
    for name in (*taken, "my-trainer", "", "_mine", "3d"):
        with pytest.raises(ConfigurationError, match=repr(name)):
            HyperParameters.with_sections({name: Paint})


@pytest.mark.parametrize("version", ["99.0.0", "0.999", "0.999.3", "new"])
def test_a_file_of_a_newer_or_malformed_version_is_refused(version: str) -> None:
    with pytest.raises(ParameterError) as caught:
        PLAIN.from_dict(BASE | {"package_version": version, "seed": -1})
    assert [fault.path for fault in caught.value.faults] == ["seed", "package_version"]
    assert says(caught.value.faults[1], __version__, f'"{version}"')
    assert (version in caught.value.faults[1].suggestion) is (version != "new")


def test_the_installed_version_is_recorded_also_for_older_files_and_a_newer_patch() -> None:
    patch = f"{__version__.rpartition('.')[0]}.999"
    for values in ({}, {"package_version": "0.0.9"}, {"package_version": patch}):
        assert PLAIN.from_dict(BASE | values).to_dict()["package_version"] == __version__
