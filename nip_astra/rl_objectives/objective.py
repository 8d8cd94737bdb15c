"""Base class of the objectives of agents that are networks, as a TorchRL loss module.

Shapes: B frames, E environments, T consecutive rounds, A agents.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule, ValueEstimators

from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.parameters.trainers import RlTrainerParameters
from nip_astra.rl_objectives.advantages import gae, reward_to_go, whiten
from nip_astra.rl_objectives.values import value_losses

LOSS_PREFIX = "loss_"
"""Entries of a loss module's output with this prefix are summed and minimised."""

EPISODE_KEY = "episode"
"""Entry of a batch, long: the episode number of each frame."""

Frames = Mapping[Any, Tensor]
"""Tensors of frames, [B, ...], by TensorDict key, `frames["agents", "advantage"]`; lookups are
faster than in a TensorDict."""

MIN_ADVANTAGE_STD = 1e-6
"""Lower bound of the standard deviation that a minibatch's advantages are divided by."""


def frames_of(batch: TensorDictBase) -> Frames:
    """Return the tensors of a TensorDict [B] as a plain mapping."""
    return dict(batch.items(include_nested=True, leaves_only=True))


class FrameRows(Mapping[Any, Tensor]):
    """A selection of frames by index or slice; each tensor is sliced on first use."""

    def __init__(self, frames: Frames, rows: Tensor | slice) -> None:
        self._frames = frames
        self._rows = rows
        self._taken: dict[Any, Tensor] = {}

    def __getitem__(self, key: Any) -> Tensor:
        selected = self._taken.get(key)
        if selected is None:
            frames, rows = self._frames[key], self._rows
            # A slice is a view; an index copies.
            selected = frames[rows] if isinstance(rows, slice) else frames.index_select(0, rows)
            self._taken[key] = selected
        return selected

    def __iter__(self) -> Iterator[Any]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)


class AgentModules(Protocol):
    """The agents of a protocol, see `scenario_base.protocol.combined.CombinedAgents`."""

    names: tuple[str, ...]
    needs_logits: bool

    def __getitem__(self, name: str) -> Any: ...
    def policy(self, name: str, frames: Any) -> Any: ...
    def evaluate(self, name: str, frames: Any, output: Any = None) -> Any: ...
    def values(self, name: str, frames: Any) -> Tensor: ...
    def policy_and_values(self, name: str, frames: Any) -> tuple[Any, Tensor]: ...
    def is_acting(self, name: str, frames: Any) -> Tensor: ...
    def number(self, name: str) -> int: ...
    def logit_reward(self, name: str, output: Any, frames: Any) -> Tensor | None: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class PolicyView(NamedTuple):
    """An agent's policy evaluated on the frames of a minibatch in which the agent acts.

    Attributes
    ----------
    frames : Frames
        The frames.
    evaluation : PolicyEvaluation
        `logprobs_B` and `entropies_B` of the moves made in them, with grad.
    is_acting_B : Tensor or None
        bool, frames that count; None for all. On the CPU the others are left out; elsewhere they
        are masked, because picking frames makes the host wait for its device.
    number : int
        The agent's place in the dimension A.
    output : PolicyOutput
        The logits that are evaluated.
    """

    frames: Frames
    evaluation: Any
    is_acting_B: Tensor | None
    number: int
    output: Any

    def of_agent(self, key: str) -> Tensor:
        """Return the agent's column of `("agents", key)`, which is [B, A] or [B, A, 1], as [B]."""
        values_B: Tensor = self.frames["agents", key][:, self.number]
        return values_B.squeeze(-1) if values_B.ndim == 2 else values_B

    def mean(self, values_B: Tensor) -> Tensor:
        """Return the mean over the frames that count; 0 without any."""
        if self.is_acting_B is None:
            return values_B.mean()
        kept_B = self.is_acting_B.to(values_B.dtype)
        return (values_B * kept_B).sum() / kept_B.sum().clamp(min=1)

    def figures(self, *values_B: Tensor) -> tuple[Tensor, ...]:
        """Return means to log, without grad; NaN if the agent acts in no frame."""
        values_XB = torch.stack([values.detach() for values in values_B])
        if self.is_acting_B is None:
            return values_XB.mean(1).unbind()
        kept_B = self.is_acting_B.to(values_XB.dtype)
        return ((values_XB * kept_B).sum(1) / kept_B.sum()).unbind()


