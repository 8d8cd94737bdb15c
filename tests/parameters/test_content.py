"""Presets, scenarios and referenced files are found in a checkout and in a wheel."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from nip_astra.errors import ConfigurationError, MissingDependencyError, UnknownNameError
from nip_astra.parameters import content
from nip_astra.parameters.content import (
    DEFAULT_SCENARIO,
    content_root,
    find_scenario,
    preset_path,
    resolve_reference,
    scenario_names,
)
from tests.kit.messages import says

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with the scenario `pond` and presets of the trainer `swim`."""
    package = tmp_path / "site" / "nip_astra"
    package.mkdir(parents=True)
    for path in ("scenarios/pond/scenario.yaml", "parameters/swim/default.yaml"):
        write(tmp_path / "site" / path)
    write(tmp_path / "site" / "parameters" / "swim" / "pond.yaml")
    monkeypatch.setattr(content, "_PACKAGE_DIR", package)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "site"


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_a_checkout_s_folders_are_found() -> None:
    assert content_root() == ROOT
    assert DEFAULT_SCENARIO in scenario_names()
    assert find_scenario(DEFAULT_SCENARIO) == ROOT / "scenarios" / DEFAULT_SCENARIO


def test_a_wheel_s_folders_inside_the_package_come_first(house: Path) -> None:
    assert content_root() == house
    inside = house / "nip_astra" / "_content"
    write(inside / "scenarios" / "lake" / "scenario.yaml")
    (inside / "parameters").mkdir()
    assert content_root() == inside
    assert scenario_names() == ["lake"]


def test_an_installation_without_content_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_PACKAGE_DIR", tmp_path / "nip_astra")
    with pytest.raises(ConfigurationError) as caught:
        content_root()
    assert says(caught.value, tmp_path / "nip_astra", "parameters/", "scenarios/", "pip install")


def test_a_folder_of_one_s_own_is_a_scenario(house: Path) -> None:
    write(Path("mine/scenario.yaml"))
    assert find_scenario("mine") == Path("mine").resolve()
    assert find_scenario(str(Path("mine").resolve())) == Path("mine").resolve()


def test_a_name_that_ships_is_that_scenario_whatever_lies_in_the_working_directory(
    house: Path,
) -> None:
    write(Path("pond/scenario.yaml"))
    assert find_scenario("pond") == house / "scenarios" / "pond"
    assert find_scenario("./pond") == Path("pond").resolve()


@pytest.mark.parametrize("name", ["ponds", "", ".", "pond/scenario.yaml"])
def test_an_unknown_scenario_is_told_with_near_misses(house: Path, name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_scenario(name)
    near = "Did you mean 'pond'?" if name == "ponds" else "Known scenarios"
    assert says(caught.value, f"scenario {name!r}", near, "pond", "scenario.yaml")


def test_a_preset_is_found_by_trainer_and_scenario(house: Path) -> None:
    presets = house / "parameters" / "swim"
    assert preset_path("swim", None) == presets / "default.yaml"
    assert preset_path("swim", "pond") == presets / "pond.yaml"
    assert preset_path("swim", str(house / "scenarios" / "pond")) == presets / "pond.yaml"
    assert preset_path("swim", "lake") is None
    assert preset_path("dive", None) is None
    assert preset_path("../swim", None) is None


def test_a_scenario_of_one_s_own_takes_no_preset_of_the_same_name(house: Path) -> None:
    write(Path("pond/scenario.yaml"))
    assert preset_path("swim", "./pond") is None


def test_every_trainer_with_presets_has_a_default_one() -> None:
    folders = [folder for folder in (ROOT / "parameters").iterdir() if folder.is_dir()]
    assert folders
    for folder in folders:
        assert preset_path(folder.name, None) == folder / "default.yaml"


def test_references_into_the_scenario_and_into_packages_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "ref_package" / "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert resolve_reference("scenario://a/b.txt", tmp_path) == tmp_path / "a" / "b.txt"
    assert resolve_reference("scenario://b.txt", tmp_path) == tmp_path / "b.txt"
    assert resolve_reference("package://ref_package/m.gguf", None) == (
        tmp_path / "ref_package" / "m.gguf"
    )


def test_a_reference_names_a_shipped_scenario_where_the_run_s_own_has_no_such_file(
    house: Path, tmp_path: Path
) -> None:
    shipped = house / "scenarios" / "pond" / "frog.txt"
    for own in (None, tmp_path):
        assert resolve_reference("scenario://pond/frog.txt", own) == shipped
    write(tmp_path / "pond" / "frog.txt")
    assert resolve_reference("scenario://pond/frog.txt", tmp_path) == tmp_path / "pond/frog.txt"
    with pytest.raises(UnknownNameError, match="pond"):
        resolve_reference("scenario://ponds/frog.txt")


def test_a_package_in_several_folders_gives_the_one_that_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "ref_space" / f"{name}.txt")
        monkeypatch.syspath_prepend(tmp_path / name)
    importlib.invalidate_caches()
    for name in ("one", "two"):
        found = resolve_reference(f"package://ref_space/{name}.txt", None)
        assert found == tmp_path / name / "ref_space" / f"{name}.txt"


def test_what_exists_or_looks_like_a_path_is_one_and_all_else_a_hub_id(house: Path) -> None:
    write(Path("data/prompts.txt"))
    assert resolve_reference("data/prompts.txt", None) == Path("data/prompts.txt")
    assert resolve_reference("./nope", None) == Path("nope")
    assert resolve_reference("nope.gguf", None) == Path("nope.gguf")
    assert resolve_reference("/no/where", None) == Path("/no/where")
    assert resolve_reference("org/model", None) == "org/model"
    assert resolve_reference("~/x", None) == Path.home() / "x"


@pytest.mark.parametrize("package", ["no_such_package_here", "no.such.package", ""])
def test_a_package_that_is_not_installed_is_told(package: str) -> None:
    with pytest.raises(MissingDependencyError, match="not installed"):
        resolve_reference(f"package://{package}/x", None)


def test_an_unknown_scheme_and_a_missing_scenario_are_told() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_reference("s3://bucket/x", None)
    assert says(caught.value, "s3://", "'s3://bucket/x'", "scenario://, package://")
    with pytest.raises(ConfigurationError, match="scenario://NAME"):
        resolve_reference("scenario://x", None)
