"""The documentation site lists every parameter and builds without warnings."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nip_astra.overview import every_section
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.trainers.registry import TRAINERS
from tests.kit.documents import ROOT


@pytest.fixture(scope="module")
def parameter_pages() -> ModuleType:
    return _module("parameter_pages")


def _module(name: str) -> ModuleType:
    path = ROOT / "doc" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_parameter_of_a_file_stands_on_one_page(parameter_pages: ModuleType) -> None:
    text = "\n".join(page.text for page in parameter_pages.parameter_pages())
    groups = every_section()
    shared = {name: HyperParameters.model_fields[name].annotation for name in ("training", "rl")}
    for section, model in (groups | shared).items():
        for name in model.model_fields:
            assert text.count(f"| `{section}.{name}` |") == 1, f"{section}.{name}"
    for name in HyperParameters.model_fields:
        assert text.count(f"| `{name}` |") >= 1, name


def test_a_page_tells_type_bounds_default_meaning_and_condition(
    parameter_pages: ModuleType,
) -> None:
    pages = {page.title: page.text for page in parameter_pages.parameter_pages()}
    assert (
        "| `ppo.kl_target` | number, > 0 | `0.01` | Divergence, in nats, that the penalty aims at. "
        "*Read where `loss_type` is kl_penalty.* |" in pages["ppo"]
    )
    assert "| `ast_chat.scorer` | scorer by `_type`: `classifier`," in pages["ast_chat"]
    assert "## `graph_isomorphism.agents" in pages["graph_isomorphism"]


def test_readers_are_the_trainers_that_take_the_parameter(parameter_pages: ModuleType) -> None:
    readers = parameter_pages._Readers()
    stress_tests = {f"`{name}`" for name in TRAINERS.names() if name.startswith("ast_")}
    found = set(readers.words("training.lr").split(", "))
    assert stress_tests <= found
    assert not found & {"`vanilla_ppo`", "`solo_agent`"}
    assert readers.words("ppo.clip_low") == "`mappo`, `spg`, `vanilla_ppo`"
    assert readers.words("seed") == "every trainer"
    assert "`solo_agent`" not in readers.words("rl.lr")


def test_modules_of_the_api_are_there() -> None:
    for modules in _module("api_pages").CHAPTERS.values():
        for module in modules:
            assert importlib.import_module(module).__doc__


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for page in ("index.html", "glossary/index.html", "guides/first-run/index.html"):
        assert (tmp_path / page).is_file()
    training = tmp_path / "reference" / "parameters" / "shared-groups" / "training" / "index.html"
    assert "training.lr" in training.read_text(encoding="utf-8")
    api = tmp_path / "reference" / "api" / "trainers" / "index.html"
    assert "attach_progress_bar" in api.read_text(encoding="utf-8")
