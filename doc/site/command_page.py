"""Generate the page of all commands from the program itself."""

from __future__ import annotations

import inspect
from typing import Any

from nip_astra.cli.app import command_tree
from nip_astra.safe_text import to_json

PATH = "reference/commands.md"


def command_page() -> str:
    """Every command with its arguments and options, in the order of the help."""
    lines = [
        "# Commands",
        "",
        "What `nip-astra COMMAND --help` prints, for every command; `python run.py` is the same",
        "program. Without a command, options are those of `run`. `nip-astra show --explain TEXT`",
        "searches them, and `nip-astra --install-completion` has the shell complete them.",
    ]
    for name, command in command_tree():
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        given = " ".join(one.metavar or one.name.upper() for one in arguments)
        lines += ["", f"## `{name}`", "", inspect.cleandoc(command.help or ""), ""]
        lines += [f"    nip-astra {name} {given}".rstrip(), ""]
        lines += ["| option | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| {' | '.join(_cells(one))} |" for one in command.params]
    return "\n".join(lines) + "\n"


def _cells(option: Any) -> list[str]:
    if option.param_type_name == "argument":
        names = f"`{option.metavar or option.name.upper()}`"
    else:
        value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
        names = ", ".join(f"`{one}{value}`" for one in (*option.opts, *option.secondary_opts))
    is_given = option.default not in (None, False) and not option.required
    default = f"`{to_json(option.default)}`" if is_given else ""
    return [cell.replace("|", "\\|") for cell in (names, default, option.help or "")]
