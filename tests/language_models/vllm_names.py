"""Read vLLM's argument names from its wheel, for the fake to enforce.

pip download --no-deps vllm==0.30.0 -d wheels
python -m tests.language_models.vllm_names wheels/*.whl > tests/language_models/vllm_names.json
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

NAMES = Path(__file__).with_suffix(".json")
CLASSES = {
    "SamplingParams": "vllm/sampling_params.py",
    "EngineArgs": "vllm/engine/arg_utils.py",
    "LoRARequest": "vllm/lora/request.py",
}
METHODS = ("generate", "apply_model", "reset_prefix_cache", "sleep", "wake_up")
"""Methods of `LLM` that the fake has."""


def known_names() -> dict[str, dict[str, list[str]]]:
    """The fields of each class and the arguments of each method, by version."""
    result: dict[str, dict[str, list[str]]] = json.loads(NAMES.read_text())
    return result


def _class(wheel: zipfile.ZipFile, file: str, name: str) -> ast.ClassDef:
    tree = ast.parse(wheel.read(file))
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def read_wheel(path: str) -> dict[str, list[str]]:
    names = {}
    with zipfile.ZipFile(path) as wheel:
        for name, file in CLASSES.items():
            body = _class(wheel, file, name).body
            names[name] = sorted(
                n.target.id
                for n in body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            )
        for node in _class(wheel, "vllm/entrypoints/llm.py", "LLM").body:
            if isinstance(node, ast.FunctionDef) and node.name in METHODS:
                arguments = [*node.args.args, *node.args.kwonlyargs]
                names[f"LLM.{node.name}"] = [a.arg for a in arguments if a.arg != "self"]
    return names


if __name__ == "__main__":
    versions = []
    for path in sys.argv[1:]:
        rows = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in read_wheel(path).items())
        versions.append(f'"{Path(path).name.split("-")[1]}": {{\n' + ",\n".join(rows) + "\n}")
    print("{\n" + ",\n".join(versions) + "\n}")
