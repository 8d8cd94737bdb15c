"""Run the commands and code of README and the guides, page by page, in order."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import typer

from nip_astra.cli import app as cli
from nip_astra.errors import ConfigurationError
from tests.kit.command_line import CommandLine, plugins_forgotten_after
from tests.kit.documents import ROOT, Block, Command, anchors, blocks, documents, links, prose

PAGES = [ROOT / "README.md", *sorted((ROOT / "doc" / "guides").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "doc" / "notebooks").glob("*.md"))
SMALL = (
    "training.num_episodes_per_experience=1",
    "training.minibatch_size=4",
    "ast_chat.tree_depth=2",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.use_random_search=false",
)
"""Overrides that shorten stress tests, in addition to --test-run."""
SMALL_PROOF = ("rl.frames_per_batch=240",)
"""The same for interactive proofs; a multiple of most numbers of rounds."""
SMALL_TASK = (
    "training.num_episodes_per_experience=2",
    "training.minibatch_size=8",
    "task.evaluation.num_problems=4",
)
"""The same for tasks."""
TASK_WORDS = ("self_hosted", "remote_api", "task", "arithmetic")
"""Parts of the arguments of such commands."""
PROOF_WORDS = (
    "graph_isomorphism",
    "image_classification",
    "mappo",
    "reinforce",
    "solo_agent",
    "spg",
    "vanilla_ppo",
)
"""Scenarios and trainers of interactive proofs."""
SMALL_TEXT = ("text_rl.rollouts_per_iteration=16",)
"""The same for text protocols."""
TEXT_WORDS = ("pure_text_ei", "pure_text_malt", "secret_word")
NOT_RUN = ("pip install ", "python -m venv ")
"""Lines that need a network or minutes; .ci/run executes the first two of README."""
OPTIONAL_PACKAGES = ("datasets", "openai", "pandas", "tinker")
"""A Python block that imports one of them is skipped if the package is missing."""
FIRST_PAGES = ("README",)
"""Pages of the default tests; the others are marked slow."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.stem in FIRST_PAGES else pytest.mark.slow)
        for page in PAGES
    ],
)
def test_the_commands_and_code_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    small = SMALL
    if any(word in PROOF_WORDS for word in arguments):
        has_num_epochs = any(word.startswith("rl.num_epochs=") for word in arguments)
        small = SMALL_PROOF if has_num_epochs else (*SMALL_PROOF, "rl.num_epochs=1")
    if any(part in word for word in arguments for part in TASK_WORDS):
        small = SMALL_TASK
    if any(word in TEXT_WORDS for word in arguments):
        small = SMALL_TEXT
    if "solo_agent" in arguments or any(word.startswith("base_run.") for word in arguments):
        small = ()  # no rollouts, or the parameters of the base run
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
def test_links_have_targets(page: Path) -> None:
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not fragment or fragment in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_a_page_exist(page: Path) -> None:
    roots = ("nip_astra", "parameters", "scenarios", "tests", "benchmarks", "doc")
    named = re.findall(rf"`((?:{'|'.join(roots)})/[\w./-]+)`", prose(page))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names missing files: {missing}"


def test_every_page_of_doc_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        waiting += [t for t in targets if t.suffix == ".md" and t.is_file() and t not in seen]
    assert set(documents()) <= seen


def test_readme_guide_and_package_show_the_same_trainer() -> None:
    packaged = (ROOT / "tests" / "plugin_package" / "my_trainer.py").read_text()
    for page in (ROOT / "README.md", ROOT / "doc" / "guides" / "creating-a-trainer.md"):
        shown = [block.text for block in blocks(page) if block.file == "my_trainer.py"]
        assert shown == [packaged], page.name


def test_the_guide_shows_an_entry_point_of_the_right_group() -> None:
    (shown,) = (
        tomllib.loads(block.text)
        for block in blocks(ROOT / "doc" / "guides" / "creating-a-trainer.md")
        if block.language == "toml"
    )
    packaged = tomllib.loads((ROOT / "tests" / "plugin_package" / "pyproject.toml").read_text())
    assert shown == packaged


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
    """Dotted names of the package in the tables of a page."""
    names = set()
    rows = [line for line in prose(page).splitlines() if line.startswith("|")]
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


@pytest.mark.parametrize(
    ("page", "number"),
    [("coming-from-nexrl", 13), ("coming-from-nip", 20), ("creating-a-trainer", 6)],
)
def test_the_names_of_tables_are_found(page: str, number: int) -> None:
    assert len(names_of_tables(ROOT / "doc" / "guides" / f"{page}.md")) >= number


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.stem)
def test_every_name_of_every_table_can_be_imported(page: Path) -> None:
    for name in sorted(names_of_tables(page)):
        parts = name.split(".")
        for number in range(len(parts), 0, -1):
            with suppress(ModuleNotFoundError):
                module = import_module(".".join(parts[:number]))
                break
        assert attrgetter(".".join(parts[number:]) or "__name__")(module) is not None, name


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_pictures_exist_and_are_small() -> None:
    for page in documents():
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", text):
            assert (page.parent / name).stat().st_size < 200_000, f"{page.name}: {name}"


def test_readme_starts_with_a_line_that_runs_and_a_line_that_tests() -> None:
    lines = [c.line for b in blocks(ROOT / "README.md") for c in b.commands if "venv" in c.line]
    run, test = lines[:2]
    assert run.endswith("run.py --trainer ast_dpo")
    assert test.endswith("-m pytest")
