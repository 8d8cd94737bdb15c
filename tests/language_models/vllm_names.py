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
METHODS = {"LLM": "vllm/entrypoints/llm.py", "LLMEngine": "vllm/v1/engine/llm_engine.py"}


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
        for name, file in METHODS.items():
            for node in _class(wheel, file, name).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    given = [*node.args.args, *node.args.kwonlyargs]
                    names[f"{name}.{node.name}"] = [a.arg for a in given if a.arg != "self"]
    return names


if __name__ == "__main__":
    versions = {Path(path).name.split("-")[1]: read_wheel(path) for path in sys.argv[1:]}
    print(json.dumps(versions, indent=0))
