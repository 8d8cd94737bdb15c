"""Adapters between user objects and the loop of the registered trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.aliases import is_overridden
from nip_astra.astra.core.graphs import graphs_of, tree_of
from nip_astra.astra.core.sampler import Sampler
from nip_astra.astra.core.system import System
from nip_astra.astra.methods.ast_system import ASTSampler
from nip_astra.astra.methods.text_rollouts import rater_of_system, seeded
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import CheckpointError, ModelLoadError
from nip_astra.language_models.base import Learner, TokenCount, TokenModel
from nip_astra.rl_objectives.reductions import LossOutput
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scorers.base import Scorer as RegisteredKind
from nip_astra.utils.seeding import SeedPart, derive_seed

ROLE_NAMES = ("attacker", "tester", "auditor")
"""Names of the attacker in different versions."""


@dataclass
class CountedBatch:
    """A batch of an algorithm, of which the loop knows only the number of samples."""

    content: Any
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_tokens(self) -> int | None:
        """Return the number of tokens that the loss averages; None if it averages samples."""
        count: int | None = getattr(self.content, "num_tokens", None)
        return count


class AlgorithmAdapter:
    """Adapts an algorithm on graphs to trees: samples and batches of one experience."""

    def __init__(self, algorithm: Algorithm[Any, Any, Any, Any]) -> None:
        self.algorithm = algorithm

    def flatten(self, tree: RolloutTree) -> list[Any]:
        """Return the training samples of a rollout."""
        return list(self.algorithm.flatten_all(graphs_of(tree)))

    def collate_fn(self, samples: Sequence[Any]) -> CountedBatch:
        """Return one batch of samples."""
        return CountedBatch(self.algorithm.collate_fn(list(samples)), len(samples))

    def step(
        self, batch: CountedBatch, step: Callable[[Any], tuple[Tensor, Mapping[Any, Any]]]
    ) -> LossOutput:
        """Return the loss of a batch, and its numeric metrics.

        Parameters
        ----------
        step : callable
            The algorithm's `step`, or its replacement.
        """
        loss, logs = step(batch.content)
        return LossOutput(
            loss,
            {
                str(name): torch.as_tensor(value, device=loss.device).detach()
                for name, value in logs.items()
                if isinstance(value, (int, float))
                or (isinstance(value, Tensor) and value.numel() == 1)
            },
        )


class HasSampler(Protocol):
    """A harness or a trainer, whose sampler may be replaced at any time."""

    sampler: Sampler[Any, Any]


class Player:
    """Adapts the sampler of a harness or trainer to the loop's requests for rollouts.

    Parameters
    ----------
    owner : HasSampler
        Its sampler is read at each request. It samples trees together if it can, else one episode
        at a time.
    evaluates : bool
        Whether episodes are for an evaluation.
    """

    def __init__(self, owner: HasSampler, *, evaluates: bool = False) -> None:
        self.owner = owner
        self.evaluates = evaluates
        self._system = self.sampler.system
        self._agents = agents_of(self._system)

    @property
    def sampler(self) -> Sampler[Any, Any]:
        """The current sampler."""
        return self.owner.sampler

    @property
    def agents(self) -> Mapping[str, Any]:
        """The agents of the sampled problem by role, with their token counts."""
        if self._system is not self.sampler.system:
            self._system = self.sampler.system
            self._agents = agents_of(self._system)
        return self._agents

    @property
    def attacker(self) -> Any:
        """The agent that is trained."""
        return self.agents["attacker"]

    @property
    def target(self) -> Any:
        """The agent under test."""
        return self.agents["target"]

    @property
    def reference(self) -> Any:
        """The agent that defines ordinary text."""
        return self.agents["reference"]

    @property
    def scorer(self) -> RegisteredKind | None:
        """The rater of the problem's texts, with its cache."""
        scorer: RegisteredKind | None = rater_of_system(self.sampler.system)
        return scorer

    def sample(
        self,
        prompts: Sequence[str],
        *,
        tree_width: int,
        tree_depth: int,
        key: tuple[SeedPart, ...],
        first_episode: int = 0,
    ) -> RolloutTree:
        """Sample one episode per prompt; see `TreeSampler.sample`."""
        sampler = self.sampler
        if self.evaluates:
            # The loop has the depth of the first sampler, which may be replaced.
            tree_depth = getattr(sampler, "tree_depth", tree_depth)
        method = "eval_rollout" if self.evaluates else "rollout"
        if isinstance(sampler, ASTSampler) and not is_overridden(sampler, method, ASTSampler):
            return sampler.sample(
                prompts,
                tree_width=tree_width,
                tree_depth=tree_depth,
                key=key,
                first_episode=first_episode,
            )
        graphs = []
        for number, prompt in enumerate(prompts, start=first_episode):
            # An episode's seed is its own, or all episodes would be one.
            seed = derive_seed(*key, number) % 2**32  # as NumPy takes it
            with seeded(*key, number):
                graphs.append(
                    sampler.eval_rollout(prompt) if self.evaluates else sampler.rollout(seed)
                )
        return tree_of(graphs)


