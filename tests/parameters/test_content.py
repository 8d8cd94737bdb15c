"""Presets, scenarios and referenced files, in a checkout and in a wheel."""

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
    site = tmp_path / "site"
    for path in ("scenarios/pond/scenario.yaml", "parameters/swim/default.yaml"):
        write(site / path)
    write(site / "parameters" / "swim" / "pond.yaml")
    for folder in (site / "nip_astra", tmp_path / "work"):
        folder.mkdir()
    monkeypatch.setattr(content, "_PACKAGE_DIR", site / "nip_astra")
    monkeypatch.chdir(tmp_path / "work")
    return site


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def test_a_checkout_s_folders_are_used() -> None:
    assert content_root() == ROOT
    assert DEFAULT_SCENARIO in scenario_names()
    assert find_scenario(DEFAULT_SCENARIO) == ROOT / "scenarios" / DEFAULT_SCENARIO
    assert preset_path("ast_dpo", None) == ROOT / "parameters" / "ast_dpo" / "default.yaml"


def test_a_wheel_s_folders_inside_the_package_come_first(
    house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert content_root() == house
    inside = house / "nip_astra" / "_content"
    write(inside / "scenarios" / "lake" / "scenario.yaml")
    (inside / "parameters").mkdir()
    assert content_root() == inside
    assert scenario_names() == ["lake"]
    monkeypatch.setattr(content, "_PACKAGE_DIR", house / "empty" / "nip_astra")
    with pytest.raises(ConfigurationError) as caught:
        content_root()
    assert says(caught.value, house / "empty", "parameters/", "scenarios/", "pip install")


def test_a_folder_is_a_scenario_and_a_built_in_name_takes_precedence(house: Path) -> None:
    for name in ("mine", "pond"):
        write(Path(name) / "scenario.yaml")
    assert find_scenario("mine") == find_scenario(str(Path("mine").resolve()))
    assert find_scenario("mine") == Path("mine").resolve()
    assert find_scenario("pond") == house / "scenarios" / "pond"
    assert find_scenario("./pond") == Path("pond").resolve()
    assert preset_path("swim", "./pond") is None, "no preset was verified on it"


@pytest.mark.parametrize("name", ["ponds", "", ".", "pond/scenario.yaml"])
def test_an_unknown_scenario_is_refused_with_near_misses(house: Path, name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_scenario(name)
    assert caught.value.name == name
    assert caught.value.known == ["pond"]
    assert name != "ponds" or caught.value.suggestions == ["pond"]


def test_a_preset_has_the_names_of_trainer_and_scenario(house: Path) -> None:
    presets = house / "parameters" / "swim"
    assert preset_path("swim", None) == presets / "default.yaml"
    assert preset_path("swim", "pond") == presets / "pond.yaml"
    assert preset_path("swim", str(house / "scenarios" / "pond")) == presets / "pond.yaml"
    for trainer, scenario in (("swim", "lake"), ("dive", None), ("../swim", None)):
        assert preset_path(trainer, scenario) is None


def test_a_reference_is_in_the_run_s_scenario_or_a_shipped_one(house: Path, tmp_path: Path) -> None:
    assert resolve_reference("scenario://a/b.txt", tmp_path) == tmp_path / "a" / "b.txt"
    assert resolve_reference("scenario://b.txt", tmp_path) == tmp_path / "b.txt"
    shipped = house / "scenarios" / "pond" / "frog.txt"
    for own in (None, tmp_path):
        assert resolve_reference("scenario://pond/frog.txt", own) == shipped
    write(tmp_path / "pond" / "frog.txt")
    assert resolve_reference("scenario://pond/frog.txt", tmp_path) == tmp_path / "pond/frog.txt"
    for wrong in ("scenario://ponds/frog.txt", "scenario://x"):
        with pytest.raises(UnknownNameError, match=r"pond.*scenario://NAME"):
            resolve_reference(wrong)


def test_a_reference_into_a_package_is_in_the_folder_that_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "ref_space" / f"{name}.txt")
        monkeypatch.syspath_prepend(tmp_path / name)
    write(tmp_path / "one" / "ref_package" / "__init__.py")
    importlib.invalidate_caches()
    for path in ("one/ref_space/one.txt", "two/ref_space/two.txt", "one/ref_package/m.gguf"):
        reference = f"package://{path.partition('/')[2]}"
        assert resolve_reference(reference, None) == tmp_path / path
    for package in ("no_such_package_here", "no.such.package", ""):
        with pytest.raises(MissingDependencyError, match="pip install"):
            resolve_reference(f"package://{package}/x", None)


def test_an_existing_file_or_a_name_like_a_path_is_a_path_and_all_else_a_hub_id(
    house: Path,
) -> None:
    write(Path("data/prompts.txt"))
    for reference in ("data/prompts.txt", "./nope", "nope.gguf", "/no/where"):
        assert resolve_reference(reference, None) == Path(reference)
    assert resolve_reference("~/x", None) == Path.home() / "x"
    assert resolve_reference("org/model", None) == "org/model"
    with pytest.raises(ConfigurationError) as caught:
        resolve_reference("s3://bucket/x", None)
    assert says(caught.value, "s3://", "'s3://bucket/x'", "scenario://, package://")


@pytest.mark.parametrize("name", ["", "../secret", "/etc/passwd", ".", "a/b/c", "a//b", "a/.."])
def test_the_hubs_prefix_needs_the_name_of_a_repository(name: str) -> None:
    with pytest.raises(ConfigurationError):
        resolve_reference(f"hub:{name}")


def test_the_hubs_prefix_never_reads_a_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_reference("hub:someone/rows") == "someone/rows"
    (tmp_path / "someone/rows").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="someone/rows"):
        resolve_reference("hub:someone/rows")
    assert resolve_reference("someone/rows") == Path("someone/rows")
