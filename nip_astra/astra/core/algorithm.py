"""The interface of algorithms: samples from episodes, batches of samples, and their loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from torch import Tensor

from nip_astra.astra.core.aliases import one_problem
from nip_astra.astra.core.common import ActionT, Batch, StateT, Step
from nip_astra.astra.core.sampler import Graph
from nip_astra.astra.core.system import System
from nip_astra.errors import ConfigurationError
from nip_astra.parameters.parameters_base import SubParameters


class Algorithm(ABC, Generic[StateT, ActionT, Step, Batch]):
    """Converts rollouts to a loss. Subclasses implement `flatten`, `collate_fn` and `step`.

    Attributes
    ----------
    system : System
        The trained problem; also called `problem`.
    modules_lr_factor : float
        Learning rate of further modules, as a multiple of the attacker's.
    """

    modules_lr_factor: float = 1.0

    def __init__(
        self,
        system: System[StateT, ActionT] | None = None,
        *,
        problem: System[StateT, ActionT] | None = None,
    ) -> None:
        self.system: System[StateT, ActionT] = one_problem(self, system, problem)

    @property
    def problem(self) -> System[StateT, ActionT]:
        """Another name of `system`."""
        return self.system

    @abstractmethod
    def flatten(self, graph: Graph[StateT, ActionT]) -> Sequence[Step]:
        """Return the training samples of an episode."""

    @staticmethod
    @abstractmethod
    def collate_fn(batch: Sequence[Step]) -> Batch:
        """Return one batch of samples."""

    @abstractmethod
    def step(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss of a batch, a mean over its samples, and metrics."""

    def flatten_all(self, graphs: Sequence[Graph[StateT, ActionT]]) -> list[Step]:
        """Return the training samples of an iteration's episodes; by default of each separately."""
        return [step for graph in graphs for step in self.flatten(graph)]

    def _refuse(self, parameters: SubParameters, *names: str) -> None:
        """Raise for parameters of the registered trainer that this class does not support."""
        plain = type(parameters)()
        given = [n for n in names if getattr(parameters, n, None) != getattr(plain, n, None)]
        if given:
            raise ConfigurationError(
                f"{type(self).__name__} does not support {given[0]}="
                f"{getattr(parameters, given[0])}. Leave it out, or use the registered trainer."
            )

    def state(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint; empty by default."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
