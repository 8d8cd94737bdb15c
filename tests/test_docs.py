"""Run the commands, code and loops of the documentation, and build its site."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from nip_astra import resolve_experiment, run_experiment
from nip_astra.cli import app as cli
from nip_astra.cli.app import command_tree
from nip_astra.errors import ConfigurationError
from nip_astra.overview import every_section
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.trainers.registry import TRAINERS
from tests.kit.command_line import CommandLine, plugins_forgotten_after
from tests.kit.documents import ROOT, Block, Command, anchors, blocks, documents, find, links, prose
from tests.kit.experiments import metrics_of
from tests.kit.public_names import HEADING

PAGES = [ROOT / "README.md", *sorted((ROOT / "doc" / "guides").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "doc" / "notebooks").glob("*.md"))
SHORTER = {
    # no rollouts, or the parameters of the base run
    r"^base_run\.|^solo_agent$|^hill_climbing$": (),
    "^(pure_text_ei|pure_text_malt|secret_word)$": ("text_rl.rollouts_per_iteration=16",),
    "self_hosted|remote_api|task|arithmetic": (
        "training.num_episodes_per_experience=2",
        "training.minibatch_size=8",
        "task.evaluation.num_problems=4",
    ),
    "^(graph_isomorphism|image_classification|mappo|reinforce|spg|vanilla_ppo)$": (
        "rl.frames_per_batch=240",  # a multiple of most numbers of rounds
        "rl.num_epochs=1",
    ),
    "": (
        "training.num_episodes_per_experience=1",
        "training.minibatch_size=4",
        "ast_chat.tree_depth=2",
        "ast_chat.evaluation.num_episodes=2",
        "ast_chat.evaluation.use_random_search=false",
    ),
}
"""Words of commands that train, and overrides in addition to --test-run; the first match counts."""
NOT_RUN = ("pip install ", "python -m venv ")
"""Lines that need a network or minutes; .ci/run executes the first two of README."""
OPTIONAL_PACKAGES = ("datasets", "openai", "pandas", "tinker")
"""A Python block that imports one of them is skipped if the package is missing."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.stem == "README" else pytest.mark.slow)
        for page in PAGES
    ],
)
def test_the_commands_and_code_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = _Reader(page, CommandLine(tmp_path, tmp_path, capsys))
    with plugins_forgotten_after(), _service_of(page):
        for block in blocks(page):
            reader.follow(block)
    unused = [name for name in reader.python_files if name not in reader.mentioned]
    assert not unused, f"{page.name} has Python files that it never runs: {unused}"


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_the_cells_of_a_page_print_the_output_below_them(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell, below in zip(found, [*found[1:], None], strict=True):
        if cell.language == "python":
            _run_cell(cell.text, f"{page.name}:{cell.line}", names)
            printed = capsys.readouterr().out.strip("\n")
            shown = below.text if below is not None and below.language == "text" else ""
            if below is not None and below.varies:
                assert len(printed.splitlines()) == len(shown.splitlines()), printed
            else:
                _assert_alike(printed, shown)


def _run_cell(code: str, place: str, names: dict[str, Any]) -> None:
    """Run a cell; as in a notebook, the value of its last line is shown."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), names)
    if isinstance(last, ast.Expr):
        is_plot = ".plot(" in ast.unparse(last)
        if not is_plot or find_spec("matplotlib") is not None:
            value = eval(compile(ast.Expression(last.value), place, "eval"), names)
            assert hasattr(value, "savefig") is is_plot
            if value is not None and not is_plot:
                print(value)


def _assert_alike(printed: str, shown: str) -> None:
    """Equal words, and numbers to 30 % or 10 points: tokens differ between processors."""
    number, minus = r"[-+]?\d[\d,]*\.?\d*", "\N{MINUS SIGN}"
    texts = (text.replace(minus, "-").splitlines() for text in (printed, shown))
    for mine, other in zip_longest(*texts, fillvalue=""):
        words, wanted = (re.sub(number, "#", line).split() for line in (mine, other))
        assert words == wanted, f"{mine!r} is shown as {other!r}"
        pairs = zip(*(re.findall(number, line) for line in (mine, other)), strict=True)
        for value, expected in pairs:
            one, two = (float(text.replace(",", "")) for text in (value, expected))
            near = pytest.approx(two, rel=0.3, abs=10.0 if "%" in other else 0.1)
            assert one == near, f"{mine!r} is shown as {other!r}"


@contextmanager
def _service_of(page: Path) -> Iterator[None]:
    """Serve the model that a page starts in a separate terminal."""
    if page.stem != "chat-models-and-serving":
        yield
        return
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    from tests.serve.running import pocket_service

    with ExitStack() as stack:
        try:
            stack.enter_context(pocket_service(port=8000))
        except ConfigurationError as error:
            pytest.skip(f"the port is in use: {error}")
        yield


class _Reader:
    """Runs a page in an empty folder."""

    def __init__(self, page: Path, type_command: CommandLine) -> None:
        self.page, self.folder, self.type_command = page, type_command.folder, type_command
        self.python_files: list[str] = []
        self.mentioned = ""

    def follow(self, block: Block) -> None:
        place = f"{self.page.name}:{block.line}"
        if block.language not in ("", "text"):
            self.mentioned += block.text if block.language != "python" else ""
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            if block.language == "python":
                self.python_files.append(path.name)
                # A scenario's plugin.py is loaded with its folder.
                self.mentioned += " plugin.py" if path.name == "plugin.py" else ""
        elif block.language == "python" and not _missing_packages(block.text):
            exec(compile(block.text, place, "exec"), {"__name__": "__main__"})
        for command in block.commands:
            self._run(command, place)

    def _run(self, command: Command, place: str) -> None:
        if command.arguments is None:
            self._run_program(command, place)
        elif command.block.is_slow or command.is_template:
            _parse(command.arguments)
        else:
            result = self.type_command(*_shortened(command))
            assert result.code == 0, f"{place}: {command.line}\n{result.out}{result.err}"

    def _run_program(self, command: Command, place: str) -> None:
        if command.block.is_slow or command.line.startswith(NOT_RUN):
            return
        assert command.words[:3] == ["python", "-m", "pytest"], f"{place}: no test runs this line"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        process = subprocess.run(
            [sys.executable, *command.words[1:]],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, f"{place}: {process.stdout}{process.stderr}"


def _missing_packages(code: str) -> list[str]:
    """Optional packages that the code imports and that are not installed."""
    names = [
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    return [name for name in names if name in OPTIONAL_PACKAGES and find_spec(name) is None]


def _shortened(command: Command) -> list[str]:
    arguments = list(command.arguments or [])
    is_training = arguments[:1] in ([], ["run"]) or arguments[0].startswith("-")
    if not is_training or "--help" in arguments or "--version" in arguments:
        return arguments
    small = next(
        small for words, small in SHORTER.items() if any(re.search(words, one) for one in arguments)
    )
    if any(word.startswith("rl.num_epochs=") for word in arguments):
        small = small[:1]
    return [*arguments, "--test-run", *(word for pair in small for word in ("--set", pair))]


def _parse(arguments: list[str]) -> None:
    """Raise for unknown options, without running anything."""
    group = typer.main.get_command(cli.app)
    with group.make_context("nip-astra", list(arguments)) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, sub_command, words = group.resolve_command(context, rest)
        sub_command.make_context(name, words, parent=context)


def test_a_line_with_an_unknown_option_does_not_parse() -> None:
    with pytest.raises(Exception, match="No such option"):
        _parse(["--trainer", "ast_dpo", "--sed", "1"])


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_links_and_named_files_exist(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not fragment or fragment in anchors(target), f"{page.name}: {link}"
    roots = "nip_astra|parameters|scenarios|tests|benchmarks|doc"
    named = re.findall(rf"`((?:{roots})/[\w./-]+)`", prose(page))
    assert [name for name in named if not (ROOT / name).exists()] == []
    pictures = re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert all((page.parent / name).stat().st_size < 200_000 for name in pictures)


def test_every_page_of_doc_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        waiting += [t for t in targets if t.suffix == ".md" and t.is_file() and t not in seen]
    assert set(documents()) <= seen


def test_readme_guide_and_package_show_the_same_trainer_and_entry_point() -> None:
    package, guide = ROOT / "tests" / "plugin_package", ROOT / "doc/guides/creating-a-trainer.md"
    packaged = (package / "my_trainer.py").read_text()
    for page in (ROOT / "README.md", guide):
        shown = [block.text for block in blocks(page) if block.file == "my_trainer.py"]
        assert shown == [packaged], page.name
    (shown,) = (block.text for block in blocks(guide) if block.language == "toml")
    assert tomllib.loads(shown) == tomllib.loads((package / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "page",
    [page for page in (*PAGES, *NOTEBOOKS) if not page.stem.startswith("coming-from")],
    ids=lambda page: page.stem,
)
def test_code_of_a_page_needs_one_import_of_the_project(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            nodes = ast.walk(ast.parse(block.text))
            modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            own = {module for module in modules if module.partition(".")[0] == "nip_astra"}
            assert own <= {"nip_astra"}, f"{page.name}:{block.line}: import these from nip_astra"


def names_of_tables(page: Path) -> set[str]:
    """Dotted names of the package in the tables of a page; of nip's guide, also in its text."""
    names = set()
    if page.stem == "coming-from-nip":
        names |= set(re.findall(r"\bnip_astra(?:\.\w+)+", page.read_text(encoding="utf-8")))
    # Paths of the originals are tested in `test_public_names`.
    text = prose(page).partition(f"\n{HEADING}\n")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for cells in (re.split(r"(?<!\\)\|", row)[1:-1] for row in rows):
        for span in re.findall(r"`([^`]+)`", " ".join(cells)):
            if re.fullmatch(r"(nip_astra|rl_objectives)(\.\w+)+", span):
                names.add("nip_astra." + span.removeprefix("nip_astra."))
            elif (
                page.stem == "coming-from-nexrl"
                and cells[1].strip().startswith("the same")
                and span in cells[0]
                and (name := re.match(r"[A-Z]\w*[a-z]\w*(\.\w+)?", span))
            ):
                names.add(f"nip_astra.{name[0]}")
    return names


def test_every_name_of_every_table_can_be_imported() -> None:
    names = {page.stem: names_of_tables(page) for page in documents()}
    assert len(names["coming-from-nip"]) > 20
    assert len(names["coming-from-nexrl"]) > 12
    for name in sorted(set().union(*names.values())):
        assert find(name) is not None


def test_readme_is_short_and_starts_with_a_line_that_runs_and_a_line_that_tests() -> None:
    page = ROOT / "README.md"
    assert len(page.read_text(encoding="utf-8").split()) <= 900
    lines = [command.line for block in blocks(page) for command in block.commands]
    run, test = [line for line in lines if "venv" in line][:2]
    assert run.endswith("run.py --trainer ast_dpo")
    assert test.endswith("-m pytest")


# ---- loops

SHORT = {
    "stress_testing": (
        "ast_dpo",
        {"EPISODES": 1},
        [
            "training.num_episodes_per_experience=1",
            "ast_chat.evaluation.num_episodes=1",
            "ast_chat.evaluation.use_random_search=false",
        ],
    ),
    "text_protocol": (
        "pure_text_ei",
        {"NUM_ROLLOUTS": 48},
        ["text_rl.rollouts_per_iteration=48", "text_rl.test_scheme=none"],
    ),
    "interactive_proof": (
        "vanilla_ppo",
        {"MINIBATCH_SIZE": 128},
        ["rl.num_test_iterations=1", "rl.frames_per_batch=384", "rl.minibatch_size=128"],
    ),
    "task": ("self_hosted_grpo", {}, ["task.evaluation.num_problems=1"]),
}
"""Trainer of each loop, smaller constants, and overrides of equal sizes and of less evaluation."""
NUM_ITERATIONS = 2
# The trainer's Adam is fused, and small differences grow within an iteration.
RELATIVE_TOLERANCE = {"interactive_proof": 0.01}


@pytest.mark.parametrize("name", SHORT)
def test_a_loop_gives_the_metrics_of_its_trainer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, constants, smaller = SHORT[name]
    folder = ROOT / "doc" / "loops"
    assert len((folder / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 220
    monkeypatch.syspath_prepend(folder)
    loop: Any = importlib.import_module(name)
    vars(loop).update(constants)
    overrides = [*loop.overrides(NUM_ITERATIONS), *smaller]
    loop.overrides = lambda num_iterations: overrides
    experiment = resolve_experiment(trainer=trainer, overrides=overrides)
    run = run_experiment(experiment, runs_dir=str(tmp_path), progress=False, num_threads=1)
    logged = metrics_of(run.run_directory.path)
    torch.set_num_threads(1)
    for number, metrics in enumerate(loop.train(NUM_ITERATIONS)):
        expected = {key: logged[number][key] for key in metrics}
        tolerance = RELATIVE_TOLERANCE.get(name, 1e-4)
        assert metrics == pytest.approx(expected, rel=tolerance, abs=1e-6)


# ---- the site


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
