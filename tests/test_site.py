"""The documentation site lists every parameter and builds without warnings."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nip_astra.cli.app import command_tree
from nip_astra.overview import every_section
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.trainers.registry import TRAINERS
from tests.kit.documents import ROOT


@pytest.fixture(scope="module")
def parameter_pages() -> ModuleType:
    return _module("parameter_pages")


def _module(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "doc" / "site")
        return importlib.import_module(name)


def test_every_parameter_of_a_file_stands_on_one_page(parameter_pages: ModuleType) -> None:
    text = "\n".join(page.text for page in parameter_pages.parameter_pages())
    groups = every_section()
    shared = {name: HyperParameters.model_fields[name].annotation for name in ("training", "rl")}
    for section, model in (groups | shared).items():
        for name in model.model_fields:
            assert text.count(f"| `{section}.{name}` |") == 1, f"{section}.{name}"
    for name in HyperParameters.model_fields:
        assert text.count(f"| `{name}` |") >= 1, name


def test_a_page_shows_type_bounds_default_meaning_and_condition(
    parameter_pages: ModuleType,
) -> None:
    pages = {page.title: page.text for page in parameter_pages.parameter_pages()}
    row = r"\| `ppo.kl_target` \| number, > 0 \| `0.01` \| [^|*]+ \*[^|*]+`loss_type` is kl_penalty"
    assert re.search(row, pages["ppo"])
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


def test_every_option_of_every_command_stands_on_one_page() -> None:
    sections = _module("command_page").command_page().split("\n## ")[1:]
    by_name = {one.partition("\n")[0].strip("`"): one for one in sections}
    assert {"run", "sweep", "compare-dumps", "dataset create"} <= set(by_name)
    for name, command in command_tree():
        for option in command.params:
            names = option.opts if option.param_type_name == "option" else [option.metavar or ""]
            assert all(f"`{one}" in by_name[name] for one in names), (name, names)


SEARCHES = {
    **dict.fromkeys(
        ("learning rate", "warmup", "batch size", "gradient accumulation", "epochs"),
        "reference/parameters/shared-groups/training/",
    ),
    "multi-gpu": "guides/scaling/",
    "mlflow": "guides/first-run/",
    "reward function": "guides/training-on-services/",
    "checkpoint": "guides/first-run/",
    "resume": "guides/first-run/",
    "vllm": "guides/scaling/",
    "fail-if": "guides/evaluating/",
}
"""Words that users type, and the page that answers them."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_the_search_finds_the_right_page_within_three_results(site: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node runs the site's search")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index = site / "search" / "search_index.json"
    script = ROOT / "tests" / "site_search.mjs"
    done = subprocess.run(
        [node, str(script), str(worker), str(index), *SEARCHES],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    first = {words: pages[:3] for words, pages in found.items()}
    missed = {words: first[words] for words, page in SEARCHES.items() if page not in first[words]}
    assert missed == {}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    for page in ("index.html", "glossary/index.html", "guides/first-run/index.html"):
        assert (site / page).is_file()
    training = site / "reference" / "parameters" / "shared-groups" / "training" / "index.html"
    assert "training.lr" in training.read_text(encoding="utf-8")
    api = site / "reference" / "api" / "trainers" / "index.html"
    assert "attach_progress_bar" in api.read_text(encoding="utf-8")
