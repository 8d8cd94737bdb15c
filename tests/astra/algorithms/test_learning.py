"""DPO, IPO and PPO learn through the interface, with the losses of the registered trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.astra import DPO, IPO, PPO, ASTSampler
from nip_astra.astra.core.sampler import Graph, Node
from nip_astra.errors import ConfigurationError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.scorers.base import build_scorer
from tests.astra.conftest import Models
from tests.astra.toys import PROMPTS, SHORT, ValuedWordProblem, WordProblem, hf_problem, says, train
from tests.kit.learning import Learning
from tests.kit.tiny import learn, write_scenario

LEARN = {"lr": 1e-2, "batch_size": 16, "num_episodes_per_experience": 16}


@pytest.mark.parametrize(
    ("name", "algorithm"), [("ast_dpo", DPO), ("ast_ipo", IPO), ("ast_ppo", PPO)]
)
def test_weights_end_where_those_of_the_registered_trainer_end(
    tmp_path: Path, name: str, algorithm: Any
) -> None:
    # A single batch per iteration, since the two order samples differently.
    shared = {"num_iterations": 2, "minibatch_size": 64, "num_episodes_per_experience": 3}
    shared |= {"lr": 3e-3}
    scenario = write_scenario(tmp_path)
    overrides = [f"training.{key}={value}" for key, value in shared.items()]
    resolved = resolve_experiment(trainer=name, scenario=str(scenario), overrides=overrides, seed=5)
    registered = prepare_experiment(resolved, progress=False).trainer
    learn(registered)

    section = registered.scenario
    scorer = build_scorer(section.scorer, device=torch.device("cpu"), scenario_dir=scenario)
    folders = Models(scenario / "attacker", scenario / "target")
    problem = hf_problem(folders, scorer, likelihood_model="reference")
    prompts = registered.scenario_instance.datasets["train"]
    env = ASTSampler(problem, prompts, section.tree_width, section.tree_depth)
    config = registered.training.to_dict() | shared | {"seed": 5}
    options = registered.parameters.to_dict() if name != "ast_ppo" else {}
    trainer = train(algorithm(problem, **options), env, **config)
    assert trainer._loop.state.num_optimizer_steps == registered.state.num_optimizer_steps > 0
    ours, theirs = (list(one.policy.parameters()) for one in (trainer._loop, registered))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def node(probe: str, reward: float, *children: Node, context: str = "hello", **more: Any) -> Node:
    return Node(context, probe, "fine", reward, list(children), **more)


def test_the_best_and_the_worst_of_every_group_make_a_pair_whatever_its_size() -> None:
    deep = node(" cat mat", 1.0, node(" you", 0.2, context="x"), node(" sat", 0.9, context="x"))
    graph = Graph("hello", [deep, node(" silly", 0.5), node(" mat", 0.0)])
    solver = DPO(WordProblem())
    pairs = {(pair.prefix, pair.suffix_pos, pair.suffix_neg) for pair in solver.flatten(graph)}
    assert pairs == {("hello", " cat mat", " mat"), ("x", " sat", " you")}
    # Ties, equal probes, missing verdicts and groups of fewer than two make none.
    cat, mat = node(" cat", 1.0), node(" mat", 1.0)
    unknown, low = node(" cat", float("nan")), node(" cat", 0.0)
    for children in ([cat, mat], [cat, low], [unknown, mat], [cat], []):
        assert solver.flatten(Graph("a", children)) == []


def test_a_subclass_may_override_step_alone_and_read_the_batch_as_lists(
    learning: Learning,
) -> None:
    class Hinge(DPO):
        def step(self, batch: Any) -> Any:
            best = self.system._get_tester_logprobs_and_validate(batch.prefixes, batch.suffix_pos)
            worst = self.system._get_attacker_logprobs_and_validate(
                batch.prefixes, batch.suffix_neg
            )
            loss = torch.relu(1 - self.beta * (best.sum(dim=-1) - worst.sum(dim=-1))).mean()
            return loss, {"margin": float(loss.detach()), "note": "text is not logged"}

    problem = WordProblem(ppl_weight=0.0)
    train(Hinge(problem), training_steps=20, seed=learning.seed, **{**LEARN, "lr": 0.1})
    learning.check(says(problem, "silly"), threshold=0.6, best=1.0)


def test_options_are_those_of_the_registered_trainers_and_others_are_refused() -> None:
    problem = ValuedWordProblem()
    assert DPO(problem, loss="hinge").parameters.loss == "hinge"
    assert PPO(problem, 0.3, 0.7, gamma=0.5).parameters.gamma == 0.5
    for build, fact in (
        (lambda: IPO(problem, loss="hinge"), "loss"),
        (lambda: PPO(problem, value_clip_rang=0.1), "'value_clip_range'"),
        (lambda: DPO(problem, weak_supervision={"probes": "x.txt"}), "weak_supervision"),
        (lambda: DPO(problem, loss="nca"), "nca"),
        (lambda: DPO(problem, divergence="js"), "js"),
        (lambda: IPO(problem, max_staleness=2), "max_staleness"),
        (lambda: PPO(problem, max_staleness=2), "max_staleness"),
        (lambda: PPO(WordProblem()), "WordProblem"),
    ):
        with pytest.raises(ConfigurationError, match=fact):
            build()


def test_values_of_either_shape_train_and_teach_the_same() -> None:
    learned = []
    for has_last_dimension in (False, True):
        problem = ValuedWordProblem(ppl_weight=0.0)
        problem.has_last_dimension = has_last_dimension
        train(PPO(problem), training_steps=2, **LEARN)
        assert float(problem.guess.detach()) != 0, "the value function is trained"
        learned.append(problem.attacker.logits.detach())
    assert torch.equal(*learned)


def test_values_in_other_places_than_log_probabilities_are_refused() -> None:
    class Short(ValuedWordProblem):
        def value(self, context: Any, continuation: Any) -> torch.Tensor:
            return self.guess.expand(len(context), 2)

    problem = Short()
    with pytest.raises(ConfigurationError, match=r"\[2, 2\].*\[2, 5\]"):
        _batch(problem, PPO(problem))


def _batch(problem: Any, solver: Any) -> Any:
    return solver.collate_fn(
        solver.flatten(Graph("hello", [node(" cat mat", 1.0), node(" you sat", 0.0)]))
    )


@pytest.mark.parametrize(("clip_range", "is_held"), [(0.1, True), (0.4, False)])
def test_the_clip_range_is_the_given_range(clip_range: float, is_held: bool) -> None:
    problem = ValuedWordProblem()
    solver = PPO(problem, clip_range, 0.0, kl={"weight": 0.0}, whiten_advantages=False)
    batch = _batch(problem, solver)
    batch.tokens["old_logprobs"] = batch.tokens["old_logprobs"] - 0.2  # a ratio of 1.22
    _, metrics = solver.step(batch)
    assert float(metrics["clip_fraction"]) == pytest.approx(0.5 if is_held else 0.0)


def test_context_and_padding_do_not_enter_the_loss() -> None:
    class Wide(ValuedWordProblem):
        def get_attacker_logprobs(self, context: Any, continuation: Any) -> torch.Tensor:
            return torch.nn.functional.pad(
                super().get_attacker_logprobs(context, continuation), (3, 9)
            )

        def value(self, context: Any, continuation: Any) -> torch.Tensor:
            return self.guess.expand(len(context), 17)

    losses = []
    for kind in (ValuedWordProblem, Wide):
        problem = kind()
        solver = PPO(problem)
        loss, _ = solver.step(_batch(problem, solver))
        loss.backward()
        losses.append((loss.item(), problem.attacker.logits.grad.tolist()))
    assert losses[0][0] == pytest.approx(losses[1][0])
    assert losses[0][1] == pytest.approx(losses[1][1])


def test_a_probe_whose_tokens_no_longer_match_is_left_out_and_counted() -> None:
    problem = ValuedWordProblem()
    known = {"reference_logprobs": torch.zeros(3) - 1}
    graph = Graph("hello", [node(" cat mat", 1.0, **known), node(" you sat", 0.0)])
    solver = PPO(problem)
    assert [step.suffix for step in solver.flatten(graph)] == [" you sat"]
    assert solver.flatten_metrics["num_unmatched"] == 1


def test_a_probe_that_is_scored_as_other_tokens_at_its_step_is_not_learnt_from() -> None:
    class Drifts(ValuedWordProblem):
        is_longer = False

        def _logprobs(self, logits: torch.Tensor, continuation: Any) -> torch.Tensor:
            result = super()._logprobs(logits, continuation)
            if self.is_longer:
                result[0, 1] = -1.0  # a third token before the two
            return result

    problem = Drifts()
    solver = PPO(problem, kl={"weight": 0.0}, vf_loss_coef=0.0)
    batch = _batch(problem, solver)
    problem.is_longer = True
    loss, metrics = solver.step(batch)
    loss.backward()
    assert float(metrics["unmatched_share"]) == 0.5
    words = problem.attacker.logits.grad[[1, 2, 4, 5]]
    # Only "you sat", the second probe, has a gradient; the words of the first fall with the rest.
    assert words[0] == pytest.approx(words[1])
    assert words[2].sign() == words[3].sign() != words[0].sign()


@pytest.mark.parametrize(("dtype", "scores_again"), [("float32", False), ("bfloat16", True)])
def test_old_log_probabilities_come_by_the_path_of_the_loss(
    models: Models, dtype: str, scores_again: bool
) -> None:
    problem = hf_problem(models, attacker_options={**SHORT, "language_model": {"dtype": dtype}})
    assert problem.samples_as_it_scores != scores_again
    solver = PPO(problem)
    graphs = ASTSampler(problem, PROMPTS, tree_width=2).eval_rollouts(PROMPTS)
    batch = PPO.collate_fn(solver.flatten_all(graphs))
    with torch.no_grad():
        now_BT = problem.token_values(batch.prefix, batch.suffix).logprobs_BT
    mask_BT = batch.tokens["probe_mask"]
    gap = (now_BT[:, : mask_BT.shape[1]] - batch.tokens["old_logprobs"])[mask_BT].abs().max()
    # Another batch rounds differently; another path differs by more.
    assert gap < (1e-2 if scores_again else 1e-4)