class ProblemModel(Learner):
    """The attacker of a text problem, of which the loop knows only the parameters."""

    def __init__(self, system: System[Any, Any], *, learns: bool) -> None:
        self.system = system
        self.learns = learns
        self.tokenizer = getattr(system, "tokenizer", None)
        self.context_window = 0
        self.end_ids = ()
        self.token_count = TokenCount()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.learns:
            yield from (p for p in self.system.parameters() if p.requires_grad)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.system.parameters())

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_state(directory / "parameters", [p.detach() for p in self.parameters()])

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        saved, own = load_state(directory / "parameters"), list(self.parameters())
        if [tuple(p.shape) for p in saved] != [tuple(p.shape) for p in own]:
            raise CheckpointError(
                f"{directory} has {len(saved)} tensors, but {type(self.system).__name__} has "
                f"{len(own)}, or other shapes. Resume with the saved problem."
            )
        for parameter, value in zip(own, saved, strict=True):
            parameter.copy_(value)

    def save_pretrained(self, directory: Path) -> None:
        save_problem(self.system, directory)

    @classmethod
    def load(
        cls, parameters: Any, *, device: torch.device, scenario_dir: Path | None, trainable: bool
    ) -> TokenModel:
        raise ModelLoadError(_OF_TEXTS)

    def frozen_reference(self) -> TokenModel:
        raise ModelLoadError(_OF_TEXTS)


_OF_TEXTS = (
    "a text problem has no tokens. Call its own methods, such as get_attacker_logprobs, or use "
    "HFASTProblem."
)


@dataclass
class ProblemAgent:
    """A role in a text problem."""

    role: str
    language_model: TokenModel
    num_truncated_contexts: int = 0


def agents_of(system: System[Any, Any]) -> Mapping[str, Any]:
    """Return a problem's agents by role."""
    own = getattr(system, "agents", None)
    if isinstance(own, Mapping):
        return own
    return {
        role: ProblemAgent(role, ProblemModel(system, learns=role == "attacker"))
        for role in ("attacker", "target", "reference")
    }


def save_problem(system: System[Any, Any], directory: Path) -> None:
    """Write a problem's attacker and tokenizer in the layout of transformers."""
    whole = getattr(system, "save_pretrained", None)
    if callable(whole):
        whole(directory)
        return
    check_can_be_saved(system)
    _savable(system, ROLE_NAMES).save_pretrained(directory)
    tokenizer = _savable(system, ("tokenizer", *(f"{name}_tokenizer" for name in ROLE_NAMES)))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def check_can_be_saved(system: System[Any, Any]) -> None:
    """Raise if a problem's attacker cannot be saved."""
    saves_itself = callable(getattr(system, "save_pretrained", None))
    if not saves_itself and _savable(system, ROLE_NAMES) is None:
        raise CheckpointError(
            f"{type(system).__name__} has no attribute attacker with save_pretrained. Set "
            "self.attacker and self.tokenizer to objects of transformers, or define "
            "save_pretrained(directory)."
        )


def _savable(system: System[Any, Any], names: Sequence[str]) -> Any:
    found = (getattr(system, name, None) for name in names)
    return next((one for one in found if hasattr(one, "save_pretrained")), None)
