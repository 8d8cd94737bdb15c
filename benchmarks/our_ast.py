"""The work that is measured, and its way through `nip_astra`: its registered `ast_dpo` trainer."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measuring import Spent, wait_for_gpu
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
"""What the attacker computes in; the target answers in float32 always."""


def rate(completions: list[str]) -> list[float]:
    """Scores that cost nothing, and differ from text to text."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


@dataclass(frozen=True)
class Setting:
    """How much is played and learned, and in which scenario.

    Attributes
    ----------
    context : int
        Tokens of an opening prompt, about.
    turn_tokens : int
        Tokens of every turn, of attacker and target alike.
    pairs : int
        Pairs in one optimizer step of ours; the plain way takes one.
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
        """The experiment of both ways; the plain one computes in float32 whatever the precision."""
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
            # Each group of siblings gives a pair.
            "ast_dpo.min_reward_difference=0",
            "ast_dpo.min_chosen_score=null",
            *more,
        ]
        return resolve_experiment(
            trainer="ast_dpo", scenario=self.scenario, overrides=overrides, seed=self.seed
        )

    def openings(self, resolved: ResolvedExperiment) -> list[str]:
        """Prompts of the scenario one after the other, cut into openings of equal length."""
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


class Played(NamedTuple):
    """The episodes of an iteration, and what they teach."""

    tree: RolloutTree
    samples: list[Sample]


class OurAst:
    """A trainer ready to play and learn."""

    def __init__(
        self, resolved: ResolvedExperiment, prompts: Sequence[str], device: str = "cpu"
    ) -> None:
        num_threads = torch.get_num_threads()
        trainer = prepare_experiment(resolved, num_threads=num_threads, device=device).trainer
        assert isinstance(trainer, AstTrainer)
        self.trainer = trainer
        trainer.rollouts.prompts = prompts

    @torch.no_grad()
    def play(self, iteration: int) -> Played:
        """Play the episodes of one iteration."""
        tree = self.trainer.rollouts.play(iteration)
        return Played(tree, self.trainer.digest(tree).samples)

    def learn(self, samples: Sequence[Sample], iteration: int = 0) -> None:
        """Take the optimizer steps of one iteration."""
        self.step_through(self.trainer.batches(samples, iteration=iteration, epoch=0))

    def step_through(self, batches: Iterable[TensorDict]) -> Spent:
        """Take one optimizer step a batch, and say what that took.

        What the trainer's own loop sets up in the process, such as the keeping of freed memory,
        stays set afterwards: the plain way gains by it too.
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
        return Spent(seconds, count.forwarded, count.scored)

    def iterate(self, number: int, *, learns: bool) -> dict[str, Spent]:
        """What an iteration takes, or its rollout alone.

        The plain way runs the reference in its updates, so what it takes here is no part of the
        rollout.
        """
        models = [self.trainer.attacker.language_model, self.trainer.sampler.target.language_model]
        started = time.perf_counter()
        with models[0].counting() as attacker, models[1].counting() as target:
            tree, samples = self.play(number)
        seconds = time.perf_counter() - started
        unique = tree.num_unique_tokens["attacker"] + tree.num_unique_tokens["target"]
        forwarded = attacker.forwarded + target.forwarded
        spent = {"rollout": Spent(seconds - tree.seconds["reference"], forwarded, unique)}
        if learns:
            self.learn(samples, number)
            spent["iteration"] = Spent(time.perf_counter() - started)
        return spent


def pairs_of_few_trees(samples: Sequence[Sample], num_pairs: int) -> list[Sample]:
    """Training samples, those of one tree before those of the next, the first levels first."""
    return sorted(samples, key=lambda sample: int(sample["episode"]))[:num_pairs]


def as_pairs(samples: Sequence[Sample]) -> list[Pair]:
    """Samples of the trainer as pairs of the plain way."""
    names = ("context", "chosen", "rejected")
    return [Pair(*(sample[name].tolist() for name in names)) for sample in samples]


# ---- agreement


class Deviation(NamedTuple):
    """How far the two ways differ on the same pairs.

    Attributes
    ----------
    loss : float
        Absolute difference of the mean loss.
    gradient : float
        Largest difference of an element of the gradient, relative to its largest element.
    gradient_of_worst_parameter : float
        The same within the parameter where it is largest.
    """

    loss: float
    gradient: float
    gradient_of_worst_parameter: float


# Of one parameter's gradient the plain way itself is 2e-4 off in float32, by a comparison with
# float64 (SmolLM2, adapter): there is cancellation in it.
LARGEST_DEVIATION = Deviation(loss=1e-5, gradient=1e-4, gradient_of_worst_parameter=1e-3)
"""In float32; more is a fault of one of the two ways."""


def update_deviation(ours: OurAst, plain: PlainAst, samples: Sequence[Sample]) -> Deviation:
    """Compare loss and gradients on the same pairs and weights, which are as before afterwards."""
    mine, theirs = list(ours.trainer.policy.parameters()), plain.parameters()
    before = [parameter.detach().clone() for parameter in mine]
    _step_aside(mine, theirs)
    loss_ours = ours.trainer.loss(ours.trainer.collate_fn(samples)).loss
    torch.autograd.backward(loss_ours)
    loss_plain = 0.0
    for pair in as_pairs(samples):
        loss = plain.loss(pair) / len(samples)
        torch.autograd.backward(loss)
        loss_plain += float(loss.detach())
    differences, sizes = _compare_gradients(mine, theirs)
    with torch.no_grad():
        for parameter, other, value in zip(mine, theirs, before, strict=True):
            parameter.copy_(value)
            other.copy_(value)
    ours.trainer.optimizer.zero_grad(set_to_none=True)
    plain.optimizer.zero_grad(set_to_none=True)
    return Deviation(
        abs(float(loss_ours.detach()) - loss_plain),
        float(differences.max() / sizes.max()),
        float((differences / sizes).max()),
    )


@torch.no_grad()
def _step_aside(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Move both policies to one place off the reference: a fresh adapter has no gradient."""
    generator = torch.Generator().manual_seed(0)
    for parameter, other in zip(mine, theirs, strict=True):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.01 * noise.to(parameter))
        other.copy_(parameter)


def _compare_gradients(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Each parameter's largest difference, and its largest element in the plain way."""
    differences, sizes = [], []
    for parameter, other in zip(mine, theirs, strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        differences.append((parameter.grad - other.grad).abs().max())
        sizes.append(other.grad.abs().max())
    smallest = torch.finfo(torch.float32).tiny
    return torch.stack(differences), torch.stack(sizes).clamp(min=smallest)
