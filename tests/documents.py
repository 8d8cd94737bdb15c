"""Read the project's Markdown: code blocks with their markers, headings and links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)\s*$")
_MARKER = re.compile(r"^<!-- (slow|file: (?P<file>\S+)) -->$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes
    ----------
    file : str or None
        Name under which the reader saves it, from a marker `<!-- file: NAME -->` before it.
    is_slow : bool
        Whether it is marked `<!-- slow -->`: too long, or in need of more packages, for a test.
    """

    language: str
    text: str
    line: int
    file: str | None = None
    is_slow: bool = False

    @property
    def commands(self) -> list[Command]:
        """The shell lines of a `sh` or `console` block, the latter with what they print."""
        if self.language == "sh":
            joined = self.text.replace("\\\n", " ")
            return [Command(line, "", self) for line in joined.splitlines() if line.strip()]
        if self.language != "console":
            return []
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"line {self.line}: a console block begins with '$ '"
        return [Command(*part.split("\n", 1), block=self) for part in parts[1:]]


@dataclass(frozen=True)
class Command:
    """A shell line and what it prints; "..." in `output` stands for anything."""

    line: str
    output: str
    block: Block

    @property
    def words(self) -> list[str]:
        """The line split as a shell does, something filled in, a trailing comment left out."""
        return shlex.split(re.sub(r"<[^>]*>", "something", self.line), comments=True)

    @property
    def arguments(self) -> list[str] | None:
        """Arguments of the program's command line; None where the line runs something else."""
        for start in (["python", "run.py"], ["nip-astra"]):
            if self.words[: len(start)] == start:
                return self.words[len(start) :]
        return None

    @property
    def is_template(self) -> bool:
        """Whether the reader has to fill something in, for instance `runs/<run id>`."""
        return "<" in self.line


def documents() -> list[Path]:
    """The project's own pages."""
    return [ROOT / "README.md", *sorted((ROOT / "doc").rglob("*.md"))]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start, language = -1, ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if start >= 0 and line == "```":
            file, is_slow = _markers(lines, start)
            text = "\n".join(lines[start + 1 : number]) + "\n"
            found.append(Block(language, text, start + 1, file, is_slow))
            start = -1
        elif start < 0 and fence:
            start, language = number, fence[1]
    assert start < 0, f"{path.name}:{start + 1}: a block that never ends"
    return found


def _markers(lines: list[str], fence: int) -> tuple[str | None, bool]:
    file, is_slow = None, False
    for line in reversed(lines[:fence]):
        marker = _MARKER.match(line)
        if marker is None and line.strip():
            break
        if marker is not None:
            file = marker["file"] or file
            is_slow = is_slow or marker[1] == "slow"
    return file, is_slow


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> list[str]:
    """The targets of a page's links."""
    return _LINK.findall(prose(path))


def anchors(path: Path) -> set[str]:
    """The fragments by which a page's headings are linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }
