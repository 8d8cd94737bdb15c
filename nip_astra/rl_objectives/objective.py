"""The base of the losses of agents with networks, as TorchRL loss modules.

Shapes: B frames, C channels, V channels that an agent sees, A agents.
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
from nip_astra.parameters.trainers import LossCriticType
from nip_astra.rl_objectives.episode_gae import EpisodeGae
from nip_astra.rl_objectives.values import value_losses

LOSS_PREFIX = "loss_"
"""Entries of a loss module's output whose names begin with this are summed and minimised."""

EPISODE_KEY = "episode"
"""Entry of a batch, long: which episode a frame is of."""

Frames = Mapping[Any, Tensor]
"""Tensors of frames, [B, ...], by the names that they have in a TensorDict: `frames["round"]`,
`frames["agents", "advantage"]`. To look one up costs a fraction of what it costs there."""


def frames_of(batch: TensorDictBase) -> Frames:
    """The tensors of a TensorDict [B] as a plain mapping."""
    return dict(batch.items(include_nested=True, leaves_only=True))


class FrameRows(Mapping[Any, Tensor]):
    """Some rows of frames, by number or a slice; each tensor is taken on first use."""

    def __init__(self, frames: Frames, rows: Tensor | slice) -> None:
        self._frames = frames
        self._rows = rows
        self._taken: dict[Any, Tensor] = {}

    def __getitem__(self, key: Any) -> Tensor:
        found = self._taken.get(key)
        if found is None:
            whole, rows = self._frames[key], self._rows
            found = whole[rows] if isinstance(rows, slice) else whole.index_select(0, rows)
            self._taken[key] = found
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)


class PolicyEvaluation(Protocol):
    """Log-probabilities and entropies of moves; see `scenario_base.agent_actions`."""

    logprobs_B: Tensor
    entropies_B: Tensor


class AgentModules(Protocol):
    """The agents of a protocol, as `scenario_base.combined.CombinedAgents` gives them."""

    names: tuple[str, ...]
    needs_logits: bool

    def __getitem__(self, name: str) -> Any:
        """One agent."""

    def policy(self, name: str, frames: Any) -> Any:
        """The logits of an agent's moves."""

    def evaluate(self, name: str, frames: Any, output: Any = None) -> Any:
        """A `PolicyEvaluation` of the moves that an agent made."""

    def values(self, name: str, frames: Any) -> Tensor:
        """An agent's values, [B]."""

    def policy_and_values(self, name: str, frames: Any) -> tuple[Any, Tensor]:
        """Both, from one pass of the body that they share."""

    def is_acting(self, name: str, frames: Any) -> Tensor:
        """The frames in which an agent may move, [B] bool."""

    def number(self, name: str) -> int:
        """An agent's place in the dimension A."""

    def logit_reward(self, name: str, output: Any, frames: Any) -> Tensor | None:
        """What an agent's logits earn whatever is drawn from them, [B] with grad, or None."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights."""


class PolicyView(NamedTuple):
    """An agent's policy on those frames of a minibatch in which it acts.

    Attributes
    ----------
    frames : Frames
        The frames.
    evaluation : PolicyEvaluation
        Of the moves made in them, with grad.
    is_acting_B : Tensor or None
        bool, frames that count; None for all. On the CPU the others are left out; elsewhere they
        are kept and masked, because to pick frames a host waits for its device.
    number : int
        The agent's place in the dimension A.
    output : PolicyOutput
        The logits that the evaluation is of.
    """

    frames: Frames
    evaluation: PolicyEvaluation
    is_acting_B: Tensor | None
    number: int
    output: Any

    def of_agent(self, key: str) -> Tensor:
        """The agent's part of `("agents", key)` of shape [B, A] or [B, A, 1], as [B]."""
        values_B: Tensor = self.frames["agents", key][:, self.number]
        return values_B.squeeze(-1) if values_B.ndim == 2 else values_B

    def mean(self, values_B: Tensor) -> Tensor:
        """The mean over the frames that count, 0 where there is none."""
        if self.is_acting_B is None:
            return values_B.mean()
        kept_B = self.is_acting_B.to(values_B.dtype)
        return (values_B * kept_B).sum() / kept_B.sum().clamp(min=1)

    def figures(self, *values_B: Tensor) -> tuple[Tensor, ...]:
        """Means to be logged, without grad; NaN where the agent acts in no frame."""
        values_XB = torch.stack([values.detach() for values in values_B])
        if self.is_acting_B is None:
            return values_XB.mean(1).unbind()
        kept_B = self.is_acting_B.to(values_XB.dtype)
        return ((values_XB * kept_B).sum(1) / kept_B.sum()).unbind()


