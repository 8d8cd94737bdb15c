"""How several processes train the agents of a protocol.

Shapes: E environments, T rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.checkpoints.run_state import global_generators, set_global_generators
from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.distributed.team import LOST, told_as_lost
from nip_astra.errors import LostProcessError
from nip_astra.trainers.protocol.sharded_agents import ShardedAgents

if TYPE_CHECKING:
    from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer

T = TypeVar("T")


def lead(trainer: TensorDictRlTrainer, work: Callable[[], T]) -> T | None:
    """Have the leader alone prepare, play or measure, and all know how far the run is.

    Returns
    -------
    T or None
        What the work gave, in the leader; None in the others.
    """
    team, sharded = trainer.team, trainer.learner.sharded
    result = team.lead(work, {} if sharded is None else sharded.optimizers.handlers())
    if team.size > 1:
        told = team.from_leader(trainer.state.to_dict() if team.is_leader else {})
        if not team.is_leader:
            trainer.state = trainer.State.from_dict(told)
    return result


def prepare_together(trainer: TensorDictRlTrainer, prepare: Callable[[], None]) -> None:
    """Have the leader prepare the agents, and all take its weights and statistics."""
    lead(trainer, prepare)
    team, agents = trainer.team, trainer.agents
    team.copy_from_leader([*agents.parameters(), *agents.buffers()])


def divide_agents(trainer: TensorDictRlTrainer) -> None:
    """Leave each process a part of the agents and optimizers, where the settings ask for it."""
    if trainer.team.size == 1 or trainer.settings.sharding == "none":
        return
    sharded = ShardedAgents(trainer.agents, trainer.optimizers, trainer.team)
    trainer.learner.take_parts(sharded)
    trainer.optimizers = sharded.optimizers


def learn_together(
    trainer: TensorDictRlTrainer, batch: TensorDict, iteration: int
) -> tuple[dict[str, Tensor], int]:
    """What `Learner.learn` gives; afterwards the leader plays with what was learned."""
    sharded = trainer.learner.sharded
    if sharded is None:
        return trainer.learner.learn(batch, iteration)
    with told_as_lost(trainer.team, only_if=LOST):
        found = trainer.learner.learn(batch, iteration)
        sharded.gather()
    return found


def collect_together(trainer: TensorDictRlTrainer) -> TensorDict:
    """The leader's batch [E, T]; in the others, what the loss reads of it."""
    batch = lead(trainer, trainer.collect)
    team = trainer.team
    if team.size == 1:
        assert batch is not None
        return batch
    told: dict[str, Any] | None = None
    if batch is not None:
        read = batch.exclude(*getattr(trainer.loss_module, "unread_keys", ()))
        told = {
            "batch_size": list(read.batch_size),
            "entries": dict(read.items(include_nested=True, leaves_only=True)),
        }
    told = team.from_leader(told)
    if batch is None:
        assert told is not None
        batch = TensorDict({}, batch_size=told["batch_size"])
        for key, value in told["entries"].items():
            batch[key] = value.to(trainer.train_environment.device)
    return batch


@contextmanager
def saved_if_one_ends(trainer: TensorDictRlTrainer) -> Iterator[None]:
    """Where another process ends within the block, go back to its beginning and save.

    An iteration is learned from whole or not at all, so that the run can go on exactly. Of agents
    that are divided a part is lost then, and the last checkpoint stands.
    """
    is_divided = trainer.learner.sharded is not None
    if trainer.team.size == 1 or not trainer.team.is_leader or is_divided:
        yield
        return
    weights = [*trainer.agents.parameters(), *trainer.agents.buffers()]
    copies = [weight.detach().clone() for weight in weights]
    parts = pack_state({name: part.save() for name, part in trainer.kept_parts().items()})
    generators, state = global_generators(), trainer.state.to_dict()
    try:
        yield
    except LostProcessError:
        if trainer.state.iteration == state["iteration"]:
            with torch.no_grad():
                for weight, copy in zip(weights, copies, strict=True):
                    weight.copy_(copy)
            kept = unpack_state(parts)
            for name, part in trainer.kept_parts().items():
                part.load(kept[name])
            trainer.state = trainer.State.from_dict(state)
            set_global_generators(generators)
        trainer._save_checkpoint()
        raise
