"""Pages of the site that are not in doc/: generated ones, and READMEs of other folders."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from api_pages import api_pages
from command_page import PATH as COMMANDS
from command_page import command_page
from parameter_pages import parameter_pages

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "doc"
SCENARIOS = ROOT / "scenarios"
BOOSTS = {"guides/": 2.0, "reference/parameters/shared-groups/": 2.0, "reference/api/": 0.2}
"""How much more a page counts in the search, by the start of its path; others count half."""
KEYWORDS = {
    "guides/first-run.md": ("resume", "mlflow", "trackio", "tensorboard", "wandb", "checkpoint"),
    "guides/scaling.md": ("multi-gpu", "several GPUs", "torchrun", "FSDP", "Ray", "vLLM"),
    "guides/training-on-services.md": ("reward function", "GRPO", "TRL", "verifiable rewards"),
    "reference/parameters/shared-groups/training.md": (
        *("learning rate", "warmup", "batch size", "gradient accumulation", "epochs"),
        *("weight decay", "gradient clipping", "optimizer", "scheduler"),
    ),
    "reference/parameters/shared-groups/settings.md": ("checkpoint", "device", "wandb", "mlflow"),
    "reference/parameters/tasks/dataset.md": ("reward function", "own data", "JSONL"),
    "reference/commands.md": ("resume", "CLI", "command line"),
}
"""Words of other tools by which a page is found."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add generated pages to the navigation."""
    groups: dict[str, list[Any]] = {}
    config.extra["pages_of_parameters"] = list(parameter_pages())
    for page in config.extra["pages_of_parameters"]:
        groups.setdefault(page.chapter, []).append({page.title: page.path})
    parameters: list[Any] = [{chapter: pages} for chapter, pages in groups.items()]
    api: list[Any] = [{title: path} for title, path, _ in api_pages()]
    scenarios: list[Any] = [
        {path.parent.name: _place(path)} for path in sorted(SCENARIOS.glob("*/README.md"))
    ]
    design: list[Any] = [f"design/{path.name}" for path in sorted((DOC / "design").glob("0*.md"))]
    made = {"Parameters": parameters, "API": api, "Scenarios": scenarios, "Decisions": design}
    for part in config.nav or []:
        for title, pages in made.items():
            if title in part:
                part[title] = [*(part[title] or []), *pages]
        if "Guides" in part:
            part["Guides"] += _guides_left_out(part["Guides"])
    return config


def _guides_left_out(listed: list[Any]) -> list[Any]:
    """Guides that are missing from the navigation."""
    named = str(listed)
    guides = [f"guides/{path.name}" for path in sorted((DOC / "guides").glob("*.md"))]
    left_out = [guide for guide in guides if guide not in named]
    return [{"More": left_out}] if left_out else []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, and those outside doc/."""
    for page in config.extra.pop("pages_of_parameters"):
        files.append(File.generated(config, page.path, content=page.text))
    files.append(File.generated(config, COMMANDS, content=command_page()))
    for _, path, text in api_pages():
        files.append(File.generated(config, path, content=text))
    for source in _extra_pages():
        text = source.read_text(encoding="utf-8")
        files.append(File.generated(config, _place(source), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to pages of the site; links to other files become plain text.

    The search is given a page's weight and keywords as its metadata.
    """
    place = page.file.src_uri
    boost = next((BOOSTS[start] for start in BOOSTS if place.startswith(start)), 0.5)
    page.meta.setdefault("search", {"boost": boost})
    page.meta.setdefault("tags", list(KEYWORDS.get(place, ())))
    source = _source(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        mark, text, target, fragment = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        if mark:
            return match[0]
        found = (source.parent / target).resolve()
        place = _place(found) if found.exists() else os.path.normpath(_beside(page, target))
        if files.get_file_from_path(place) is None:
            return text
        relative = os.path.relpath(place, Path(page.file.src_uri).parent)
        return f"[{text}]({relative}{fragment or ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)


def _extra_pages() -> list[Path]:
    others = ("parameters/README.md", "benchmarks/README.md", "CHANGELOG.md")
    return [*sorted(SCENARIOS.glob("*/README.md")), *(ROOT / path for path in others)]


def _place(path: Path) -> str:
    """Path of a project file on the site."""
    if path == ROOT / "README.md":
        return "index.md"
    return str(path.relative_to(DOC if path.is_relative_to(DOC) else ROOT))


def _source(place: str) -> Path:
    """Project file of a page of the site."""
    return DOC / place if (DOC / place).exists() else ROOT / place


def _beside(page: Page, target: str) -> str:
    return str(Path(page.file.src_uri).parent / target)
