"""The plain way of benchmarks/ast_speed.py is no straw man: it computes what ours computes."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch


class Modules(NamedTuple):
    """The files of the benchmark, which are in no package."""

    ours: ModuleType
    plain: ModuleType
    speed: ModuleType
    work: ModuleType


@pytest.fixture(scope="module")
def modules(load: Callable[[str], ModuleType]) -> Modules:
    names = ("our_ast", "plain_ast", "ast_speed", "ast_work")
    return Modules(*map(load, names))


class Ways(NamedTuple):
    """Both ways, built for one setting."""

    setting: Any
    files: Any
    plain: Any
    ours: Any


def build(modules: Modules, root: Path, *, is_end_padding: bool = False, **changes: Any) -> Ways:
    setting = modules.work.Setting(context=12, turn_tokens=6, episodes=2, depth=2)
    setting = replace(setting, **changes)
    files = modules.work.write_scenario(setting, root)
    if is_end_padding:
        path = Path(files.model) / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"pad_token_id": config["eos_token_id"]}))
    plain = modules.work.build_plain(setting, files)
    ours = modules.ours.OurAst(setting, files)
    # Ours says no role markers; the plain way is told not to.
    tokenizer = plain.attacker.tokenizer
    markers = tuple(set(tokenizer.all_special_ids) - {tokenizer.eos_token_id})
    for model in (plain.attacker, plain.target):
        model.suppressed_ids = markers
    return Ways(setting, files, plain, ours)


@pytest.fixture(scope="module")
def sampled(modules: Modules, tmp_path_factory: pytest.TempPathFactory) -> Ways:
    return build(modules, tmp_path_factory.mktemp("sampled"))


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(
    modules: Modules, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Ways:
    return build(modules, tmp_path_factory.mktemp("trained"), mode=request.param, width=3)


def by_level(trees: list[list[Any]]) -> list[Any]:
    """The nodes as ours orders them: by depth, then episode, then branch."""
    found: list[Any] = []
    level = [node for tree in trees for node in tree]
    while level:
        found += level
        level = [child for node in level for child in node.children]
    return found


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (2, 2)])
def test_greedy_conversations_are_the_same(
    modules: Modules, tmp_path: Path, width: int, depth: int
) -> None:
    ways = build(modules, tmp_path, width=width, depth=depth, temperature=0.0)
    tree = ways.ours.play(0).tree
    nodes = by_level(ways.plain.play(tree.prompts, width=width, depth=depth))
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


def test_sampled_tokens_have_the_same_log_probabilities(sampled: Ways) -> None:
    tree = sampled.ours.play(0).tree
    contexts = [tree.context_of(number) for number in range(tree.num_nodes)]
    probes = tree.nodes["probe"].tolist()
    for role, name in (("attacker", "probe_logprobs"), ("reference", "reference_logprobs")):
        with torch.no_grad():
            logprobs = getattr(sampled.plain, role).logprobs(contexts, probes)
        total = tree.nodes[name].sum(dim=1)
        torch.testing.assert_close(logprobs.sum(dim=1), total, rtol=0, atol=1e-4)


def test_log_probabilities_of_rows_of_different_lengths_do_not_touch_each_other(
    sampled: Ways,
) -> None:
    model = sampled.plain.target
    rows = [([3, 8, 9], [10, 11]), ([3, 8], [12]), ([3, 20, 21, 22], [23, 24, 25])]
    with torch.no_grad():
        together = model.logprobs(*zip(*rows, strict=True)).sum(dim=1)
        alone = [model.logprobs([context], [said]).sum() for context, said in rows]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-5)


def test_turns_after_contexts_of_different_lengths_do_not_touch_each_other(
    modules: Modules, sampled: Ways
) -> None:
    greedy = sampled.setting.sampling("target")._replace(temperature=0.0)
    model = modules.plain.PlainModel(
        sampled.plain.target.module,
        sampled.plain.target.tokenizer,
        sampled.plain.target.conversation_format,
        greedy,
    )
    contexts = [[3, 8, 9, 10, 11, 12], [20, 21], [30, 31, 32]]
    alone = [model.generate([context])[0] for context in contexts]
    assert model.generate(contexts) == alone
    assert {len(turn) for turn in alone} == {greedy.num_tokens}


def test_loss_and_gradients_are_the_same(modules: Modules, trained: Ways) -> None:
    samples = modules.ours.samples_of_few_trees(trained.ours.play(0), 3)
    before = [parameter.clone() for parameter in trained.ours.trainer.policy.parameters()]
    deviation = modules.ours.update_deviation(trained.ours, trained.plain, samples)
    assert deviation.loss < 1e-5
    assert deviation.gradient_of_worst_parameter < 1e-4
    for parameter, value in zip(trained.ours.trainer.policy.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_gradients_are_the_same_where_the_end_of_a_turn_is_the_padding(
    modules: Modules, tmp_path: Path
) -> None:
    """As in SmolLM2, whose every context holds ends of turns."""
    ways = build(modules, tmp_path, mode="full", is_end_padding=True)
    samples = modules.ours.samples_of_few_trees(ways.ours.play(0), 3)
    deviation = modules.ours.update_deviation(ways.ours, ways.plain, samples)
    assert deviation.gradient_of_worst_parameter < 1e-4


def test_another_loss_would_be_noticed(
    modules: Modules, trained: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained.plain, "beta", 0.2)
    samples = modules.ours.samples_of_few_trees(trained.ours.play(0), 3)
    deviation = modules.ours.update_deviation(trained.ours, trained.plain, samples)
    assert deviation.gradient > 0.1


def test_both_pair_the_best_with_the_worst_sibling(modules: Modules, trained: Ways) -> None:
    width, depth = trained.setting.width, trained.setting.depth
    trees = trained.plain.play(trained.files.prompts, width=width, depth=depth)
    pairs = trained.plain.pairs(trees)
    # One a group: the roots, and the children of each.
    assert len(pairs) == 2 * (1 + width) == len(trained.ours.play(0).samples)
    ranked = sorted(trees[0], key=lambda node: node.reward)
    assert pairs[0] == modules.plain.Pair(trees[0][0].context, ranked[-1].probe, ranked[0].probe)


def test_a_step_moves_the_attacker_alone_towards_the_chosen_probe(
    modules: Modules, tmp_path: Path
) -> None:
    plain = build(modules, tmp_path, mode="full").plain
    plain.optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    pair = modules.plain.Pair([3, 8, 9], [10, 11], [12, 13])
    reference = plain.reference.module.get_output_embeddings().weight.clone()
    first = plain.step(pair)
    assert first == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-4)
    assert plain.step(pair) < first
    assert torch.equal(plain.reference.module.get_output_embeddings().weight, reference)


def test_the_plain_way_counts_what_it_forwards(sampled: Ways) -> None:
    before = sampled.plain.forwarded()
    nodes = sampled.plain.play(sampled.files.prompts[:1], width=2, depth=1)[0]
    found = {role: count - before[role] for role, count in sampled.plain.forwarded().items()}
    turn, context = sampled.setting.turn_tokens, len(nodes[0].context)
    # The last token that is said is read by nobody.
    assert found["attacker"] == 2 * (context + turn - 1)
    # It answers, and then reads each probe again for its log-probabilities.
    assert found["target"] > 2 * (context + turn)
    assert found["reference"] == 0


def test_the_floor_of_a_chain_is_its_last_context(modules: Modules, sampled: Ways) -> None:
    chain = replace(sampled.setting, width=1, depth=2)
    unique = modules.work.unique_rollout_tokens(chain, sampled.files)
    trees = sampled.plain.play(sampled.files.prompts, width=1, depth=2)
    last = [tree[0].children[0] for tree in trees]
    read = sum(len(node.context) + chain.turn_tokens - 1 for node in last)
    # The system prompt and what stands before the opening is the same in both trees.
    shared = next(
        position
        for position, tokens in enumerate(zip(*(node.context for node in last), strict=False))
        if len(set(tokens)) > 1
    )
    assert unique["attacker"] == unique["reference"] == read - shared


def test_the_ways_take_turns(modules: Modules) -> None:
    turns = modules.speed.turns
    assert list(turns(["a"], 3, 2)) == ["plain", "a", "plain", "a", "a"]
    assert list(turns(["a", "b"], 1, 2)) == ["plain", "a", "b", "plain"]


SMALL = ("--model", "tiny", "--width", "2", "--depth", "2", "--episodes", "1", "--repeats", "1")
SHORT = ("--context", "12", "--turn-tokens", "6")


def run(modules: Modules, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the script and give its JSON."""
    modules.speed.main([*SMALL, *SHORT, *arguments, "--out", str(folder / "figures.json")])
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def test_the_script_tells_ratios_and_scales_what_was_not_played(
    modules: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(modules, tmp_path, "--episodes", "2", "--plain-episodes", "1")
    assert {row["part"] for row in report["ratios"]} == {"rollout", "update", "iteration"}
    for row in report["ratios"]:
        assert row["ratio"] > 0
        assert row["ratio"] == pytest.approx(row["plain, s"] / row["ours, s"])
        assert row["is scaled"] == ("" if row["part"] == "update" else "scaled")
    assert report["parts"]["deviation"]["fp32"]["loss"] < 1e-5
    figures = report["parts"]["iteration"]["plain"]
    phases = figures["phases"]
    assert phases["rollout"] >= phases["attacker generate"] + phases["target generate"]
    assert phases["update"] >= phases["loss forward"] + phases["backward"]
    assert phases["rollout"] == pytest.approx(2 * figures["runs"][0]["rollout"])
    shown = capsys.readouterr().out
    assert "| iteration | fp32 |" in shown
    assert str(tmp_path) not in shown + json.dumps(report)


def test_trl_that_is_missing_is_named(
    modules: Modules, load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = importlib.metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit, match="pip install trl"):
        load("trl_online_dpo").measure(modules.work.Setting(), "fp32", 1)


@pytest.mark.slow
def test_memory_and_trl_are_measured(modules: Modules, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    report = run(modules, tmp_path, "--parts", "none", "--memory", "--trl")
    assert [figures["way"] for figures in report["memory"]] == ["plain", "fp32"]
    for figures in report["memory"]:
        assert figures["peak"] >= figures["peak_of_iteration"] >= figures["peak_of_rollout"] > 0
    assert report["trl"][0]["shown"]["ratio"] > 0
