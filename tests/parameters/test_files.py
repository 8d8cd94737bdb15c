"""Layers are read, merged and validated, and every value keeps its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nip_astra.errors import ConfigurationError, ParameterError, ParameterFault
from nip_astra.parameters.files import (
    Layer,
    assignment,
    flatten,
    merge_layers,
    parse_overrides,
    read_yaml_layers,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.resolving.resolution import ResolvedParameters, validate_layers
from nip_astra.tracking.run_directory import RunDirectory
from tests.kit.messages import says
from tests.parameters.groups import Drawing, Paint

Write = Callable[[str, str], Path]
BASE = Layer("base.yaml", {"trainer": "mine", "scenario": "here"})
MODEL = HyperParameters.with_sections({"paint": Paint})
DRAWING = HyperParameters.with_sections({"drawing": Drawing})


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_numbers_in_files_are_numbers(write: Write) -> None:
    text = "a: 1e-5\nb: 1E5\nc: .5\nd: 3\ne: '1e-5'\nf: null\ng: [1, 2.0, x]\nh: true\ni: {}\n"
    values, _ = merge_layers(read_yaml_layers(write("a.yaml", text), source="a"))
    expected = {"a": 1e-5, "b": 1e5, "c": 0.5, "d": 3, "e": "1e-5", "f": None}
    assert values == expected | {"g": [1, 2.0, "x"], "h": True, "i": {}}
    assert read_yaml_layers(write("b.yaml", ""), source="a") == [Layer("a", {})]


def test_names_that_yaml_reads_as_other_types_are_text(write: Write) -> None:
    (layer,) = read_yaml_layers(write("top.yaml", "on: 1\n2: 3\n"), source="top")
    assert layer.values == {"True": 1, "2": 3}


def test_a_file_overrides_the_files_it_extends_each_with_its_own_source(write: Write) -> None:
    write("base.yaml", "seed: 1\npaint: {gloss: 0.1, layers: 2}\n")
    write("middle.yaml", "extends: base.yaml\npaint: {gloss: 0.2}\n")
    path = write("sub/top.yaml", "extends: ../middle.yaml\nseed: 3\n")
    layers = read_yaml_layers(path, source="preset")
    base, middle = "preset <- base.yaml", "preset <- middle.yaml"
    assert [layer.source for layer in layers] == [base, middle, "preset"]
    values, sources = merge_layers(layers)
    assert values == {"seed": 3, "paint": {"gloss": 0.2, "layers": 2}}
    expected = {"seed": "preset", "paint": base, "paint.gloss": middle, "paint.layers": base}
    assert sources == expected


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        ({}, ["top.yaml", "no such file"]),
        ({"top.yaml": "extends: nope.yaml\n"}, ["nope.yaml", "preset extends", "no such file"]),
        ({"top.yaml": "extends: b.yaml\n", "b.yaml": "extends: top.yaml\n"}, ["extends itself"]),
        *(({"top.yaml": f"extends: {one}\n"}, ["extends", one]) for one in ("[b.yaml]", "3")),
        ({"top.yaml": "extends: ''\n"}, ["extends"]),
        ({"top.yaml": "a: ["}, ["line 1"]),
        ({"top.yaml": "a: 1\na: 2\n"}, ["duplicate key a"]),
        ({"top.yaml": "- 1\n"}, ["a list"]),
        ({"top.yaml": "3\n"}, ["YAML mapping"]),
        ({"top.yaml": "\ufeff\x00"}, ["YAML mapping"]),
    ],
)
def test_a_file_that_is_missing_or_no_mapping_is_refused(
    write: Write, tmp_path: Path, files: dict[str, str], facts: list[str]
) -> None:
    for name, text in files.items():
        write(name, text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    bytes_, top = tmp_path / "bytes.yaml", tmp_path / "top.yaml"
    for path, expected in ((top, facts), (bytes_, [bytes_]), (tmp_path, [tmp_path])):
        with pytest.raises(ConfigurationError) as caught:
            read_yaml_layers(path, source="preset")
        assert says(str(caught.value).replace("'", ""), *expected)


def test_assignments_are_read_as_yaml_from_a_list_a_mapping_or_a_text() -> None:
    given = ["a.b=1e-5", "a.c=null", "a.d=[1, x]", "e={f: true}"]
    given += ["g='1e-5'", "h=x=y", "i=", "a.b=2"]
    expected = {"a": {"b": 2, "c": None, "d": [1, "x"]}, "e": {"f": True}}
    expected |= {"g": "1e-5", "h": "x=y", "i": None}
    assert parse_overrides(given) == Layer("--set", expected)
    values = {"a.b": 1e-5, "a.c": None, "d": ["ü", Path("x")], "e.f": {"_type": "g"}, "h": "1e-5"}
    expected = {"a": {"b": 1e-5, "c": None}, "d": ["ü", "x"], "e": {"f": {"_type": "g"}}}
    expected |= {"h": "1e-5", "i": "\x7f"}
    assert parse_overrides(values | {"i": "\x7f"}).values == expected
    assert parse_overrides("training.lr=1e-4").values == {"training": {"lr": 1e-4}}
    of_numpy = {"a": np.int64(3), "b": [np.float32(0.5), np.bool_(True)], "c": np.arange(2)}
    plain_values = {"a": 3, "b": [0.5, True], "c": [0, 1]}
    assert parse_overrides(of_numpy).values == plain_values
    assert Layer.literal("here", of_numpy).values == plain_values


@pytest.mark.parametrize(
    "value",
    [
        *(
            "a",
            "a: b",
            "1",
            "1e-5",
            "true",
            "null",
            "",
            " x ",
            "[1",
            "a # b",
            "x=y",
            "é\n\t'\"\x7f",
        ),
        *("${x}", "\\${x}", "a\\b", "~", "- a", "@x", "2020-01-01"),
        *(None, True, 3, 0.1, [1, "a: b", "${q}"], [], {}),
    ],
)
def test_an_assignment_gives_the_value_it_was_made_of(value: Any) -> None:
    values, _ = merge_layers([parse_overrides([assignment("a.b", value)])])
    assert values == {"a": {"b": value}}


def test_all_wrong_assignments_are_reported_at_once() -> None:
    wrong = {"training.lr": "training.lr", "=3": "=3", "a..b": "a..b=1", "a": "a=["}
    with pytest.raises(ParameterError) as caught:
        parse_overrides([*wrong.values(), "seed=1"])
    faults = {fault.path: fault.given for fault in caught.value.faults}
    assert faults == {path: repr(given) for path, given in wrong.items()}


# ---- layers


def validated(
    model: type[HyperParameters], *layers: dict[str, Any], by: Sequence[str] = ()
) -> ResolvedParameters:
    """The parameters of layers with the sources "file 0", "file 1" and so on, and of overrides."""
    files = [Layer(f"file {number}", values) for number, values in enumerate(layers)]
    return validate_layers([BASE, *files, parse_overrides(by)], model)


def faults_of(
    model: type[HyperParameters], *layers: dict[str, Any], by: Sequence[str] = ()
) -> dict[str, ParameterFault]:
    with pytest.raises(ParameterError) as caught:
        validated(model, *layers, by=by)
    return {fault.path: fault for fault in caught.value.faults}


def test_a_later_layer_wins_value_by_value() -> None:
    first, second = {"paint": {"gloss": 0.1, "layers": 2}, "seed": 1}, {"paint": {"gloss": 0.9}}
    hyper_params, sources, _ = validated(MODEL, first, second, by=["training.lr=1e-3"])
    assert (hyper_params.get("paint.gloss"), hyper_params.get("paint.layers")) == (0.9, 2)
    assert hyper_params.training.lr == 1e-3
    expected = {"paint.gloss": "file 1", "paint.layers": "file 0", "seed": "file 0"}
    expected |= {"paint.colour": "default", "training.lr": "--set", "trainer": "base.yaml"}
    assert sources.items() >= expected.items()
    # Every value has a source.
    assert set(sources) == dict(flatten(hyper_params.to_dict())).keys()


LIST = {"more": [{"_type": "circle", "radius": 1}, {"_type": "ring", "radius": 2}]}


def test_an_element_of_a_list_is_changed_by_its_number() -> None:
    file = Layer("file", {**deepcopy(LIST), "sizes": [[1, 2], [3]]})
    later = parse_overrides(["more.1.radius=5", "sizes.0.1=7", "more.0._type=ring", "more.0.a=2"])
    values, sources = merge_layers([file, later])
    assert values["more"] == [{"_type": "ring", "a": 2}, {"_type": "ring", "radius": 5}]
    assert values["sizes"] == [[1, 7], [3]]
    assert (sources["more"], sources["more.1.radius"]) == ("file, --set", "--set")
    assert file.values["more"] == LIST["more"], "layers stay as they are"
    sources = merge_layers([file, later, Layer("whole", {"more": []})])[1]
    assert sources == {"more": "whole", "sizes": "file, --set", "sizes.0.1": "--set"}


def test_an_element_beyond_the_end_is_reported_with_the_valid_range() -> None:
    file = Layer("file", {**LIST, "empty": []})
    overrides = ["more.2.radius=5", "empty.0=1", "more.1.radius=5"]
    with pytest.raises(ParameterError) as caught:
        merge_layers([file, parse_overrides(overrides)])
    first, second = caught.value.faults
    assert says(first, "more.2", "list of 2", '{"radius": 5}', "--set", "0 to 1", "more")
    assert says(second, "empty.0", "list of 0", "given 1", "--set", "empty")


class Row(SubParameters):
    width: int = 1


class Listed(HyperParameters):
    rows: list[Row] = [Row(), Row(width=2)]
    more: list[int] | None = None


def test_elements_of_a_default_are_changed_too() -> None:
    result = validated(Listed, by=["rows.1.width=3"])
    assert [row.width for row in result.hyper_params.rows] == [1, 3]
    assert result.sources["rows"] == "default, --set"
    assert list(faults_of(Listed, by=["rows.2.width=3"])) == ["rows.2"]
    (fault,) = faults_of(Listed, by=["more.0=3"]).values()
    assert says(fault, "more: ", '{"0": 3}', "--set", "whole list")


def test_another_type_replaces_a_polymorphic_part_as_a_whole() -> None:
    drawing = {"drawing": {"shape": {"_type": "circle", "radius": 2.0, "num_segments": 7}}}
    blob = validated(DRAWING, drawing, by=["drawing.shape._type=blob"])
    assert blob.hyper_params.get("drawing").to_dict()["shape"] == {"_type": "blob"}
    assert blob.sources["drawing.shape._type"] == "--set"
    same = validated(DRAWING, drawing, by=["drawing.shape.radius=3"])
    assert same.hyper_params.get("drawing.shape.num_segments") == 7


def test_null_takes_a_part_away_together_with_the_sources_of_its_values() -> None:
    wheel = {"shape": {"_type": "blob"}, "wheel": {"radius": 1.0, "num_segments": 3}}
    gone = validated(DRAWING, {"drawing": wheel}, by=["drawing.wheel=null"])
    assert gone.hyper_params.get("drawing.wheel") is None
    assert gone.sources["drawing.wheel"] == "--set"
    none, again = {"drawing": {"wheel": None}}, {"drawing": {"wheel": {"radius": 2}}}
    back = validated(DRAWING, {"drawing": wheel}, none, again)
    assert back.hyper_params.get("drawing.wheel.num_segments") == 32
    assert back.sources["drawing.wheel.num_segments"] == "default"
    assert back.sources["drawing.wheel.radius"] == "file 2"


def test_all_faults_of_all_layers_are_reported_at_once_with_their_sources() -> None:
    wrong = {"training": {"lr": "1e-5", "batch_sise": 4}}
    faults = faults_of(MODEL, wrong, by=["paint.gloss=2", "lr=1", "sead=1", "seed=null"])
    of_set = {"paint.gloss": "2", "lr": "1", "sead": "1", "seed": "null"}
    assert {path: (fault.given, fault.source) for path, fault in faults.items()} == {
        "training.lr": ('"1e-5"', "file 0"),
        "training.batch_sise": ("4", "file 0"),
        **{path: (given, "--set") for path, given in of_set.items()},
    }
    assert says(faults["lr"].suggestion, "'training.lr'", "'rl.lr'")
    assert says(faults["training.batch_sise"].suggestion, "'training.minibatch_size'")


def test_a_parameter_may_refer_to_another_of_any_layer() -> None:
    values = {"training": {"num_warmup_steps": "${training.minibatch_size}"}}
    resolved = validated(MODEL, values, by=["training.minibatch_size=12"])
    assert resolved.hyper_params.training.num_warmup_steps == 12
    assert resolved.sources["training.num_warmup_steps"] == "file 0"
    assert merge_layers([Layer("a", values)], resolve=False)[0] == values
    with pytest.raises(ConfigurationError) as caught:
        validated(MODEL, by=["paint.gloss=${paint.shine}"])
    assert says(caught.value, "paint.gloss (from --set)", "'paint.shine'", "${", "\\${")


def test_a_value_that_a_file_leaves_open_must_be_given() -> None:
    values = {"paint": {"label": "???", "gloss": "???"}, "seed": -1}
    faults = faults_of(MODEL, values)
    expected = {"paint.label": "'???'", "paint.gloss": "'???'", "seed": "-1"}
    assert {path: fault.given for path, fault in faults.items()} == expected
    assert {fault.source for fault in faults.values()} == {"file 0"}
    assert says(faults["paint.label"].suggestion, "--set paint.label=VALUE")
    given = validated(MODEL, values, by=["paint.label=x", "paint.gloss=0", "seed=1"])
    assert given.hyper_params.get("paint.label") == "x"
    assert list(faults_of(MODEL, {"paint": {"label": "???"}})) == ["paint.label"]


def test_a_resolved_file_in_a_run_directory_gives_equal_parameters(tmp_path: Path) -> None:
    names = ["1e-5", "null", "${x}", "yes", "010", "a: b", "\\d+\n"]
    drawing = {"shape": {"_type": "ring", "radius": 1e-7}, "names": names, "title": "12:30"}
    values = {"drawing": drawing, "training": {"lr": 1e-5}, "custom_trainer_module_path": "~/x.py"}
    params = DRAWING.from_dict(BASE.values | values)
    directory = RunDirectory.create(tmp_path, "run")
    path = directory.write_yaml("hyper_parameters.yaml", params.to_dict())
    again = validate_layers(read_yaml_layers(path, source="run"), DRAWING)
    assert again.hyper_params == params
