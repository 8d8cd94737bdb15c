"""From names, files and options to an experiment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from nip_astra.errors import ConfigurationError, ParameterError, PluginError
from nip_astra.parameters import content
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.types import ScenarioType
from nip_astra.protocols.library import AdpProtocol
from nip_astra.protocols.registry import register_protocol_handler
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.sweep.plan import grid_of
from nip_astra.tracking.run_directory import to_yaml

TERM = """
from nip_astra.reward_terms.probe_terms import EntropyBonus
from nip_astra.reward_terms.base import register_reward_term

@register_reward_term("of_a_preset")
class Mine(EntropyBonus):
    '''Mine.'''
"""


@pytest.mark.parametrize("text", ["cost ${price} \\${a.b}", "${", "a$", "\\\\${x}"])
def test_a_literal_dollar_and_brace_of_an_object_is_text(text: str, tmp_path: Path) -> None:
    kind = str(ScenarioType.AST_CHAT)
    sections = {kind: SCENARIOS.get(kind).Parameters}
    plain = resolve_experiment(trainer="ast_dpo").hyper_params.to_dict()
    attacker = {**plain[kind]["attacker"], "system_prompt": text}
    values = {"trainer": "ast_dpo", "scenario": "pocket_chat"}
    given = HyperParameters.with_sections(sections).from_dict(
        values | {kind: {**plain[kind], "attacker": attacker}}
    )
    result = resolve_experiment(hyper_params=given).hyper_params
    assert result.get(f"{kind}.attacker.system_prompt") == text
    # This is kept in the file of a run and for the runs that build on it.
    file = tmp_path / "hyper_parameters.yaml"
    file.write_text(to_yaml(result.to_dict()))
    base = ["base_run.base_run_type=parameters", f"base_run.run={tmp_path}"]
    for source in ({"parameter_file": file}, {**values, "overrides": base}):
        later = resolve_experiment(**source).hyper_params
        assert later.get(f"{kind}.attacker.system_prompt") == text


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins_left: None) -> Path:
    """A preset with a plug-in beside it, in its own content folder."""
    root = tmp_path / "content"
    shutil.copytree(content.content_root() / "parameters" / "ast_dpo", root / "parameters/ast_dpo")
    (root / "scenarios").symlink_to(content.content_root() / "scenarios")
    path = root / "parameters" / "ast_dpo" / "pocket_chat.yaml"
    values = yaml.safe_load(path.read_text())
    values["plugins"] = ["term.py"]
    values["ast_chat"] = {"reward": {"terms": [{"_type": "of_a_preset"}]}}
    path.write_text(yaml.safe_dump(values))
    (path.parent / "term.py").write_text(TERM)
    monkeypatch.setattr(content, "content_root", lambda: root)
    return path


def test_the_plugins_of_a_preset_are_loaded_and_recorded(preset: Path) -> None:
    result = resolve_experiment(trainer="ast_dpo", scenario="pocket_chat").hyper_params
    assert result.get("ast_chat.reward.terms.0").type_name == "of_a_preset"
    assert result.plugins == [str(preset.parent / "term.py")]


def test_a_missing_plugin_of_a_preset_is_reported_unless_an_option_replaces_it(
    preset: Path,
) -> None:
    (preset.parent / "term.py").unlink()
    with pytest.raises(PluginError, match=r"term\.py"):
        resolve_experiment(trainer="ast_dpo", scenario="pocket_chat")
    overrides = ["plugins=[]", "ast_chat.reward.terms=[]"]
    result = resolve_experiment(trainer="ast_dpo", scenario="pocket_chat", overrides=overrides)
    assert result.hyper_params.plugins == []


class JudgedProtocol(AdpProtocol):
    """Agents that no other protocol has."""

    agent_names = ("expert", "judge")
    agent_channel_visibility = (("expert", "main"), ("judge", "main"))
    verifier_names = ("judge",)
    prover_names = ("expert",)

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return agent_name == self.agent_names[round_index]


@pytest.mark.usefixtures("no_plugins_left")
def test_scenario_parameters_for_agents_of_other_protocols_are_left_out() -> None:
    register_protocol_handler("judged")(JudgedProtocol)

    def agents(*overrides: str) -> set[str]:
        resolved = resolve_experiment(
            trainer="vanilla_ppo",
            scenario="graph_isomorphism_small",
            overrides=["interaction_protocol=judged", *overrides],
        )
        return set(resolved.hyper_params.get("graph_isomorphism.agents"))

    assert agents() == {"default"}
    assert agents("graph_isomorphism.agents.judge.num_gnn_layers=2") == {"default", "judge"}
    requested = agents("graph_isomorphism.agents.verifier.num_gnn_layers=3")
    assert "verifier" in requested, "it is refused later, not left out"


def test_an_experiment_is_not_made_of_a_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'ast_dpo' \(str\)"):
        resolve_experiment(hyper_params="ast_dpo")  # type: ignore[arg-type]


def test_paths_that_an_option_gives_mean_the_same_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including a bare folder with a model; a folder that happens to have the name is ignored."""
    (tmp_path / "mine.txt").write_text("hello\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adamw").mkdir()
    monkeypatch.chdir(tmp_path)
    meant = {
        "ast_chat.prompts.test=mine.txt": str(tmp_path / "mine.txt"),
        "ast_chat.prompts.dev=./none.txt": "./none.txt",
        "ast_chat.target.language_model.model=model": str(tmp_path / "model"),
        "training.optimizer=adamw": "adamw",
    }
    resolved = resolve_experiment(trainer="ast_dpo", overrides=list(meant)).hyper_params
    for override, value in meant.items():
        assert resolved.get(override.partition("=")[0]) == value
    assert grid_of(["a=mine.txt,other"]) == {"a": [str(tmp_path / "mine.txt"), "other"]}


COUNTS = {
    "self_hosted_grpo": "self_hosted_grpo.group_size task.evaluation.num_runs "
    "task.evaluation.num_dev_runs",
    "pure_text_malt": "nip.max_message_rounds nip.min_message_rounds "
    "pure_text_malt.num_responses_per_timestep",
}


@pytest.mark.parametrize("trainer", COUNTS)
def test_counts_that_no_memory_holds_are_refused(trainer: str) -> None:
    counts = COUNTS[trainer].split()
    with pytest.raises(ParameterError) as caught:
        resolve_experiment(trainer=trainer, overrides=[f"{name}=1000000000" for name in counts])
    assert sorted(fault.path for fault in caught.value.faults) == sorted(counts)