def whiten_advantages(values_B: Tensor, mask_B: Tensor | None = None) -> Tensor:
    """Normalise a minibatch's advantages to mean 0 and deviation 1; see `MIN_ADVANTAGE_STD`."""
    return whiten(values_B, mask_B, epsilon=0.0, min_std=MIN_ADVANTAGE_STD)


AgentLosses = Callable[[str, Frames], dict[str, Tensor]]
"""Losses and metrics of an agent in a minibatch; see `Objective.agent_losses`."""


class Objective(LossModule):
    """Losses of the agents of a protocol; subclasses define `agent_losses`, or `forward`.

    With `agent_losses`, each agent learns from its own losses, and only while its schedule lets it.
    A subclass with its own `forward` is trained like any loss module of TorchRL: the sum of its
    entries `loss_*` is minimised, and it reads whole batches, `unread_keys` included.

    The weights of `agents` are the agents' own, not copies.

    Parameters
    ----------
    agents : AgentModules
        The agents, a plain module.

    Attributes
    ----------
    unread_keys : tuple
        Entries of a batch that `agent_losses` does not read; a trainer leaves them out of
        minibatches.
    """

    @dataclass
    class _AcceptedKeys:
        advantage: Any = ("agents", "advantage")
        value: Any = ("agents", "value")
        value_target: Any = ("agents", "value_target")
        reward: Any = ("agents", "reward")
        done: Any = "done"
        terminated: Any = "terminated"

    default_value_estimator = ValueEstimators.GAE
    reads_episodes: ClassVar[bool] = False
    """Whether minibatches must consist of whole episodes, identified by `EPISODE_KEY`."""
    unread_keys: tuple[Any, ...] = (
        "next",
        ("agents", "message_logits"),
        ("agents", "decision_logits"),
    )
    in_keys: Sequence[Any] = ()
    out_keys: Sequence[Any] = ()
    agents: AgentModules

    def __init__(self, agents: AgentModules) -> None:
        super().__init__()
        has_losses = any(
            _definer(type(self), method) is not Objective
            for method in ("agent_losses", "compute_gradients")
        )
        if not self.has_own_forward() and not has_losses:
            raise ConfigurationError(
                f"the objective {type(self).__name__} has no losses. Define agent_losses(name, "
                "batch), the losses of one agent, or forward(batch), a TensorDict of scalars."
            )
        self.agents = agents
        if self.has_own_forward():
            self.unread_keys = ()
        elif agents.needs_logits:
            # The reward of an agent's logits depends on those of others.
            self.unread_keys = ("next",)

    @property
    def functional(self) -> bool:
        """False: weights stay in the modules."""
        return False

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """Return an agent's scalar losses on a minibatch of frames [B], after `value_estimator`.

        Those named `loss_*` have grad, are summed and minimised; the others have none and are
        logged, except where they are NaN.
        """
        raise NotImplementedError

    def forward(self, batch: TensorDict) -> TensorDict:
        """Return the scalars `loss_*_<agent>` and `<agent>/*` of all agents."""
        frames = frames_of(batch)
        by_agent = {name: self.agent_losses(name, frames) for name in self.agents.names}
        self.finish_minibatch(by_agent)
        return TensorDict(
            {
                f"{key}_{name}" if key.startswith(LOSS_PREFIX) else f"{name}/{key}": value
                for name, entries in by_agent.items()
                for key, value in entries.items()
            }
        )

    def compute_gradients(
        self, batch: TensorDict, names: Sequence[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Add the gradients of the losses of the agents that learn; return the losses, detached.

        An objective in which agents anticipate each other's learning overrides this.
        """
        frames = frames_of(batch)
        by_agent = {name: self._backward(self.agent_losses, name, frames) for name in names}
        self.finish_minibatch(by_agent)
        return by_agent

    def loss_parts(self, name: str) -> tuple[AgentLosses, ...]:
        """Return functions that share no weights, and whose losses together are `agent_losses`.

        Several processes may compute them at once, so they must change nothing but gradients and
        draw no random numbers. With none, one process computes all losses.
        """
        return ()

    @classmethod
    def has_own_forward(cls) -> bool:
        """Return whether a subclass's `forward` is minimised (no later `compute_gradients`)."""
        of_forward, of_gradients = (
            _definer(cls, name) for name in ("forward", "compute_gradients")
        )
        return of_forward is not Objective and issubclass(of_forward, of_gradients)

    def has_parts(self) -> bool:
        """Return whether `loss_parts` were defined for the current `agent_losses` of all agents."""
        cls = type(self)
        if cls.has_own_forward():
            return False
        has_own_gradients = cls.compute_gradients is not Objective.compute_gradients
        of_losses, of_parts = (_definer(cls, name) for name in ("agent_losses", "loss_parts"))
        if has_own_gradients or not issubclass(of_parts, of_losses):
            return False
        return all(self.loss_parts(name) for name in self.agents.names)

    def compute_part(self, name: str, part: int, frames: Frames) -> dict[str, Tensor]:
        """Add the gradients of one of `loss_parts`, and return its losses, detached."""
        return self._backward(self.loss_parts(name)[part], name, frames)

    def _backward(self, losses: AgentLosses, name: str, batch: Frames) -> dict[str, Tensor]:
        entries = losses(name, batch)
        total = sum_of_losses(entries.items())
        if total.requires_grad:
            torch.autograd.backward(total)
        return {key: value.detach() for key, value in entries.items()}

    def finish_minibatch(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Hook, called with the losses of a minibatch by agent."""

    def finish_iteration(self) -> None:
        """Hook, called after the last minibatch of an iteration."""

    def policy_view(self, name: str, batch: Frames) -> PolicyView:
        """Evaluate an agent's policy on the frames of a minibatch in which it acts."""
        frames, number = batch, self.agents.number(name)
        is_acting_B: Tensor | None = self.agents.is_acting(name, batch)
        assert is_acting_B is not None
        if is_acting_B.device.type == "cpu":
            rows = is_acting_B.nonzero().flatten()
            if len(rows) == 0:
                # Networks get no empty batch: one frame stays, which does not count.
                frames = FrameRows(batch, torch.zeros(1, dtype=torch.long))
                is_acting_B = is_acting_B[:1]
            else:
                frames = batch if len(rows) == len(is_acting_B) else FrameRows(batch, rows)
                is_acting_B = None
        output = self.agents.policy(name, frames)
        evaluation = self.agents.evaluate(name, frames, output)
        return PolicyView(frames, evaluation, is_acting_B, number, output)

    def policy_view_and_values(self, name: str, batch: Frames) -> tuple[PolicyView, Tensor]:
        """Return the policy view, and the agent's values on all frames, [B], with grad.

        A body that policy and value function share runs once.
        """
        agent = self.agents[name]
        if not agent.shares_body:
            return self.policy_view(name, batch), self.agents.values(name, batch)
        output, values_B = self.agents.policy_and_values(name, batch)
        evaluation = self.agents.evaluate(name, batch, output)
        is_acting_B = self.agents.is_acting(name, batch)
        view = PolicyView(batch, evaluation, is_acting_B, self.agents.number(name), output)
        return view, values_B

    def logit_losses(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        """Return `loss_logits`, minus the reward on the agent's logits, if there is one.

        A policy gradient learns nothing from a reward that does not depend on the drawn moves.
        """
        if not self.agents.needs_logits:
            return {}
        reward_B = self.agents.logit_reward(name, view.output, view.frames)
        return {} if reward_B is None else {"loss_logits": -view.mean(reward_B)}

    def value_loss(
        self, name: str, values_B: Tensor, batch: Frames, rl: RlTrainerParameters
    ) -> Tensor:
        """Return an agent's mean value loss over all frames; see `values.value_losses`."""
        number = self.agents.number(name)
        return value_losses(
            values_B,
            batch["agents", "value_target"][:, number, 0],
            rl.loss_critic_type,
            old_values_B=batch["agents", "value"][:, number, 0],
            clip_value=rl.clip_value,
        ).mean()

    def make_value_estimator(
        self, value_type: ValueEstimators | None = None, **hyperparams: Any
    ) -> Objective:
        """Set `value_estimator` to generalised advantage estimation of all agents.

        Parameters
        ----------
        value_type : ValueEstimators, optional
            GAE, or MAGAE, which is the same here.
        **hyperparams : float
            `gamma` and `lmbda`, discount and decay; see `RlTrainerParameters`.

        Raises
        ------
        ConfigurationError
            For another estimator or an unknown option.
        """
        value_type = value_type or ValueEstimators.GAE
        hyperparams.pop("device", None)
        unknown = sorted(set(hyperparams) - {"gamma", "lmbda"})
        if value_type not in (ValueEstimators.GAE, ValueEstimators.MAGAE) or unknown:
            raise ConfigurationError(
                f"unknown value estimator {', '.join(unknown) or value_type}. Use "
                "ValueEstimators.GAE with gamma and lmbda, or write ('agents', 'advantage') with a "
                "module of your own."
            )
        self.value_type = value_type
        self._value_estimator = EpisodeGae(
            self.agents.names,
            self.agents.values,
            gamma=float(hyperparams.get("gamma", 0.99)),
            lmbda=float(hyperparams.get("lmbda", 0.95)),
        )
        return self

    def own_state(self) -> dict[str, Tensor]:
        """Return the state beyond the agents' weights and buffers, for a checkpoint."""
        return {
            key: value
            for key, value in self.state_dict().items()
            if not key.startswith(("agents.", "_value_estimator."))
        }

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        """Restore the state of `own_state`.

        Raises
        ------
        CheckpointError
            When it is the state of another objective.
        """
        names = self.own_state().keys()
        if state.keys() != names:
            raise CheckpointError(
                f"the checkpoint holds {sorted(state) or 'nothing'} for {type(self).__name__}, "
                f"which needs {sorted(names) or 'nothing'}. Resume with the trainer that wrote it."
            )
        self.load_state_dict(state, strict=False)


def _definer(cls: type, name: str) -> type:
    """Return the class that defines a method; TorchRL wraps inherited `forward`s in subclasses."""
    method = inspect.unwrap(getattr(cls, name))
    holders = [base for base in cls.__mro__ if name in vars(base)]
    return [base for base in holders if inspect.unwrap(vars(base)[name]) is method][-1]


def sum_of_losses(entries: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Sum the entries whose names begin with `loss_`."""
    losses = [value for key, value in entries if key.startswith(LOSS_PREFIX)]
    return functools.reduce(operator.add, losses) if losses else torch.zeros(())


# ---- advantages of batches of rounds


def ends_of(batch: TensorDict) -> Tensor:
    """Return where the episode or the agent's part of it ended, [E, T, A]."""
    ends_ETA: Tensor = batch["next", "terminated"] | batch["next", "has_decided"]
    return ends_ETA


def reward_to_go_of(parts: Sequence[TensorDict], *, gamma: float) -> Tensor:
    """Compute `reward_to_go` of a batch, [E, T, A, 1].

    `parts` are the batch [E, T] and, if there are any, the rounds played after it; `gamma` is the
    discount per round.
    """
    rewards_ETA = torch.cat([part["next", "agents", "reward"] for part in parts], dim=1)
    ends_ETA = torch.cat([ends_of(part) for part in parts], dim=1)
    to_go_ETA = reward_to_go(rewards_ETA.squeeze(-1), ends_ETA, gamma=gamma)
    return to_go_ETA[:, : parts[0].shape[1], :, None]


class EpisodeGae(nn.Module):
    """Module that writes values, advantages and value targets into a batch.

    Each value function runs once on all frames of the batch [E, T], and once on those after the
    last round where any episode continues there. An episode ends for an agent at
    `("next", "terminated")`, or at its own `("next", "has_decided")`.

    Parameters
    ----------
    agent_names : Sequence[str]
        In the order of the dimension A.
    values : Callable
        Called with a name and frames [B]; returns the values of that agent, [B].
    gamma, lmbda : float
        See `gae`.
    """

    def __init__(
        self,
        agent_names: Sequence[str],
        values: Callable[[str, TensorDict], Tensor],
        *,
        gamma: float,
        lmbda: float,
    ) -> None:
        super().__init__()
        self.agent_names = tuple(agent_names)
        self.values = values
        self.gamma = gamma
        self.lmbda = lmbda

    @torch.no_grad()
    def forward(self, batch: TensorDict) -> TensorDict:
        """Write `("agents", "value" | "advantage" | "value_target")`, each [E, T, A, 1]."""
        value_ETA = self._values(batch.flatten()).reshape(*batch.batch_size, -1)
        if bool(batch["next", "terminated"][:, -1].all()):
            last_value_EA = torch.zeros_like(value_ETA[:, -1])
        else:
            names = [name for name in batch.keys() if name not in ("next", "agents")]  # noqa: SIM118
            last_value_EA = self._values(batch["next"][:, -1].select(*names))
        estimate = gae(
            batch["next", "agents", "reward"].squeeze(-1).to(value_ETA.dtype),
            value_ETA,
            gamma=self.gamma,
            lam=self.lmbda,
            bootstrap_E=last_value_EA,
            is_end_EH=ends_of(batch),
        )
        batch["agents", "value"] = value_ETA.unsqueeze(-1)
        batch["agents", "advantage"] = estimate.advantages.unsqueeze(-1)
        batch["agents", "value_target"] = estimate.returns.unsqueeze(-1)
        return batch

    def _values(self, frames_B: TensorDict) -> Tensor:
        return torch.stack([self.values(name, frames_B) for name in self.agent_names], dim=-1)
