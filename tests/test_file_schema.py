"""The JSON Schema of parameter files: files that it accepts and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from nip_astra.parameters.content import content_root
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.tracking.run_directory import to_yaml
from tests.kit.command_line import CommandLine

FILES = sorted((content_root() / "parameters").glob("*/*.yaml"))
SCHEMA = content_root() / "parameters" / "schema.json"
VALIDATOR = Draft7Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def faults(text: str) -> list[str]:
    """Errors that an editor marks in a file."""
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    # JSON has no numeric keys.
    return [one.json_path for one in VALIDATOR.iter_errors(json.loads(json.dumps(values)))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_file_that_ships_passes_and_names_its_schema(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert faults(text) == []
    first = text.partition("\n")[0]
    mark = "# yaml-language-server: $schema="
    assert first.startswith(mark)
    assert (file.parent / first.removeprefix(mark)).resolve() == SCHEMA.resolve()


@pytest.mark.parametrize("trainer", ["ast_dpo", "vanilla_ppo"])
def test_the_parameter_file_of_a_run_is_valid(trainer: str) -> None:
    assert faults(to_yaml(resolve_experiment(trainer=trainer).hyper_params.to_dict())) == []


@pytest.mark.parametrize(
    "text",
    [
        "extends: other.yaml",
        "training: {lr: '${ast_sft.lr}', minibatch_size: '${oc.env:BATCH}', max_grad_norm: null}",
        "training: ${mine}\nmine: {anything: 1}",
        "seed: ???",
        "ast_chat: {target: {temperature: 0.5}}",
        "ast_chat: {reward: {terms: [{_type: entropy_bonus, weight: '${mine.weight}'}]}}",
        "ast_chat: {reward: {terms: {0: {weight: 0.5}}}}",
        "settings: {checkpoint_period: 5, wandb_tags: [a, b]}",
        "my_trainer: {my_option: [1, {a: b}]}\ntrainer: my_trainer",
    ],
)
def test_parts_references_and_sections_of_plugins_pass(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("training: {lrr: 1e-4}", "$.training"),
        ("training: {lr: -1}", "$.training.lr"),
        ("training: {batch_order: by_episod}", "$.training.batch_order"),
        ("sede: 3", "$.sede"),
        ("extends: [a.yaml]", "$.extends"),
        ("ast_dpo: {beta: [1]}", "$.ast_dpo.beta"),
        ("settings: {checkpoint_period: -1}", "$.settings.checkpoint_period"),
        ("settings: {run_directory: x}", "$.settings"),
    ],
)
def test_values_refused_by_the_loader_are_marked(text: str, path: str) -> None:
    assert any(path.startswith(result) for result in faults(text)), faults(text)


def test_every_value_has_a_description() -> None:
    Draft7Validator.check_schema(VALIDATOR.schema)
    silent = [path for path, schema in _values(VALIDATOR.schema, "") if "description" not in schema]
    assert [path for path in silent if not path.endswith("._type")] == []


def _values(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, item in schema.get("properties", {}).items():
        yield f"{path}.{name}", item
    for name, item in schema.get("definitions", {}).items():
        yield from _values(item, name)


def test_the_schema_of_one_trainer_knows_its_sections_only(cli: CommandLine, toy: Path) -> None:
    out = cli.ok("schema", "--trainer", "toy_trainer", "--scenario", str(toy)).out
    schema = json.loads(out)
    Draft7Validator.check_schema(schema)
    assert {"toy_trainer", "toy_kind", "settings", "extends"} <= set(schema["properties"])
    assert "ast_dpo" not in schema["properties"]
    assert schema["additionalProperties"] is False
    assert "What is added to each count." in out
