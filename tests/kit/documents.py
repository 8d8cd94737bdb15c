"""Parse the project's Markdown: code blocks with their markers, headings and links."""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARKER = re.compile(r"^<!-- (slow|varies|file: (?P<file>\S+)) -->$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code, with what markers before it say."""

    language: str
    text: str
    line: int
    file: str | None = None
    """Name of the file with this content, from `<!-- file: NAME -->`."""
    is_slow: bool = False
    """Marked `<!-- slow -->`: too long for a test, or needs other packages."""
    varies: bool = False
    """Marked `<!-- varies -->`: an output that differs between machines."""

    @property
    def commands(self) -> list[Command]:
        """The shell lines of a `sh` block."""
        if self.language != "sh":
            return []
        joined = self.text.replace("\\\n", " ")
        return [Command(line, self) for line in joined.splitlines() if line.strip()]


@dataclass(frozen=True)
class Command:
    """A shell line of a block."""

    line: str
    block: Block

    @property
    def words(self) -> list[str]:
        """The line split as in a shell, without comments and with placeholders filled in."""
        return shlex.split(re.sub(r"<[^>]*>", "something", self.line), comments=True)

    @property
    def arguments(self) -> list[str] | None:
        """Arguments of the program's command line; None if the line runs another program."""
        for start in (["python", "run.py"], ["nip-astra"]):
            if self.words[: len(start)] == start:
                return self.words[len(start) :]
        return None

    @property
    def is_template(self) -> bool:
        """Whether the line has a placeholder, for example `runs/<run id>`."""
        return "<" in self.line


def documents() -> list[Path]:
    """All pages of the project's documentation."""
    others = ("README.md", "parameters/README.md", "benchmarks/README.md")
    return [*(ROOT / path for path in others), *sorted((ROOT / "doc").rglob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    result: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start, language = -1, ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if start >= 0 and line == "```":
            text = "\n".join(lines[start + 1 : number]) + "\n"
            result.append(Block(language, text, start + 1, *_markers(lines, start)))
            start = -1
        elif start < 0 and fence:
            start, language = number, fence[1]
    assert start < 0, f"{path.name}:{start + 1}: unclosed block"
    return result


def _markers(lines: list[str], fence: int) -> tuple[str | None, bool, bool]:
    file, words = None, set()
    for line in reversed(lines[:fence]):
        marker = _MARKER.match(line)
        if marker is None and line.strip():
            break
        if marker is not None:
            file = marker["file"] or file
            words.add(marker[1])
    return file, "slow" in words, "varies" in words


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> list[str]:
    """The targets of a page's links."""
    return _LINK.findall(prose(path))


def anchors(path: Path) -> set[str]:
    """Link fragments of a page's headings, as on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


def find(path: str) -> Any:
    """Import a dotted path: a module, or an attribute of a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        return getattr(find(module), name)
