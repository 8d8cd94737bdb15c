"""The same work through `nip_astra`: its registered `ast_dpo` trainer, built as a run builds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from ast_work import BETA, Files, Setting
from measuring import Stopwatch
from plain_ast import Pair, PlainAst
from tensordict import TensorDict
from torch import Tensor

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.run import prepare_experiment
from nip_astra.trainers.ast_base import AstTrainer

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""What the attacker computes in; the target answers in float32 always."""


class Played(NamedTuple):
    """The episodes of an iteration, and what they teach."""

    tree: RolloutTree
    samples: list[Sample]


class OurAst:
    """A trainer ready to play and learn, with a clock.

    Parameters
    ----------
    overrides : Sequence[str]
        Assignments `a.b=c` over what the scenario says.
    """

    def __init__(
        self, setting: Setting, files: Files, precision: str = "fp32", overrides: Sequence[str] = ()
    ) -> None:
        resolved = resolve_experiment(
            trainer="ast_dpo",
            scenario=str(files.scenario),
            overrides=[
                f"ast_chat.attacker.language_model.dtype={DTYPES[precision]}",
                "ast_chat.target.language_model.dtype=float32",
                f"ast_dpo.beta={BETA}",
                *overrides,
            ],
            seed=setting.seed,
        )
        trainer = prepare_experiment(
            resolved, device=setting.device, num_threads=torch.get_num_threads()
        ).trainer
        assert isinstance(trainer, AstTrainer)
        self.trainer, self.precision = trainer, precision
        self.watch = Stopwatch(setting.device)

    def play(self, iteration: int) -> Played:
        """Play the episodes of one iteration."""
        with self.watch.phase("rollout"), torch.no_grad():
            tree = self.trainer.rollouts.play(iteration)
            experience = Played(tree, self.trainer.digest(tree).samples)
        for part, spent in tree.seconds.items():
            self.watch.add(part, spent)
        # The plain way runs the reference in its updates, so here its time counts there too.
        self.watch.add("rollout", -tree.seconds["reference"])
        self.watch.add("update", tree.seconds["reference"])
        return experience

    def learn(self, samples: Sequence[Sample], iteration: int) -> None:
        """Take the optimizer steps of one iteration."""
        self.step_through(self.trainer.batches(samples, iteration=iteration, epoch=0))

    def step_through(self, batches: Iterable[TensorDict]) -> None:
        """Take one optimizer step a batch; phases that the trainer times itself are added up.

        What the trainer's own loop sets up in the process, such as the keeping of freed memory,
        stays set afterwards: the plain way gains by it too.
        """
        with ExitStack() as stack:
            self.trainer._build_train_context(stack)
            stack.enter_context(self.watch.phase("update"))
            for batch in batches:
                for name, value in self.trainer._optimizer_step([batch]).items():
                    if name.startswith("time/"):
                        self.watch.add(name.removeprefix("time/"), value)

    def forwarded(self) -> dict[str, int]:
        """Positions that each model has read so far, by role."""
        models = {role: getattr(self.trainer.sampler, role) for role in ROLES}
        return {role: agent.language_model.token_count.forwarded for role, agent in models.items()}


ROLES = ("attacker", "target", "reference")


def samples_of_few_trees(experience: Played, num_pairs: int) -> list[Sample]:
    """Training samples, those of one tree before those of the next, the first levels first."""
    tree = experience.tree
    episodes = tree.nodes["episode"].view(-1, tree.tree_width)[:, 0].tolist()
    episode_of = {
        tuple(context): episode for context, episode in zip(tree.contexts, episodes, strict=True)
    }
    ordered = sorted(
        experience.samples, key=lambda sample: episode_of[tuple(sample["context"].tolist())]
    )
    return ordered[:num_pairs]


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
