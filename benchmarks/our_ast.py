"""The measured AST workload, and its implementation by the `ast_dpo` trainer of `nip_astra`."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measuring import Cost, wait_for_gpu
from plain_ast import Pair, PlainAst
from tensordict import TensorDict
from torch import Tensor

from nip_astra.language_models.sources import load_tokenizer, resolve_model
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.scenario_base.conversation.prompts import read_prompts
from nip_astra.trainers.ast.base import AstTrainer

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Dtypes of the attacker; the target is always float32."""


def rate(completions: list[str]) -> list[float]:
    """Cheap scores that differ from text to text."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


@dataclass(frozen=True)
class Setting:
    """The scenario and the amount of work.

    Attributes
    ----------
    context : int
        Approximate number of tokens of an opening prompt.
    turn_tokens : int
        Tokens of every turn of attacker and target.
    pairs : int
        Pairs per optimizer step of ours; the baseline uses one pair per step.
    """

    scenario: str = "smollm2_chat"
    width: int = 2
    depth: int = 3
    episodes: int = 2
    context: int = 64
    turn_tokens: int = 32
    pairs: int = 4
    temperature: float = 1.0
    seed: int = 0
    device: str = "cpu"

    def resolve(self, precision: str = "fp32", *more: str) -> ResolvedExperiment:
        """Resolve the experiment of both implementations; `precision` affects only ours."""
        values: dict[str, object] = {
            "attacker.language_model.dtype": DTYPES[precision],
            "target.language_model.dtype": "float32",
            "tree_width": self.width,
            "tree_depth": self.depth,
            "scorer": "{_type: python, function: 'our_ast:rate'}",
            "reward.likelihood_model": "target",
        }
        turn: dict[str, float] = {"temperature": self.temperature}
        if self.temperature > 0:
            turn |= {"top_k": 50, "top_p": 0.9}
        turn |= dict.fromkeys(("max_new_tokens", "min_new_tokens"), self.turn_tokens)
        for role, (name, value) in itertools.product(("attacker", "target"), turn.items()):
            values[f"{role}.{name}"] = value
        overrides = [
            *(f"ast_chat.{name}={value}" for name, value in values.items()),
            f"training.minibatch_size={self.pairs}",
            f"training.num_episodes_per_experience={self.episodes}",
            "training.batch_order=by_episode",
            # Every group of siblings yields a pair.
            "ast_dpo.min_reward_difference=0",
            "ast_dpo.min_chosen_score=null",
            *more,
        ]
        return resolve_experiment(
            trainer="ast_dpo", scenario=self.scenario, overrides=overrides, seed=self.seed
        )

    def openings(self, resolved: ResolvedExperiment) -> list[str]:
        """The scenario's prompts, concatenated and cut into openings of equal length."""
        section, scenario_dir = getattr(resolved.hyper_params, resolved.kind), resolved.scenario_dir
        model = resolve_model(section.attacker.language_model.model, scenario_dir)
        tokenizer = load_tokenizer(*model)
        prompts = read_prompts(section.prompts.train, scenario_dir)
        words = itertools.cycle(" ".join(prompts).split())
        openings = []
        for _ in range(self.episodes):
            opening = next(words)
            while len(tokenizer.encode(opening, add_special_tokens=False)) < self.context:
                opening += f" {next(words)}"
            openings.append(opening)
        return openings


class Rollout(NamedTuple):
    """The episodes of an iteration and their training samples."""

    tree: RolloutTree
    samples: list[Sample]


