"""`HyperParameters`, its sections, and what it is read back from."""

from __future__ import annotations

import copy
import pickle

import pytest
import yaml

from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.version import __version__
from tests.kit.messages import says
from tests.parameters.groups import Circle, Drawing, Paint

BASE = {"trainer": "mine", "scenario": "here"}
PLAIN = HyperParameters.with_sections({})
"""Takes nothing from files, and any name of a trainer and scenario."""


def test_seed_zero_is_a_seed() -> None:
    assert PLAIN.from_dict(BASE).seed == 0
    assert PLAIN.from_dict(BASE | {"seed": 0}).to_dict()["seed"] == 0


def test_a_trainer_and_a_scenario_are_required() -> None:
    with pytest.raises(ParameterError) as caught:
        PLAIN.from_dict({})
    assert [fault.path for fault in caught.value.faults] == ["trainer", "scenario"]


def test_sections_are_fields_and_may_be_left_out_where_all_have_defaults() -> None:
    model = HyperParameters.with_sections({"paint": Paint, "drawing": Drawing})
    assert issubclass(model, HyperParameters)
    params = model.from_dict(BASE | {"drawing": {"shape": {"_type": "blob"}}})
    assert params.get("paint.layers") == 1
    assert params.get("drawing.title") == "untitled"
    with pytest.raises(ParameterError, match="drawing: is required"):
        model.from_dict(BASE)


def test_a_section_that_was_not_added_is_an_unknown_parameter() -> None:
    with pytest.raises(ParameterError, match="paint: unknown parameter"):
        PLAIN.from_dict(BASE | {"paint": {}})


def test_equal_sections_give_the_same_class_in_any_order() -> None:
    one = HyperParameters.with_sections({"paint": Paint, "circle": Circle.Parameters})
    two = HyperParameters.with_sections({"circle": Circle.Parameters, "paint": Paint})
    three = HyperParameters.with_sections({"paint": Paint}).with_sections(
        {"circle": Circle.Parameters}
    )
    assert one is two is three
    assert one is not HyperParameters.with_sections({"paint": Paint})


def test_what_was_written_is_read_back_equal() -> None:
    model = HyperParameters.with_sections({"paint": Paint, "drawing": Drawing})
    params = model.from_dict(
        BASE
        | {
            "training": {"lr": 1e-5, "max_grad_norm": None},
            "drawing": {"shape": {"_type": "ring", "radius": 1e-7}, "names": ["a"]},
            "plugins": ["x.py"],
        }
    )
    # PyYAML reads 1e-05 as text, but writes it as 1.0e-05, which it reads as a number.
    assert model.from_dict(yaml.safe_load(yaml.safe_dump(params.to_dict()))) == params


def test_copies_are_equal() -> None:
    params = HyperParameters.with_sections({"paint": Paint}).from_dict(BASE)
    assert copy.copy(params) == copy.deepcopy(params) == params.model_copy() == params


def test_sections_survive_pickling() -> None:
    model = HyperParameters.with_sections({"paint": Paint})
    params = model.from_dict(BASE | {"paint": {"layers": 3}})
    again = pickle.loads(pickle.dumps(params))
    assert again == params
    assert type(again) is model
    plain = PLAIN.from_dict(BASE)
    assert pickle.loads(pickle.dumps(plain)) == plain


@pytest.mark.parametrize("name", ["class", "model", "model_size", "x", "T5", "import_"])
def test_a_section_may_have_any_identifier_that_is_not_taken(name: str) -> None:
    model = HyperParameters.with_sections({name: Paint})
    params = model.from_dict(BASE | {name: {"layers": 2}})
    assert getattr(params, name).layers == 2
    assert params.to_dict()[name]["layers"] == 2


@pytest.mark.parametrize("name", ["training", "seed", "get", "to_dict", "copy", "model_dump"])
def test_a_section_named_like_what_hyper_parameters_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        HyperParameters.with_sections({name: Paint})
    assert says(caught.value, repr(name), "reserved", "another name")


@pytest.mark.parametrize("name", ["my-trainer", "", "_mine", "3d"])
def test_a_section_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an identifier"):
        HyperParameters.with_sections({name: Paint})


def test_the_schema_has_the_sections_with_their_summaries() -> None:
    model = HyperParameters.with_sections({"paint": Paint, "drawing": Drawing})
    schema = model.model_json_schema()
    assert model.model_fields["paint"].description == "How it is painted."
    assert schema["$defs"]["Paint"]["description"] == "How it is painted."
    assert schema["required"] == ["trainer", "scenario", "drawing"]
    assert set(schema["properties"]) == set(model.model_fields)
    assert set(schema["$defs"]) >= {"Paint", "Drawing", "TrainingConfiguration"}


def test_the_installed_version_is_recorded() -> None:
    assert PLAIN.from_dict(BASE).to_dict()["package_version"] == __version__


@pytest.mark.parametrize("version", ["99.0.0", "0.999", "0.999.3"])
def test_a_file_of_a_newer_version_is_refused_with_the_reason(version: str) -> None:
    with pytest.raises(ParameterError) as caught:
        PLAIN.from_dict(BASE | {"package_version": version, "seed": -1})
    assert [fault.path for fault in caught.value.faults] == ["seed", "package_version"]
    assert says(caught.value.faults[1], "newer", __version__, f'"{version}"', "Install", version)


def test_a_newer_patch_of_the_same_release_is_read() -> None:
    version = f"{__version__.rpartition('.')[0]}.999"
    params = PLAIN.from_dict(BASE | {"package_version": version})
    assert params.package_version == __version__


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ParameterError, match="package_version: is not a version such as"):
        PLAIN.from_dict(BASE | {"package_version": "new"})


def test_sections_may_be_any_group_of_parameters() -> None:
    class Empty(SubParameters):
        """Holds nothing."""

    params = HyperParameters.with_sections({"empty": Empty}).from_dict(BASE)
    assert params.to_dict()["empty"] == {}
    assert params.training == TrainingConfiguration()
