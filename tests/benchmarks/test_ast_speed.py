"""The baseline of benchmarks/ast_speed.py computes the same as our implementation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.kit.documents import ROOT


class Modules(NamedTuple):
    """The benchmark's files, which belong to no package."""

    ours: ModuleType
    plain: ModuleType
    speed: ModuleType


@pytest.fixture(scope="module")
def modules(load: Callable[[str], ModuleType]) -> Modules:
    return Modules(*map(load, ("our_ast", "plain_ast", "ast_speed")))


class Implementations(NamedTuple):
    """Baseline and our implementation, built for one setting."""

    setting: Any
    prompts: list[str]
    plain: Any
    ours: Any


def build(modules: Modules, *overrides: str, **changes: Any) -> Implementations:
    setting = modules.ours.Setting("pocket_chat", context=12, turn_tokens=6, episodes=2, depth=2)
    setting = replace(setting, **changes)
    resolved = setting.resolve("fp32", *overrides)
    prompts = setting.openings(resolved)
    plain, ours = modules.plain.PlainAst(resolved), modules.ours.OurAst(resolved, prompts)
    # Ours never generates role markers; suppress them in the baseline.
    tokenizer = plain.attacker.tokenizer
    markers = tuple(set(tokenizer.all_special_ids) - {tokenizer.eos_token_id})
    for model in (plain.attacker, plain.target):
        model.suppressed_ids = markers
    return Implementations(setting, prompts, plain, ours)


def by_level(trees: list[list[Any]]) -> list[Any]:
    """The nodes as ours orders them: by depth, then episode, then branch."""
    nodes: list[Any] = []
    level = [node for tree in trees for node in tree]
    while level:
        nodes += level
        level = [child for node in level for child in node.children]
    return nodes


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (2, 2)])
def test_greedy_conversations_are_the_same(modules: Modules, width: int, depth: int) -> None:
    both = build(modules, width=width, depth=depth, temperature=0.0)
    tree = both.ours.play(0).tree
    nodes = by_level(both.plain.play(tree.prompts, width=width, depth=depth))
    assert [node.probe_text for node in nodes] == tree.probes
    assert [node.response_text for node in nodes] == tree.responses
    assert len({node.response_text for node in nodes}) > 1
    contexts = [tree.context_of(number) for number in range(tree.num_nodes)]
    assert [node.context for node in nodes] == contexts
    # The likelihood model is the target.
    nll = torch.tensor([node.nll for node in nodes])
    torch.testing.assert_close(nll, tree.nodes["probe_nll"], rtol=0, atol=1e-4)
    rewards = torch.tensor([node.reward for node in nodes])
    torch.testing.assert_close(rewards, tree.nodes["reward"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_lora", [True, False])
def test_pairs_loss_and_gradients_are_the_same_and_another_loss_would_be_noticed(
    modules: Modules, is_lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in SmolLM2, every context contains end-of-turn tokens, which are the padding.
    folder = tmp_path / "attacker"
    shutil.copytree(ROOT / "scenarios" / "pocket_chat" / "models" / "attacker", folder)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    model = "ast_chat.attacker.language_model"
    overrides = [f"{model}.lora={{rank: 4}}"] if is_lora else [f"{model}.model={folder}"]
    setting, prompts, plain, ours = build(modules, *overrides, width=3)
    trees = plain.play(prompts, width=3, depth=setting.depth)
    pairs = plain.pairs(trees)
    samples = ours.play(0).samples
    # One per group: the roots, and the children of each.
    assert len(pairs) == 2 * (1 + 3) == len(samples)
    ranked = sorted(trees[0], key=lambda node: node.reward)
    assert pairs[0] == modules.plain.Pair(trees[0][0].context, ranked[-1].probe, ranked[0].probe)
    samples = modules.ours.pairs_of_few_trees(samples, 3)
    before = [parameter.clone() for parameter in ours.trainer.policy.parameters()]
    deviation = modules.ours.update_deviation(ours, plain, samples)
    assert deviation.loss < 1e-5
    assert deviation.gradient_of_worst_parameter < 1e-4
    for parameter, value in zip(ours.trainer.policy.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
    monkeypatch.setattr(plain, "beta", 0.2)
    assert modules.ours.update_deviation(ours, plain, samples).gradient > 0.1


def test_forwarded_tokens_are_counted(modules: Modules) -> None:
    setting, prompts, plain, ours = build(modules)
    turn, models = setting.turn_tokens, (plain.attacker, plain.target, plain.reference)
    nodes = plain.play(prompts[:1], width=2, depth=1)[0]
    attacker, target, reference = (model.num_forwarded for model in models)
    # No model reads the last generated token.
    context = len(nodes[0].context)
    assert attacker == 2 * (context + turn - 1)
    # It answers, and then reads each probe again for its log-probabilities.
    assert target > 2 * (context + turn)
    assert reference == 0
    rollout = ours.iterate(1, learns=False)["rollout"]
    assert 0 < rollout.unique <= rollout.forwarded < 1.2 * rollout.unique
    assert modules.speed.Cost(1.5, 100, 10).scaled(2) == (3.0, 200, 20)


SMALL = ("--scenario", "pocket_chat", "--depth", "2", "--episodes", "1", "--rounds", "1")
SHORT = ("--context", "12", "--turn-tokens", "6")


def run(modules: Modules, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the script, and return its JSON."""
    modules.speed.main([*SMALL, *SHORT, *arguments, "--out", str(folder / "figures.json")])
    return json.loads((folder / "figures.json").read_text())


def test_the_script_reports_ratios_and_scales_the_baseline_to_all_episodes(
    modules: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(modules, tmp_path, "--episodes", "2", "--plain-episodes", "1")
    assert {row["part"] for row in report["ratios"]} == {"rollout", "update", "iteration"}
    for row in report["ratios"]:
        assert row["ratio"] == pytest.approx(row["plain, s"] / row["ours, s"])
        if row["part"] != "iteration":
            assert row["plain forwarded per unique"] > row["ours forwarded per unique"] >= 1
    assert report["deviation"]["fp32"]["loss"] < 1e-5
    plain = report["runs"][1]["plain"][0]
    assert plain["iteration"][0] > plain["rollout"][0]
    assert "| iteration | fp32 |" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_and_trl_are_measured(modules: Modules, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    report = run(modules, tmp_path, "--parts", "--memory", "--trl")
    assert [figures["way"] for figures in report["memory"]] == ["plain", "fp32"]
    for figures in report["memory"]:
        assert figures["peak_of_iteration"] >= figures["peak_of_rollout"] > 0
    assert report["trl"][0]["shown"]["ratio"] > 0