class OurAst:
    """Rollouts and updates of the `ast_dpo` trainer."""

    def __init__(
        self, resolved: ResolvedExperiment, prompts: Sequence[str], device: str = "cpu"
    ) -> None:
        num_threads = torch.get_num_threads()
        trainer = prepare_experiment(resolved, num_threads=num_threads, device=device).trainer
        assert isinstance(trainer, AstTrainer)
        self.trainer = trainer
        trainer.rollouts.prompts = prompts

    @torch.no_grad()
    def play(self, iteration: int) -> Rollout:
        """Play the episodes of one iteration."""
        tree = self.trainer.rollouts.play(iteration)
        return Rollout(tree, self.trainer.digest(tree).samples)

    def learn(self, samples: Sequence[Sample], iteration: int = 0) -> None:
        """Take the optimizer steps of one iteration."""
        self.step_through(self.trainer.batches(samples, iteration=iteration, epoch=0))

    def step_through(self, batches: Iterable[TensorDict]) -> Cost:
        """Take one optimizer step per batch, and return the cost.

        Process-wide settings of the trainer's loop, such as keeping freed memory, stay in effect
        afterwards, so that the baseline also benefits.
        """
        policy = self.trainer.policy
        with ExitStack() as stack:
            self.trainer._build_train_context(stack)
            started = time.perf_counter()
            with policy.counting() as count:
                for batch in batches:
                    self.trainer._optimizer_step([batch])
            wait_for_gpu()
            seconds = time.perf_counter() - started
        return Cost(seconds, count.forwarded, count.scored)

    def iterate(self, number: int, *, learns: bool) -> dict[str, Cost]:
        """Cost of the rollout of an iteration, and of the iteration if it `learns`.

        The baseline runs the reference in its updates, so the reference's time is excluded from the
        rollout here.
        """
        models = [self.trainer.attacker.language_model, self.trainer.sampler.target.language_model]
        started = time.perf_counter()
        with models[0].counting() as attacker, models[1].counting() as target:
            tree, samples = self.play(number)
        seconds = time.perf_counter() - started
        unique = tree.num_unique_tokens["attacker"] + tree.num_unique_tokens["target"]
        forwarded = attacker.forwarded + target.forwarded
        cost = {"rollout": Cost(seconds - tree.seconds["reference"], forwarded, unique)}
        if learns:
            self.learn(samples, number)
            cost["iteration"] = Cost(time.perf_counter() - started)
        return cost


def pairs_of_few_trees(samples: Sequence[Sample], num_pairs: int) -> list[Sample]:
    """The first samples in order of their trees, and within a tree by level."""
    return sorted(samples, key=lambda sample: int(sample["episode"]))[:num_pairs]


def as_pairs(samples: Sequence[Sample]) -> list[Pair]:
    """Convert the trainer's samples to pairs of the baseline."""
    names = ("context", "chosen", "rejected")
    return [Pair(*(sample[name].tolist() for name in names)) for sample in samples]


# ---- agreement


class Deviation(NamedTuple):
    """Deviation between the two implementations on the same pairs.

    Attributes
    ----------
    loss : float
        Absolute difference of the mean loss.
    gradient : float
        Maximum difference of a gradient element, relative to the largest element of all gradients.
    gradient_of_worst_parameter : float
        The same relative to the largest element of the parameter's own gradient, maximum over
        parameters.
    """

    loss: float
    gradient: float
    gradient_of_worst_parameter: float


# Cancellation: in float32, the baseline's own gradient of one parameter differs by 2e-4 from its
# float64 value (SmolLM2, adapter).
LARGEST_DEVIATION = Deviation(loss=1e-5, gradient=1e-4, gradient_of_worst_parameter=1e-3)
"""Tolerances in float32; a larger deviation is a bug in one implementation."""


def update_deviation(ours: OurAst, plain: PlainAst, samples: Sequence[Sample]) -> Deviation:
    """Compare loss and gradients on the same pairs and weights; weights are restored."""
    mine, theirs = list(ours.trainer.policy.parameters()), plain.parameters()
    before = [parameter.detach().clone() for parameter in mine]
    _perturb(mine, theirs)
    loss_ours = ours.trainer.loss(ours.trainer.collate_fn(samples)).loss
    torch.autograd.backward(loss_ours)
    loss_plain = 0.0
    for pair in as_pairs(samples):
        loss = plain.loss(pair) / len(samples)
        torch.autograd.backward(loss)
        loss_plain += float(loss.detach())
    differences, sizes = _compare_gradients(mine, theirs)
    with torch.no_grad():
        for parameter, baseline, value in zip(mine, theirs, before, strict=True):
            parameter.copy_(value)
            baseline.copy_(value)
    ours.trainer.optimizer.zero_grad(set_to_none=True)
    plain.optimizer.zero_grad(set_to_none=True)
    return Deviation(
        abs(float(loss_ours.detach()) - loss_plain),
        float(differences.max() / sizes.max()),
        float((differences / sizes).max()),
    )


@torch.no_grad()
def _perturb(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Move both policies equally off the reference: a fresh adapter has zero gradient."""
    generator = torch.Generator().manual_seed(0)
    for parameter, baseline in zip(mine, theirs, strict=True):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.01 * noise.to(parameter))
        baseline.copy_(parameter)


def _compare_gradients(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Maximum gradient difference of each parameter, and its maximum in the baseline."""
    differences, sizes = [], []
    for parameter, baseline in zip(mine, theirs, strict=True):
        assert parameter.grad is not None
        assert baseline.grad is not None
        differences.append((parameter.grad - baseline.grad).abs().max())
        sizes.append(baseline.grad.abs().max())
    smallest = torch.finfo(torch.float32).tiny
    return torch.stack(differences), torch.stack(sizes).clamp(min=smallest)
