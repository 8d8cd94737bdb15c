"""A program's uses of nip: names that it imports, attributes, keywords and keys of rollouts."""

from __future__ import annotations

import ast

ROOTS = {
    *("self", "super", "loss_module", "environment", "combined_agent", "protocol_handler"),
    *("shared_model_group", "arguments", "cmd_args", "experiment", "trainer", "hyper_params"),
}
"""Variables that hold what nip gives."""


def uses(source: str) -> set[str]:
    """A program's uses, as `import x.y`, `self.x.y`, `f(keyword=)` and `[key]`."""
    tree = ast.parse(source)
    found, imported = set(), set()
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nip":
            imported |= {alias.name for alias in node.names}
            found |= {f"import {node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {f"import {one.name}" for one in node.names if one.name.startswith("nip.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain and chain[0] in ROOTS and chain[1] not in defined:
                found.add(".".join(chain))
        elif isinstance(node, ast.Call):
            chain = _chain(node.func)
            is_of_nip = chain and (chain[0] in imported or chain[0] in ROOTS)
            if is_of_nip and chain[-1] not in {*defined, "add_argument"}:
                found |= {f"{chain[-1]}({one.arg}=)" for one in node.keywords if one.arg}
        elif isinstance(node, ast.Subscript):
            key = _key(node.slice)
            if key and ("agents" in key or key[0] in KEYS):
                found.add(f"[{', '.join(key)}]")
    return found


KEYS = {"round", "datapoint_id", "padding", "next", "done"}
"""First names of keys of rollouts, beside `agents`."""


def _chain(node: ast.AST) -> list[str]:
    """The names of `a.b.c`; `super` for a call of it."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        node = node.func
    return [node.id, *names[::-1]] if isinstance(node, ast.Name) else []


def _key(node: ast.AST) -> list[str]:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [one.value for one in parts if isinstance(one, ast.Constant)]
    return names if len(names) == len(parts) and all(isinstance(n, str) for n in names) else []