def value_loss_of_agent(
    number: int,
    values_B: Tensor,
    batch: Frames,
    *,
    loss_type: LossCriticType,
    clip_value: float | None,
) -> Tensor:
    """The mean value loss of an agent over all frames; see `values.value_losses`."""
    return value_losses(
        values_B,
        batch["agents", "value_target"][:, number, 0],
        loss_type,
        old_values_B=batch["agents", "value"][:, number, 0],
        clip_value=clip_value,
    ).mean()


AgentLosses = Callable[[str, Frames], dict[str, Tensor]]
"""Losses of an agent in a minibatch, and what to log; see `Objective.agent_losses`."""


class Objective(LossModule):
    """Losses of the agents of a protocol. A subclass gives `agent_losses`, or `forward`.

    With `agent_losses`, each agent learns from its own, and only while it is its turn to learn. A
    subclass with a `forward` of its own is trained like any loss module of TorchRL: the sum of the
    entries `loss_*` that it gives is minimised, and it reads whole batches, `unread_keys` included.

    The weights of `agents` are the agents' own, not copies. Losses of agents that share no weights
    are independent; where `loss_parts` divides them, a trainer may compute them at the same time.

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
    """Whether minibatches must be of whole episodes, told apart by `EPISODE_KEY`."""
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
        if not self.has_own_forward() and _gives_nothing(type(self)):
            raise ConfigurationError(
                f"the objective {type(self).__name__} was to be built, but its class has no "
                "losses. It must give agent_losses(name, batch), the losses of one agent, or "
                "forward(batch), a TensorDict of scalars of which those named loss_* are "
                "minimised. Define one of them."
            )
        self.agents = agents
        if self.has_own_forward():
            self.unread_keys = ()
        elif agents.needs_logits:
            # What an agent's logits earn depends on those of others.
            self.unread_keys = ("next",)

    @property
    def functional(self) -> bool:
        """False: weights stay in the modules."""
        return False

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """An agent's losses in a minibatch.

        Parameters
        ----------
        batch : Frames
            Frames [B], after `value_estimator`.

        Returns
        -------
        dict[str, Tensor]
            Scalars. Those named `loss_*` have grad, are summed and minimised; the others have none
            and are logged, but where they are NaN.
        """
        raise NotImplementedError

    def forward(self, batch: TensorDict) -> TensorDict:
        """The scalars `loss_*_<agent>` and `<agent>/*` of all agents."""
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
        """Add to the agents' gradients those of their losses, and give these by agent, detached.

        An objective in which agents foresee each other's learning overrides this.

        Parameters
        ----------
        names : Sequence[str]
            Agents that learn.
        """
        frames = frames_of(batch)
        by_agent = {name: self._backward(self.agent_losses, name, frames) for name in names}
        self.finish_minibatch(by_agent)
        return by_agent

    def loss_parts(self, name: str) -> tuple[AgentLosses, ...]:
        """Functions that share no weights, and whose losses together are `agent_losses`.

        Where an objective has them, several processes may compute them at once, so they must
        change nothing but gradients and draw no random numbers. None here: then one process
        computes all losses.
        """
        return ()

    @classmethod
    def has_own_forward(cls) -> bool:
        """Say whether `forward` is a subclass's own, and so what is to be minimised.

        Not where a class further down gives other gradients.
        """
        of_forward, of_gradients = (
            _definer(cls, name) for name in ("forward", "compute_gradients")
        )
        return of_forward is not Objective and issubclass(of_forward, of_gradients)

    def has_parts(self) -> bool:
        """Say whether `loss_parts` may stand for the losses of all agents.

        Not where a subclass has losses or gradients of its own, and parts that are inherited.
        """
        cls = type(self)
        if cls.has_own_forward():
            return False
        has_own_gradients = cls.compute_gradients is not Objective.compute_gradients
        of_losses, of_parts = (_definer(cls, name) for name in ("agent_losses", "loss_parts"))
        if has_own_gradients or not issubclass(of_parts, of_losses):
            return False
        return all(self.loss_parts(name) for name in self.agents.names)

    def compute_part(self, name: str, part: int, frames: Frames) -> dict[str, Tensor]:
        """Add to gradients those of one of `loss_parts`, and give the losses, detached."""
        return self._backward(self.loss_parts(name)[part], name, frames)

    def _backward(self, losses: AgentLosses, name: str, batch: Frames) -> dict[str, Tensor]:
        entries = losses(name, batch)
        total = sum_of_losses(entries.items())
        if total.requires_grad:
            torch.autograd.backward(total)
        return {key: value.detach() for key, value in entries.items()}

    def finish_minibatch(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Called with what the losses of a minibatch were, by agent; does nothing here."""

    def finish_iteration(self) -> None:
        """Called after the last minibatch of an iteration; does nothing here."""

    def policy_view(self, name: str, batch: Frames) -> PolicyView:
        """Evaluate an agent's policy on the frames of a minibatch in which it acts."""
        frames, number = batch, self.agents.number(name)
        is_acting_B: Tensor | None = self.agents.is_acting(name, batch)
        assert is_acting_B is not None
        if is_acting_B.device.type == "cpu":
            rows = is_acting_B.nonzero().flatten()
            if len(rows) == 0:
                # Networks are spared an empty batch: one frame stays, which does not count.
                frames, is_acting_B = (
                    FrameRows(batch, torch.zeros(1, dtype=torch.long)),
                    is_acting_B[:1],
                )
            else:
                frames = batch if len(rows) == len(is_acting_B) else FrameRows(batch, rows)
                is_acting_B = None
        output = self.agents.policy(name, frames)
        evaluation = self.agents.evaluate(name, frames, output)
        return PolicyView(frames, evaluation, is_acting_B, number, output)

    def policy_view_and_values(self, name: str, batch: Frames) -> tuple[PolicyView, Tensor]:
        """The view of the policy, and the agent's values of all frames, [B], with grad.

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
        """`loss_logits`, minus what the agent's logits earn by themselves, where they do.

        An objective adds it to its losses: a policy gradient learns nothing from a reward that is
        the same whatever is drawn from the logits.
        """
        if not self.agents.needs_logits:
            return {}
        reward_B = self.agents.logit_reward(name, view.output, view.frames)
        return {} if reward_B is None else {"loss_logits": -view.mean(reward_B)}

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
            When another estimator or an unknown option is asked for.
        """
        value_type = value_type or ValueEstimators.GAE
        hyperparams.pop("device", None)
        unknown = sorted(set(hyperparams) - {"gamma", "lmbda"})
        if value_type not in (ValueEstimators.GAE, ValueEstimators.MAGAE) or unknown:
            asked = f"with {', '.join(unknown)}" if unknown else f"{value_type}"
            raise ConfigurationError(
                f"a value estimator {asked} was asked for, but objectives of agents in a protocol "
                "estimate advantages by ValueEstimators.GAE with gamma and lmbda. Leave the rest "
                "out, or write the entries of ('agents', 'advantage') with a module of your own."
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
        """What is neither an agent's weight nor an agent's buffer, for a checkpoint."""
        return {
            key: value
            for key, value in self.state_dict().items()
            if not key.startswith(("agents.", "_value_estimator."))
        }

    def load_own_state(self, state: dict[str, Tensor]) -> None:
        """Take up what `own_state` gave.

        Raises
        ------
        CheckpointError
            When it is that of another objective.
        """
        own = self.own_state().keys()
        if state.keys() != own:
            raise CheckpointError(
                f"the state of {type(self).__name__} was to be read from a checkpoint, but that "
                f"holds {sorted(state) or 'nothing'} in place of {sorted(own) or 'nothing'}. "
                "Resume with the trainer that wrote it."
            )
        self.load_state_dict(state, strict=False)


def _gives_nothing(cls: type[Objective]) -> bool:
    names = ("agent_losses", "compute_gradients")
    return all(_definer(cls, name) is Objective for name in names)


def _definer(cls: type, name: str) -> type:
    """The class that a method comes from.

    TorchRL wraps the `forward` of every class of which an object is made, so that a class may hold
    one that another wrote.
    """
    method = inspect.unwrap(getattr(cls, name))
    holders = [base for base in cls.__mro__ if name in vars(base)]
    return [base for base in holders if inspect.unwrap(vars(base)[name]) is method][-1]


def sum_of_losses(entries: Iterable[tuple[str, Tensor]]) -> Tensor:
    """The sum of the entries whose names begin with `loss_`."""
    losses = [value for key, value in entries if key.startswith(LOSS_PREFIX)]
    return functools.reduce(operator.add, losses) if losses else torch.zeros(())
