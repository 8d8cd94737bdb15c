"""Collection of experience and losses, for custom loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from nip_astra.astra.core.algorithm import Algorithm
from nip_astra.astra.core.common import ActionT, Batch, StateT, Step
from nip_astra.astra.core.counts import check_count
from nip_astra.astra.core.sampler import Sampler
from nip_astra.astra.logging import ASTRAWandbLogger, logger
from nip_astra.astra.training.adapters import AlgorithmAdapter, Player
from nip_astra.astra.training.configuration import TrainingConfiguration
from nip_astra.errors import ConfigurationError
from nip_astra.trainers.ast.rollouts import Rollouts
from nip_astra.trainers.language_model_base import batches_of

DATALOADER_OPTIONS = ("batch_size", "shuffle")
"""Allowed keys of `dataloader_kwargs`."""


class ExperienceLoader(Generic[Batch]):
    """Batches of samples, like torch's DataLoader: any number of passes, and a length.

    The episodes are sampled once. If batches are shuffled, each pass has its own order; `next`
    continues a pass that it starts itself.

    Parameters
    ----------
    epoch : Callable
        Returns the batches of a pass, by its number.
    num_samples : int
        Number of samples.
    batch_size : int
        Maximum samples per batch.
    """

    def __init__(
        self, epoch: Callable[[int], Iterator[Batch]], *, num_samples: int, batch_size: int
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self._epoch = epoch
        self._num_passes = 0
        self._current: Iterator[Batch] | None = None

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        number, self._num_passes = self._num_passes, self._num_passes + 1
        return self._epoch(number)

    def __next__(self) -> Batch:
        self._current = self._current or iter(self)
        return next(self._current)


class LossAndMetrics(NamedTuple):
    """The result of a step; the oldest versions returned the loss alone.

    Attributes
    ----------
    loss : Tensor
        Scalar, with gradient.
    metrics : dict
        Plain numbers by name.
    """

    loss: Tensor
    metrics: dict[str, Any]

    def backward(self) -> None:
        """Add the gradients of the loss."""
        torch.autograd.backward(self.loss)


class Harness(Generic[StateT, ActionT, Step, Batch]):
    """The harness of the registered trainers for user objects.

        for batch in harness.experience():
            loss, logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The attributes `sampler`, `algorithm`, `num_episodes_per_experience` and `dataloader_kwargs`,
    and methods of sampler and algorithm, may be replaced: they are read at each call. The batches
    of one experience are those of the algorithm at its start.

    Parameters
    ----------
    environment : Sampler
        Plays episodes; also `sampler`.
    algorithm : Algorithm
        Computes samples, batches and losses.
    num_episodes_per_experience : int
        Episodes per call of `experience`.
    use_wandb : bool
        Whether `log_current_step` sends to W&B, with the arguments of `wandb.init` in
        `wandb_kwargs`.
    dataloader_kwargs : Mapping, optional
        `batch_size` and `shuffle`; by default those of `config`.
    config : TrainingConfiguration, optional
        Size and order of batches, and seed.
    batch_size : int, optional
        That of `dataloader_kwargs`, as in older versions.
    """

    def __init__(
        self,
        environment: Sampler[StateT, ActionT] | None = None,
        algorithm: Algorithm[StateT, ActionT, Step, Batch] | None = None,
        num_episodes_per_experience: int = 32,
        use_wandb: bool = False,
        wandb_kwargs: Mapping[str, Any] | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        sampler: Sampler[StateT, ActionT] | None = None,
        config: TrainingConfiguration | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.sampler: Sampler[StateT, ActionT] = one_sampler(environment, sampler)
        if algorithm is None:
            raise ConfigurationError("a harness needs an algorithm, for instance DPO(problem).")
        self.algorithm = algorithm
        self.num_episodes_per_experience = num_episodes_per_experience
        self.dataloader_kwargs = dict(dataloader_kwargs or {})
        if batch_size is not None:
            self.dataloader_kwargs["batch_size"] = batch_size
        self._config = config or TrainingConfiguration()
        self.check_parts()
        self.use_wandb = use_wandb
        self.wandb = ASTRAWandbLogger(wandb_kwargs) if use_wandb else None
        self.player = Player(self)
        self._num_experiences = 0

    @property
    def environment(self) -> Sampler[StateT, ActionT]:
        """Another name of `sampler`."""
        return self.sampler

    @environment.setter
    def environment(self, sampler: Sampler[StateT, ActionT]) -> None:
        self.sampler = sampler

    @property
    def rollouts(self) -> Rollouts:
        """Rollouts with the current sampler."""
        sampler = self.sampler
        return Rollouts(
            self.player,  # type: ignore[arg-type]  # offers what is asked of a TreeSampler
            getattr(sampler, "prompts", None) or [""],
            num_episodes=self.num_episodes_per_experience,
            tree_width=getattr(sampler, "tree_width", 1),
            tree_depth=getattr(sampler, "tree_depth", 1),
            seed=self._config.seed,
        )

    def check_parts(self) -> None:
        """Raise unless the current parts belong together.

        Raises
        ------
        ConfigurationError
            For sampler and algorithm of different problems, and for invalid numbers and options.
        """
        check_count(
            "num_episodes_per_experience",
            self.num_episodes_per_experience,
            what="episodes played",
        )
        _checked(self.dataloader_kwargs)
        _check_one_problem(self.sampler, self.algorithm)

    def batches(
        self,
        samples: Sequence[Any],
        collate_fn: Callable[[Sequence[Any]], Any],
        *,
        key: tuple[int, int, int],
    ) -> Iterator[Any]:
        """Yield the batches of a pass over samples; `key` is seed, iteration and pass."""
        size = self.batch_size
        if self.dataloader_kwargs.get("shuffle", True):
            return batches_of(
                samples, collate_fn, size=size, order=self._config.batch_order, key=key
            )
        return (collate_fn(samples[i : i + size]) for i in range(0, len(samples), size))

    @property
    def batch_size(self) -> int:
        """Maximum samples per batch."""
        return int(self.dataloader_kwargs.get("batch_size", self._config.minibatch_size))

    def experience(self, seed: int | None = None) -> ExperienceLoader[Batch]:
        """Sample episodes, and return batches of their samples in random order, for any number of
        passes; `len` is the number of batches.

        Parameters
        ----------
        seed : int, optional
            Equal seeds give equal experience for equal attackers; the episodes of one call differ.
            Without a seed, each call continues the sequence of the last.
        """
        self.check_parts()
        iteration = 0
        if seed is None:
            iteration, self._num_experiences = self._num_experiences, self._num_experiences + 1
            seed = self._config.seed
        # Collates the samples that it made, also if the harness gets another one meanwhile.
        algorithm = self.algorithm
        with torch.no_grad():
            tree = self.rollouts.play(iteration, seed=seed)
            tree.nodes["credit"] = tree.nodes["reward"]
            samples: list[Any] = AlgorithmAdapter(algorithm).flatten(tree)
        logger.debug("%d samples of %d episodes", len(samples), self.num_episodes_per_experience)

        def epoch(number: int) -> Iterator[Batch]:
            return self.batches(samples, algorithm.collate_fn, key=(seed, iteration, number))

        return ExperienceLoader(epoch, num_samples=len(samples), batch_size=self.batch_size)

    def step(self, batch: Batch) -> LossAndMetrics:
        """Return the loss of a batch, with gradient, and metrics."""
        loss, logs = self.algorithm.step(batch)
        plain = {
            name: float(value.detach()) if isinstance(value, Tensor) else value
            for name, value in logs.items()
        }
        return LossAndMetrics(loss, plain)

    def log_current_step(self, current_logs: Mapping[str, Any]) -> None:
        """Write metrics to the log, and to W&B if enabled."""
        if self.use_wandb and self.wandb is not None:
            self.wandb.log(current_logs)
        shown = ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in current_logs.items()
        )
        logger.info("%s", shown)


def one_sampler(environment: Any, sampler: Any) -> Any:
    """Return the sampler, which has two argument names; raise unless exactly one is given."""
    given = [one for one in (environment, sampler) if one is not None]
    if len(given) != 1 or not isinstance(given[0], Sampler):
        what = "none" if not given else "two" if len(given) > 1 else f"a {type(given[0]).__name__}"
        raise ConfigurationError(
            f"give one sampler, as environment or sampler, got {what}; for instance "
            "ASTSampler(problem, prompts)."
        )
    return given[0]


def _check_one_problem(sampler: Any, algorithm: Any) -> None:
    """Raise if sampler and algorithm have different problems."""
    for one in (sampler, algorithm):
        if not hasattr(one, "system"):
            raise ConfigurationError(
                f"{type(one).__name__} has no problem. Call super().__init__(problem) in its "
                "__init__."
            )
    played, trained = sampler.system, algorithm.system
    if played is not trained:
        raise ConfigurationError(
            f"{type(sampler).__name__} plays one problem, a {type(played).__name__}, but "
            f"{type(algorithm).__name__} trains another, a {type(trained).__name__}, so that what "
            "is learnt would never be played. Make both of the same object: problem = ...; "
            "ASTSampler(problem, prompts); DPO(problem)."
        )


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(options) - set(DATALOADER_OPTIONS))
    if unknown:
        raise ConfigurationError(
            f"unknown option {unknown[0]!r} in dataloader_kwargs. "
            f"Valid: {' and '.join(DATALOADER_OPTIONS)}."
        )
    if "batch_size" in options:
        check_count("batch_size", options["batch_size"], what="samples in a batch")
    return options
