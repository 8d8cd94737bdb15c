"""What agents are told: Jinja2 templates, a file a role and protocol.

The prompt of an agent is the first of these files that its scenario has in `prompts/`:

    <agent>.<protocol>.jinja   <agent>.jinja   <role>.<protocol>.jinja   <role>.jinja

where the role is prover or verifier. A template has up to three blocks: `system`, the system
message; `opening`, the first message of the user; and `turn`, what is said to the agent at the end
of what it reads, each time that it has its turn. A block may be left out, `opening` and `turn` not
both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from nip_astra.errors import ConfigurationError, DataError

PROMPTS_DIR = "prompts"
SUFFIX = ".jinja"
BLOCKS = ("system", "opening", "turn")
"""Parts of a template."""


class PromptTemplate:
    """What one agent is told.

    Attributes
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path, template: Template) -> None:
        self.path = path
        self._template = template

    def render(self, block: str, values: Mapping[str, Any]) -> str:
        """A block with its variables filled in; empty where the template has no such block.

        Raises
        ------
        DataError
            When the block asks for a variable that there is not.
        """
        if block not in self._template.blocks:
            return ""
        try:
            context = self._template.new_context(dict(values))
            return "".join(self._template.blocks[block](context)).strip()
        except TemplateError as error:
            raise DataError(
                f"the block {block!r} of the prompt {self.path} was to be filled in, but: {error}. "
                f"It may use: {', '.join(sorted(values))}."
            ) from error


def file_names(agent: str, role: str, protocol: str) -> list[str]:
    """The files that an agent's prompt may stand in, the first that is there counts."""
    names = dict.fromkeys([f"{agent}.{protocol}", agent, f"{role}.{protocol}", role])
    return [f"{name}{SUFFIX}" for name in names]


def load_prompts(
    folder: Path, agents: Mapping[str, str], protocol: str
) -> dict[str, PromptTemplate]:
    """The prompt of each agent.

    Parameters
    ----------
    folder : Path
        The scenario's `prompts`.
    agents : Mapping of str
        Role, prover or verifier, by agent.

    Raises
    ------
    ConfigurationError
        When an agent has none, or a template is broken; every fault is told.
    """
    environment = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    found: dict[str, PromptTemplate] = {}
    faults = []
    for agent, role in agents.items():
        names = file_names(agent, role, protocol)
        name = next((name for name in names if (folder / name).is_file()), None)
        if name is None:
            faults.append(f"{agent} has no prompt; write one of {', '.join(names)}")
            continue
        try:
            template = environment.get_template(name)
        except TemplateError as error:
            faults.append(f"{name} is no template: {error}; mend it")
            continue
        faults += [f"{name} {fault}" for fault in _faults_of(template)]
        found[agent] = PromptTemplate(folder / name, template)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigurationError(f"prompts were to be read from {folder}, but:\n{lines}")
    return found


def _faults_of(template: Template) -> Iterator[str]:
    unknown = sorted(set(template.blocks) - set(BLOCKS))
    if unknown:
        yield f"has the block {unknown[0]!r}; known blocks: {', '.join(BLOCKS)}"
    if not {"opening", "turn"} & set(template.blocks):
        yield "has neither the block 'opening' nor 'turn', so its agent is asked nothing; add one"
